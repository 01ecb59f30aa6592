"""Default position ids, and a check of the number of positions."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.inputs import TokenInputs


def check_positions(config: ModelConfig, length: int, inputs: TokenInputs) -> None:
    """Raise ConfigError if the model has learned positions, but fewer than a sequence of `length` tokens needs."""
    if not config.learns_positions:
        return
    counted = "tokens"
    if _skips_padding(config, inputs.padding_mask) and inputs.position_ids is None:
        length, counted = int(inputs.padding_mask.sum(1).max()), "tokens besides padding"
    longest = config.max_position_embeddings
    if length > longest:
        raise ConfigError(
            f"the input has {length} {counted}, but the model has {longest} learned positions "
            f"(model.max_position_embeddings); shorten the input to {longest}"
        )


def default_positions(
    config: ModelConfig, token_index: Tensor, batch: int, padding_mask: Tensor | None
) -> Tensor:
    """Return the positions of tokens, int64 [batch, seq].

    Args:
        config: the model's; with `positions_skip_padding`, padding does not count.
        token_index: int64 [seq], each token's index in the full sequence.
        batch: number of sequences.
        padding_mask: bool [batch, full seq], False for padding; None means no padding.
    """
    if _skips_padding(config, padding_mask):
        return positions_without_padding(config, padding_mask)[:, token_index]
    return token_index.expand(batch, len(token_index))


def positions_without_padding(config: ModelConfig, padding_mask: Tensor) -> Tensor:
    """Return positions int64 [batch, seq] that count only real tokens, as RoBERTa and OPT do.

    Padding tokens get the last row of the table. In Hugging Face's table, this is the row before the first position.

    Args:
        config: a model with `positions_skip_padding`.
        padding_mask: bool [batch, seq], False for padding.
    """
    positions = padding_mask.long().cumsum(1) - 1
    return torch.where(padding_mask, positions, config.position_rows - 1)


def _skips_padding(config: ModelConfig, padding_mask: Tensor | None) -> bool:
    return config.positions_skip_padding and padding_mask is not None
