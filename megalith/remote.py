"""Paths in object stores (`s3://bucket/runs/gpt2`), with the subset of pathlib's interface that Megalith needs.

fsspec connects (the extra `remote`), with its own environment variables for credentials and endpoints (`AWS_…`,
`GOOGLE_APPLICATION_CREDENTIALS`, `FSSPEC_S3_ENDPOINT_URL`). Objects appear complete or not at all, and cannot be
renamed. A writer of several objects therefore writes the object that marks them complete last. All errors of a store,
its library or the network are raised as OSError with the URL. Paths hold no connection; each process opens its own
connections, so none crosses a fork.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from megalith.errors import ConfigError, MegalithError, install_line

STORES = {"s3": "s3fs", "gs": "gcsfs", "memory": "fsspec"}
"""Required package by URL scheme. file:// is an ordinary path."""
PART_SIZE = 2**25  # bytes buffered and sent at once
MAX_PARTS = 5000  # per object; S3 allows 10,000


def is_url(path: object) -> bool:
    """Return True if a path is a URL."""
    return "://" in str(path)


def open_location(path: str | Path | StorePath) -> Path | StorePath:
    """Return a Path for a path or file:// URL, a StorePath for the URL of an object store.

    Raises:
        ConfigError: the scheme is unknown, or its package is not installed.
    """
    if isinstance(path, StorePath) or not is_url(path):
        return path if isinstance(path, StorePath) else Path(path)
    url = urlsplit(str(path))
    if url.scheme == "file":
        return Path(unquote(url.path))
    if url.scheme not in STORES or not url.netloc:
        schemes = ", ".join(f"{scheme}://" for scheme in ("file", *STORES))
        raise ConfigError(f"{path} is not a supported URL; use one of {schemes} with a bucket")
    if find_spec(STORES[url.scheme]) is None:
        raise ConfigError(
            f"{path} needs {STORES[url.scheme]}, which is not installed: {install_line('remote')}"
        )
    return StorePath(str(path))


