"""Llama 2 and 3.x, and what is built like them: Mistral, Qwen2 and Qwen3 change a few rows.

Mistral: Llama, in some releases with a sliding window.

Phi-3: Llama with fused matrices, in some releases a window, LongRoPE, or heads that turn in part (Phi-4 mini).
"""

from __future__ import annotations

from megalith.bridge.family import Family
from megalith.bridge.rows import gate_up, qkv, same
from megalith.bridge.settings import Field, LongRope, Ours, Rope, Theirs, Window, Writes

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
UNTIED = Field("untie_embeddings_and_output_weights", "tie_word_embeddings", default=False,
               values={True: False, False: True})
ATTENTION_BIAS = (
    Field("add_qkv_bias", "attention_bias", default=False),
    Field("add_proj_bias", "attention_bias", default=False),
)
SETTINGS = (  # without what each family says of its biases
    *SIZES,
    UNTIED,
    Rope(),
    Ours(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0),
    Theirs(hidden_act="silu"),
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


MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    absent={"num_key_value_heads": 8},
    tensors=TENSORS,
    settings=(*SETTINGS, Window(default=4096)),
    tied="lm_head.weight",
    ignored=IGNORED,
)


# fmt: off
PHI3 = Family(
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    absent={"rms_norm_eps": 1e-5},
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
        Ours(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0),
        Theirs(hidden_act="silu"),
        Writes(pad_token_id=None),  # by default an entry that a smaller vocabulary does not have
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on
