"""Local shards of parameters, for the optimizer and for checkpoints.

A parameter is either a DTensor with a shard on this rank, or a plain tensor that this rank holds in full. The
optimizer updates plain parameters that share storage with the shards, which is six times faster than updating DTensors.
A checkpoint stores each shard once. If several ranks hold the same shard, one of them owns it and counts it in the
gradient norm.

Outside of FSDP2's modules the model computes with plain parameters too (`to_local_parameters`). Compiled code would
compare placements, unwrap the tensor and wrap its gradient for every DTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from megalith.comm.collectives import Axis, gather_json
from megalith.local_shards import local, local_shape_and_offset
from megalith.models.adapters import is_initial_factor
from megalith.optim.optimizer import Placement
from megalith.parallel.owners import CollectedMatrices, SharedMatrix, owned_matrices
from megalith.parallel.replication import replica_axes
from megalith.parallel.seams import replace_parameter


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a global tensor."""

    values: Tensor
    """The shard itself; shares storage with the parameter or state."""

    offset: tuple[int, ...]
    """Start in the global tensor, per dimension."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""

    owned: bool
    """True on exactly one of the ranks that hold the same shard."""

    def first_rows(self, rows: int) -> LocalShard:
        """Return the slice of this shard that lies in the first `rows` of the global tensor."""
        kept = min(max(rows - self.offset[0], 0), len(self.values))
        return replace(self, values=self.values[:kept], shape=(rows, *self.shape[1:]))

    def slice_of(self, tensor: Tensor) -> Tensor:
        """Return this shard's slice of another tensor of the global shape, as a view."""
        return tensor[tuple(slice(at, at + size) for at, size in zip(self.offset, self.values.shape))]


def local_shard(tensor: Tensor, copies: Axis | None = None) -> LocalShard:
    """Return this rank's shard of a DTensor. A plain tensor is its own shard.

    `copies` is the axis of ranks that replicate the tensor without a DTensor placement; its first rank owns it.
    """
    tensor, first = dtensor_of(tensor), copies is None or copies.rank == 0
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape), owned=first)
    coordinate = tensor.device_mesh.get_coordinate()
    owned = first and all(at == 0 for at, place in zip(coordinate, tensor.placements) if place.is_replicate())
    _, offset = local_shape_and_offset(tensor)
    return LocalShard(tensor.detach().to_local(), offset, tuple(tensor.shape), owned)


def named_shards(chunks: Iterable[nn.Module]) -> dict[str, LocalShard]:
    """Return this rank's shards of parameters and persistent buffers. A tied tensor appears under its first name."""
    named: dict[str, LocalShard] = {}
    seen: set[int] = set()
    for chunk in chunks:
        copies = replica_axes(chunk)
        for name, tensor in chunk.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                named[name] = local_shard(tensor, copies.get(name))
    return named


def to_local_parameters(chunk: nn.Module) -> None:
    """Replace the chunk's DTensor parameters by plain parameters on the same storage, in place.

    Call it after the storage is allocated. FSDP2 modules keep their DTensors, as do the experts inside them.
    """
    replaced: dict[DTensor, nn.Parameter] = {}  # tied parameters stay tied
    modules = [chunk]
    while modules:
        module = modules.pop()
        if isinstance(module, FSDPModule):
            continue
        modules += module.children()
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if parameter not in replaced:
                    replaced[parameter] = nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
                    replaced[parameter].dtensor = parameter
                replace_parameter(module, kind, replaced[parameter])


def dtensor_of(parameter: Tensor) -> Tensor:
    """Return the DTensor that `to_local_parameters` replaced by this parameter, or the parameter itself."""
    return getattr(parameter, "dtensor", parameter)


def store_frozen_as(chunk: nn.Module, stored: Mapping[str, torch.dtype], dtype: torch.dtype) -> None:
    """Give the chunk's frozen matrices the compute dtype `dtype` if their values will have it, in place.

    Loading then needs no memory for fp32 weights. Call it on the meta device, before FSDP2 shards the parameters.

    Args:
        chunk: a model chunk without storage.
        stored: a dtype that represents every value that will be loaded, by parameter name.
        dtype: the compute dtype.
    """
    replaced = {
        parameter: nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        for name, parameter in chunk.named_parameters()
        if stored.get(name) == dtype and _is_wider_frozen_matrix(name, parameter, dtype)
    }
    for module in chunk.modules():
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if parameter in replaced:
                replace_parameter(module, kind, replaced[parameter])


def _is_wider_frozen_matrix(name: str, parameter: Tensor, dtype: torch.dtype) -> bool:
    """Return True for a frozen matrix of another dtype than `dtype`.

    False for A₀ and B₀ of adapters, which have no values until the base is read.
    """
    is_frozen = not parameter.requires_grad and not is_initial_factor(name)
    return is_frozen and parameter.ndim > 1 and parameter.dtype != dtype


