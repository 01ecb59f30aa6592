"""Replacement of a model's operators by batch-invariant ones (ops/batch_invariant), for the trainer and the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.local_shards import local
from megalith.models.linear import MLP, Linear
from megalith.models.loss import all_logits, cross_entropy_sum, target_logprobs
from megalith.models.mixers.attention import Attention
from megalith.models.mixers.mamba2 import GatedGroupNorm
from megalith.models.mixers.recurrent import OutputNorm, Recurrent
from megalith.models.moe import Experts, GroupedLinear, MoE
from megalith.models.norm import Norm
from megalith.models.router import Router
from megalith.models.transformer import Transformer
from megalith.ops.batch_invariant import norms, recurrences
from megalith.ops.batch_invariant.elementwise import activation_by_whole_vectors
from megalith.ops.batch_invariant.invariant_attention import attention
from megalith.ops.batch_invariant.matmul import (
    BatchInvariantGemm,
    BatchInvariantGroupedGemm,
    BatchInvariantGroupedRowGemm,
    BatchInvariantRowGemm,
    float32_matmul,
)
from megalith.ops.batch_invariant.recurrences import with_gradient_of
from megalith.ops.batch_invariant.token_logprobs import BATCH_INVARIANT
from megalith.ops.delta_rule import gated_delta_rule
from megalith.ops.state_space import state_space
from megalith.parallel.context.full_sequences import ShardedOrFull
from megalith.parallel.context.invariant_context import invariant_convolution, invariant_recurrence
from megalith.parallel.seams import plug
from megalith.parallel.tensor.ordered_reduce import OrderedRow, ordered_columns, sum_over_neighbours
from megalith.parallel.tensor.roles import role_of
from megalith.parallel.tensor.vocab_parallel import VocabParallel

INVARIANT_RECURRENCES = {
    gated_delta_rule: recurrences.delta_rule_of_documents,
    state_space: recurrences.state_space_of_documents,
}
"""Batch-invariant forward pass of each recurrence."""
SEAMS = {"loss": cross_entropy_sum, "logprobs": target_logprobs, "logits": all_logits}


def apply_batch_invariant(
    model: Transformer,
    tp: Axis,
    etp: Axis = Axis(),  # noqa: B008 (immutable)
    core: Callable[..., Tensor] = attention,
    cp: Axis = Axis(),  # noqa: B008 (immutable)
) -> None:
    """Replace the forward pass's operators by batch-invariant ones, in place.

    config.rules.batch_invariant_rules rejects models and layouts that use operators without a batch-invariant version.

    Args:
        model: the model or a stage of it, after tensor and expert parallelism are applied and before its modules are
            wrapped for recomputation.
        tp: the tensor-parallel axis.
        etp: the axis of expert tensor parallelism.
        core: the core of attention.
        cp: the context-parallel axis.
    """
    for name, module in model.named_modules():
        match module:
            case Linear() if _is_row_parallel(model, name, module):
                plug(module, "gemm", BatchInvariantRowGemm(local(module.weight).shape[1], tp.size))
                if tp.size > 1:
                    plug(module, "style", OrderedRow(tp))
            case Linear():
                plug(module, "gemm", BatchInvariantGemm())
            case GroupedLinear() if name.endswith("linear_fc2"):
                reduce = partial(ordered_columns, axis=etp) if etp.size > 1 else None
                sizes = local(module.weight).shape[2], etp.size
                plug(module, "gemm", BatchInvariantGroupedRowGemm(*sizes, reduce, module.gemm.kernel))
            case GroupedLinear():
                plug(module, "gemm", BatchInvariantGroupedGemm(module.gemm.kernel))
            case Attention():
                plug(module, "core", core)
            case Recurrent():
                _apply_to_recurrent(module, cp)
            case GatedGroupNorm():
                _apply_to_group_norm(module, tp, -(-tp.size // model.config.mamba_num_groups))
            case OutputNorm():
                plug(module, "total", norms.sum_squares)
            case Norm():
                plug(module, "function", norms.norm)
            case Router():
                plug(module, "logits", float32_matmul)
            case MLP() | Experts():
                plug(module, "activation", activation_by_whole_vectors(module.activation))
            case MoE():
                plug(module, "dispatch", module.dispatch.adding_in_order())
    for seam, ordinary in SEAMS.items():
        function = getattr(model, seam)
        is_vocab_parallel = isinstance(getattr(function, "__self__", None), VocabParallel)
        if function is ordinary or is_vocab_parallel:  # a reward model has a loss of its own
            plug(model, seam, partial(function, math=BATCH_INVARIANT))


def _apply_to_recurrent(mixer: Recurrent, cp: Axis) -> None:
    ordinary = mixer.recurrence
    plug(mixer, "convolution", recurrences.convolution)
    if cp.size > 1:
        sharded = partial(invariant_convolution, cp)
        plug(mixer, "convolution", ShardedOrFull(sharded, recurrences.convolution))
    if ordinary is None:
        return
    if cp.size == 1:
        exact = INVARIANT_RECURRENCES[ordinary]
        plug(mixer, "recurrence", partial(with_gradient_of, ordinary, exact))
        return
    exact = INVARIANT_RECURRENCES[ordinary.full]
    sharded = partial(with_gradient_of, ordinary.sharded, partial(invariant_recurrence, cp, exact))
    plug(mixer, "recurrence", ShardedOrFull(sharded, partial(with_gradient_of, ordinary.full, exact)))


def _apply_to_group_norm(norm: GatedGroupNorm, tp: Axis, ranks: int) -> None:
    """Make a group norm add the squares of a group in an order that does not depend on the number of `ranks` that share
    it.
    """
    exact = partial(norms.sum_squares, ranks=ranks)
    if ranks > 1:
        exact = partial(with_gradient_of, norm.total, partial(_sum_over_group, tp, ranks))
    plug(norm, "total", exact)


def _sum_over_group(tp: Axis, ranks: int, x: Tensor) -> Tensor:
    return sum_over_neighbours(tp, ranks, norms.sum_squares(x, ranks))


def _is_row_parallel(model: Transformer, name: str, module: Linear) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return role_of(name, module, owner=owner).style == "row"
