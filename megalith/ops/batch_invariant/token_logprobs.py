"""Log-probabilities of tokens, the same in the trainer's loss and in the engine's sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_gather_no_grad
from megalith.ops import kernels
from megalith.ops.batch_invariant.elementwise import by_whole_vectors, sum_by_halves
from megalith.ops.batch_invariant.matmul import invariant_linear, local_parts
from megalith.ops.vocab_softmax import HeadMath, mask_padding

if kernels.AVAILABLE:
    from megalith.ops.kernels.batch_invariant_kernels import add_pairs_of_sums, softmax_sums


PARTS = 8  # of the vocabulary, each with sums of its own


def statistics(
    logits: Tensor,
    row: Tensor,
    is_local: Tensor,
    temperature: float | Tensor,
    entropy: bool,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log Σ exp, the targets' logits and the entropy as ops.vocab_softmax.vocabulary_statistics does.

    The vocabulary is split into up to PARTS equal chunks, whose sums are added by a binary tree. If the axis has 2, 4
    or 8 ranks and that number divides the vocabulary, each rank has some of the chunks, and the result is bitwise that
    of a single rank.

    A temperature may be float32 [tokens, 1].
    """
    if not isinstance(temperature, Tensor):
        # With a number, CUDA would multiply by the reciprocal.
        temperature = torch.full((), temperature, device=logits.device)
    count = local_parts(logits.shape[1], axis.size, PARTS)
    sums = _add_parts(_softmax_sums(logits, temperature, count))
    targets = torch.where(is_local, logits.gather(1, row).float() / temperature, 0.0)
    if axis.size > 1:
        mine = torch.cat([sums, targets.T])[None]  # [1, 3 + k, tokens]
        every = all_gather_no_grad(mine, axis)
        sums, targets = _add_parts(every[:, :3].transpose(0, 1)), every[:, 3:].sum(0).T
    largest, total, product = sums
    log_total = by_whole_vectors(torch.log, total)
    return largest + log_total, targets, log_total - product / total if entropy else None


def _softmax_sums(logits: Tensor, temperature: Tensor, parts: int) -> Tensor:
    """Return max z, Σ exp(z - max z) and Σ exp(z - max z) · (z - max z) of each chunk of the vocabulary.

    They are float32 [3, parts, tokens], of z = logits / temperature.
    """
    if logits.is_cuda:
        return softmax_sums(logits, temperature, parts)
    z = (logits.float() / temperature).unflatten(1, (parts, -1)).transpose(0, 1).contiguous()
    largest = z.amax(-1)
    shifted = z - largest[..., None]
    weights = by_whole_vectors(torch.exp, shifted)
    return torch.stack([largest, sum_by_halves(weights), sum_by_halves(weights * shifted)])


def _add_parts(sums: Tensor) -> Tensor:
    """Sum the results of `_softmax_sums` over the chunks, [3, chunks, tokens], by a binary tree of neighbours.

    Returns [3, tokens].
    """
    while (parts := sums.shape[1]) > 1:
        pairs, last = sums[:, : parts // 2 * 2], sums[:, parts // 2 * 2 :]
        added = add_pairs_of_sums(pairs) if sums.is_cuda else _add_pairs(pairs)
        sums = torch.cat([added, last], 1) if parts % 2 else added
    return sums[:, 0]


def _add_pairs(sums: Tensor) -> Tensor:
    pairs = sums.unflatten(1, (-1, 2))
    highest = pairs[0].amax(1)
    shift = pairs[0] - highest[:, None]  # [pairs, 2, tokens]
    factor = by_whole_vectors(torch.exp, shift)
    total = pairs[1] * factor
    product = pairs[2] * factor + total * shift
    return torch.stack([highest, total[:, 0] + total[:, 1], product[:, 0] + product[:, 1]])


BATCH_INVARIANT = HeadMath(invariant_linear, statistics, torch.float64)
"""Batch-invariant HeadMath.

Losses of tokens are added in fp64, in which the order, and so the context-parallel size, does not matter.
"""


def token_logprobs(
    logits: Tensor,
    ids: Tensor,
    temperature: float | Tensor,
    vocab_size: int,
    axis: Axis = Axis(),  # noqa: B008 (immutable)
    first: int = 0,
) -> Tensor:
    """Return the log-probabilities of sampled ids, float32 [rows], under softmax(logits / temperature).

    Args:
        logits: [rows, entries], results of `invariant_linear`. Entries from vocab_size on are overwritten.
        ids: int64 [rows].
        temperature: temperature of the softmax, a number or float32 [rows, 1].
        vocab_size: number of entries that are normalized over.
        axis: the ranks among which the vocabulary is sharded.
        first: vocabulary entry of this rank's first logit.
    """
    row = ids[:, None] - first
    is_local = (row >= 0) & (row < logits.shape[1])
    logits = mask_padding(logits, max(0, vocab_size - first))
    log_sum, logit, _ = statistics(logits, torch.where(is_local, row, 0), is_local, temperature, False, axis)
    return logit[:, 0] - log_sum
