"""Places in an object store by their URL, `s3://bucket/runs/gpt2`, with what is used here of pathlib's Path.

fsspec does the talking (the extra `remote`); credentials and endpoints are those of its environment (`AWS_…`,
`GOOGLE_APPLICATION_CREDENTIALS`, `FSSPEC_S3_ENDPOINT_URL`). A store has objects and no folders: an object is there
whole or not at all, and nothing is renamed, so whoever writes several writes last the one by which a reader knows that
they are whole. Whatever a store, its library or the network says against a call is an OSError with the URL, as a disk
says it. Places are plain values: a process asks for its connection when it first needs one, so none goes through a
fork.
"""

from __future__ import annotations

import errno
import functools
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

STORES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "memory": "fsspec",
}  # and what they need; file:// is a path like any other
PART, PARTS = (
    2**25,
    5000,
)  # bytes of an object that are sent at once, and held until then; S3 takes 10,000 of them


def is_url(path: object) -> bool:
    """Whether a path is a URL."""
    return "://" in str(path)


def open_location(path: str | Path | StorePath) -> Path | StorePath:
    """A path or URL as what reads and writes there. Raises ConfigError for a URL of another kind."""
    if isinstance(path, StorePath) or not is_url(path):
        return path if isinstance(path, StorePath) else Path(path)
    url = urlsplit(str(path))
    if url.scheme == "file":
        return Path(unquote(url.path))
    if url.scheme not in STORES or not url.netloc:
        known = ", ".join(f"{scheme}://" for scheme in ("file", *STORES))
        raise ConfigError(f"{path} is no URL that is known here; those of {known} with a bucket are")
    if find_spec(STORES[url.scheme]) is None:
        raise ConfigError(
            f"{path} needs {STORES[url.scheme]}, which is not installed: {install_line('remote')}"
        )
    return StorePath(str(path))


def size_of(path: Path | StorePath) -> int:
    """Bytes of a file. Raises OSError."""
    return path.size() if isinstance(path, StorePath) else path.stat().st_size


def modified(path: Path | StorePath) -> datetime:
    """When a file was written, by the clock of here. Raises OSError."""
    if isinstance(path, StorePath):
        return path.modified().astimezone()
    return datetime.fromtimestamp(path.stat().st_mtime)


def remove_all(folder: Path | StorePath) -> None:
    """Removes a folder with all that is in it. Raises nothing."""
    with suppress(OSError):
        folder.remove() if isinstance(folder, StorePath) else shutil.rmtree(folder)


def is_inside(path: Path | StorePath, folder: Path | StorePath) -> bool:
    """Whether a path is a folder or lies in it."""
    if isinstance(path, StorePath) or isinstance(folder, StorePath):
        return f"{path}/".startswith(f"{folder}/")
    return path.resolve().is_relative_to(folder.resolve())


