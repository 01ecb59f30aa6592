"""Expert parallelism (Lepikhin et al. 2020): the experts of a layer are spread over ranks, and tokens are dispatched.

The ranks of a pipeline stage (data × context × tensor for everything else) are for the experts edp replicas of ep
ranks, with each expert sharded over etp of them (mesh.py). Every rank brings its own tokens:

    1. Without sequence parallelism the TP ranks have the same tokens: each dispatches its share.
    2. The etp ranks of an expert need the same tokens: they all-gather each other's.
    3. alltoall   each token goes once to each rank that has some of its experts, and the sum of their outputs
                  comes back: fewer bytes than a row for each pair of token and expert
       allgather  all ranks with experts all-gather all tokens; each computes the part of its own experts
    4. Partial outputs are reduced where tokens were gathered, and the shares of 1 are all-gathered.

Every step is the gradient of another step. So an expert's gradient covers all tokens of its replica, and only has to
be reduced over edp.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn

from megalith.comm.collectives import (
    all_gather,
    all_gather_no_grad,
    all_gather_replicated,
    begin_all_to_all,
    end_all_to_all,
    local_chunk,
    reduce_scatter,
)
from megalith.config import ModelConfig
from megalith.local_shards import local_shape_and_offset
from megalith.models.moe import Dispatch, ExpertRows, Experts, Shared, bounded_rows
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
    spread,
    unpack,
    unpack_replicated,
)
from megalith.parallel.expert.expert_counts import ShardedTokens
from megalith.parallel.mesh import Mesh
from megalith.parallel.seams import plug, replace_parameter
from megalith.parallel.tensor.tensor_parallel import TensorParallel

# The dimensions of weights [experts, out, in] and biases [experts, out] that are cut over ep and over etp: columns of
# fc1, rows of fc2. Of the bias of fc2 each rank adds some columns, so that the ranks' sum has it once, and none shares
# its gradient with another.
CUTS = {
    "linear_fc1": {"weight": {"ep": 0, "etp": 1}, "bias": {"ep": 0, "etp": 1}},
    "linear_fc2": {"weight": {"ep": 0, "etp": 2}, "bias": {"ep": 0, "etp": 1}},
}


def apply_expert(
    model: Transformer, mesh: Mesh, tensor: TensorParallel | None, dispatcher: str, bounded: bool = False
) -> None:
    """Spreads the experts of `model`, on the meta device, over the mesh, in place; `dispatcher` is how tokens travel,
    `bounded`: in buffers as large as any routing needs.

    `tensor` is what apply_tensor returned. The sizes divide as config.expert_rules demands.
    """
    sequence_parallel = tensor is not None and tensor.sequence_parallel
    parts = mesh.cp_tp if sequence_parallel else mesh.cp
    for layer in layers_of(model).values():
        if not layer.has_experts:
            continue
        if parts.size > 1:
            plug(layer.mlp.router, "local_tokens", ShardedTokens(parts))
        if mesh.experts is not None:
            _cut(layer.mlp.experts, mesh)
        if mesh.ep_etp.size > 1 or tensor is not None:
            plug(layer.mlp, "dispatch", ExpertParallel(model.config, mesh, tensor, dispatcher, bounded))


class HostCopy:
    """What a tensor holds, on its way to the host while the device goes on with what is launched after."""

    def __init__(self, x: Tensor):
        self._copy = x.to("cpu", non_blocking=True)
        self._made = torch.cuda.current_stream().record_event() if x.is_cuda else None

    def values(self) -> list:
        """Waits for it."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy.tolist()


