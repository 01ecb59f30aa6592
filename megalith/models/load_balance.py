"""Losses that balance the experts and keep the router's logits small, and the tally of tokens per expert.

p_te is the score of token t for expert e as a probability; n_e is the number of a micro-batch's T tokens that choose
expert e by their scores, without the expert bias:

    aux       E / (topk · T²) · Σ_e (Σ_t p_te) · n_e       (Fedus et al. 2021), or 1 if perfectly balanced
    seq aux   the same per sequence, averaged over the sequences
    z         1 / T · Σ_t (log Σ_e exp logit_te)²          (Zoph et al. 2022)

Padding counts neither among the tokens nor in any sum, as in Megatron core from 0.16 on. With padding, `seq aux` uses
each sequence's own T, and sequences without tokens are left out; Megatron divides by the mean T of the sequences
instead.

The gradient of coefficient · loss, averaged over the micro-batches of the global batch, is added to the gradient of the
tokens' mean loss. The losses are defined per micro-batch: ranks that share one add the terms of their own tokens, with
counts over all tokens. They therefore depend on micro_batch_size, but not on how tokens are distributed over ranks.

An autograd node attaches the losses to the weights of the chosen experts. In the backward pass, the node passes on the
gradient of the weights and adds the gradient of the losses. It also updates the tally, because each forward pass that
counts has exactly one backward pass, even with recomputation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.ops.permute import count_values

# A tally, float32 [experts + 3]: tokens per expert, dropped (token, expert) pairs, the losses without coefficients.
DROPPED, AUX, Z = -3, -2, -1

TINY = 1e-20  # added to divisors
SINKHORN_ROUNDS = 20  # a fixed number, so that the host never waits for the device


class LocalTokens:
    """Reductions over the tokens of a micro-batch, for a rank that has all of them.

    Sequence and context parallelism use a subclass for tokens that are sharded over ranks.
    """

    shards = 1
    """Number of ranks that the micro-batch's tokens are sharded over."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over the shards. Not differentiable."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x [local tokens, …] of all shards, concatenated. Not differentiable."""
        return x

    def local_slice(self, x: Tensor) -> Tensor:
        """Return this shard's rows of x [tokens, …]."""
        return x


def auxiliary_losses(
    config: ModelConfig,
    logits: Tensor,  # float32 [tokens, experts]
    scores: Tensor,  # float32 [tokens, experts]
    chosen: Tensor,  # int64 [tokens, topk], best experts by score
    sequences: Tensor,  # int64 [tokens], each token's sequence
    batch: int,
    real: Tensor | None,  # bool [tokens], False for padding; None: all are real
    local_tokens: LocalTokens,
) -> tuple[Tensor, Tensor]:
    """Return these tokens' terms of the micro-batch's losses aux and z, float32 [2], and their sum weighted by the
    coefficients."""
    tokens, topk, experts = len(logits) * local_tokens.shards, config.moe_router_topk, config.num_experts
    counts = None if real is None else real.float()  # [tokens], 1 for tokens that count
    kind = config.moe_router_load_balancing_type
    aux = z = torch.zeros((), device=logits.device)
    if config.moe_aux_loss_coeff and kind != "none":
        if config.moe_router_score_function == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
        if kind == "aux_loss":
            sequences, batch = torch.zeros_like(sequences), 1
        cells = (sequences[:, None] * experts + chosen).flatten()
        ones = (
            torch.ones_like(cells, dtype=torch.float32) if counts is None else counts.repeat_interleave(topk)
        )
        loads = scores.new_zeros(batch * experts).scatter_add(0, cells, ones)
        loads = local_tokens.all_reduce(loads).view(batch, experts)
        if counts is None:
            factor = experts * batch / (topk * tokens**2)
        else:
            scores = scores * counts[:, None]
            lengths = loads.sum(1, keepdim=True) / topk  # [batch, 1], tokens of each sequence
            factor = experts / (topk * lengths.square() * (lengths > 0).sum()).clamp(min=1)
        aux = (scores * (loads * factor)[sequences]).sum()
    if config.moe_z_loss_coeff:
        squares = logits.logsumexp(-1).square()
        if counts is None:
            z = squares.sum() / tokens
        else:
            z = (squares * counts).sum() / local_tokens.all_reduce(counts.sum()).clamp(min=1)
    return torch.stack([aux, z]).detach(), config.moe_aux_loss_coeff * aux + config.moe_z_loss_coeff * z


def sinkhorn_factors(shares: Tensor) -> Tensor:
    """Return a factor per expert, float32 [experts], by Sinkhorn's iteration (Sinkhorn and Knopp 1967).

    Args:
        shares: float32 [tokens, experts], the softmax of the logits of a full micro-batch. After multiplication by the
            experts' factors and by a factor per token, each token's shares sum to 1 / tokens and each expert's to 1 /
            experts.
    """
    tokens, experts = shares.shape
    factors = shares.new_ones(experts)
    for _ in range(SINKHORN_ROUNDS):
        token_factors = 1 / (tokens * (shares * factors).sum(1) + TINY)
        factors = 1 / (experts * (shares * token_factors[:, None]).sum(0) + TINY)
    return factors


def empty_tally(experts: int, device: torch.device | None) -> Tensor:
    return torch.zeros(experts + 3, device=device)


def tallied(
    weights: Tensor,  # float32 [tokens, topk]
    losses: tuple[Tensor, Tensor],  # of auxiliary_losses
    scale: Tensor,
    tally: Tensor,
    experts: Tensor,  # int64 [tokens, topk]
    kept: Tensor | None,  # bool [tokens, topk]
    real: Tensor | None,  # bool [tokens], False for padding; None: all are real
) -> Tensor:
    """Return `weights`. The backward pass starts the losses' gradient with `scale` and adds these tokens to `tally`."""
    count = len(tally) - 3
    if real is not None:  # padding counts for one expert more, which is left out
        experts, kept = (
            experts.masked_fill(~real[:, None], count),
            None if kept is None else kept | ~real[:, None],
        )
    counts = count_values(experts.flatten(), count + 1)[:count].float()
    dropped = torch.zeros_like(counts[:1]) if kept is None else (~kept).sum().float()[None]
    values, loss = losses
    return _AttachLosses.apply(weights, loss, scale, torch.cat([counts, dropped, values]), tally)


class _AttachLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, loss: Tensor, scale: Tensor, counts: Tensor, tally: Tensor) -> Tensor:
        ctx.save_for_backward(scale, counts)
        ctx.tally = tally
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor):
        scale, counts = ctx.saved_tensors
        ctx.tally += counts
        return grad, scale, None, None, None


@torch.no_grad()
def move_bias(bias: Tensor, counts: Tensor, rate: float, skipped: Tensor) -> None:
    """Update the expert bias after a step, in place (Wang et al. 2024).

    Args:
        bias: float32 [experts]; increases for experts with fewer tokens than the mean, decreases for others.
        counts: float32 [experts], tokens per expert of the full step.
        rate: amount of the change.
        skipped: 1 if the step was skipped, which leaves the bias unchanged, else 0.
    """
    bias += rate * (1 - skipped) * (counts.mean() - counts).sign()
