"""Log-probabilities of tokens, the same in the trainer's loss and in the engine's sampling."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.ops import kernels
from megalith.ops.batch_invariant.elementwise import by_whole_vectors, sum_by_halves
from megalith.ops.batch_invariant.matmul import invariant_linear
from megalith.ops.cross_entropy import HeadMath, mask_padding

if kernels.AVAILABLE:
    from megalith.ops.kernels.batch_invariant_kernels import softmax_statistics


def statistics(
    logits: Tensor, row: Tensor, temperature: float | Tensor, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log Σ exp, the entries at `row`, and the entropy of the softmax of logits / temperature, in fp32.

    logits are [tokens, rows], `row` int64 [tokens, k]; a temperature may be float32 [tokens, 1]. Shapes are those of
    ops.cross_entropy's statistics.
    """
    if not isinstance(temperature, Tensor):
        # With a number, CUDA would multiply by the reciprocal.
        temperature = torch.full((), temperature, device=logits.device)
    z = logits.float() / temperature
    if z.is_cuda:
        log_sum, entropies = softmax_statistics(z)
        return log_sum, z.gather(1, row), entropies if entropy else None
    largest = z.amax(-1, keepdim=True)
    shifted = z - largest
    weights = by_whole_vectors(torch.exp, shifted)
    total = sum_by_halves(weights)
    log_total = by_whole_vectors(torch.log, total)
    entropies = log_total - sum_by_halves(weights * shifted) / total if entropy else None
    return largest[:, 0] + log_total, z.gather(1, row), entropies


BATCH_INVARIANT = HeadMath(invariant_linear, statistics)


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float | Tensor, vocab_size: int) -> Tensor:
    """Return the log-probabilities of sampled ids, float32 [rows], under softmax(logits / temperature).

    Args:
        logits: [rows, entries], of `invariant_linear`. Entries from vocab_size on are overwritten.
        ids: int64 [rows].
        temperature: of the softmax, or float32 [rows, 1].
        vocab_size: number of entries that are normalized over.
    """
    log_sum, logit, _ = statistics(mask_padding(logits, vocab_size), ids[:, None], temperature, False)
    return logit[:, 0] - log_sum
