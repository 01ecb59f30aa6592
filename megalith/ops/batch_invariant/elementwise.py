"""Elementwise functions and sums that do not depend on an element's position in its tensor.

On a CPU, PyTorch computes most of a tensor with vector instructions, and the last elements (fewer than two vectors) one
by one, with another implementation of SiLU, the sigmoid and GELU. Threads split a tensor anywhere, so such elements
also occur in its middle. Additions, products, divisions and square roots are correctly rounded, and equal everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.ops.gemm import add_bias_gradient

WHOLE = 64  # elements: a multiple of two vectors of any CPU
PIECE = 2**15  # elements that PyTorch computes in one thread


def by_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x) for an elementwise function, with every element computed by vector instructions."""
    if x.is_cuda or torch.compiler.is_compiling():
        return function(x)
    flat = x.reshape(-1)
    # This copies even without padding, because elements with gaps between them are computed one by one.
    padded = pad(flat, (0, -flat.numel() % WHOLE))
    if padded.numel() > PIECE and torch.get_num_threads() > 1:
        y = torch.cat([function(piece) for piece in padded.split(PIECE)])
    else:
        y = function(padded)
    return y[: flat.numel()].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    return by_whole_vectors(torch.sigmoid, x)


def exp(x: Tensor) -> Tensor:
    return by_whole_vectors(torch.exp, x)


def silu(x: Tensor) -> Tensor:
    return by_whole_vectors(torch.nn.functional.silu, x)


def softplus(x: Tensor) -> Tensor:
    return by_whole_vectors(torch.nn.functional.softplus, x)


def sum_by_halves(x: Tensor) -> Tensor:
    """Return the sum over the last dimension, [...], added in an order that depends only on its size."""
    while (size := x.shape[-1]) > 1:
        first, second = (pad(x, (0, 1)) if size % 2 else x).chunk(2, -1)
        x = first + second
    return x[..., 0]


def sum_by_pairs(x: Tensor) -> Tensor:
    """Return the sum over dimension 0, added by a binary tree of neighbours: ((0 + 1) + (2 + 3)) + …

    The sum of 2^k consecutive entries that start at a multiple of 2^k is a node of the tree, so each rank can add its
    own entries first.
    """
    while len(x) > 1:
        whole = len(x) // 2 * 2
        sums = x[0:whole:2] + x[1:whole:2]
        x = torch.cat([sums, x[whole:]]) if whole < len(x) else sums
    return x[0]


def activation_by_whole_vectors(activation: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an activation of ops/activation.py, or a `gated_activation` of one, computed in whole vectors."""
    if isinstance(activation, partial):  # gated_activation, with the plain one as its first argument
        plain, *others = activation.args
        return partial(activation.func, activation_by_whole_vectors(plain), *others, **activation.keywords)

    @wraps(activation)
    def in_whole_vectors(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return by_whole_vectors(activation, add_bias_gradient(x, bias))

    return in_whole_vectors
