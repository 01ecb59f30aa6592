"""Expert parallelism (Lepikhin et al. 2020): a layer's experts are distributed over ranks, and tokens are dispatched.

The ranks of a pipeline stage are data × context × tensor ranks for everything else. For the experts they are edp
replicas; in each, the experts are distributed over ep, and each expert is sharded over etp (mesh.py). Each rank
dispatches its own tokens:

    1. Without sequence parallelism the TP ranks have the same tokens, and each dispatches a share of them.
    2. The etp ranks of an expert need the same tokens, and all-gather them.
    3. alltoall   each token is sent once to each rank with some of its experts, which returns the sum of their
                  outputs: fewer bytes than one row per (token, expert)
       allgather  the ranks all-gather all tokens, and each computes its own experts
    4. Outputs are reduced over etp, or for allgather over all ranks, and the shares of step 1 are all-gathered.

In the backward pass, each collective becomes its transpose. An expert's gradient therefore covers all tokens of its
replica, and only has to be reduced over edp.
"""

from __future__ import annotations

import math
from functools import cache, partial

import torch
from torch import Tensor, nn

from megalith.comm.collectives import (
    Axis,
    all_gather,
    all_gather_no_grad,
    all_gather_replicated,
    all_reduce_gradient,
    begin_all_to_all,
    end_all_to_all,
    local_chunk,
    reduce_scatter,
)
from megalith.config import ModelConfig
from megalith.local_shards import local_shape_and_offset
from megalith.models.adapters import ADAPTER
from megalith.models.moe import Dispatch, ExpertRows, Experts, GroupedLinear, Shared, bounded_rows
from megalith.models.pass_context import PassLayout
from megalith.models.router import Routing
from megalith.models.transformer import Transformer, layers_of
from megalith.ops.grouped_gemm import RowGroups
from megalith.ops.permute import (
    Permutation,
    sum_rows,
    take_rows,
    transpose_blocks,
)
from megalith.parallel.expert.dispatch_buffer import (
    DispatchPlan,
    pack,
    plan_dispatch,
    replicate_rows,
    unpack,
    unpack_replicated,
)
from megalith.parallel.expert.expert_counts import ShardedTokens
from megalith.parallel.mesh import Mesh
from megalith.parallel.seams import plug, replace_parameter
from megalith.parallel.tensor.tensor_parallel import TensorParallel

# The dimensions of weights [experts, out, in] and biases [experts, out] that are sharded over ep and etp: fc1 by
# columns, fc2 by rows. Each rank adds some columns of the bias of fc2, so that the sum over ranks contains it once and
# no two ranks have gradients of the same element.
# An adapter's matrix without a dimension for etp is replicated over it: each rank has a part of its gradient.
EXPERT_SHARDING = {
    "linear_fc1": {"weight": {"ep": 0, "etp": 1}, "bias": {"ep": 0, "etp": 1}},
    "linear_fc2": {"weight": {"ep": 0, "etp": 2}, "bias": {"ep": 0, "etp": 1}},
    "linear_fc1.adapter.lora_A": {"weight": {"ep": 0}},
    "linear_fc1.adapter.lora_B": {"weight": {"ep": 0, "etp": 1}},
    "linear_fc2.adapter.lora_A": {"weight": {"ep": 0, "etp": 2}},
    "linear_fc2.adapter.lora_B": {"weight": {"ep": 0}},
}


def expert_sharding(name: str) -> dict[str, dict[str, int]]:
    """Return the sharding of each parameter of the GroupedLinear with this name in the model, or of its adapter.

    Adapters have names such as `layers.0.mlp.experts.linear_fc1.adapter.lora_A.gate`.
    """
    path = name.rpartition("experts.")[2]
    return EXPERT_SHARDING[path.rpartition(".")[0] if ADAPTER in name else path]


