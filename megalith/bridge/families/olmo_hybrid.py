"""OLMo Hybrid: three of four layers are gated delta nets with norms before mixer and MLP, the others OLMo 3's attention
with norms after them.

The published model has no positions (`rope_theta` null), and its delta nets may have negative eigenvalues.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.delta_rows import QUERY_KEY_VALUE, QUERY_KEY_VALUE_GATE, STRENGTH_STEP
from megalith.bridge.families.hybrids import LinearLayers
from megalith.bridge.families.llama import IGNORED, OLMO2, SIZES, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import Rope, rope_settings
from megalith.bridge.rows import Rule, cut_into, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WrittenKeys
from megalith.config import ModelConfig
from megalith.errors import ConfigError

KINDS = ("full_attention", "linear_attention")


class BothKindsOfLayers(LinearLayers):
    """Maps `layer_types`, which must have both kinds of layers.

    By default every fourth layer has attention, or the last layer of a smaller model.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        kinds, layers = hf_config.get("layer_types"), hf_config["num_hidden_layers"]
        if kinds is None:
            kinds = [KINDS[layer % 4 != 3] for layer in range(layers)]
            if layers < 4:
                kinds[-1:] = KINDS[:1]
        if missing := [kind for kind in KINDS if kind not in kinds]:
            raise ConfigError(
                f"config.json has no layer with {missing[0]} in layer_types, but models of this family have both kinds "
                "of layers; change layer_types"
            )
        return super().read({**hf_config, "layer_types": kinds})


class DeltaSizes:
    """Maps numbers and sizes of the delta nets' heads, which follow from other sizes if a key is missing or null."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        def value(key: str, default: int) -> int:
            stated = hf_config.get(key)
            return default if stated is None else stated

        heads = hf_config["num_attention_heads"]
        key_heads = value("linear_num_key_heads", heads)
        size = value("linear_key_head_dim", int(0.75 * hf_config["hidden_size"] / max(key_heads, 1)))
        return {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value("linear_num_value_heads", heads),
            "linear_key_head_dim": size,
            "linear_value_head_dim": value("linear_value_head_dim", 2 * size),
        }

    def write(self, model: ModelConfig) -> Tree:
        return {
            name: getattr(model, name)
            for name in (
                "linear_num_key_heads",
                "linear_num_value_heads",
                "linear_key_head_dim",
                "linear_value_head_dim",
            )
        }


class RopeUnlessNull(Rope):
    """Maps the RoPE settings. A `rope_theta` of null means no positions."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        stated = hf_config.get("rope_theta", 10000.0)
        if rope_settings(hf_config).get("rope_theta", stated) is None:
            return {"position_embedding_type": "none"}
        return super().read(hf_config)

    def write(self, model: ModelConfig) -> Tree:
        if model.position_embedding_type == "none":
            return {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
        return super().write(model)


class OlmoHybrid(Family):
    """A family whose files have the convolution in one of three forms.

    The published model has a tensor for queries, one for keys and one for values. transformers 5.24 computes with one
    tensor, and writes three of equal size. Joined, they are the same.
    """

    def stored_as(self, shapes: Mapping[str, tuple[int, ...]]) -> Family:
        stored = {
            part: [shape for name, shape in shapes.items() if name.endswith(f".linear_attn.{part}.weight")]
            for part in ("conv1d", *CONVOLUTIONS)
        }
        if stored["conv1d"]:
            rule = Rule((DELTA + "conv1d.weight",), QUERY_KEY_VALUE)
        elif all(stored[part] and stored[part][0] for part in CONVOLUTIONS):
            rows = [stored[part][0][0] for part in CONVOLUTIONS]
            rule = replace(self.tensors[CONVOLUTION], order=cut_into(QUERY_KEY_VALUE, lambda model: rows))
        else:
            return self
        return replace(self, tensors={**self.tensors, CONVOLUTION: rule})


OURS, DELTA = "layers.{layer}.self_attention.", "model.layers.{layer}.linear_attn."
CONVOLUTION, CONVOLUTIONS = OURS + "conv.weight", ("q_conv1d", "k_conv1d", "v_conv1d")
# fmt: off
OLMO_HYBRID = OlmoHybrid(
    architecture="OlmoHybridForCausalLM",
    model_type="olmo_hybrid",
    tensors={
        **OLMO2.tensors,
        OURS + "linear_in.weight":
            Rule(tuple(f"{DELTA}{part}_proj.weight" for part in "qkvg"), QUERY_KEY_VALUE_GATE),
        OURS + "linear_gates.weight": Rule((DELTA + "b_proj.weight", DELTA + "a_proj.weight"), STRENGTH_STEP),
        CONVOLUTION: Rule(tuple(f"{DELTA}{part}.weight" for part in CONVOLUTIONS), QUERY_KEY_VALUE),
        OURS + "decay.weight": same(DELTA + "A_log"),
        OURS + "decay.bias": same(DELTA + "dt_bias"),
        OURS + "out_norm.weight": same(DELTA + "o_norm.weight"),
        OURS + "linear_out.weight": same(DELTA + "o_proj.weight"),
    },
    settings=(
        *SIZES,
        UNTIED,
        RopeUnlessNull(),
        BothKindsOfLayers(),
        DeltaSizes(),
        Field("linear_conv_kernel_dim", "linear_conv_kernel_dim", default=4),
        Field("linear_allow_neg_eigval", "linear_allow_neg_eigval", default=True),
        FixedSettings(normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
                      norm_placement="post", linear_norm_placement="pre", linear_norm_epsilon=1e-5,
                      qk_layernorm=True, qk_layernorm_full_width=True),
        RequiredKeys(hidden_act="silu", attention_bias=False),
        WrittenKeys(pad_token_id=None, eos_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
    renamed={
        ".attention_layer_norm.weight": ".input_layernorm.weight",
        ".feedforward_layer_norm.weight": ".post_attention_layernorm.weight",
    },
)
# fmt: on


FAMILIES = (OLMO_HYBRID,)
