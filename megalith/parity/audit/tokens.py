"""Interprets a recorded micro-batch: labels, loss weights, positions, documents and padding.

Labels are either Hugging Face's, equal to the tokens and shifted by the model, or Megatron's, already shifted. The
tokens decide which. A position of 0 begins a document. Attention is limited to documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.data.batch import document_ends
from megalith.errors import CheckpointError

IGNORED = -100
MOST_MATCH = 0.9


@dataclass(frozen=True)
class TokenBatch:
    """A micro-batch as the reference computes it. Tensors are [batch, seq] unless noted otherwise."""

    input_ids: Tensor  # int64
    labels: Tensor  # int64, the token that each position predicts
    weights: Tensor  # float32, 0 where the label does not count
    token_weights: Tensor  # float32, the weights before the labels are shifted
    position_ids: Tensor | None = None  # int64; None: 0, 1, …
    document_ends: Tensor | None = None  # int32 [batch, documents]; None: attention ignores documents
    padding: Tensor | None = None  # bool, True where no token attends to
    causal: bool = True
    has_all_labels: bool = False
    """True if positions without weight have a label of their own in `labels`."""

    @property
    def count(self) -> float:
        """Sum of the tokens' loss weights."""
        return self.weights.sum(dtype=torch.float64).item()


def read_tokens(fields: Mapping[str, Tensor], model: ModelConfig, where: str) -> TokenBatch:
    """Return the batch that recorded fields describe.

    Args:
        fields: recorded tensors of the micro-batch by name, as in RankDump.batches.
        model: configuration whose vocabulary and number of positions bound the tokens and positions.
        where: name of the micro-batch in errors.

    Raises:
        CheckpointError: a token is not in the vocabulary, or a position is not one that the model has learned.
    """
    ids = fields["input_ids"]
    labels, weights, token_weights = _labels(fields)
    if ids.min() < 0 or max(ids.max(), labels.max()) >= model.vocab_size:
        raise CheckpointError(
            f"{where} has tokens from {ids.min()} to {max(ids.max(), labels.max())}, but the vocabulary of --model has "
            f"{model.vocab_size}; pass the config.json of the recorded model"
        )
    attention_mask = fields.get("attention_mask")
    padding = None if attention_mask is None or bool(attention_mask.all()) else attention_mask == 0
    position_ids = fields.get("position_ids")
    ends = None
    if position_ids is not None:
        position_ids = position_ids.long().clamp(min=0)
        if model.learns_positions and position_ids.max() >= model.max_position_embeddings:
            raise CheckpointError(
                f"{where} has position {position_ids.max()}, but --model has {model.max_position_embeddings} learned "
                "positions; pass the config.json of the recorded model"
            )
        starts = (position_ids == 0) & (torch.arange(ids.shape[1]) > 0)
        ends = document_ends(starts.numpy()) if padding is None else None
    return TokenBatch(
        ids,
        labels.clamp(min=0),
        weights,
        token_weights,
        position_ids,
        ends,
        padding,
        has_all_labels="loss_mask" in fields,
    )


def _labels(fields: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the shifted labels, their weights, and the weights of the recorded labels."""
    ids = fields["input_ids"]
    labels = fields.get("labels")
    if labels is None:
        mask = fields.get("attention_mask", torch.ones_like(ids))
        labels = torch.where(mask != 0, ids, IGNORED)
    labels = labels.long()
    token_weights = (labels >= 0).float() * fields.get("loss_mask", torch.ones_like(ids)).float()
    if label_offset(fields) == 0:
        labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    weights = (labels >= 0).float()
    if "loss_mask" in fields:
        weights = weights * fields["loss_mask"].float()
    return labels, weights, token_weights


def label_offset(fields: Mapping[str, Tensor]) -> int:
    """Return the number of positions by which the recorded labels are shifted: 0 for Hugging Face's labels, 1 for
    Megatron's.
    """
    ids, labels = fields["input_ids"], fields.get("labels")
    if labels is None:
        return 0
    shares = []
    for offset in range(min(3, ids.shape[1])):
        ahead, tokens = labels[:, : ids.shape[1] - offset], ids[:, offset:]
        valid = ahead >= 0
        shares.append((ahead == tokens)[valid].float().mean().item() if valid.any() else 0.0)
    best = max(range(len(shares)), key=lambda offset: shares[offset])
    if shares[best] < MOST_MATCH:  # labels that are not the tokens, as in a masked language model
        return 1
    return best


def padding_labels(fields: Mapping[str, Tensor]) -> int:
    """Return the number of labels in the loss that are padding or are predicted from padding."""
    if "attention_mask" not in fields:
        return 0
    _, weights, _ = _labels(fields)
    padding = fields["attention_mask"] == 0
    next_is_padding = torch.nn.functional.pad(padding[:, 1:], (0, 1), value=False)
    return int(((weights > 0) & (padding | next_is_padding)).sum())


# Changes that faults make. Each returns the batch as a faulty job would have computed it.


def shift_labels_again(batch: TokenBatch) -> TokenBatch:
    labels = torch.nn.functional.pad(batch.labels[:, 1:], (0, 1))
    weights = torch.nn.functional.pad(batch.weights[:, 1:], (0, 1))
    return replace(batch, labels=labels, weights=weights)


def leave_labels_unshifted(batch: TokenBatch) -> TokenBatch:
    return replace(batch, labels=batch.input_ids, weights=batch.token_weights)


def count_all_tokens(batch: TokenBatch) -> TokenBatch:
    if batch.has_all_labels:
        return replace(batch, weights=torch.ones_like(batch.weights))
    labels, weights = batch.input_ids.roll(-1, 1), torch.ones_like(batch.weights)
    weights[:, -1] = 0
    return replace(batch, labels=torch.where(batch.weights > 0, batch.labels, labels), weights=weights)


def count_padding(batch: TokenBatch) -> TokenBatch:
    if batch.padding is None:
        return batch
    every, next_is_padding = count_all_tokens(batch), batch.padding.roll(-1, 1)
    return replace(every, weights=torch.where(next_is_padding, every.weights, batch.weights))


def attend_to_padding(batch: TokenBatch) -> TokenBatch:
    return replace(batch, padding=None)


def attend_to_future(batch: TokenBatch) -> TokenBatch:
    return replace(batch, causal=False)


def ignore_position_ids(batch: TokenBatch) -> TokenBatch:
    return replace(batch, position_ids=None)


def attend_across_documents(batch: TokenBatch) -> TokenBatch:
    return replace(batch, document_ends=None)


def ignore_documents(batch: TokenBatch) -> TokenBatch:
    return replace(batch, document_ends=None, position_ids=None)


def same_batch(one: TokenBatch, other: TokenBatch) -> bool:
    """Return True if two batches lead to the same computation."""
    return all(
        value is another or (isinstance(value, Tensor) and isinstance(another, Tensor) and torch.equal(value, another))
        or (isinstance(value, bool) and value == another)
        for value, another in zip(vars(one).values(), vars(other).values())
    )  # fmt: skip
