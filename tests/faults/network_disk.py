"""A file system in user space (FUSE) that behaves as a network disk with faults: slow, stale, over quota, read-only.

`python network_disk.py BACKING MOUNT CONTROL` passes each operation on to the folder BACKING. The file CONTROL contains
JSON with the faults, and is read before each operation: `seconds` that an operation takes, `errors` by operation
(an errno, for the names in OPERATIONS or "modify" for all that change something), `generation`: handles that were
opened in an earlier one are stale, as after the restart of an NFS server; `hangs`: no operation is answered.
"""

import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

OPERATIONS = {
    1: "lookup", 3: "getattr", 4: "setattr", 9: "mkdir", 10: "unlink", 11: "rmdir", 12: "rename", 14: "open",
    15: "read", 16: "write", 17: "statfs", 18: "release", 20: "fsync", 25: "flush", 26: "init", 27: "opendir",
    28: "readdir", 29: "releasedir", 30: "fsyncdir", 34: "access", 35: "create", 43: "fallocate", 45: "rename2",
}  # fmt: skip
MODIFY = {"setattr", "mkdir", "unlink", "rmdir", "rename", "rename2", "write", "create", "fallocate"}
UNANSWERED = 2, 36, 42  # forget, interrupt, batch_forget
MAX_WRITE, BIG_WRITES = 128 * 1024, 1 << 5
LIBC = ctypes.CDLL(None, use_errno=True)


