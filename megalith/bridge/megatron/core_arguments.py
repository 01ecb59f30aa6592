"""Megatron core's arguments of a model, most with the same names as Megalith's settings.

An argument that affects what the model computes and that every version writes has no default here: a checkpoint without
it is rejected. If an argument that later versions added is missing, the model does not have the feature.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from megalith.bridge.megatron.positions import CorePositions
from megalith.bridge.settings import Field, RequiredKeys, Tree
from megalith.config import ModelConfig
from megalith.errors import ConfigError, short_repr

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
    "add_bias_linear", "bias_gelu_fusion", "group_query_attention", "position_embedding_type",
    "squared_relu", "swiglu", "untie_embeddings_and_output_weights",
)  # fmt: skip
SIZED_TOKENIZERS = ("NullTokenizer", "NullMultimodalTokenizer", "TikTokenizer")
"""Tokenizers whose vocabulary Megatron takes from vocab_size."""
BALANCING = ("aux_loss", "seq_aux_loss", "sinkhorn", "none")


def vocabulary_size(args: Mapping[str, Any], rows: int) -> int:
    """Return the vocabulary size without padding; with padding if the arguments do not determine the unpadded size.

    Megatron reads vocab_size for few tokenizers. A value is not the tokenizer's size if it implies more padding rows
    than Megatron adds. Before core 0.18, a NullTokenizer has an additional entry for the end of a document.

    Args:
        args: Megatron's arguments.
        rows: rows of the stored embedding, padding included.
    """
    size, tokenizer = args.get("vocab_size"), args.get("tokenizer_type")
    if size and tokenizer == "NullTokenizer" and "null_tokenizer_eod_id" not in args:
        size += 1
    multiple = args.get("make_vocab_size_divisible_by") or rows
    largest_padding = multiple * (args.get("tensor_model_parallel_size") or 1) - 1
    if not size or not 0 <= rows - size <= largest_padding:
        return rows
    return size


def warn_of_ignored_arguments(args: Mapping[str, Any], rows: int, has_padding: bool) -> None:
    """Warn of arguments that Megatron reads and Megalith does not, or the reverse.

    Args:
        args: Megatron's arguments, with the vocabulary's size.
        rows: rows of the stored embedding.
        has_padding: the rows after the vocabulary are zeros or copies of one row, as converters write them.
    """
    size, tokenizer = args["vocab_size"], args.get("tokenizer_type")
    if size < rows and not has_padding and tokenizer not in (None, *SIZED_TOKENIZERS):
        warnings.warn(
            f"rows {size} to {rows - 1} of the vocabulary are left out as padding, because its args have vocab_size "
            f"{size}, which Megatron does not read for {tokenizer}; if the tokenizer has more entries, pass "
            "--vocab-size",
            stacklevel=3,
        )
    if args.get("num_experts") and args.get("moe_input_jitter_eps"):
        warnings.warn(
            f"its args have moe_input_jitter_eps {args['moe_input_jitter_eps']}, noise on the router's inputs in "
            "training, which Megalith does not have; training would continue without it",
            stacklevel=3,
        )


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
    """Maps the arguments of attention heads: group_query_attention, num_query_groups, qk_layernorm and kv_channels.

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
    """Maps window_size, for the layers selected by window_attn_skip_freq."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        size, frequency = args.get("window_size"), args.get("window_attn_skip_freq")
        if size is None:
            return {}
        if not isinstance(size, list | tuple):
            raise ConfigError(
                f"config.json has window_size {short_repr(size, 80)}, which is not a pair of numbers; correct it, or "
                "fetch it again"
            )
        return {"window_size": list(size)} | ({"window_attn_skip_freq": frequency} if frequency else {})

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
    """Maps mtp_num_layers and mtp_loss_scaling_factor."""

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
    """Maps the activation. GELU is the tanh approximation if it is fused with a bias or Transformer Engine computes it.

    Megatron core does not read openai_gelu, and does not use the op fuser for models with experts.
    """

    def read(self, args: Mapping[str, Any]) -> Tree:
        if args.get("swiglu"):
            return {"swiglu": True}
        if args.get("quick_geglu"):
            return {"gated_linear_unit": True, "activation": "quick_gelu"}
        if args.get("squared_relu"):
            return {"activation": "squared_relu"}
        fuses_ops = args.get("use_transformer_engine_op_fuser") and not args.get("num_experts")
        by_engine = args.get("transformer_impl") != "local" and (
            args.get("use_te_activation_func") or fuses_ops
        )
        is_fused = args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True)
        return {"activation": "gelu_tanh" if is_fused or by_engine else "gelu"}

    def write(self, model: ModelConfig) -> Tree:
        by_tanh = not model.gated and model.mlp_activation == "gelu_tanh"
        return {
            "swiglu": model.gated and model.mlp_activation == "silu",
            "quick_geglu": model.gated and model.mlp_activation == "quick_gelu",
            "squared_relu": model.mlp_activation == "squared_relu",
            "bias_gelu_fusion": by_tanh and model.mlp_bias,
            "openai_gelu": False,
            "use_te_activation_func": by_tanh and not model.mlp_bias,
        }


class _Biases:
    """Maps add_bias_linear (all linear layers and the router) and add_qkv_bias (not for latent attention)."""

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


class ExpertArguments:
    """Maps the expert arguments. Without num_experts they are ignored, because Megatron also sets their defaults."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        if not args.get("num_experts"):
            return {}
        fields = {name: args[name] for name in EXPERTS if args.get(name) is not None}
        kind, weight = (args.get(f"moe_{name}") for name in ("router_load_balancing_type", "aux_loss_coeff"))
        if kind in BALANCING:
            fields |= {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": weight or 0.0}
        elif np.any(weight):  # others do not affect what the model computes
            warnings.warn(
                f"its args have moe_router_load_balancing_type {kind!r} and moe_aux_loss_coeff {weight!r}, which "
                "Megalith does not support; training would continue without a load-balancing loss, unless "
                "model.moe_router_load_balancing_type and model.moe_aux_loss_coeff are set",
                stacklevel=4,
            )
        return fields

    def write(self, model: ModelConfig) -> Tree:
        if model.num_experts is None:
            return {"num_experts": None}
        if model.moe_router_score_function == "sparsemixer":
            raise ConfigError("moe_router_score_function sparsemixer, which Megatron-LM does not have")
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


class HybridExpertArguments(ExpertArguments):
    """Maps the expert arguments of hybrid models. The layer pattern selects the layers with experts."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        return {name: value for name, value in super().read(args).items() if name != "moe_layer_freq"}

    def write(self, model: ModelConfig) -> Tree:
        tree = super().write(model)
        return tree | {"moe_layer_freq": 1} if model.num_experts else tree


class BinaryHeadArguments:
    """Maps bert_binary_head, which implies two token types and a pooler."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        binary = args.get("bert_binary_head", True)
        return {"bert_binary_head": binary, "add_pooler": binary, "num_tokentypes": 2 * binary}

    def write(self, model: ModelConfig) -> Tree:
        return {"bert_binary_head": model.bert_binary_head}


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
    ExpertArguments(),
    CorePositions(),
    _Windows(),
    _MTP(),
    RequiredKeys(
        apply_residual_connection_post_layernorm=False, enable_mhc_connections=False,
        heterogeneous_layers_config_encoded_json=None, heterogeneous_layers_config_path=None,
        moe_apply_probs_on_input=False, moe_latent_size=None, moe_router_topk_limited_devices=None,
        moe_mlp_glu_interleave_size=None, moe_shared_expert_glu_interleave_size=None, mtp_use_repeated_layer=False,
        use_mup=False,
    ),
)  # fmt: skip
PLAIN_LAYERS = RequiredKeys(
    hybrid_layer_pattern=None, hybrid_override_pattern=None, is_hybrid_model=False, spec=None
)
