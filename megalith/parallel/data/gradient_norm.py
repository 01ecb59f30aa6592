"""The gradient as one vector over all ranks: how many tokens its loss is divided by, and its norm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, summed
from megalith.hardware import to_device
from megalith.parallel.shards import LocalParameters


def valid_tokens(loss_masks: Iterable[Tensor], dp_cp: Axis, device: torch.device) -> Tensor:
    """Sum of all the step's loss masks over `dp_cp`, at least 1, on `device`: a float32 scalar, or [n] of n losses.

    The masks [batch, seq], or [n, batch, seq], are this rank's own, float32 on the host, cut by context parallelism.
    Neither the sum nor the collective makes the host wait for the device: the counts go into the factor of the loss
    before the first backward.
    """
    own = sum(mask.sum((-2, -1), dtype=torch.float64) for mask in loss_masks)
    return summed(to_device(own, device), dp_cp).clamp(min=1.0).float()


class GradientSquares:
    """Sum of the squares of the whole gradient, the same on every rank: `total_squares` of the optimizer's step.

    Each logical element counts once: on the owner of its box, and for a parameter that two pipeline stages hold, not
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
        self._counted = {
            plain
            for name, plain in parameters.named
            if parameters.boxes[name].owned and plain.numel() and name not in counted_elsewhere
        }

    def __call__(self, parameters: list[Tensor]) -> Tensor:
        counted = [parameter for parameter in parameters if parameter in self._counted]
        if counted:
            squares = self._local_squares([parameter.grad for parameter in counted])
        else:
            squares = torch.zeros((), device=self._device)
        return summed(squares, self._world)
