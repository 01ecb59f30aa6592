"""Rows of completions with their prompts, and the micro-batches that are made of them.

A row of data.seq_length tokens holds one prompt with its completion. With packing it holds as many as fit, and
attention does not cross between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megalith.config import RunConfig
from megalith.data.batch import document_ends
from megalith.rl.objectives.policy_loss import RolloutBatch
from megalith.rl.rollouts.rollouts import RatedCompletion


@dataclass(frozen=True)
class Sample:
    """A prompt and completion with its advantage."""

    prompt_ids: np.ndarray
    completion: RatedCompletion
    advantage: float | np.ndarray  # of all tokens, or float64 [tokens of the completion]
    in_loss: bool | np.ndarray  # for all tokens, or bool [tokens]
    where: str = ""  # prompt and completion number, for errors
    number: int = 0  # of the completion within the rollout batch

    @property
    def tokens(self) -> int:
        """Number of tokens in a row. The last token is only a label."""
        return len(self.prompt_ids) + len(self.completion.ids) - 1

    @property
    def tokens_in_loss(self) -> int:
        return int(np.broadcast_to(self.in_loss, len(self.completion.ids)).sum())


def pack_rows(samples: Sequence[Sample], row_length: int) -> list[list[Sample]]:
    """Assign samples to rows, longest first.

    With `row_length` 0 each sample has its own row. Otherwise samples are packed best fit decreasing into rows of that
    length.
    """
    by_length = sorted(samples, key=lambda sample: -sample.tokens)
    if not row_length:
        return [[sample] for sample in by_length]
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in by_length:
        candidates = [(space, row) for row, space in enumerate(room) if space >= sample.tokens]
        if candidates:
            space, row = min(candidates)
            rows[row].append(sample)
            room[row] = space - sample.tokens
        else:
            rows.append([sample])
            room.append(row_length - sample.tokens)
    return rows


def packing_metrics(rows: Sequence[Sequence[Sample]], row_length: int) -> dict[str, float]:
    """Return the number of rows of a mini-batch and the fraction of tokens that is not padding; empty without
    packing."""
    if not row_length:
        return {}
    tokens = sum(sample.tokens for row in rows for sample in row)
    return {"packing_rows": len(rows), "packing_filled": tokens / (len(rows) * row_length)}


def proximal_weights(rows: Sequence[Sequence[Sample]], first: int, step: int, like: Tensor) -> Tensor:
    """Return α = (first − v) / (step − v) per token; v is the version of the weights that sampled the token.

    `first` is the first step of the rollout batch, and `step` the current one. α is the position of the weights before
    step `first` on a line from version v (0) to the current weights (1). It is 1 outside completions. The result is
    float32, shaped like `like` [batch, seq].
    """
    weights = np.ones(like.shape, dtype=np.float32)
    for index, row in enumerate(rows):
        begin = 0
        for sample in row:
            end = begin + sample.tokens
            lag = np.maximum(first - sample.completion.version, 0)
            weights[index, begin + len(sample.prompt_ids) - 1 : end] = lag / (lag + step - first)
            begin = end
    return torch.from_numpy(weights).to(like.device)


def make_batch(config: RunConfig, rows: Sequence[Sequence[Sample]], first_row: int) -> RolloutBatch:
    """Return a micro-batch of `rows`, each padded to data.seq_length tokens.

    Args:
        config: configuration of the run.
        rows: the samples of each row. A row without samples is all padding and adds nothing to the loss.
        first_row: number within the run of the batch's first row. Dropout masks depend on it.
    """
    shape = (len(rows), config.data.seq_length)
    ids, labels, positions, sequence_ids = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    mask, advantage, logprobs = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    starts, padding = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
    routes = _empty_routes(config, shape)
    tokens: list[float] = []
    for index, row in enumerate(rows):
        start = 0
        for sample in row:
            ids_and_labels = np.concatenate([sample.prompt_ids, sample.completion.ids])
            end = start + sample.tokens
            completion = slice(start + len(sample.prompt_ids) - 1, end)
            ids[index, start:end], labels[index, start:end] = ids_and_labels[:-1], ids_and_labels[1:]
            positions[index, start:end] = np.arange(sample.tokens)
            starts[index, start] = True
            sequence_ids[index, start:end] = len(tokens)
            mask[index, completion] = sample.in_loss
            advantage[index, completion] = sample.advantage
            rollout_logprobs = sample.completion.logprobs
            logprobs[index, completion] = np.nan if rollout_logprobs is None else rollout_logprobs
            if routes is not None and sample.completion.routes is not None:
                routes[index, start:end] = np.asarray(sample.completion.routes)[-sample.tokens :]
            tokens.append(float(mask[index, start:end].sum()))
            start = end
        starts[index, start : start + 1] = True  # padding
        padding[index, start:] = True
    tensors = map(torch.from_numpy, (ids, labels, mask, positions, advantage, sequence_ids, logprobs))
    ids, labels, mask, positions, advantage, sequence_ids, logprobs = tensors
    return RolloutBatch(
        ids,
        labels,
        mask,
        positions,
        # Without packing the sample comes first and causal attention cannot see the padding.
        document_ends(starts) if config.rl.packing else None,
        torch.arange(first_row, first_row + len(rows)),
        advantage,
        sequence_ids,
        torch.tensor(tokens),
        None if logprobs[mask > 0].isnan().all() else logprobs,
        all_padding=torch.from_numpy(padding),
        routes=None if routes is None else torch.from_numpy(routes),
    )


def _empty_routes(config: RunConfig, shape: tuple[int, int]) -> np.ndarray | None:
    """Return expert ids for rows [batch, seq] that let the router choose everywhere. None if the run has no router
    replay.
    """
    if not config.rl.replays_routes:
        return None
    return np.full((*shape, len(config.model.routed_layers), config.model.moe_router_topk), -1, np.int16)


def has_rollout_logprobs(rows: Sequence[Sequence[Sample]]) -> bool:
    """Return True if a loss token of these rows has a log-probability from the engine."""
    logprobs = [
        np.asarray(sample.completion.logprobs)[np.broadcast_to(sample.in_loss, len(sample.completion.ids))]
        for row in rows
        for sample in row
        if sample.completion.logprobs is not None
    ]
    return not all(np.isnan(values).all() for values in logprobs)
