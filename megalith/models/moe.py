"""A mixture of experts in the place of the MLP (Shazeer et al. 2017; Fedus et al. 2021).

    x ──router──▶ experts and weights of each token
    x ──one row for each pair of token and expert, sorted by expert──▶ experts ──sum of a token's rows──▶ y
    x ──shared expert, if there is one──▶ added to y

A row is multiplied by its weight between the two matrices of its expert, where it is narrower than at either end, so
that the sum is a plain one and the experts' output need not be kept for the weights' gradient.

The number of rows of each expert is known on the device only. It stays there: the grouped matmul reads it. Where it
is needed on the host (matmuls one by one, or pairs dropped by a capacity and experts not filled up to it), the host
waits for it, once a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megalith.comm import local
from megalith.config import ModelConfig
from megalith.models.context import Context
from megalith.models.linear import Linear
from megalith.models.mlp import ACTIVATIONS, MLP
from megalith.models.router import Router, Routing
from megalith.ops.compiled import as_one_kernel
from megalith.ops.grouped_gemm import Groups, Prepared, grouped_matmul, prepared
from megalith.ops.permute import Order, counted, places_in_group, sum_rows, take_rows

Activation = Callable[[Tensor], Tensor]


class GroupedLinear(nn.Module):
    """A matrix for each expert in one weight [experts, out, in], kept in fp32 and cast where it is used."""

    def __init__(self, experts: int, in_features: int, out_features: int, device: torch.device | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device))

    def cast(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`, without its gradient."""
        return local(self.weight).detach().to(dtype)

    def prepared(self, cast: Tensor) -> Prepared:
        """The weight as products take it, of what `cast` has given."""
        return prepared(local(self.weight), cast)


class Experts(nn.Module):
    """The MLPs of all experts here, side by side; rows of fc1 alternate gate and up as in MLP."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.mlp_activation]
        self.grouped, self.fused = config.moe_grouped_gemm, config.moe_permute_fusion
        width = config.expert_size * (2 if self.gated else 1)
        self.linear_fc1 = GroupedLinear(config.num_experts, config.hidden_size, width, device)
        self.linear_fc2 = GroupedLinear(config.num_experts, config.expert_size, config.hidden_size, device)

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The weights of fc1 and fc2 in `dtype`, without their gradients."""
        return self.linear_fc1.cast(dtype), self.linear_fc2.cast(dtype)

    def prepared(self, cast: tuple[Tensor, Tensor]) -> tuple[Prepared, Prepared]:
        """The weights as products take them, of what `cast` has given."""
        return self.linear_fc1.prepared(cast[0]), self.linear_fc2.prepared(cast[1])

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        groups: Groups,
        matrices: tuple[Prepared, Prepared] | None = None,
    ) -> Tensor:
        """Rows x [rows, hidden], expert after expert, and their weights float32 [rows, 1] → [rows, hidden].

        `matrices` are what `prepared` gave, where that was called earlier.
        """
        fc1, fc2 = self.prepared(self.cast(x.dtype)) if matrices is None else matrices
        x = grouped_matmul(x, fc1, groups, self.grouped)  # [rows, expert size], or [rows, 2 · expert size]
        if self.fused:
            x = as_one_kernel(weighted_activation, x, weights, self.activation, self.gated, rows_vary=True)
        else:
            x = weighted_activation(x, weights, self.activation, self.gated)
        return grouped_matmul(x, fc2, groups, self.grouped)


def weighted_activation(x: Tensor, weights: Tensor, activation: Activation, gated: bool) -> Tensor:
    """The non-linearity of fc1's rows x, times the rows' weights [rows, 1]: [rows, expert size]."""
    if gated:
        gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
        return activation(gate) * up * weights.to(x.dtype)
    return activation(x) * weights.to(x.dtype)


