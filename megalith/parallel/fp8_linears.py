"""Which of a model's matmuls are in FP8, and the scales that they share.

The linears of attention and MLP, latents' among them, and the experts. Embedding, output layer, router, norms, the
core of attention and the loss stay in the compute dtype; so do the first and last layers that `first_last_layers_bf16`
names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.config import ModelConfig, RunConfig
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
}  # fmt: skip


def uses_fp8(number: int, config: RunConfig) -> bool:
    """Whether layer `number` computes in FP8; those of multi-token prediction come after the model's."""
    train, layers = config.train, config.model.num_layers
    if train.fp8_format is None:
        return False
    if not train.first_last_layers_bf16 or number >= layers:
        return True
    return train.num_layers_at_start_in_bf16 <= number < layers - train.num_layers_at_end_in_bf16


def saves_weight_codes(config: RunConfig) -> bool:
    """Whether a weight's codes are saved for dgrad, and not the weight: else whole weights would stay where only shards
    do, or codes of them for each micro-batch in the pipeline."""
    parallel = config.parallel
    sharded = parallel.data_parallel_sharding_strategy == "optim_grads_params"
    return not sharded and parallel.pipeline_model_parallel_size == 1


def casts_weights_once(config: RunConfig) -> bool:
    """Whether weights' codes stay for all micro-batches of a step, of those layers at least that stay whole so long."""
    train = config.train
    return (
        train.fp8_format is not None
        and train.fp8_cache_weights is True
        and config.parallel.keeps_layers_whole
    )


def cast_once(numbers: Sequence[int], config: RunConfig) -> set[int]:
    """Of the layers of a chunk, by their numbers in order, those whose weights are cast to FP8 once a step."""
    parallel = config.parallel
    if not casts_weights_once(config):
        return set()
    if parallel.data_parallel_sharding_strategy == "optim_grads_params":
        numbers = numbers[-parallel.unsharded_layers :]  # of the others codes of whole weights would stay
    return {number for number in numbers if uses_fp8(number, config)}


def fp8_modules(model: Transformer, config: RunConfig) -> dict[str, nn.Module]:
    """The linears and experts of a model, or of a stage of it, that compute in FP8, by name."""
    return {
        f"{layer_name}.{name}": module
        for layer_name, layer in layers_of(model).items()
        if uses_fp8(layer.number, config)
        for name, module in layer.named_modules()
        if isinstance(module, GroupedLinear)
        or (isinstance(module, Linear) and name.rpartition(".")[2] in NAMES)
    }


def amax_table(model: Transformer, config: RunConfig, device: torch.device) -> AmaxTable | None:
    """The table of delayed scaling for the whole `model`; None where there is none."""
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
    """Gives the chunk's linears and experts their Gemms, in place; nothing without `fp8_format`. With
    `log_fp8_interval` the linears' operands can be counted."""
    if config.train.fp8_format is None:
        return
    layers = layers_of(chunk)
    once = cast_once([layer.number for layer in layers.values()], config)
    shares_groups = config.model.query_groups < mesh.tp.size
    stays = tuple(f"{name}." for name, layer in layers.items() if layer.number in once)
    for name, module in fp8_modules(chunk, config).items():
        if isinstance(module, GroupedLinear):
            # expert tensor parallelism cuts what fc1 gives and fc2 takes
            axes = (Axis(), mesh.etp) if name.endswith("linear_fc1") else (mesh.etp, Axis())
            plug(module, "gemm", Fp8GroupedGemm(module.gemm.kernel, *axes))
        else:
            step_codes = StepCodes() if name.startswith(stays) else None
            gemm = _gemm(name, config, mesh, table, chunk.compute_dtype, step_codes)
            plug(module, "gemm", CountedGemm(gemm, device) if config.log.log_fp8_interval else gemm)
            if shares_groups and name.endswith(("linear_qkv", "linear_kv")):
                plug(module, "style", SharedGradient(module.style, mesh.tp, config.model))


class SharedGradient:
    """The style of a linear whose keys and values several ranks of the axis have: of their gradient one process casts
    the sum, so the first of the ranks gets that, and the others get zeros."""

    def __init__(self, style: Callable[..., Tensor], axis: Axis, model: ModelConfig):
        self.style, self.axis = style, axis
        self.groups, self.width = model.query_groups, 2 * model.head_dim

    def __call__(self, *args) -> Tensor:
        return _SharedGradient.apply(self.style(*args), self.axis, self.groups, self.width)


class _SharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, axis: Axis, groups: int, width: int) -> Tensor:
        ctx.axis, ctx.groups, ctx.width = axis, groups, width
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        own, shared = grad.split([grad.shape[-1] - ctx.width, ctx.width], -1)
        group, place = divmod(ctx.axis.rank, ctx.axis.size // ctx.groups)
        zeros = torch.zeros_like(shared, dtype=torch.float32)
        parts = torch.stack([shared.float() if number == group else zeros for number in range(ctx.groups)])
        sums = all_reduce_no_grad(parts, ctx.axis)
        whole = sums[group] if place == 0 else zeros
        return torch.cat([own, whole.to(grad.dtype)], -1), None, None, None


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
