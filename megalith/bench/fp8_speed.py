"""FP8 compared with bf16 on one GPU: matmuls, casts, and a layer's linears: `megalith bench fp8`.

The matmuls of a Llama-3-8B layer are timed in bf16 and by FP8 recipe, with their fraction of the device's peak; the
casts of ops/fp8/codes.py by tile shape, in GB/s read and written; then a layer's linears as ops/gemm.py's `linear` runs
them, forward and backward, including casts. Times are medians of 5, with nonzero operands. The last table summarizes
matmuls and linears by recipe.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megalith.bench.timing import elapsed_ms
from megalith.hardware import local_device_info
from megalith.ops.fp8 import codes as fp8
from megalith.ops.fp8.codes import E4M3, E5M2
from megalith.ops.fp8.recipes import AmaxTable, BlockGemm, CurrentScaling, DelayedScaling, Fp8Gemm
from megalith.ops.gemm import GEMM, Gemm, linear

LINEARS = {"linear_qkv": (4096, 6144), "linear_proj": (4096, 4096), "linear_fc1": (4096, 28672),
           "linear_fc2": (14336, 4096)}  # fmt: skip
TILES = ((64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 4), (128, 128, 8), (256, 64, 8))
BF16 = torch.bfloat16


def milliseconds(function: Callable[[], object], total_ms: float = 60.0) -> float:
    """Return the milliseconds per call, as the median of five samples that together take `total_ms`."""
    function()
    first = max(elapsed_ms(function, 3), 1e-3)
    calls = max(3, int(total_ms / first / 5))
    elapsed_ms(function, calls)
    return statistics.median(elapsed_ms(function, calls) for _ in range(5))


def normal(*shape: int, spread: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16) * spread


def matmuls(tokens: int) -> dict[str, float]:
    """Print the time and fraction of the peak of each matmul in bf16, tensorwise FP8 with fast and with exact sums, and
    blockwise FP8.

    Returns:
        Milliseconds of a layer's matmuls by recipe.
    """
    total = dict.fromkeys(("bf16", "delayed", "tensorwise", "blockwise"), 0.0)
    peaks = local_device_info("cuda")
    print(
        f"{'matmul':22}{'bf16':>16}{'fp8 fast':>16}{'fp8 exact':>16}{'fp8 blocks':>16}   ms, fraction of the peak"
    )
    one = torch.full((), 1e-3, device="cuda")
    for name, (inside, outside) in LINEARS.items():
        for kind, m, k, n in (("forward", tokens, inside, outside), ("dgrad", tokens, outside, inside),
                              ("wgrad", outside, tokens, inside)):  # fmt: skip
            a, b = normal(m, k), normal(n, k)
            left = fp8.cast(a, one * 5e4, None, E4M3 if kind == "forward" else E5M2, True, False)[0]
            right = fp8.cast(b, one * 5e4, None, E4M3, True, False)[0]
            tiles = kind != "wgrad"
            a8, a_inverse, *_ = fp8.cast_blocks(a, True, False, False)
            b8, b_inverse, *_ = fp8.cast_blocks(b, True, False, tiles)
            a_inverse, b_inverse = a_inverse.t(), b_inverse if tiles else b_inverse.t()
            codes = (left, one), (right, one), BF16
            calls = (
                partial(torch.matmul, a, b.t()),
                partial(fp8.scaled_matmul, *codes, fast=True),
                partial(fp8.scaled_matmul, *codes),
                partial(fp8.block_matmul, a8, a_inverse, b8, b_inverse, tiles, BF16),
            )
            times = [milliseconds(call) for call in calls]
            cells = []
            for time, dtype in zip(times, ("bf16", "fp8", "fp8", "fp8")):
                peak = peaks.peak(dtype)
                share = "" if peak is None else f" {2 * m * k * n / time * 1e3 / peak:5.0%}"
                cells.append(f"{time:9.3f}{share:>7}")
            print(f"{name:14}{kind:8}{''.join(cells)}", flush=True)
            plain, fast, exact, blocks = times
            one_scale = fast if kind == "forward" else exact
            for recipe, time in zip(total, (plain, one_scale, one_scale, blocks), strict=True):
                total[recipe] += time
    return total


def casts(tokens: int) -> None:
    """Print the memory throughput of each cast in GB/s, counting reads and writes."""
    from megalith.ops.kernels import fp8_kernels  # imports triton, which CPU builds of torch lack

    x, scale, step_amax = (
        normal(tokens, 14336),
        torch.full((), 60.0, device="cuda"),
        torch.zeros((), device="cuda"),
    )
    print(f"casts of [{tokens}, 14336] in bf16, GB/s read and written")

    def rate(function: Callable[[], object], per_element: float) -> str:
        return f"{per_element * x.numel() / milliseconds(function) / 1e6:6.0f}"

    default = fp8_kernels.ROWS, fp8_kernels.COLUMNS, fp8_kernels.WARPS
    for tile in TILES:
        fp8_kernels.ROWS, fp8_kernels.COLUMNS, fp8_kernels.WARPS = tile
        both = [rate(lambda d=d: fp8.cast(x, scale, step_amax, d, True, True), 4) for d in (E4M3, E5M2)]
        row, column = (
            rate(lambda r=r: fp8.cast(x, scale, step_amax, E4M3, r, not r), 3) for r in (True, False)
        )
        rows, columns, warps = tile
        mark = " (used)" if tile == default else ""
        print(f"  {rows:3} × {columns:3}, {warps} warps: both ways e4m3 {both[0]}, e5m2 {both[1]}; by row {row}, by "
              f"column {column}{mark}", flush=True)  # fmt: skip
    fp8_kernels.ROWS, fp8_kernels.COLUMNS, fp8_kernels.WARPS = default
    codes = fp8.cast(x, scale, step_amax, E4M3, True, False)[0]
    print(f"  amax {rate(lambda: fp8.amax(x), 2)}; transpose {rate(lambda: fp8.transpose(codes), 2)}; blocks both ways "
          f"{rate(lambda: fp8.cast_blocks(x, True, True, False), 4)}, 128 × 128 "
          f"{rate(lambda: fp8.cast_blocks(x, True, True, True), 4)}")  # fmt: skip


def gemms() -> dict[str, Gemm]:
    table = AmaxTable(["linear"], "hybrid", 1, "most_recent", 0, torch.device("cuda"))
    table.step_amax.copy_(torch.tensor([[6.0, 0.2, 6.0]]))
    table.end_step(0.0)
    return {
        "bf16": GEMM,
        "delayed": Fp8Gemm(DelayedScaling(table, "linear"), BF16),
        "tensorwise": Fp8Gemm(CurrentScaling("hybrid"), BF16),
        "blockwise": BlockGemm(BF16),
    }


def _all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def layer(tokens: int) -> dict[str, float]:
    """Return the milliseconds of a layer's compiled linears, forward and backward, by recipe."""
    result = {}
    for recipe, gemm in gemms().items():
        calls = []
        for inside, outside in LINEARS.values():
            x, weight = normal(tokens, inside).requires_grad_(), normal(outside, inside, spread=0.02)
            grad = normal(tokens, outside)
            weight = weight.float().requires_grad_()

            def forward(x: Tensor, weight: Tensor, gemm: Gemm = gemm) -> Tensor:
                return linear(x, weight.to(BF16), None, gemm)

            compiled = torch.compile(forward, fullgraph=True, dynamic=False)
            calls.append(lambda c=compiled, x=x, w=weight, g=grad: torch.autograd.grad(c(x, w), (x, w), g))
        result[recipe] = milliseconds(partial(_all, calls), 1000.0)
        torch.compiler.reset()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", nargs="+", choices=("casts", "matmuls", "layer"))
    args = parser.parse_args()
    parts = args.only or ("casts", "matmuls", "layer")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {args.tokens} tokens")
    if "casts" in parts:
        casts(args.tokens)
    summed = matmuls(args.tokens) if "matmuls" in parts else {}
    times = layer(args.tokens) if "layer" in parts else {}
    print(f"{'a layer, ms':14}{'matmuls':>10}{'':8}{'linears with casts':>20}")
    for recipe in summed or times:
        cells = [
            f"{result[recipe]:10.2f}{result['bf16'] / result[recipe]:6.2f} ×" if result else f"{'–':>18}"
            for result in (summed, times)
        ]
        print(f"{recipe:14}{cells[0]}  {cells[1]}")


if __name__ == "__main__":
    main()
