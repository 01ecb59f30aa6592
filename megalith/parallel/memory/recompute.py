"""Activation recomputation: a second forward pass instead of memory (Chen et al. 2016; Korthikanti et al. 2022).

`full` saves only the input of a unit of layers and recomputes the unit in the backward pass: with `uniform` every unit
of recompute_num_layers layers, with `block` the first recompute_num_layers layers, each by itself. Each pipeline stage
has units and first layers of its own. Without sequence parallelism TP ranks have the same input; with
distribute_saved_activations each saves a shard, and they all-gather it when it is needed. The model's last layer, whose
backward pass comes next, is not recomputed where units have one layer and none is offloaded: it would be there whole at
once. With recompute_saves_attention what attention gave is saved too, and not computed again. A compiled layer that is
a unit by itself is recomputed inside of its graph where it can be, without its last matmul, which no gradient needs.
`selective` recomputes chosen modules inside each layer. Dropout is keyed by position, so there is no random state to
restore but that of a GPU kernel's attention dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalith.comm.collectives import Axis, all_gather_no_grad
from megalith.config import ModelConfig, ParallelConfig
from megalith.config.rules.parallel_rules import check_saved_attention
from megalith.models.linear import MLP, Linear
from megalith.models.mixers.attention import Attention
from megalith.models.moe import MoE
from megalith.models.pass_context import Context
from megalith.models.transformer import Runner, Stack, Transformer, TransformerLayer, layers_of, stacks_of
from megalith.ops.block_attention import saved_attention_contexts
from megalith.ops.compiled import compiled_recompute, compiled_save_attention
from megalith.ops.gemm import GEMM
from megalith.parallel.seams import plug

# The parts of a layer that selective recomputation can name; core_attn and mlp_act, the others, are no modules.
MODULES = {
    "mlp": ["mlp"],
    "layernorm": [
        "input_layernorm",
        "post_attention_layernorm",
        "pre_cross_attn_layernorm",
        "post_cross_attn_layernorm",
        "pre_mlp_layernorm",
        "post_mlp_layernorm",
    ],
}


def apply_recompute(
    model: Transformer, parallel: ParallelConfig, tensor: Axis | None = None, compiled: bool = False
) -> None:
    """Plugs runners that recompute, in place. `tensor` is the axis that saved inputs are distributed over; `compiled`:
    each layer is going to be. Raises ConfigError where attention's output is to be saved and cannot."""
    check_saved_attention(model.config, parallel)
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=model.config.attention_dropout > 0)
    chosen = _recomputed(model, parallel)
    if parallel.recompute_granularity == "full" and compiled and _inside(model, parallel):
        again = partial(
            again, context_fn=compiled_save_attention if parallel.saves_attention else compiled_recompute
        )
        for layer in chosen:
            plug(layer, "runner", again)
    elif parallel.recompute_granularity == "full":
        if parallel.saves_attention:
            again = partial(again, context_fn=saved_attention_contexts)
            _plug_cores(model, lambda core: partial(core, saved=True))
        if parallel.distribute_saved_activations:
            again = partial(_with_input_distributed, again, tensor)
        for stack in stacks_of(model):
            plug(stack, "runner", _recompute_layers(stack, chosen, parallel, again))
    elif parallel.recompute_granularity == "selective":
        if "core_attn" in parallel.recompute_modules:
            _plug_cores(model, lambda core: partial(again, core))
        in_graph = partial(again, context_fn=compiled_recompute) if compiled else again
        for layer in layers_of(model).values():
            if "mlp_act" in parallel.recompute_modules:
                _recompute_activations(layer, in_graph)
            for name, parts in MODULES.items():
                for part in parts if name in parallel.recompute_modules else ():
                    if (module := getattr(layer, part)) is not None:  # experts are no part of a graph
                        plug(module, "runner", again if isinstance(module, MoE) else in_graph)


def _recomputed(model: Transformer, parallel: ParallelConfig) -> list[TransformerLayer]:
    """The layers that full recomputation takes."""
    layers = list(layers_of(model).values())
    if parallel.recompute_method == "block":
        return layers[: parallel.recompute_num_layers]
    last = model.final_layernorm is not None and skips_last_layer(parallel)
    return layers[:-1] if last else layers


def skips_last_layer(parallel: ParallelConfig) -> bool:
    """Whether full recomputation leaves the model's last layer out. Not where activations are offloaded: all of that
    layer's would go to the host and back, where its input does."""
    each = parallel.recompute_method != "block" and unit_size(parallel) == 1
    return each and not parallel.cpu_offloading_num_layers


def _inside(model: Transformer, parallel: ParallelConfig) -> bool:
    """Whether recomputation can stand inside of each compiled layer's graph. The compiler then leaves out what no
    gradient needs, as a layer's last matmul."""
    experts = any(x.has_experts for x in layers_of(model).values())
    own = any(x.gemm is not GEMM for x in model.modules() if isinstance(x, Linear))  # FP8 keeps tables
    return not own and can_recompute_in_graph(model.config, parallel, experts)


def can_recompute_in_graph(config: ModelConfig, parallel: ParallelConfig, experts: bool) -> bool:
    """Whether a compiled layer, with `experts` or without, can recompute itself, unless its linears are in FP8."""
    alone = parallel.tensor_model_parallel_size == parallel.context_parallel_size == 1
    return alone and unit_size(parallel) == 1 and not config.attention_dropout and not experts


def _plug_cores(model: Transformer, changed: Callable[[Callable], Callable]) -> None:
    cores: dict[Callable, Callable] = {}  # layers that share a core go on to share one
    for layer in layers_of(model).values():
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                plug(mixer, "core", cores.setdefault(mixer.core, changed(mixer.core)))


def _recompute_activations(layer: TransformerLayer, again: Callable) -> None:
    """Of the MLP, or of the shared expert: fc2's input is made again out of fc1's result."""
    for module in layer.modules():
        if isinstance(module, MLP):
            plug(module, "activation", partial(again, module.activation))


def _with_input_distributed(
    again: Callable,
    axis: Axis,
    run_layers: Runner,
    layers: Sequence[TransformerLayer],
    x: Tensor,
    context: Context,
) -> Tensor:
    """As `again`, of whose saved x [batch, seq, hidden], the same on every rank of the axis, each keeps its part."""
    shape, address = x.shape, x.data_ptr()

    def pack(saved: Tensor) -> tuple[Tensor, bool]:
        if saved.data_ptr() != address or saved.shape != shape:
            return saved, False
        return saved.reshape(axis.size, -1)[axis.rank].clone(), True

    def unpack(kept: tuple[Tensor, bool]) -> Tensor:
        part, is_part = kept
        return all_gather_no_grad(part, axis).view(shape) if is_part else part

    with saved_tensors_hooks(pack, unpack):
        return again(run_layers, layers, x, context)


def unit_size(parallel: ParallelConfig) -> int:
    """Layers that are computed again together, from the input of the first; 1 where layers stand by themselves."""
    uniform = parallel.recompute_granularity == "full" and parallel.recompute_method != "block"
    return parallel.recompute_num_layers if uniform else 1


def _recompute_layers(
    stack: Stack, chosen: Sequence[TransformerLayer], parallel: ParallelConfig, again: Callable
) -> Runner:
    run_layers, size = stack.runner, unit_size(parallel)

    def in_units(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
        for first in range(0, len(layers), size):
            x = again(run_layers, layers[first : first + size], x, context)
        return x

    def one_by_one(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
        for layer in layers:
            run = partial(again, run_layers) if layer in chosen else run_layers
            x = run([layer], x, context)
        return x

    return one_by_one if size == 1 else in_units
