"""Selection of the matmuls that run in FP8, and their scaling.

FP8 covers the linears of attention (MLA's included) and MLP, the experts, and the input and output projections of
recurrent mixers. Embedding, output layer, router, norms, core attention and loss stay in the compute dtype, as do the
first and last layers under `first_last_layers_bf16`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.config import ModelConfig, RunConfig
from megalith.models.adapters import ADAPTER
from megalith.models.linear import Linear
from megalith.models.moe import GroupedLinear
from megalith.models.transformer import Transformer, layers_of
from megalith.ops.fp8.recipes import (
    AmaxTable,
    BlockGemm,
    CurrentScaling,
    DelayedScaling,
    Fp8Gemm,
    Fp8GroupedGemm,
    StepCodes,
)
from megalith.ops.gemm import Gemm
from megalith.parallel.fp8_counts import CountedGemm
from megalith.parallel.mesh import Mesh
from megalith.parallel.seams import plug

NAMES = {
    "linear_qkv", "linear_q", "linear_kv", "linear_proj", "linear_in", "linear_out", "linear_fc1", "linear_fc2",
    "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj",
    "linear_zxbcdt", "linear_bcx",
}  # fmt: skip


def uses_fp8(number: int, config: RunConfig) -> bool:
    """Return True if layer `number` runs in FP8. MTP layers are numbered after the model's."""
    train, layers = config.train, config.model.num_layers
    if train.fp8_format is None:
        return False
    if not train.first_last_layers_bf16 or number >= layers:
        return True
    return train.num_layers_at_start_in_bf16 <= number < layers - train.num_layers_at_end_in_bf16


def saves_weight_codes(config: RunConfig) -> bool:
    """Return True if the FP8 values of a weight, not the weight itself, are saved for dgrad.

    False if FSDP2 shards weights, because the FP8 values of full weights would stay in memory, and with a pipeline,
    where each micro-batch in flight would keep its own.
    """
    parallel = config.parallel
    sharded = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    return not sharded and parallel.pipeline_model_parallel_size == 1


def casts_weights_once(config: RunConfig) -> bool:
    """Return True if weights are cast to FP8 once per step and the result is kept. The result is kept at least in
    layers that stay unsharded for the step.
    """
    train = config.train
    return (
        train.fp8_format is not None
        and train.fp8_cache_weights is True
        and config.parallel.has_unsharded_layers
    )


def layers_cast_once(layer_numbers: Sequence[int], config: RunConfig) -> set[int]:
    """Return the layers of a chunk that cast their weights to FP8 once per step. `layer_numbers` gives their order."""
    parallel = config.parallel
    if not casts_weights_once(config):
        return set()
    if parallel.data_parallel_sharding_strategy == "optim_grads_params":
        layer_numbers = layer_numbers[
            -parallel.unsharded_layers :
        ]  # in the others, the FP8 data of full weights would stay
    return {number for number in layer_numbers if uses_fp8(number, config)}


def fp8_modules(model: Transformer, config: RunConfig) -> dict[str, nn.Module]:
    """Return the linears and experts of a model, or of a stage of it, that run in FP8, by name."""
    return {
        f"{layer_name}.{name}": module
        for layer_name, layer in layers_of(model).items()
        if uses_fp8(layer.number, config)
        for name, module in layer.named_modules()
        if (isinstance(module, GroupedLinear) and ADAPTER not in f"{name}.")
        or (isinstance(module, Linear) and name.rpartition(".")[2] in NAMES)
    }


def amax_table(model: Transformer, config: RunConfig, device: torch.device) -> AmaxTable | None:
    """Return the amax history of the full `model` for delayed scaling, or None for other recipes."""
    train = config.train
    if train.fp8_format is None or train.fp8_recipe != "delayed":
        return None
    linears = [name for name, each in fp8_modules(model, config).items() if isinstance(each, Linear)]
    return AmaxTable(
        linears,
        train.fp8_format,
        train.fp8_amax_history_len,
        train.fp8_amax_compute_algo,
        train.fp8_margin,
        device,
    )


