"""Megatron core's GPT, hybrid model and BERT as families: their tensors and arguments, most with the same names as
Megalith's settings.

An argument that affects what the model computes and that every version writes has no default here: a checkpoint without
it is rejected. If an argument that later versions added is missing, the model does not have the feature.

In a fused SwiGLU matrix, Megatron has all gate rows before all up rows; in Megalith they alternate. Both group queries,
keys and values by KV head. The names are those of layers without Transformer Engine and of single experts; readers and
writers rename the others (`megatron_names.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megalith.bridge.family import Family
from megalith.bridge.megatron.hybrid_rows import (
    DELTA_TENSORS,
    MAMBA_TENSORS,
    DeltaLayers,
    PatternLayers,
)
from megalith.bridge.megatron.positions import CorePositions
from megalith.bridge.rows import RowRun, Rule, gate_up, interleaved_heads, same
from megalith.bridge.settings import Field, FixedSettings, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError


def fc1(name: str) -> Rule:
    """Return the rule of the MLP's first matrix: gate and up, or one matrix without a gate."""

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
    """A family whose MTP layers have other names and are numbered from 0."""

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


class _Required:
    """Check of the arguments that change the model's function. Every version of Megatron core writes them."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        names = [*REQUIRED]
        names += ["moe_router_topk"] * bool(args.get("num_experts"))
        names += [*LATENT, "qk_layernorm"] * bool(args.get("multi_latent_attention"))
        if missing := [name for name in names if name not in args]:
            raise ConfigError(
                f"config.json has no {', '.join(missing)}, which affect what the model computes; add them to the "
                "arguments in the checkpoint"
            )
        return {}

    def write(self, model: ModelConfig) -> Tree:
        return {}


class _Heads:
    """Maps attention heads.

    num_query_groups is used only with group_query_attention. Latent attention uses neither.
    """

    def read(self, args: Mapping[str, Any]) -> Tree:
        if not args.get("multi_latent_attention"):
            grouped = args.get("group_query_attention")
            fields: Tree = {"num_query_groups": args.get("num_query_groups", 0) if grouped else 0}
            return fields | {name: args[name] for name in HEADS if args.get(name) is not None}
        fields = {name: args[name] for name in ("multi_latent_attention", *LATENT)}
        return fields | {"latent_layernorm": args["qk_layernorm"]}

    def write(self, model: ModelConfig) -> Tree:
        if model.multi_latent_attention:
            return {
                "multi_latent_attention": True, "qk_layernorm": model.latent_layernorm, "qk_l2_norm": False,
                "kv_channels": None, "group_query_attention": False, "num_query_groups": 1,
                **{name: getattr(model, name) for name in LATENT},
            }  # fmt: skip
        grouped = model.query_groups != model.num_attention_heads
        return {
            "multi_latent_attention": False, "qk_layernorm": model.qk_layernorm, "qk_l2_norm": model.qk_l2_norm,
            "kv_channels": model.head_dim, "group_query_attention": grouped,
            "num_query_groups": model.query_groups if grouped else 1,
        }  # fmt: skip


class _Windows:
    """Maps window_size in the layers given by window_attn_skip_freq."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        if args.get("window_size") is None:
            return {}
        frequency = args.get("window_attn_skip_freq")
        return {"window_size": list(args["window_size"])} | (
            {"window_attn_skip_freq": frequency} if frequency else {}
        )

    def write(self, model: ModelConfig) -> Tree:
        mtp_windows = [model.window(layer) for layer in model.mtp_layers]
        if set(mtp_windows) - {
            model.window(0)
        }:  # Megatron uses the first layer's window, Megalith the last layer's
            raise ConfigError(
                "mtp_num_layers, if only one of the first and last layers has an attention window"
            )
        size = model.window_size
        return {
            "window_size": None if size is None else tuple(size),
            "window_attn_skip_freq": None if size is None else model.window_attn_skip_freq,
        }


class _MTP:
    """Maps multi-token prediction."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        if not args.get("mtp_num_layers"):
            return {}
        weight = args.get("mtp_loss_scaling_factor")
        fields: Tree = {"mtp_num_layers": args["mtp_num_layers"]}
        return fields if weight is None else fields | {"mtp_loss_scaling_factor": weight}

    def write(self, model: ModelConfig) -> Tree:
        return {
            "mtp_num_layers": model.mtp_num_layers,
            "mtp_loss_scaling_factor": model.mtp_loss_scaling_factor,
        }


class _Activation:
    """Maps the activation. GELU uses the tanh approximation in Megatron's fused kernel and with openai_gelu."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        if args.get("swiglu"):
            return {"swiglu": True}
        if args.get("quick_geglu"):
            return {"gated_linear_unit": True, "activation": "quick_gelu"}
        if args.get("squared_relu"):
            return {"activation": "squared_relu"}
        by_tanh = args.get("openai_gelu") or args.get("bias_gelu_fusion", True)
        return {"activation": "gelu_tanh" if by_tanh else "gelu"}

    def write(self, model: ModelConfig) -> Tree:
        by_tanh = not model.gated and model.mlp_activation == "gelu_tanh"
        return {
            "swiglu": model.gated and model.mlp_activation == "silu",
            "quick_geglu": model.gated and model.mlp_activation == "quick_gelu",
            "squared_relu": model.mlp_activation == "squared_relu",
            "bias_gelu_fusion": by_tanh and model.mlp_bias,
            "openai_gelu": by_tanh and not model.mlp_bias,
        }


