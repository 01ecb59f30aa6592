"""Megatron core's GPT, hybrid model and BERT as families, each with its tensors and arguments.

In a fused SwiGLU matrix, Megatron has all gate rows before all up rows; in Megalith they alternate. Both group queries,
keys and values by KV head. The names are the ones in layers without Transformer Engine and of single experts; readers
and writers rename all others (`megatron_names.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megalith.bridge.family import Family
from megalith.bridge.megatron.core_arguments import (
    LAYER_COUNT,
    PLAIN_LAYERS,
    SETTINGS,
    BinaryHeadArguments,
    ExpertArguments,
    HybridExpertArguments,
)
from megalith.bridge.megatron.hybrid_rows import DELTA_TENSORS, MAMBA_TENSORS, DeltaLayers, PatternLayers
from megalith.bridge.rows import RowRun, Rule, gate_up, interleaved_heads, same
from megalith.bridge.settings import FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig


def fc1(name: str) -> Rule:
    """Return the mapping rule of the MLP's first matrix: gate and up together, or one matrix without a gate."""

    def order(model: ModelConfig, rows: int) -> list[RowRun]:
        return gate_up(name).order(model, rows) if model.gated else [RowRun(0, 0, 0, rows)]

    return Rule((name,), order)


# fmt: off
TENSORS = {
    "embedding.word_embeddings.weight":     same("embedding.word_embeddings.weight"),
    "embedding.position_embeddings.weight": same("embedding.position_embeddings.weight"),
    **{
        f"layers.{{layer}}.{part}": same(f"decoder.layers.{{layer}}.{part}")
        for part in (
            "input_layernorm.weight", "input_layernorm.bias",
            "self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias",
            "self_attention.linear_proj.weight", "self_attention.linear_proj.bias",
            "self_attention.q_layernorm.weight", "self_attention.q_layernorm.bias",
            "self_attention.k_layernorm.weight", "self_attention.k_layernorm.bias",
            "self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_up_proj.weight",
            "pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias",
            "mlp.linear_fc2.weight", "mlp.linear_fc2.bias",
        )
    },
    **{
        f"layers.{{layer}}.self_attention.{ours}.{kind}":
            same(f"decoder.layers.{{layer}}.self_attention.{theirs}.{kind}")
        for ours, theirs in (("q_down_layernorm", "q_layernorm"), ("kv_down_layernorm", "kv_layernorm"))
        for kind in ("weight", "bias")
    },
    **{
        f"layers.{{layer}}.self_attention.{name}.weight":
            interleaved_heads(f"decoder.layers.{{layer}}.self_attention.{name}.weight", plain)
        for name, plain in (
            ("linear_q_proj", "qk_head_dim"), ("linear_q_up_proj", "qk_head_dim"),
            ("linear_kv_down_proj", "kv_lora_rank"),
        )
    },
    **{
        f"layers.{{layer}}.mlp.{ours}.{kind}": rule(f"decoder.layers.{{layer}}.mlp.{theirs}.{kind}")
        for ours, theirs, rule in (
            ("linear_fc1", "linear_fc1", fc1),
            ("shared_experts.linear_fc1", "shared_experts.linear_fc1", fc1),
            ("shared_experts.linear_fc2", "shared_experts.linear_fc2", same),
            ("experts.linear_fc1", "experts.local_experts.{expert}.linear_fc1", fc1),
            ("experts.linear_fc2", "experts.local_experts.{expert}.linear_fc2", same),
        )
        for kind in ("weight", "bias")
    },
    "layers.{layer}.mlp.router.weight":      same("decoder.layers.{layer}.mlp.router.weight"),
    "layers.{layer}.mlp.router.bias":        same("decoder.layers.{layer}.mlp.router.bias"),
    "layers.{layer}.self_attention.softmax_offset.weight":
        same("decoder.layers.{layer}.self_attention.core_attention.softmax_offset"),
    "layers.{layer}.mlp.router.expert_bias": same("decoder.layers.{layer}.mlp.router.expert_bias"),
    "layers.{layer}.mlp.shared_expert_gate.weight":
        same("decoder.layers.{layer}.mlp.shared_experts.gate_weight"),
    "final_layernorm.weight":               same("decoder.final_layernorm.weight"),
    "final_layernorm.bias":                 same("decoder.final_layernorm.bias"),
    "output_layer.weight":                  same("output_layer.weight"),
}
# fmt: on
MTP_TENSORS = {  # tensors of an MTP layer besides those of a transformer layer
    "join.embedding_layernorm": "enorm",
    "join.hidden_layernorm": "hnorm",
    "join.linear_join": "eh_proj",
    "final_layernorm": "final_layernorm",
}


