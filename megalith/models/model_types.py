"""Selects the model class by `model.model_type` and `model.score_head`."""

from __future__ import annotations

import torch

from megalith.config import ModelConfig
from megalith.models.encoders.bert import Bert
from megalith.models.encoders.t5 import T5
from megalith.models.score_model import ScoreModel
from megalith.models.transformer import Transformer

CLASSES: dict[str, type[Transformer]] = {"gpt": Transformer, "bert": Bert, "t5": T5}


def make_model(
    config: ModelConfig,
    *,
    compute_dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> Transformer:
    """Build a model of this configuration without parameter values (see Transformer)."""
    kind = ScoreModel if config.score_head else CLASSES[config.model_type]
    return kind(config, compute_dtype=compute_dtype, seed=seed, device=device)
