"""Qwen2 and 2.5: Llama with biases in queries, keys and values. Qwen3: without them, with norms of queries and keys;
with experts too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import IGNORED, SETTINGS, TENSORS
from megalith.bridge.families.mixtral import EXPERTS, NORMALIZED
from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import EveryLayer, Field, Ours, Theirs, Tree
from megalith.config import ModelConfig

QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    tensors=TENSORS,
    settings=(
        *SETTINGS,
        Ours(add_qkv_bias=True),
        Theirs(use_sliding_window=False),
        EveryLayer("layer_types", "full_attention"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    tensors={
        **TENSORS,
        "layers.{layer}.self_attention.q_layernorm.weight": same(
            "model.layers.{layer}.self_attn.q_norm.weight"
        ),
        "layers.{layer}.self_attention.k_layernorm.weight": same(
            "model.layers.{layer}.self_attn.k_norm.weight"
        ),
    },
    settings=(
        *SETTINGS,
        Ours(qk_layernorm=True),
        Theirs(attention_bias=False, use_sliding_window=False),
        EveryLayer("layer_types", "full_attention"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


class ExpertCount:
    """`num_experts`, which transformers 5 writes as `num_local_experts`."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        return {"num_experts": theirs.get("num_experts") or theirs.get("num_local_experts") or 128}

    def write(self, model: ModelConfig) -> Tree:
        return {"num_experts": model.num_experts}


class SparseLayers:
    """Every `decoder_sparse_step`-th layer has experts, but for those of `mlp_only_layers`."""

    def read(self, theirs: Mapping[str, Any]) -> Tree:
        step, dense = theirs.get("decoder_sparse_step") or 1, theirs.get("mlp_only_layers") or ()
        layers = range(theirs["num_hidden_layers"])
        return {"moe_layer_freq": [int(n not in dense and (n + 1) % step == 0) for n in layers]}

    def write(self, model: ModelConfig) -> Tree:
        dense = sorted(set(range(model.num_layers)) - set(model.expert_layers))
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


QWEN3_MOE = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    absent={"num_key_value_heads": 4},
    tensors={**QWEN3.tensors, **EXPERTS},
    settings=(
        *SETTINGS,
        ExpertCount(),
        Field("moe_router_topk", "num_experts_per_tok", default=8),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=768),
        NORMALIZED,
        SparseLayers(),
        Ours(qk_layernorm=True),
        Theirs(attention_bias=False, use_sliding_window=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
