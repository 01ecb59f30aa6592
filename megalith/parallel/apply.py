"""The one ordered list: how a plain model becomes the one that trains."""

from __future__ import annotations

import torch

from megalith.config import RunConfig
from megalith.models.init import initialize
from megalith.models.transformer import Transformer
from megalith.parallel.recompute import apply_recompute


def apply(model: Transformer, config: RunConfig, device: torch.device) -> None:
    """Prepares `model`, made on the meta device, in place.

    1. Recomputation wraps the eager modules, so that what follows sees one model with or without it.
    2. Compilation comes after everything that changes a layer's code.
    3. Storage is made and filled last: weights depend on their names alone, not on the steps before.
    """
    apply_recompute(model, config.parallel)
    if config.runtime.compile is True or (config.runtime.compile == "auto" and device.type == "cuda"):
        for layer in model.layers.values():
            layer.compile(fullgraph=True)
    model.to_empty(device=device)
    initialize(model, config.model, config.train.seed)
