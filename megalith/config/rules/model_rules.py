"""Validation of the model's shape, independent of the layout."""

from __future__ import annotations

import math

from megalith.config.hybrid import PATTERN_LAYERS
from megalith.config.model import ModelConfig
from megalith.config.presets import PRESETS
from megalith.config.rules.expert_rules import check_experts
from megalith.config.rules.position_rules import check_positions
from megalith.config.rules.requirements import require
from megalith.errors import ConfigError


def check_model(model: ModelConfig) -> None:
    """Raise ConfigError unless a model of this shape can be built."""
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(model, name) is None:
            raise ConfigError(
                f"model.{name} is not set; set it, or choose a model.preset: {', '.join(PRESETS)}"
            )
    if model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not set, and there is no tokenizer to take it from; set model.vocab_size or "
            "data.tokenizer"
        )
    model.check_requirements("model")
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size {model.hidden_size} is not divisible by model.num_attention_heads "
            f"{model.num_attention_heads}; change one, or set model.kv_channels (the size of a head)"
        )
    if model.num_attention_heads % model.query_groups:
        raise ConfigError(
            f"model.num_attention_heads {model.num_attention_heads} is not divisible by model.num_query_groups "
            f"{model.query_groups}, but every key and value head serves the same number of query heads; set "
            "model.num_query_groups to a divisor, or to 0 (as many as query heads)"
        )
    if model.parallel_attn_mlp and model.num_experts is not None and not model.shared_layernorm:
        raise ConfigError(
            f"model.parallel_attn_mlp is on and model.num_experts is {model.num_experts}, but experts in parallel with "
            "attention need one norm for both; set model.shared_layernorm, or leave out one of the two"
        )
    _check_first_norm(model)
    _check_gate(model)
    _check_last_bias(model)
    _check_sink(model)
    _check_encoder(model)
    _check_two_stacks(model)
    if model.score_head and model.mtp_num_layers is not None:
        raise ConfigError(
            f"model.mtp_num_layers is {model.mtp_num_layers}, but a model with model.score_head predicts no tokens; "
            "leave model.mtp_num_layers out"
        )
    _check_latent_attention(model)
    check_positions(model)
    _check_window(model)
    _check_linear_attention(model)
    _check_mup(model)
    _check_lm_head(model)
    check_experts(model)


def _check_mup(model: ModelConfig) -> None:
    if model.use_mup and model.model_type != "gpt":
        raise ConfigError(
            f"model.use_mup is true, but µP supports only model.model_type gpt, not {model.model_type}; leave "
            "model.use_mup out"
        )
    if model.use_mup and model.add_decoder_lm_head:
        raise ConfigError(
            "model.use_mup is true, but µP has no rule for the layer of model.add_decoder_lm_head; remove one of the "
            "two settings"
        )
    if model.mup_base_num_layers is not None and model.apply_residual_connection_post_layernorm:
        raise ConfigError(
            f"model.mup_base_num_layers {model.mup_base_num_layers} scales the branches of a residual stream, but "
            "model.apply_residual_connection_post_layernorm normalizes the stream after each branch; leave one of "
            "the two settings out"
        )


def _check_lm_head(model: ModelConfig) -> None:
    if model.causal and not model.add_decoder_lm_head:
        required = {"lm_head_activation": None, "add_lm_head_dense_bias": True}
        require(model, required, "but without model.add_decoder_lm_head a decoder has no such layer")


def _check_first_norm(model: ModelConfig) -> None:
    if model.add_first_input_layernorm or model.embedding_layernorm:
        return
    if not model.apply_residual_connection_post_layernorm:
        raise ConfigError(
            "model.add_first_input_layernorm is false, but a first layer without that norm requires "
            "model.embedding_layernorm (ModernBERT) or model.apply_residual_connection_post_layernorm (GPT-1); set one "
            "of the two, or leave model.add_first_input_layernorm out"
        )


