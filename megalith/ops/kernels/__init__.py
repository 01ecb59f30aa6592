"""Triton kernels for backward passes and optimizer steps whose Inductor versions would read memory more often.

In compiled code on a GPU, some functions of ops/ use them for their backward pass. A kernel that computes the gradient
of a linear layer's output also sums it over tokens: the sum is the gradient of the layer's bias. For this, the linear
layer adds a detached bias, and the function after it takes the bias and returns its gradient. Elsewhere PyTorch's
operators compute the same. Triton is part of PyTorch's GPU builds; its interpreter runs the kernels on a CPU, for
tests.
"""

from __future__ import annotations

from importlib.util import find_spec
from math import pi, sqrt

import torch
from torch import Tensor

_package = find_spec("triton")
# A folder of that name would be a namespace package, without an origin. Importing Triton takes a second.
AVAILABLE = _package is not None and _package.origin is not None and torch.backends.cuda.is_built()
SLOPE, CUBIC = 2 * sqrt(2 / pi), 0.044715  # constants of GELU's tanh approximation
MIN_WIDTH, MAX_WIDTH = 256, 8192  # of norms: a program holds complete rows in registers

if AVAILABLE:
    from megalith.ops.kernels import (
        column_kernels,  # noqa: F401 (they register operators)
        fp8_kernels,  # noqa: F401
        norm_kernel,  # noqa: F401 (they register operators)
    )
    from megalith.ops.kernels.adam_kernel import adamw_  # noqa: F401
    from megalith.ops.kernels.column_kernels import sum_rows  # noqa: F401
    from megalith.ops.kernels.expert_kernel import swiglu, swiglu_backward, take_rows  # noqa: F401
    from megalith.ops.kernels.head_kernels import share_heads  # noqa: F401
    from megalith.ops.kernels.loss_kernel import softmax_loss_  # noqa: F401
    from megalith.ops.kernels.moment_kernel import step_moments_  # noqa: F401
    from megalith.ops.kernels.rotary_kernel import rotate_pairs  # noqa: F401


def fuses_backward(x: Tensor) -> bool:
    """Return True if these kernels compute the gradients of functions of x: in compiled code on a GPU."""
    return AVAILABLE and x.is_cuda and torch.compiler.is_compiling() and torch.is_grad_enabled()


def runs_alone(x: Tensor) -> bool:
    """Return True if a kernel of x should replace several element-wise operators: on a GPU, outside of compiled code,
    which would combine them itself.
    """
    return AVAILABLE and x.is_cuda and not torch.compiler.is_compiling() and x.dtype != torch.float64
