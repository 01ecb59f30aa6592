"""Checks, for all trainers, of TRL arguments that have no effect or are not supported."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from megalith.errors import ConfigError, nearest_of
from megalith.rl.from_trl.arguments import Arguments


def unread_arguments(arguments: Arguments) -> dict[str, str]:
    """Return the arguments that transformers ignores because of other arguments, each with the reason."""
    values = {name: value for name, value in arguments.values.items() if value is not None}
    reasons: dict[str, str] = {}
    if not values.get("load_best_model_at_end") and values.get("save_strategy") != "best":
        reasons |= dict.fromkeys(
            ("metric_for_best_model", "greater_is_better"), "load_best_model_at_end is off"
        )
    if values.get("tf32") is False or values.get("bf16") or values.get("fp16"):
        reasons["tf32"] = "matmuls have the run's precision, without TF32"
    for kind, strategy in {"logging": "steps", "save": "steps", "eval": "no"}.items():
        if (chosen := values.get(f"{kind}_strategy", strategy)) != "steps":
            reasons[f"{kind}_steps"] = f"{kind}_strategy is {chosen}"
    if "wandb" not in (values.get("report_to") or ()):
        reasons["run_name"] = "it is a name for Weights & Biases, which is not in report_to"
    if values.get("lr_scheduler_type") == "constant":
        reasons |= dict.fromkeys(
            ("warmup_steps", "warmup_ratio"), "lr_scheduler_type is constant, without a warm-up"
        )
    return reasons


def notes_without_effect(arguments: Arguments, reasons: Mapping[str, str]) -> list[str]:
    """Return a note for each changed argument that has no effect, in the order of `reasons`."""
    return [
        f"args.{name} has no effect: {reason}"
        for name, reason in reasons.items()
        if name in arguments.changed
    ]


def reject_unsupported(
    trainer: str,
    arguments: Arguments,
    supported: Collection[str],
    only_values: Mapping[str, object],
    remedies: Mapping[str, str],
) -> None:
    """Raise ConfigError for a changed argument that the trainer does not support.

    Args:
        trainer: name of TRL's class.
        arguments: TRL's arguments, as `read_arguments` returns them.
        supported: names of arguments that are translated to settings or have no effect.
        only_values: for other arguments, by name, the only accepted value: the default, which a dict may contain
            explicitly.
        remedies: advice for the error message, by name of the argument.
    """
    defaults = {**only_values, **arguments.defaults}
    for name, value in arguments.changed.items():
        if name in supported or (name in defaults and not arguments.defaults and value == defaults[name]):
            continue
        if name in defaults or name in remedies:
            default = f", {defaults[name]!r:.40}" if name in defaults else ""
            raise ConfigError(
                f"args.{name} is {value!r:.80}, which {trainer} does not support{remedies.get(name, '')}; keep its "
                f"default{default}"
            )
        raise ConfigError(
            f"{trainer} has no argument {name!r}{nearest_of(name, supported)}; leave {name} out, or pass Megalith's "
            "settings as `settings`"
        )
