"""Unpickling by an allow-list. Megatron's checkpoints are pickles, which may name any function to be called.

What is not on the list is never imported: classes of Megatron and the libraries around it become `Inert` objects that
keep nothing, and any other name is refused. Tensors are made by torch's own constructors alone.
"""

from __future__ import annotations

import importlib
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

from megalith.errors import CheckpointError

_DTYPES = ("float32", "float64", "float16", "bfloat16", "uint8", "int8", "int16", "int32", "int64", "bool",
           "float8_e4m3fn", "float8_e5m2")  # fmt: skip
ALLOWED: dict[str, tuple[str, ...]] = {
    "argparse": ("Namespace",),
    "collections": ("OrderedDict",),
    "builtins": ("set", "frozenset", "complex", "bytearray", "slice"),
    "torch": ("Size", "device", *_DTYPES),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
}  # fmt: skip
INERT = (  # packages, or single names
    "megatron", "transformer_engine", "apex", "nvidia_resiliency_ext", "numpy", "pathlib", "signal", "_codecs.encode",
    "_io.BytesIO", "io.BytesIO", "types.SimpleNamespace", "functools.partial",
)  # fmt: skip


class Inert:
    """Stands for an object of a class that is not loaded; takes whatever it is made of and keeps nothing."""

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


class Unpickler(pickle.Unpickler):
    """Finds what is on the list, or an Inert; refuses the rest by its name."""

    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()):
            return getattr(importlib.import_module(module), name)
        if module.split(".")[0] in INERT or f"{module}.{name}" in INERT:
            return Inert
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is not allowed")


def _load(file: BinaryIO, **options: Any) -> Any:
    return Unpickler(file, **options).load()


def load_pickle(path: Path) -> Any:
    """The object in a plain pickle file. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            return _load(file)
    except Exception as error:  # the unpickler's own, or whatever it runs into in a damaged file
        raise _refused(path, error) from None


def load_torch(path: Path) -> Any:
    """The object that torch.save wrote, its tensors mapped where the file's form allows it. Raises CheckpointError."""
    by_the_list = SimpleNamespace(
        Unpickler=Unpickler, load=_load, __name__=__name__
    )  # in the place of `pickle`
    options = dict(map_location="cpu", weights_only=False, pickle_module=by_the_list)
    try:
        try:
            return torch.load(path, mmap=True, **options)
        except RuntimeError:  # a file of the form before torch 1.6
            return torch.load(path, **options)
    except Exception as error:
        raise _refused(path, error) from None


def _refused(path: Path, error: Exception) -> CheckpointError:
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{path} is missing; copy the checkpoint again")
    reason = str(error).strip().split("\n")[0].split(". ")[0]
    return CheckpointError(
        f"{path} cannot be read as a Megatron checkpoint ({reason}); nothing in it was run"
    )
