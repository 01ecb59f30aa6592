"""The gradient as one vector over all ranks: what its loss is divided by, its norm and its zeros; the weights' norm.

Where NaN or Inf began: each rank's own gradients, looked at before they are summed over the ranks.

After a step the gradient of a parameter is a sum over ranks, and NaN in it says nothing of the rank that it came from.
So the backward pass is made once more with a hook on every parameter, which sees what this rank alone gives. Backward
passes go from the loss to the embedding and carry NaN along: the first that is met is the nearest to its origin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.hardware import to_device
from megalith.ops.compiled import run_eagerly
from megalith.parallel.shards import LocalParameters


def loss_denominators(own: Tensor, dp_cp: Axis, device: torch.device) -> Tensor:
    """What the step's losses are divided by, from what this rank adds to each, float64 [n]: float32 [n] on `device`.

    1 where the sum is 0, as that of a step without a valid token is. `own` is on the host, and neither the sum nor the
    collective makes the host wait for the device: they go into the factor of the loss before the first backward.
    """
    total = all_reduce_no_grad(to_device(own, device), dp_cp)
    return torch.where(total > 0, total, 1.0).float()


class GradientSquares:
    """Sum of the squares of the whole gradient, the same on every rank: `total_squares` of the optimizer's step.

    Each logical element counts once: on the owner of its shard, and for a parameter that two pipeline stages hold, not
    on the one that lists it in `counted_elsewhere`. One all-reduce over the world, so a gradient that is not finite
    anywhere makes the sum not finite everywhere, and all ranks skip the step together.
    """

    def __init__(
        self,
        parameters: LocalParameters,
        world: Axis,
        local_squares: Callable[
            [list[Tensor]], Tensor
        ],  # of a list, perhaps empty of elements: a float32 scalar
        counted_elsewhere: Collection[str] = (),
        device: torch.device | str = "cpu",
    ):
        """`device` is the parameters' own; a rank may have none."""
        self._world, self._device = world, device
        self._local_squares = local_squares
        self._weights = [
            plain
            for name, plain in parameters.named
            if parameters.shards[name].owned and plain.numel() and name not in counted_elsewhere
        ]
        self._counted = set(self._weights)

    def __call__(self, parameters: list[Tensor]) -> Tensor:
        return self._squares([parameter.grad for parameter in parameters if parameter in self._counted])

    @torch.no_grad()
    def weight_squares(self) -> Tensor:
        """The sum of the squares of all weights, frozen ones too, counted likewise."""
        return self._squares(self._weights)

    def zeros(self) -> Tensor:
        """How many elements of the whole gradient are 0: an int64 scalar, the same on every rank."""
        own = torch.zeros((), dtype=torch.int64, device=self._device)
        for gradient in (weight.grad for weight in self._weights if weight.grad is not None):
            own += gradient.numel() - gradient.count_nonzero()
        return all_reduce_no_grad(own, self._world)

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        own = self._local_squares(tensors) if tensors else torch.zeros((), device=self._device)
        return all_reduce_no_grad(own, self._world)


class Watched:
    """The parameters whose gradient of some micro-batch was not finite on this rank, in the order they were met."""

    def __init__(self) -> None:
        self._met: dict[str, Tensor] = {}

    def see(self, name: str, gradient: Tensor) -> None:
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        lost = ~own.isfinite().all()
        self._met[name] = self._met[name] | lost if name in self._met else lost

    def names(self) -> list[str]:
        """Waits for the device."""
        return [name for name, lost in self._met.items() if lost]


@contextmanager
def watch_nonfinite_gradients(chunks: Iterable[nn.Module]) -> Iterator[Watched]:
    """In it, forward and backward passes are made without compiled code and fill the Watched."""
    watched, handles = Watched(), []
    hooked: dict[int, nn.Parameter] = {}

    def hook(prefix: str, module: nn.Module) -> None:
        # Called when the layer's parameters are gathered: the tensors that autograd will see are there only now. Those
        # of the modules inside too, since a norm is not always called as a module.
        for own_name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in hooked:
                name = f"{prefix}.{own_name}" if prefix else own_name
                hooked[id(parameter)] = parameter
                handles.append(parameter.register_hook(lambda grad, name=name: watched.see(name, grad)))

    for chunk in chunks:
        for prefix, module in chunk.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda module, _, prefix=prefix: hook(prefix, module))
            )
    try:
        with run_eagerly():
            yield watched
    finally:
        for handle in handles:
            handle.remove()
