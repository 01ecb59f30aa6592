"""Sampling on the device with the Gumbel-max trick: argmax(logits / T + noise) follows softmax(logits / T).

The noise of a vocabulary entry is a function of the row's key and the entry's number (the hash of ops/dropout.py), not
of a random state. Samples thus do not depend on the other rows or on the sharding of the vocabulary: each rank finds
the best of its entries, and five numbers per row are exchanged.

Top-k, top-p and min-p keep the entries above a minimum logit. That logit is found without sorting the vocabulary: the
total probability of the entries above a logit falls as the logit rises, so bisection over the 2^32 floats finds the
smallest logit at which the total is below top_p. Entries with equal logits are kept or dropped together. On a CPU,
ranks that share the vocabulary exchange their logits first, because a collective per bisection takes longer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_gather_no_grad, all_reduce_no_grad
from megalith.ops import kernels
from megalith.ops.compiled import as_one_kernel
from megalith.ops.dropout import column_keys, mix

ALONE = Axis()
LOWEST = -1e30  # maximum of an empty set of logits

if kernels.AVAILABLE:
    from megalith.ops.kernels.sampling_kernel import sampled_blocks as _by_kernel


def sample(
    logits: Tensor,  # [rows, local entries], any float dtype
    keys: Tensor,  # int32 [rows], keys of the noise
    temperature: float,  # 0: greedy
    *,
    vocab_size: int,  # entries from here on are never sampled
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    axis: Axis = ALONE,  # shards the vocabulary
    first: int = 0,  # first local entry
) -> tuple[Tensor, Tensor]:
    """Sample one entry per row.

    Returns:
        Entries, int64 [rows], and their log-probabilities, float32 [rows], under softmax(logits / temperature) over the
        entries kept by top_k, top_p and min_p; at temperature 0 under softmax(logits). Equal on every rank of the
        axis.
    """
    real = min(max(vocab_size - first, 0), logits.shape[1])
    inverse = 1 / max(temperature, 1e-30) if temperature else 1.0
    least = None
    if temperature and (top_k or top_p < 1 or min_p):
        searched, ranks = _entries_to_search(logits, real, axis)
        least = least_logit(searched, inverse, top_k, top_p, min_p, ranks)
    blocks = sampled_blocks(logits, keys, least, first, real, temperature, inverse)
    blocks = all_gather_no_grad(blocks[None], axis)
    blocks = blocks.transpose(0, 1).flatten(1, 2)  # [rows, blocks of all ranks, 5]
    return _combine_blocks(blocks, inverse)


def sample_rows(
    logits: Tensor,  # [rows, local entries], any float dtype
    keys: Tensor,  # int32 [rows], keys of the noise
    settings: Tensor,  # float32 [4, rows]: temperature (0: greedy), top_k (0: all), top_p and min_p
    has_filters: bool,  # False if no row uses top_k, top_p or min_p
    *,
    vocab_size: int,
    axis: Axis = ALONE,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sample one entry per row like `sample`, with separate settings per row."""
    temperature, top_k, top_p, min_p = settings
    real, least = min(max(vocab_size - first, 0), logits.shape[1]), None
    if has_filters:
        is_greedy = temperature == 0
        logits = logits.float() / torch.where(is_greedy, 1.0, temperature)[:, None]
        temperature = torch.where(is_greedy, 0.0, 1.0)
        searched, ranks = _entries_to_search(logits, real, axis)
        least = least_logit_by_row(searched, top_k, top_p, min_p, ranks)
        least = least.masked_fill(is_greedy, -math.inf)
    blocks = sampled_blocks_by_row(logits, keys, least, first, real, temperature)
    blocks = all_gather_no_grad(blocks[None], axis).transpose(0, 1).flatten(1, 2)
    return _combine_blocks(blocks, 1.0)