def apply_expert(
    model: Transformer, mesh: Mesh, tensor: TensorParallel | None, dispatcher: str, bounded: bool = False
) -> None:
    """Distribute the experts of `model` over the mesh, in place.

    Args:
        model: on the meta device. Its sizes have passed the checks of config.rules.expert_rules.
        mesh: this rank's axes.
        tensor: the result of apply_tensor.
        dispatcher: "alltoall" or "allgather".
        bounded: static dispatch, with buffers sized for any routing.
    """
    sequence_parallel = tensor is not None and tensor.sequence_parallel
    token_axis = mesh.cp_tp if sequence_parallel else mesh.cp
    if mesh.context_groups:  # no balancing loss, whose micro-batch context-parallel ranks would share
        token_axis = mesh.tp if sequence_parallel else Axis()
    for layer in layers_of(model).values():
        if not layer.has_experts:
            continue
        if token_axis.size > 1:
            plug(layer.mlp.router, "local_tokens", ShardedTokens(token_axis))
        if mesh.experts is not None:
            _shard_experts(layer.mlp.experts, mesh)
        if mesh.ep_etp.size > 1 or tensor is not None:
            plug(layer.mlp, "dispatch", ExpertParallel(model.config, mesh, tensor, dispatcher, bounded))


class HostCopy:
    """An asynchronous copy of a tensor to the host. It overlaps later device work."""

    def __init__(self, x: Tensor):
        self._copy = x.to("cpu", non_blocking=True)
        self._done = torch.cuda.current_stream().record_event() if x.is_cuda else None

    def values(self) -> list:
        """Wait for the copy, and return its values."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.tolist()


class ExpertParallel(Dispatch):
    """Send a rank's tokens to their experts on any rank, and their outputs back.

    The sizes that alltoall sends, and the number of rows that allgather computes, depend on the tokens, so the host
    reads them once per layer. It reads nothing in static dispatch (moe_static_dispatch): every rank gets every token,
    so the size of buffers does not depend on the routing, and the local experts' row counts stay on the device, where
    grouped matmuls read them. It also reads nothing if experts are padded to their capacity, because the sizes are then
    fixed.

    Batch-invariant runs add a token's outputs in the order of its experts. So each (token, expert) pair is dispatched,
    and its output comes back, as if it were a token with one expert; each rank then adds the outputs of its tokens.

    Work that needs no tokens overlaps the all-to-alls. The backward pass runs in reverse order, so the same work
    overlaps its all-to-alls:

                         forward                              backward, read upwards
        dispatch         weights cast, while the host reads   wgrads of the experts
        combine          shared expert                        shared expert's backward pass
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        tensor: TensorParallel | None,
        dispatcher: str,
        bounded: bool = False,
    ):
        super().__init__(config)
        self.bounded = bounded
        self.tensor, self.ep = tensor, mesh.ep
        self.local_experts = config.num_experts // mesh.ep.size
        self.topk, self.is_distributed = config.moe_router_topk, mesh.ep_etp.size > 1
        self.overlaps = config.moe_shared_expert_overlap
        # FSDP2 gathers expert weights when their module starts, so they cannot be cast earlier.
        self.casts_early = mesh.expert_fsdp is None
        self.uses_alltoall = dispatcher == "alltoall" and mesh.ep.size > 1
        self.dispatch_axis = mesh.etp if dispatcher == "alltoall" else mesh.ep_etp
        self.micro_batches = max_micro_batches(self.dispatch_axis.size, mesh.cp.size * mesh.tp.size)

    def plan(self, routing: Routing, layout: PassLayout) -> DispatchPlan | ExpertRows:
        weights, destinations = routing.weights, routing.destinations(self.experts)
        if self._splits_tokens(layout):
            # Padding of the last ranks has weight 0. It goes to any experts, but is dropped if experts have a capacity.
            topk = weights.shape[1]
            filler = torch.arange(topk, device=weights.device) if routing.capacity is None else self.experts
            weights, destinations = self._local_tokens(weights), self._local_tokens(destinations, filler)
        if self._dispatches_pairs:
            weights, destinations = weights.reshape(-1, 1), destinations.reshape(-1, 1)
        weights = all_gather(weights, self.dispatch_axis)
        destinations = all_gather_no_grad(destinations, self.dispatch_axis)
        capacity = None if routing.capacity is None else routing.capacity * self.micro_batches
        if not self.uses_alltoall:
            destinations = local_expert_ids(destinations, self.ep.rank, self.local_experts, self.experts)
            return self.rows(weights, destinations, capacity, self.local_experts)
        if capacity is not None and self.fills_up:
            return self.rows(weights, destinations, capacity, self.experts)
        if self.bounded:
            all_destinations = all_gather_no_grad(destinations.int(), self.ep).long()
            local_ids = local_expert_ids(all_destinations, self.ep.rank, self.local_experts, self.experts)
            return bounded_rows(weights, local_ids, self.local_experts)
        return plan_dispatch(weights, destinations, self.ep, self.local_experts)

    def __call__(
        self, x: Tensor, plan: DispatchPlan | ExpertRows, experts: Experts, shared: Shared, layout: PassLayout
    ) -> Tensor:
        """Run x [tokens, hidden] through the experts of `plan`, add the output of `shared`, and return [tokens,
        hidden].
        """
        sizes = HostCopy(plan.sizes) if isinstance(plan, DispatchPlan) else None
        shared = None if shared is None else cache(shared)  # may be called early, to overlap
        overlapped_fn = shared if self.overlaps else None
        tokens, splits_tokens = len(x), self._splits_tokens(layout)
        x = all_gather(self._local_tokens(x) if splits_tokens else x, self.dispatch_axis)
        if self._dispatches_pairs:
            x = take_rows(x, self._pairs(len(x), x.device), self.fusion)
        if sizes is not None:
            y = self._run_alltoall(x, plan, sizes, experts, overlapped_fn)
        elif self.uses_alltoall and plan.bounded:
            y = self._run_static(x, plan, experts, overlapped_fn)
        elif self.uses_alltoall:
            y = self._run_padded(x, plan, experts, overlapped_fn)
        else:
            y = self.compute(x, plan, experts)
        y = reduce_scatter(y, self.dispatch_axis)
        if self._dispatches_pairs:
            y = sum_rows(y, self._pairs(len(y) // self.topk, y.device), self.fusion, in_order=True)
        y = all_gather_replicated(y, self.tensor.axis)[:tokens] if splits_tokens else y
        return y if shared is None else y + shared()

    @property
    def _dispatches_pairs(self) -> bool:
        return self.adds_in_order and self.is_distributed

    def _pairs(self, tokens: int, device: torch.device) -> Permutation:
        """Return the permutation with one row per (token, expert) pair, sorted by token."""
        pair = torch.arange(tokens * self.topk, device=device)
        return Permutation(pair // self.topk, pair.view(tokens, self.topk))

    def _splits_tokens(self, layout: PassLayout) -> bool:
        """Return True if the tensor-parallel ranks have the same tokens, so that each must dispatch a share of them."""
        return self.tensor is not None and not layout.sharded

    def _local_tokens(self, x: Tensor, filler: Tensor | int = 0) -> Tensor:
        """Return this rank's share of x [tokens, width], padded with `filler` to the same length on all ranks."""
        missing = x.new_zeros(-len(x) % self.tensor.axis.size, x.shape[1]) + filler
        return local_chunk(torch.cat([x, missing.to(x.dtype)]), self.tensor.axis)

    def _run_alltoall(
        self, x: Tensor, plan: DispatchPlan, sizes: HostCopy, experts: Experts, overlapped_fn: Shared
    ) -> Tensor:
        """Dispatch x [tokens, hidden] by all-to-all, run the experts, and return the combined outputs.

        Each token is sent once to each rank that has some of its experts. `overlapped_fn` is called during the
        all-to-all back.
        """
        cast = experts.cast(x.dtype) if self.casts_early else None  # while the host reads
        ranks, values = self.ep.size, sizes.values()
        sent, received, counts = values[:ranks], values[ranks : 2 * ranks], tuple(values[2 * ranks :])
        packed, order = pack(x, plan, sum(sent), self.fusion)
        pending = begin_all_to_all(packed, self.ep, sent, received)
        # Prepared here, so that the backward pass computes wgrads during the all-to-all of the tokens' gradients.
        matrices = None if cast is None else experts.prepare_weights(cast)
        rows, row_weights, row_order = unpack(end_all_to_all(pending), plan, sum(counts), self.fusion)
        rows = experts(rows, row_weights, RowGroups(plan.counts, counts), matrices)
        return self._combine(sum_rows(rows, row_order, self.fusion), received, sent, order, overlapped_fn)

    def _run_padded(self, x: Tensor, plan: ExpertRows, experts: Experts, overlapped_fn: Shared) -> Tensor:
        """Run as _run_alltoall, with experts padded to their capacity.

        Every rank sends `plan.size` rows to every expert, so the host reads no sizes.
        """
        ranks, experts_per_rank, size = self.ep.size, self.local_experts, plan.size
        rows, row_weights, order = self.take(x, plan, None)
        each = [experts_per_rank * size] * ranks
        pending = [begin_all_to_all(part, self.ep, each, each) for part in (row_weights, rows)]
        matrices = experts.prepare_weights(experts.cast(x.dtype)) if self.casts_early else None
        counts = torch.full((ranks, experts_per_rank), size, device=x.device)
        by_expert = transpose_blocks(counts, sum(each))
        row_weights, rows = (take_rows(end_all_to_all(part), by_expert) for part in pending)
        rows = experts(
            rows, row_weights, RowGroups(counts.sum(0), (ranks * size,) * experts_per_rank), matrices
        )
        return self._combine(take_rows(rows, by_expert.inverse()), each, each, order, overlapped_fn)

    def _run_static(self, x: Tensor, plan: ExpertRows, experts: Experts, overlapped_fn: Shared) -> Tensor:
        """Compute the same as _run_alltoall, but send each token to every rank, so that the host does not wait for
        sizes.

        The plan has the weights of local tokens, and the rows of the tokens of all ranks.
        """
        ranks, tokens = self.ep.size, len(x)
        cast = experts.cast(x.dtype) if self.casts_early else None
        pending = begin_all_to_all(
            replicate_rows(x, plan.weights, ranks, self.fusion), self.ep, [tokens] * ranks, [tokens] * ranks
        )
        matrices = None if cast is None else experts.prepare_weights(cast)
        groups, packed = RowGroups(plan.counts, padded=True), end_all_to_all(pending)
        rows, row_weights, order = unpack_replicated(packed, plan, groups.end, x.shape[1], self.fusion)
        rows = experts(rows, row_weights, groups, matrices)
        y = self._return_rows(
            sum_rows(rows, order, self.fusion), [tokens] * ranks, [tokens] * ranks, overlapped_fn
        )
        return y.unflatten(0, (ranks, tokens)).sum(0)  # in fp32, rounded once

    def _combine(
        self, y: Tensor, sent: list[int], received: list[int], order: Permutation, overlapped_fn: Shared
    ) -> Tensor:
        """Send the experts' outputs back to the ranks of their tokens, and sum them per token."""
        return sum_rows(self._return_rows(y, sent, received, overlapped_fn), order, self.fusion)

    def _return_rows(self, y: Tensor, sent: list[int], received: list[int], overlapped_fn: Shared) -> Tensor:
        """Return outputs to the ranks of their tokens. `overlapped_fn` is called during the all-to-all."""
        pending = begin_all_to_all(y, self.ep, sent, received)
        try:
            if overlapped_fn is not None:
                overlapped_fn()
        finally:  # recomputation stops, by an exception, at the last missing tensor, maybe in `overlapped_fn`
            y = end_all_to_all(pending)
        return y


def local_expert_ids(destinations: Tensor, rank: int, local_experts: int, dropped: int) -> Tensor:
    """Map global expert ids to local ones, int64. Experts of other ranks and dropped pairs become `local_experts`."""
    ids = destinations - rank * local_experts
    is_elsewhere = (ids < 0) | (ids >= local_experts) | (destinations == dropped)
    return torch.where(is_elsewhere, local_experts, ids)


def max_micro_batches(ranks: int, sharing: int) -> int:
    """Return the maximum number of micro-batches that a group of `ranks` adjacent ranks can process together.

    Each micro-batch is shared by a group of `sharing` adjacent ranks. Both kinds of groups start at multiples of their
    size.

    An expert accepts up to its capacity from each micro-batch, so this number bounds the rows that an expert gets from
    gathered tokens.
    """
    return 1 + -(-(ranks - math.gcd(ranks, sharing)) // sharing)


def _shard_experts(experts: Experts, mesh: Mesh) -> None:
    """Replace the experts' parameters by DTensors over "ep" and "etp", or over one of the two if the other has one
    rank.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name, linear in experts.named_modules(prefix="experts"):
        if not isinstance(linear, GroupedLinear):
            continue
        kinds = expert_sharding(name)
        for kind, parameter in list(linear.named_parameters(recurse=False)):
            dims = (kinds[kind].get(axis) for axis in mesh.experts.mesh_dim_names)
            placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
            dtensor = distribute_tensor(parameter, mesh.experts, placements, src_data_rank=None)
            replace_parameter(linear, kind, nn.Parameter(dtensor, requires_grad=parameter.requires_grad))
        if mesh.etp.size > 1 and "etp" not in kinds["weight"]:
            plug(linear, "sum_gradient", partial(all_reduce_gradient, axis=mesh.etp))
    bias = experts.linear_fc2.bias
    if bias is not None:
        plug(experts.linear_fc2, "first_row", local_shape_and_offset(bias)[1][1])
