"""The Triton kernels compute what PyTorch's operators compute: run by Triton's interpreter, on a CPU.

The interpreter reads each element as the kernel addresses it, so it finds wrong strides, masks and offsets. It does not
show what a compiler makes of a kernel; tests/gpu has those comparisons. It rounds some numbers to FP8 wrongly,
multiplies matrices in bf16 wrongly, and has no `expm1`, so the checks use numbers that FP8 has, fp16, and exp(x) - 1.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from itertools import product

import pytest
import torch
from default_cases import in_full
from packaging.version import Version

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
CASES = [
    *(
        ("decode_attention", *case)
        for case in ((None, None, 1), (None, None, 4), (33, None, 4), (None, 20.0, 1), (None, None, 4, 16),
                     (None, 20.0, 1, 33))
    ),
    *(
        ("sampling", *case)
        for case in ((0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (0.7, 50, 0.9, 0.0),
                     (0.7, 0, 0.8, 0.01))
    ),
    *(
        ("norms", *case)
        for case in ((F32, True, "none"), (F32, False, "added"), (F32, True, "dropped"), (F32, False, "only the norm"),
                     (BF16, False, "none"), (BF16, True, "added"), (BF16, False, "dropped"),
                     (BF16, True, "only the norm"))
    ),
    *(("sampling_by_row", has_filters) for has_filters in (False, True)),
    *(("gelu_backward", dtype) for dtype in (F32, BF16)),
    ("join_qkv", BF16),
    ("sum_rows",),
    *(("loss", *case) for case in ((F32, 100, 97), (BF16, 101, 99), (F32, 3000, 2990), (BF16, 100, 97))),
    *(("experts", dtype) for dtype in (F32, BF16)),
    *(("rotary", dtype, interleaved) for dtype in (F32, F16) for interleaved in (False, True)),
    *(("fp8_casts", dtype, *shape) for dtype in (F32, BF16) for shape in ((64, 128), (70, 131))),
    *(("fp8_blocks", dtype) for dtype in (F32, BF16)),
    *(("heads", rank, to_heads) for rank in (0, 1) for to_heads in (True, False)),
    ("adamw",),
    *(("reduced_moments", kind, coupled) for kind in ("bf16", "fp8") for coupled in (True, False)),
    *((name, dtype) for name in ("batch_invariant", "invariant_matmuls") for dtype in (F32, F16)),
    *(("tiles_of_a_matmul", *case) for case in ((F32, 1), (F32, 2), (F16, 1), (F16, 8))),
    *(
        ("batch_invariant_attention", dtype, *case)
        for dtype in (F32, F16)
        for case in ((None, False, 20), (9, True, 20), (9, True, 16))
    ),
]  # fmt: skip

GRIDS = [
    *(
        ("norms", *case)
        for case in product((F32, BF16), (True, False), ("none", "only the norm", "added", "dropped"))
    ),
    *(("loss", dtype, *sizes) for dtype in (F32, BF16) for sizes in ((100, 97), (101, 99), (3000, 2990))),
    *(("tiles_of_a_matmul", dtype, parts) for dtype in (F32, F16) for parts in (1, 2, 8)),
]
MORE = [case for case in GRIDS if case not in CASES]


def interpret() -> None:
    """Have Triton interpret the kernels that this process imports."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    torch.backends.cuda.is_built = lambda: True  # kernels are imported by builds for GPUs alone
    torch.library.wrap_triton = lambda kernel: kernel  # it takes compiled kernels alone
    import triton.language as tl
    from triton.language.extra import libdevice

    libdevice.expm1 = lambda x: tl.exp(x) - 1


def check(name: str, *arguments: object) -> None:
    from ops import kernel_checks

    torch.manual_seed(0)
    getattr(kernel_checks, name)(*arguments)


@pytest.fixture(scope="module")
def interpreter():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=interpret) as pool:
        yield pool


LINUX = sys.platform == "linux"


@pytest.mark.skipif(not LINUX, reason="Triton has wheels for Linux")
@pytest.mark.skipif(
    LINUX and Version(version("triton")) < Version("3.7"),
    reason="Triton 3.6's interpreter needs an older NumPy",
)
@pytest.mark.parametrize(
    "case",
    [*CASES, *map(in_full, MORE)],
    ids=lambda case: "-".join(str(part).removeprefix("torch.") for part in case),
)
def test_a_kernel_computes_the_formula(interpreter, case):
    interpreter.submit(check, *case).result(120)