class ExpertParallel(Dispatch):
    """Send a rank's tokens to their experts on any rank, and their outputs back.

    The sizes that alltoall sends, and the number of rows that allgather computes, depend on the tokens, so the host
    reads them once per layer. It reads nothing in static dispatch (moe_static_dispatch): every rank gets every token,
    so buffers have one size for any routing, and the number of rows of the experts here stays on the device, where
    grouped matmuls read it. It also reads nothing with experts padded to their capacity, where each pair is a row.

    Work that needs no tokens overlaps the all-to-alls. The backward pass runs in reverse order, so the same two lines
    hide its all-to-alls too:

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
        self.overlaps = config.moe_shared_expert_overlap
        # Where FSDP2 gathers the experts' weights it does so as their module begins: not earlier.
        self.prepares = mesh.expert_fsdp is None
        self.sends = dispatcher == "alltoall" and mesh.ep.size > 1
        self.dispatch_axis = mesh.etp if dispatcher == "alltoall" else mesh.ep_etp
        self.micro_batches = _micro_batches(self.dispatch_axis.size, mesh.cp.size * mesh.tp.size)

    def plan(self, routing: Routing, layout: PassLayout) -> DispatchPlan | ExpertRows:
        weights, destinations = routing.weights, routing.destinations(self.experts)
        if self._shares(layout):
            # What fills the last ranks up weighs nothing. It goes anywhere, but where experts have a capacity nowhere.
            topk = weights.shape[1]
            filler = torch.arange(topk, device=weights.device) if routing.capacity is None else self.experts
            weights, destinations = self._share(weights), self._share(destinations, filler)
        weights = all_gather(weights, self.dispatch_axis)
        destinations = all_gather_no_grad(destinations, self.dispatch_axis)
        capacity = None if routing.capacity is None else routing.capacity * self.micro_batches
        if not self.sends:
            destinations = _numbers_here(destinations, self.ep.rank, self.local_experts, self.experts)
            return self.rows(weights, destinations, capacity, self.local_experts)
        if capacity is not None and self.fills_up:
            return self.rows(weights, destinations, capacity, self.experts)
        if self.bounded:
            everywhere = all_gather_no_grad(destinations.int(), self.ep).long()
            here = _numbers_here(everywhere, self.ep.rank, self.local_experts, self.experts)
            return bounded_rows(weights, here, self.local_experts)
        return plan_dispatch(weights, destinations, self.ep, self.local_experts)

    def __call__(
        self, x: Tensor, plan: DispatchPlan | ExpertRows, experts: Experts, shared: Shared, layout: PassLayout
    ) -> Tensor:
        """x [tokens, hidden] through the experts of its plan, plus what `shared` gives: [tokens, hidden]."""
        sizes = HostCopy(plan.sizes) if isinstance(plan, DispatchPlan) else None
        shared = None if shared is None else cache(shared)  # called early, where it overlaps
        beside = shared if self.overlaps else None
        tokens, shares = len(x), self._shares(layout)
        x = all_gather(self._share(x) if shares else x, self.dispatch_axis)
        if sizes is not None:
            y = self._send(x, plan, sizes, experts, beside)
        elif self.sends and plan.bounded:
            y = self._send_bounded(x, plan, experts, beside)
        elif self.sends:
            y = self._send_filled(x, plan, experts, beside)
        else:
            y = self.compute(x, plan, experts)
        y = reduce_scatter(y, self.dispatch_axis)
        y = all_gather_replicated(y, self.tensor.axis)[:tokens] if shares else y
        return y if shared is None else y + shared()

    def _shares(self, layout: PassLayout) -> bool:
        """Whether all ranks of the tensor axis have the same tokens, and each takes a part of them."""
        return self.tensor is not None and not layout.sharded

    def _share(self, x: Tensor, filler: Tensor | int = 0) -> Tensor:
        """This rank's part of x [tokens, width]; all parts are as long, the last ones filled up with `filler`."""
        missing = x.new_zeros(-len(x) % self.tensor.axis.size, x.shape[1]) + filler
        return local_chunk(torch.cat([x, missing.to(x.dtype)]), self.tensor.axis)

    def _send(
        self, x: Tensor, plan: DispatchPlan, sizes: HostCopy, experts: Experts, beside: Shared
    ) -> Tensor:
        """What the experts of all ranks make of x [tokens, hidden]: each token goes once to each rank that has some of
        its experts, and comes back as the sum of what these add.

        `beside` is called while tokens are on their way back.
        """
        cast = experts.cast(x.dtype) if self.prepares else None  # while the host reads
        ranks, values = self.ep.size, sizes.values()
        there, back, counts = values[:ranks], values[ranks : 2 * ranks], tuple(values[2 * ranks :])
        packed, order = pack(x, plan, sum(there), self.fusion)
        way = begin_all_to_all(packed, self.ep, there, back)
        # Made here, wgrads are computed in the backward pass during the all-to-all of the tokens' gradients.
        matrices = None if cast is None else experts.prepare_weights(cast)
        rows, row_weights, here = unpack(end_all_to_all(way), plan, sum(counts), self.fusion)
        rows = experts(rows, row_weights, RowGroups(plan.counts, counts), matrices)
        return self._back(sum_rows(rows, here, self.fusion), back, there, order, beside)

    def _send_filled(self, x: Tensor, plan: ExpertRows, experts: Experts, beside: Shared) -> Tensor:
        """As _send, with a row for each pair: `plan.size` for every expert from every rank, so that nothing is read."""
        ranks, here, size = self.ep.size, self.local_experts, plan.size
        rows, row_weights, order = self.take(x, plan, None)
        each = [here * size] * ranks
        way = [begin_all_to_all(part, self.ep, each, each) for part in (row_weights, rows)]
        matrices = experts.prepare_weights(experts.cast(x.dtype)) if self.prepares else None
        counts = torch.full((ranks, here), size, device=x.device)
        by_expert = transpose_blocks(counts, sum(each))
        row_weights, rows = (take_rows(end_all_to_all(part), by_expert) for part in way)
        rows = experts(rows, row_weights, RowGroups(counts.sum(0), (ranks * size,) * here), matrices)
        return self._back(take_rows(rows, by_expert.inverse()), each, each, order, beside)

    def _send_bounded(self, x: Tensor, plan: ExpertRows, experts: Experts, beside: Shared) -> Tensor:
        """As _send, with a parcel of each token for every rank and as many rows as these may have, so that nothing is
        read; the plan's weights are of the tokens here, its rows of those of all ranks."""
        ranks, tokens = self.ep.size, len(x)
        cast = experts.cast(x.dtype) if self.prepares else None
        way = begin_all_to_all(
            spread(x, plan.weights, ranks, self.fusion), self.ep, [tokens] * ranks, [tokens] * ranks
        )
        matrices = None if cast is None else experts.prepare_weights(cast)
        groups, parcels = RowGroups(plan.counts, padded=True), end_all_to_all(way)
        rows, row_weights, order = unpack_replicated(parcels, plan, groups.end, x.shape[1], self.fusion)
        rows = experts(rows, row_weights, groups, matrices)
        y = self._exchanged(sum_rows(rows, order, self.fusion), [tokens] * ranks, [tokens] * ranks, beside)
        return y.unflatten(0, (ranks, tokens)).sum(0)  # in fp32, rounded once

    def _back(
        self, y: Tensor, sent: list[int], received: list[int], order: Permutation, beside: Shared
    ) -> Tensor:
        """The sum for each token here of what all ranks send back."""
        return sum_rows(self._exchanged(y, sent, received, beside), order, self.fusion)

    def _exchanged(self, y: Tensor, sent: list[int], received: list[int], beside: Shared) -> Tensor:
        """What all ranks send back; `beside` is called while it is on its way."""
        way = begin_all_to_all(y, self.ep, sent, received)
        try:
            if beside is not None:
                beside()
        finally:  # a layer is computed again up to the last tensor that is missing, which `beside` may make
            y = end_all_to_all(way)
        return y


