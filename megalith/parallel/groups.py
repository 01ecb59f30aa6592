"""Several consecutive layers as one graph, `runtime.layers_per_graph` of them.

A compiled layer ends where its kernels end: its last addition to the stream cannot be one kernel with the norm that the
next layer begins with, and its last collective has no product of the next layer to hide behind (halves.py). A group of
layers is called as one module and compiled as one graph, in which a layer leaves its last addition to the next one's
norm, so only the group's own edges are left. Groups of as many layers share one compiled code, as layers do; the last
group of a pipeline stage's chunk has what is left.

A group is FSDP2's unit too, for its hooks stand around what is called and cannot stand inside a graph. A layer keeps
its place in `model.layers`, and so its number and its parameters' names: a group is a second parent, that comes later.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from megalith.models.context import Context
from megalith.models.transformer import Transformer, TransformerLayer


class LayerGroup(nn.Module):
    """Consecutive layers, called as one."""

    def __init__(self, layers: Sequence[TransformerLayer]):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, contexts: Sequence[Context]) -> Tensor:
        """x [batch, seq, hidden] through the layers, each with its own context."""
        y = mask = None
        for layer, context in zip(self.layers, contexts, strict=True):
            x, y, mask = layer.branches(x, y, mask, context)
        return self.layers[-1].end(x, y, mask)


def apply_groups(model: Transformer, size: int) -> None:
    """Lets `model`, a chunk of a pipeline stage, run its layers `size` at a time, in place; 1 changes nothing.

    Layers that predict further tokens are called by themselves, so each is a group of its own.
    """
    if size == 1:
        return
    further = [str(number) for number in model.config.further_layers if str(number) in model.layers]
    consecutive = [number for number in model.layers if number not in further]
    cut = [consecutive[first : first + size] for first in range(0, len(consecutive), size)]
    groups = {
        numbers[0]: LayerGroup([model.layers[number] for number in numbers])
        for numbers in [*cut, *([number] for number in further)]
    }

    def run_layers(numbers: Sequence[str], x: Tensor, context: Context) -> Tensor:
        """As Transformer's; `numbers` are those of whole groups."""
        while numbers:
            group = groups[numbers[0]]
            here, numbers = numbers[: len(group.layers)], numbers[len(group.layers) :]
            x = group(x, context.at_layers(list(map(int, here))))
        return x

    model.layer_groups = nn.ModuleList(groups.values())
    model.run_layers = run_layers


def units(model: Transformer) -> list[nn.Module]:
    """What is called at once, and so compiled as one graph and gathered together: groups, or layers where none are."""
    groups = [module for module in model.modules() if isinstance(module, LayerGroup)]
    return groups or list(model.layers.values())
