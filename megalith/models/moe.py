"""A mixture of experts in the place of the MLP (Shazeer et al. 2017; Fedus et al. 2021).

    x ──router──▶ experts and weights of each token
    x ──one row for each pair of token and expert, sorted by expert──▶ experts ──sum of a token's rows──▶ y
    x ──shared expert, if there is one──▶ added to y

A row is multiplied by its weight between the two matrices of its expert, where it is narrower than at either end, so
that the sum is a plain one and the experts' output need not be saved for wgrad. Behind that stands the
bias of linear_fc2, if experts have biases: it is multiplied by the weight itself, so that a row is weight · (what the
expert's MLP gives), as in Megatron-LM.

The number of rows of each expert is known on the device only. It stays there: the grouped matmul reads it. Where it
is needed on the host (matmuls one by one, or pairs dropped by a capacity and experts not filled up to it), the host
waits for it, once a layer. It is not where there is room for any number of rows (`bounded_rows`).

A compiled layer is cut at its experts, for no graph is made for a number of rows that is data. All that does not depend
on it, the router and where each row goes, belongs to the graph before (`MoE.plan`); what does is no part of one
(`MoE.forward`), and nor is the addition to the residual stream that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megalith.compat.dynamo import disable_tracing
from megalith.config import ModelConfig
from megalith.local_shards import local
from megalith.models.linear import MLP, Linear
from megalith.models.pass_context import Context, PassLayout
from megalith.models.residual import Residual
from megalith.models.router import Router, Routing
from megalith.models.runnable import Runnable, runnable
from megalith.ops.activation import ACTIVATIONS, weighted_activation
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
Shared = Callable[[], Tensor] | None  # the shared expert's computation, [tokens, hidden]


class GroupedLinear(nn.Module):
    """A matrix for each expert in one weight [experts, out, in], kept in fp32 and cast where it is used; with biases
    also one for each expert, [experts, out]. `gemm` is a seam, as a Linear's, and so are `first_row`, of expert TP, and
    `step_cast`, what `cast` has given for all passes of a step."""

    def __init__(self, config: ModelConfig, in_features: int, out_features: int, device: torch.device | None):
        super().__init__()
        experts = config.num_experts
        self.gemm, self.fusion = GroupedGemm(config.moe_grouped_gemm), config.moe_permute_fusion
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, device=device))
        self.bias = (
            nn.Parameter(torch.empty(experts, out_features, device=device)) if config.mlp_bias else None
        )
        self.first_row = 0  # of the whole bias: the column of y that the bias here begins at
        self.step_cast: Cast | None = None

    def cast(self, dtype: torch.dtype) -> Cast:
        """Weight and bias in `dtype`, without their gradients."""
        if self.step_cast is not None:
            return self.step_cast
        with torch.no_grad():  # where a DTensor hands over what it holds, and makes no node
            both = (self.weight, self.bias)
            return tuple(None if kept is None else local(kept).detach().to(dtype) for kept in both)

    def prepare_weights(self, cast: Cast) -> Matrix:
        """Weight and bias as matmuls take them, of what `cast` has given."""
        both, stays = zip((self.weight, self.bias), cast), cast is self.step_cast
        return tuple(
            None if kept is None else prepare_weight(local(kept), value, stays) for kept, value in both
        )

    def forward(self, x: Tensor, matrix: Matrix, groups: RowGroups, factors: Tensor | None = None) -> Tensor:
        """[rows, in] → [rows, out]; a row's bias is multiplied by its factor where there are `factors` [rows, 1]."""
        weight, bias = matrix
        y = grouped_linear(x, weight, groups, self.gemm)
        if bias is None:
            return y
        return add_bias(y, bias, groups, factors, self.first_row, self.gemm.kernel, self.fusion)