def _check_gate(model: ModelConfig) -> None:
    if model.swiglu and model.activation not in ("silu", type(model).model_fields["activation"].default):
        raise ConfigError(
            f"model.activation is {model.activation}, but model.swiglu gates the MLP by silu; leave model.activation "
            "out, or replace model.swiglu by model.gated_linear_unit"
        )
    if model.mlp_activation == "xielu":
        required = {
            "model_type": "gpt",
            "gated_linear_unit": False,
            "num_experts": None,
        }
        require(model, required, "which the learned slopes of model.activation xielu do not support")
    for name, plain in (("activation_func_clamp_value", None), ("glu_linear_offset", 0.0)):
        if getattr(model, name) != plain and not model.gated:
            raise ConfigError(
                f"model.{name} is {getattr(model, name)}, but the MLP has no gate; set model.gated_linear_unit or "
                f"model.swiglu, or leave {name} out"
            )


def _check_last_bias(model: ModelConfig) -> None:
    if not model.proj_bias_in_last_layer_only:
        return
    others = {
        "model_type": (model.model_type, "gpt"),
        "multi_latent_attention": (model.multi_latent_attention, False),
        "experimental_attention_variant": (model.experimental_attention_variant, None),
        "hybrid_layer_pattern": (model.hybrid_layer_pattern, None),
    }
    for name, (value, needed) in others.items():
        if value != needed:
            raise ConfigError(
                f"model.proj_bias_in_last_layer_only is on and model.{name} is {value}, but only decoders with "
                "ordinary attention in every layer have this bias; leave one of them out"
            )


def _check_sink(model: ModelConfig) -> None:
    if model.softmax_type == "vanilla":
        return
    allowed_values = {
        "attention_dropout": (model.attention_dropout, 0.0),
        "attn_logit_softcapping": (model.attn_logit_softcapping, None),
        "position_embedding_type": (model.position_embedding_type, "rope", "learned_absolute"),
        "multi_latent_attention": (model.multi_latent_attention, False),
        "model_type": (model.model_type, "gpt"),
    }
    for name, (value, *allowed) in allowed_values.items():
        if value not in allowed:
            raise ConfigError(
                f"model.softmax_type {model.softmax_type} is not supported with model.{name} {value}; set "
                f"model.{name} to {' or '.join(map(str, allowed))}"
            )


def _check_encoder(model: ModelConfig) -> None:
    if model.causal:
        return
    relative = ["relative"] if model.model_type == "t5" else []
    allowed_values = {
        "attention_chunk_size": (model.attention_chunk_size, None),
        "query_scaling_beta": (model.query_scaling_beta, None),
        "mtp_num_layers": (model.mtp_num_layers, None),
        "position_embedding_type": (
            model.position_embedding_type,
            "learned_absolute",
            "sinusoidal",
            "rope",
            *relative,
        ),
    }
    for name, (value, *allowed) in allowed_values.items():
        if value not in allowed:
            raise ConfigError(
                f"model.{name} is {value}, which requires causal attention, but with model.model_type "
                f"{model.model_type} every token attends to the full sequence; set model.{name} to "
                f"{' or '.join(map(str, allowed))}"
            )
    if model.model_type == "bert" and model.bert_binary_head and not model.pooler:
        raise ConfigError(
            "model.bert_binary_head reads the pooler's output, but model.add_pooler is false; leave one of the two "
            "out"
        )


