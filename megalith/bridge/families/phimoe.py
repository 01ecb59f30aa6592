"""Phi-MoE (Phi-3.5-MoE, Phi-mini-MoE): Mixtral with SparseMixer routing, LayerNorm and biases.

LongRoPE has its factors of cosines and sines in two keys, for short and for long sequences, which must agree.
transformers 5.24 applies `short_factor` to sequences of any length; Megalith applies `long_factor` beyond
`original_max_position_embeddings`, as the model's published code and vLLM do.

In training, transformers samples the experts and multiplies their inputs by noise. Megalith does neither: the same
experts are then chosen in training and in evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import MIXTRAL
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SIZES, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import PLAIN, LongRope, rope_settings
from megalith.bridge.rows import same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, TrainingNoise, Tree, Window
from megalith.config import ModelConfig
from megalith.errors import ConfigError

FACTORS = ("short_mscale", "long_mscale")


class PhiMoERope:
    """Maps RoPE scaling like LongRope, with its attention factors in `short_mscale` and `long_mscale`."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = rope_settings(hf_config)
        partial = [tree.get("partial_rotary_factor") for tree in (rope, hf_config)]
        if any(share not in (None, 1) for share in partial):
            raise ConfigError(
                f"config.json has partial_rotary_factor {partial[0] or partial[1]!r}, but models of this family are "
                "supported only with 1.0"
            )
        kind = rope.get("rope_type", rope.get("type"))
        if kind in PLAIN:
            rope = {
                "rope_type": "default",
                "rope_theta": rope.get("rope_theta") or hf_config.get("rope_theta"),
            }
            return LongRope().read({**hf_config, "rope_parameters": rope, "rope_scaling": None})
        short, long = (rope.pop(key, None) for key in FACTORS)
        if kind not in ("longrope", "su") or type(short) not in (int, float) or short != long:
            raise ConfigError(
                f"config.json has rotary scaling {kind!r} with short_mscale {short!r} and long_mscale {long!r}; models "
                "of this family are supported only with longrope and the same number for both"
            )
        rope.pop("attention_factor", None)  # transformers does not use it here
        originals = [tree.get("original_max_position_embeddings") for tree in (rope, hf_config)]
        if None not in originals and originals[0] != originals[1]:
            raise ConfigError(
                f"config.json has original_max_position_embeddings {originals[1]}, but its rotary scaling has "
                f"{originals[0]}; keep the right one and remove the other"
            )
        fields = LongRope().read({**hf_config, "rope_parameters": rope, "rope_scaling": None})
        return {**fields, "rope_scaling": {**fields["rope_scaling"], "attention_factor": short}}

    def write(self, model: ModelConfig) -> Tree:
        tree = LongRope().write(model)
        if model.rope_scaling is not None:
            factor = tree["rope_scaling"].pop("attention_factor", None)
            original = tree.get("original_max_position_embeddings")
            tree["rope_scaling"] |= dict.fromkeys(FACTORS, factor) | {
                "original_max_position_embeddings": original
            }
        return tree


# fmt: off
PHI_MOE = Family(
    architecture="PhiMoEForCausalLM",
    model_type="phimoe",
    transformers_class="PhimoeForCausalLM",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    tensors={
        **MIXTRAL.tensors,
        "layers.{layer}.input_layernorm.bias":
            same("model.layers.{layer}.input_layernorm.bias"),
        "layers.{layer}.pre_mlp_layernorm.bias":
            same("model.layers.{layer}.post_attention_layernorm.bias"),
        "final_layernorm.bias":
            same("model.norm.bias"),
        "vocabulary.bias":
            same("lm_head.bias"),
    },
    settings=(
        *SIZES,
        UNTIED,
        PhiMoERope(),
        *ATTENTION_BIAS,
        Field("add_output_bias", "lm_head_bias", default=False),
        Field("num_experts", "num_local_experts", default=16),
        Field("moe_sparsemixer_jitter_eps", "router_jitter_noise", default=0.01),
        Window(default=None),
        TrainingNoise("input_jitter_noise"),
        FixedSettings(normalization="LayerNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0,
                      moe_router_score_function="sparsemixer", moe_router_topk=2),
        RequiredKeys(hidden_act="silu", num_experts_per_tok=2),  # transformers chooses two, whatever the key says
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

FAMILIES = (PHI_MOE,)
