"""Mixture of experts, used instead of an MLP (Shazeer et al. 2017; Fedus et al. 2021).

    x ──router──▶ experts and weights of each token
    x ──one row per (token, expert) pair, sorted by expert──▶ experts ──sum over a token's rows──▶ y
    x ──shared expert, if any──▶ added to y

Each row is multiplied by its routing weight after the activation, before linear_fc2. The final sum then needs no
weights, and the gradient of the routing weights does not need the experts' output. The bias of linear_fc2 is
multiplied by the routing weight too, as in Megatron-LM.

The number of rows per expert stays on the device, where the grouped matmul reads it. The host waits for it, once per
layer, only for separate matmuls or if pairs are dropped without padding. It never waits with worst-case buffers
(`bounded_rows`). A compiled graph ends before the experts, because their number of rows depends on the data: the
router and the rows' destinations are in the graph (`MoE.plan`), the experts are not (`MoE.forward`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.compat.dynamo import disable_tracing
from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.coded_weight import CodedWeight
from megalith.models.identity import identity
from megalith.models.linear import MLP, Linear
from megalith.models.norm import Residual
from megalith.models.pass_context import Context, PassLayout
from megalith.models.router import Router, Routing
from megalith.models.runnable import Runnable, runnable
from megalith.ops.activation import ACTIVATIONS, weighted_activation
from megalith.ops.batch_invariant.elementwise import sigmoid
from megalith.ops.coded_gemm import CodedGroupedGemm
from megalith.ops.grouped_gemm import (
    GroupedGemm,
    GroupedWeight,
    RowGroups,
    add_bias,
    grouped_linear,
    prepare_weight,
)
from megalith.ops.permute import (
    Permutation,
    count_destinations,
    sort_pairs,
    sort_pairs_in_buffer,
    sum_rows,
    take_rows,
)

Cast = tuple[Tensor, Tensor | None]
Matrix = tuple[GroupedWeight, GroupedWeight | None]
Shared = Callable[[], Tensor] | None  # computes the shared expert's output [tokens, hidden]


class GroupedLinear(nn.Module):
    """One linear layer per expert: fp32 weight [experts, out, in], cast to the input's dtype, and bias [experts,
    out].

    Seams are `gemm`, `first_row` and `sum_gradient` (expert tensor parallelism) and `step_cast`, the cast for all
    passes of a step. An adapter's output (adapters.py) is added.
    """

    def __init__(
        self,
        config: ModelConfig,
        in_features: int,
        out_features: int,
        device: torch.device | str | None,
        bias: bool | None = None,
    ):
        """Create the linears of all experts. If `bias` is None, they have biases if the MLPs do."""
        super().__init__()
        experts = config.num_experts
        self.gemm, self.fusion = GroupedGemm(config.moe_grouped_gemm), config.moe_permute_fusion
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device))
        has_bias = config.mlp_bias if bias is None else bias
        self.bias = nn.Parameter(torch.empty(experts, out_features, device=device)) if has_bias else None
        self.first_row = 0  # offset of the local bias in the global one
        self.sum_gradient: Callable[[Tensor], Tensor] = identity
        self.step_cast: Cast | None = None
        self.adapter: nn.Module | None = None
        self.coded: CodedWeight | None = None  # the weight, if it is frozen and quantized

    def cast(self, dtype: torch.dtype) -> Cast:
        """Return weight and bias in `dtype`, without gradients."""
        if self.step_cast is not None:
            return self.step_cast
        with torch.no_grad():  # to_local would make an autograd node
            both = (self.weight, self.bias)
            weight, bias = (None if each is None else local(each).detach().to(dtype) for each in both)
            return weight if self.coded is None else self.coded.decoded(), bias

    def prepare_weights(self, cast: Cast) -> Matrix:
        """Convert the result of `cast` to the weight and bias that the matmuls need."""
        pairs, stays = zip((self.weight, self.bias), cast), cast is self.step_cast
        weight, bias = (
            None if p is None else prepare_weight(self.sum_gradient(local(p)), value, stays)
            for p, value in pairs
        )
        return weight if self.coded is None else GroupedWeight(cast[0], self.coded.codes), bias

    def forward(self, x: Tensor, matrix: Matrix, groups: RowGroups, factors: Tensor | None = None) -> Tensor:
        """Return [rows, out] for x [rows, in].

        If there are `factors` [rows, 1], each row's bias is multiplied by its factor.
        """
        weight, bias = matrix
        y = grouped_linear(x, weight, groups, self.gemm)
        if self.adapter is not None:
            y = y + self.adapter(x, groups)
        if bias is None:
            return y
        return add_bias(y, bias, groups, factors, self.first_row, self.gemm.kernel, self.fusion)

    def keep_in_codes(self, weight: CodedWeight) -> None:
        """Replace the weight by a quantized, frozen one, in place."""
        self.weight, self.coded, self.gemm = None, weight, CodedGroupedGemm(weight, self.gemm.kernel)


class Experts(nn.Module):
    """The MLPs of the local experts. Rows of fc1 alternate gate and up, as in MLP."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.mlp_activation]
        self.fusion = config.moe_permute_fusion
        self.cut = config.activation_func_clamp_value, config.glu_linear_offset
        self.weighs_input = config.moe_apply_probs_on_input
        width = config.expert_size * (2 if self.gated else 1)
        self.linear_fc1 = GroupedLinear(config, config.hidden_size, width, device)
        self.linear_fc2 = GroupedLinear(config, config.expert_size, config.hidden_size, device)

    def cast(self, dtype: torch.dtype) -> tuple[Cast, Cast]:
        """Return weights and biases of fc1 and fc2 in `dtype`, without gradients."""
        return self.linear_fc1.cast(dtype), self.linear_fc2.cast(dtype)

    def prepare_weights(self, cast: tuple[Cast, Cast]) -> tuple[Matrix, Matrix]:
        """Convert the result of `cast` to the weights and biases that the matmuls need."""
        return self.linear_fc1.prepare_weights(cast[0]), self.linear_fc2.prepare_weights(cast[1])

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        groups: RowGroups,
        matrices: tuple[Matrix, Matrix] | None = None,
    ) -> Tensor:
        """Return the experts' output [rows, hidden].

        Args:
            x: [rows, hidden], sorted by expert.
            weights: float32 [rows, 1], factors of the output, or of the input with moe_apply_probs_on_input.
            groups: number of rows per expert.
            matrices: result of `prepare_weights`; None means call it here.
        """
        fc1, fc2 = self.prepare_weights(self.cast(x.dtype)) if matrices is None else matrices
        if self.weighs_input:
            x, weights = (x * weights).to(x.dtype), torch.ones_like(weights)
        x = self.linear_fc1(x, fc1, groups)  # [rows, expert size], or [rows, 2 · expert size]
        x = weighted_activation(x, weights, self.activation, self.gated, self.fusion, *self.cut, groups.end)
        return self.linear_fc2(x, fc2, groups, weights)


