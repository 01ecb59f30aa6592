"""Weights that are cast once a step, for all its micro-batches: FP8's codes, and the experts' in the compute dtype.

A weight is there in fp32, and a matmul takes a cast of it, which most layers make where they compute. FP8's cast needs
a maximum, a code and a transposed code of each weight. Experts are by far the most weights of their model: cast anew
for each pass, forward and backward, they are read and written four times in a step of two micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from megalith.comm.collectives import local
from megalith.models.linear import Linear
from megalith.models.moe import GroupedLinear
from megalith.ops.fp8.recipes import BlockGemm, Fp8Gemm
from megalith.parallel.fp8_counts import CountedGemm
from megalith.parallel.seams import plug


class StepCasts:
    """The linears of a rank's chunks whose weights are cast once a step: a context of all its passes. `experts`: theirs
    too, where they are not in the compute dtype anyway.

    Weights change between the steps alone, by whatever; so nothing is there of a step before.
    """

    def __init__(self, chunks: Iterable[nn.Module], experts: bool = False):
        self._linears: list[tuple[Linear, Fp8Gemm | BlockGemm]] = []
        self._experts: list[tuple[GroupedLinear, torch.dtype]] = []
        for chunk in chunks:
            self._linears += _cast_once(chunk)
            if experts:
                found = (module for module in chunk.modules() if isinstance(module, GroupedLinear))
                dtype = chunk.compute_dtype
                self._experts += [(module, dtype) for module in found if module.weight.dtype != dtype]

    @torch.no_grad()
    def __enter__(self) -> None:
        try:
            for linear, gemm in self._linears:
                gemm.cast_for_step(linear.rows(local(linear.weight)).to(gemm.dtype))
            for module, dtype in self._experts:
                plug(module, "step_cast", module.cast(dtype))
        except BaseException:  # out of memory: else what was cast so far would stay for passes after the step
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        for _, gemm in self._linears:
            gemm.step_codes.clear()
        for module, _ in self._experts:
            plug(module, "step_cast", None)


def cast_for_step(module: nn.Module) -> list[Tensor]:
    """What stays of a module's weights for all passes of a step; nothing between the steps."""
    operands = [operand for _, gemm in _cast_once(module) for operand in gemm.step_codes.operands or ()]
    operands += [each.step_cast or () for each in module.modules() if isinstance(each, GroupedLinear)]
    return [tensor for operand in operands for tensor in operand if tensor is not None]


def _cast_once(module: nn.Module) -> Iterator[tuple[Linear, Fp8Gemm | BlockGemm]]:
    for linear in (each for each in module.modules() if isinstance(each, Linear)):
        gemm = linear.gemm.gemm if isinstance(linear.gemm, CountedGemm) else linear.gemm
        if getattr(gemm, "step_codes", None) is not None:
            yield linear, gemm
