"""GPT-1: GPT-2's matrices with post-LN, and no norm before the first layer.

A layer's last norm is the first norm of the next layer in Megalith. `gelu` is the tanh approximation.
"""

from __future__ import annotations

from megalith.bridge.families.layernorm_decoders import GPT2_ALIASES, GPT2_SETTINGS, GPT2_TENSORS
from megalith.bridge.families.llama import TIED
from megalith.bridge.family import Family
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, FixedSettings

# fmt: off
OPENAI_GPT = Family(
    architecture="OpenAIGPTLMHeadModel",
    model_type="openai-gpt",
    tensors={
        **GPT2_TENSORS,
        "embedding.word_embeddings.weight":
            same("transformer.tokens_embed.weight"),
        "embedding.position_embeddings.weight":
            same("transformer.positions_embed.weight"),
        "layers.{layer}.input_layernorm.weight":
            same("transformer.h.{before}.ln_2.weight"),
        "layers.{layer}.input_layernorm.bias":
            same("transformer.h.{before}.ln_2.bias"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same("transformer.h.{layer}.ln_1.weight"),
        "layers.{layer}.pre_mlp_layernorm.bias":
            same("transformer.h.{layer}.ln_1.bias"),
        "final_layernorm.weight":
            same("transformer.h.{last}.ln_2.weight"),
        "final_layernorm.bias":
            same("transformer.h.{last}.ln_2.bias"),
    },
    settings=(
        *[row for row in GPT2_SETTINGS if row.setting not in ("activation", "ffn_hidden_size")],
        Field("activation", "afn", default="gelu",
              values={"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}),
        TIED,
        FixedSettings(position_embedding_type="learned_absolute", apply_residual_connection_post_layernorm=True,
                      add_first_input_layernorm=False),
    ),
    tied="lm_head.weight",
    aliases=GPT2_ALIASES,
    ignored=(r"\.attn\.bias$", r"(^|\.)position_ids$"),
    prefix="transformer.",
)
# fmt: on

FAMILIES = (OPENAI_GPT,)
