"""What FP8 makes of numbers, for each linear, in the steps of `log.log_fp8_interval`.

Of each operand (input, weight, gradient of the output) the amax, the share of elements that got the largest code
(overflow: with a current scale it is about one element) and of those not 0 whose code is 0 (underflow). It takes a pass
over operands and codes, in those steps alone; compiled layers have a second version for them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis, gather_json
from megalith.ops.fp8.codes import GRADIENT, INPUT, WEIGHT
from megalith.ops.gemm import Gemm, Operand

KINDS = ("input", "weight", "gradient")  # by INPUT, WEIGHT, GRADIENT
SHARES = ("overflow", "underflow")


@torch.library.custom_op("megalith::fp8_count", mutates_args=())
def count(codes: Tensor, x: Tensor, sums: Tensor) -> Tensor:
    """A copy of `codes`, those of x. `sums`, float64 [4], takes up x's amax, its elements, those with the largest code,
    and those that were not 0 and have the code 0. autograd is not told, as with fp8_cast's `seen`."""
    magnitude = codes.float().abs()
    with torch.autograd._unsafe_preserve_version_counter(sums):
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
    """What was counted of a linear's operands since the step began; copies of its Gemm share it."""

    sums: tuple[Tensor, ...]
    """As `count` has them, by kind."""
    on: bool = False

    def begin_step(self, on: bool) -> None:
        self.on = on
        if on:
            for sums in self.sums:
                sums.zero_()


class CountedGemm(Gemm):
    """Another's matmuls, with their operands counted where its counter is on."""

    def __init__(self, gemm: Gemm, device: torch.device):
        zeros = torch.zeros(len(KINDS), 4, dtype=torch.float64, device=device)
        self.gemm, self.counter = gemm, Counter(zeros.unbind())

    def _counted(self, kind: int, x: Tensor, given: Operand) -> Operand:
        if not self.counter.on:
            return given
        codes, *scales = given
        return count(codes, x, self.counter.sums[kind]), *scales

    def inputs(self, x: Tensor, saves: bool, sharded: bool = False) -> tuple[Operand, Operand]:
        given, saved = self.gemm.inputs(x, saves, sharded)
        return self._counted(INPUT, x, given), saved

    def weights(self, weight: Tensor, trains: bool) -> tuple[Operand, Operand]:
        given, saved = self.gemm.weights(weight, trains)
        return self._counted(WEIGHT, weight, given), saved

    def gradients(self, grad: Tensor, has_wgrad: bool) -> tuple[Operand, Operand]:
        given, saved = self.gemm.gradients(grad, has_wgrad)
        return self._counted(GRADIENT, grad, given), saved

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return self.gemm.forward(x, weight, bias)

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        return self.gemm.dgrad(grad, weight)

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        return self.gemm.wgrad(grad, x)


def counters(chunks: Iterable[nn.Module]) -> dict[str, Counter]:
    """Those of this rank's linears, by name."""
    return {
        name: module.gemm.counter
        for chunk in chunks
        for name, module in chunk.named_modules()
        if isinstance(getattr(module, "gemm", None), CountedGemm)
    }


def counted(counters: dict[str, Counter], world: Axis) -> dict[str, float]:
    """On the first rank by `fp8_amax/LINEAR.KIND`, `fp8_overflow/…` and `fp8_underflow/…` the figures of all linears;
    nothing on the others. Every rank calls it; it waits for the device."""
    own = {name: [sums.tolist() for sums in counter.sums] for name, counter in counters.items()}
    whole: dict[str, list[float]] = {}
    for rank in gather_json(own, world, to_first=True):
        for name, kinds in rank.items():
            for kind, (largest, *sums) in zip(KINDS, kinds):
                known, *before = whole.get(f"{name}.{kind}", [0.0] * 4)
                whole[f"{name}.{kind}"] = [max(known, largest), *(a + b for a, b in zip(before, sums))]
    found = {f"fp8_amax/{name}": largest for name, (largest, *_) in whole.items()}
    for share, place in zip(SHARES, (2, 3)):
        found |= {f"fp8_{share}/{name}": sums[place] / max(sums[1], 1) for name, sums in whole.items()}
    return found