def _check_two_stacks(model: ModelConfig) -> None:
    if model.position_embedding_type == "relative" and model.model_type != "t5":
        raise ConfigError(
            "model.position_embedding_type is relative, which only encoder-decoders support, but model.model_type "
            f"is {model.model_type}; set model.model_type to t5, or model.position_embedding_type to another value"
        )
    if model.model_type != "t5":
        return
    if not 0 < model.encoder_layers < model.num_layers:
        raise ConfigError(
            f"model.num_layers counts encoder and decoder layers and is {model.num_layers}, but "
            f"model.encoder_num_layers is {model.encoder_layers}; set model.encoder_num_layers to at least 1 "
            "and less than model.num_layers"
        )
    required = {
        "num_experts": None,
        "parallel_attn_mlp": False,
        "multi_latent_attention": False,
    }
    require(model, required, "which layers with cross-attention (model.model_type t5) do not support")
    if model.position_embedding_type == "relative" and model.attn_logit_softcapping is not None:
        raise ConfigError(
            f"model.attn_logit_softcapping {model.attn_logit_softcapping} and model.position_embedding_type relative "
            "both change the scores, and the order of the two is not defined; leave one of them out"
        )
    farthest, buckets = model.relative_attention_max_distance, model.relative_attention_num_buckets
    if model.position_embedding_type == "relative" and farthest <= buckets // 2:
        raise ConfigError(
            f"model.relative_attention_max_distance {farthest} must be larger than {buckets // 2}, the number of "
            f"distances with a bucket of their own (model.relative_attention_num_buckets {buckets}); raise "
            "model.relative_attention_max_distance, or lower model.relative_attention_num_buckets"
        )


def _check_latent_attention(model: ModelConfig) -> None:
    if not model.multi_latent_attention:
        return
    required = {
        "num_query_groups": 0,
        "kv_channels": None,
        "rotary_percent": 1.0,
        "rotary_base_local": None,
        "rotary_interleaved": False,
        "no_rope_freq": None,
        "qk_layernorm": False,
        "qk_l2_norm": False,
        "add_qkv_bias": False,
    }
    if model.add_position_embedding:
        required["mtp_num_layers"] = None
    require(model, required, "but model.multi_latent_attention defines heads, positions and norms itself")
    if model.position_embedding_type not in ("rope", "none"):
        raise ConfigError(
            "model.multi_latent_attention supports rotary positions or none, but model.position_embedding_type is "
            f"{model.position_embedding_type}; set model.position_embedding_type to rope or none"
        )
    if model.v_head_dim > model.head_dim:
        raise ConfigError(
            f"model.v_head_dim {model.v_head_dim} is more than model.qk_head_dim {model.qk_head_dim} + "
            f"model.qk_pos_emb_head_dim {model.qk_pos_emb_head_dim}; lower model.v_head_dim"
        )


def _check_window(model: ModelConfig) -> None:
    skip = model.window_attn_skip_freq
    if model.window_size is None:
        return
    before, after = model.window_size
    if model.model_type == "t5":
        raise ConfigError(
            f"model.window_size is [{before}, {after}], but encoder-decoders (model.model_type t5) have no windows; "
            "leave model.window_size out"
        )
    if after and model.causal:
        raise ConfigError(
            f"model.window_size [{before}, {after}] lets a query attend to {after} later tokens, but models with "
            f"model.model_type gpt are causal; set model.window_size to [{before}, 0]"
        )
    if not after and not model.causal:
        raise ConfigError(
            f"model.window_size [{before}, 0] lets a query attend only to earlier tokens, but with model.model_type "
            f"bert tokens attend to both sides; set model.window_size to [{before}, {before or 1}]"
        )
    if isinstance(skip, list) and len(skip) != model.num_layers:
        raise ConfigError(
            f"model.window_attn_skip_freq has {len(skip)} numbers, but model.num_layers is "
            f"{model.num_layers}; list one for each layer (1: with the window, 0: without), or a single number"
        )


