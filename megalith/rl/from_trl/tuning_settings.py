"""Translation of TRL's SFTConfig, DPOConfig, KTOConfig and RewardConfig, or a dict with their names, to settings.

A value that differs from the class's default becomes a setting, or has no effect for a printed reason, or is an
error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.errors import ConfigError, nearest_of
from megalith.rl.from_trl.arguments import Arguments, read_arguments
from megalith.rl.from_trl.training_settings import (
    Settings,
    intervals,
    optimizer_settings,
    other_settings,
    precision_settings,
    reject,
)
from megalith.rl.from_trl.tuning_arguments import (
    DEFAULTS,
    NO_EFFECT,
    OURS,
    REMEDIES,
    RENAMED,
    TRANSLATED,
    UNSUPPORTED_DEFAULTS,
)

TRAINERS = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "kto": "KTOTrainer", "reward": "RewardTrainer"}


def tuning_settings(
    section: str, args: Mapping[str, Any] | object | None, samples: int, world_size: int
) -> Settings:
    """Translate TRL's arguments to settings, "section.field" → value.

    Args:
        section: sft, dpo, kto or reward.
        args: a dict of TRL's names, a config object of TRL, or an object with such attributes.
        samples: number of training samples, which determines the length of an epoch.
        world_size: number of processes, by which TRL multiplies its batch.

    Raises:
        ConfigError: for an unsupported argument.
    """
    arguments = read_arguments(args)
    _reject_unsupported(section, arguments)
    defaults = {"per_device_train_batch_size": 8, "max_length": 1024, "output_dir": f"runs/{section}"}
    values = defaults | DEFAULTS[section]
    values |= {name: value for name, value in arguments.values.items() if value is not None}
    if values.get("max_steps", 0) <= 0:  # TRL's default is −1: by epochs
        values.pop("max_steps", None)
    settings = {path: values[name] for name, path in (RENAMED | OURS[section]).items() if name in values}
    accumulation = values.get("gradient_accumulation_steps", 1)
    size = values["per_device_train_batch_size"] * world_size
    epoch = max(1, math.ceil(math.ceil(samples / size) / accumulation))
    settings["train.global_batch_size"] = size * accumulation
    settings |= _length(section, values, arguments, epoch)
    steps = settings.get("train.train_iters", math.ceil(values.get("num_train_epochs", 1) * epoch))
    settings |= intervals(values, steps, epoch) | optimizer_settings(values, steps)
    settings |= precision_settings(values, arguments) | other_settings(values, arguments)
    if "chat_template_path" in values:
        settings[f"{section}.chat_template_path"] = values["chat_template_path"]
    return settings | {f"{section}.enabled": True} | _objective(section, values)


def no_effect_notes(section: str, args: Mapping[str, Any] | object | None) -> list[str]:
    """Return a note for each changed argument that has no effect, with the reason."""
    arguments = read_arguments(args)
    reasons = NO_EFFECT | _unread(arguments)
    supported = {*RENAMED, *TRANSLATED, *OURS[section]} - _unread(arguments).keys()
    return [
        f"args.{name} has no effect: {reasons[name]}"
        for name in arguments.changed
        if name in reasons and name not in supported
    ]


def _length(section: str, values: dict[str, Any], arguments: Arguments, epoch: int) -> Settings:
    """Return the settings of the run's length and of the samples'."""
    if arguments.values.get("max_length", values["max_length"]) is None:
        reject("max_length", None, "rows have a length; set it")
    # TRL's RewardTrainer drops long samples, KTOTrainer keeps their start.
    modes = {"reward": "drop", "kto": "keep_start"}
    settings: Settings = {"data.seq_length": values["max_length"]}
    if section in modes:
        settings[f"{section}.truncation_mode"] = modes[section]
    if "max_steps" in values:
        return settings
    if values.get("packing"):  # the number of rows is known once they are packed
        return settings | {"sft.num_train_epochs": values.get("num_train_epochs", 1)}
    return settings | {"train.train_iters": math.ceil(values.get("num_train_epochs", 1) * epoch)}


def _objective(section: str, values: dict[str, Any]) -> Settings:
    if section == "sft":
        if values.get("loss_type", "nll") != "nll":
            reject("loss_type", values["loss_type"], "choose nll")
        if values.get("packing_strategy", "bfd") == "wrapped":
            reject("packing_strategy", "wrapped", "it splits samples; choose bfd")
    smoothing, losses = values.get("label_smoothing"), values.get("loss_type", "sigmoid")
    if section == "dpo" and smoothing and losses in ("sigmoid", ["sigmoid"]):
        reason = "TRL ignores it with loss_type sigmoid; omit it, or pass settings={'dpo.label_smoothing': …} for cDPO"
        reject("label_smoothing", smoothing, reason)
    return {}


def _unread(arguments: Arguments) -> dict[str, str]:
    """Return the arguments that TRL and transformers ignore because of other arguments, with reasons."""
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
    if values.get("max_steps", 0) > 0:
        reasons["num_train_epochs"] = "max_steps is set"
    if "discopop" not in (values.get("loss_type") or ()):
        reasons["discopop_tau"] = "loss_type has no discopop"
    return reasons


def _reject_unsupported(section: str, arguments: Arguments) -> None:
    trainer = TRAINERS[section]
    supported = {*RENAMED, *OURS[section], *TRANSLATED, *NO_EFFECT, *_unread(arguments), "loss_type"}
    defaults = UNSUPPORTED_DEFAULTS | arguments.defaults
    for name, value in arguments.changed.items():
        if name in supported or (name in defaults and not arguments.defaults and value == defaults[name]):
            continue
        if name in defaults or name in REMEDIES:
            default = f", {defaults[name]!r:.40}" if name in defaults else ""
            raise ConfigError(
                f"args.{name} is {value!r:.80}, which {trainer} does not support{REMEDIES.get(name, '')}; keep its "
                f"default{default}"
            )
        raise ConfigError(
            f"{trainer} has no argument {name!r}{nearest_of(name, supported)}; omit it, or pass Megalith's settings as "
            "`settings`"
        )
