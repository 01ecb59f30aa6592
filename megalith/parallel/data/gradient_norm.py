"""Sums over ranks: loss denominators, and squares or zeros of the model's gradients and weights."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.hardware import to_device
from megalith.parallel.shards import LocalParameters

DIGITS, BLOCK = 26, 2**20  # bits, elements: a block's integers have a sum below 2^53, exact in float64


def loss_denominators(local_sums: Tensor, dp_cp: Axis, device: torch.device) -> Tensor:
    """Sum the denominators of the step's losses over data × context ranks.

    The host does not wait for the device.

    Args:
        local_sums: this rank's denominators, float64 [n] on the host.
        dp_cp: the axis to sum over.
        device: device of the result.

    Returns:
        float32 [n] on `device`; 1 where the sum is 0, as in a step without valid tokens.
    """
    total = all_reduce_no_grad(to_device(local_sums, device), dp_cp)
    return torch.where(total > 0, total, 1.0).float()


class GradientSquares:
    """Computes the sum of squares of all gradients over all ranks: `total_squares` of the optimizer step.

    Each element counts once, on the owner of its shard. One all-reduce over the world makes a nonfinite gradient on any
    rank nonfinite on all, so that all ranks skip the step together.
    """

    def __init__(
        self,
        parameters: LocalParameters,
        world: Axis,
        local_squares: Callable[[list[Tensor]], Tensor],
        counted_elsewhere: Collection[str] = (),
        device: torch.device | str = "cpu",
    ):
        """Count the parameters that this rank owns.

        Args:
            parameters: this rank's parameters.
            world: the axis of all ranks.
            local_squares: returns the sum of squares of a list of tensors, a float32 scalar.
            counted_elsewhere: names of parameters that another pipeline stage counts.
            device: device of the parameters. A rank may have none.
        """
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
        """Return the sum of squares of all weights over all ranks, including frozen ones."""
        return self._squares(self._weights)

    def count_zeros(self) -> Tensor:
        """Return the number of zeros in the gradient over all ranks, an int64 scalar."""
        count = torch.zeros((), dtype=torch.int64, device=self._device)
        for gradient in (weight.grad for weight in self._weights if weight.grad is not None):
            count += gradient.numel() - gradient.count_nonzero()
        return all_reduce_no_grad(count, self._world)

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        squares = self._local_squares(tensors) if tensors else torch.zeros((), device=self._device)
        return all_reduce_no_grad(squares, self._world)


class OrderFreeGradientSquares(GradientSquares):
    """Computes a sum of squares whose bits do not depend on how parameters are sharded (train.batch_invariant).

    Squares are divided by a power of two that bounds the largest, and cut into two integers of DIGITS bits each.
    Integers are added without rounding, in any order. The error of the sum is at most 2^(-2·DIGITS) of the bound per
    element.
    """

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        zero = torch.zeros((), device=self._device)
        largest = torch.stack([zero, *(tensor.detach().abs().amax().float() for tensor in tensors)]).amax()
        is_finite = largest.isfinite()
        largest = all_reduce_no_grad(torch.where(is_finite, largest, zero), self._world, "max")
        unit = torch.ldexp(torch.ones_like(largest, dtype=torch.float64), torch.frexp(largest).exponent)
        sums = torch.zeros(3, dtype=torch.int64, device=self._device)
        sums[2] = (~is_finite).long()
        for block in (block for tensor in tensors for block in tensor.detach().flatten().split(BLOCK)):
            square = (block.double() / unit).square() * 2**DIGITS
            high = square.floor()
            low = ((square - high) * 2**DIGITS).floor()
            sums[:2] += torch.stack([high.sum(), low.sum()]).nan_to_num().long()
        high, low, nonfinite = all_reduce_no_grad(sums, self._world)
        total = (high.double() + low.double() / 2**DIGITS) / 2**DIGITS * unit.square()
        return torch.where(nonfinite > 0, torch.inf, total.float())
