"""Aria's language model: Llama with experts, stored as one transposed tensor per matrix, and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import SHARED_EXPERTS
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SETTINGS, TENSORS
from megalith.bridge.family import Family
from megalith.bridge.rows import gate_up, same, stacked
from megalith.bridge.settings import Field, RequiredKeys, Tree, WrittenKeys
from megalith.config import ModelConfig
from megalith.errors import ConfigError


class SharedWidth:
    """Maps `moe_num_shared_experts`, a number of experts of `intermediate_size`, to the shared expert's width."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        count = hf_config.get("moe_num_shared_experts", 2)
        return (
            {"moe_shared_expert_intermediate_size": count * hf_config["intermediate_size"]} if count else {}
        )

    def write(self, model: ModelConfig) -> Tree:
        width, size = model.moe_shared_expert_intermediate_size or 0, model.expert_size
        if width % size:
            raise ConfigError(
                f"model.moe_shared_expert_intermediate_size is {width}, but Aria has shared experts of the size "
                f"{size} of an expert; such a model cannot be exported as Aria"
            )
        return {"moe_num_shared_experts": width // size}


# fmt: off
ARIA = Family(
    architecture="AriaTextForCausalLM",
    model_type="aria_text",
    tensors={
        **TENSORS,
        **SHARED_EXPERTS,
        "layers.{layer}.mlp.router.weight":
            same("model.layers.{layer}.mlp.router.weight"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            stacked(gate_up("model.layers.{layer}.mlp.experts.fc1.weight"), transposed=True),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            stacked(same("model.layers.{layer}.mlp.experts.fc2.weight"), transposed=True),
    },
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        Field("num_experts", "moe_num_experts", default=8),
        Field("moe_router_topk", "moe_topk", default=2),
        SharedWidth(),
        RequiredKeys(mlp_bias=False),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


FAMILIES = (ARIA,)
