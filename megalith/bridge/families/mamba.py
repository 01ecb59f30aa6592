"""Families with Mamba-2 mixers.

Bamba: Mamba-2 in most layers, attention with RoPE on half of each head in the others, and an MLP in every layer.

Granite 4 (granitemoehybrid): Bamba's layers with experts and a shared expert, or with MLPs alone; attention with or
without RoPE; Granite's factors.

Falcon-H1: attention and Mamba-2 in parallel in every layer, and factors on inputs, outputs and gates.

Nemotron-H: layers with a single branch, which is Mamba-2, attention without positions, an MLP or experts.

Mamba-2: layers with Mamba-2 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.families.experts import RouterGroups, SigmoidScores
from megalith.bridge.families.gated import LogitFactor
from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SETTINGS, SIZES, TENSORS, UNTIED
from megalith.bridge.families.scaled import FACTORS, GRANITE_MOE
from megalith.bridge.family import Family
from megalith.bridge.mamba_rows import (
    ExpandedHeads,
    MambaHeads,
    MixerLayers,
    StepLimit,
    mamba_tensors,
)
from megalith.bridge.rows import gate_up, qkv, same
from megalith.bridge.settings import Field, FixedSettings, PartialRope, RequiredKeys, Rope, Tree, WrittenKeys
from megalith.config import ModelConfig
from megalith.config.hybrid import PATTERN_LAYERS
from megalith.errors import ConfigError

SIZES_OF_MAMBA = (
    Field("mamba_state_dim", "mamba_d_state", default=256),
    Field("mamba_num_groups", "mamba_n_groups", default=1),
    Field("linear_conv_kernel_dim", "mamba_d_conv", default=4),
    Field("mamba_conv_bias", "mamba_conv_bias", default=True),
    Field("mamba_proj_bias", "mamba_proj_bias", default=False),
    StepLimit(),
)


class AttentionIndices:
    """Row for `attn_layer_indices`, the numbers of the layers with attention."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        attention = hf_config.get("attn_layer_indices") or []
        layers = range(hf_config["num_hidden_layers"])
        return {
            "experimental_attention_variant": "mamba2",
            "linear_attention_freq": [int(layer not in attention) for layer in layers],
        }

    def write(self, model: ModelConfig) -> Tree:
        return {"attn_layer_indices": [n for n in range(model.num_layers) if model.has_attention(n)]}


class OnlyHalfRope(PartialRope):
    """Row for RoPE on half of each head: transformers ignores another fraction."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {**super().read(hf_config), "rotary_percent": 0.5}


# fmt: off
FEED_FORWARD = {
    "layers.{layer}.pre_mlp_layernorm.weight":
        same("model.layers.{layer}.pre_ff_layernorm.weight"),
    "layers.{layer}.mlp.linear_fc1.weight":
        gate_up("model.layers.{layer}.feed_forward.gate_proj.weight",
                "model.layers.{layer}.feed_forward.up_proj.weight"),
    "layers.{layer}.mlp.linear_fc1.bias":
        gate_up("model.layers.{layer}.feed_forward.gate_proj.bias",
                "model.layers.{layer}.feed_forward.up_proj.bias"),
    "layers.{layer}.mlp.linear_fc2.weight":
        same("model.layers.{layer}.feed_forward.down_proj.weight"),
    "layers.{layer}.mlp.linear_fc2.bias":
        same("model.layers.{layer}.feed_forward.down_proj.bias"),
    "final_layernorm.weight":
        same("model.final_layernorm.weight"),
}
BAMBA = Family(
    architecture="BambaForCausalLM",
    model_type="bamba",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        **FEED_FORWARD,
        **mamba_tensors("model.layers.{layer}.mamba."),
    },
    settings=(
        *[row for row in SETTINGS if not isinstance(row, Rope)],
        OnlyHalfRope(default=0.5),
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        AttentionIndices(),
        MambaHeads(),
        *SIZES_OF_MAMBA,
        Field("mamba_out_bias", "mamba_proj_bias", default=False),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on


WIDTH = Field("ffn_hidden_size", "intermediate_size")


class GraniteWidths:
    """Row for experts with a shared expert, or for an MLP of the shared expert's width without experts."""

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
    """Row for `position_embedding_type`: rope, or null for no positions."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        kind = hf_config.get("position_embedding_type")
        if kind not in (None, "rope", "nope"):
            raise ConfigError(
                f"config.json has position_embedding_type {kind!r}, but models of this family are built here with "
                "'rope' or null"
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
# fmt: on


class ParallelMixers:
    """Row for attention and Mamba-2 in parallel in every layer, with the factors on inputs, outputs and gates."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        fields: Tree = {
            "experimental_attention_variant": "mamba2",
            "linear_attention_freq": [1] * hf_config["num_hidden_layers"],
            "parallel_mixers": True,
        }
        for key in ("ssm_multipliers", "mlp_multipliers"):
            if any(factor != 1 for factor in hf_config.get(key) or ()):
                fields[key] = hf_config[key]
        return fields

    def write(self, model: ModelConfig) -> Tree:
        return {
            "ssm_multipliers": model.ssm_multipliers or [1.0] * 5,
            "mlp_multipliers": model.mlp_multipliers or [1.0] * 2,
        }