class MoE(Runnable):
    """Router, experts, shared expert. `dispatch` is the seam of expert parallelism."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.router = Router(config, device)
        self.experts = Experts(config, device)
        self.dispatch = Dispatch(config)
        self.averages = config.moe_average_shared_expert
        self.shared_experts = self.shared_expert_gate = None
        if width := config.moe_shared_expert_intermediate_size:
            self.shared_experts = MLP(config, device, width)
            if config.moe_shared_expert_gate:
                self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False, device=device)

    def plan(self, x: Tensor, context: Context) -> NamedTuple:
        """Return the destination of each token of x [batch, seq, hidden], to be passed to `dispatch`."""
        routing = self.router(
            x.flatten(0, -2),
            context.global_token_ids,
            context.batch,
            context.balance_scale,
            context.real,
            context.layer_routes,
        )
        plan = self.dispatch.plan(routing, context.layout)
        if context.adapters is None:
            return plan
        tokens_per_sequence = len(routing.weights) // context.batch
        adapters = context.adapters.repeat_interleave(tokens_per_sequence)
        return ExpertRows(*plan[:-1], adapters)  # torch 2.11's compiler does not support _replace here

    # Parts that benefit are compiled separately. torch.compiler.disable would import the compiler, which takes seconds.
    @disable_tracing
    @runnable
    def forward(
        self, x: Tensor, plan: NamedTuple, context: Context, residual: Residual | None = None
    ) -> Tensor:
        """Return the experts' output for x [batch, seq, hidden]. If `residual` is given, the output is added to it.

        `plan` is what the method `plan` has returned for the same x.
        """
        shared = None if self.shared_experts is None else partial(self._shared, x, context)
        y = self.dispatch(x.flatten(0, -2), plan, self.experts, shared, context.layout).view_as(x)
        y = y / 2 if self.averages else y
        return y if residual is None else residual.add(y)

    def _shared(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden] -> [tokens, hidden]
        y = self.shared_experts(x, context)
        if self.shared_expert_gate is not None:
            y = y * sigmoid(self.shared_expert_gate(x, context))
        return y.flatten(0, -2)


class ExpertRows(NamedTuple):
    """Assignment of (token, expert) pairs to rows of the local experts."""

    weights: Tensor  # float32 [tokens, topk]
    row: Tensor  # int64 [tokens, topk]: row of each (token, expert) pair; beyond all rows for a pair without one
    pair: Tensor  # int64 [rows or more]: pair of each row; the number of pairs for padding rows
    counts: Tensor  # int64 [experts]: rows per expert
    size: int | None  # rows per expert if padded to the capacity
    complete: bool  # every pair has a row and every row a pair
    bounded: bool = False  # `pair` has the worst-case number of rows, the last of them without a pair
    adapters: Tensor | None = None  # int64 [tokens], each token's adapter, with several in a batch


class Dispatch:
    """Dispatch on one device: sorts rows by expert and sums the outputs of each token's rows."""

    adds_in_order = False
    """True if a token's outputs are added one by one, in the order of its experts."""

    def __init__(self, config: ModelConfig):
        self.experts = self.local_experts = config.num_experts
        self.fills_up = config.moe_pad_expert_input_to_capacity
        self.bounded = False  # buffers for the worst case, so that the host needs no row counts
        self.fusion = config.moe_permute_fusion

    def adding_in_order(self) -> Dispatch:
        """Return a copy of this dispatch that adds a token's outputs in the order of its experts."""
        dispatch = copy.copy(self)
        dispatch.adds_in_order = True
        return dispatch

    def plan(self, routing: Routing, layout: PassLayout) -> ExpertRows:
        """Return each row's destination, without waiting for the device."""
        return self.rows(routing.weights, routing.destinations(self.experts), routing.capacity, self.experts)

    def __call__(
        self, x: Tensor, plan: ExpertRows, experts: Experts, shared: Shared, layout: PassLayout
    ) -> Tensor:
        """Return the experts' output for x [tokens, hidden] plus the shared expert's: [tokens, hidden]."""
        y = self.compute(x, plan, experts)
        return y if shared is None else y + shared()

    def rows(self, weights: Tensor, destinations: Tensor, capacity: int | None, count: int) -> ExpertRows:
        """Return the rows of `count` experts.

        Args:
            weights: float32 [tokens, topk].
            destinations: int64 [tokens, topk], indices of the experts; `count` marks a dropped pair.
            capacity: maximum rows per expert; None means unlimited.
            count: number of experts.
        """
        if capacity is not None and self.fills_up:
            return _padded_rows(weights, destinations, count, min(capacity, len(weights)))
        if self.bounded and count < self.experts:
            return bounded_rows(weights, destinations, count)
        counts, pair, row = sort_pairs(destinations, count)
        return ExpertRows(weights, row, pair, counts, None, capacity is None and count == self.experts)

    def compute(self, x: Tensor, plan: ExpertRows, experts: Experts) -> Tensor:
        """Return the output of the local experts for x [tokens, hidden]."""
        sizes = None
        if plan.size is not None:
            sizes = (plan.size,) * len(plan.counts)
        elif not plan.complete and not plan.bounded:
            sizes = tuple(plan.counts.tolist())
        count, adapters = None if sizes is None else sum(sizes), None
        if plan.adapters is not None:
            tokens = (plan.pair[:count] // plan.row.shape[1]).clamp(max=len(x) - 1)  # of padding: any
            adapters = plan.adapters[tokens]
        groups = RowGroups(plan.counts, sizes, plan.bounded, adapters)
        rows, row_weights, order = self.take(x, plan, count, groups.end)
        rows = experts(rows, row_weights, groups)
        return sum_rows(rows, order, self.fusion, self.adds_in_order)

    def take(
        self, x: Tensor, plan: ExpertRows, count: int | None, end: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Permutation]:
        """Gather the rows of the plan.

        Args:
            x: [tokens, hidden].
            plan: rows of the experts.
            count: number of rows. Default: enough for any routing.
            end: int32 [1] on the device: number of rows that hold a token. Only if `plan.bounded`; later rows are
                uninitialized.

        Returns:
            Rows [rows, hidden], their weights [rows, 1], and their order.
        """
        pair = plan.pair[:count]
        complete, unpadded = plan.complete, plan.size is None and not plan.bounded
        order = Permutation(pair // plan.row.shape[1], plan.row, complete, unpadded, end)
        by_pair = Permutation(pair, plan.row.reshape(-1, 1), complete, unpadded, end)
        return take_rows(x, order, self.fusion), take_rows(plan.weights.reshape(-1, 1), by_pair), order


def bounded_rows(weights: Tensor, destinations: Tensor, count: int) -> ExpertRows:
    """Place the (token, expert) pairs in a buffer with room for any routing to `count` experts.

    The buffer has tokens · min(topk, count) rows, because a token chooses each expert at most once.
    """
    tokens, topk = destinations.shape
    counts, pair, row = sort_pairs_in_buffer(destinations, count, tokens * min(topk, count))
    return ExpertRows(weights, row, pair, counts, None, complete=False, bounded=True)


def _padded_rows(weights: Tensor, destinations: Tensor, count: int, size: int) -> ExpertRows:
    """Place the (token, expert) pairs in a buffer of `size` rows per expert, [count · size] rows.

    Each expert must have at most `size` pairs. Rows without a pair are padding.
    """
    _, before, _ = count_destinations(destinations, count + 1)
    end = count * size
    row = torch.where(
        destinations < count, destinations * size + before.gather(1, destinations), end
    )  # [tokens, topk]
    pairs = torch.arange(row.numel(), device=row.device)
    pair = torch.full((end + 1,), row.numel(), device=row.device).scatter(0, row.flatten(), pairs)[:-1]
    counts = torch.full((count,), size, device=row.device)
    return ExpertRows(weights, row, pair, counts, size, complete=False)
