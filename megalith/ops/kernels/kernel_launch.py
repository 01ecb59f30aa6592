"""Launches of one Triton kernel over and over with the same numbers, which take the host less than Triton's own.

At each launch Triton looks at every argument for what it has compiled the kernel for: the type of a tensor and whether
its address is a multiple of 16, a number's size and divisors, a constant's value. Here a launch with the numbers and
constants of an earlier one, and tensors of the same types that all begin at such an address, as memory from PyTorch's
allocator does, takes what was compiled for that one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

ALIGNED = 16  # bytes


class Launcher:
    """A kernel with parameters in this order: tensors, whole numbers, floats, constants."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[tuple, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """Launches it on the current stream. For the value of a float nothing is compiled."""
        address = 0
        for x in tensors:
            address |= x.data_ptr()
        key = tensors[0].device, tuple([x.dtype for x in tensors]), numbers, constants, warps
        compiled = None if address % ALIGNED else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *floats, *constants)
            return
        compiled = self._kernel[grid](*tensors, *numbers, *floats, *constants, num_warps=warps)
        if not address % ALIGNED:
            self._compiled[key] = compiled
