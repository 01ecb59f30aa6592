"""All that parallelism may put into a model's modules, and the one way to do it.

A module of models/ is single-device PyTorch. Where an axis has something to say it has a seam: an attribute that holds
a function or an object, plain to begin with. `plug` puts another one there, and refuses what is not listed here. What a
pass alone decides (whether its tokens are sharded, in how many micro-batches they go side by side) is no seam: it
stands in the pass's Context, where Transformer.pass_layout has put it.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from megalith.errors import SeamError
from megalith.models.adapters import Adapter, QKVAdapter
from megalith.models.encoders.bert import Bert
from megalith.models.linear import MLP, Linear
from megalith.models.mixers.attention import Attention, RelativeBias
from megalith.models.mixers.mla import LatentAttention
from megalith.models.moe import GroupedLinear, MoE
from megalith.models.norm import HeadsNorm
from megalith.models.own_model import Model
from megalith.models.router import Router
from megalith.models.runnable import Runnable
from megalith.models.transformer import Stack, Transformer
from megalith.models.vocabulary import Embedding

SEAMS: dict[type[nn.Module], dict[str, str]] = {
    Stack: {
        "pass_layout": "how the tokens of a pass stand here: (tokens, trains=, has_position_ids=) → PassLayout",
        "runner": "how a list of layers is run: (layers, x, context) → x",
        "shard_sequence": "the residual stream's share of what every token has: (x [batch, seq], layout) → share",
        "reduce_sequence": "the sum of what was made of the shares, used alike by all: (x, layout) → sum",
        "embedding": "None where another pipeline stage has it",
        "final_layernorm": "None where another pipeline stage has it",
    },
    Transformer: {
        "loss": "the tokens' losses: (x, weight, labels, loss_mask, vocab_size, softcap, context, scale) → their sum",
        "logprobs": "the targets' log-probabilities: (x, weight, targets, vocab_size, softcap, context, objective, "
        "scale) → [batch, seq] or [batch, seq, k], the entropies, and the sum of the objective's losses of tokens",
        "logits": "every entry's logits: (x, weight, vocab_size, softcap, context) → [batch, seq, vocab]",
        "output_layer": "None where another pipeline stage has it",
        "vocabulary": "None where another pipeline stage has it",
        "partial_gradients": "names of the parameters of which a rank's gradient is a part of a sum over tp",
        "replicated": "the parameters that are copied over data-parallel ranks, and the sums of their gradients",
    },
    Bert: {head: "None where another pipeline stage has it" for head in ("lm_head", "pooler", "binary_head")},
    Model: {
        "copied": "by name the plain parameters that stand alike on the ranks of an axis",
        "partial_gradients": "as a Transformer's",
        "replicated": "as a Transformer's",
    },
    Embedding: {
        "lookup": "the tokens' rows for the residual stream: (input_ids, weight, context) → rows",
        "position_embeddings": "None where another pipeline stage has them",
        "tokentype_embeddings": "None where another pipeline stage has them",
        "layernorm": "None where another pipeline stage has it",
    },
    Linear: {
        "gemm": "the three matmuls: a Gemm of ops/gemm.py",
        "style": "the matmul and its collectives: (x, weight, bias, gemm, context) → y",
        "rows": "the rows of weight and bias that are used here: (parameter) → rows of it",
    },
    MLP: {"activation": "what is made of fc1's result for fc2: (y, bias) → x"},
    GroupedLinear: {
        "gemm": "the three matmuls by group: a GroupedGemm of ops/grouped_gemm.py",
        "first_row": "the number of the first row of the bias here among all",
        "step_cast": "weight and bias as `cast` gives them, for all passes of a step; None between steps",
    },
    Attention: {
        "core": "attention of queries over keys and values, as ops.attention_core.attention",
        "heads": "which query heads are here: Heads",
    },
    RelativeBias: {"scores": "of which heads and places: (weight [buckets, heads], places, layout) → both"},
    LatentAttention: {"gather": "what every rank's heads use alike, of all tokens: (x, context) → x"},
    HeadsNorm: {"total": "the sum over the ranks' heads: (squares) → squares"},
    Runnable: {"runner": "how a part of a layer is run: (method, *args) → its result"},
    Router: {"local_tokens": "the shard of a micro-batch's tokens on this rank: a LocalTokens"},
    MoE: {"dispatch": "how tokens and experts come together: a Dispatch"},
    Adapter: {
        "gather": "what B takes of A's result: (low, context) → low",
        "first_column": "the number of A's first column among all",
        "scaling": "what its result is multiplied by: 0 switches it off",
    },
    QKVAdapter: {"heads": "as Attention's"},
}


def plug(module: nn.Module, seam: str, value: Any) -> None:
    """Puts `value` into a seam of `module`. Raises SeamError where there is none of this name."""
    kinds = [kind for kind in SEAMS if isinstance(module, kind)]
    if not any(seam in SEAMS[kind] for kind in kinds):
        known = sorted({name for kind in kinds for name in SEAMS[kind]})
        raise SeamError(
            f"a {type(module).__name__} has no seam {seam!r}: it has {', '.join(known) or 'none'}; declare it in "
            "megalith/parallel/seams.py and give the module a plain one, or use one of these"
        )
    setattr(module, seam, value)


def replace_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Puts a shard, a DTensor or a plain tensor, in the place of one of the module's own parameters."""
    assert name in dict(module.named_parameters(recurse=False)), f"{type(module).__name__} has no {name}"
    setattr(module, name, parameter)
