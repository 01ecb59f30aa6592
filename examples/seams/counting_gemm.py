"""A Gemm that counts the matmuls of every linear. An FP8 Gemm would quantize in the same three methods."""

from collections import Counter
from collections.abc import Iterable

from torch import Tensor, nn

from megalith.models.linear import Linear
from megalith.ops.gemm import Gemm
from megalith.parallel.seams import plug


class CountingGemm(Gemm):
    def __init__(self):
        self.calls = Counter()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.calls["forward"] += 1
        return super().forward(x, weight, bias)

    def dgrad(self, grad: Tensor, weight: Tensor) -> Tensor:
        self.calls["dgrad"] += 1
        return super().dgrad(grad, weight)

    def wgrad(self, grad: Tensor, x: Tensor) -> Tensor:
        self.calls["wgrad"] += 1
        return super().wgrad(grad, x)


def count_matmuls(chunks: Iterable[nn.Module]) -> Counter:
    """Start counting the matmuls of every linear in these chunks, by kind."""
    gemm = CountingGemm()
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, Linear):
                plug(module, "gemm", gemm)
    return gemm.calls
