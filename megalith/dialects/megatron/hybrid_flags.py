"""Settings of Megatron's hybrid models, in which a pattern of letters gives each layer one mixer, MLP or experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalith.config.hybrid import PATTERN_LAYERS

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags

PATTERN = "--hybrid-layer-pattern"
STACK_SPECS = ("mamba_stack_spec", "hybrid_stack_spec")  # the specs of Megatron's own hybrid layers
UNSUPPORTED = {
    "|": "sets the boundaries of pipeline stages, which Megalith chooses from the number of layers",
    "D": "is sparse attention (DSA), which is not supported",
    "+": "is latent attention, which is not supported in a pattern",
}


def hybrid_layers(flags: ParsedFlags) -> None:
    """Set model.hybrid_layer_pattern, and with it model.num_layers and the sizes of Mamba-2 and gated delta nets.

    --spec may name Megatron's own hybrid stack. --is-hybrid-model has no effect if there is a pattern.
    """
    older, pattern = flags["--hybrid-override-pattern"], flags[PATTERN]
    if older is not None and pattern is not None:
        flags.problems.append(f"--hybrid-override-pattern is an older name of {PATTERN}; keep one of them")
        return
    flag, pattern = (PATTERN, pattern) if older is None else ("--hybrid-override-pattern", older)
    _check_spec(flags, pattern)
    if pattern is None:
        if flags["--is-hybrid-model"]:
            flags.problems.append(
                f"--is-hybrid-model needs {PATTERN}, which describes the layers; add {PATTERN}, for example M-M*-"
            )
        return
    pattern = _without_mtp(flags, flag, pattern)
    for letter in sorted(set(pattern)):
        if letter in UNSUPPORTED:
            flags.problems.append(
                f"{flag} {pattern} is refused: {letter!r} {UNSUPPORTED[letter]}; remove {letter!r}"
            )
        elif letter not in PATTERN_LAYERS:
            flags.problems.append(
                f"{flag} {pattern} has {letter!r}, which is not the letter of a layer; correct the pattern"
            )
    if flags["--num-layers"] not in (None, len(pattern)):
        flags.notes.append(
            f"--num-layers {flags['--num-layers']} has no effect with {flag}, which has {len(pattern)} layers, as in "
            "Megatron"
        )
    flags.set("model.hybrid_layer_pattern", pattern)
    flags.set("model.num_layers", len(pattern))
    if "M" in pattern:
        for name in ("num_heads", "head_dim", "state_dim", "num_groups"):
            if (size := flags[f"--mamba-{name.replace('_', '-')}"]) is not None:
                flags.set(f"model.mamba_{name}", size)
    if "G" in pattern:
        for name in ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads"):
            flags.set(f"model.linear_{name}", flags[f"--linear-{name.replace('_', '-')}"])


def _without_mtp(flags: ParsedFlags, flag: str, pattern: str) -> str:
    """Return the pattern without its layers for multi-token prediction, `/*E` for each, and set their number."""
    pattern, *mtp = pattern.split("/")
    if not mtp:
        return pattern
    expected = "*E" if "E" in pattern else "*-"
    if others := [part for part in mtp if part != expected]:
        flags.problems.append(
            f"{flag} {'/'.join([pattern, *mtp])} is refused: its layers of multi-token prediction are {others[0]!r}, "
            f"but in Megalith each has attention and {'experts' if 'E' in pattern else 'an MLP'}; write /{expected}"
        )
        return pattern
    if flags["--mtp-num-layers"] not in (None, len(mtp)):
        flags.notes.append(
            f"--mtp-num-layers {flags['--mtp-num-layers']} has no effect with {flag}, which has {len(mtp)} layers of "
            "multi-token prediction, as in Megatron"
        )
    flags.set("model.mtp_num_layers", len(mtp))
    return pattern


def _check_spec(flags: ParsedFlags, pattern: str | None) -> None:
    spec = flags["--spec"]
    if spec is None:
        return
    names = spec if isinstance(spec, list) else str(spec).split()
    if names[-1] not in STACK_SPECS:
        flags.problems.append(
            f"--spec {' '.join(names)} is refused: layers are built from the settings, not from a custom spec; "
            "remove --spec if it names the GPT layer"
        )
    elif pattern is None:
        flags.problems.append(f"--spec {' '.join(names)} needs {PATTERN}; add {PATTERN}, for example M-M*-")
