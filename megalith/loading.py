"""A trained model from its checkpoint, ready to use."""

from __future__ import annotations

from pathlib import Path

import torch

from megalith.build import COMPUTE_DTYPES, vocabulary_rows
from megalith.checkpoint import load_model, open_checkpoint
from megalith.config import RunConfig
from megalith.data.tokenizer import Tokenizer, load_tokenizer
from megalith.errors import CheckpointError
from megalith.models.transformer import Transformer


def load(path: str | Path, device: str | torch.device = "cpu") -> Transformer:
    """The model of a run folder, its `checkpoints`, or one step folder, in evaluation mode on `device`.

    `model(input_ids)`, with int64 [batch, seq], gives logits [batch, seq, vocab] in the run's precision.
    Raises CheckpointError when there is no whole checkpoint.
    """
    return load_with_tokenizer(path, device)[0]


def load_with_tokenizer(
    path: str | Path, device: str | torch.device = "cpu"
) -> tuple[Transformer, Tokenizer | None]:
    """As `load`, with the tokenizer that the checkpoint carries, or None where the run had none."""
    checkpoint = open_checkpoint(path, what=("model",))
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {path}; give a run folder or one of its step folders"
        )
    config = RunConfig.from_tree(checkpoint.manifest.config)
    model = Transformer(
        config.model,
        compute_dtype=COMPUTE_DTYPES[config.train.precision],
        seed=config.train.seed,
        device=device,
    )
    load_model(checkpoint, model, vocabulary_rows(config))
    folder = checkpoint.tokenizer_folder
    return model.eval(), load_tokenizer(folder) if folder else None