def _check_linear_attention(model: ModelConfig) -> None:
    if model.attention_output_gate and model.multi_latent_attention:
        raise ConfigError(
            "model.attention_output_gate adds rows to the query projection, which model.multi_latent_attention "
            "replaces by a latent; leave one of the two settings out"
        )
    _check_pattern(model)
    if not model.recurrent_mixers:
        return
    frequency, heads = model.linear_attention_freq, (model.linear_num_key_heads, model.linear_num_value_heads)
    if isinstance(frequency, list) and model.pattern_layers is None and len(frequency) != model.num_layers:
        raise ConfigError(
            f"model.linear_attention_freq has {len(frequency)} numbers, but model.num_layers is "
            f"{model.num_layers}; list one for each layer (1: linear attention, 0: attention), or a single "
            "number"
        )
    if "gated_delta_net" in model.recurrent_mixers and heads[1] % heads[0]:
        raise ConfigError(
            f"model.linear_num_value_heads {heads[1]} is not divisible by model.linear_num_key_heads {heads[0]}, but "
            "every key head serves the same number of value heads; change one of the two settings"
        )
    if "kimi_delta_attention" in model.recurrent_mixers and heads[1] != heads[0]:
        raise ConfigError(
            f"model.linear_num_value_heads {heads[1]} differs from model.linear_num_key_heads {heads[0]}, but Kimi "
            "Delta Attention has a key head for every value head; set both settings to the same number"
        )
    if "mamba2" in model.recurrent_mixers:
        _check_mamba(model)
    if model.model_type != "gpt":
        raise ConfigError(
            f"model.model_type is {model.model_type}, which {mixers_text(model)} does not support; set "
            "model.model_type to gpt"
        )


def mixers_text(model: ModelConfig) -> str:
    """Return the model's mixers other than attention with the setting that selects each, for error messages."""
    names = {
        "gated_delta_net": "a gated delta net",
        "kimi_delta_attention": "Kimi Delta Attention",
        "mamba2": "a state space model (mamba2)",
        "short_conv": "a short convolution",
    }
    mixers = " and ".join(names[mixer] for mixer in model.recurrent_mixers)
    setting = "experimental_attention_variant" if model.pattern_layers is None else "hybrid_layer_pattern"
    return f"{mixers} (model.{setting})"


def _check_pattern(model: ModelConfig) -> None:
    pattern = model.hybrid_layer_pattern
    if pattern is None:
        return
    if others := sorted(set(pattern) - set(PATTERN_LAYERS)):
        raise ConfigError(
            f"model.hybrid_layer_pattern has {', '.join(map(repr, others))}; each layer is one of "
            f"{', '.join(f'{letter} ({branch})' for letter, branch in PATTERN_LAYERS.items())}"
        )
    if len(pattern) != model.num_layers:
        raise ConfigError(
            f"model.hybrid_layer_pattern has {len(pattern)} layers, but model.num_layers is {model.num_layers}; "
            "change one of the two"
        )
    if ("E" in pattern) != (model.num_experts is not None):
        raise ConfigError(
            f"model.hybrid_layer_pattern {pattern} has {pattern.count('E')} layers with experts (E), but "
            f"model.num_experts is {model.num_experts}; change one of the two"
        )
    required = {
        "model_type": "gpt",
        "parallel_attn_mlp": False,
        "apply_residual_connection_post_layernorm": False,
    }
    require(model, required, "but layers of model.hybrid_layer_pattern have a single branch")


def _check_mamba(model: ModelConfig) -> None:
    heads, groups = model.mamba_heads, model.mamba_num_groups
    if model.mamba_num_heads is None and 2 * model.hidden_size % model.mamba_head_dim:
        raise ConfigError(
            f"model.mamba_head_dim {model.mamba_head_dim} does not divide {2 * model.hidden_size}, which is 2 "
            "· model.hidden_size; change model.mamba_head_dim, or set model.mamba_num_heads"
        )
    if heads % groups:
        raise ConfigError(
            f"model.mamba_num_groups {groups} does not divide the {heads} heads (model.mamba_num_heads), but every "
            "group must have the same number of heads; change one of the two settings"
        )
    limit = model.mamba_dt_limit
    if limit is not None and not limit[0] < limit[1] < math.inf:
        raise ConfigError(
            f"model.mamba_dt_limit {limit} must be two step sizes, the second larger than the first and finite; "
            "correct the limits, or remove model.mamba_dt_limit for no limits"
        )
    if model.parallel_mixers:
        required = {
            "norm_placement": "pre",
            "num_experts": None,
            "multi_latent_attention": False,
            "parallel_attn_mlp": False,
            "apply_residual_connection_post_layernorm": False,
        }
        require(model, required, "which model.parallel_mixers does not support")
