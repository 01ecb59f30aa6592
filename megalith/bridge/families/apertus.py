"""Apertus, and the language model of Apertus 1.5: Llama with norms of queries and keys, and xIELU in an MLP without a
gate.

xIELU's two slopes are parameters of each layer. Its other two constants are stored too, but not trained. Apertus 1.5
files whose output matrix has fewer rows than the embedding are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, QK_NORMS, SIZES, TENSORS, UNTIED
from megalith.bridge.families.plain_mlp import UP
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope
from megalith.bridge.rows import one_each, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.models.xielu import BETA, EPSILON

# RoPE if config.json has none.
DEFAULT_ROPE = {
    "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
ACTIVATIONS = {
    "xielu": "xielu", "gelu": "gelu", "gelu_new": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
    "relu2": "squared_relu", "silu": "silu",
}  # fmt: skip


class ScaledRope(Rope):
    """Maps the RoPE settings. Without any in config.json, RoPE is scaled as in Llama 3."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if not (hf_config.get("rope_parameters") or hf_config.get("rope_scaling")):
            hf_config = {**hf_config, "rope_parameters": DEFAULT_ROPE}
        return super().read(hf_config)

    def write(self, model: ModelConfig) -> Tree:
        tree = super().write(model)
        scaling = tree["rope_scaling"] or {"rope_type": "default"}
        return {"rope_parameters": {**scaling, "rope_theta": tree["rope_theta"]}}


class ApertusFamily(Family):
    """A family whose checkpoints contain xIELU's constants if the model uses this activation."""

    def stored_constants(self, model: ModelConfig) -> dict[str, float]:
        return super().stored_constants(model) if model.mlp_activation == "xielu" else {}


# fmt: off
LAYER = "model.layers.{layer}."
APERTUS = ApertusFamily(
    architecture="ApertusForCausalLM",
    model_type="apertus",
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 12000000.0},
    tensors={
        **TENSORS,
        **QK_NORMS,
        **UP,
        "layers.{layer}.input_layernorm.weight": same(LAYER + "attention_layernorm.weight"),
        "layers.{layer}.pre_mlp_layernorm.weight": same(LAYER + "feedforward_layernorm.weight"),
        "layers.{layer}.mlp.xielu.weight": one_each(LAYER + "mlp.act_fn.alpha_p", LAYER + "mlp.act_fn.alpha_n"),
    },
    settings=(
        *SIZES,
        UNTIED,
        ScaledRope(),
        *ATTENTION_BIAS,
        Field("activation", "hidden_act", default="xielu", values=ACTIVATIONS),
        FixedSettings(normalization="RMSNorm", qk_layernorm=True, add_bias_linear=False, hidden_dropout=0.0),
    ),
    tied="lm_head.weight",
    constants={LAYER + "mlp.act_fn.beta": BETA, LAYER + "mlp.act_fn.eps": EPSILON},
    ignored=IGNORED,
)
# fmt: on
APERTUS1P5 = replace(
    APERTUS,
    architecture="Apertus1p5TextForCausalLM",
    model_type="apertus1p5_text",
    settings=(*APERTUS.settings, RequiredKeys(output_vocab_size=None)),
)


FAMILIES = (APERTUS, APERTUS1P5)
