"""Checkpoints: what a run is (`state`), saving it from all ranks (`saver`), and the way back (`open`, `read`).

checkpoint = open_checkpoint(folder, parts=("model",))     the newest whole step, its files checked
checkpoint.table("model")                                 name -> type and global shape
checkpoint.read("model", name)                            a whole tensor, or a slice of one
with StepWriter(folder, record) as writer:                a step out of tensors that come one at a time
    writer.add("model", name, tensor)
"""

from __future__ import annotations

from typing import Any

_HOMES = {
    "Checkpoint": "read",
    "Extent": "extent",
    "Manifest": "manifest",
    "DataRecord": "manifest",
    "RunRecord": "manifest",
    "Saver": "saver",
    "StepWriter": "writer",
    "TokenizerRecord": "manifest",
    "list_steps": "steps",
    "load_model": "state",
    "load_optimizer": "state",
    "open_checkpoint": "open",
    "open_existing": "open",
    "save_checkpoint": "saver",
    "state_shards": "state",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Imports on first use, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megalith.checkpoint' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"megalith.checkpoint.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