class StorePath:
    """An object, or the beginning that the names of several share. All that asks the store raises OSError."""

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
        return self._info() is not None

    def is_dir(self) -> bool:
        """Whether there is an object below this name."""
        return (self._info() or {}).get("type") == "directory"

    def is_file(self) -> bool:
        return (self._info() or {}).get("type") == "file"

    def size(self) -> int:
        """Bytes of the object."""
        return self._known()["size"]

    def version(self) -> str:
        """What changes when the object is written anew."""
        known = self._known()
        return str(next((known[key] for key in ("ETag", "generation", "created") if key in known), known))

    def modified(self) -> datetime:
        """When the object was written."""
        with self.asking() as store:
            return store.modified(self._name)

    def iterdir(self) -> list[StorePath]:
        """What begins with this name, one level of it; nothing where nothing does."""
        try:
            with self.asking() as store:
                return [
                    self / name.rstrip("/").rpartition("/")[2] for name in store.ls(self._name, detail=False)
                ]
        except FileNotFoundError:
            return []

    def glob(self) -> list[StorePath]:
        """The objects whose names this one, with `*` and `?`, stands for, by name."""
        with self.asking() as store:
            return [
                StorePath(f"{self._scheme}://{name.strip('/')}") for name in sorted(store.glob(self._name))
            ]

    def sizes(self) -> dict[str, int]:
        """The bytes of every object below this name, by the rest of its name."""
        with self.asking() as store:
            found = store.find(self._name, detail=True)
        return {name.strip("/")[len(self._name) + 1 :]: info["size"] for name, info in found.items()}

    def read_bytes(self) -> bytes:
        with self.asking() as store:
            return store.cat_file(self._name)

    def read_range(self, start: int, end: int) -> bytes:
        """The bytes `[start, end)`, fewer where the object ends before."""
        with self.asking() as store:
            return store.cat_file(self._name, start=start, end=end)

    def fetch(self, file: Path) -> None:
        """Copies the object into a file of this machine."""
        with self.asking() as store:
            store.get_file(self._name, str(file))

    def send(self, file: Path) -> None:
        """Makes the object a copy of a file of this machine."""
        with self.asking() as store:
            store.put_file(str(file), self._name)

    def write(self, content: str | bytes) -> None:
        """Gives the object this content, text as UTF-8, at once: a reader sees the old or the new."""
        with self.asking() as store:
            store.pipe_file(self._name, content.encode() if isinstance(content, str) else content)

    @contextmanager
    def open(self, mode: str = "rb") -> Iterator[Stream]:
        """The object, to be read from its beginning."""
        with self.asking() as store:
            file = store.open(self._name, mode)
        try:
            yield Stream(self, file)
        finally:
            file.close()

    @contextmanager
    def create(self, size: int = 0) -> Iterator[Stream]:
        """A new object of about `size` bytes, at most twice as many, written in order.

        It is there after a clean exit; after an error its parts are given up.
        """
        part = max(PART, -(-size // PARTS // 2**18) * 2**18)
        with self.asking() as store:
            file = store.open(self._name, "wb", block_size=part)
        try:
            yield Stream(self, file)
            with self.asking():
                file.close()
        except BaseException:
            with suppress(Exception):  # of a store that does not answer, or that keeps no parts
                file.discard()
                file.closed = True  # else it would be sent as it is, when it is collected
            raise

    def unlink(self, missing_ok: bool = False) -> None:
        """Deletes the object."""
        try:
            with self.asking() as store:
                store.rm_file(self._name)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self) -> None:
        """Deletes every object below this name."""
        if self.exists():
            with self.asking() as store:
                store.rm(self._name, recursive=True)

    def _known(self) -> dict[str, Any]:
        with self.asking() as store:
            return store.info(self._name)

    def _info(self) -> dict[str, Any] | None:
        try:
            return self._known()
        except FileNotFoundError:
            return None

    @contextmanager
    def asking(self) -> Iterator[Any]:
        """The store, what goes wrong there being an OSError with a reason."""
        try:
            yield _store(self._scheme, os.getpid())
        except MegalithError:
            raise
        except OSError as error:
            if error.errno is not None and error.strerror:
                raise
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else error.errno or errno.EIO
            raise OSError(number, _reason(error), str(self)) from error
        except Exception as error:  # each library has its own
            raise OSError(errno.EIO, _reason(error), str(self)) from error


class Stream:
    """An object that is read or written in order."""

    def __init__(self, path: StorePath, file: Any):
        self._path, self._file = path, file

    def read(self, size: int = -1) -> bytes:
        with self._path.asking():
            return self._file.read(size)

    def write(self, data: Any) -> int:
        with self._path.asking():
            return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()


@functools.cache
def _store(scheme: str, process: int) -> Any:
    """The process's connections to the stores of a scheme; what they hold is asked for anew each time."""
    import fsspec

    return fsspec.filesystem(scheme, skip_instance_cache=True, use_listings_cache=False)


def _reason(error: Exception) -> str:
    told = " ".join(str(error).split()) or "it gives no reason"
    return told if isinstance(error, OSError) else f"{type(error).__name__}: {told}"
