"""Translation of TRL's SFTConfig, DPOConfig, ORPOConfig, KTOConfig, RewardConfig and GKDConfig, or a dict with their
names, to settings.

A value that differs from the class's default becomes a setting, is ignored with a printed reason, or raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.rl.from_trl.argument_checks import notes_without_effect, reject_unsupported, unread_arguments
from megalith.rl.from_trl.arguments import Arguments, read_arguments
from megalith.rl.from_trl.training_settings import (
    Settings,
    check_model_argument,
    intervals,
    optimizer_settings,
    other_settings,
    precision_settings,
    reject,
)
from megalith.rl.from_trl.tuning_arguments import (
    DEFAULTS,
    GKD_TRANSLATED,
    NO_EFFECT,
    OURS,
    REMEDIES,
    RENAMED,
    TRANSLATED,
    UNSUPPORTED_DEFAULTS,
)

TRAINERS = {
    "sft": "SFTTrainer",
    "dpo": "DPOTrainer",
    "orpo": "ORPOTrainer",
    "kto": "KTOTrainer",
    "reward": "RewardTrainer",
    "gkd": "GKDTrainer",
}
SECTIONS = {"gkd": "sft", "orpo": "dpo"}  # of a method's data, where it has another name


def tuning_settings(
    method: str, args: Mapping[str, Any] | object | None, samples: int, world_size: int
) -> Settings:
    """Translate TRL's arguments to settings, "section.field" → value.

    Args:
        method: sft, dpo, orpo, kto, reward or gkd.
        args: a dict of TRL's names, a config object of TRL, or an object with such attributes.
        samples: number of samples in an epoch; with packing, of packed rows.
        world_size: number of processes, by which TRL multiplies its batch.

    Raises:
        ConfigError: for an unsupported argument.
    """
    arguments = read_arguments(args)
    section = SECTIONS.get(method, method)
    supported = _supported(method, arguments)
    reject_unsupported(TRAINERS[method], arguments, supported, UNSUPPORTED_DEFAULTS, REMEDIES)
    defaults = {"per_device_train_batch_size": 8, "max_length": 1024, "output_dir": f"runs/{method}"}
    values = defaults | DEFAULTS[method]
    values |= {name: value for name, value in arguments.values.items() if value is not None}
    if not sets_max_steps(args):
        values.pop("max_steps", None)
    unread = _unread(method, arguments)
    read = {name: path for name, path in (RENAMED | OURS[method]).items() if name not in unread}
    settings = {path: values[name] for name, path in read.items() if name in values}
    accumulation = values.get("gradient_accumulation_steps", 1)
    size = values["per_device_train_batch_size"] * world_size
    batches = samples // size if values.get("dataloader_drop_last") else math.ceil(samples / size)
    if not batches:
        reason = f"the dataset has {samples} samples, less than a batch of {size}; set it to False"
        reject("dataloader_drop_last", True, reason)
    epoch = max(1, math.ceil(batches / accumulation))
    settings["train.global_batch_size"] = size * accumulation
    settings |= _length(section, values, arguments)
    steps = values.get("max_steps", math.ceil(values.get("num_train_epochs", 1) * epoch))
    settings["train.train_iters"] = steps
    settings |= intervals(values, steps, epoch) | optimizer_settings(values, steps)
    settings |= precision_settings(values, arguments) | other_settings(values, arguments)
    if "chat_template_path" in values:
        settings[f"{section}.chat_template_path"] = values["chat_template_path"]
    settings |= {f"{section}.enabled": True} | _objective(section, values)
    if arguments.changed.get("train_sampling_strategy") == "sequential":  # KTOConfig's default
        reason = (
            "samples are shuffled every epoch; leave it out, or pass settings={'data.dataloader_type': 'single'}, "
            "which reads the samples once in their order"
        )
        reject("train_sampling_strategy", "sequential", reason)
    if method == "orpo":
        if "loss_type" in arguments.values:
            reject("loss_type", arguments.values["loss_type"], "ORPOConfig has no loss_type; omit it")
        return settings | {"dpo.loss_type": "orpo"}
    return settings | _distillation(values) if method == "gkd" else settings


def sets_max_steps(args: Mapping[str, Any] | object | None) -> bool:
    """Return True if the arguments set the number of steps. TRL's default, −1, counts epochs."""
    return (read_arguments(args).values.get("max_steps") or 0) > 0


