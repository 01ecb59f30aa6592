"""Decoders with RoPE and an ungated MLP: Arcee (AFM), Jais 2, Nemotron and Persimmon.

All use squared ReLU by default. Arcee is Llama otherwise. Jais 2 has LayerNorm and biases. Nemotron has LayerNorm that
multiplies by 1 + weight, and partial RoPE. Persimmon has one matrix for queries, keys and values, grouped by head, and
LayerNorm on queries and keys.
"""

from __future__ import annotations

from megalith.bridge.families.layernorm_decoders import CheckHeadDim, activation
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SIZES, TENSORS, UNTIED
from megalith.bridge.families.separate_qkv import ROWS
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import PartialRope, Rope
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, FixedSettings

# fmt: off
UP = {
    "layers.{layer}.mlp.linear_fc1.weight":
        same("model.layers.{layer}.mlp.up_proj.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        same("model.layers.{layer}.mlp.up_proj.bias"),
}
PLAIN = (
    *[row for row in SIZES if row.setting != "layernorm_epsilon"],
    UNTIED,
    activation("hidden_act", "relu2"),
)
ARCEE = Family(
    architecture="ArceeForCausalLM",
    model_type="arcee",
    tensors=TENSORS | UP,
    settings=(
        *PLAIN,
        Field("layernorm_epsilon", "rms_norm_eps", default=1e-5),
        Rope(),
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        FixedSettings(normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

JAIS2 = Family(
    architecture="Jais2ForCausalLM",
    model_type="jais2",
    defaults={"attention_bias": True},
    tensors=ROWS | UP,
    settings=(
        *PLAIN,
        Field("layernorm_epsilon", "layer_norm_eps", default=1e-5),
        Rope(),
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=True),
        FixedSettings(normalization="LayerNorm", add_bias_linear=False, hidden_dropout=0.0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

NEMOTRON = Family(
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    defaults={"initializer_range": 0.0134},
    tensors=ROWS | UP,
    settings=(
        *PLAIN,
        Field("layernorm_epsilon", "norm_eps", default=1e-5),
        PartialRope(0.5),
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        FixedSettings(normalization="LayerNorm", layernorm_zero_centered_gamma=True, add_bias_linear=False,
                      hidden_dropout=0.0),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

IN_LAYER = "model.layers.{layer}."
PERSIMMON = Family(
    architecture="PersimmonForCausalLM",
    model_type="persimmon",
    tensors={
        **ROWS,
        **{f"layers.{{layer}}.self_attention.linear_qkv.{part}":
            same(f"{IN_LAYER}self_attn.query_key_value.{part}") for part in ("weight", "bias")},
        **{f"layers.{{layer}}.self_attention.linear_proj.{part}":
            same(f"{IN_LAYER}self_attn.dense.{part}") for part in ("weight", "bias")},
        **{f"layers.{{layer}}.self_attention.{which}_layernorm.{part}":
            same(f"{IN_LAYER}self_attn.{which}_layernorm.{part}") for which in "qk" for part in ("weight", "bias")},
        **{f"layers.{{layer}}.mlp.linear_fc1.{part}":
            same(f"{IN_LAYER}mlp.dense_h_to_4h.{part}") for part in ("weight", "bias")},
        **{f"layers.{{layer}}.mlp.linear_fc2.{part}":
            same(f"{IN_LAYER}mlp.dense_4h_to_h.{part}") for part in ("weight", "bias")},
        **{f"final_layernorm.{part}": same(f"model.final_layernorm.{part}") for part in ("weight", "bias")},
    },
    settings=(
        *[row for row in PLAIN if row.setting not in ("num_query_groups", "kv_channels")],
        Field("layernorm_epsilon", "layer_norm_eps", default=1e-5),
        PartialRope(0.5),
        CheckHeadDim(),
        Field("qk_layernorm", "qk_layernorm", default=True),
        Field("hidden_dropout", "hidden_dropout", default=0.0),
        FixedSettings(normalization="LayerNorm"),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (ARCEE, JAIS2, NEMOTRON, PERSIMMON)
