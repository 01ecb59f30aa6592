"""Granite 4 (granitemoehybrid): Mamba-2 or attention, with experts and a shared expert, or with MLPs only.

Attention has RoPE or no positions. Granite's factors are applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.bamba import SIZES_OF_MAMBA
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SETTINGS
from megalith.bridge.families.scaled import FACTORS, GRANITE_MOE
from megalith.bridge.family import Family
from megalith.bridge.mamba_rows import (
    MambaHeads,
    MixerLayers,
    mamba_tensors,
)
from megalith.bridge.rope_settings import Rope
from megalith.bridge.rows import gate_up, same
from megalith.bridge.settings import Field, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError

WIDTH = Field("ffn_hidden_size", "intermediate_size")


class GraniteWidths:
    """Maps `num_local_experts`, `intermediate_size` and `shared_intermediate_size`.

    Without experts, the layers have an MLP of the shared expert's width.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        experts, shared = (
            hf_config.get("num_local_experts", 8),
            hf_config.get("shared_intermediate_size", 1024),
        )
        if not experts:
            return {"ffn_hidden_size": shared}
        return {
            **WIDTH.read(hf_config),
            "num_experts": experts,
            "moe_router_topk": hf_config.get("num_experts_per_tok", 2),
            "moe_shared_expert_intermediate_size": shared,
        }

    def write(self, model: ModelConfig) -> Tree:
        if model.num_experts is None:
            return {
                "num_local_experts": 0,
                "shared_intermediate_size": model.ffn_size,
                "intermediate_size": model.ffn_size,
            }
        if model.moe_shared_expert_intermediate_size is None:
            raise ConfigError("it has experts without a shared expert")
        return {
            "num_local_experts": model.num_experts,
            "num_experts_per_tok": model.moe_router_topk,
            "intermediate_size": model.expert_size,
            "shared_intermediate_size": model.moe_shared_expert_intermediate_size,
        }


class RopeOrNoPositions(Rope):
    """Maps `position_embedding_type`: `rope`, or null for no position embedding."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        kind = hf_config.get("position_embedding_type")
        if kind not in (None, "rope", "nope"):
            raise ConfigError(
                f"config.json has position_embedding_type {kind!r}, but models of this family are "
                "supported only with 'rope' or null"
            )
        return super().read(hf_config) if kind == "rope" else {"position_embedding_type": "none"}

    def write(self, model: ModelConfig) -> Tree:
        if model.position_embedding_type != "rope":
            return {"position_embedding_type": None}
        return super().write(model) | {"position_embedding_type": "rope"}


# fmt: off
SHARED_MLP = {
    f"layers.{{layer}}.mlp.{ours}linear_{ours_matrix}.weight": rule
    for ours in ("", "shared_experts.")
    for ours_matrix, rule in {
        "fc1": gate_up("model.layers.{layer}.shared_mlp.input_linear.weight"),
        "fc2": same("model.layers.{layer}.shared_mlp.output_linear.weight"),
    }.items()
}
GRANITE_MOE_HYBRID = Family(
    architecture="GraniteMoeHybridForCausalLM",
    model_type="granitemoehybrid",
    tensors={
        **GRANITE_MOE.tensors,
        **SHARED_MLP,
        **mamba_tensors("model.layers.{layer}.mamba."),
    },
    settings=(
        *[row for row in SETTINGS
          if not isinstance(row, Rope) and getattr(row, "setting", "") != "ffn_hidden_size"],
        RopeOrNoPositions(),
        *ATTENTION_BIAS,
        *FACTORS,
        GraniteWidths(),
        MixerLayers("linear_attention", "mamba2", {"mamba": "linear_attention", "attention": "full_attention"}),
        MambaHeads(),
        *SIZES_OF_MAMBA,
        Field("mamba_out_bias", "mamba_proj_bias", default=False),
    ),
    tied="lm_head.weight",
    aliases={"layers_block_type": "layer_types"},
    ignored=IGNORED,
)

FAMILIES = (GRANITE_MOE_HYBRID,)