class _Biases:
    """Maps add_bias_linear (all linear layers and the router) and add_qkv_bias (unless attention is latent)."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        names = ["add_bias_linear"] + ["add_qkv_bias"] * (not args.get("multi_latent_attention"))
        fields = {name: args[name] for name in names if name in args}
        return fields | {
            "add_router_bias": bool(args.get("num_experts")) and fields.get("add_bias_linear", True)
        }

    def write(self, model: ModelConfig) -> Tree:
        return {
            "add_bias_linear": model.proj_bias and model.mlp_bias,
            "add_qkv_bias": model.qkv_bias and not model.multi_latent_attention,
        }


class _Experts:
    """Maps experts. Their arguments are read only with num_experts, because they have defaults in Megatron too."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        if not args.get("num_experts"):
            return {}
        fields = {name: args[name] for name in EXPERTS if args.get(name) is not None}
        kind, weight = (args.get(f"moe_{name}") for name in ("router_load_balancing_type", "aux_loss_coeff"))
        if kind in BALANCING:  # others do not affect what the model computes
            fields |= {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": weight or 0.0}
        return fields

    def write(self, model: ModelConfig) -> Tree:
        if model.num_experts is None:
            return {"num_experts": None}
        if model.moe_apply_probs_on_input and model.moe_router_topk > 1:
            raise ConfigError(
                f"moe_apply_probs_on_input, which Megatron-LM supports only with moe_router_topk 1, not "
                f"{model.moe_router_topk}"
            )
        layers = [int(layer in model.expert_layers) for layer in range(model.num_layers)]
        return {
            **{name: getattr(model, name) for name in EXPERTS},
            "moe_router_load_balancing_type": model.moe_router_load_balancing_type,
            "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
            "moe_ffn_hidden_size": model.expert_size,
            "moe_layer_freq": 1 if all(layers) else layers,
        }


LAYER_COUNT = Field("num_layers", "num_layers")
SAME_NAMES = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "max_position_embeddings", "normalization",
)  # fmt: skip
OPTIONAL = (  # if missing: Megalith's default
    "make_vocab_size_divisible_by", "softmax_type",
    "activation_func_clamp_value", "glu_linear_offset", "attention_output_gate",
    "untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout", "init_method_std",
)  # fmt: skip
EXPERTS = (
    "num_experts", "moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_z_loss_coeff",
    "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_grouped_gemm", "moe_apply_probs_on_input",
)  # fmt: skip

HEADS = ("kv_channels", "qk_layernorm", "qk_l2_norm")
LATENT = ["q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"]
REQUIRED = (
    "add_bias_linear", "bias_gelu_fusion", "group_query_attention", "openai_gelu", "position_embedding_type",
    "squared_relu", "swiglu", "untie_embeddings_and_output_weights",
)  # fmt: skip
BALANCING = ("aux_loss", "seq_aux_loss", "sinkhorn", "none")

SETTINGS = (
    _Required(),
    LAYER_COUNT,
    *(Field(name, name) for name in SAME_NAMES),
    *(Field(name, name, default=None) for name in OPTIONAL),
    Field("vocab_size", "vocab_size"),
    Field("layernorm_epsilon", "norm_epsilon", alias="layernorm_epsilon"),
    Field("layernorm_zero_centered_gamma", "apply_layernorm_1p", alias="layernorm_zero_centered_gamma"),
    _Heads(),
    _Activation(),
    _Biases(),
    _Experts(),
    CorePositions(),
    _Windows(),
    _MTP(),
    RequiredKeys(
        apply_residual_connection_post_layernorm=False, enable_mhc_connections=False,
        heterogeneous_layers_config_encoded_json=None, heterogeneous_layers_config_path=None,
        moe_apply_probs_on_input=False, moe_latent_size=None,
        moe_mlp_glu_interleave_size=None, moe_shared_expert_glu_interleave_size=None, mtp_use_repeated_layer=False,
        use_mup=False,
    ),
)  # fmt: skip
PLAIN_LAYERS = RequiredKeys(
    hybrid_layer_pattern=None, hybrid_override_pattern=None, is_hybrid_model=False, spec=None
)
GPT = CoreFamily(
    architecture="GPTModel",
    model_type="megatron",
    tensors=TENSORS | DELTA_TENSORS,
    settings=(*SETTINGS, DeltaLayers(), PLAIN_LAYERS),
    tied="output_layer.weight",
    prefix="",
)


class _HybridExperts(_Experts):
    """Maps experts, whose layers are in the pattern."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        return {name: value for name, value in super().read(args).items() if name != "moe_layer_freq"}

    def write(self, model: ModelConfig) -> Tree:
        tree = super().write(model)
        return tree | {"moe_layer_freq": 1} if model.num_experts else tree


class HybridFamily(CoreFamily):
    """A family whose layers have Mamba-2 or, from core 0.17 on, gated delta nets, whose rows have the same names."""

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
            _HybridExperts() if isinstance(row, _Experts) else row
            for row in SETTINGS
            if row is not LAYER_COUNT
        ),
        RequiredKeys(experimental_attention_variant=None, mtp_num_layers=None),
    ),
    tied="output_layer.weight",
    prefix="",
)
"""Megatron core's MambaModel, HybridModel from core 0.17 on: layers with a single branch, by a pattern."""


class _BinaryHead:
    """Maps bert_binary_head, which implies two segments and a pooler."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        binary = args.get("bert_binary_head", True)
        return {"bert_binary_head": binary, "add_pooler": binary, "num_tokentypes": 2 * binary}

    def write(self, model: ModelConfig) -> Tree:
        return {"bert_binary_head": model.bert_binary_head}


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
        _BinaryHead(),
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
