"""What Triton makes of kernels for a GPU that this machine need not have."""

import importlib.metadata
import sys

import pytest
from packaging.version import Version

LINUX = sys.platform == "linux"


@pytest.mark.skipif(not LINUX, reason="Triton has wheels for Linux")
@pytest.mark.skipif(
    LINUX and Version(importlib.metadata.version("triton")) < Version("3.7"),
    reason="descriptors are written differently in the signatures of Triton 3.6",
)
@pytest.mark.parametrize(("tile", "parts"), [("WIDE", 1), ("WIDE_IN_PARTS", 8), ("NARROW", 8)])
def test_a_batch_invariant_matmul_loads_ahead(tile, parts):
    """Without an error, a barrier or a branch in a loop can keep Triton from having several loads under way."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megalith.ops.kernels import invariant_matmul as kernel

    tile = getattr(kernel, tile)
    constants = dict(
        N=2048, K=8192, PARTS=parts, SPREAD=False, GROUPS=1, GROUPED=False, DESCRIBED=True, PRECISION="tf32",
        ROWS=tile.rows, COLUMNS=tile.columns, INNER=tile.inner, BAND=kernel.BAND,
    )  # fmt: skip
    signature = dict(
        x=f"tensordesc<bf16[{tile.rows}, {tile.inner}]>",
        weight=f"tensordesc<bf16[{tile.columns}, {tile.inner}]>",
        out="*bf16", waiting="*fp32", ends="*i32", rows="i32",
        **dict.fromkeys(constants, "constexpr"),
    )  # fmt: skip
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel._matmul.arg_names)
        if signature[name].startswith("*")
    }
    ordered = {name: signature[name] for name in kernel._matmul.arg_names}
    compiled = triton.compile(
        ASTSource(kernel._matmul, ordered, constants, aligned),
        target=GPUTarget("cuda", 90, 32),
        options=dict(num_warps=tile.warps, num_stages=tile.stages),
    )
    assert compiled.metadata.shared >= 2 * tile.stages * (tile.rows + tile.columns) * tile.inner
    assert "wgmma.wait_group.sync.aligned 1;" in " ".join(compiled.asm["ptx"].split())