FALCON_FACTORS = (
    "embedding_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)
# fmt: off
FALCON_H1 = Family(
    architecture="FalconH1ForCausalLM",
    model_type="falcon_h1",
    defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    tensors={
        **TENSORS,
        **FEED_FORWARD,
        **mamba_tensors("model.layers.{layer}.mamba.", "layers.{layer}.mamba."),
    },
    settings=(
        *SETTINGS,
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        ParallelMixers(),
        MambaHeads(width_key="mamba_d_ssm", width=1024),
        *SIZES_OF_MAMBA,
        Field("mamba_out_bias", "projectors_bias", default=False),
        Field("mamba_rms_norm", "mamba_rms_norm", default=False),
        Field("mamba_norm_before_gate", "mamba_norm_before_gate", default=True),
        LogitFactor("lm_head_multiplier"),
        *[Field(key, key, default=1.0) for key in FALCON_FACTORS],
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
)
# fmt: on

NEMOTRON_LAYERS = {
    "mamba2": "linear_attention",
    "attention": "full_attention",
    "mlp": "mlp",
    "experts": "moe",
}
OLDER_LAYERS = {"mamba": "linear_attention", "attention": "full_attention"}


class BlockTypes:
    """Row for `layers_block_type`, or `hybrid_override_pattern`: the branch of every layer."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        kinds, pattern = hf_config.get("layers_block_type"), hf_config.get("hybrid_override_pattern")
        if kinds is None and pattern is None:
            kinds = ["linear_attention", "moe", "full_attention", "mlp"]
        if kinds is not None:
            branches = {theirs: ours for ours, theirs in NEMOTRON_LAYERS.items()}
            letters = {branch: letter for letter, branch in PATTERN_LAYERS.items()}
            kinds = [OLDER_LAYERS.get(kind, kind) for kind in kinds]
            if unknown := [kind for kind in kinds if kind not in branches]:
                raise ConfigError(
                    f"config.json has layers_block_type with {unknown[0]!r}, but models of this family are built here "
                    f"with {', '.join(branches)} only"
                )
            pattern = "".join(letters[branches[kind]] for kind in kinds)
        return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}

    def write(self, model: ModelConfig) -> Tree:
        branches = model.pattern_layers
        if branches is None or "gated_delta_net" in branches:
            raise ConfigError("its layers are not Mamba-2, attention, MLP or experts alone")
        return {"layers_block_type": [NEMOTRON_LAYERS[branch] for branch in branches]}


class NemotronExperts:
    """Row for the experts, which config.json describes even if no layer has them."""

    _rows = (
        Field("num_experts", "n_routed_experts", default=8),
        Field("moe_router_topk", "num_experts_per_tok", default=2),
        Field("moe_ffn_hidden_size", "moe_intermediate_size", default=7688),
        Field("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=7688),
        Field("moe_router_topk_scaling_factor", "routed_scaling_factor", default=1.0),
        SigmoidScores(),
        RouterGroups(method=False),
        RequiredKeys(norm_topk_prob=True, moe_latent_size=None),
    )

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if "E" not in BlockTypes().read(hf_config)["hybrid_layer_pattern"]:
            return {}
        fields: Tree = {}
        hf_config = {"num_experts_per_tok": 2, **hf_config}
        for row in self._rows:
            fields |= row.read(hf_config)
        return fields

    def write(self, model: ModelConfig) -> Tree:
        tree: Tree = {}
        for row in self._rows if model.num_experts is not None else ():
            tree |= row.write(model)
        return tree


# fmt: off
MIXER = "backbone.layers.{layer}.mixer."
NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    defaults={"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 0},
    tensors={
        "embedding.word_embeddings.weight":
            same("backbone.embeddings.weight"),
        "layers.{layer}.input_layernorm.weight":
            same("backbone.layers.{layer}.norm.weight"),
        "layers.{layer}.pre_mlp_layernorm.weight":
            same("backbone.layers.{layer}.norm.weight"),
        **mamba_tensors(MIXER),
        "layers.{layer}.self_attention.linear_qkv.weight":
            qkv(*(f"{MIXER}{part}_proj.weight" for part in "qkv")),
        "layers.{layer}.self_attention.linear_qkv.bias":
            qkv(*(f"{MIXER}{part}_proj.bias" for part in "qkv")),
        "layers.{layer}.self_attention.linear_proj.weight":
            same(MIXER + "o_proj.weight"),
        "layers.{layer}.self_attention.linear_proj.bias":
            same(MIXER + "o_proj.bias"),
        "layers.{layer}.mlp.linear_fc1.weight":
            same(MIXER + "up_proj.weight"),
        "layers.{layer}.mlp.linear_fc1.bias":
            same(MIXER + "up_proj.bias"),
        "layers.{layer}.mlp.linear_fc2.weight":
            same(MIXER + "down_proj.weight"),
        "layers.{layer}.mlp.linear_fc2.bias":
            same(MIXER + "down_proj.bias"),
        "layers.{layer}.mlp.router.weight":
            same(MIXER + "gate.weight"),
        "layers.{layer}.mlp.router.expert_bias":
            same(MIXER + "gate.e_score_correction_bias"),
        "layers.{layer}.mlp.experts.linear_fc1.weight":
            same(MIXER + "experts.{expert}.up_proj.weight"),
        "layers.{layer}.mlp.experts.linear_fc2.weight":
            same(MIXER + "experts.{expert}.down_proj.weight"),
        "layers.{layer}.mlp.shared_experts.linear_fc1.weight":
            same(MIXER + "shared_experts.up_proj.weight"),
        "layers.{layer}.mlp.shared_experts.linear_fc2.weight":
            same(MIXER + "shared_experts.down_proj.weight"),
        "final_layernorm.weight":
            same("backbone.norm_f.weight"),
        "output_layer.weight":
            same("lm_head.weight"),
    },
    settings=(
        BlockTypes(),
        *[row for row in SIZES if getattr(row, "setting", "") not in ("num_layers", "layernorm_epsilon")],
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        UNTIED,
        *ATTENTION_BIAS,
        Field("add_mlp_bias", "mlp_bias", default=False),
        activation("mlp_hidden_act", "relu2"),
        Field("mamba_num_heads", "mamba_num_heads", default=128),
        Field("mamba_head_dim", "mamba_head_dim", default=64),
        Field("mamba_state_dim", "ssm_state_size", default=128),
        Field("mamba_num_groups", "n_groups", default=8),
        Field("linear_conv_kernel_dim", "conv_kernel", default=4),
        Field("mamba_conv_bias", "use_conv_bias", default=True),
        Field("mamba_proj_bias", "use_bias", default=False),
        Field("mamba_out_bias", "use_bias", default=False),
        StepLimit(),
        NemotronExperts(),
        FixedSettings(normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0,
                      position_embedding_type="none"),
        RequiredKeys(mamba_hidden_act="silu", sliding_window=None),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    aliases={"layer_types": "layers_block_type", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
             "mamba_conv_bias": "use_conv_bias", "mamba_dt_limit": "time_step_limit",
             "num_local_experts": "n_routed_experts"},
    ignored=(*IGNORED, r"^mtp\."),
    prefix="backbone.",
)


class OnlyMamba:
    """Row for layers that have Mamba-2 alone."""

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        return {"hybrid_layer_pattern": "M" * hf_config["num_hidden_layers"]}

    def write(self, model: ModelConfig) -> Tree:
        return {}


MAMBA2 = Family(
    architecture="Mamba2ForCausalLM",
    model_type="mamba2",
    tensors={
        name: rule for name, rule in NEMOTRON_H.tensors.items() if ".mlp" not in name and "_qkv" not in name
    },
    settings=(
        Field("num_layers", "num_hidden_layers"),
        OnlyMamba(),
        Field("max_position_embeddings", "max_position_embeddings", default=2**20),  # transformers has no limit
        Field("hidden_size", "hidden_size"),
        Field("vocab_size", "vocab_size"),
        Field("layernorm_epsilon", "layer_norm_epsilon", default=1e-5),
        Field("init_method_std", "initializer_range", default=0.1),
        UNTIED,
        ExpandedHeads("num_heads", "head_dim"),
        Field("mamba_num_heads", "num_heads", default=128),
        Field("mamba_head_dim", "head_dim", default=64),
        Field("mamba_state_dim", "state_size", default=128),
        Field("mamba_num_groups", "n_groups", default=8),
        Field("linear_conv_kernel_dim", "conv_kernel", default=4),
        Field("mamba_conv_bias", "use_conv_bias", default=True),
        Field("mamba_proj_bias", "use_bias", default=False),
        Field("mamba_out_bias", "use_bias", default=False),
        StepLimit(),
        FixedSettings(normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0,
                      position_embedding_type="none", num_attention_heads=1),
        RequiredKeys(hidden_act="silu"),
        WrittenKeys(bos_token_id=None, eos_token_id=None, pad_token_id=None),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
    prefix="backbone.",
)
# fmt: on


FAMILIES = (BAMBA, GRANITE_MOE_HYBRID, FALCON_H1, NEMOTRON_H, MAMBA2)
