"""Replace a model's operators by batch-invariant ones (ops/batch_invariant), in trainer and engine."""

from __future__ import annotations

from functools import partial

from megalith.models.linear import MLP, Linear
from megalith.models.loss import all_logits, cross_entropy_sum, target_logprobs
from megalith.models.mixers.attention import Attention
from megalith.models.moe import Dispatch, Experts, GroupedLinear, MoE
from megalith.models.norm import Norm
from megalith.models.router import Router
from megalith.models.transformer import Transformer
from megalith.ops.batch_invariant import norms
from megalith.ops.batch_invariant.elementwise import activation_by_whole_vectors
from megalith.ops.batch_invariant.invariant_attention import attention
from megalith.ops.batch_invariant.matmul import (
    BatchInvariantGemm,
    BatchInvariantGroupedGemm,
    float32_matmul,
)
from megalith.ops.batch_invariant.token_logprobs import BATCH_INVARIANT
from megalith.parallel.seams import plug

SEAMS = {"loss": cross_entropy_sum, "logprobs": target_logprobs, "logits": all_logits}


def apply_batch_invariant(model: Transformer) -> None:
    """Replace the operators of the forward pass by batch-invariant ones, in place.

    config.rules.batch_invariant_rules rejects models and layouts with others.

    Args:
        model: the model or a stage of it, before recomputation wraps its parts.
    """
    for module in model.modules():
        match module:
            case Linear():
                plug(module, "gemm", BatchInvariantGemm())
            case GroupedLinear():
                plug(module, "gemm", BatchInvariantGroupedGemm(module.gemm.kernel))
            case Attention():
                plug(module, "core", attention)
            case Norm():
                plug(module, "function", norms.norm)
            case Router():
                plug(module, "logits", float32_matmul)
            case MLP() | Experts():
                plug(module, "activation", activation_by_whole_vectors(module.activation))
            case MoE():
                plug(module, "dispatch", Dispatch(model.config, in_order=True))
    for seam, ordinary in SEAMS.items():
        if getattr(model, seam) is ordinary:  # a reward model has a loss of its own
            plug(model, seam, partial(ordinary, math=BATCH_INVARIANT))
