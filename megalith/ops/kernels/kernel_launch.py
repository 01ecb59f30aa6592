"""Launches a Triton kernel repeatedly with less host time than Triton's own launcher.

Triton checks every argument of each launch to choose a compiled variant: a tensor's dtype and whether its address is a
multiple of 16, an integer's size and divisors, a constant's value. Launcher reuses the variant of an earlier launch
with the same integers, constants and dtypes, if all addresses are multiples of 16, as all addresses from PyTorch's
allocator are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

ALIGNED = 16  # bytes


class Launcher:
    """Launches a kernel with parameters in this order: tensors, integers, floats, constants."""

    def __init__(self, kernel: Any):
        self._kernel = kernel
        self._compiled: dict[tuple, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        tensors: tuple[Tensor, ...],
        integers: tuple[int, ...],
        floats: tuple[float, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """Launch on the current stream. A new value of a float does not cause compilation."""
        address = 0
        for x in tensors:
            address |= x.data_ptr()
        key = tensors[0].device, tuple([x.dtype for x in tensors]), integers, constants, warps
        compiled = None if address % ALIGNED else self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *integers, *floats, *constants)
            return
        compiled = self._kernel[grid](*tensors, *integers, *floats, *constants, num_warps=warps)
        if not address % ALIGNED:
            self._compiled[key] = compiled
