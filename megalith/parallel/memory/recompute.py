"""Activation recomputation: repeats the forward pass instead of saving activations (Chen et al. 2016; Korthikanti et
al. 2022).

`full` saves only the input of a unit of layers, and recomputes the unit in the backward pass: `uniform` every unit of
recompute_num_layers layers, `block` the first recompute_num_layers layers of a pipeline stage, one by one. With
distribute_saved_activations, TP ranks save shards of their common input. The model's last layer is not recomputed if
units have one layer and none is offloaded, because its backward pass comes right after its forward pass. With
recompute_saves_attention, the output of attention is saved too. A compiled layer that is a unit is recomputed inside
its graph where possible, without its last matmul, which no gradient needs. `selective` recomputes chosen modules of
each layer. Dropout is keyed by position, so only attention dropout in GPU kernels has a random state to restore.
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
from megalith.models.layer import TransformerLayer
from megalith.models.linear import MLP, Linear
from megalith.models.mixers.attention import Attention
from megalith.models.pass_context import Context
from megalith.models.transformer import Runner, Stack, Transformer, layers_of, stacks_of
from megalith.ops.block_attention import saved_attention_contexts
from megalith.ops.compiled import compiled_recompute, compiled_save_attention
from megalith.ops.gemm import GEMM
from megalith.parallel.seams import plug

# The modules that recompute_modules can name. core_attn and mlp_act are not modules.
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
    """Make layers or modules recompute their activations, in place.

    Args:
        model: the model or a stage of it.
        parallel: the recompute_* settings.
        tensor: tensor-parallel axis, over which saved inputs are distributed.
        compiled: True if layers will be compiled.

    Raises:
        ConfigError: the settings require saving attention's output, which this model or layout does not support.
    """
    check_saved_attention(model.config, parallel)
    recompute = partial(
        checkpoint, use_reentrant=False, preserve_rng_state=model.config.attention_dropout > 0
    )
    chosen = _layers_to_recompute(model, parallel)
    if parallel.recompute_granularity == "full" and compiled and _recomputes_in_graph(model, parallel):
        recompute = partial(
            recompute, context_fn=compiled_save_attention if parallel.saves_attention else compiled_recompute
        )
        for layer in chosen:
            plug(layer, "runner", recompute)
    elif parallel.recompute_granularity == "full":
        if parallel.saves_attention:
            recompute = partial(recompute, context_fn=saved_attention_contexts)
            _plug_cores(model, lambda core: partial(core, saved=True))
        if parallel.distribute_saved_activations:
            recompute = partial(_distribute_saved_input, recompute, tensor)
        for stack in stacks_of(model):
            plug(stack, "runner", _recompute_layers(stack, chosen, parallel, recompute))
    elif parallel.recompute_granularity == "selective":
        if "core_attn" in parallel.recompute_modules:
            _plug_cores(model, lambda core: partial(recompute, core))
        in_graph = partial(recompute, context_fn=compiled_recompute) if compiled else recompute
        for layer in layers_of(model).values():
            if "mlp_act" in parallel.recompute_modules:
                _recompute_activations(layer, in_graph)
            for name, parts in MODULES.items():
                for part in parts if name in parallel.recompute_modules else ():
                    if (module := getattr(layer, part, None)) is not None:
                        outside = layer.has_experts and part in ("mlp", "post_mlp_layernorm")  # of a graph
                        plug(module, "runner", recompute if outside else in_graph)


def _layers_to_recompute(model: Transformer, parallel: ParallelConfig) -> list[TransformerLayer]:
    """Return the layers that are recomputed with `recompute_granularity: full`."""
    layers = list(layers_of(model).values())
    if parallel.recompute_method == "block":
        return layers[: parallel.recompute_num_layers]
    last = model.final_layernorm is not None and skips_last_layer(parallel)
    return layers[:-1] if last else layers


def skips_last_layer(parallel: ParallelConfig) -> bool:
    """Return True if full recomputation skips the model's last layer.

    With offloading it does not, because all activations of that layer would move to the host instead of its input only.
    """
    each = parallel.recompute_method != "block" and unit_size(parallel) == 1
    return each and not parallel.cpu_offloading_num_layers


def _recomputes_in_graph(model: Transformer, parallel: ParallelConfig) -> bool:
    """Return True if each compiled layer can recompute inside its graph.

    The compiler then drops operations that no gradient needs, such as the last matmul.
    """
    experts = any(x.has_experts for x in layers_of(model).values())
    uses_fp8 = any(x.gemm is not GEMM and x.coded is None for x in model.modules() if isinstance(x, Linear))
    return not uses_fp8 and can_recompute_in_graph(model.config, parallel, experts)


def can_recompute_in_graph(config: ModelConfig, parallel: ParallelConfig, experts: bool) -> bool:
    """Return True if a compiled layer without FP8 can recompute inside its graph. `experts` is True for a layer with
    experts.
    """
    alone = parallel.tensor_model_parallel_size == parallel.context_parallel_size == 1
    return alone and unit_size(parallel) == 1 and not config.attention_dropout and not experts


def _plug_cores(model: Transformer, wrap: Callable[[Callable], Callable]) -> None:
    cores: dict[Callable, Callable] = {}  # layers that share a core also share the wrapped one
    for layer in layers_of(model).values():
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                plug(mixer, "core", cores.setdefault(mixer.core, wrap(mixer.core)))


def _recompute_activations(layer: TransformerLayer, recompute: Callable) -> None:
    """Recompute fc2's input from fc1's output, in the MLP and the shared expert."""
    for module in layer.modules():
        if isinstance(module, MLP):
            plug(module, "activation", partial(recompute, module.activation))


def _distribute_saved_input(
    recompute: Callable,
    axis: Axis,
    run_layers: Runner,
    layers: Sequence[TransformerLayer],
    x: Tensor,
    context: Context,
) -> Tensor:
    """Call `recompute`, and save only this rank's shard of its input x [batch, seq, hidden].

    All ranks of `axis` must have the same x.
    """
    shape, address = x.shape, x.data_ptr()

    def pack(saved: Tensor) -> tuple[Tensor, bool]:
        if saved.data_ptr() != address or saved.shape != shape:
            return saved, False
        return saved.reshape(axis.size, -1)[axis.rank].clone(), True

    def unpack(kept: tuple[Tensor, bool]) -> Tensor:
        part, is_part = kept
        return all_gather_no_grad(part, axis).view(shape) if is_part else part

    with saved_tensors_hooks(pack, unpack):
        return recompute(run_layers, layers, x, context)


def unit_size(parallel: ParallelConfig) -> int:
    """Return the number of consecutive layers that are recomputed from one saved input."""
    uniform = parallel.recompute_granularity == "full" and parallel.recompute_method != "block"
    return parallel.recompute_num_layers if uniform else 1


def _recompute_layers(
    stack: Stack, chosen: Sequence[TransformerLayer], parallel: ParallelConfig, recompute: Callable
) -> Runner:
    run_layers, size = stack.runner, unit_size(parallel)

    def in_units(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
        for first in range(0, len(layers), size):
            x = recompute(run_layers, layers[first : first + size], x, context)
        return x

    def one_by_one(layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
        for layer in layers:
            run = partial(recompute, run_layers) if layer in chosen else run_layers
            x = run([layer], x, context)
        return x

    return one_by_one if size == 1 else in_units
