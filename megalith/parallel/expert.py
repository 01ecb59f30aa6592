"""Expert parallelism (Lepikhin et al. 2020): the experts of a layer are spread over ranks, and tokens travel to them.

The ranks of a pipeline stage, which for everything else are data × context × tensor, are for the experts edp copies
of ep ranks, each expert cut over etp of them (mesh.py). Every rank brings the tokens that it has:

    1. Ranks of the tensor axis have the same tokens, but for sequence parallelism: each takes its share.
    2. Ranks that an expert is cut over need the same tokens: they gather each other's.
    3. alltoall   each token goes to the ranks that have its experts, once to each, and what these add to it, in one
                  sum, comes back: less travels than a row for each pair of a token and an expert
       allgather  all ranks that have experts gather all tokens; each computes what its experts add
    4. The parts of the sums are added where they were gathered, and the shares of 1 joined.

What alltoall sends depends on the tokens, so the host reads the sizes, once a layer. With a capacity that experts are
filled up to, each pair is a row of its own: sizes are fixed then, and it reads nothing. The numbers and weights of a
token's experts travel with it. Every step is the gradient of another, so an expert's gradient is that of all tokens of
its copy, whole, and is summed over edp alone (data.py).

What needs no tokens is computed while they travel. In the backward pass the order is the other way round, so the same
two lines hide its exchanges as well:

                     forward                              backward, read upwards
    tokens there     weights cast, while the host reads   gradients of the experts' weights
    sums back        shared expert                        shared expert's backward pass
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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
from megalith.models.moe import Dispatch, Experts, filled_order
from megalith.models.router import Routing
from megalith.models.transformer import Transformer
from megalith.ops.compiled import as_one_kernel
from megalith.ops.grouped_gemm import Groups
from megalith.ops.permute import Order, copies, copies_order, counted, take_rows, transposed
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
    """The way of a rank's tokens to their experts, wherever these are, and back."""

    def __init__(self, config: ModelConfig, mesh: Mesh, tensor: TensorParallel | None, dispatcher: str):
        super().__init__(config)
        self.tensor, self.ep = tensor, mesh.ep
        self.local_experts = config.num_experts // mesh.ep.size
        self.overlaps = config.moe_shared_expert_overlap
        # Where FSDP2 gathers the experts' weights it does so as their module begins: not earlier.
        self.prepares = mesh.expert_fsdp is None
        self.sends = dispatcher == "alltoall" and mesh.ep.size > 1
        self.gathered = mesh.etp if dispatcher == "alltoall" else mesh.ep_etp
        self.micro_batches = _micro_batches(self.gathered.size, mesh.cp.size * mesh.tp.size)

    @torch.compiler.disable
    def __call__(
        self, x: Tensor, routing: Routing, experts: Experts, shared: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """x [tokens, hidden] through the experts of its routing, plus what `shared` gives: [tokens, hidden]."""
        shared = None if shared is None else cache(shared)  # called early, where it overlaps
        beside = shared if self.overlaps else None
        tokens, destinations, weights = len(x), routing.destinations(self.experts), routing.weights
        shares = self.tensor is not None and not self.tensor.tokens_are_cut
        if shares:
            x, weights, destinations = self._share(x, weights, destinations, routing.capacity is not None)
        x, weights = all_gather(x, self.gathered), all_gather(weights, self.gathered)
        destinations = all_gather(destinations, self.gathered)
        capacity = None if routing.capacity is None else routing.capacity * self.micro_batches
        if self.sends:
            y = self._send(x, weights, destinations, capacity, experts, beside)
        else:
            y = self.compute(x, weights, self._own(destinations), capacity, experts)
        y = reduce_scatter(y, self.gathered)
        y = all_gather_alike(y, self.tensor.axis)[:tokens] if shares else y
        return y if shared is None else y + shared()

    def _own(self, destinations: Tensor) -> Tensor:
        """The numbers of the experts here, int64, and for all others the one that is nowhere."""
        args = destinations.detach(), self.ep.rank, self.local_experts, self.experts
        return as_one_kernel(_numbers_here, *args, rows_vary=True) if self.fused else _numbers_here(*args)

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
        self,
        x: Tensor,
        weights: Tensor,
        destinations: Tensor,
        capacity: int | None,
        experts: Experts,
        beside: Callable[[], Tensor] | None,
    ) -> Tensor:
        """What the experts of all ranks make of x [tokens, hidden]: each token goes once to each rank that has some of
        its experts, and comes back as the sum of what these add.

        `beside` is called while tokens are on their way back.
        """
        if capacity is not None and self.fills_up:
            return self._send_filled(x, weights, destinations, min(capacity, len(x)), experts, beside)
        ranks, here, topk = self.ep.size, self.local_experts, destinations.shape[1]
        counts, *found = (
            as_one_kernel(_copies_and_counts, destinations, ranks, here, sizes_vary=True)
            if self.fused
            else _copies_and_counts(destinations, ranks, here)
        )
        sizes = HostCopy(torch.stack([counts, all_to_all(counts, self.ep)]))
        cast = experts.cast(x.dtype) if self.prepares else None  # while the host reads
        sent, arriving = sizes.values()
        there, back = [to[0] for to in sent], [of[0] for of in arriving]
        order = copies_order(*found, sum(there))
        choices = torch.cat([weights, destinations.float()], 1)  # [tokens, 2 · topk]
        way = [
            begin_all_to_all(part, self.ep, there, back)
            for part in (take_rows(choices, order), take_rows(x, order, self.fused))
        ]
        # Made here, the weights' gradients are computed in the backward pass while those of the tokens travel.
        matrices = None if cast is None else experts.prepared(cast)
        choices, x = (end_all_to_all(part) for part in way)
        weights, destinations = choices.split(topk, 1)
        _, *rows = map(sum, zip(*arriving))
        y = self.compute(x, weights, self._own(destinations), None, experts, tuple(rows), matrices)
        return self._back(y, back, there, order, beside)

    def _send_filled(
        self,
        x: Tensor,
        weights: Tensor,
        destinations: Tensor,
        size: int,
        experts: Experts,
        beside: Callable[[], Tensor] | None,
    ) -> Tensor:
        """As _send, with a row for each pair: `size` for every expert from every rank, so that nothing is read."""
        ranks, here = self.ep.size, self.local_experts
        order, _ = filled_order(destinations, self.experts, size)
        each = [here * size] * ranks
        way = [begin_all_to_all(part, self.ep, each, each) for part in reversed(self.rows(x, weights, order))]
        matrices = experts.prepared(experts.cast(x.dtype)) if self.prepares else None
        counts = torch.full((ranks, here), size, device=x.device)
        by_expert = transposed(counts, sum(each))
        row_weights, rows = (take_rows(end_all_to_all(part), by_expert) for part in way)
        rows = experts(rows, row_weights, Groups(counts.sum(0), (ranks * size,) * here), matrices)
        return self._back(take_rows(rows, by_expert.inverse()), each, each, order, beside)

    def _back(
        self,
        y: Tensor,
        sent: list[int],
        received: list[int],
        order: Order,
        beside: Callable[[], Tensor] | None,
    ) -> Tensor:
        """The sum for each token here of what all ranks send back."""
        way = begin_all_to_all(y, self.ep, sent, received)
        try:
            if beside is not None:
                beside()
        finally:  # a layer is computed again up to the last tensor that is missing, which `beside` may make
            y = end_all_to_all(way)
        return self.sum(y, order)


def _copies_and_counts(destinations: Tensor, ranks: int, here: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each rank how many copies of tokens it gets, and how many pairs each of its experts: int64 [ranks, 1 + here];
    and what copies_order takes."""
    counts, pair, row = copies(destinations // here, ranks)
    pairs = counted(destinations.flatten(), ranks * here + 1)[:-1]
    return torch.cat([counts[:, None], pairs.view(ranks, here)], 1), pair, row


def _numbers_here(destinations: Tensor, rank: int, here: int, nowhere: int) -> Tensor:
    own = destinations.long() - rank * here
    return torch.where((own < 0) | (own >= here) | (destinations == nowhere), here, own)


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