def apply_fp8(
    chunk: Transformer, config: RunConfig, mesh: Mesh, device: torch.device, table: AmaxTable | None
) -> None:
    """Make the chunk's linears and experts compute in FP8, in place. Does nothing without `fp8_format`.

    If `log_fp8_interval` is set, the Gemms of linears (not of experts) can also record FP8 statistics of their
    operands: amax, overflow and underflow.
    """
    if config.train.fp8_format is None:
        return
    layers = layers_of(chunk)
    once = layers_cast_once([layer.number for layer in layers.values()], config)
    prefixes_cast_once = tuple(f"{name}." for name, layer in layers.items() if layer.number in once)
    for name, module in fp8_modules(chunk, config).items():
        if isinstance(module, GroupedLinear):
            # expert tensor parallelism shards the output of fc1 and the input of fc2
            axes = (Axis(), mesh.etp) if name.endswith("linear_fc1") else (mesh.etp, Axis())
            plug(module, "gemm", Fp8GroupedGemm(module.gemm.kernel, *axes))
        else:
            step_codes = StepCodes() if name.startswith(prefixes_cast_once) else None
            gemm = _gemm(name, config, mesh, table, chunk.compute_dtype, step_codes)
            plug(module, "gemm", CountedGemm(gemm, device) if config.log.log_fp8_interval else gemm)
            shared = _shared_outputs(name.rpartition(".")[2], config.model, mesh.tp.size)
            if shared is not None:
                plug(module, "style", SharedGradient(module.style, mesh.tp, *shared))


def _shared_outputs(linear: str, model: ModelConfig, ranks: int) -> tuple[int, int, int] | None:
    """Return (groups, first, count) for a linear some of whose outputs several ranks compute, otherwise None.

    `groups` is the number of groups, `first` the index of the first shared output in the rank's outputs, and `count`
    the number of shared outputs: keys and values of attention, or B and C of Mamba-2.
    """
    if linear in ("linear_qkv", "linear_kv") and model.query_groups < ranks:
        queries = (
            0 if linear == "linear_kv" else model.num_attention_heads * (1 + model.attention_output_gate)
        )
        return model.query_groups, queries // ranks * model.head_dim, 2 * model.head_dim
    if linear == "linear_zxbcdt" and model.mamba_num_groups < ranks:
        width = model.mamba_heads * model.mamba_head_dim // ranks
        return model.mamba_num_groups, 2 * width, 2 * model.mamba_state_dim
    return None


class SharedGradient:
    """Style of a linear that several ranks compute redundantly because they share a query group.

    A run in one process casts the sum of the replicas' gradients to FP8. To match it, the first rank of a group gets
    that sum, and the others get zeros.
    """

    def __init__(self, style: Callable[..., Tensor], axis: Axis, groups: int, first: int, count: int):
        self.style, self.axis = style, axis
        self.groups, self.first, self.count = groups, first, count

    def __call__(self, *args) -> Tensor:
        return _SharedGradient.apply(self.style(*args), self.axis, self.groups, self.first, self.count)


class _SharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, axis: Axis, groups: int, first: int, count: int) -> Tensor:
        ctx.axis, ctx.groups, ctx.outputs = axis, groups, (first, count)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        first, count = ctx.outputs
        before, shared, after = grad.split([first, count, grad.shape[-1] - first - count], -1)
        group, replica = divmod(ctx.axis.rank, ctx.axis.size // ctx.groups)
        zeros = torch.zeros_like(shared, dtype=torch.float32)
        parts = torch.stack([shared.float() if number == group else zeros for number in range(ctx.groups)])
        sums = all_reduce_no_grad(parts, ctx.axis)
        total = sums[group] if replica == 0 else zeros
        return torch.cat([before, total.to(grad.dtype), after], -1), None, None, None, None


def _gemm(
    name: str,
    config: RunConfig,
    mesh: Mesh,
    table: AmaxTable | None,
    dtype: torch.dtype,
    step_codes: StepCodes | None,
) -> Gemm:
    train, saves_weights = config.train, saves_weight_codes(config)
    if train.fp8_recipe == "blockwise":
        return BlockGemm(dtype, saves_weights, step_codes)
    axes = mesh.tp, mesh.cp
    scaling = CurrentScaling(train.fp8_format, axes) if table is None else DelayedScaling(table, name, axes)
    return Fp8Gemm(scaling, dtype, train.fp8_wgrad, saves_weights, step_codes)
