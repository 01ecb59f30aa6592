"""ERNIE 4.5 with experts: ERNIE 4.5 with softmax scores, an expert bias and shared experts.

The files may also contain an MTP layer, which transformers ignores too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import EXPERTS, SHARED_EXPERTS, SharedExperts
from megalith.bridge.families.gated import ERNIE4_5
from megalith.bridge.families.llama import IGNORED, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rows import row_vector
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

DENOMINATOR = 1e-6  # a larger bound on the sum of a token's weights would change them


class ExpertInterval:
    """Maps `moe_layer_interval`, `moe_layer_start_index` and `moe_layer_end_index` to the layers with experts."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        count = hf_config["num_hidden_layers"]
        first, last = hf_config.get("moe_layer_start_index", 1), hf_config.get("moe_layer_end_index", -1)
        step = hf_config.get("moe_layer_interval", 1)
        if not all(type(value) is int for value in (first, last, step)) or step < 1:
            raise ConfigError(
                f"config.json has moe_layer_start_index {first}, moe_layer_end_index {last} and moe_layer_interval "
                f"{step}; all three must be whole numbers, and the interval at least 1"
            )
        last = count - 1 if last == -1 else last
        return {"moe_layer_freq": [int((n + 1) % step == 0 and first <= n <= last) for n in range(count)]}

    def write(self, model: ModelConfig) -> Tree:
        layers = model.expert_layers
        step = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1 if layers else 1
        step = step if layers and (layers[0] + 1) % step == 0 else 1
        tree = {
            "moe_layer_start_index": layers[0] if layers else model.num_layers,
            "moe_layer_interval": step,
        }
        for last in (model.num_layers - 1, *layers[-1:]):
            tree["moe_layer_end_index"] = last
            frequency = self.read({**tree, "num_hidden_layers": model.num_layers})["moe_layer_freq"]
            if [n for n, has_experts in enumerate(frequency) if has_experts] == layers:
                break
        return tree


class SmallestSum:
    """Checks `moe_norm_min`, the lower bound of the sum that divides a token's expert weights."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        bound = hf_config.get("moe_norm_min", 1e-12)
        if bound is None or bound > DENOMINATOR:
            raise ConfigError(
                f"config.json has moe_norm_min {bound}, below which the sum of a token's weights is not normalized; "
                f"Megalith always normalizes it, so only values up to {DENOMINATOR:g} are supported"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {"moe_norm_min": 1e-12}


# fmt: off
ERNIE4_5_MOE = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    defaults={"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
              "moe_intermediate_size": 1536},
    tensors={
        **TENSORS,
        **EXPERTS,
        **SHARED_EXPERTS,
        "layers.{layer}.mlp.router.expert_bias":
            row_vector("model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"),
    },
    settings=(
        *[row for row in ERNIE4_5.settings if getattr(row, "key", None) != "use_bias"],
        Field("num_experts", "moe_num_experts", default=64),
        Field("moe_router_topk", "moe_k", default=6),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=1536),
        ExpertInterval(),
        SharedExperts("moe_num_shared_experts", absent=0, default=2),
        SmallestSum(),
        FixedSettings(moe_router_enable_expert_bias=True),
        RequiredKeys(use_bias=False),  # its experts have no biases, but its shared experts would
    ),
    tied="lm_head.weight",
    ignored=(*IGNORED, r"^model\.mtp_"),
)
# fmt: on

FAMILIES = (ERNIE4_5_MOE,)
