"""Ministral 3, also the language model of Mistral 3: Mistral with query scaling that depends on the position.

The length and the factor of the scaling are in `rope_parameters`, with YaRN's settings. `mscale` and `mscale_all_dim`
only scale cosines and sines here, not the scores as in DeepSeek.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.llama import IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rope_settings import MSCALES, Rope, rope_settings
from megalith.bridge.settings import Tree, Window, WrittenKeys
from megalith.config import ModelConfig
from megalith.config.rope_scaling import RopeScaling
from megalith.errors import ConfigError

YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


class RopeAndQueryScaling:
    """Maps RoPE scaling (YaRN) and `llama_4_scaling_beta`, the query scaling."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        rope = rope_settings(hf_config) or dict(YARN)
        rope.pop("max_position_embeddings", None)  # transformers does not read it
        beta, length = rope.pop("llama_4_scaling_beta", None), rope.get("original_max_position_embeddings")
        if beta is None or length is None:
            raise ConfigError(
                f"config.json has rope_parameters with llama_4_scaling_beta {beta} and "
                f"original_max_position_embeddings {length}, which give the scaling of queries; add both "
                "(a beta of 0 turns the scaling off)"
            )
        if rope.get("rope_type", rope.get("type")) in ("default", None):
            del rope["original_max_position_embeddings"]
        scales = [rope.pop(name, None) for name in MSCALES]
        if all(scales) and rope.get("attention_factor") is None and rope.get("factor") is not None:
            scaling = RopeScaling(type="yarn", factor=rope["factor"])
            rope["attention_factor"] = scaling.magnitude(scales[0]) / scaling.magnitude(scales[1])
        fields = Rope().read({**hf_config, "rope_parameters": rope, "rope_scaling": None})
        return fields if beta == 0 else fields | {"query_scaling_beta": beta, "query_scaling_length": length}

    def write(self, model: ModelConfig) -> Tree:
        tree = Rope().write(model)
        scaling = tree.pop("rope_scaling") or {"rope_type": "default"}
        if scaling.get("attention_factor") == 1:  # as in the published models
            scaling = {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}
            del scaling["attention_factor"]
        length = scaling.get("original_max_position_embeddings", model.query_scaling_length)
        return {
            "rope_parameters": {
                **scaling,
                "rope_theta": tree["rope_theta"],
                "original_max_position_embeddings": length,
                "llama_4_scaling_beta": model.query_scaling_beta or 0.0,
            }
        }


MINISTRAL3 = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
    tensors=TENSORS,
    settings=(
        *[row for row in SETTINGS if not isinstance(row, Rope)],
        RopeAndQueryScaling(),
        Window(default=None),
        WrittenKeys(pad_token_id=None),  # by default an entry that a smaller vocabulary does not have
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)

FAMILIES = (MINISTRAL3,)
