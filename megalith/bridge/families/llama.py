"""Llama 2 and 3.x, and families with small differences to them.

Mistral: some releases have a sliding window.

Phi-3: fused matrices; some releases have a window, LongRoPE or partial RoPE (Phi-4 mini).

SmolLM3: layers without RoPE.

OLMo 2: norms after attention and MLP, QK norms over all heads together.

Gemma: GELU gates, scaled embeddings, norms that multiply by 1 + weight. Gemma 2 and Gemma 3 (text) also have windows in
most layers, and norms before and after attention and MLP.

Qwen2 and 2.5: QKV biases. Qwen3: QK norms and no biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.family import Family
from megalith.bridge.rope_settings import LongRope, Rope, RopeByLayer
from megalith.bridge.rows import gate_up, qkv, same
from megalith.bridge.settings import (
    Field,
    FixedSettings,
    RequiredKeys,
    SameInAllLayers,
    Tree,
    Window,
    WindowsByLayer,
    WrittenKeys,
)
from megalith.config import ModelConfig

# fmt: off
TENSORS = {
    "embedding.word_embeddings.weight":
        same("model.embed_tokens.weight"),
    "layers.{layer}.input_layernorm.weight":
        same("model.layers.{layer}.input_layernorm.weight"),
    "layers.{layer}.self_attention.linear_qkv.weight":
        qkv("model.layers.{layer}.self_attn.q_proj.weight",
            "model.layers.{layer}.self_attn.k_proj.weight",
            "model.layers.{layer}.self_attn.v_proj.weight"),
    "layers.{layer}.self_attention.linear_qkv.bias":
        qkv("model.layers.{layer}.self_attn.q_proj.bias",
            "model.layers.{layer}.self_attn.k_proj.bias",
            "model.layers.{layer}.self_attn.v_proj.bias"),
    "layers.{layer}.self_attention.linear_proj.weight":
        same("model.layers.{layer}.self_attn.o_proj.weight"),
    "layers.{layer}.self_attention.linear_proj.bias":
        same("model.layers.{layer}.self_attn.o_proj.bias"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("model.layers.{layer}.post_attention_layernorm.weight"),
    "layers.{layer}.mlp.linear_fc1.weight":
        gate_up("model.layers.{layer}.mlp.gate_proj.weight",
                "model.layers.{layer}.mlp.up_proj.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        gate_up("model.layers.{layer}.mlp.gate_proj.bias",
                "model.layers.{layer}.mlp.up_proj.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("model.layers.{layer}.mlp.down_proj.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("model.layers.{layer}.mlp.down_proj.bias"),
    "final_layernorm.weight":
        same("model.norm.weight"),
    "output_layer.weight":
        same("lm_head.weight"),
}
QK_NORMS = {
    "layers.{layer}.self_attention.q_layernorm.weight":
        same("model.layers.{layer}.self_attn.q_norm.weight"),
    "layers.{layer}.self_attention.k_layernorm.weight":
        same("model.layers.{layer}.self_attn.k_norm.weight"),
}

SIZES = (
    Field("num_layers", "num_hidden_layers"),
    Field("hidden_size", "hidden_size"),
    Field("ffn_hidden_size", "intermediate_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("num_query_groups", "num_key_value_heads", default=None),
    Field("kv_channels", "head_dim", default=None),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings"),
    Field("layernorm_epsilon", "rms_norm_eps", default=1e-6),
    Field("attention_dropout", "attention_dropout", default=0.0),
    Field("init_method_std", "initializer_range", default=0.02),
)
TIED, UNTIED = (Field("untie_embeddings_and_output_weights", "tie_word_embeddings", default=tied,
                      values={True: False, False: True}) for tied in (True, False))  # where config.json is silent
ATTENTION_BIAS = (
    Field("add_qkv_bias", "attention_bias", default=False),
    Field("add_proj_bias", "attention_bias", default=False),
)
SETTINGS = (  # without what each family says of its biases
    *SIZES,
    UNTIED,
    Rope(),
    FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0),
    RequiredKeys(hidden_act="silu"),
)
# fmt: on

IGNORED = (r"rotary_emb\.inv_freq$",)

LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    tensors=TENSORS,
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


class LayersWithoutRope:
    """Maps `no_rope_layers`, or else `no_rope_layer_interval`, to the layers without RoPE."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        uses_rope = hf_config.get("no_rope_layers")
        if not uses_rope:
            return {"no_rope_freq": hf_config.get("no_rope_layer_interval", 4)}
        skipped = [int(not layer) for layer in uses_rope[: hf_config["num_hidden_layers"]]]
        return {"no_rope_freq": skipped} if any(skipped) else {}

    def write(self, model: ModelConfig) -> Tree:
        skipped = model.layers_without_rope or [0] * model.num_layers
        return {"no_rope_layers": [1 - layer for layer in skipped]}


