"""Tokens up to the length of a pair's shorter answer, for weights of long answers (LD-DPO, Liu et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor


def within_shorter(mask: Tensor, sequence_ids: Tensor, tokens: Tensor) -> Tensor:
    """Return True for the first tokens of an answer, up to the length of its pair's shorter answer: bool [batch, seq].

    Args:
        mask: bool [batch, seq], tokens of answers.
        sequence_ids: int64 [batch, seq]. Sequences 2k and 2k + 1 are a pair.
        tokens: float [sequences], number of tokens of each answer.
    """
    position = mask.long().cumsum(1)  # answer tokens of the row up to each token
    after_last = mask.shape[1] + 1
    first = position.new_full((len(tokens),), after_last).scatter_reduce(
        0, sequence_ids.flatten(), torch.where(mask, position, after_last).flatten(), "amin"
    )
    shorter = tokens.unflatten(0, (-1, 2)).amin(1).repeat_interleave(2)
    return position - first[sequence_ids] < shorter[sequence_ids]
