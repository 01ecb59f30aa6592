"""A micro-batch, and what the end of a document does to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megalith.errors import ConfigError
from megalith.hardware import to_device


@dataclass(frozen=True)
class BoundaryRules:
    """What happens at the end-of-document token `eod`. The token itself belongs to the document that it ends."""

    eod: int | None = None
    reset_position_ids: bool = False  # positions begin again at 0 after it
    reset_attention_mask: bool = False  # attention does not reach across it (`document_ends`)
    eod_mask_loss: bool = False  # what follows it, the first token of an unknown document, is not learnt

    def __post_init__(self) -> None:
        asked = [f.name for f in fields(self) if f.name != "eod" and getattr(self, f.name)]
        if asked and self.eod is None:
            raise ConfigError(
                f"{' and '.join(asked)} {'ask' if asked[1:] else 'asks'} where documents end, but the tokenizer has no "
                "end-of-document token; use a tokenizer that has one, or turn them off"
            )


@dataclass
class Batch:
    """One micro-batch of a data-parallel rank: tensors by the names that the model's forward has for them.

    What else a model or a loss reads are the fields of a subclass.
    """

    of_tokens: ClassVar[Sequence[str]] = ("input_ids", "labels", "loss_mask", "position_ids", "padding")
    """Those with a value for each token, [batch, seq]: what context parallelism cuts."""
    of_encoder_tokens: ClassVar[Sequence[str]] = ()
    """The same of another sequence, which an encoder reads; then there is a field `encoder_token_index`."""

    input_ids: Tensor  # int64 [batch, seq]
    labels: Tensor  # int64 [batch, seq], the token after each token
    loss_mask: Tensor  # float32 [batch, seq], 0 where the label does not count
    position_ids: Tensor  # int64 [batch, seq]
    document_ends: (
        Tensor | None
    )  # int32 [batch, documents], as ops/documents.py has them; None: one document, or no matter
    sample_numbers: Tensor  # int64 [batch], the position of each sample in the run's stream
    padding: Tensor | None = field(default=None, kw_only=True)
    """bool [batch, seq], True for tokens that no token sees, though they may predict a label. With document_ends they
    are documents of their own; without, they see the tokens before them. None: there are none."""

    def __getitem__(self, name: str) -> Tensor | None:
        return getattr(self, name)

    def to(self, device: torch.device | str) -> Batch:
        """A copy on a device; the host does not wait for it."""
        return self._each(lambda tensor: to_device(tensor, device))

    def pin_memory(self) -> Batch:
        """A copy in pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change) -> Batch:
        values = {item.name: self[item.name] for item in fields(self)}
        return replace(self, **{name: change(value) for name, value in values.items() if value is not None})


def make_batch(samples: np.ndarray, sample_numbers: np.ndarray, rules: BoundaryRules) -> Batch:
    """A Batch from int64 samples [batch, seq + 1] and their places in the stream, int64 [batch]."""
    input_ids = samples[:, :-1]  # [batch, seq]
    position_ids = np.broadcast_to(np.arange(input_ids.shape[1]), input_ids.shape)
    loss_mask = np.ones(input_ids.shape, dtype=np.float32)
    ends_of_documents = None
    if rules.eod is not None:
        ends = input_ids == rules.eod  # [batch, seq]
        begins = np.zeros_like(ends)
        begins[:, 1:] = ends[:, :-1]
        if rules.eod_mask_loss:
            loss_mask[ends] = 0.0
        if rules.reset_position_ids:
            position_ids = position_ids - np.maximum.accumulate(np.where(begins, position_ids, 0), axis=1)
        if rules.reset_attention_mask:
            ends_of_documents = document_ends(begins)
    return Batch(
        input_ids=torch.from_numpy(np.ascontiguousarray(input_ids)),
        labels=torch.from_numpy(np.ascontiguousarray(samples[:, 1:])),
        loss_mask=torch.from_numpy(loss_mask),
        position_ids=torch.from_numpy(np.array(position_ids, dtype=np.int64)),
        document_ends=ends_of_documents,
        sample_numbers=torch.from_numpy(sample_numbers),
    )


def document_ends(begins: np.ndarray) -> Tensor | None:
    """The documents' ends, int32 [batch, documents], from bool [batch, seq], True where another document begins; None
    where none does but at place 0.

    Their number is a power of two from 8 on, so that compiled layers meet few.
    """
    batch, seq = begins.shape
    rows, places = np.nonzero(begins[:, 1:])
    if not len(rows):
        return None
    counts = np.bincount(rows, minlength=batch)
    ends = np.full((batch, max(8, 1 << int(counts.max()).bit_length())), seq, dtype=np.int32)
    ends[rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]] = places + 1
    return torch.from_numpy(ends)
