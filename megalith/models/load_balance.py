"""Losses that balance the experts and keep the router's logits small, and the tally of how balanced they are.

With p_te the scores of token t as probabilities and n_e the number of the T tokens of a micro-batch whose scores (the
expert bias left out) chose expert e:

    aux       E / (topk · T²) · Σ_e (Σ_t p_te) · n_e       (Fedus et al. 2021); 1 when all is even
    seq aux   the same over each sequence, averaged over the sequences
    z         1 / T · Σ_t (log Σ_e exp logit_te)²          (Zoph et al. 2022)

A step's gradient is that of the tokens' mean loss plus, for every layer, the mean over the micro-batches of the global
batch of coefficient · loss. The losses are of whole micro-batches: ranks that share one each add their own tokens'
part, in which the counts alone are those of all. So they depend on micro_batch_size and on nothing else of the layout.

The losses join the graph where the weights of the chosen experts do: that edge passes their gradient on, and hands
the losses theirs. Every forward pass that counts has one backward pass, even where it is computed again, so that is
where the tally is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.ops.permute import count_values

# A tally, float32 [experts + 3]: the tokens of each expert, then these.
DROPPED, AUX, Z = -3, -2, -1  # dropped pairs of token and expert; the two losses before their coefficients


TINY = 1e-20  # added to sums that are divided by
SINKHORN_ROUNDS = 20  # a fixed number, so that the host never waits


class LocalTokens:
    """The tokens of a micro-batch on this rank: all of them. Sequence and context parallelism shard them."""

    shards = 1
    """Number of ranks that the micro-batch's tokens are sharded over."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the shards. Not differentiable."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return x [tokens here, …] of all shards, concatenated. Not differentiable."""
        return x

    def local_slice(self, x: Tensor) -> Tensor:
        """Return this shard's rows of x [tokens, …]."""
        return x


def auxiliary_losses(
    config: ModelConfig,
    logits: Tensor,  # float32 [tokens, experts]
    scores: Tensor,  # float32 [tokens, experts]
    chosen: Tensor,  # int64 [tokens, topk], by score
    sequences: Tensor,  # int64 [tokens]: of `batch` ones
    batch: int,
    local_tokens: LocalTokens,
) -> tuple[Tensor, Tensor]:
    """The part of these tokens in the micro-batch's losses: float32 [aux, z], and the same by their coefficients."""
    tokens, experts = len(logits) * local_tokens.shards, config.num_experts
    kind = config.moe_router_load_balancing_type
    aux = z = torch.zeros((), device=logits.device)
    if config.moe_aux_loss_coeff and kind != "none":
        if config.moe_router_score_function == "sigmoid":
            scores = scores / (scores.sum(-1, keepdim=True) + TINY)
        if kind == "aux_loss":
            sequences, batch = torch.zeros_like(sequences), 1
        cells = (sequences[:, None] * experts + chosen).flatten()
        loads = scores.new_zeros(batch * experts).scatter_add(
            0, cells, torch.ones_like(cells, dtype=torch.float32)
        )
        loads = local_tokens.all_reduce(loads).view(batch, experts)
        aux = (scores * loads[sequences]).sum() * (experts * batch / (config.moe_router_topk * tokens**2))
    if config.moe_z_loss_coeff:
        z = logits.logsumexp(-1).square().sum() / tokens
    return torch.stack([aux, z]).detach(), config.moe_aux_loss_coeff * aux + config.moe_z_loss_coeff * z


def sinkhorn_factors(shares: Tensor) -> Tensor:
    """A factor for each expert, float32 [experts], by Sinkhorn's iteration (Sinkhorn and Knopp 1967).

    Of `shares` float32 [tokens, experts], the softmax of the logits of a whole micro-batch. Multiplied by its expert's
    factor and by one of its token, every token's sum is 1 / tokens and every expert's 1 / experts.
    """
    tokens, experts = shares.shape
    factors = shares.new_ones(experts)
    for _ in range(SINKHORN_ROUNDS):
        of_tokens = 1 / (tokens * (shares * factors).sum(1) + TINY)
        factors = 1 / (experts * (shares * of_tokens[:, None]).sum(0) + TINY)
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
) -> Tensor:
    """`weights`; in the backward pass the losses get their gradient, `scale`, and the tally is added to."""
    counts = count_values(experts.flatten(), len(tally) - 3).float()
    dropped = torch.zeros_like(counts[:1]) if kept is None else (~kept).sum().float()[None]
    values, loss = losses
    return _Join.apply(weights, loss, scale, torch.cat([counts, dropped, values]), tally)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights: Tensor, loss: Tensor, scale: Tensor, figures: Tensor, tally: Tensor) -> Tensor:
        ctx.save_for_backward(scale, figures)
        ctx.tally = tally
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad: Tensor):
        scale, figures = ctx.saved_tensors
        ctx.tally += figures
        return grad, scale, None, None, None


@torch.no_grad()
def move_bias(bias: Tensor, counts: Tensor, rate: float, skipped: Tensor) -> None:
    """The expert bias after a step: each expert's goes up by `rate` where it had fewer tokens than the mean, down
    where it had more (Wang et al. 2024). `counts` float32 [experts] are of the whole step; a skipped one changes none.
    """
    bias += rate * (1 - skipped) * (counts.mean() - counts).sign()
