"""Weight gradients put off: what lets a zero-bubble schedule run the two halves of a backward pass apart.

A linear layer's backward pass has two products: one for the gradient of its input, which the stage before waits for,
and one for that of its weight, which nobody does. Here the matmul runs on a small graph of its own. The backward pass
goes through it for the input alone and puts the rest into a list; later the list is worked off, which goes through
the small graph again for weight and bias, and adds to the parameters' gradients as any backward pass does.

It wraps whatever matmul a layer has, so it comes after tensor parallelism; a collective in that matmul's backward
pass may run twice. Torch.compile does not see through it, so compiled layers cannot hold it. Every linear's input is
kept until its weight's turn, so a layer that is recomputed gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalith.models.linear import Linear

Matmul = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class WeightGradient:
    """The work of one matmul that has been put off."""

    output: GradientEdge  # of the small graph
    grad: Tensor  # of the matmul's output
    inner: list[Tensor]  # weight and bias as leaves of the small graph
    outer: list[GradientEdge]  # where their gradients go on to the parameters


class WeightGradients:
    """The list of what one backward pass has put off."""

    def __init__(self, modules: Iterable[nn.Module]):
        """Takes over the matmul of every Linear in `modules`."""
        self._pending: list[WeightGradient] = []
        for module in modules:
            for linear in module.modules():
                if isinstance(linear, Linear):
                    linear.matmul = partial(self._matmul, linear.matmul)

    def take(self) -> list[WeightGradient]:
        """What has been put off since the last call."""
        taken, self._pending = self._pending, []
        return taken

    def _matmul(self, matmul: Matmul, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        learnt = [t for t in (weight, bias) if t is not None and t.requires_grad]
        if not (torch.is_grad_enabled() and x.requires_grad and learnt):
            return matmul(x, weight, bias)
        outer = [get_gradient_edge(t) for t in learnt]
        return _Deferred.apply(x, matmul, (_detached(weight), _detached(bias)), outer, self._put_off)

    def _put_off(self, gradient: WeightGradient) -> None:
        self._pending.append(gradient)


def compute(gradients: list[WeightGradient]) -> None:
    """Works off a list: adds to the gradients of weights and biases."""
    edges, values = [], []
    for gradient in gradients:
        values += torch.autograd.grad(gradient.output, gradient.inner, gradient.grad)
        edges += gradient.outer
    if edges:
        torch.autograd.backward(edges, values)


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, matmul: Matmul, weight_and_bias, outer, put_off) -> Tensor:
        ctx.input, ctx.outer, ctx.put_off = x.detach().requires_grad_(), outer, put_off
        ctx.inner = [t for t in weight_and_bias if t is not None and t.requires_grad]
        with torch.enable_grad():
            output = matmul(ctx.input, *weight_and_bias)
        ctx.output = get_gradient_edge(output)
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (grad_input,) = torch.autograd.grad(ctx.output, ctx.input, grad, retain_graph=True)
        ctx.put_off(WeightGradient(ctx.output, grad, ctx.inner, ctx.outer))
        return grad_input, None, None, None, None


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(tensor.requires_grad)
