"""Expert parallelism (Lepikhin et al. 2020): the experts of a layer are spread over ranks, and tokens travel to them.

The ranks of a pipeline stage, which for everything else are data × context × tensor, are for the experts edp copies
of ep ranks, each expert cut over etp of them (mesh.py). Every rank brings the tokens that it has:

    1. Ranks of the tensor axis have the same tokens, but for sequence parallelism: each takes its share.
    2. Ranks that an expert is cut over need the same tokens: they gather each other's.
    3. alltoall   each pair of a token and an expert becomes a row, and goes to the rank of that expert and back
       allgather  all ranks that have experts gather all tokens; each computes what its experts add
    4. The parts of the sums are added where they were gathered, and the shares of 1 joined.

What alltoall sends depends on the tokens, so the host reads the sizes, once a layer; with a capacity that experts are
filled up to, sizes are fixed and it reads nothing. A row's weight travels with it. Every step is the gradient of
another, so an expert's gradient is that of all tokens of its copy, whole, and is summed over edp alone (data.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from megalith.comm import (
    Axis,
    all_gather,
    all_gather_alike,
    all_to_all,
    begin_all_to_all,
    end_all_to_all,
    own_part,
    reduce_scatter,
    summed,
)
from megalith.config import ModelConfig
from megalith.models.balance import MicroBatch
from megalith.models.moe import Dispatch, Experts, filled_order, order_of, sort_pairs
from megalith.models.router import Routing
from megalith.models.transformer import Transformer
from megalith.ops.grouped_gemm import Groups
from megalith.ops.permute import Order, take_rows, transposed
from megalith.parallel.mesh import Mesh
from megalith.parallel.tensor import TensorParallel

# The dimensions of each weight [experts, out, in] that are cut over ep and over etp: columns of fc1, rows of fc2.
CUTS = {"linear_fc1": {"ep": 0, "etp": 1}, "linear_fc2": {"ep": 0, "etp": 2}}


def apply_expert(model: Transformer, mesh: Mesh, tensor: TensorParallel | None, dispatcher: str) -> None:
    """Spreads the experts of `model`, on the meta device, over the mesh, in place; `dispatcher` is how tokens travel.

    `tensor` is what apply_tensor returned. The sizes divide as config.expert_rules demands.
    """
    sequence_parallel = tensor is not None and tensor.sequence_parallel
    parts = mesh.cp_tp if sequence_parallel else mesh.cp
    for layer in model.layers.values():
        if not layer.has_experts:
            continue
        if parts.size > 1:
            layer.mlp.router.micro_batch = Part(parts)
        if mesh.experts is not None:
            _cut(layer.mlp.experts, mesh)
        if mesh.ep_etp.size > 1 or tensor is not None:
            layer.mlp.dispatch = ExpertParallel(model.config, mesh, tensor, dispatcher)


class Part(MicroBatch):
    """The tokens here are one of `axis.size` parts of their micro-batch."""

    def __init__(self, axis: Axis):
        self.axis, self.shares = axis, axis.size

    def total(self, x: Tensor) -> Tensor:
        return summed(x, self.axis)

    def whole(self, x: Tensor) -> Tensor:
        return all_gather(x, self.axis)

    def own(self, x: Tensor) -> Tensor:
        return x.chunk(self.axis.size)[self.axis.rank]


class ExpertParallel(Dispatch):
    """The way of a rank's tokens to their experts, wherever these are, and back."""

    def __init__(self, config: ModelConfig, mesh: Mesh, tensor: TensorParallel | None, dispatcher: str):
        super().__init__(config)
        self.tensor, self.ep = tensor, mesh.ep
        self.local_experts = config.num_experts // mesh.ep.size
        self.prepares = (
            mesh.expert_fsdp is None
        )  # else FSDP2 gathers the experts' weights, as their module begins
        self.sends = dispatcher == "alltoall" and mesh.ep.size > 1
        self.gathered = mesh.etp if dispatcher == "alltoall" else mesh.ep_etp
        self.micro_batches = _micro_batches(self.gathered.size, mesh.cp.size * mesh.tp.size)

    @torch.compiler.disable
    def __call__(self, x: Tensor, routing: Routing, experts: Experts) -> Tensor:
        """x [tokens, hidden] through the experts of its routing: [tokens, hidden]."""
        tokens, destinations, weights = len(x), routing.destinations(self.experts), routing.weights
        shares = self.tensor is not None and not self.tensor.tokens_are_cut
        if shares:
            x, weights, destinations = self._share(x, weights, destinations, routing.capacity is not None)
        x, weights = all_gather(x, self.gathered), all_gather(weights, self.gathered)
        destinations = all_gather(destinations, self.gathered)
        capacity = None if routing.capacity is None else routing.capacity * self.micro_batches
        if self.sends:
            y = self._send(x, weights, destinations, capacity, experts)
        else:
            here = self.local_experts
            own = destinations - self.ep.rank * here
            nowhere = (own < 0) | (own >= here) | (destinations == self.experts)
            y = self.compute(x, weights, torch.where(nowhere, here, own), capacity, experts)
        y = reduce_scatter(y, self.gathered)
        return all_gather_alike(y, self.tensor.axis)[:tokens] if shares else y

    def _share(
        self, x: Tensor, weights: Tensor, destinations: Tensor, capacity: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's part of the tokens that all ranks of the tensor axis have; all parts are as long.

        What fills the last ones up weighs nothing. It goes to expert 0, or where that has a capacity nowhere.
        """
        axis = self.tensor.axis
        missing = (0, 0, 0, -len(x) % axis.size)
        x, weights = nn.functional.pad(x, missing), nn.functional.pad(weights, missing)
        destinations = nn.functional.pad(destinations, missing, value=self.experts if capacity else 0)
        return own_part(x, axis), own_part(weights, axis), own_part(destinations, axis)

    def _send(
        self, x: Tensor, weights: Tensor, destinations: Tensor, capacity: int | None, experts: Experts
    ) -> Tensor:
        """What the experts of all ranks make of x [tokens, hidden]: each pair's row goes to the rank of its expert."""
        if capacity is not None and self.fills_up:
            return self._send_filled(x, weights, destinations, capacity, experts)
        pair, counts = sort_pairs(destinations, self.experts)
        received = all_to_all(counts.view(self.ep.size, -1), self.ep)  # [from rank, experts here]
        sizes = torch.stack([counts.view_as(received), received]).tolist()  # the one read on the host
        sent, arriving = ([sum(of_rank) for of_rank in side] for side in sizes)
        order = order_of(pair, destinations, sum(sent))
        groups = Groups(received.sum(0), tuple(map(sum, zip(*sizes[1]))))
        return self._there_and_back(x, weights, order, sent, arriving, received, groups, experts)

    def _send_filled(
        self, x: Tensor, weights: Tensor, destinations: Tensor, capacity: int, experts: Experts
    ) -> Tensor:
        """As _send, with as many rows for every expert from every rank."""
        ranks, here, size = self.ep.size, self.local_experts, min(capacity, len(x))
        order, _ = filled_order(destinations, self.experts, size)
        each = [here * size] * ranks
        received = torch.full((ranks, here), size, device=x.device)
        groups = Groups(received.sum(0), (ranks * size,) * here)
        return self._there_and_back(x, weights, order, each, each, received, groups, experts)

    def _there_and_back(
        self,
        x: Tensor,
        weights: Tensor,
        order: Order,
        sent: list[int],  # rows for each rank
        arriving: list[int],  # rows from each rank
        received: Tensor,  # int64 [from rank, experts here]: the same by expert
        groups: Groups,
        experts: Experts,
    ) -> Tensor:
        rows, row_weights = self.rows(x, weights, order)
        row_weights = begin_all_to_all(row_weights, self.ep, sent, arriving)
        rows = begin_all_to_all(rows, self.ep, sent, arriving)
        # While rows travel the experts' weights are cast, and in the backward pass their gradients computed.
        matrices = experts.prepared(x.dtype) if self.prepares else None
        by_expert = transposed(received, sum(arriving))
        rows, row_weights = end_all_to_all(rows), end_all_to_all(row_weights)
        rows = experts(take_rows(rows, by_expert), take_rows(row_weights, by_expert), groups, matrices)
        rows = begin_all_to_all(take_rows(rows, by_expert.inverse()), self.ep, arriving, sent)
        return self.sum(end_all_to_all(rows), order)


def _micro_batches(ranks: int, alike: int) -> int:
    """The most micro-batches that `ranks` neighbours have between them, where each `alike` neighbours share one.

    Each lets an expert take its capacity, so this many times it is what an expert may get of what they gather.
    """
    if ranks % alike == 0:
        return ranks // alike
    return 1 if alike % ranks == 0 else ranks // alike + 2


def _cut(experts: Experts, mesh: Mesh) -> None:
    """Makes the experts' parameters DTensors over ("ep", "etp"), or the one of them that there is."""
    for name, cuts in CUTS.items():
        linear = getattr(experts, name)
        placements = [Shard(cuts[axis]) for axis in mesh.experts.mesh_dim_names]
        placed = distribute_tensor(linear.weight, mesh.experts, placements, src_data_rank=None)
        linear.weight = nn.Parameter(placed)
