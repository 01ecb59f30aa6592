"""The router: which experts each token goes to, and with what weight.

A score for every expert is made of the token's hidden state by one matrix, in fp32. The topk best are chosen, and
their scores are the weights of their outputs. The variants:

    softmax            weights are the softmax over the chosen (Mixtral, Qwen3), or with moe_router_pre_softmax what
                       the softmax over all experts gives to the chosen (OLMoE, DeepSeek-V2)
    sigmoid            weights are the sigmoids of the chosen, divided by their sum (DeepSeek-V3)
    groups             only experts of the best groups can be chosen. A group is as good as its best expert (softmax,
                       DeepSeek-V2), or as the sum of its best topk / group_topk (sigmoid, DeepSeek-V3)
    expert bias        added to the scores for choosing alone; balance.py moves it after each step
    sinkhorn           in training the choice is by the scores after they were balanced over the micro-batch, with the
                       weights and the gradient of the scores as they are (Clark et al. 2022)
    forced balance     token n of the micro-batch takes experts 11 · n · topk, 11 · (n · topk + 1), …, modulo their
                       number: each expert is taken as often, and a token's stand on about as many ranks as by chance

With a capacity, an expert takes at most ⌈T · topk / E · factor⌉ tokens of a micro-batch: of all its
tokens, whatever ranks they are on, so what is dropped depends on micro_batch_size and on nothing else of the layout.
In evaluation and generation nothing is dropped.
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
from megalith.ops.gemm import float32_matmul
from megalith.ops.permute import index_in_group


@dataclass(frozen=True)
class Routing:
    """Where the tokens go."""

    experts: Tensor  # int64 [tokens, topk]
    weights: Tensor  # float32 [tokens, topk]
    kept: Tensor | None = None  # bool [tokens, topk], false for what is dropped; None: all are kept
    capacity: int | None = None  # the most tokens of the micro-batch that an expert takes; None: any number

    def destinations(self, count: int) -> Tensor:
        """`experts`, with their number `count` for what is dropped."""
        return self.experts if self.kept is None else torch.where(self.kept, self.experts, count)


class Router(nn.Module):
    """The matrix [experts, hidden], and the choice. `micro_batch` is the seam of whatever cuts the tokens."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.config = config
        self.local_tokens = LocalTokens()
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

    def forward(self, x: Tensor, numbers: Tensor, batch: int, scale: Tensor | None) -> Routing:
        """The routing of x [tokens, hidden].

        `numbers` int64 [tokens] are the tokens' numbers in the micro-batch of `batch` sequences, place · batch +
        sequence. `scale`, a float32 scalar, multiplies the gradient of the balancing losses; None where there is no
        backward pass: then there are no losses, and no capacity.
        """
        logits = float32_matmul(x, local(self.weight).to(x.dtype))  # [tokens, experts]
        if self.bias is not None:
            logits = logits + local(self.bias).float()
        by_softmax = self.config.moe_router_score_function == "softmax"
        scores = logits.softmax(-1) if by_softmax else logits.sigmoid()
        if scale is not None and self.config.moe_router_load_balancing_type == "sinkhorn":
            shares = logits.detach().softmax(-1)
            experts = self._best(shares * sinkhorn_factors(self.local_tokens.all_gather(shares)))
        else:
            experts = self._choose(scores.detach(), numbers)
        weights = self._weights(logits, scores, experts)
        if scale is None:
            return Routing(experts, weights)
        kept, capacity = self._keep(experts, weights.detach(), numbers)
        by_score = experts
        if self.expert_bias is not None and self.config.moe_aux_loss_coeff:
            by_score = self._best(scores.detach())
        losses = auxiliary_losses(
            self.config, logits, scores, by_score, numbers % batch, batch, self.local_tokens
        )
        weights = tallied(weights, losses, scale, self.tally, experts, kept)
        return Routing(experts, weights, kept, capacity)

    def _choose(self, scores: Tensor, numbers: Tensor) -> Tensor:
        """The experts [tokens, topk] by scores [tokens, experts]."""
        topk, experts = self.config.moe_router_topk, self.config.num_experts
        if self.config.moe_router_force_load_balancing:
            turns = numbers[:, None] * topk + torch.arange(topk, device=numbers.device)
            return turns * self.stride % experts
        return self._best(scores if self.expert_bias is None else scores + self.expert_bias)

    def _best(self, scores: Tensor) -> Tensor:
        """The topk experts with the highest scores, where there are groups in the best of them."""
        config = self.config
        if config.moe_router_num_groups:
            grouped = scores.unflatten(1, (config.moe_router_num_groups, -1))  # [tokens, groups, ·]
            counted = 1
            if config.moe_router_score_function == "sigmoid":
                counted = config.moe_router_topk // config.moe_router_group_topk
            value = grouped.topk(counted, dim=-1).values.sum(-1)
            best = value.topk(config.moe_router_group_topk, dim=-1).indices
            open_groups = torch.zeros_like(value, dtype=torch.bool).scatter(1, best, True)
            scores = grouped.masked_fill(~open_groups[..., None], float("-inf")).flatten(1)
        return scores.topk(config.moe_router_topk, dim=-1).indices

    def _weights(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """The weights [tokens, topk] of the chosen experts."""
        config = self.config
        if config.moe_router_score_function == "sigmoid":
            weights = scores.gather(1, experts)
            if config.moe_router_topk > 1:
                weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        elif config.moe_router_pre_softmax:
            weights = scores.gather(1, experts)
        else:
            weights = logits.gather(1, experts).softmax(-1)
        return weights if config.expert_weight_factor == 1 else weights * config.expert_weight_factor

    def _keep(self, experts: Tensor, weights: Tensor, numbers: Tensor) -> tuple[Tensor | None, int | None]:
        """Which choices [tokens, topk] the capacity lets through, and that capacity."""
        config = self.config
        if config.moe_expert_capacity_factor is None:
            return None, None
        experts, weights, numbers = (self.local_tokens.all_gather(x) for x in (experts, weights, numbers))
        tokens, topk = experts.shape
        share = tokens * topk / config.num_experts
        capacity = min(math.ceil(share * config.moe_expert_capacity_factor), tokens)
        pairs = (numbers.argsort()[:, None] * topk + torch.arange(topk, device=numbers.device)).flatten()
        if config.moe_token_drop_policy == "probs":
            pairs = pairs[weights.flatten()[pairs].argsort(descending=True, stable=True)]
        chosen = experts.flatten()
        pairs = pairs[chosen[pairs].argsort(stable=True)]  # by expert, in each the ones to keep first
        kept = index_in_group(chosen[pairs], config.num_experts) < capacity
        kept = torch.empty_like(kept).scatter(0, pairs, kept).view(tokens, topk)
        return self.local_tokens.local_slice(kept), capacity
