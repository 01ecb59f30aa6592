"""Documents and padding of a script's batch, from its positions and masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalith.data.batch import Batch
from megalith.dialects.accelerate.script_batches import document_ends_of
from megalith.errors import ConfigError
from megalith.models.transformer import PADDING
from megalith.ops.documents import document_ids


def document_ids_of(batch: Batch) -> Tensor | None:
    """Return document ids, int32 [batch, seq], negative for padding, or None if the batch has no document ends.

    Raises ConfigError for padding between tokens, and for padding with labels.
    """
    ends, padding = batch.document_ends, batch.padding
    if ends is None and padding is not None:
        raise ConfigError(
            "attention_mask has zeros between the tokens of a sample, or the padding at its end has labels other than "
            "−100, which custom train steps do not support; pad at the beginning or the end, with labels of −100"
        )
    if ends is None:
        return None
    ids = document_ids(ends, batch.input_ids.shape[1])
    return ids if padding is None else ids.masked_fill(padding, PADDING)


def padding_from_ids(mask: Tensor | None) -> Tensor | None:
    """Return a mask of the padding in the ids from `document_ids_of`, bool [batch, seq].

    None if there is no padding.
    """
    if mask is None or mask.dim() != 2 or not bool((mask < 0).any()):
        return None
    return mask < 0


def document_ends_from_mask(mask: Any, tokens: Tensor) -> Tensor | None:
    """Return a Batch's document ends from an attention mask.

    Args:
        mask: Megatron's mask, bool [batch or 1, 1, seq, seq], True where attention is disabled; or document ids, int
            [batch, seq]; or None.
        tokens: int64 [batch, seq].

    Raises:
        ConfigError: the mask is neither causal nor block-diagonal causal.
    """
    if mask is None or mask.dim() == 2:
        return None if mask is None else document_ends_of(mask)
    seq = tokens.shape[1]
    hidden = mask.bool()[:, 0]  # [batch or 1, seq, seq]
    first = (~hidden).to(torch.int32).argmax(-1)  # first token that each token attends to
    positions = torch.arange(seq, device=mask.device)
    causal = (positions > positions[:, None])[None] | (positions < first[..., None])
    if hidden.shape[-2:] != (seq, seq) or not bool((hidden == causal).all()):
        raise ConfigError(
            "the attention mask of the script's batch function is neither causal nor causal within consecutive "
            "documents, and other masks are not supported; return None for a causal mask"
        )
    starts = (first == positions).to(torch.int32)
    return document_ends_of(starts.cumsum(1, dtype=torch.int32).expand_as(tokens))