def sampled_blocks(
    logits: Tensor,
    keys: Tensor,
    least: Tensor | None,
    first: int,
    real: int,
    temperature: float,
    inverse: float,
) -> Tensor:
    """Return five statistics of each block of vocabulary entries, per row.

    Args:
        logits: [rows, local entries].
        keys: int32 [rows], keys of the noise.
        least: float32 [rows], the smallest logit that may be sampled, or None for no limit.
        first: index of the first local entry.
        real: number of local entries without vocabulary padding.
        temperature: factor on the Gumbel noise; 0: no noise.
        inverse: 1 / temperature, or 1 if the temperature is 0.

    Returns:
        float32 [rows, blocks, 5]: the maximum of logit + temperature · noise; the index and the logit of the entry
        with this maximum; the largest logit; Σ exp((logit − largest logit) · inverse).
    """
    if logits.is_cuda and kernels.AVAILABLE:
        return _by_kernel(logits, keys, least, first, real, temperature, inverse)
    if not real:
        return logits.new_tensor([-math.inf, 0, 0, LOWEST, 0], dtype=torch.float32).repeat(len(logits), 1, 1)
    z = logits[:, :real].float()
    if least is not None:
        z = z.masked_fill(z < least[:, None], -math.inf)
    largest, index = z.max(-1)
    largest = largest.clamp(min=LOWEST)  # nothing of this shard is kept
    weights = z.sub(largest[:, None]).mul_(inverse).exp_()
    sums, peak = weights.sum(-1), largest
    if temperature:  # argmax of log weight + noise is argmin of exponential / weight, which saves a logarithm
        columns = column_keys(real, z.device, first)
        ratio, index = exponential(keys[:, None] ^ columns).div_(weights).min(-1)
        peak = largest - temperature * ratio.log()
    chosen = z.gather(1, index[:, None])[:, 0]
    return torch.stack([peak, index + float(first), chosen, largest, sums], -1)[:, None]


def sampled_blocks_by_row(
    logits: Tensor, keys: Tensor, least: Tensor | None, first: int, real: int, temperature: Tensor
) -> Tensor:
    """Return `sampled_blocks` of logits / temperature, with a temperature per row, float32 [rows].

    A row with temperature 0 is not divided and gets no noise. `least` is a bound on the quotients.
    """
    if logits.is_cuda and kernels.AVAILABLE:
        return _by_kernel(logits, keys, least, first, real, 1.0, 1.0, temperature)
    is_greedy = temperature == 0
    z = logits.float() / torch.where(is_greedy, 1.0, temperature)[:, None]
    blocks = sampled_blocks(z, keys, least, first, real, 1.0, 1.0)
    if z.is_cuda or is_greedy.any():  # a GPU is not waited for
        greedy = sampled_blocks(z, keys, None, first, real, 0.0, 1.0)
        blocks = torch.where(is_greedy[:, None, None], greedy, blocks)
    return blocks


