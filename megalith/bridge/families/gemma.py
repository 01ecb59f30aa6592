"""Gemma 2 and the text model of Gemma 3: windows in most layers, norms on both sides, GELU gates, scaled embeddings."""

from __future__ import annotations

from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SIZES, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, Ours, Rope, RopeByLayer, Theirs, WindowsByLayer

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
GEMMA3_TENSORS = {
    **GEMMA2_TENSORS,
    "layers.{layer}.self_attention.q_layernorm.weight":
        same("model.layers.{layer}.self_attn.q_norm.weight"),
    "layers.{layer}.self_attention.k_layernorm.weight":
        same("model.layers.{layer}.self_attn.k_norm.weight"),
}
SETTINGS = (
    *SIZES,
    *ATTENTION_BIAS,
    Field("untie_embeddings_and_output_weights", "tie_word_embeddings", default=True,
          values={True: False, False: True}),
    Field("activation", "hidden_activation", default="gelu_pytorch_tanh",
          values={"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "relu": "relu"}),
    Field("query_pre_attn_scalar", "query_pre_attn_scalar", default=256),
    Ours(normalization="RMSNorm", layernorm_zero_centered_gamma=True, norm_placement="sandwich",
         gated_linear_unit=True, scale_embeddings=True, add_bias_linear=False, hidden_dropout=0.0),
)

GEMMA2 = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    absent={"num_key_value_heads": 4, "head_dim": 256},
    tensors=GEMMA2_TENSORS,
    settings=(
        *SETTINGS,
        Rope(),
        Theirs(use_bidirectional_attention=None),
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
    absent={"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    tensors=GEMMA3_TENSORS,
    settings=(
        *SETTINGS,
        RopeByLayer(),
        Theirs(use_bidirectional_attention=False),
        WindowsByLayer(every=6),
        Ours(qk_layernorm=True),
        Field("attn_logit_softcapping", "attn_logit_softcapping", default=None),
        Field("final_logit_softcapping", "final_logit_softcapping", default=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on
