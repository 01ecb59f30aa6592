"""Maps Megatron's position arguments: the embedding type, and RoPE's settings and scaling.

Latent attention always uses RoPE, scaled by YaRN unless rope_type is "rope"; learned_absolute adds learned positions.
Otherwise YaRN is a position_embedding_type, and its arguments begin with yarn_. A rotary_scaling_factor of 1 means no
scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalith.bridge.settings import Tree
from megalith.config import ModelConfig
from megalith.config.rope_scaling import RopeScaling, with_megatron_mscales
from megalith.errors import ConfigError

KINDS = ("learned_absolute", "rope", "yarn", "none")
ROTARY = ("rotary_base", "rotary_interleaved", "rotary_percent")
ORIGINAL_LENGTH, BETA_FAST, BETA_SLOW = 4096, 32.0, 1.0  # YaRN's, if its arguments are None
LATENT_YARN = {
    "original_max_position_embeddings": ORIGINAL_LENGTH,
    "beta_fast": BETA_FAST,
    "beta_slow": BETA_SLOW,
    "truncate": True,
}
"""Settings of YaRN for latent attention in Megatron-LM: defaults of MLATransformerConfig, which no argument sets."""


class CorePositions:
    """Maps position_embedding_type, rotary_base and rope_scaling."""

    def read(self, args: Mapping[str, Any]) -> Tree:
        """Return settings of ModelConfig."""
        kind, latent = args["position_embedding_type"], bool(args.get("multi_latent_attention"))
        if args.get("use_rotary_position_embeddings") or (latent and kind == "none"):
            kind = "rope"
        if kind not in KINDS:
            raise ConfigError(
                f"config.json has position_embedding_type {kind!r}; supported: {', '.join(KINDS)}"
            )
        if kind in ("learned_absolute", "none") and not latent:
            return {"position_embedding_type": kind}
        _check(args)
        by_yarn = _takes_yarn(args, kind, latent)
        fields: Tree = {"position_embedding_type": "rope"} | {name: args[name] for name in ROTARY}
        if latent and by_yarn:
            del fields["rotary_percent"]  # Megatron core does not read it then
        if latent:
            fields["add_position_embedding"] = kind == "learned_absolute"
        if (frequency := args.get("no_rope_freq")) is not None:
            fields["no_rope_freq"] = frequency
        if scaling := _yarn(args, latent) if by_yarn else _scaling(args, latent):
            fields["rope_scaling"] = scaling
        return fields

    def write(self, model: ModelConfig) -> Tree:
        """Return Megatron's arguments. Raises ConfigError for scaling that they cannot express."""
        scaling = model.rope_scaling
        llama3, linear, yarn = (
            scaling is not None and scaling.type == kind for kind in ("llama3", "linear", "yarn")
        )
        kind = model.position_embedding_type
        if model.multi_latent_attention:
            rope_type = "yarn" if yarn else "rope"
            kind = "learned_absolute" if model.add_position_embedding else kind
        else:
            kind, rope_type = "yarn" if yarn else kind, None
        return {
            "position_embedding_type": kind,
            "use_rotary_position_embeddings": kind == "rope",
            "rotary_base": int(base) if (base := model.rotary_base).is_integer() else base,
            "rotary_percent": model.rotary_percent,
            "rotary_interleaved": model.rotary_interleaved,
            "no_rope_freq": model.layers_without_rope,
            "rope_type": rope_type,
            "use_rope_scaling": llama3,
            "rope_scaling_factor": scaling.factor if llama3 else 8.0,
            "rotary_seq_len_interpolation_factor": scaling.factor if linear else None,
            "rotary_scaling_factor": 1.0,
            **(_yarn_arguments(scaling, model.multi_latent_attention) if yarn else {}),
        }


def _check(args: Mapping[str, Any]) -> None:
    if missing := [name for name in ROTARY if name not in args]:
        raise ConfigError(
            f"config.json has no {', '.join(missing)}, which define the rotary positions; add them to the arguments in "
            "the checkpoint"
        )