class Experts(nn.Module):
    """The MLPs of all experts here, side by side; rows of fc1 alternate gate and up as in MLP."""

    def __init__(self, config: ModelConfig, device: torch.device | None = None):
        super().__init__()
        self.gated = config.gated
        self.activation = ACTIVATIONS[config.mlp_activation]
        self.fusion = config.moe_permute_fusion
        self.cut = config.activation_func_clamp_value, config.glu_linear_offset
        width = config.expert_size * (2 if self.gated else 1)
        self.linear_fc1 = GroupedLinear(config, config.hidden_size, width, device)
        self.linear_fc2 = GroupedLinear(config, config.expert_size, config.hidden_size, device)

    def cast(self, dtype: torch.dtype) -> tuple[Cast, Cast]:
        """The weights and biases of fc1 and fc2 in `dtype`, without their gradients."""
        return self.linear_fc1.cast(dtype), self.linear_fc2.cast(dtype)

    def prepare_weights(self, cast: tuple[Cast, Cast]) -> tuple[Matrix, Matrix]:
        """The weights and biases as matmuls take them, of what `cast` has given."""
        return self.linear_fc1.prepare_weights(cast[0]), self.linear_fc2.prepare_weights(cast[1])

    def forward(
        self,
        x: Tensor,
        weights: Tensor,
        groups: RowGroups,
        matrices: tuple[Matrix, Matrix] | None = None,
    ) -> Tensor:
        """Rows x [rows, hidden], expert after expert, and their weights float32 [rows, 1] → [rows, hidden].

        `matrices` are what `prepare_weights` returned, where that was called earlier.
        """
        fc1, fc2 = self.prepare_weights(self.cast(x.dtype)) if matrices is None else matrices
        x = self.linear_fc1(x, fc1, groups)  # [rows, expert size], or [rows, 2 · expert size]
        x = weighted_activation(x, weights, self.activation, self.gated, self.fusion, *self.cut, groups.end)
        return self.linear_fc2(x, fc2, groups, weights)


class MoE(Runnable):
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

    def plan(self, x: Tensor, context: Context) -> NamedTuple:
        """What `forward` takes beside x: where each token goes, as `dispatch` puts it."""
        routing = self.router(
            x.flatten(0, -2), context.global_token_ids, context.batch, context.balance_scale
        )
        return self.dispatch.plan(routing, context.layout)

    # What is worth a kernel of its own is compiled by itself. torch.compiler.disable imports the compiler: seconds.
    @disable_tracing
    @runnable
    def forward(
        self, x: Tensor, plan: NamedTuple, context: Context, residual: Residual | None = None
    ) -> Tensor:
        """Return the experts' output for x [batch, seq, hidden], added to the residual stream if there is one.

        `plan` is the result of `plan` for the same x.
        """
        shared = None if self.shared_experts is None else partial(self._shared, x, context)
        y = self.dispatch(x.flatten(0, -2), plan, self.experts, shared, context.layout).view_as(x)
        return y if residual is None else residual.add(y)

    def _shared(self, x: Tensor, context: Context) -> Tensor:  # [batch, seq, hidden] -> [tokens, hidden]
        y = self.shared_experts(x, context)
        if self.shared_expert_gate is not None:
            y = y * self.shared_expert_gate(x, context).sigmoid()
        return y.flatten(0, -2)


class ExpertRows(NamedTuple):
    """The rows of the experts that are here."""

    weights: Tensor  # float32 [tokens, topk]
    row: Tensor  # int64 [tokens, topk]: of each pair of a token and an expert; behind all rows for a pair without one
    pair: Tensor  # int64 [rows or more]: of each row; the number of pairs for a row that fills up
    counts: Tensor  # int64 [experts]: the rows of each
    size: int | None  # of each expert, where they are filled up
    complete: bool  # whether every pair has a row, and there are no others
    bounded: bool = False  # whether `pair` has as many rows as there may be, the last ones without a pair


