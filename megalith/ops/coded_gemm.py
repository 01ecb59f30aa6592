"""Matmuls with a quantized frozen weight.

The weight is dequantized at each use, and nothing dequantized is saved for backward.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megalith.ops.compiled import as_one_kernel, depend_on
from megalith.ops.gemm import Gemm, Operand
from megalith.ops.grouped_gemm import GroupedGemm
from megalith.ops.weight_codes import WeightCodes, decode


class Coded(Protocol):
    """A quantized weight."""

    def decoded(self, after: Tensor | None = None) -> Tensor:
        """Return the dequantized weight. Compiled code dequantizes it only after the tensor `after` has been
        computed."""


class CodedGemm(Gemm):
    """The matmuls of a linear with a quantized weight. They ignore the weight that is passed to their methods."""

    def __init__(self, weight: Coded):
        self.weight = weight

    def weights(self, weight: Tensor, trains: bool) -> tuple[Operand, Operand]:
        return (self.weight.decoded(),), ()

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        return grad[0] @ self.weight.decoded(after=grad[0])


class CodedGroupedGemm(GroupedGemm):
    """The matmuls of experts with quantized weights."""

    def __init__(self, weight: Coded, kernel: bool):
        super().__init__(kernel)
        self.weight = weight

    def cast(self, saved: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.decoded()


def decode_at_use(
    form: str, weight: WeightCodes, dtype: torch.dtype, first_column: int, after: Tensor | None = None
) -> Tensor:
    """Return the dequantized weight, computed by one kernel on a GPU.

    In compiled code, pass a tensor of the backward pass as `after`: dequantization then starts after that tensor has
    been computed. Otherwise the compiler would merge the dequantizations of the forward and the backward pass, and save
    the result. The scales depend on `after` too, because fp8 expands them to the size of the weight.
    """
    if after is not None and torch.compiler.is_compiling():
        parts = {name: getattr(weight, name) for name in ("codes", "scales", "block_index")}
        weight = weight._replace(
            **{name: depend_on(part, after) for name, part in parts.items() if part.numel()}
        )
    return as_one_kernel(_decode, *weight, form, dtype, first_column, sizes_vary=True)


def _decode(
    codes: Tensor,
    scales: Tensor,
    block_index: Tensor,
    table: Tensor,
    levels: Tensor,
    form: str,
    dtype: torch.dtype,
    first_column: int,
) -> Tensor:
    return decode(form, WeightCodes(codes, scales, block_index, table, levels), dtype, first_column)
