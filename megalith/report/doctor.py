"""`megalith doctor`: what this machine has and lacks for training, a line a check, each with what to do.

Checks are of the software (against SUPPORTED), the optional packages, shared memory, the output's disk and the ports;
of the devices and what links them see gpu_health.py.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import re
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from megalith.errors import ConfigError, install_line
from megalith.io import make_subfolder, open_file, sync_file, sync_folder

GOOD, WARN, BAD = "good", "warn", "bad"


@dataclass(frozen=True)
class Check:
    """One line: `state name  found`, and what to do where it is not good."""

    name: str
    state: Literal["good", "warn", "bad"]
    finding: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """Return the fields of `megalith doctor --json`."""
        return {"name": self.name, "state": self.state, "found": self.finding, "do": self.advice}


def make_check(name: str, finding: str, passed: bool, advice: str, otherwise: str = WARN) -> Check:
    """Return a good check if `passed`, else one of state `otherwise` with `advice`."""
    return Check(name, GOOD if passed else otherwise, finding, "" if passed else advice)


def worst_status(checks: Sequence[Check]) -> str:
    return max((check.state for check in checks), key=(GOOD, WARN, BAD).index, default=GOOD)


SUPPORTED = {
    "Python": ((3, 11), (3, 13)),
    "torch": ((2, 11), (2, 13)),
}
"""Oldest that works, and newest that is known to."""

DRIVERS = {
    (12, 6): (560, 28),
    (12, 8): (570, 26),
    (12, 9): (575, 51),
    (13, 0): (580, 65),
}
"""NVIDIA's driver for Linux that came with each CUDA of PyTorch's builds. Within a major version older ones serve, from
MINIMUM_DRIVERS on, but what is compiled at run time (Triton) may ask for this one."""

MINIMUM_DRIVERS = {12: (525, 60), 13: (580, 65)}

EXTRAS = {
    "gpu": (("pynvml",), "GPU health in the log, and what links the GPUs"),
    "tokenizers": (("sentencepiece", "tiktoken"), "the tokenizers of these names"),
    "datasets": (("datasets", "pyarrow"), "preprocessing from the Hugging Face hub and parquet"),
    "hf": (("datasets", "transformers"), "conversations in parquet, imports compared with transformers"),
    "accelerate": (("accelerate", "transformers"), "Accelerate's scripts"),
    "math": (("math_verify",), "the reward math_verify"),
    "evaluate": (("lm_eval",), "benchmarks by `megalith evaluate --tasks`"),
    "log": (("tensorboard", "wandb"), "TensorBoard and Weights & Biases"),
    "remote": (("fsspec", "s3fs", "gcsfs"), "checkpoints and data in object stores"),
}
"""Optional extra → modules, and what for."""


def parse_version(text: str) -> tuple[int, int]:
    """The first two numbers of a version: `2.13.0+cu130` → (2, 13)."""
    major, minor, *_ = [*map(int, re.findall(r"\d+", text)), 0, 0]
    return major, minor


def check_software() -> Iterator[Check]:
    """Python and torch. Of CUDA and its driver see gpu_health.py."""
    for name, found in (("Python", sys.version.split()[0]), ("torch", torch.__version__)):
        oldest, newest = (".".join(map(str, each)) for each in SUPPORTED[name])
        if parse_version(found) < SUPPORTED[name][0]:
            yield Check(name, BAD, found, f"install {name} {oldest} to {newest}")
        else:
            do = f"newer than {newest}, which is known to work: if something fails, install that"
            yield make_check(name, found, parse_version(found) <= SUPPORTED[name][1], do)


def check_driver(driver: str | None, cuda: str) -> Check:
    """Whether NVIDIA's driver serves the CUDA that torch was built with."""
    name, built = "driver", parse_version(cuda)
    if driver is None:
        return Check(
            name,
            WARN,
            f"its version is not told; torch has CUDA {cuda}",
            "install nvidia-smi or nvidia-ml-py",
        )
    found, minimum = f"{driver}, for torch's CUDA {cuda}", MINIMUM_DRIVERS.get(built[0])
    if minimum and parse_version(driver) < minimum:
        least = ".".join(map(str, minimum))
        return Check(name, BAD, found, f"install a driver of {least} or newer, or a torch for an older CUDA")
    came_with = DRIVERS.get(built)
    if came_with and parse_version(driver) < came_with:
        text = ".".join(map(str, came_with))
        return Check(
            name, WARN, found, f"CUDA {cuda} came with {text}: kernels compiled at run time may fail"
        )
    return Check(name, GOOD, found)


