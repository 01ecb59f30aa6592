"""Reader of a Megatron checkpoint's pickles. It never runs code named in them.

A file of torch.save is read by torch.load's restricted unpickler (`weights_only`), which builds only tensors, plain
containers and argparse.Namespace. `.metadata`, a pickle of torch.distributed.checkpoint, is read by an Unpickler that
imports nothing: its objects become `Record`s, which keep their fields.

Other names are rejected, except names of Megatron's classes and related libraries. With `trust` these become `Inert`
objects, which keep nothing. A TorchScript archive is rejected before it is opened, because torch.jit.load runs code.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
import re
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from megalith.errors import CheckpointError, shorten
from megalith.small_files import RefusedFile, resolve_regular

PLAIN: dict[str, Any] = {
    "argparse.Namespace": Namespace,
    "builtins.frozenset": frozenset,
    "builtins.slice": slice,
}
INERT = (  # packages, or single names
    "megatron", "transformer_engine", "apex", "nvidia_resiliency_ext", "numpy", "pathlib", "signal", 
    "io.BytesIO", "types.SimpleNamespace", "functools.partial", "torch._C.Generator",
)  # fmt: skip
_DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool",
           "float8_e4m3fn", "float8_e5m2")  # fmt: skip
_RECORDS = ("torch.distributed.checkpoint.", "torch.serialization._get_layout", "pathlib.")
_BUILT = {"torch.Size": tuple, "builtins.set": set, "collections.OrderedDict": OrderedDict} | {
    f"torch.{name}": getattr(torch, name) for name in _DTYPES
}
_REFUSED_BY_TORCH = re.compile(r"GLOBAL (\S+) was not an allowed global")


class Inert:
    """Placeholder for an object of a class that is not loaded. It accepts any state and keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        pass


class Record(Inert):
    """Placeholder for an object of torch.distributed.checkpoint, with its fields as attributes or its state as
    `state`."""

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, trust: bool):
        super().__init__(file)
        self._trust, self.untrusted = trust, set()

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _BUILT:
            return _BUILT[full]
        if full.startswith(_RECORDS):
            return Record
        if not _is_inert(full):
            raise pickle.UnpicklingError(f"it names {full}, which is not allowed")
        if not self._trust:
            self.untrusted.add(full)
        return Inert


def load_pickle(path: Path, folder: Path, trust: bool) -> Any:
    """Read a plain pickle file.

    Args:
        path: pickle file.
        folder: the folder that must contain the file after all links are resolved.
        trust: accept names of `INERT`.

    Raises:
        CheckpointError: the file is missing or damaged, is not a regular file of the folder, refers to a class that is
            not allowed, or needs `trust`.
    """
    try:
        with open(resolve_regular(path, folder), "rb") as file:
            unpickler = _Unpickler(file, trust)
            content = unpickler.load()
    except Exception as error:  # damaged files raise any exception
        raise _refused(path, error) from None
    _check_trust(path, unpickler.untrusted)
    return content


def load_torch(path: Path, folder: Path, trust: bool, stored: bytes | None = None) -> Any:
    """Read a file written by torch.save without running code that it names. Tensors are memory-mapped if possible.

    Args:
        path: pickle file.
        folder: the folder that must contain the file after all links are resolved.
        trust: replace objects of the classes in `INERT` with placeholders; otherwise they are an error.
        stored: the bytes to read, if they are only part of `path`.

    Raises:
        CheckpointError: the file is missing or damaged, is not a regular file of the folder, refers to a class that is
            not allowed, or needs `trust`.
    """

    def source() -> Path | BinaryIO:
        return real if stored is None else io.BytesIO(stored)

    try:
        real = resolve_regular(path, folder)
        zipped = zipfile.is_zipfile(source())
        inert = {name for name in _names(source(), zipped) if name not in PLAIN and _is_inert(name)}
        if trust or not inert:
            allowed = [(value, name) for name, value in {**PLAIN, **dict.fromkeys(inert, Inert)}.items()]
            with safe_globals(allowed):
                mapped = zipped and stored is None
                return torch.load(source(), map_location="cpu", mmap=mapped or None, weights_only=True)
    except Exception as error:  # damaged files raise any exception
        raise _refused(path, error) from None
    _check_trust(path, inert)


def _names(source: Path | BinaryIO, zipped: bool) -> Iterable[str]:
    """Return the names in the file's pickles that torch does not allow by default. Does not unpickle anything."""
    if zipped:
        return get_unsafe_globals_in_checkpoint(source)
    names = set()
    with (
        contextlib.suppress(ValueError),
        source if isinstance(source, io.BytesIO) else open(source, "rb") as file,
    ):
        # Before torch 1.6 a file had four pickles, then bytes. torch.load rejects a file that ends earlier.
        for _ in range(4):
            for code, value, _ in pickletools.genops(file):
                names |= {value.replace(" ", ".")} if code.name == "GLOBAL" else set()
    return names


def _is_inert(name: str) -> bool:
    return name.split(".")[0] in INERT or name in INERT


def _check_trust(path: Path, untrusted: Iterable[str]) -> None:
    if untrusted:
        raise CheckpointError(
            f"{path} is a pickle that refers to the Python classes {shorten(sorted(untrusted))}, which "
            "Megalith ignores; if you trust the file's origin, pass --trust, or set checkpoint.trust to true "
            "in the run file"
        )


def _refused(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path} is missing; copy the checkpoint again")
    if isinstance(error, RefusedFile):
        return CheckpointError(f"{path} cannot be read: {error.strerror}; check the path")
    reason = str(error).strip().split("\n")[0].split(". ")[0]
    if named := _REFUSED_BY_TORCH.search(str(error)):
        reason = f"it names {named[1]}, which is not allowed"
    return CheckpointError(
        f"{path} cannot be read as a Megatron checkpoint ({reason}), and no code in it was run; copy the "
        "checkpoint again, or pass the folder that Megatron saved"
    )
