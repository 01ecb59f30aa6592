"""Micro-batches, and their treatment of document boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from megalith.data.length_schedule import LengthSchedule
from megalith.errors import ConfigError
from megalith.hardware import to_device

PADDING = -1
"""Value that fills a sample after its last token."""


@dataclass(frozen=True)
class BoundaryRules:
    """Rules for the end-of-document token `eod`, which counts as the last token of its document."""

    eod: int | None = None
    reset_position_ids: bool = False  # positions restart at 0 after it
    reset_attention_mask: bool = False  # attention does not cross it (`document_ends`)
    eod_mask_loss: bool = False  # no loss on its label, the first token of the next document
    length_schedule: LengthSchedule | None = None  # samples are divided into shorter sequences, without eod

    def __post_init__(self) -> None:
        others = ("eod", "length_schedule")
        enabled = [f.name for f in fields(self) if f.name not in others and getattr(self, f.name)]
        if enabled and self.eod is None:
            raise ConfigError(
                f"{' and '.join(enabled)} {'need' if enabled[1:] else 'needs'} the ends of documents, but the "
                "tokenizer has no end-of-document token; use a tokenizer that has one, or turn "
                f"{' and '.join(enabled)} off"
            )


@dataclass
class Batch:
    """A micro-batch of one data-parallel rank. Its tensors are named like the arguments of the model's forward.

    A subclass adds the fields that another model or loss reads.
    """

    of_tokens: ClassVar[Sequence[str]] = (
        "input_ids", "labels", "loss_mask", "position_ids", "padding", "all_padding", "routes"
    )  # fmt: skip
    """Fields with values per token, [batch, seq, …], which context parallelism shards."""
    of_encoder_tokens: ClassVar[Sequence[str]] = ()
    """Fields with one value per encoder token. If there are any, so is a field `encoder_token_index`."""

    input_ids: Tensor  # int64 [batch, seq]
    labels: Tensor  # int64 [batch, seq], the token after each token
    loss_mask: Tensor  # float32 [batch, seq], 0 where the label does not count
    position_ids: Tensor  # int64 [batch, seq]
    # int32 [batch, documents], see ops/documents.py; None: attention ignores documents
    document_ends: Tensor | None
    sample_numbers: Tensor  # int64 [batch], the position of each sample in the run's stream
    padding: Tensor | None = field(default=None, kw_only=True)
    """bool [batch, seq], True for padding tokens, which no token attends to, though they may have labels. With
    document_ends they are documents of their own; without, they attend to the tokens before them. None: no padding.
    """
    all_padding: Tensor | None = field(default=None, kw_only=True)
    """bool [batch, seq], True for every padding token, including those at the end of a row, for which attention needs
    no mask. The load balance of experts ignores these tokens. None: only the tokens of `padding`.
    """
    routes: Tensor | None = field(default=None, kw_only=True)
    """int16 [batch, seq, layers with experts, topk], the experts that routers replay (rl/rollouts/routes.py). Where an
    entry is negative, the router chooses. None: routers choose everywhere.
    """

    cp_size: int | None = field(default=None, kw_only=True)
    """Number of ranks that share the rows under dynamic context parallelism. None: the run's context-parallel size."""

    def __getitem__(self, name: str) -> Tensor | None:
        return getattr(self, name)

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy on a device, without synchronizing the host."""
        return self._each(lambda tensor: to_device(tensor, device))

    def rows(self) -> list[Batch]:
        """Return one batch per row that contains nothing of the other rows. An instance of a subclass is returned
        undivided.

        For a row with one document, `document_ends` is None; for a row without padding, the padding masks are None.
        """
        if type(self) is not Batch:
            return [self]
        rows = []
        for number in range(len(self.input_ids)):
            row = self._each(lambda tensor, at=number: tensor[at : at + 1])
            if row.document_ends is not None and row.document_ends[0, 0] == row.input_ids.shape[1]:
                row.document_ends = None
            if row.padding is not None and not row.padding.any():
                row.padding = None
            if row.all_padding is not None and not row.all_padding.any():
                row.all_padding = None
            rows.append(row)
        return rows

    def pin_memory(self) -> Batch:
        """Return a copy in pinned memory."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change) -> Batch:
        values = {item.name: self[item.name] for item in fields(self)}
        tensors = {name: value for name, value in values.items() if value is not None and name != "cp_size"}
        changed = {name: change(value) for name, value in tensors.items()}
        return replace(self, **changed)


def make_batch(
    samples: np.ndarray, sample_numbers: np.ndarray, rules: BoundaryRules, pads: bool = False
) -> Batch:
    """Collate samples of token ids into a Batch.

    Args:
        samples: int64 [batch, seq + 1], with PADDING after the last token. Padding has no loss, and no token attends
            to it.
        sample_numbers: int64 [batch], positions in the sample stream.
        rules: treatment of document boundaries.
        pads: set `all_padding` even if none of these samples has PADDING. For datasets in which other samples may have
            it.
    """
    all_padding = None
    input_ids = samples[:, :-1]  # [batch, seq]
    position_ids = np.broadcast_to(np.arange(input_ids.shape[1]), input_ids.shape)
    loss_mask = np.ones(input_ids.shape, dtype=np.float32)
    starts = np.zeros(input_ids.shape, dtype=bool)
    if rules.eod is not None:
        ends = input_ids == rules.eod  # [batch, seq]
        starts[:, 1:] = ends[:, :-1]
        if rules.eod_mask_loss:
            loss_mask[ends] = 0.0
    none = np.zeros_like(starts)
    sequences = none
    if rules.length_schedule is not None:
        sequences = rules.length_schedule.starts(sample_numbers, starts.shape[1])
    restarts = sequences | (starts if rules.reset_position_ids else none)
    if restarts.any():
        position_ids = position_ids - np.maximum.accumulate(np.where(restarts, position_ids, 0), axis=1)
    separated = sequences | (starts if rules.reset_attention_mask else none)
    document_end_positions = document_ends(separated) if separated.any() else None
    if pads or samples.min() == PADDING:
        all_padding = torch.from_numpy(input_ids == PADDING)
        loss_mask[samples[:, 1:] == PADDING] = 0.0
        samples = np.where(samples == PADDING, 0 if rules.eod is None else rules.eod, samples)
        input_ids = samples[:, :-1]
    return Batch(
        input_ids=torch.from_numpy(np.ascontiguousarray(input_ids)),
        labels=torch.from_numpy(np.ascontiguousarray(samples[:, 1:])),
        loss_mask=torch.from_numpy(loss_mask),
        position_ids=torch.from_numpy(np.array(position_ids, dtype=np.int64)),
        document_ends=document_end_positions,
        sample_numbers=torch.from_numpy(sample_numbers),
        all_padding=all_padding,
    )


def document_ends(starts: np.ndarray) -> Tensor | None:
    """Return the end of each document, int32 [batch, documents]. None if each row is a single document.

    The number of columns is a power of two, at least 8, so that compiled layers see few shapes.

    Args:
        starts: bool [batch, seq], True where a document starts.
    """
    batch, seq = starts.shape
    rows, columns = np.nonzero(starts[:, 1:])
    if not len(rows):
        return None
    counts = np.bincount(rows, minlength=batch)
    ends = np.full((batch, max(8, 1 << int(counts.max()).bit_length())), seq, dtype=np.int32)
    ends[rows, np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]] = columns + 1
    return torch.from_numpy(ends)
