"""Families with scaling factors: Granite and Cohere.

Granite: factors on the embedding, the residual branches, the attention scores and the logits. GraniteMoe has one tensor
for all experts, with gates before ups.

Cohere (Command-R): parallel residual with one LayerNorm without bias, interleaved RoPE, a factor on the logits.
Command-R+ has QK norms with weights per head. Cohere 2 (Command R7B) has windows, and no RoPE in layers without a
window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, QK_NORMS, SETTINGS, SIZES, TENSORS, TIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.rows import gate_up, same, stacked
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WindowsByLayer
from megalith.config import ModelConfig


class LogitScale:
    """Maps `logit_scale`, a factor of the logits."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {"logits_scaling": 1 / (hf_config.get("logit_scale") or 0.0625)}

    def write(self, model: ModelConfig) -> Tree:
        return {"logit_scale": 1 / model.logits_scaling}


class QKNormPerHead:
    """Maps `use_qk_norm`: QK norms with separate weights per head (Command-R+)."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        uses_norm = bool(hf_config.get("use_qk_norm"))
        return {"qk_layernorm": uses_norm, "qk_layernorm_per_head": uses_norm}

    def write(self, model: ModelConfig) -> Tree:
        return {"use_qk_norm": model.qk_layernorm_per_head}


class RopeInWindows:
    """Maps `sliding_window`. Only layers with a window have RoPE.

    Args:
        windows: the family's row of windows.
        everywhere_without: True if `sliding_window: null` means RoPE in every layer.
    """

    def __init__(self, windows: WindowsByLayer, everywhere_without: bool = False):
        self._windows, self._everywhere_without = windows, everywhere_without

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if self._everywhere_without and hf_config.get("sliding_window", self._windows.default) is None:
            return {}
        fields, count = self._windows.read(hf_config), hf_config["num_hidden_layers"]
        windowed_layers = fields.get("window_attn_skip_freq", [0] * count)
        if windowed_layers is None:
            windowed_layers = [1] * count
        if isinstance(windowed_layers, int):
            windowed_layers = [
                int(not windowed_layers or (n + 1) % windowed_layers != 0) for n in range(count)
            ]
        return {"no_rope_freq": [1 - windowed for windowed in windowed_layers]}

    def write(self, model: ModelConfig) -> Tree:
        nowhere = not any(model.windows) and all(model.layers_without_rope or [0])
        return {"sliding_window": self._windows.default} if self._everywhere_without and nowhere else {}


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

PARALLEL_TENSORS = {
    "embedding.word_embeddings.weight": TENSORS["embedding.word_embeddings.weight"],
    "layers.{layer}.input_layernorm.weight": TENSORS["layers.{layer}.input_layernorm.weight"],
    **{name: rule for name, rule in TENSORS.items() if "self_attention" in name or ".mlp." in name},
    "final_layernorm.weight": TENSORS["final_layernorm.weight"],
    "output_layer.weight": TENSORS["output_layer.weight"],
}
WINDOWS = WindowsByLayer(every=4, default=4096)
COHERE_SETTINGS = (
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
    tensors=PARALLEL_TENSORS | QK_NORMS,
    settings=(*COHERE_SETTINGS, QKNormPerHead(), RequiredKeys(hidden_act="silu")),
    tied="lm_head.weight",
    ignored=IGNORED,
)

COHERE2 = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    tensors=PARALLEL_TENSORS,
    settings=(*COHERE_SETTINGS, WINDOWS, RopeInWindows(WINDOWS), RequiredKeys(hidden_act="silu")),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (GRANITE, COHERE, COHERE2, GRANITE_MOE)
