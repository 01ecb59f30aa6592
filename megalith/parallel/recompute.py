"""Activation recomputation: trade a second forward pass for memory (Chen et al. 2016; Korthikanti et al. 2022).

`full` keeps the input of a unit of layers alone and computes the unit again in the backward pass: with `uniform`
every unit of recompute_num_layers layers, with `block` the first recompute_num_layers layers, each by itself.
`selective` does so for chosen modules inside each layer. Dropout is keyed by position, so there is no random state
to put back but that of a GPU kernel's attention dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalith.config import ParallelConfig
from megalith.models.context import Context
from megalith.models.transformer import Transformer, TransformerLayer

# The modules of a layer that selective recomputation can name.
SELECTIVE: dict[str, Callable[[TransformerLayer], list[tuple[nn.Module, str]]]] = {
    "core_attn": lambda layer: [(layer.self_attention, "core")],
    "mlp": lambda layer: [(layer.mlp, "forward")],
    "layernorm": lambda layer: [(layer.input_layernorm, "forward"), (layer.pre_mlp_layernorm, "forward")],
}


def apply_recompute(model: Transformer, parallel: ParallelConfig) -> None:
    """Wraps what is to be recomputed, in place."""
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=model.config.attention_dropout > 0)
    if parallel.recompute_granularity == "full":
        _recompute_layers(model, parallel, again)
    elif parallel.recompute_granularity == "selective":
        for layer in model.layers.values():
            for name in parallel.recompute_modules:
                for owner, attribute in SELECTIVE[name](layer):
                    setattr(owner, attribute, partial(again, getattr(owner, attribute)))


def _recompute_layers(model: Transformer, parallel: ParallelConfig, again: Callable) -> None:
    run_layers, count = model.run_layers, parallel.recompute_num_layers

    def uniform(numbers: Sequence[str], x: Tensor, context: Context) -> Tensor:
        for first in range(0, len(numbers), count):
            x = again(run_layers, numbers[first : first + count], x, context)
        return x

    def block(numbers: Sequence[str], x: Tensor, context: Context) -> Tensor:
        for number in numbers[:count]:
            x = again(run_layers, [number], x, context)
        return run_layers(numbers[count:], x, context)

    model.run_layers = block if parallel.recompute_method == "block" else uniform
