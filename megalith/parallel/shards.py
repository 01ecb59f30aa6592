"""State as the optimizer and a checkpoint see it: each rank's shards, and the global tensors that they are parts of.

A parameter is a DTensor, a global tensor of which this rank holds a shard, or a plain tensor that is here whole. The
optimizer steps plain parameters that share their storage with the shards, which is six times quicker than stepping
DTensors; a checkpoint stores shards, each once. Where several ranks hold the same shard, one of them is its owner,
which counts it in the gradient's norm.

Outside of FSDP2's modules the model too computes with plain parameters (`to_local_parameters`): for each DTensor that
compiled code is given, it compares placements, takes it apart and puts its gradient together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from megalith.comm.collectives import Axis, gather_json, local, local_shape_and_offset
from megalith.optim.optimizer import Placement
from megalith.parallel.data.replicas import replica_axes
from megalith.parallel.seams import replace_parameter


@dataclass(frozen=True)
class LocalShard:
    """The part of a global tensor that this rank holds."""

    values: Tensor
    """The part itself; shares its storage with the state."""

    offset: tuple[int, ...]
    """Where it begins in the global tensor, dimension by dimension."""

    shape: tuple[int, ...]
    """Shape of the global tensor."""

    owned: bool
    """True on one of the ranks that hold the same shard."""

    def first_rows(self, rows: int) -> LocalShard:
        """The part of this shard in the first `rows` of the global tensor."""
        kept = min(max(rows - self.offset[0], 0), len(self.values))
        return replace(self, values=self.values[:kept], shape=(rows, *self.shape[1:]))

    def slice_of(self, whole: Tensor) -> Tensor:
        """This shard of another tensor of the global shape, as a view."""
        return whole[tuple(slice(at, at + size) for at, size in zip(self.offset, self.values.shape))]


def local_shard(tensor: Tensor, copies: Axis | None = None) -> LocalShard:
    """The shard of a DTensor; a plain tensor is a shard by itself.

    `copies` are the ranks on which it stands alike without its placements telling so; the first of them owns it.
    """
    tensor, first = dtensor_of(tensor), copies is None or copies.rank == 0
    if not isinstance(tensor, DTensor):
        return LocalShard(tensor.detach(), (0,) * tensor.ndim, tuple(tensor.shape), owned=first)
    coordinate = tensor.device_mesh.get_coordinate()
    owned = first and all(at == 0 for at, place in zip(coordinate, tensor.placements) if place.is_replicate())
    _, offset = local_shape_and_offset(tensor)
    return LocalShard(tensor.detach().to_local(), offset, tuple(tensor.shape), owned)


def to_local_parameters(chunk: nn.Module) -> None:
    """Puts, in place, a plain parameter where the chunk has a DTensor, with which it shares its storage.

    Made once the storage is. FSDP2's modules stay as they are, with experts of which this rank alone has a copy.
    """
    made: dict[DTensor, nn.Parameter] = {}  # a tied one is one
    modules = [chunk]
    while modules:
        module = modules.pop()
        if isinstance(module, FSDPModule):
            continue
        modules += module.children()
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                if parameter not in made:
                    made[parameter] = nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)
                    made[parameter].dtensor = parameter
                replace_parameter(module, kind, made[parameter])


def dtensor_of(parameter: Tensor) -> Tensor:
    """The DTensor that `to_local_parameters` has put a parameter in the place of; another is returned as it is."""
    return getattr(parameter, "dtensor", parameter)


class LocalParameters:
    """The parameters of the model's chunks on this rank as plain ones, for an optimizer.

    Made once the storage is (after `to_empty`), while no layer is gathered.
    """

    def __init__(self, chunks: Iterable[nn.Module]):
        self._chunks = chunks = list(chunks)
        self._state = [item for chunk in chunks for item in chunk.named_parameters()]
        self.copies = {name: axis for chunk in chunks for name, axis in replica_axes(chunk).items()}
        """The plain copies among them: the ranks that hold each, by name."""
        self.shards = {name: local_shard(parameter, self.copies.get(name)) for name, parameter in self._state}
        self.named = [(name, self._plain(name, parameter)) for name, parameter in self._state]
        """Names and plain fp32 parameters of their local shape, some of them empty; share storage with the state."""

    def placements(
        self, matrices: Callable[[str, torch.Size], Sequence[int] | None], seed: int
    ) -> dict[str, Placement]:
        """By name, for an optimizer. `matrices` says which matrices a parameter of a name and shape is made of."""
        made = {}
        for name, parameter in self._state:
            tensor, shard = dtensor_of(parameter), self.shards[name]
            stands = dict(
                matrices=matrices(name, tensor.shape), shape=shard.shape, offset=shard.offset, seed=seed
            )
            if isinstance(tensor, DTensor):
                stands |= dict(whole=partial(_all_gathered, tensor), own=partial(_own_shard, tensor, shard))
            made[name] = Placement(**stands)
        return made

    @torch.no_grad()
    def store_frozen(self, dtype: torch.dtype, world: Axis) -> None:
        """Stores frozen matrices in `dtype`, in which they are used, where it has all their values exactly, on every
        rank: a cast of each, and the half of their memory or more, then fall away.

        Every rank of `world` calls it, before the first forward pass: FSDP2 takes other parameters until then."""
        frozen = [
            at
            for at, (_, parameter) in enumerate(self._state)
            if not (parameter.requires_grad or parameter.ndim < 2 or parameter.dtype == dtype)
        ]

        def is_exact(parameter: Tensor) -> bool:
            return torch.equal(parameter.to(dtype).to(parameter.dtype), parameter)

        own = [self._state[at][0] for at in frozen if not is_exact(local(self._state[at][1]))]
        inexact = {name for names in gather_json(own, world) for name in names}
        stored: dict[Tensor, nn.Parameter] = {}
        for at in frozen:
            name, parameter = self._state[at]
            if name in inexact:
                continue
            short, like = local(parameter).to(dtype), dtensor_of(parameter)
            if isinstance(like, DTensor):
                how = dict(run_check=False, shape=like.shape, stride=like.stride())
                like = DTensor.from_local(short, like.device_mesh, like.placements, **how)
            if isinstance(parameter, DTensor):
                stored[parameter] = nn.Parameter(like, requires_grad=False)
                self._state[at] = name, stored[parameter]
            elif like is not parameter:
                parameter.dtensor = like
            self.named[at][1].data = short
            self.shards[name] = local_shard(self._state[at][1], self.copies.get(name))
        for module in (module for chunk in self._chunks for module in chunk.modules()):
            for kind, parameter in list(module.named_parameters(recurse=False)):
                if parameter in stored:
                    replace_parameter(module, kind, stored[parameter])

    @torch.no_grad()  # else to_local is a step of autograd for each
    def attach_gradients(self) -> None:
        """Gives each plain parameter its shard of the gradient, without a copy."""
        for (_, parameter), (_, plain) in zip(self._state, self.named):
            grad = parameter.grad
            plain.grad = grad.to_local() if isinstance(grad, DTensor) else grad

    def clear_gradients(self) -> None:
        """Frees the gradients."""
        for (_, parameter), (_, plain) in zip(self._state, self.named):
            parameter.grad = plain.grad = None

    def _plain(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        return nn.Parameter(self.shards[name].values, requires_grad=parameter.requires_grad)


def _all_gathered(like: DTensor, shard: Tensor) -> Tensor:
    """The whole of which this rank has `shard`, as `like` is placed; of experts [experts, rows, columns] those of
    the ranks that hold their parts. An all-gather over the axes that shard it."""
    placements = [
        place if len(like.shape) == 3 and getattr(place, "dim", None) == 0 else Replicate()
        for place in like.placements
    ]
    tensor = DTensor.from_local(
        shard, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return tensor.redistribute(placements=placements).to_local()


def _own_shard(like: DTensor, shard: LocalShard, whole: Tensor) -> Tensor:
    """This rank's shard of what `_all_gathered` gives, as a view."""
    if whole.shape == like.shape:
        return shard.slice_of(whole)
    first = (0, *shard.offset[1:])  # its own experts are all there
    return whole[tuple(slice(at, at + size) for at, size in zip(first, shard.values.shape))]
