"""FP8 statistics per linear, in the steps of `log.log_fp8_interval`.

For each operand (input, weight, gradient of the output): the amax, the fraction of elements with the largest FP8 value
(overflow; about one element under current scaling), and the fraction of nonzero elements that become 0 (underflow). In
those steps only, computing them reads operands and FP8 values once more. Layers are compiled a second time for these
steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis, gather_json
from megalith.compat.torch_operators import keep_version_counter
from megalith.ops.fp8.codes import GRADIENT, INPUT, WEIGHT
from megalith.ops.gemm import Gemm, Operand

KINDS = ("input", "weight", "gradient")  # by INPUT, WEIGHT, GRADIENT
FRACTIONS = ("overflow", "underflow")


@torch.library.custom_op("megalith::fp8_count", mutates_args=())
def count(codes: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    """Return a copy of `codes`, the FP8 values of x, and accumulate statistics in `sums`, float64 [4].

    `sums` holds the amax, the number of elements, the number with the largest FP8 value, and the number of nonzero
    elements whose FP8 value is 0. The operator does not declare that it changes `sums`, so autograd ignores the change,
    as it does for the argument `running_amax` of fp8_cast.
    """
    magnitude = codes.float().abs()
    with keep_version_counter(sums):
        sums[0] = torch.maximum(sums[0], x.abs().amax().double())
        sums[1] += x.numel()
        sums[2] += (magnitude == torch.finfo(codes.dtype).max).sum()
        sums[3] += ((magnitude == 0) & (x != 0)).sum()
    return codes.clone()


@count.register_fake
def _(codes: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    return torch.empty_like(codes)


@dataclass
class Counter:
    """Statistics of a linear's operands in the current step. Copies of the linear's Gemm share the counter."""

    sums: tuple[Tensor, ...]
    """The statistics that `count` accumulates, one tensor per kind of operand."""
    on: bool = False

    def begin_step(self, on: bool) -> None:
        self.on = on
        if on:
            for sums in self.sums:
                sums.zero_()


class CountedGemm(Gemm):
    """A Gemm that runs the matmuls of another Gemm, and counts their operands while its counter is on."""

    def __init__(self, gemm: Gemm, device: torch.device):
        zeros = torch.zeros(len(KINDS), 4, dtype=torch.float64, device=device)
        self.gemm, self.counter = gemm, Counter(zeros.unbind())

    def _counted(self, kind: int, x: Tensor, operand: Operand) -> Operand:
        if not self.counter.on:
            return operand
        codes, *scales = operand
        return count(codes, x, self.counter.sums[kind]), *scales

    def inputs(self, x: Tensor, saves: bool, sharded: bool = False) -> tuple[Operand, Operand]:
        operand, saved = self.gemm.inputs(x, saves, sharded)
        return self._counted(INPUT, x, operand), saved

    def weights(self, weight: Tensor, trains: bool) -> tuple[Operand, Operand]:
        operand, saved = self.gemm.weights(weight, trains)
        return self._counted(WEIGHT, weight, operand), saved

    def gradients(self, grad: Tensor, has_wgrad: bool) -> tuple[Operand, Operand]:
        operand, saved = self.gemm.gradients(grad, has_wgrad)
        return self._counted(GRADIENT, grad, operand), saved

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return self.gemm.forward(x, weight, bias)

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        return self.gemm.dgrad(grad, weight)

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        return self.gemm.wgrad(grad, x)


def counters(chunks: Iterable[nn.Module]) -> dict[str, Counter]:
    """Return the FP8 overflow and underflow counter of each linear layer on this rank, by module name."""
    return {
        name: module.gemm.counter
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(getattr(module, "gemm", None), CountedGemm)
    }


def gather_counts(counters: dict[str, Counter], world: Axis) -> dict[str, float]:
    """Return the statistics of all linears on rank 0, and {} on the other ranks. Collective; waits for the device.

    Keys are `fp8_amax/LINEAR.KIND`, `fp8_overflow/LINEAR.KIND` and `fp8_underflow/LINEAR.KIND`.
    """
    local = {name: [sums.tolist() for sums in counter.sums] for name, counter in counters.items()}
    totals: dict[str, list[float]] = {}
    for counts in gather_json(local, world, to_first=True):
        for name, kinds in counts.items():
            for kind, (largest, *sums) in zip(KINDS, kinds):
                amax, *before = totals.get(f"{name}.{kind}", [0.0] * 4)
                totals[f"{name}.{kind}"] = [max(amax, largest), *(a + b for a, b in zip(before, sums))]
    metrics = {f"fp8_amax/{name}": amax for name, (amax, *_) in totals.items()}
    for fraction, index in zip(FRACTIONS, (2, 3)):
        metrics |= {f"fp8_{fraction}/{name}": sums[index] / max(sums[1], 1) for name, sums in totals.items()}
    return metrics
