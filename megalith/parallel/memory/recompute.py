"""Activation recomputation: trade a second forward pass for memory (Chen et al. 2016; Korthikanti et al. 2022).

`full` keeps the input of a unit of layers alone and computes the unit again in the backward pass: with `uniform`
every unit of recompute_num_layers layers, with `block` the first recompute_num_layers layers, each by itself. Of a
pipeline each stage has units and first layers of its own. Tensor-parallel ranks hold that input alike where there is no
sequence parallelism; with distribute_saved_activations each keeps a part, and they gather it when it is needed.
`selective` does so for chosen modules inside each layer. Dropout is keyed by position, so there is no random state
to put back but that of a GPU kernel's attention dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalith.comm.collectives import Axis, gathered
from megalith.config import ParallelConfig
from megalith.models.pass_context import Context
from megalith.models.transformer import Transformer

# The parts of a layer that selective recomputation can name; core_attn, the other one, is no module.
MODULES = {
    "mlp": ["mlp"],
    "layernorm": [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    ],
}


def apply_recompute(model: Transformer, parallel: ParallelConfig, tensor: Axis | None = None) -> None:
    """Wraps what is to be recomputed, in place. `tensor` is the axis that saved inputs are distributed over."""
    uses_random_state = model.config.attention_dropout > 0
    again = _again(uses_random_state)
    if parallel.recompute_granularity == "full":
        if parallel.distribute_saved_activations:
            again = partial(_with_input_distributed, again, tensor)
        _recompute_layers(model, parallel, again)
    elif parallel.recompute_granularity == "selective":
        if "core_attn" in parallel.recompute_modules:
            _recompute_cores(model, again)
        for layer in model.layers.values():
            for name, parts in MODULES.items():
                for part in parts if name in parallel.recompute_modules else ():
                    if (module := getattr(layer, part)) is not None:
                        module.__class__ = _recomputed(type(module), uses_random_state)


def _recompute_cores(model: Transformer, again: Callable) -> None:
    cores: dict[Callable, Callable] = {}  # layers that share a core go on to share one
    for layer in model.layers.values():
        core = layer.self_attention.core
        layer.self_attention.core = cores.setdefault(core, partial(again, core))


def _again(uses_random_state: bool) -> Callable:
    return partial(checkpoint, use_reentrant=False, preserve_rng_state=uses_random_state)


@cache
def _recomputed(kind: type[nn.Module], uses_random_state: bool) -> type[nn.Module]:
    """The same kind of module, recomputed. A class for all layers: were each given a function of its own in place of
    its forward, torch.compile would take them for different code and compile every layer.
    """
    again = _again(uses_random_state)

    class Recomputed(kind):
        def forward(self, *args):
            return again(super().forward, *args)

        def beside(self, *args):  # a norm's
            return again(super().beside, *args)

    return Recomputed


def _with_input_distributed(
    again: Callable, axis: Axis, run_layers: Callable, numbers: Sequence[str], x: Tensor, context: Context
) -> Tensor:
    """As `again`, of whose saved x [batch, seq, hidden], the same on every rank of the axis, each keeps its part."""
    shape, address = x.shape, x.data_ptr()

    def pack(saved: Tensor) -> tuple[Tensor, bool]:
        if saved.data_ptr() != address or saved.shape != shape:
            return saved, False
        return saved.reshape(axis.size, -1)[axis.rank].clone(), True

    def unpack(kept: tuple[Tensor, bool]) -> Tensor:
        part, is_part = kept
        return gathered(part, axis).view(shape) if is_part else part

    with saved_tensors_hooks(pack, unpack):
        return again(run_layers, numbers, x, context)


def unit_size(parallel: ParallelConfig) -> int:
    """Layers that are computed again together, from the input of the first; 1 where layers stand by themselves."""
    uniform = parallel.recompute_granularity == "full" and parallel.recompute_method != "block"
    return parallel.recompute_num_layers if uniform else 1


def _recompute_layers(model: Transformer, parallel: ParallelConfig, again: Callable) -> None:
    run_layers, size = model.run_layers, unit_size(parallel)
    first_layers = set(list(model.layers)[: parallel.recompute_num_layers])

    def uniform(numbers: Sequence[str], x: Tensor, context: Context) -> Tensor:
        for first in range(0, len(numbers), size):
            x = again(run_layers, numbers[first : first + size], x, context)
        return x

    def block(numbers: Sequence[str], x: Tensor, context: Context) -> Tensor:
        for number in numbers:
            run = partial(again, run_layers) if number in first_layers else run_layers
            x = run([number], x, context)
        return x

    model.run_layers = block if parallel.recompute_method == "block" else uniform
