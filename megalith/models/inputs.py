"""Optional inputs of a model's forward pass: properties of its tokens, and inputs of its loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.models.loss import Objective
from megalith.models.mtp import MTPTargets


@dataclass(frozen=True)
class TokenInputs:
    """Properties of the tokens of a forward pass, besides their ids.

    Context parallelism shards only position_ids, token_index, padding, all_padding and routes along the sequence.
    """

    position_ids: Tensor | None = None  # int64 [batch, seq]; None: token_index
    token_index: Tensor | None = None  # int64 [seq], each token's index in the full sequence; None: 0, 1, …
    document_ends: Tensor | None = None  # int32 [batch, documents] (ops/documents.py): attention stays inside
    # bool [batch, seq] of full sequences, False for padding; None: no padding
    padding_mask: Tensor | None = None
    padding: Tensor | None = None  # bool [batch, seq], as in Batch
    all_padding: Tensor | None = None  # the same
    routes: Tensor | None = None  # int16 [batch, seq, layers with experts, topk], as in Batch
    sample_numbers: Tensor | None = None  # int64 [batch], positions in the data stream; keys of dropout
    cp_size: int | None = None  # number of ranks that share the rows; None: the same in all passes

    def real_tokens(self, token_index: Tensor) -> Tensor | None:
        """Return a mask of the real tokens, bool [batch, seq], or None if there is no padding.

        `token_index`: int64 [seq], each token's index in the full sequence.
        """
        paddings = [each for each in (self.padding, self.all_padding) if each is not None]
        if self.padding_mask is not None:
            paddings.append(~self.padding_mask[:, token_index])
        return ~torch.stack(paddings).any(0) if paddings else None

    def with_padding_mask(self, padding_mask: Tensor | None) -> TokenInputs:
        return self if padding_mask is None else replace(self, padding_mask=padding_mask)


@dataclass(frozen=True)
class LossInputs:
    """Inputs of the training loss, besides labels and loss_mask."""

    # of the labels' log-probabilities; None: −their sum weighted by loss_mask
    objective: Objective | None = None
    loss_scale: Tensor | None = None  # float32 scalar, multiplies the loss's gradient; None: 1
    # float32 scalar, multiplies the balancing losses' gradient; None: no such loss
    balance_scale: Tensor | None = None
    mtp_targets: MTPTargets | None = None  # None: the MTP layers are not run
    max_label_tokens: int | None = None  # tokens with a nonzero loss_mask, at most; None: unknown
    # float32 scalar that Σ loss_mask · (log Σ exp logits)² is added to, with model.output_z_loss_coeff
    z_loss_sum: Tensor | None = None