class NetworkDisk:
    """Serves one mount. Nodes are paths relative to the folder behind it."""

    def __init__(self, backing: str, mount: str, control: str):
        self._backing, self._control = backing, Path(control)
        self._paths, self._numbers = {1: ""}, {"": 1}
        self._handles: dict[int, tuple[int | list, int]] = {}  # descriptor or names, and generation
        self._next = 1
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions"
        if LIBC.mount(b"disk", os.fsencode(mount), b"fuse.test", 0, options.encode()):
            raise OSError(ctypes.get_errno(), "FUSE cannot be mounted here")

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, MAX_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno in (errno.EINTR, errno.ENOENT, errno.EAGAIN):
                    continue
                raise
            _, code, unique, node = struct.unpack_from("<IIQQ", request)
            if code in UNANSWERED:
                continue
            try:
                number, answer = 0, self._answer(OPERATIONS.get(code, ""), node, request[40:])
            except OSError as error:
                number, answer = error.errno or errno.EIO, b""
            header = struct.pack("<IiQ", 16 + len(answer), -number, unique)
            with suppress(FileNotFoundError):  # the caller was killed
                os.write(self._device, header + answer)

    def _answer(self, name: str, node: int, body: bytes) -> bytes:
        if not name:
            raise OSError(errno.ENOSYS, "not supported")
        faults = json.loads(self._control.read_text())
        while faults.get("hangs") and name != "init":
            time.sleep(0.02)
            faults = json.loads(self._control.read_text())
        time.sleep(faults.get("seconds", 0))
        errors = faults.get("errors", {})
        if number := errors.get(name) or (errors.get("modify") if name in MODIFY else 0):
            raise OSError(number, os.strerror(number))
        self._generation = faults.get("generation", 0)
        return getattr(self, f"_{name}")(node, body)

    def _path(self, node: int, name: bytes = b"") -> str:
        relative = "/".join(filter(None, (self._paths[node], os.fsdecode(name))))
        return os.path.join(self._backing, relative) if relative else self._backing

    def _entry(self, node: int, name: bytes) -> bytes:
        path = self._path(node, name)
        attributes = self._attributes(path)
        relative = os.path.relpath(path, self._backing)
        if relative not in self._numbers:
            self._numbers[relative] = max(self._paths) + 1
            self._paths[self._numbers[relative]] = relative
        return struct.pack("<QQQQII", self._numbers[relative], 0, 0, 0, 0, 0) + attributes

    def _attributes(self, path: str) -> bytes:
        s = os.lstat(path)
        times = s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns
        seconds, parts = [t // 10**9 for t in times], [t % 10**9 for t in times]
        rest = s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_rdev, s.st_blksize, 0
        return struct.pack("<6Q10I", s.st_ino, s.st_size, s.st_blocks, *seconds, *parts, *rest)

    def _forget(self, path: str) -> None:
        """The node of a path that is removed or replaced keeps its number, without a name."""
        relative = os.path.relpath(path, self._backing)
        self._numbers.pop(relative, None)

    def _new_handle(self, value: int | list) -> int:
        self._next += 1
        self._handles[self._next] = value, self._generation
        return self._next

    def _handle(self, body: bytes) -> int | list:
        value, generation = self._handles[struct.unpack_from("<Q", body)[0]]
        if generation != self._generation:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return value

    def _init(self, node: int, body: bytes) -> bytes:
        return struct.pack("<4I2H2I2HI7I", 7, 31, 0, BIG_WRITES, 0, 0, MAX_WRITE, 1, 0, 0, 0, *[0] * 7)

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(node, body.rstrip(b"\0"))

    def _getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._path(node))

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        path = self._path(node)
        if valid & 8:
            os.truncate(path, size)
        if valid & 1:
            os.chmod(path, stat.S_IMODE(struct.unpack_from("<I", body, 68)[0]))
        if valid & (16 | 32 | 128 | 256):
            os.utime(path)
        return self._getattr(node, body)

    def _mkdir(self, node: int, body: bytes) -> bytes:
        name = body[8:].rstrip(b"\0")
        os.mkdir(self._path(node, name))
        return self._entry(node, name)

    def _unlink(self, node: int, body: bytes) -> bytes:
        path = self._path(node, body.rstrip(b"\0"))
        os.unlink(path)
        self._forget(path)
        return b""

    def _rmdir(self, node: int, body: bytes) -> bytes:
        path = self._path(node, body.rstrip(b"\0"))
        os.rmdir(path)
        self._forget(path)
        return b""

    def _rename(self, node: int, body: bytes, skip: int = 8) -> bytes:
        (target,) = struct.unpack_from("<Q", body)
        old, new, *_ = body[skip:].split(b"\0")
        one, other = self._path(node, old), self._path(target, new)
        os.rename(one, other)
        self._forget(other)
        before, after = (os.path.relpath(path, self._backing) for path in (one, other))
        for path, number in list(self._numbers.items()):
            if path == before or path.startswith(before + "/"):
                del self._numbers[path]
                self._paths[number] = after + path[len(before) :]
                self._numbers[self._paths[number]] = number
        return b""

    def _rename2(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:  # an atomic exchange, which NFS has not
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._rename(node, body, 16)

    def _open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & ~(os.O_NOFOLLOW | os.O_APPEND | os.O_CREAT | os.O_EXCL)
        return struct.pack("<QII", self._new_handle(os.open(self._path(node), flags)), 0, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        name = body[16:].rstrip(b"\0")
        descriptor = os.open(self._path(node, name), flags & ~os.O_APPEND | os.O_CREAT, stat.S_IMODE(mode))
        return self._entry(node, name) + struct.pack("<QII", self._new_handle(descriptor), 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(self._handle(body), size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(self._handle(body), body[40 : 40 + size], offset), 0)

    def _fsync(self, node: int, body: bytes) -> bytes:
        os.fsync(self._handle(body))
        return b""

    def _fallocate(self, node: int, body: bytes) -> bytes:
        _, offset, length = struct.unpack_from("<QQQ", body)
        os.posix_fallocate(self._handle(body), offset, length)
        return b""

    def _flush(self, node: int, body: bytes) -> bytes:
        self._handle(body)
        return b""

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(self._handles.pop(struct.unpack_from("<Q", body)[0])[0])
        return b""

    def _opendir(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", self._new_handle([".", "..", *os.listdir(self._path(node))]), 0, 0)

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        names, answer = self._handle(body), b""
        for number, name in enumerate(names[offset:], offset + 1):
            raw = os.fsencode(name)
            entry = struct.pack("<QQII", number, number, len(raw), 0) + raw
            entry += bytes(-len(entry) % 8)
            if len(answer) + len(entry) > size:
                break
            answer += entry
        return answer

    def _releasedir(self, node: int, body: bytes) -> bytes:
        del self._handles[struct.unpack_from("<Q", body)[0]]
        return b""

    def _fsyncdir(self, node: int, body: bytes) -> bytes:
        self._handle(body)
        return b""

    def _access(self, node: int, body: bytes) -> bytes:
        os.lstat(self._path(node))
        return b""

    def _statfs(self, node: int, body: bytes) -> bytes:
        s = os.statvfs(self._backing)
        counts = s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree
        return struct.pack("<5Q4I6I", *counts, s.f_bsize, s.f_namemax, s.f_frsize, 0, *[0] * 6)


class MountedDisk:
    """Context manager: a network disk in `folder`/disk, whose faults `set` changes."""

    def __init__(self, folder: Path):
        self._backing, self.path, self._control = folder / "backing", folder / "disk", folder / "control"
        for each in (self._backing, self.path):
            each.mkdir(parents=True)

    def set(self, **faults: object) -> None:
        partial = self._control.with_suffix(".new")
        partial.write_text(json.dumps(faults))
        os.replace(partial, self._control)

    def __enter__(self) -> "MountedDisk":
        self.set()
        words = [sys.executable, __file__, self._backing, self.path, self._control]
        self._server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while not os.path.ismount(self.path):
            if self._server.poll() is not None:
                raise OSError(errno.EPERM, self._server.stderr.read().strip().rpartition("\n")[2])
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.set()
        subprocess.run(["umount", "--lazy", self.path], check=True)
        self._server.kill()
        self._server.wait()
        self._server.stderr.close()


if __name__ == "__main__":
    NetworkDisk(*sys.argv[1:]).serve()