class CoreFamily(Family):
    """A family with Megatron's names for MTP layers, which are numbered from 0."""

    def write_config(self, model: ModelConfig) -> Tree:
        """Return Megatron's arguments. The number of positions includes the padding rows of the position embedding."""
        if model.padding_positions:
            positions = {"max_position_embeddings": model.position_rows, "padding_positions": 0}
            positions["positions_skip_padding"] = False
            model = model.model_copy(update=positions)
        return super().write_config(model)

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        """Return the tensor table of a model, with its MTP layers."""
        table = dict(self.tensors)
        for number, layer in enumerate(model.mtp_layers):
            layer_prefix, prefix = f"layers.{layer}.", f"mtp.layers.{number}."
            for name, rule in self.tensors.items():
                if name.startswith("layers.") and name not in DELTA_TENSORS:
                    [name_there] = rule.names
                    inner = name_there.replace("decoder.layers.{layer}.", f"{prefix}transformer_layer.")
                    table[name.replace("layers.{layer}.", layer_prefix)] = replace(rule, names=(inner,))
            for one, other in MTP_TENSORS.items():
                for kind in ("weight", "bias"):
                    table[f"{layer_prefix}{one}.{kind}"] = same(f"{prefix}{other}.{kind}")
        return table


GPT = CoreFamily(
    architecture="GPTModel",
    model_type="megatron",
    tensors=TENSORS | DELTA_TENSORS,
    settings=(*SETTINGS, DeltaLayers(), PLAIN_LAYERS),
    tied="output_layer.weight",
    prefix="",
)


class HybridFamily(CoreFamily):
    """A family with Mamba-2 layers or, from core 0.17 on, gated delta nets. Both use the same tensor names."""

    def table(self, model: ModelConfig) -> Mapping[str, Rule]:
        """Return the tensor table of a model, with its gated delta nets."""
        table = dict(self.tensors)
        for layer in map(str, model.layers_with("gated_delta_net")):
            for name, rule in DELTA_TENSORS.items():
                names = tuple(source.replace("{layer}", layer) for source in rule.names)
                table[name.replace("{layer}", layer)] = replace(rule, names=names)
        return table


HYBRID = HybridFamily(
    architecture="MambaModel",
    model_type="megatron-hybrid",
    tensors={
        **TENSORS,
        **MAMBA_TENSORS,
        "final_layernorm.weight": same("decoder.final_norm.weight"),
        "final_layernorm.bias": same("decoder.final_norm.bias"),
    },
    settings=(
        PatternLayers(),
        *(
            HybridExpertArguments() if isinstance(row, ExpertArguments) else row
            for row in SETTINGS
            if row is not LAYER_COUNT
        ),
        RequiredKeys(experimental_attention_variant=None, mtp_num_layers=None),
    ),
    tied="output_layer.weight",
    prefix="",
)
"""Megatron core's MambaModel, HybridModel from core 0.17 on: layers with a single branch, by a pattern."""
BERT = CoreFamily(
    architecture="BertModel",
    model_type="megatron-bert",
    tensors={
        **{
            name: same(rule.names[0].replace("decoder.", "encoder.", 1))
            for name, rule in TENSORS.items()
            if "softmax_offset" not in name and "router" not in name and "expert" not in name
        },
        "layers.{layer}.mlp.linear_fc1.weight": fc1("encoder.layers.{layer}.mlp.linear_fc1.weight"),
        "layers.{layer}.mlp.linear_fc1.bias": fc1("encoder.layers.{layer}.mlp.linear_fc1.bias"),
        "embedding.tokentype_embeddings.weight": same("embedding.tokentype_embeddings.weight"),
        **{
            f"{ours}.{kind}": same(f"{theirs}.{kind}")
            for ours, theirs in (
                ("lm_head.dense", "lm_head.dense"),
                ("lm_head.layernorm", "lm_head.layer_norm"),
                ("pooler", "pooler.dense"),
                ("binary_head", "binary_head"),
            )
            for kind in ("weight", "bias")
        },
        "lm_head.vocabulary.bias": same("output_layer.bias"),
    },
    settings=(
        *SETTINGS,
        PLAIN_LAYERS,
        BinaryHeadArguments(),
        FixedSettings(model_type="bert", add_lm_head=True, lm_head_activation="gelu"),
        RequiredKeys(
            num_experts=None,
            qk_layernorm=False,
            qk_l2_norm=False,
            softmax_type="vanilla",
            multi_latent_attention=False,
            window_size=None,
            mtp_num_layers=None,
            experimental_attention_variant=None,
        ),
    ),
    tied="output_layer.weight",
    prefix="",
)


def family_of(model: ModelConfig) -> Family:
    """Return the family that a model is written as."""
    if model.hybrid_layer_pattern is not None:
        return HYBRID
    return BERT if model.model_type == "bert" else GPT
