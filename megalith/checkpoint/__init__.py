"""Checkpoints: a run's state as tensors (`state`), saving from all ranks (`saver`), and loading (`open`, `read`).

checkpoint = open_checkpoint(folder, parts=("model",))    newest complete step, files verified
checkpoint.table("model")                                 name -> dtype and global shape
checkpoint.read("model", name)                            a complete tensor, or a slice of it
with StepWriter(folder, record) as writer:                build a step tensor by tensor
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
    """Import on first use, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megalith.checkpoint' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"megalith.checkpoint.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