def check_packages(has_gpu: bool) -> Iterator[Check]:
    """The optional packages; where one is absent, the line that installs it."""
    for extra, (modules, use) in EXTRAS.items():
        absent = [module for module in modules if importlib.util.find_spec(module) is None]
        there = ", ".join(_with_version(module) for module in modules if module not in absent)
        if not absent:
            yield Check(f"[{extra}]", GOOD, there)
        else:
            found = f"{', '.join(absent)} absent{f'; {there}' if there else ''} ({use})"
            needed = extra == "gpu" and has_gpu
            do = f"{'install' if needed else 'if wanted'}: {install_line(extra)}"
            yield Check(f"[{extra}]", WARN if needed else GOOD, found, do)


def _with_version(module: str) -> str:
    try:
        return f"{module} {version('nvidia-ml-py' if module == 'pynvml' else module)}"
    except PackageNotFoundError:
        return module


SHARED_MEMORY = 2**30  # bytes of /dev/shm below which ranks and data workers run out of it


def check_shared_memory(gpus: int, folder: str = "/dev/shm") -> Check:
    """NCCL's ranks on a machine share memory there, and data workers hand over batches."""
    name = folder
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return Check(name, WARN, error.strerror or str(error), "mount a tmpfs there")
    found = f"{usage.free / 1e9:.1f} of {usage.total / 1e9:.1f} GB free"
    do = "give the container more: docker run --ipc=host or --shm-size=16g; on Kubernetes an emptyDir, medium: Memory"
    return make_check(name, found, usage.free >= SHARED_MEMORY, do, BAD if gpus > 1 else WARN)


DISK_BYTES, CHUNK = 2**28, 2**24  # written and read to measure a disk
SLOW_DISK = 100e6  # bytes a second
SLOW_SYNC = 500.0  # ms
LITTLE_ROOM = 10e9


def check_disk(folder: Path, measured: bool = True) -> Iterator[Check]:
    """Room, lock, fsync, rename and, where `measured`, speed of the disk that a run's output goes to."""
    name, elsewhere = "output disk", "choose another --output"
    try:
        free = shutil.disk_usage(folder).free
        own = make_subfolder(folder / f".megalith_doctor_{secrets.token_hex(4)}")
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        do = (
            f"make room, or {elsewhere}"
            if is_full
            else "name a folder that exists and that you may write: --output"
        )
        yield Check(name, BAD, f"{folder}: {error.strerror or error}", do)
        return
    too_little = free < 2 * DISK_BYTES
    do = f"{'no checkpoint fits' if too_little else 'a few checkpoints fill it'}: make room, or {elsewhere}"
    yield make_check(
        name, f"{folder}: {free / 1e9:.1f} GB free", free >= LITTLE_ROOM, do, BAD if too_little else WARN
    )
    try:
        yield check_lock(own / "lock")
        yield check_rename(own)
        if measured and not too_little:
            yield check_write_speed(own / "data")
    except OSError as error:
        yield Check(name, BAD, error.strerror or str(error), f"runs cannot save here: {elsewhere}")
    finally:
        shutil.rmtree(own, ignore_errors=True)


