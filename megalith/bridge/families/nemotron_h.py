"""Nemotron-H: each layer is Mamba-2, attention without position embedding, an MLP or experts.

A layer for multi-token prediction is stored as two under `mtp.layers.`: attention, with the projection and the norms
of its inputs, then experts or an MLP, with the norm of the output. transformers does not read these layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.families.experts import RouterGroups, SigmoidScores
from megalith.bridge.families.layernorm_decoders import activation
from megalith.bridge.families.llama import ATTENTION_BIAS, IGNORED, SIZES, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.mamba_rows import StepLimit, mamba_tensors
from megalith.bridge.mtp_rows import MTPLayers
from megalith.bridge.rows import Rule, qkv, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree, WrittenKeys
from megalith.config import ModelConfig
from megalith.config.hybrid import PATTERN_LAYERS
from megalith.errors import ConfigError

NEMOTRON_LAYERS = {
    "mamba2": "linear_attention",
    "attention": "full_attention",
    "mlp": "mlp",
    "experts": "moe",
}
OLDER_LAYERS = {"mamba": "linear_attention", "attention": "full_attention"}


class BlockTypes:
    """Maps `layers_block_type` (or `hybrid_override_pattern`) to layer kinds: Mamba-2, attention, MLP or experts."""

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
                    f"config.json has layers_block_type with {unknown[0]!r}, but models of this "
                    f"family are supported only with {', '.join(branches)}"
                )
            pattern = "".join(letters[branches[kind]] for kind in kinds)
        return {"num_layers": len(pattern), "hybrid_layer_pattern": pattern}

    def write(self, model: ModelConfig) -> Tree:
        branches = model.pattern_layers
        if branches is None or "gated_delta_net" in branches:
            raise ConfigError(
                "some of its layers are not a single branch of Mamba-2, attention, an MLP or experts"
            )
        return {"layers_block_type": [NEMOTRON_LAYERS[branch] for branch in branches]}


class NemotronExperts:
    """Maps the experts, whose keys are in config.json even if no layer has experts."""

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


class UnlimitedSteps:
    """Checks that the Mamba-2 step sizes have no separate limits.

    transformers takes `time_step_min` for the smallest step size and ignores `time_step_limit`, which other
    implementations read.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        if StepLimit().read(hf_config):
            raise ConfigError(
                f"config.json has time_step_limit {hf_config['time_step_limit']}, which transformers ignores in this "
                "family; only [0, Infinity] is supported"
            )
        return RequiredKeys(time_step_min=0.001).read(hf_config)

    def write(self, model: ModelConfig) -> Tree:
        return {}


class PatternMTP(MTPLayers):
    """Maps `mtp_layers_block_type` (or `mtp_hybrid_override_pattern`) to MTP layers: attention, then experts or, in a
    model without experts, an MLP.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        fields = super().read(hf_config)
        if not fields:
            return {}
        kinds, pattern = hf_config.get("mtp_layers_block_type"), hf_config.get("mtp_hybrid_override_pattern")
        if kinds is None and pattern is None:
            kinds = ["full_attention", "moe"]
        elif kinds is None:
            kinds = [
                NEMOTRON_LAYERS[PATTERN_LAYERS[letter]] if letter in "M*-E" else letter for letter in pattern
            ]
        kinds = [OLDER_LAYERS.get(kind, kind) for kind in kinds]
        has_experts = "E" in BlockTypes().read(hf_config)["hybrid_layer_pattern"]
        supported = ["full_attention", "moe" if has_experts else "mlp"]
        if kinds != supported:
            raise ConfigError(
                f"config.json has layers of multi-token prediction with {', '.join(map(str, kinds))}, but models of "
                f"this family are supported only with {' and '.join(supported)}; set num_nextn_predict_layers to 0 to "
                "leave them out"
            )
        return fields

    def write(self, model: ModelConfig) -> Tree:
        if not model.mtp_num_layers:
            return {}
        second = "moe" if model.num_experts is not None else "mlp"
        return {**super().write(model), "mtp_layers_block_type": ["full_attention", second]}


class NemotronFamily(Family):
    """A family that stores an MTP layer as two layers under `mtp.`."""

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        table = dict(self.tensors)
        for index, layer in enumerate(model.mtp_layers):
            first, second = (f"mtp.layers.{2 * index + part}." for part in (0, 1))
            for name, rule in self.tensors.items():
                if name.startswith("layers.{layer}."):
                    part = second if ".mlp." in name or "pre_mlp" in name else first
                    names = tuple(source.replace("backbone.layers.{layer}.", part) for source in rule.names)
                    table[name.replace("{layer}", str(layer))] = replace(rule, names=names)
            table |= {
                f"layers.{layer}.join.embedding_layernorm.weight": same(f"{first}enorm.weight"),
                f"layers.{layer}.join.hidden_layernorm.weight": same(f"{first}hnorm.weight"),
                f"layers.{layer}.join.linear_join.weight": same(f"{first}eh_proj.weight"),
                f"layers.{layer}.final_layernorm.weight": same(f"{second}final_layernorm.weight"),
            }
        return table


# fmt: off
MIXER = "backbone.layers.{layer}.mixer."
NEMOTRON_H = NemotronFamily(
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
        UnlimitedSteps(),
        NemotronExperts(),
        PatternMTP(),
        FixedSettings(normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0,
                      position_embedding_type="none"),
        RequiredKeys(mamba_hidden_act="silu", sliding_window=None),
        WrittenKeys(pad_token_id=None),
    ),
    tied="lm_head.weight",
    aliases={"layer_types": "layers_block_type", "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel",
             "mamba_conv_bias": "use_conv_bias", "mamba_dt_limit": "time_step_limit",
             "mamba_dt_min": "time_step_min",
             "num_local_experts": "n_routed_experts"},
    ignored=(*IGNORED, r"^mtp\."),
    prefix="backbone.",
)

FAMILIES = (NEMOTRON_H,)
