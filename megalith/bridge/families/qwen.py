"""Qwen2 and 2.5: Llama with biases in queries, keys and values. Qwen3: without them, with norms of queries and keys."""

from __future__ import annotations

from megalith.bridge.families.llama import IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import EveryLayer, Ours, Theirs

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