def check_lock(path: Path) -> Check:
    """Whether a second holder of a file lock is refused: it keeps two jobs out of one folder."""
    name = "disk: lock"
    first, second = (open_file(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    try:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return Check(name, GOOD, "a second holder is refused")
    except OSError as error:
        return Check(
            name, WARN, f"no file locks here ({error.strerror})", "never start two jobs in one folder here"
        )
    finally:
        os.close(first)
        os.close(second)
    return Check(name, WARN, "two holders got the same lock", "never start two jobs in one folder here")


def check_rename(folder: Path) -> Check:
    """A small file put on the disk and renamed, as checkpoints and settings are."""
    started = time.perf_counter()
    small = folder / "small"
    descriptor = open_file(small, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, b"megalith")
        sync_file(descriptor)
    finally:
        os.close(descriptor)
    os.replace(small, folder / "renamed")
    sync_folder(folder)
    took = 1e3 * (time.perf_counter() - started)
    whole = not small.exists() and (folder / "renamed").read_bytes() == b"megalith"
    name, found = "disk: fsync, rename", f"{took:.1f} ms for a small file"
    if not whole:
        return Check(name, BAD, found, "checkpoints are renamed into place: choose another --output")
    return make_check(
        name, found, took < SLOW_SYNC, "each file of a checkpoint waits so long: a faster disk shortens saves"
    )


def check_write_speed(path: Path) -> Check:
    data = memoryview(os.urandom(CHUNK))
    started = time.perf_counter()
    descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    try:
        for _ in range(DISK_BYTES // CHUNK):
            written = 0
            while written < CHUNK:
                written += os.write(descriptor, data[written:])
        sync_file(descriptor)
    finally:
        os.close(descriptor)
    rate = DISK_BYTES / (time.perf_counter() - started)
    do = "saves take long here: checkpoint.async_save hides them, a faster disk shortens them"
    return make_check("disk: write", f"{rate / 1e6:,.0f} MB/s, fsync included", rate >= SLOW_DISK, do)


PORTS = {29500: "MASTER_PORT's default", 29400: "--rdzv-endpoint's default"}


def check_network(environ: Mapping[str, str]) -> Iterator[Check]:
    """Whether the ports of a rendezvous are free, and what the machine's own name resolves to."""
    ports = dict(PORTS)
    if given := environ.get("MASTER_PORT"):
        if (port := _port(given)) is None:
            yield Check("MASTER_PORT", BAD, repr(given), "set it to a port, 1 to 65535, or unset it")
        else:
            ports = {port: "MASTER_PORT"} | ports
    taken = [f"{port} ({use})" for port, use in ports.items() if not _is_free(port)]
    found = f"{', '.join(taken)} in use" if taken else f"{', '.join(map(str, ports))} free"
    yield make_check("ports", found, not taken, "give another: --rdzv-endpoint HOST:PORT, or MASTER_PORT")
    name = socket.gethostname()
    do = "jobs of several machines: name an address that the others reach in --rdzv-endpoint"
    try:
        addresses = sorted({where[0] for *_, where in socket.getaddrinfo(name, None)})
    except OSError as error:
        yield Check("host name", WARN, f"{name} does not resolve ({error.strerror})", do)
        return
    only_here = all(address.startswith("127.") or address == "::1" for address in addresses)
    yield make_check("host name", f"{name} is {', '.join(addresses)}", not only_here, do)


def _port(text: str) -> int | None:
    """None where it is no number of a port."""
    return int(text) if re.fullmatch(r"[0-9]{1,5}", text) and 0 < int(text) < 2**16 else None


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Raises ConfigError for what is not host:port."""
    host, _, digits = endpoint.rpartition(":")
    if not host or (port := _port(digits)) is None:
        raise ConfigError(f"--reach is {endpoint!r}; give host:port, the port 1 to 65535")
    return host.removeprefix("[").removesuffix("]"), port  # of IPv6: [::1]:29500


def check_reachable(endpoint: str) -> Check:
    """Whether something listens at host:port that this machine reaches."""
    host, port = parse_endpoint(endpoint)
    try:
        started = time.perf_counter()
        with socket.create_connection((host, port), timeout=5):
            took = 1e3 * (time.perf_counter() - started)
        return Check(f"reach {endpoint}", GOOD, f"connected in {took:.1f} ms")
    except (OSError, UnicodeError) as error:  # no name of a host
        do = "start the job's first machine, correct the address, or open the port between the machines"
        return Check(f"reach {endpoint}", BAD, getattr(error, "strerror", None) or str(error), do)


def check_megatron_bridge_available() -> None:
    """What such checks of other systems ask: raises ConfigError where this machine's software cannot train."""
    if faults := [check for check in check_software() if check.state == BAD]:
        raise ConfigError(*(f"{check.name} is {check.finding}; {check.advice}" for check in faults))
