"""Replace a model's operators by batch-invariant ones (ops/batch_invariant), in trainer and engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.local_shards import local
from megalith.models.linear import MLP, Linear
from megalith.models.loss import all_logits, cross_entropy_sum, target_logprobs
from megalith.models.mixers.attention import Attention
from megalith.models.moe import Experts, GroupedLinear, MoE
from megalith.models.norm import Norm
from megalith.models.router import Router
from megalith.models.transformer import Transformer
from megalith.ops.batch_invariant import norms
from megalith.ops.batch_invariant.elementwise import activation_by_whole_vectors
from megalith.ops.batch_invariant.invariant_attention import attention
from megalith.ops.batch_invariant.matmul import (
    BatchInvariantGemm,
    BatchInvariantGroupedGemm,
    BatchInvariantGroupedRowGemm,
    BatchInvariantRowGemm,
    float32_matmul,
)
from megalith.ops.batch_invariant.token_logprobs import BATCH_INVARIANT
from megalith.parallel.seams import plug
from megalith.parallel.tensor.ordered_reduce import OrderedRow, ordered_columns
from megalith.parallel.tensor.roles import role_of
from megalith.parallel.tensor.vocab_parallel import VocabParallel

SEAMS = {"loss": cross_entropy_sum, "logprobs": target_logprobs, "logits": all_logits}


def apply_batch_invariant(
    model: Transformer,
    tp: Axis,
    etp: Axis = Axis(),  # noqa: B008 (immutable)
    core: Callable[..., Tensor] = attention,
) -> None:
    """Replace the operators of the forward pass by batch-invariant ones, in place.

    config.rules.batch_invariant_rules rejects models and layouts with others.

    Args:
        model: the model or a stage of it, after tensor and expert parallelism are applied and before recomputation
            wraps its parts.
        tp: the tensor-parallel axis.
        etp: the axis of expert tensor parallelism.
        core: the core of attention.
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


def _is_row_parallel(model: Transformer, name: str, module: Linear) -> bool:
    owner = model.get_submodule(name.rpartition(".")[0])
    return role_of(name, module, owner=owner).style == "row"
