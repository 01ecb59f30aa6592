"""Disk checks for the output folder: free space, file locks, fsync, rename and write speed."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from megalith.doctor.checks import BAD, GOOD, WARN, Check, make_check
from megalith.io import make_subfolder, open_file, sync_file, sync_folder

DISK_BYTES, CHUNK_BYTES = 2**28, 2**24  # written to measure the speed, in chunks
SLOW_DISK = 100e6  # bytes per second
SLOW_SYNC = 500.0  # ms
LOW_SPACE = 10e9  # bytes


def check_disk(folder: Path, measured: bool = True) -> Iterator[Check]:
    """Check the disk that a run writes to. `measured`: also measure its write speed."""
    name, elsewhere = "output disk", "choose another --output"
    try:
        free = shutil.disk_usage(folder).free
        probe_folder = make_subfolder(folder / f".megalith_doctor_{secrets.token_hex(4)}")
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            f"make room, or {elsewhere}" if is_full else "give a folder that exists and is writable: --output"
        )
        yield Check(name, BAD, f"{folder}: {error.strerror or error}", advice)
        return
    too_full = free < 2 * DISK_BYTES
    advice = f"{'no checkpoint fits' if too_full else 'a few checkpoints fill it'}: make room, or {elsewhere}"
    yield make_check(
        name, f"{folder}: {free / 1e9:.1f} GB free", free >= LOW_SPACE, advice, BAD if too_full else WARN
    )
    try:
        yield check_lock(probe_folder / "lock")
        yield check_rename(probe_folder)
        if measured and not too_full:
            yield check_write_speed(probe_folder / "data")
    except OSError as error:
        yield Check(name, BAD, error.strerror or str(error), f"runs cannot save in this folder: {elsewhere}")
    finally:
        shutil.rmtree(probe_folder, ignore_errors=True)


def check_lock(path: Path) -> Check:
    """Check that a file can be locked only once: the lock keeps two jobs out of one folder."""
    name, advice = "disk: lock", "never start two jobs in one folder of this disk"
    first, second = (open_file(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Check(name, GOOD, "a second holder is refused")
    except OSError as error:
        return Check(name, WARN, f"the disk has no file locks ({error.strerror})", advice)
    finally:
        os.close(first)
        os.close(second)
    return Check(name, WARN, "two holders got the same lock", advice)


def check_rename(folder: Path) -> Check:
    """Write, sync and rename a small file, as saving a checkpoint does."""
    start = time.perf_counter()
    small = folder / "small"
    descriptor = open_file(small, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, b"megalith")
        sync_file(descriptor)
    finally:
        os.close(descriptor)
    os.replace(small, folder / "renamed")
    sync_folder(folder)
    elapsed_ms = 1e3 * (time.perf_counter() - start)
    is_intact = not small.exists() and (folder / "renamed").read_bytes() == b"megalith"
    name, finding = "disk: fsync, rename", f"{elapsed_ms:.1f} ms for a small file"
    if not is_intact:
        return Check(name, BAD, finding, "checkpoints are renamed into place: choose another --output")
    advice = "every file of a checkpoint takes this long to sync: a faster disk shortens saves"
    return make_check(name, finding, elapsed_ms < SLOW_SYNC, advice)


def check_write_speed(path: Path) -> Check:
    data = memoryview(os.urandom(CHUNK_BYTES))
    start = time.perf_counter()
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(DISK_BYTES // CHUNK_BYTES):
            written = 0
            while written < CHUNK_BYTES:
                written += os.write(descriptor, data[written:])
        sync_file(descriptor)
    finally:
        os.close(descriptor)
    rate = DISK_BYTES / (time.perf_counter() - start)
    advice = "saves are slow: checkpoint.async_save hides them, a faster disk shortens them"
    return make_check("disk: write", f"{rate / 1e6:,.0f} MB/s, fsync included", rate >= SLOW_DISK, advice)
