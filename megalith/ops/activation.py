"""GELU by its tanh approximation (Hendrycks and Gimpel 2016), in the form that a GPU computes fastest."""

from __future__ import annotations

from math import pi, sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

SLOPE, CUBIC = 2 * sqrt(2 / pi), 0.044715


def gelu_tanh(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))) in x's dtype, computed in fp32.

    (1 + tanh u) / 2 is the sigmoid of 2u, which takes an H200 four fifths of the time: there the kernel is then bound
    by memory. It needs a compiled layer to be one kernel, so only a GPU's takes this way.
    """
    if not (x.is_cuda and torch.compiler.is_compiling()):
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    return (wide * torch.sigmoid(SLOPE * (wide + CUBIC * wide**3))).to(x.dtype)
