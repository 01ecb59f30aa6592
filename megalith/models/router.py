"""The router, which selects the experts of each token and their weights.

One fp32 matrix computes a score per expert from the token's hidden state. The topk experts with the highest scores are
chosen, and their scores are the weights of their outputs. Variants:

    softmax            weights are the softmax over the chosen experts (Mixtral, Qwen3), or with moe_router_pre_softmax
                       the chosen experts' part of the softmax over all (OLMoE, DeepSeek-V2)
    sigmoid            weights are the chosen experts' sigmoids divided by their sum (DeepSeek-V3), or without
                       moe_router_norm_topk_prob the sigmoids (Llama 4)
    sparsemixer        each chosen expert's weight is a softmax over the experts that were not chosen before it and
                       whose logits are close to the highest of these (Phi-MoE; Liu et al. 2024, arXiv:2409.12136).
                       Training also chooses the best experts, without sampling
    groups             only experts of the best groups are chosen. A group's score is its best expert's (softmax,
                       DeepSeek-V2), or the sum of its best topk / group_topk (sigmoid, DeepSeek-V3)
    expert bias        added to the scores for choosing only; load_balance.py updates it after each step
    sinkhorn           in training, scores are balanced over the micro-batch for choosing only (Clark et al. 2022)
    forced balance     token n takes experts 11 · n · topk, 11 · (n · topk + 1), …, modulo their number: equal load, and
                       a token's experts are on about as many ranks as with random choices

The router can replay experts that were recorded earlier, as in reinforcement learning. Their weights are then computed
from the router's current scores, so the router still has a gradient.

With a capacity, an expert takes at most ⌈T · topk / E · factor⌉ of the T tokens of a micro-batch, over all ranks, so
the dropped pairs depend on micro_batch_size, but not on how tokens are distributed over ranks. Padding is dropped
first. Evaluation and generation drop nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor, nn

from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.load_balance import (
    TINY,
    LocalTokens,
    auxiliary_losses,
    empty_tally,
    sinkhorn_factors,
    tallied,
)
from megalith.models.pass_context import LayerRoutes
from megalith.ops.batch_invariant.elementwise import sigmoid
from megalith.ops.gemm import float32_matmul
from megalith.ops.permute import index_in_group

AFTER_ALL_TOKENS = 1 << 40  # more than the tokens of a micro-batch


@dataclass(frozen=True)
class Routing:
    """The experts of each token."""

    experts: Tensor  # int64 [tokens, topk]
    weights: Tensor  # float32 [tokens, topk]
    kept: Tensor | None = None  # bool [tokens, topk], False for dropped pairs; None: all are kept
    capacity: int | None = None  # maximum tokens of the micro-batch per expert; None: unlimited

    def destinations(self, count: int) -> Tensor:
        """Return `experts`, with dropped (token, expert) pairs replaced by `count`, the number of experts."""
        return self.experts if self.kept is None else torch.where(self.kept, self.experts, count)


class Router(nn.Module):
    """Chooses the experts of tokens by the scores of a matrix [experts, hidden].

    `local_tokens` is a seam: sequence and context parallelism shard a micro-batch's tokens. `logits` is a seam of
    batch invariance.
    """

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.config = config
        self.local_tokens = LocalTokens()
        self.logits = float32_matmul
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size, device=device))
        self.bias = None
        if config.add_router_bias:
            self.bias = nn.Parameter(torch.empty(config.num_experts, device=device))
        self.stride = next(step for step in count(11) if math.gcd(step, config.num_experts) == 1)
        has_bias = config.moe_router_enable_expert_bias
        self.register_buffer(
            "expert_bias", torch.zeros(config.num_experts, device=device) if has_bias else None
        )
        self.register_buffer("tally", empty_tally(config.num_experts, device), persistent=False)

    def forward(
        self,
        x: Tensor,
        token_ids: Tensor,
        batch: int,
        scale: Tensor | None,
        real: Tensor | None = None,
        routes: LayerRoutes | None = None,
    ) -> Routing:
        """Choose the experts of tokens, and compute their weights.

        Args:
            x: [tokens, hidden].
            token_ids: int64 [tokens], each token's number in the micro-batch: token_index · batch + sequence.
            batch: sequences in the micro-batch.
            scale: float32 scalar that multiplies the gradient of the balancing losses; None without a backward pass:
                there are then no losses and no capacity.
            real: bool [tokens], False for padding; None means all are real.
            routes: experts to replay, and memory that records the chosen ones.
        """
        logits = self.logits(x, local(self.weight).to(x.dtype))  # [tokens, experts]
        if self.bias is not None:
            logits = logits + local(self.bias).float()
        by_sigmoid = self.config.moe_router_score_function == "sigmoid"
        scores = sigmoid(logits) if by_sigmoid else logits.softmax(-1)
        if scale is not None and self.config.moe_router_load_balancing_type == "sinkhorn":
            shares = logits.detach().softmax(-1)
            counted = shares if real is None else shares * real[:, None]
            experts = self._best(shares * sinkhorn_factors(self.local_tokens.all_gather(counted)))
        else:
            experts = self._choose(scores.detach(), token_ids)
        if routes is not None:
            if routes.replayed is not None:
                experts = torch.where(routes.replayed >= 0, routes.replayed.long(), experts)
            if routes.recorded is not None:
                routes.recorded.copy_(experts)
        weights = self._weights(logits, scores, experts)
        if scale is None:
            return Routing(experts, weights)
        kept, capacity = self._keep(experts, weights.detach(), token_ids, real)
        by_score = experts
        if self.expert_bias is not None and self.config.moe_aux_loss_coeff:
            by_score = self._best(scores.detach())
        losses = auxiliary_losses(
            self.config, logits, scores, by_score, token_ids % batch, batch, real, self.local_tokens
        )
        weights = tallied(weights, losses, scale, self.tally, experts, kept, real)
        return Routing(experts, weights, kept, capacity)

    def _choose(self, scores: Tensor, token_ids: Tensor) -> Tensor:
        """Return the experts [tokens, topk] for scores [tokens, experts]."""
        topk, experts = self.config.moe_router_topk, self.config.num_experts
        if self.config.moe_router_force_load_balancing:
            pairs = token_ids[:, None] * topk + torch.arange(topk, device=token_ids.device)
            return pairs * self.stride % experts
        return self._best(scores if self.expert_bias is None else scores + self.expert_bias)

    def _best(self, scores: Tensor) -> Tensor:
        """Return the topk experts with the highest scores, of the best groups if there are groups."""
        config = self.config
        if config.moe_router_num_groups:
            grouped = scores.unflatten(1, (config.moe_router_num_groups, -1))  # [tokens, groups, ·]
            count_per_group = 1
            if config.moe_router_score_function == "sigmoid":
                count_per_group = config.moe_router_topk // config.moe_router_group_topk
            value = grouped.topk(count_per_group, dim=-1).values.sum(-1)
            best = value.topk(config.moe_router_group_topk, dim=-1).indices
            open_groups = torch.zeros_like(value, dtype=torch.bool).scatter(1, best, True)
            scores = grouped.masked_fill(~open_groups[..., None], float("-inf")).flatten(1)
        return scores.topk(config.moe_router_topk, dim=-1).indices

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """Return the weights [tokens, topk] of the chosen experts."""
        config = self.config
        if config.moe_router_score_function == "sigmoid":
            weights = scores.gather(1, experts)
            if config.moe_router_topk > 1 and config.moe_router_norm_topk_prob:
                weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        elif config.moe_router_score_function == "sparsemixer":
            weights = sparsemixer_weights(logits, experts, config.moe_sparsemixer_jitter_eps)
        elif config.moe_router_pre_softmax:
            weights = scores.gather(1, experts)
        else:
            weights = logits.gather(1, experts).softmax(-1)
        return weights if config.expert_weight_factor == 1 else weights * config.expert_weight_factor

    def _keep(
        self, experts: Tensor, weights: Tensor, token_ids: Tensor, real: Tensor | None
    ) -> tuple[Tensor | None, int | None]:
        """Return a mask [tokens, topk] of the (token, expert) pairs that are within the capacity, and the capacity in
        pairs per expert.

        Both are None without a capacity.
        """
        config = self.config
        if config.moe_expert_capacity_factor is None:
            return None, None
        if real is not None:  # padding comes last in either order
            token_ids = torch.where(real, token_ids, token_ids + AFTER_ALL_TOKENS)
            weights = weights.masked_fill(~real[:, None], -1.0)
        experts, weights, token_ids = (self.local_tokens.all_gather(x) for x in (experts, weights, token_ids))
        tokens, topk = experts.shape
        share = tokens * topk / config.num_experts
        capacity = min(math.ceil(share * config.moe_expert_capacity_factor), tokens)
        pairs = (token_ids.argsort()[:, None] * topk + torch.arange(topk, device=token_ids.device)).flatten()
        if config.moe_token_drop_policy == "probs":
            pairs = pairs[weights.flatten()[pairs].argsort(descending=True, stable=True)]
        chosen = experts.flatten()
        pairs = pairs[chosen[pairs].argsort(stable=True)]  # by expert, those to keep first
        kept = index_in_group(chosen[pairs], config.num_experts) < capacity
        kept = torch.empty_like(kept).scatter(0, pairs, kept).view(tokens, topk)
        return self.local_tokens.local_slice(kept), capacity


def sparsemixer_weights(logits: Tensor, experts: Tensor, jitter_eps: float) -> Tensor:
    """Return SparseMixer's weights of the chosen experts (Liu et al. 2024, arXiv:2409.12136).

    Args:
        logits: float32 [tokens, experts].
        experts: int64 [tokens, topk], the chosen experts, in the order of choice.
        jitter_eps: an expert is compared if its logit is below the best by at most 2 · jitter_eps times the larger of
            the best logit and the absolute value of its own.

    Returns:
        Float32 [tokens, topk]. Each weight is a softmax over the compared experts, without the experts chosen before.
    """
    weights, remaining = [], logits
    for expert in experts.split(1, dim=1):
        best = remaining.detach().amax(-1, keepdim=True)
        below = (best - logits.detach()) / logits.detach().abs().maximum(best)
        is_far = (below > 2 * jitter_eps).scatter(1, expert, False)  # a replayed expert may have a low logit
        weights.append(remaining.masked_fill(is_far, float("-inf")).softmax(-1).gather(1, expert))
        remaining = remaining.scatter(1, expert, float("-inf"))
    return torch.cat(weights, dim=1)