def no_effect_notes(method: str, args: Mapping[str, Any] | object | None) -> list[str]:
    """Return a note for each changed argument that has no effect, with the reason."""
    arguments = read_arguments(args)
    unread = _unread(method, arguments)
    read = {*RENAMED, *TRANSLATED, *OURS[method]} - unread.keys()
    reasons = {name: reason for name, reason in (NO_EFFECT | unread).items() if name not in read}
    return notes_without_effect(arguments, reasons)


def _length(section: str, values: dict[str, Any], arguments: Arguments) -> Settings:
    """Translate the maximum length of samples."""
    if arguments.values.get("max_length", values["max_length"]) is None:
        reject("max_length", None, "rows have a length; set it")
    # TRL's RewardTrainer drops long samples, KTOTrainer keeps their start.
    modes = {"reward": "drop", "kto": "keep_start"}
    settings: Settings = {"data.seq_length": values["max_length"]}
    if section in modes:
        settings[f"{section}.truncation_mode"] = modes[section]
    return settings


def _objective(section: str, values: dict[str, Any]) -> Settings:
    if section == "sft":
        if values.get("loss_type", "nll") not in ("nll", "dft", "chunked_nll"):
            reject("loss_type", values["loss_type"], "choose nll or dft")
        if values.get("packing") and (strategy := values.get("packing_strategy", "bfd")) != "bfd":
            reject("packing_strategy", strategy, "it splits samples; choose bfd")
        return {"sft.loss_type": "dft"} if values.get("loss_type") == "dft" else {}
    smoothing, losses = values.get("label_smoothing"), values.get("loss_type", "sigmoid")
    if section == "dpo" and smoothing and losses in ("sigmoid", ["sigmoid"]):
        reason = "TRL ignores it with loss_type sigmoid; omit it, or pass settings={'dpo.label_smoothing': …} for cDPO"
        reject("label_smoothing", smoothing, reason)
    return {}


def _distillation(values: dict[str, Any]) -> Settings:
    """Translate GKD's divergence. Its loss has temperature 1; the argument `temperature` applies to sampling."""
    beta = values["beta"]
    divergence = {0: "forward_kl", 1: "reverse_kl"}.get(beta, "generalized_jsd")
    settings: Settings = {"distill.kd_ratio": 1.0, "distill.divergence": divergence}
    if divergence == "generalized_jsd":
        settings["distill.beta"] = beta
    if values.get("seq_kd") and values["lmbda"] != 1:
        reason = "the teacher's answers are sampled before the run (docs/distillation.md); set it to False"
        reject("seq_kd", True, reason)
    for key, value in (values.get("teacher_model_init_kwargs") or {}).items():
        check_model_argument("teacher_model_init_kwargs", key, value)
    if "teacher_model_name_or_path" in values:
        settings["distill.teacher"] = str(values["teacher_model_name_or_path"])
    return settings


def _unread(method: str, arguments: Arguments) -> dict[str, str]:
    """Return the arguments that TRL and transformers ignore because of other arguments, with reasons."""
    values = {name: value for name, value in arguments.values.items() if value is not None}
    reasons = unread_arguments(arguments)
    if values.get("max_steps", 0) > 0:
        reasons["num_train_epochs"] = "max_steps is set"
    if not values.get("packing"):
        reasons["packing_strategy"] = "packing is off"
    if not values.get("sync_ref_model"):
        reasons |= dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), "sync_ref_model is off")
    if values.get("f_divergence_type") != "alpha_divergence":
        reasons["f_alpha_divergence_coef"] = "f_divergence_type is not alpha_divergence"
    if "discopop" not in (values.get("loss_type") or ()):
        reasons["discopop_tau"] = "loss_type has no discopop"
    if method == "gkd":
        last = "only the last assistant message is in the loss"
        reasons |= {"assistant_only_loss": last, "completion_only_loss": last}
        if values.get("lmbda") == 1:
            reasons["seq_kd"] = "lmbda is 1"
    return reasons


def _supported(method: str, arguments: Arguments) -> set[str]:
    """Return the names of the arguments that are translated to settings or have no effect."""
    translated = GKD_TRANSLATED if method == "gkd" else set()
    return {
        *RENAMED,
        *OURS[method],
        *TRANSLATED,
        *translated,
        *NO_EFFECT,
        *_unread(method, arguments),
        "loss_type",
    }
