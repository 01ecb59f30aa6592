"""Penalties on tokens that a sequence already contains, as OpenAI, vLLM and transformers define them."""

from __future__ import annotations

import torch
from torch import Tensor


def penalize(
    logits: Tensor,  # float32 [rows, entries]
    in_prompt: Tensor,  # bool [rows, entries]: the prompt has the entry
    counts: Tensor,  # int32 [rows, entries]: occurrences in the completion
    repetition: Tensor,  # float32 [rows], 1: none
    presence: Tensor,  # float32 [rows], 0: none
    frequency: Tensor,  # float32 [rows], 0: none
) -> Tensor:
    """Return penalized logits.

    The logits of entries in the prompt or the completion are divided by the repetition penalty if positive and
    multiplied by it otherwise (Keskar et al. 2019). Then frequency · count and presence · [count > 0] are subtracted.
    """
    is_sampled = counts > 0
    repetition, presence, frequency = (x[:, None] for x in (repetition, presence, frequency))
    scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(in_prompt | is_sampled, scaled, logits)
    return logits - frequency * counts - presence * is_sampled


def allowed_entries(masks: Tensor, first: int, count: int) -> Tensor:
    """Unpack the bits of vocabulary entries from masks, int32 [rows, words] with 32 entries per word.

    Returns bool [rows, count] for the `count` entries starting at `first`.
    """
    entries = torch.arange(first, first + count, device=masks.device)
    return (masks[:, entries >> 5] >> (entries & 31).int()) & 1 != 0
