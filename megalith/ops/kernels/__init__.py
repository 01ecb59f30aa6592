"""Backward kernels in Triton, where Inductor's would read memory more often than they must.

In compiled code on a GPU some functions of ops/ take their backward pass from here. A kernel that computes the gradient
of a linear's output also sums it over the tokens, which is the gradient of the linear's bias: the linear then gets its
bias detached, and the function takes the bias itself and returns its gradient. Triton comes with PyTorch's builds for
GPUs; elsewhere, and outside of compiled code, PyTorch's own operators do the same.
"""

from __future__ import annotations

from importlib.util import find_spec
from math import pi, sqrt

import torch
from torch import Tensor

_package = find_spec("triton")
AVAILABLE = _package is not None and _package.origin is not None  # a folder of that name has none
SLOPE, CUBIC = 2 * sqrt(2 / pi), 0.044715  # of GELU's tanh
MIN_WIDTH, MAX_WIDTH = 256, 8192  # of a norm: a program holds whole rows in registers

if AVAILABLE:
    from megalith.ops.kernels import (
        column_kernels,  # noqa: F401 (they register operators)
        fp8_kernels,  # noqa: F401
        norm_kernel,  # noqa: F401 (they register operators)
    )
    from megalith.ops.kernels.adam_kernel import adamw_  # noqa: F401
    from megalith.ops.kernels.column_kernels import share_heads, sum_rows  # noqa: F401
    from megalith.ops.kernels.expert_kernel import take_rows, weighted_swiglu, weighted_swiglu_backward  # noqa: F401
    from megalith.ops.kernels.loss_kernel import softmax_loss_  # noqa: F401
    from megalith.ops.kernels.moment_kernel import step_moments_  # noqa: F401


def fuses_backward(x: Tensor) -> bool:
    """Whether what is computed of x gets its gradient from the kernels here."""
    return AVAILABLE and x.is_cuda and torch.compiler.is_compiling() and torch.is_grad_enabled()