def size_of(path: Path | StorePath) -> int:
    """Return the size of a file in bytes. Raises OSError."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def modified(path: Path | StorePath) -> datetime:
    """Return when a file was last written, in local time. Raises OSError."""
    if isinstance(path, StorePath):
        return path.modified().astimezone()
    return datetime.fromtimestamp(path.stat().st_mtime)


def remove_all(folder: Path | StorePath) -> None:
    """Remove a folder recursively, ignoring errors."""
    with suppress(OSError):
        folder.remove() if isinstance(folder, StorePath) else shutil.rmtree(folder)


def is_inside(path: Path | StorePath, folder: Path | StorePath) -> bool:
    """Return True if `path` is `folder` or inside it."""
    if isinstance(path, StorePath) or isinstance(folder, StorePath):
        return f"{path}/".startswith(f"{folder}/")
    return path.resolve().is_relative_to(folder.resolve())


class StorePath:
    """Path of an object, or common prefix of several objects. Methods that access the store raise OSError."""

    def __init__(self, url: str):
        self._scheme, _, name = url.partition("://")
        self._name = name.strip("/")

    def __str__(self) -> str:
        return f"{self._scheme}://{self._name}"

    def __repr__(self) -> str:
        return f"StorePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(f"{self}/{name}")

    @property
    def name(self) -> str:
        return self._name.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> StorePath:
        return StorePath(f"{self._scheme}://{self._name.rpartition('/')[0]}")

    def exists(self) -> bool:
        return self.kind() is not None

    def is_dir(self) -> bool:
        """Return True if an object's name starts with this path."""
        return self.kind() == "directory"

    def is_file(self) -> bool:
        return self.kind() == "file"

    def kind(self) -> str | None:
        """Return "file" for an object, "directory" for a prefix of other objects' names, else None."""
        try:
            return self._existing_info()["type"]
        except FileNotFoundError:
            return None

    def size(self) -> int:
        """Return the size of the object in bytes."""
        return self.stat()[0]

    def version(self) -> str:
        """Return a value that changes whenever the object is written."""
        return self.stat()[1]

    def stat(self) -> tuple[int, str]:
        """Return `size()` and `version()` in one request."""
        return _size_and_version(self._existing_info())

    def modified(self) -> datetime:
        """Return when the object was last written."""
        with self.asking() as store:
            return store.modified(self._name)

    def iterdir(self) -> list[StorePath]:
        """Return the paths one level below this one; an empty list if it does not exist."""
        try:
            with self.asking() as store:
                return [
                    self / name.rstrip("/").rpartition("/")[2] for name in store.ls(self._name, detail=False)
                ]
        except FileNotFoundError:
            return []

    def glob(self) -> dict[StorePath, str]:
        """Return the paths that match this one, in which `*` and `?` are wildcards, sorted by name, each with its
        `kind`.
        """
        with self.asking() as store:
            matches = store.glob(self._name, detail=True)
        return {
            StorePath(f"{self._scheme}://{name.strip('/')}"): matches[name]["type"]
            for name in sorted(matches)
        }

    def stats(self) -> dict[StorePath, tuple[int, str]]:
        """Return the `stat` of every object one level below this path, with few requests."""
        with self.asking() as store:
            infos = store.ls(self._name, detail=True)
        return {
            self / info["name"].rstrip("/").rpartition("/")[2]: _size_and_version(info)
            for info in infos
            if info["type"] == "file"
        }

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every object below this path, by relative name."""
        with self.asking() as store:
            objects = store.find(self._name, detail=True)
        return {name.strip("/")[len(self._name) + 1 :]: info["size"] for name, info in objects.items()}

    def read_bytes(self) -> bytes:
        with self.asking() as store:
            return store.cat_file(self._name)

    def read_range(self, start: int, end: int) -> bytes:
        """Return the bytes `[start, end)`, fewer if the object is shorter."""
        with self.asking() as store:
            return store.cat_file(self._name, start=start, end=end)

    def fetch(self, file: Path) -> None:
        """Download the object into a local file."""
        with self.asking() as store:
            store.get_file(self._name, str(file))

    def send(self, file: Path) -> None:
        """Upload a local file as this object."""
        with self.asking() as store:
            store.put_file(str(file), self._name)

    def write(self, content: str | bytes) -> None:
        """Replace the object's content atomically; text is encoded as UTF-8."""
        with self.asking() as store:
            store.pipe_file(self._name, content.encode() if isinstance(content, str) else content)

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[Stream]:
        """Open the object for reading from its start."""
        with self.asking() as store:
            file = store.open(self._name, mode)
        try:
            yield Stream(self, file)
        finally:
            file.close()

    @contextmanager
    def create(self, size: int = 0) -> Iterator[Stream]:
        """Open a new object for sequential writing. It appears after a clean exit, and is discarded after an error.

        Args:
            size: expected size in bytes; the actual size may be up to twice this.
        """
        part_size = max(PART_SIZE, -(-size // MAX_PARTS // 2**18) * 2**18)
        with self.asking() as store:
            file = store.open(self._name, "wb", block_size=part_size)
        try:
            yield Stream(self, file)
            with self.asking():
                file.close()
        except BaseException:
            with suppress(Exception):  # the store does not answer, or has no parts to discard
                file.discard()
            with suppress(AttributeError):  # a file in memory, which is not sent
                file.closed = True  # otherwise garbage collection would send the incomplete object
            raise

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object."""
        try:
            with self.asking() as store:
                store.rm_file(self._name)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Delete every object below this path."""
        if self.exists():
            with self.asking() as store:
                store.rm(self._name, recursive=True)

    def _existing_info(self) -> dict[str, Any]:
        with self.asking() as store:
            return store.info(self._name)

    @contextmanager
    def asking(self) -> Iterator[Any]:
        """Yield the store's connection, and turn its errors into OSError with a reason."""
        try:
            yield _store(self._scheme, os.getpid())
        except MegalithError:
            raise
        except OSError as error:
            if error.errno is not None and error.strerror:
                raise
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno or errno.EIO
            raise OSError(number, _reason(error), str(self)) from error
        except Exception as error:  # libraries raise types of their own
            raise OSError(errno.EIO, _reason(error), str(self)) from error


class Stream:
    """An object that is read or written sequentially, with the methods that pyarrow needs of a file."""

    def __init__(self, path: StorePath, file: Any):
        self._path, self._file = path, file

    def read(self, size: int = -1) -> bytes:
        with self._path.asking():
            return self._file.read(size)

    def write(self, data: Any) -> int:
        with self._path.asking():
            return self._file.write(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return self._file.seekable()

    def readable(self) -> bool:
        return self._file.readable()

    @property
    def closed(self) -> bool:
        return self._file.closed


@functools.cache
def _store(scheme: str, process: int) -> Any:
    """Return this process's connection to the stores of a scheme, without a cache of listings."""
    import fsspec

    if scheme == "gs":
        _say_once(logging.getLogger("gcsfs"))
    return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)


def _say_once(logger: logging.Logger) -> None:
    """Let each message of a logger through only once. gcsfs logs with every request that the bucket has no layout."""
    passed: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not (message in passed or passed.add(message))

    logger.addFilter(is_new)


def _size_and_version(info: dict[str, Any]) -> tuple[int, str]:
    version = next((info[key] for key in ("ETag", "generation", "created") if key in info), info)
    return int(info["size"]), str(version)


def _reason(error: Exception) -> str:
    reason = " ".join(str(error).split()) or "it gives no reason"
    return reason if isinstance(error, OSError) else f"{type(error).__name__}: {reason}"