class MoE(nn.Module):
    """Router, experts, shared expert. `dispatch`, which brings tokens and experts together, is the seam of EP."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.router = Router(config, device)
        self.experts = Experts(config, device)
        self.dispatch = Dispatch(config)
        self.shared_experts = self.shared_expert_gate = None
        if width := config.moe_shared_expert_intermediate_size:
            self.shared_experts = MLP(config, device, width)
            if config.moe_shared_expert_gate:
                self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False, device=device)

    @torch.compiler.disable(
        recursive=False
    )  # the number of an expert's rows is data, which no graph is made for
    def forward(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden]
        tokens = x.flatten(0, -2)
        routing = self.router(tokens, context.numbers, context.batch, context.balance_scale)
        shared = None if self.shared_experts is None else partial(self._shared, x)
        return self.dispatch(tokens, routing, self.experts, shared).view_as(x)

    def _shared(self, x: Tensor) -> Tensor:  # [batch, seq, hidden] -> [tokens, hidden]
        y = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            y = y * self.shared_expert_gate(x).sigmoid()
        return y.flatten(0, -2)


class Dispatch:
    """Where all experts are here: the rows are put into the experts' order, and their outputs summed by token."""

    def __init__(self, config: ModelConfig):
        self.experts = self.local_experts = config.num_experts
        self.fills_up = config.moe_pad_expert_input_to_capacity
        self.fused = config.moe_permute_fusion

    @torch.compiler.disable  # what is worth a kernel of its own is compiled by itself
    def __call__(
        self, x: Tensor, routing: Routing, experts: Experts, shared: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """x [tokens, hidden] through the experts of its routing, plus what `shared` gives: [tokens, hidden]."""
        destinations = routing.destinations(self.experts)
        y = self.compute(x, routing.weights, destinations, routing.capacity, experts)
        return y if shared is None else y + shared()

    def compute(
        self,
        x: Tensor,
        weights: Tensor,
        destinations: Tensor,
        capacity: int | None,
        experts: Experts,
        sizes: tuple[int, ...] | None = None,
        matrices: tuple[Prepared, Prepared] | None = None,
    ) -> Tensor:
        """x through the `experts` that are here, of which `destinations` int64 [tokens, topk] has numbers.

        The number behind the last one is nowhere: such a pair adds nothing to its token. `sizes` are the rows of each
        expert, where they are known; `matrices` what `experts.prepared` gave, where it was called earlier.
        """
        count = self.local_experts
        if capacity is not None and self.fills_up:
            order, groups = filled_order(destinations, count, min(capacity, len(x)))
        else:
            pair, counts = sort_pairs(destinations, count)
            if sizes is None and not (capacity is None and count == self.experts):
                sizes = tuple(counts.tolist())
            order = order_of(pair, destinations, len(pair) if sizes is None else sum(sizes))
            groups = Groups(counts, sizes)
        rows, row_weights = self.rows(x, weights, order)
        return self.sum(experts(rows, row_weights, groups, matrices), order)

    def rows(self, x: Tensor, weights: Tensor, order: Order) -> tuple[Tensor, Tensor]:
        """The rows [rows, hidden] of x [tokens, hidden], and of the weights [tokens, topk]: [rows, 1]."""
        row_weights = take_rows(weights.reshape(-1, 1), order.by_pair())
        return take_rows(x, order, self.fused), row_weights

    def sum(self, rows: Tensor, order: Order) -> Tensor:
        """The sum of each token's rows: [tokens, hidden]."""
        return sum_rows(rows, order, self.fused)


def sort_pairs(destinations: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The pairs of destinations int64 [tokens, topk] by destination, and how many go to each of `count`.

    Pairs whose destination is `count`, nowhere, stand last and are not counted.
    """
    narrow = torch.uint8 if count < 256 else torch.int16 if count < 2**15 else torch.int64
    pair = destinations.flatten().to(narrow).argsort(stable=True)  # a GPU sorts a byte at a time
    return pair, counted(destinations.flatten(), count + 1)[:count]


def order_of(pair: Tensor, destinations: Tensor, rows: int) -> Order:
    """The first `rows` of the sorted pairs as rows."""
    place = torch.arange(len(pair), device=pair.device)
    complete = rows == len(pair)
    row = torch.empty_like(pair).scatter_(0, pair, place if complete else place.clamp(max=rows))
    return Order(pair[:rows], row.view_as(destinations), all_kept=complete)


def filled_order(destinations: Tensor, count: int, size: int) -> tuple[Order, Groups]:
    """Rows for `size` pairs for each of `count` destinations, the last of them without one. Nothing is read on the
    host; no destination has more pairs."""
    pair, _ = sort_pairs(destinations, count)
    group = destinations.flatten()[pair]
    slots = torch.where(group < count, group * size + places_in_group(group, count + 1), count * size)
    row = torch.empty_like(pair).scatter_(0, pair, slots)
    held = torch.full((count * size + 1,), len(pair), device=pair.device).scatter_(0, slots, pair)
    counts = torch.full((count,), size, device=pair.device)
    order = Order(held[:-1], row.view_as(destinations), all_kept=False, all_hold=False)
    return order, Groups(counts, (size,) * count)