def exponential(keys: Tensor) -> Tensor:
    """Return exponential noise −log(1 − v) for int32 keys, float32. −log of it is Gumbel noise.

    v in (0, 1) has 31 bits, all of which are significant for small v.
    """
    v = (mix(keys) & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    return v.neg_().log1p_().neg_()


def _combine_blocks(blocks: Tensor, inverse: float) -> tuple[Tensor, Tensor]:
    """Compute the sampled entries and their log-probabilities from the statistics of blocks, [rows, blocks, 5]."""
    peak, entry, chosen, largest, sums = blocks.unbind(-1)  # [rows, blocks] each
    best = peak.argmax(-1, keepdim=True)
    top = largest.amax(-1)
    total = (sums * ((largest - top[:, None]) * inverse).exp()).sum(-1)
    logprob = (chosen.gather(1, best)[:, 0] - top) * inverse - total.log()
    return entry.gather(1, best)[:, 0].long().clamp_(min=0), logprob  # 0 if all logits are NaN


def _entries_to_search(logits: Tensor, real: int, axis: Axis) -> tuple[Tensor, Axis]:
    """Return the logits to search for the smallest kept one, and the axis of the ranks that search together.

    On a GPU, each rank searches its own entries without padding, and the axis reduces the sums. On a CPU, each rank
    gathers the entries of all ranks and searches all of them.
    """
    if axis.size == 1 or logits.is_cuda:
        return logits[:, :real], axis
    padding = logits.shape[1] - real
    entries = torch.nn.functional.pad(logits[:, :real], (0, padding), value=-math.inf)
    return all_gather_no_grad(entries[None], axis).transpose(0, 1).flatten(1), ALONE


def least_logit(
    logits: Tensor, inverse: float, top_k: int, top_p: float, min_p: float, axis: Axis = ALONE
) -> Tensor:
    """Return the smallest logit that passes the filters top_k, top_p and min_p, float32 [rows].

    logits are [rows, local entries]. An entry is kept if fewer than top_k entries are more likely, if the more likely
    ones have less than top_p of the probability mass that top_k keeps, and if its probability is at least min_p times
    the largest.
    """
    z = logits.float() if logits.shape[1] else logits.new_full((len(logits), 1), LOWEST, dtype=torch.float32)
    top = all_reduce_no_grad(z.amax(-1), axis, "max")
    least = torch.full_like(top, -math.inf)
    if top_k:
        best = z.topk(min(top_k, z.shape[1])).values
        if axis.size > 1:
            best = torch.nn.functional.pad(best, (0, top_k - best.shape[1]), value=-math.inf)
            best = all_gather_no_grad(best[None], axis).transpose(0, 1).flatten(1).topk(top_k).values
        least = best[:, -1]
    if top_p < 1:
        weights = ((z - top[:, None]) * inverse).exp().masked_fill(z < least[:, None], 0.0)
        goal = all_reduce_no_grad(weights.sum(-1), axis) * top_p
        low, high = _ordered(least), _ordered(top)
        for _ in range(32):
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            mass = as_one_kernel(_mass_above, z, weights, _ordered(middle, back=True), sizes_vary=True)
            enough = all_reduce_no_grad(mass, axis) < goal
            low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
        least = torch.maximum(least, _ordered(high, back=True))
    if min_p:
        least = torch.maximum(least, top + math.log(min_p) / inverse)
    return least


def least_logit_by_row(z: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, axis: Axis = ALONE) -> Tensor:
    """Return `least_logit` with separate settings per row. The logits z must already be divided by the temperature."""
    z = z if z.shape[1] else z.new_full((len(z), 1), LOWEST)
    top = all_reduce_no_grad(z.amax(-1), axis, "max")
    most = torch.where(top_k > 0, top_k, math.inf)
    least = _smallest(torch.full_like(top, -math.inf), top, most, z, torch.ones_like(z), axis)
    weights = (z - top[:, None]).exp().masked_fill(z < least[:, None], 0.0)
    goal = all_reduce_no_grad(weights.sum(-1), axis) * torch.where(top_p < 1, top_p, math.inf)
    least = _smallest(least, top, goal, z, weights, axis)
    return torch.maximum(least, top + min_p.log())


def _smallest(low: Tensor, high: Tensor, goal: Tensor, z: Tensor, weights: Tensor, axis: Axis) -> Tensor:
    """Return the smallest bound of each row, between low and high, above which the weights sum to less than `goal`."""
    low, high = _ordered(low), _ordered(high)
    for _ in range(32):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        mass = as_one_kernel(_mass_above, z, weights, _ordered(middle, back=True), sizes_vary=True)
        enough = all_reduce_no_grad(mass, axis) < goal
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return _ordered(high, back=True)


def _mass_above(z: Tensor, weights: Tensor, bound: Tensor) -> Tensor:
    return torch.where(z > bound[:, None], weights, 0.0).sum(-1)


def _ordered(x: Tensor, back: bool = False) -> Tensor:
    """Map float32 to int32 so that the order is preserved; with `back`, invert the map."""
    bits = x if back else x.view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32) if back else bits