class LocalParameters:
    """The parameters of this rank's model chunks as plain tensors, for an optimizer.

    Create it after the storage is allocated (`to_empty`) and while FSDP2 has no layer unsharded.
    """

    def __init__(self, chunks: Iterable[nn.Module]):
        self._chunks = chunks = list(chunks)
        self.by_chunk = {chunk: list(chunk.parameters()) for chunk in chunks}
        """The model's parameters by chunk. FSDP2 replaces them by others while they are gathered."""
        self._state = [item for chunk in chunks for item in chunk.named_parameters()]
        self.copies = {name: axis for chunk in chunks for name, axis in replica_axes(chunk).items()}
        """Axis of the ranks that hold each replicated plain parameter, by name."""
        self.shards = {name: local_shard(parameter, self.copies.get(name)) for name, parameter in self._state}
        self.named = [(name, self._plain(name, parameter)) for name, parameter in self._state]
        """Names and plain fp32 parameters of local shape, possibly empty; they share storage with the model's."""

    def placements(
        self,
        matrices: Callable[[str, torch.Size], Mapping[str, Any]],
        seed: int,
        unpadded_rows: Mapping[str, int] | None = None,
    ) -> dict[str, Placement]:
        """Return a Placement per parameter name.

        Args:
            matrices: called as (name, global shape); returns those fields of Placement that describe matrices.
            seed: seed of the run.
            unpadded_rows: number of rows without padding, by name, of parameters with padding.
        """
        placements = {}
        for name, parameter in self._state:
            tensor, shard = dtensor_of(parameter), self.shards[name]
            fields = dict(
                **matrices(name, tensor.shape),
                shape=shard.shape,
                offset=shard.offset,
                seed=seed,
                rows=(unpadded_rows or {}).get(name),
            )
            if isinstance(tensor, DTensor):
                fields |= dict(
                    gather=partial(_unshard, tensor),
                    shard=partial(_reshard, tensor, shard),
                    sum=partial(_sum_over_shards, tensor),
                    collect=CollectedMatrices,
                    owned=owned_matrices,
                    shared=SharedMatrix.of(tensor) if fields["matrices"] is not None else None,
                )
            placements[name] = Placement(**fields)
        return placements

    @torch.no_grad()
    def store_frozen(self, dtype: torch.dtype, world: Axis) -> None:
        """Convert frozen matrices to the compute dtype `dtype` if it represents all their values exactly.

        This saves the casts and at least half of the memory. Collective over `world`. Call it before the first forward
        pass, because FSDP2 accepts replaced parameters only until then.
        """
        frozen = [
            at
            for at, (name, parameter) in enumerate(self._state)
            if _is_wider_frozen_matrix(name, parameter, dtype)
        ]

        def is_exact(parameter: Tensor) -> bool:
            return torch.equal(parameter.to(dtype).to(parameter.dtype), parameter)

        inexact_here = [self._state[at][0] for at in frozen if not is_exact(local(self._state[at][1]))]
        inexact = {name for names in gather_json(inexact_here, world) for name in names}
        stored: dict[Tensor, nn.Parameter] = {}
        for at in frozen:
            name, parameter = self._state[at]
            if name in inexact:
                continue
            cast, like = local(parameter).to(dtype), dtensor_of(parameter)
            if isinstance(like, DTensor):
                options = dict(run_check=False, shape=like.shape, stride=like.stride())
                like = DTensor.from_local(cast, like.device_mesh, like.placements, **options)
            if isinstance(parameter, DTensor):
                stored[parameter] = nn.Parameter(like, requires_grad=False)
                self._state[at] = name, stored[parameter]
            elif like is not parameter:
                parameter.dtensor = like
            self.named[at][1].data = cast
            self.shards[name] = local_shard(self._state[at][1], self.copies.get(name))
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            for kind, parameter in list(module.named_parameters(recurse=False)):
                if parameter in stored:
                    replace_parameter(module, kind, stored[parameter])

    @torch.no_grad()  # otherwise autograd records each to_local
    def attach_gradients(self) -> None:
        """Set `.grad` of each plain parameter to its shard of the gradient, without a copy."""
        for (_, parameter), (_, plain) in zip(self._state, self.named):
            grad = parameter.grad
            plain.grad = grad.to_local() if isinstance(grad, DTensor) else grad

    def clear_gradients(self) -> None:
        """Free the gradients."""
        for (_, parameter), (_, plain) in zip(self._state, self.named):
            parameter.grad = plain.grad = None

    def _plain(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        return nn.Parameter(self.shards[name].values, requires_grad=parameter.requires_grad)


def _unshard(like: DTensor, shard: Tensor) -> Tensor:
    """All-gather the full tensor from this rank's `shard`, which has the placement of `like`.

    Experts [experts, rows, columns] stay sharded over their first dimension.
    """
    placements = [
        place if len(like.shape) == 3 and getattr(place, "dim", None) == 0 else Replicate()
        for place in like.placements
    ]
    tensor = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return tensor.redistribute(placements=placements).to_local()


def _sum_over_shards(like: DTensor, tensor: Tensor, dims: Collection[int]) -> Tensor:
    """Return the sum of `tensor` over the ranks that shard one of the dimensions `dims` of `like`."""
    for axis, place in enumerate(like.placements):
        if getattr(place, "dim", None) in dims and like.device_mesh.size(axis) > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor, group=like.device_mesh.get_group(axis))
    return tensor


def _reshard(like: DTensor, shard: LocalShard, tensor: Tensor) -> Tensor:
    """Return this rank's slice, as a view, of a result of `_unshard`."""
    if tensor.shape == like.shape:
        return shard.slice_of(tensor)
    first = (0, *shard.offset[1:])  # all experts of this rank are there
    return tensor[tuple(slice(at, at + size) for at, size in zip(first, shard.values.shape))]