SMOLLM3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True},
    tensors=TENSORS,
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        LayersWithoutRope(),
        RequiredKeys(use_sliding_window=False),
        SameInAllLayers("layer_types", "full_attention"),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults={"num_key_value_heads": 8},
    tensors=TENSORS,
    settings=(*SETTINGS, Window(default=4096)),
    tied="lm_head.weight",
    ignored=IGNORED,
)


# fmt: off
PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    defaults={"rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv("model.layers.{layer}.self_attn.qkv_proj.weight"),
        "layers.{layer}.mlp.linear_fc1.weight":
            gate_up("model.layers.{layer}.mlp.gate_up_proj.weight"),
    },
    settings=(
        *SIZES,
        UNTIED,
        LongRope(),
        Window(default=None),
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0),
        RequiredKeys(hidden_act="silu", resid_pdrop=0.0),
        WrittenKeys(pad_token_id=None),  # by default an entry that a smaller vocabulary does not have
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


# fmt: off
OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    defaults={"rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        **QK_NORMS,
        "layers.{layer}.post_attention_layernorm.weight":
            same("model.layers.{layer}.post_attention_layernorm.weight"),
        "layers.{layer}.post_mlp_layernorm.weight":
            same("model.layers.{layer}.post_feedforward_layernorm.weight"),
    },
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        FixedSettings(norm_placement="post", qk_layernorm=True, qk_layernorm_full_width=True),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


# fmt: off
GEMMA2_TENSORS = {
    **TENSORS,
    "layers.{layer}.post_attention_layernorm.weight":
        same("model.layers.{layer}.post_attention_layernorm.weight"),
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("model.layers.{layer}.pre_feedforward_layernorm.weight"),
    "layers.{layer}.post_mlp_layernorm.weight":
        same("model.layers.{layer}.post_feedforward_layernorm.weight"),
}

GATES = {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu", "relu": "relu"}
GEMMA_SETTINGS = (
    *SIZES,
    *ATTENTION_BIAS,
    TIED,
    FixedSettings(normalization="RMSNorm", layernorm_zero_centered_gamma=True, gated_linear_unit=True,
                  scale_embeddings=True, add_bias_linear=False, hidden_dropout=0.0),
)
SANDWICH_SETTINGS = (
    *GEMMA_SETTINGS,
    Field("activation", "hidden_activation", default="gelu_pytorch_tanh", values={**GATES, "gelu": "gelu"}),
    Field("query_pre_attn_scalar", "query_pre_attn_scalar", default=256),
    FixedSettings(norm_placement="sandwich"),
)

GEMMA = Family(
    architecture="GemmaForCausalLM",
    model_type="gemma",
    defaults={"num_key_value_heads": 16, "head_dim": 256},
    tensors=TENSORS,
    settings=(
        *GEMMA_SETTINGS,
        Rope(),
        # Old files have gelu but mean gelu_tanh. Versions of transformers differ in which of the keys they read.
        Field("activation", "hidden_act", default="gelu_pytorch_tanh", values={**GATES, "gelu": "gelu_tanh"}),
        Field("activation", "hidden_activation", default=None, values={**GATES, "gelu": "gelu"}),
        RequiredKeys(use_bidirectional_attention=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    defaults={"num_key_value_heads": 4, "head_dim": 256},
    tensors=GEMMA2_TENSORS,
    settings=(
        *SANDWICH_SETTINGS,
        Rope(),
        RequiredKeys(use_bidirectional_attention=None),
        WindowsByLayer(every=2),
        Field("attn_logit_softcapping", "attn_logit_softcapping", default=50.0),
        Field("final_logit_softcapping", "final_logit_softcapping", default=30.0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

GEMMA3 = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults={"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
            "max_position_embeddings": 131072},
    tensors={**GEMMA2_TENSORS, **QK_NORMS},
    settings=(
        *SANDWICH_SETTINGS,
        RopeByLayer(),
        # transformers reads no attn_logit_softcapping for Gemma 3, others do
        RequiredKeys(use_bidirectional_attention=False, attn_logit_softcapping=None),
        WindowsByLayer(every=6),
        FixedSettings(qk_layernorm=True),
        Field("final_logit_softcapping", "final_logit_softcapping", default=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


QWEN2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    tensors=TENSORS,
    settings=(
        *SETTINGS,
        FixedSettings(add_qkv_bias=True),
        RequiredKeys(use_sliding_window=False),
        SameInAllLayers("layer_types", "full_attention"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    tensors={**TENSORS, **QK_NORMS},
    settings=(
        *SETTINGS,
        FixedSettings(qk_layernorm=True),
        RequiredKeys(attention_bias=False, use_sliding_window=False),
        SameInAllLayers("layer_types", "full_attention"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)


FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA2, GEMMA3, OLMO2, PHI3, SMOLLM3)
