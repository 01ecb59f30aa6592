"""Validation of a model's positions: rotary, biases on scores, and positions that are added to the embedding."""

from __future__ import annotations

from megalith.config.model import ModelConfig
from megalith.config.rope_scaling import RopeScaling
from megalith.config.rules.requirements import require
from megalith.errors import ConfigError


def check_positions(model: ModelConfig) -> None:
    """Raise ConfigError for positions that a model of this shape cannot have."""
    _check_rotary(model)
    _check_alibi(model)
    _check_added_positions(model)


def _check_rotary(model: ModelConfig) -> None:
    if model.position_embedding_type == "rope" and (model.rotary_size % 2 or not model.rotary_size):
        raise ConfigError(
            f"RoPE rotates pairs of dimensions, but {model.rotary_size} of a head's {model.head_dim} are rotary "
            f"(model.rotary_percent {model.rotary_percent}); choose model.kv_channels and rotary_percent so that the "
            "number is even"
        )
    skip = model.no_rope_freq
    if isinstance(skip, list) and len(skip) != model.num_layers:
        raise ConfigError(
            f"model.no_rope_freq has {len(skip)} numbers, but model.num_layers is {model.num_layers}; list "
            "one for each layer (1: without RoPE, 0: with RoPE), or a single number"
        )
    if model.rope_scaling is not None:
        _check_rope_scaling(model.rope_scaling, model.rotary_size // 2)


def _check_alibi(model: ModelConfig) -> None:
    if model.position_embedding_type == "alibi" and model.attn_logit_softcapping is not None:
        raise ConfigError(
            f"model.attn_logit_softcapping {model.attn_logit_softcapping} and model.position_embedding_type alibi "
            "both change the scores, and the order of the two is not defined; leave one of them out"
        )
    if model.embedding_layernorm and model.mtp_num_layers:
        raise ConfigError(
            f"model.mtp_num_layers {model.mtp_num_layers} reads the embedding again in the last pipeline "
            "stage, which does not have the embedding's norm; set model.embedding_layernorm to false, or "
            "leave model.mtp_num_layers out"
        )


def _check_added_positions(model: ModelConfig) -> None:
    if model.position_embedding_type == "sinusoidal" and model.hidden_size % 2:
        raise ConfigError(
            f"model.hidden_size {model.hidden_size} is odd, but sinusoidal positions are half sines, half cosines; "
            "change model.hidden_size, or model.position_embedding_type"
        )
    if model.positions_skip_padding and not model.padding_positions:
        required = {"position_embedding_type": "sinusoidal"}
        require(model, required, "but without model.padding_positions only sinusoidal positions skip padding")
    if model.decoder_positions_after_layernorm:
        required = {"embedding_layernorm": True}
        require(model, required, "but model.decoder_positions_after_layernorm needs the norm")


def _check_rope_scaling(scaling: RopeScaling, pairs: int) -> None:
    if scaling.type == "longrope" and scaling.original_max_position_embeddings < 2:
        raise ConfigError(
            "model.rope_scaling.original_max_position_embeddings is 1, but longrope divides by its "
            "logarithm, which is 0; set it to the context length of the original training"
        )
    for name in ("short_factor", "long_factor") if scaling.type == "longrope" else ():
        count = len(getattr(scaling, name) or ())
        if count != pairs:
            raise ConfigError(
                f"model.rope_scaling.{name} has {count} numbers, but a head has {pairs} pairs of rotary "
                "dimensions; list one number per pair"
            )
    bounds = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
    for low, high in [bounds[scaling.type]] if scaling.type in bounds else []:
        values = getattr(scaling, low), getattr(scaling, high)
        if values[0] > values[1]:
            raise ConfigError(
                f"model.rope_scaling.{low} {values[0]} is above model.rope_scaling.{high} {values[1]}, but "
                f"frequencies between the two are blended; lower {low}, or raise {high}"
            )
