"""Kimi-Linear: three of four layers are Kimi Delta Attention, the others latent attention without position embedding.

Experts are as in DeepSeek-V3, under Mixtral's names in all layers but the first. config.json numbers layers from 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalith.bridge.delta_rows import QUERY_KEY_VALUE
from megalith.bridge.families.experts import (
    LATENT,
    LATENT_SIZES,
    ROUTED_EXPERTS,
    LatentHeads,
    MlpLayerTypes,
    RouterGroups,
    SharedExperts,
    SigmoidScores,
)
from megalith.bridge.families.llama import IGNORED, SIZES, TENSORS, UNTIED
from megalith.bridge.family import Family
from megalith.bridge.rows import Rule, gate_up, same, with_ones
from megalith.bridge.settings import (
    Field,
    FixedSettings,
    RequiredKeys,
    Tree,
    WrittenKeys,
    check_layer_types,
)
from megalith.config import ModelConfig
from megalith.errors import ConfigError

LINEAR = "linear_attn_config"


class KimiExperts(MlpLayerTypes):
    """Maps `mlp_layer_types`, or else `first_k_dense_replace`, to the layers with experts."""

    def write(self, model: ModelConfig) -> Tree:
        first = model.expert_layers[0] if model.expert_layers else model.num_layers
        if model.expert_layers == list(range(first, model.num_layers)):
            return {"first_k_dense_replace": first}
        return super().write(model)


class KimiLayers:
    """Maps `kda_layers`, `full_attn_layers` and the sizes of Kimi Delta Attention.

    Published config.json files have them in `linear_attn_config`; files that transformers writes have them at the top
    level.
    """

    def read(self, hf_config: Mapping[str, Any]) -> Tree:
        nested, layers = hf_config.get(LINEAR) or {}, hf_config["num_hidden_layers"]
        if not isinstance(nested, Mapping):
            raise ConfigError(
                f"config.json has {LINEAR} {nested!r}, which is not an object; correct {LINEAR}"
            )
        size = nested.get("head_dim", hf_config.get("linear_head_dim", 128))
        heads = nested.get("num_heads", hf_config.get("linear_num_heads", 32))
        taps = nested.get("short_conv_kernel_size", hf_config.get("linear_conv_kernel_dim", 4))
        return {
            "experimental_attention_variant": "kimi_delta_attention",
            "linear_attention_freq": _linear_layers(hf_config, nested, layers),
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": size,
            "linear_value_head_dim": size,
            "linear_conv_kernel_dim": taps,
        }

    def write(self, model: ModelConfig) -> Tree:
        linear = model.linear_attention_layers
        return {
            LINEAR: {
                "kda_layers": [layer + 1 for layer in linear],
                "full_attn_layers": [layer + 1 for layer in range(model.num_layers) if layer not in linear],
                "num_heads": model.linear_num_key_heads,
                "head_dim": model.linear_key_head_dim,
                "short_conv_kernel_size": model.linear_conv_kernel_dim,
            }
        }


def _linear_layers(hf_config: Mapping[str, Any], nested: Mapping[str, Any], layers: int) -> list[int]:
    kinds = hf_config.get("layer_types")
    if kinds is not None:
        check_layer_types(kinds, ("full_attention", "linear_attention"))
        return [int(kind == "linear_attention") for kind in kinds]
    if "kda_layers" not in nested or "full_attn_layers" not in nested:
        return [int(layer == 0 or layer % 4 > 0) for layer in range(layers)]
    linear, others = nested["kda_layers"], nested["full_attn_layers"]
    is_list = isinstance(linear, list) and isinstance(others, list)
    if not is_list or sorted((*linear, *others), key=str) != sorted(range(1, layers + 1), key=str):
        raise ConfigError(
            f"config.json has {LINEAR} with kda_layers {linear!r} and full_attn_layers {others!r}, which do not list "
            f"each of the layers 1 to {layers} once; correct them"
        )
    return [int(layer + 1 in linear) for layer in range(layers)]


def _joined(names: Sequence[str]) -> Rule:
    return Rule(tuple(OF_ATTENTION + name for name in names), QUERY_KEY_VALUE)


# fmt: off
OURS, OF_ATTENTION = "layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."
EXPERT = "model.layers.{layer}.block_sparse_moe."
KDA = {
    OURS + "linear_in.weight": _joined([f"{part}_proj.weight" for part in "qkv"]),
    OURS + "conv.weight": _joined([f"{part}_conv1d.weight" for part in "qkv"]),
    OURS + "linear_gates.weight": same(OF_ATTENTION + "b_proj.weight"),
    OURS + "linear_decay_down.weight": same(OF_ATTENTION + "f_a_proj.weight"),
    OURS + "linear_decay_up.weight": same(OF_ATTENTION + "f_b_proj.weight"),
    OURS + "linear_gate_down.weight": same(OF_ATTENTION + "g_a_proj.weight"),
    OURS + "linear_gate_up.weight": same(OF_ATTENTION + "g_b_proj.weight"),
    OURS + "time_step.weight": with_ones(OF_ATTENTION + "A_log", 2, 1),
    OURS + "time_step.bias": same(OF_ATTENTION + "dt_bias"),
    OURS + "out_norm.weight": same(OF_ATTENTION + "o_norm.weight"),
    OURS + "linear_out.weight": same(OF_ATTENTION + "o_proj.weight"),
}
NO_POSITIONS = {  # the rows of pairs are not reordered
    OURS + "linear_q_proj.weight": same(OF_ATTENTION + "q_proj.weight"),
    OURS + "linear_q_up_proj.weight": same(OF_ATTENTION + "q_b_proj.weight"),
    OURS + "linear_kv_down_proj.weight": same(OF_ATTENTION + "kv_a_proj_with_mqa.weight"),
}
MOE = {
    "layers.{layer}.mlp.router.weight": same(EXPERT + "gate.weight"),
    "layers.{layer}.mlp.router.expert_bias": same(EXPERT + "gate.e_score_correction_bias"),
    "layers.{layer}.mlp.experts.linear_fc1.weight":
        gate_up(EXPERT + "experts.{expert}.w1.weight", EXPERT + "experts.{expert}.w3.weight"),
    "layers.{layer}.mlp.experts.linear_fc2.weight": same(EXPERT + "experts.{expert}.w2.weight"),
    "layers.{layer}.mlp.shared_experts.linear_fc1.weight":
        gate_up(EXPERT + "shared_experts.gate_proj.weight", EXPERT + "shared_experts.up_proj.weight"),
    "layers.{layer}.mlp.shared_experts.linear_fc2.weight": same(EXPERT + "shared_experts.down_proj.weight"),
}
SPELLINGS = {  # Kimi's key → the rows'
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "model_max_length": "max_position_embeddings",
}
# fmt: on


class KimiFamily(Family):
    """A family with its own spellings of config.json keys, which `write_config` uses."""

    def read_config(self, hf_config: Mapping[str, Any]) -> ModelConfig:
        """Return the model configuration of a config.json. Raises ConfigError for unsupported values."""
        if (
            hf_config.get("moe_renormalize", True) is None
        ):  # in transformers this is not the default, but false
            raise ConfigError("config.json has moe_renormalize null; only true is supported")
        return super().read_config(hf_config)

    def write_config(self, model: ModelConfig) -> Tree:
        """Return the config.json of a model. Raises ConfigError if this family cannot express the model."""
        kimi = {key: alias for alias, key in SPELLINGS.items()}
        return {kimi.get(key, key): value for key, value in super().write_config(model).items()}


KIMI_LINEAR = KimiFamily(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    aliases={**SPELLINGS, "num_local_experts": "n_routed_experts"},
    defaults={
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "n_shared_experts": 1,
        "max_position_embeddings": 1048576,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.446,
        "rms_norm_eps": 1e-5,
    },
    tensors=TENSORS | LATENT | NO_POSITIONS | KDA | MOE,
    settings=(
        *[size for size in SIZES if size.setting not in ("num_query_groups", "kv_channels")],
        LatentHeads(),
        UNTIED,
        Field("q_lora_rank", "q_lora_rank", default=None),
        *LATENT_SIZES,
        *ROUTED_EXPERTS,
        KimiExperts(dense=1, count="first_k_dense_replace"),
        SharedExperts(),
        RouterGroups(method=False),
        SigmoidScores(),
        KimiLayers(),
        FixedSettings(
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            hidden_dropout=0.0,
            multi_latent_attention=True,
            position_embedding_type="none",
        ),
        WrittenKeys(pad_token_id=None),  # its default fits only the published vocabulary
        RequiredKeys(
            hidden_act="silu",
            attention_bias=False,
            moe_layer_freq=1,
            norm_topk_prob=True,
            mla_use_nope=True,
            moe_router_activation_func="sigmoid",
            num_nextn_predict_layers=0,
        ),
    ),
    tied="lm_head.weight",
    ignored=IGNORED,
    renamed={
        f".block_sparse_moe.{part}_proj.weight": f".mlp.{part}_proj.weight" for part in ("gate", "up", "down")
    },
)
FAMILIES = (KIMI_LINEAR,)
