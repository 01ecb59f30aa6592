"""Micro-batches of answers. Each token belongs to a numbered sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from megalith.data.batch import Batch
from megalith.data.chat.chat_dataset import documents_and_padding, make_chat_batch, row_values


@dataclass
class AnswerBatch(Batch):
    """A micro-batch of answers. `loss_mask` is 1 where the label is in an answer.

    With n sequences per sample, sample k has the sequences n·k … n·(k + 1) − 1.
    """

    sequence_ids: Tensor  # int64 [batch, seq], the token's sequence within the micro-batch
    sequence_tokens: Tensor  # float32 [sequences], tokens in the loss; 0 for padding
    values: Tensor | None = field(default=None, kw_only=True)
    """Value of each token's sample (data/chat/sample_forms.py), float32 [batch, seq]. None: all samples have the
    default value.
    """


def answer_fields(rows: np.ndarray, sample_numbers: np.ndarray) -> dict[str, Tensor | None]:
    """Return the fields of an AnswerBatch with one row per sample and sequence: samples · sequences rows.

    Args:
        rows: rows of ChatDataset, int64 [samples, lines, seq] or [samples, sequences, lines, seq]. There are 5 lines if
            samples have values, otherwise 4.
        sample_numbers: int64 [samples], positions in the sample stream.

    Returns:
        Fields per sequence have the same number of entries for every row: rows with fewer sequences are padded with
            empty ones.
    """
    rows = rows[:, None] if rows.ndim == 3 else rows
    batch, answers, lines, seq = rows.shape
    flat: Batch = make_chat_batch(
        rows.reshape(batch * answers, lines, seq),
        (sample_numbers[:, None] * answers + np.arange(answers)).reshape(-1),
    )
    documents, _ = documents_and_padding(rows[:, :, 3])  # [batch, answers, seq]
    max_sequences = int(documents.max()) + 1
    samples = np.arange(batch)[:, None, None] * max_sequences + documents
    sequence_ids = torch.from_numpy(
        (samples * answers + np.arange(answers)[:, None]).reshape(batch * answers, seq)
    )
    values = row_values(rows)
    return {
        **{item.name: flat[item.name] for item in fields(Batch)},
        "sequence_ids": sequence_ids,
        "sequence_tokens": count_tokens(flat.loss_mask, sequence_ids, batch * max_sequences * answers),
        "values": None if values is None else values.reshape(batch * answers, seq),
    }


def count_tokens(loss_mask: Tensor, sequence_ids: Tensor, sequences: int) -> Tensor:
    """Return the number of tokens in the loss of each sequence, float32 [sequences]."""
    return torch.zeros(sequences).index_add_(0, sequence_ids.flatten(), loss_mask.flatten())
