"""How modules are run: a stack's layers one behind the other, a module's formula at once; unless something is plugged.

Recomputation, ping-pong micro-batches and offloaded activations are runners of a list of layers, and some of them run
the parts of a layer. They are functions, the same one for every layer, so that all layers share compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from megalith.models.layer import TransformerLayer
    from megalith.models.pass_context import Context

Runner = Callable[["Sequence[TransformerLayer]", Tensor, "Context"], Tensor]


def run_layers(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
    """x [batch, seq, hidden] through these layers."""
    for layer in layers:
        x = layer(x, context.at_layer(layer.number))
    return x


class Runnable(nn.Module):
    """A part of a layer, of which methods can be run another way: `runner(method, *args)`. A seam."""

    runner: Callable | None = None


def runnable(method: Callable) -> Callable:
    """A method of a Runnable that its runner runs, where it has one."""

    @wraps(method)
    def run(self: Runnable, *args):
        if self.runner is None:
            return method(self, *args)
        return self.runner(partial(method, self), *args)

    return run
