"""OLMo 2: Llama with its norms behind attention and MLP, and one over all queries, one over all keys together."""

from __future__ import annotations

from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import Ours, Writes

# fmt: off
OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    absent={"rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        "layers.{layer}.self_attention.q_layernorm.weight":
            same("model.layers.{layer}.self_attn.q_norm.weight"),
        "layers.{layer}.self_attention.k_layernorm.weight":
            same("model.layers.{layer}.self_attn.k_norm.weight"),
        "layers.{layer}.post_attention_layernorm.weight":
            same("model.layers.{layer}.post_attention_layernorm.weight"),
        "layers.{layer}.post_mlp_layernorm.weight":
            same("model.layers.{layer}.post_feedforward_layernorm.weight"),
    },
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        Ours(norm_placement="post", qk_layernorm=True, qk_layernorm_full_width=True),
        Writes(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on