def _numbers_here(destinations: Tensor, rank: int, here: int, nowhere: int) -> Tensor:
    """The numbers of the experts here, int64, and for all others the one that is nowhere."""
    own = destinations - rank * here
    return torch.where((own < 0) | (own >= here) | (destinations == nowhere), here, own)


def _micro_batches(ranks: int, alike: int) -> int:
    """The most micro-batches that `ranks` neighbours have between them, where each `alike` neighbours share one.

    Each lets an expert take its capacity, so this many times it is what an expert may get of what they gather. Both
    kinds of neighbours begin at multiples of their number.
    """
    return 1 + -(-(ranks - math.gcd(ranks, alike)) // alike)


def _cut(experts: Experts, mesh: Mesh) -> None:
    """Makes the experts' parameters DTensors over ("ep", "etp"), or the one of them that there is."""
    from torch.distributed.tensor import Shard, distribute_tensor

    for name, kinds in CUTS.items():
        linear = getattr(experts, name)
        for kind, parameter in list(linear.named_parameters()):
            placements = [Shard(kinds[kind][axis]) for axis in mesh.experts.mesh_dim_names]
            placed = distribute_tensor(parameter, mesh.experts, placements, src_data_rank=None)
            replace_parameter(linear, kind, nn.Parameter(placed, requires_grad=parameter.requires_grad))
    bias = experts.linear_fc2.bias
    if bias is not None:
        plug(experts.linear_fc2, "first_row", local_shape_and_offset(bias)[1][1])
