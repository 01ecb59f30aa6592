"""Megalith trains large transformers on any number of devices.

config = megalith.RunConfig.load("run.yaml", ["--train.train_iters", "100"])
result = megalith.train(config)
model = megalith.load(result.checkpoint)
logits = model(input_ids)  # int64 [batch, seq] -> [batch, seq, vocab]
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["RunConfig", "load", "train"]

_HOMES = {
    "RunConfig": "megalith.config",
    "train": "megalith.training.trainer",
    "load": "megalith.training.loading",
}


def __getattr__(name: str) -> Any:
    """Imports on first use, so that the command line and the configuration start without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'megalith' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
