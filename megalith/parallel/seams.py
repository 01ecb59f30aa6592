"""The seams of a model: module attributes that parallelism may replace, and the function that replaces them.

A module of models/ is single-device PyTorch. A seam is an attribute that holds a function or an object, by default the
single-device one. `plug` replaces it, and rejects attributes that are not listed here. Properties of a single pass,
such as whether its tokens are sharded, are not seams: Transformer.pass_layout puts them into the pass's Context.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megalith.errors import SeamError
from megalith.models.adapters import Adapter, LinearAdapter, Magnitude, QKVAdapter
from megalith.models.linear import MLP, Linear
from megalith.models.mixers.attention import Attention, RelativeBias
from megalith.models.mixers.mamba2 import Mamba2
from megalith.models.mixers.mla import LatentAttention
from megalith.models.mixers.recurrent import OutputNorm, Recurrent, UnitConvolution
from megalith.models.moe import Experts, GroupedLinear, MoE
from megalith.models.norm import HeadsNorm, Norm
from megalith.models.router import Router
from megalith.models.runnable import Runnable
from megalith.models.transformer import Stack, Transformer
from megalith.models.vocabulary import Embedding

SEAMS: dict[type[nn.Module], dict[str, str]] = {
    Stack: {
        "pass_layout": "sharding of the tokens of a pass: (tokens, trains=, has_position_ids=, cp_size=) → "
        "PassLayout",
        "runner": "runs a list of layers: (layers, x, context) → x",
        "shard_sequence": "shards a per-token tensor like the residual stream: (x [batch, seq], layout) → shard",
        "reduce_sequence": "sums the ranks' results from their shards, for use on all ranks: (x, layout) → sum",
    },
    Transformer: {
        "loss": "the tokens' losses: (x, weight, labels, loss_mask, vocab_size, softcap, context, scale) → their sum",
        "logprobs": "the targets' log-probabilities: (x, weight, targets, vocab_size, softcap, context, objective, "
        "scale) → [batch, seq] or [batch, seq, k], the entropies, and the sum of the objective's losses of tokens",
        "logits": "every entry's logits: (x, weight, vocab_size, softcap, context) → [batch, seq, vocab]",
    },
    Embedding: {
        "lookup": "the tokens' rows for the residual stream: (input_ids, weight, context) → rows",
    },
    Linear: {
        "gemm": "the three matmuls: a Gemm of ops/gemm.py",
        "style": "the matmul and its collectives: (x, weight, bias, gemm, context) → y",
        "rows": "selects the rows of weight and bias that this rank uses: (parameter) → rows",
    },
    MLP: {"activation": "maps the output of fc1 to the input of fc2: (y, bias) → x"},
    GroupedLinear: {
        "gemm": "the three matmuls by group: a GroupedGemm of ops/grouped_gemm.py",
        "first_row": "index of the local bias's first row in the global bias",
        "sum_gradient": "sums the gradient over the ranks that replicate a parameter: (parameter) → parameter",
        "step_cast": "result of `cast` for all passes of a step; None between steps",
    },
    Attention: {
        "core": "core attention, with the signature of ops.attention_core.attention",
        "heads": "the local query heads: Heads",
        "record_logits": "records the largest logits of a training pass: (query, key, …) → None; None: not recorded",
    },
    Norm: {
        "function": "the formula: (x, weight, bias, epsilon, zero_centred) → normed x, as ops.fused_norm.norm"
    },
    RelativeBias: {
        "scores": "selects local heads, and token indices: (weight [buckets, heads], token_index, layout) → both"
    },
    LatentAttention: {"gather": "gathers all tokens of inputs that all heads share: (x, context) → x"},
    Recurrent: {
        "convolution": "the causal convolution, with the signature of ops.causal_conv.causal_conv",
        "recurrence": "the recurrence over tokens: (*inputs, documents) → outputs",
        "document_numbers": "the local tokens' document numbers: (document ends, local seq) → [batch, seq]",
    },
    Mamba2: {"heads_in_group": "number of the local heads of a group"},
    UnitConvolution: {"rows": "selects the units that this rank uses: (parameter) → units"},
    OutputNorm: {"total": "sum of squares along the last dimension, over all ranks: (x) → [..., 1]"},
    HeadsNorm: {"total": "sums over the heads of all ranks: (squares) → squares"},
    Runnable: {"runner": "runs a part of a layer: (method, *args) → its result"},
    Router: {
        "local_tokens": "the shard of a micro-batch's tokens on this rank: a LocalTokens",
        "logits": "the scores before softmax or sigmoid: (x, weight) → float32 x · weightᵀ",
    },
    Experts: {"activation": "the plain activation: (x) → x"},
    MoE: {"dispatch": "sends tokens to experts and back: a Dispatch"},
    Adapter: {"scaling": "factor of the adapter's output; 0 turns it off"},
    LinearAdapter: {
        "gather": "gathers or reduces the output of A for B: (low, context) → low",
        "first_column": "index of the first local column of A in the global A",
        "sum_columns": "sums over the ranks with other columns of the matrix: (squares [rows]) → squares",
    },
    Magnitude: {"rows": "as Linear's"},
    QKVAdapter: {"heads": "as Attention's"},
}


def plug(module: nn.Module, seam: str, value: Any) -> None:
    """Replace a seam of `module` with `value`.

    Args:
        module: the module, of a class in SEAMS.
        seam: name of the attribute.
        value: its new value.

    Raises:
        SeamError: the class has no such seam.
    """
    kinds = [kind for kind in SEAMS if isinstance(module, kind)]
    if not any(seam in SEAMS[kind] for kind in kinds):
        seams = sorted({name for kind in kinds for name in SEAMS[kind]})
        raise SeamError(
            f"{type(module).__name__} has no seam {seam!r}; its seams are {', '.join(seams) or 'none'}; use one "
            "of its seams, or declare the new one in megalith/parallel/seams.py and add a default to the "
            "module"
        )
    setattr(module, seam, value)


def replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Replace one of the module's own parameters by a DTensor or a local tensor."""
    assert name in dict(module.named_parameters(recurse=False)), f"{type(module).__name__} has no {name}"
    setattr(module, name, parameter)
