"""Settings of positions and of RoPE's scaling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megalith.config.rope_scaling import with_megatron_mscales
from megalith.dialects.megatron.derive.layer_lists import layer_list

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags


BETA_FAST, BETA_SLOW, MLA_ORIGINAL_LENGTH = 32.0, 1.0, 4096  # defaults without flags
YARN_FLAGS = (
    "--yarn-original-max-position-embeddings",
    "--yarn-beta-fast",
    "--yarn-beta-slow",
    "--no-yarn-correction-range-round-to-int",
)
UNREAD_WITH_LATENTS = ("--use-rope-scaling", "--rotary-seq-len-interpolation-factor", *YARN_FLAGS)


def positions(flags: ParsedFlags) -> None:
    """Set model.position_embedding_type, the rotary settings and model.rope_scaling.

    --multi-latent-attention always uses RoPE. With it, learned_absolute sets model.add_position_embedding.
    """
    kind = "rope" if flags["--use-rotary-position-embeddings"] else flags["--position-embedding-type"]
    latent = flags["--multi-latent-attention"]
    if latent and kind == "none":
        kind = "rope"  # latent attention always uses RoPE
    if kind == "relative" and flags.program == "pretrain-t5":
        flags.set("model.position_embedding_type", kind)
        return
    if kind == "none":
        flags.set("model.position_embedding_type", "none")
        return
    if kind not in ("learned_absolute", "rope", "yarn"):
        flags.problems.append(
            f"--position-embedding-type {kind} is not supported; use learned_absolute, rope, yarn or none"
        )
        return
    if kind == "learned_absolute" and latent:
        flags.set("model.add_position_embedding", not flags["--no-position-embedding"])
    elif kind == "learned_absolute":
        if flags["--no-position-embedding"]:
            flags.problems.append(
                "--no-position-embedding was removed from Megatron and is supported only with rotary "
                "positions; add --position-embedding-type rope, or remove --no-position-embedding"
            )
        return
    flags.set("model.position_embedding_type", "rope")
    flags.set("model.rotary_base", flags["--rotary-base"])
    if flags["--rotary-percent"] != 1 and not (latent and flags["--rope-type"] != "rope"):
        flags.set("model.rotary_percent", flags["--rotary-percent"])
    if flags["--rotary-interleaved"]:
        flags.set("model.rotary_interleaved", True)
    if (frequency := flags["--no-rope-freq"]) is not None:
        flags.set("model.no_rope_freq", layer_list(flags, "--no-rope-freq", frequency))
    if scaling := _rope_scaling(flags, kind, latent):
        flags.set("model.rope_scaling", scaling)


def _rope_scaling(flags: ParsedFlags, kind: str, latent: bool) -> dict[str, Any] | None:
    factor = flags["--rotary-scaling-factor"]
    unread = [flag for flag in UNREAD_WITH_LATENTS if flags[flag]]
    if latent and unread:
        flags.notes.append(f"{' '.join(unread)} has no effect with --multi-latent-attention, as in Megatron")
    if kind == "yarn" or (latent and flags["--rope-type"] != "rope"):
        return _yarn(flags, factor, latent) if factor > 1 else None
    if latent:
        if flags["--mscale-all-dim"] and factor > 1:
            flags.problems.append(
                f"--mscale-all-dim {flags['--mscale-all-dim']} is refused with --rope-type rope and "
                f"--rotary-scaling-factor {factor}: with these, Megatron scales the attention scores but not the "
                "positions, which is not supported; remove one of the three"
            )
        return None
    if flags["--use-rope-scaling"]:
        return {"type": "llama3", "factor": flags["--rope-scaling-factor"]}
    if (stretch := flags["--rotary-seq-len-interpolation-factor"] or 1) > 1:
        return {"type": "linear", "factor": float(stretch)}
    return None


def _yarn(flags: ParsedFlags, factor: float, latent: bool) -> dict[str, Any] | None:
    length, fast, slow, exact = (None if latent else flags[flag] for flag in YARN_FLAGS)
    original = length or (MLA_ORIGINAL_LENGTH if latent else None)
    if original is None:
        flags.problems.append(
            f"--rotary-scaling-factor {factor} with yarn needs the context length before the extension; add "
            "--yarn-original-max-position-embeddings"
        )
        return None
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast or BETA_FAST,
        "beta_slow": slow or BETA_SLOW,
        "truncate": not exact,
    }
    return with_megatron_mscales(scaling, flags["--mscale"], flags["--mscale-all-dim"], latent)