def _takes_yarn(args: Mapping[str, Any], kind: str, latent: bool) -> bool:
    return args.get("rope_type") != "rope" if latent else kind == "yarn"


def _scaling(args: Mapping[str, Any], latent: bool) -> Tree | None:
    if latent:  # rotary positions without scaling, whatever the arguments say, but perhaps scores with it
        factor, of_all = args.get("rotary_scaling_factor") or 1, args.get("mscale_all_dim")
        if of_all and factor > 1:
            raise ConfigError(
                f"config.json has mscale_all_dim {of_all} and rotary_scaling_factor {factor} with "
                "rope_type rope, with which Megatron core scales the attention scores but not "
                "the positions; that is not supported"
            )
        return None
    if args.get("use_rope_scaling"):
        return {"type": "llama3", "factor": args.get("rope_scaling_factor", 8.0)}
    if (stretch := args.get("rotary_seq_len_interpolation_factor") or 1) > 1:
        return {"type": "linear", "factor": float(stretch)}
    return None


def _yarn(args: Mapping[str, Any], latent: bool) -> Tree | None:
    factor = args.get("rotary_scaling_factor")
    if factor is None:
        raise ConfigError(
            "config.json has no rotary_scaling_factor, which YaRN needs; add rotary_scaling_factor"
        )
    if factor <= 1:
        return None
    prefix = "" if latent else "yarn_"
    rounds = None if latent else args.get("yarn_correction_range_round_to_int")
    scaling: Tree = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": args.get(f"{prefix}original_max_position_embeddings")
        or ORIGINAL_LENGTH,
        "beta_fast": args.get(f"{prefix}beta_fast") or BETA_FAST,
        "beta_slow": args.get(f"{prefix}beta_slow") or BETA_SLOW,
        "truncate": True if rounds is None else rounds,
    }
    mscale = 1.0 if args.get("mscale") is None else args["mscale"]
    return with_megatron_mscales(scaling, mscale, args.get("mscale_all_dim") or 0.0, latent)


def _check_fixed_for_latents(scaling: RopeScaling) -> None:
    """Raise ConfigError for values other than Megatron-LM's, whose --yarn-* flags do not reach latent attention."""
    for name, value in LATENT_YARN.items():
        if (ours := getattr(scaling, name)) != value:
            raise ConfigError(
                f"rope_scaling.{name} is {ours}, but Megatron-LM always computes latent attention with {value} and "
                "has no argument for it; such a model cannot be exported"
            )


def _yarn_arguments(scaling: RopeScaling, latent: bool) -> Tree:
    """Return the arguments of YaRN. With latent attention, mscale_all_dim scales the attention scores too."""
    mscale, of_all = scaling.mscale or 1.0, scaling.mscale_all_dim or 0.0
    if latent:
        _check_fixed_for_latents(scaling)
    if (scaling.mscale or of_all) and not latent:
        raise ConfigError("rope_scaling with mscale, which Megatron core supports only for latent attention")
    if (magnitude := scaling.attention_factor) is not None and scaling.factor > 1:
        if magnitude < 1 and latent:
            raise ConfigError(
                f"rope_scaling with attention_factor {magnitude}, which is below 1, the minimum "
                "for latent attention in Megatron core"
            )
        if magnitude < 1:
            mscale, of_all = 0.0, (1 / magnitude - 1.0) / (scaling.magnitude() - 1.0)
        else:
            mscale = (magnitude - 1.0) / (scaling.magnitude() - 1.0)
    return {
        "rotary_scaling_factor": scaling.factor,
        "yarn_original_max_position_embeddings": scaling.original_max_position_embeddings,
        "yarn_beta_fast": scaling.beta_fast,
        "yarn_beta_slow": scaling.beta_slow,
        "yarn_correction_range_round_to_int": scaling.truncate,
        "mscale": mscale,
        "mscale_all_dim": of_all,
    }