class Dispatch:
    """Where all experts are here: the rows are put into the experts' order, and their outputs summed by token."""

    def __init__(self, config: ModelConfig):
        self.experts = self.local_experts = config.num_experts
        self.fills_up = config.moe_pad_expert_input_to_capacity
        self.bounded = False  # whether rows are as many as there may be, so that nobody needs their number
        self.fusion = config.moe_permute_fusion

    def plan(self, routing: Routing, layout: PassLayout) -> ExpertRows:
        """Where the tokens' rows go: what is known of it without a look at the device."""
        return self.rows(routing.weights, routing.destinations(self.experts), routing.capacity, self.experts)

    def __call__(
        self, x: Tensor, plan: ExpertRows, experts: Experts, shared: Shared, layout: PassLayout
    ) -> Tensor:
        """x [tokens, hidden] through the experts of its plan, plus what `shared` gives: [tokens, hidden]."""
        y = self.compute(x, plan, experts)
        return y if shared is None else y + shared()

    def rows(self, weights: Tensor, destinations: Tensor, capacity: int | None, count: int) -> ExpertRows:
        """The rows of `count` experts, of which `destinations` int64 [tokens, topk] has numbers, `count` for nowhere:
        such a pair adds nothing to its token. `capacity` is the most rows of an expert."""
        if capacity is not None and self.fills_up:
            return _filled(weights, destinations, count, min(capacity, len(weights)))
        if self.bounded and count < self.experts:
            return bounded_rows(weights, destinations, count)
        counts, pair, row = sort_pairs(destinations, count)
        return ExpertRows(weights, row, pair, counts, None, capacity is None and count == self.experts)

    def compute(self, x: Tensor, plan: ExpertRows, experts: Experts) -> Tensor:
        """x [tokens, hidden] through the `experts` that are here."""
        sizes = None
        if plan.size is not None:
            sizes = (plan.size,) * len(plan.counts)
        elif not plan.complete and not plan.bounded:
            sizes = tuple(plan.counts.tolist())
        groups = RowGroups(plan.counts, sizes, plan.bounded)
        rows, row_weights, order = self.take(x, plan, None if sizes is None else sum(sizes), groups.end)
        rows = experts(rows, row_weights, groups)
        return sum_rows(rows, order, self.fusion)

    def take(
        self, x: Tensor, plan: ExpertRows, count: int | None, end: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Permutation]:
        """The `count` rows, None for all there may be, of which those of a token `end`, of x [tokens, hidden] and of
        the weights: [rows, hidden] and [rows, 1]."""
        pair = plan.pair[:count]
        kept, hold = plan.complete, plan.size is None and not plan.bounded
        order = Permutation(pair // plan.row.shape[1], plan.row, kept, hold, end)
        by_pair = Permutation(pair, plan.row.reshape(-1, 1), kept, hold, end)
        return take_rows(x, order, self.fusion), take_rows(plan.weights.reshape(-1, 1), by_pair), order


def bounded_rows(weights: Tensor, destinations: Tensor, count: int) -> ExpertRows:
    """As many rows as may have one of `count` destinations: a token names each once."""
    tokens, topk = destinations.shape
    counts, pair, row = sort_pairs_in_buffer(destinations, count, tokens * min(topk, count))
    return ExpertRows(weights, row, pair, counts, None, complete=False, bounded=True)


def _filled(weights: Tensor, destinations: Tensor, count: int, size: int) -> ExpertRows:
    """Rows for `size` pairs for each of `count` destinations, the last of them without one: no destination has more."""
    _, before, _ = count_destinations(destinations, count + 1)
    behind = count * size
    row = torch.where(
        destinations < count, destinations * size + before.gather(1, destinations), behind
    )  # [tokens, topk]
    pairs = torch.arange(row.numel(), device=row.device)
    pair = torch.full((behind + 1,), row.numel(), device=row.device).scatter(0, row.flatten(), pairs)[:-1]
    counts = torch.full((count,), size, device=row.device)
    return ExpertRows(weights, row, pair, counts, size, complete=False)
