"""Families that scale what Llama leaves as it is.

Granite: factors on the embedding, on what goes into the residual stream, on attention's scores and on the logits; with
experts in one tensor of all, gates before ups.

Cohere (Command-R): attention and MLP side by side behind one LayerNorm without a bias, pairs that turn side by side in
a head, a factor on the logits. Command-R+ norms each head of queries and keys. Cohere 2 (Command R7B) has windows, and
no positions in the layers without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, QK_NORMS, SETTINGS, SIZES, TENSORS, TIED
from megalith.bridge.family import Family
from megalith.bridge.rows import gate_up, same, stacked
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Rope, Tree, WindowsByLayer
from megalith.config import ModelConfig


class LogitScale:
    """`logit_scale` multiplies the logits."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {"logits_scaling": 1 / (hf_config.get("logit_scale") or 0.0625)}

    def write(self, model: ModelConfig) -> Tree:
        return {"logit_scale": 1 / model.logits_scaling}


class NormsOfHeads:
    """`use_qk_norm`: queries and keys are normed, with weights for each head (Command-R+)."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        asked = bool(hf_config.get("use_qk_norm"))
        return {"qk_layernorm": asked, "qk_layernorm_per_head": asked}

    def write(self, model: ModelConfig) -> Tree:
        return {"use_qk_norm": model.qk_layernorm_per_head}


class PositionsInWindows:
    """Layers without a window have no rotary positions."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        fields, count = WINDOWS.read(hf_config), hf_config["num_hidden_layers"]
        every = fields.get("window_attn_skip_freq", [0] * count)
        if isinstance(every, int):
            every = [int(not every or (n + 1) % every != 0) for n in range(count)]
        return {"no_rope_freq": [1 - windowed for windowed in every]}

    def write(self, model: ModelConfig) -> Tree:
        return {}


# fmt: off
FACTORS = (
    Field("embedding_multiplier", "embedding_multiplier", default=1.0),
    Field("residual_multiplier", "residual_multiplier", default=1.0),
    Field("softmax_scale", "attention_multiplier", default=1.0),
    Field("logits_scaling", "logits_scaling", default=1.0),
)
GRANITE = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    tensors=TENSORS,
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        *FACTORS,
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

GRANITE_MOE = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    tensors={
        **TENSORS,
        "layers.{layer}.mlp.router.weight":
            same("model.layers.{layer}.block_sparse_moe.router.layer.weight"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            stacked(gate_up("model.layers.{layer}.block_sparse_moe.input_linear.weight")),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            stacked(same("model.layers.{layer}.block_sparse_moe.output_linear.weight")),
    },
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        *FACTORS,
        Field("num_experts", "num_local_experts", default=8),
        Field("moe_router_topk", "num_experts_per_tok", default=2),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

SIDE_BY_SIDE = {
    "embedding.word_embeddings.weight": TENSORS["embedding.word_embeddings.weight"],
    "layers.{layer}.input_layernorm.weight": TENSORS["layers.{layer}.input_layernorm.weight"],
    **{name: rule for name, rule in TENSORS.items() if "self_attention" in name or ".mlp." in name},
    "final_layernorm.weight": TENSORS["final_layernorm.weight"],
    "output_layer.weight": TENSORS["output_layer.weight"],
}
WINDOWS = WindowsByLayer(every=4, default=4096)
OF_COHERE = (
    *[size for size in SIZES if size.setting != "layernorm_epsilon"],
    Field("layernorm_epsilon", "layer_norm_eps", default=1e-5),
    TIED,
    Rope(),
    *ATTENTION_BIAS,
    LogitScale(),
    FixedSettings(normalization="LayerNorm", add_norm_bias=False, swiglu=True, add_bias_linear=False,
                  hidden_dropout=0.0, parallel_attn_mlp=True, shared_layernorm=True, rotary_interleaved=True),
)
COHERE = Family(
    architecture="CohereForCausalLM",
    model_type="cohere",
    defaults={"rope_theta": 500000.0},
    tensors=SIDE_BY_SIDE | QK_NORMS,
    settings=(*OF_COHERE, NormsOfHeads(), RequiredKeys(hidden_act="silu")),
    tied="lm_head.weight",
    ignored=IGNORED,
)

COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    tensors=SIDE_BY_SIDE,
    settings=(*OF_COHERE, WINDOWS, PositionsInWindows(), RequiredKeys(hidden_act="silu")),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (GRANITE, COHERE, COHERE2, GRANITE_MOE)
