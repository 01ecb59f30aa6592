"""Translation of TRL's GRPOConfig and RLOOConfig, or a dict with their names, to settings.

A value that differs from the class's default becomes a setting, is ignored with a printed reason, or raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.config import RlConfig
from megalith.config.extensions import LOSSES, is_extension
from megalith.rl.from_trl.argument_checks import notes_without_effect, reject_unsupported, unread_arguments
from megalith.rl.from_trl.arguments import Arguments, read_arguments
from megalith.rl.from_trl.grpo_arguments import (
    NO_EFFECT,
    NOT_RLOO,
    OURS,
    REMEDIES,
    RENAMED,
    RLOO,
    TRANSLATED,
    UNSUPPORTED_DEFAULTS,
)
from megalith.rl.from_trl.training_settings import (
    Settings,
    intervals,
    optimizer_settings,
    other_settings,
    precision_settings,
    reject,
)

DEFAULTS = {  # for a dict
    "learning_rate": 1e-6,
    "per_device_train_batch_size": 8,
    "max_prompt_length": 512,
    "output_dir": "runs/grpo",
}
RLOO_DEFAULTS = {"output_dir": "runs/rloo", "beta": 0.05, "num_generations": 2}
GENERATION = {  # keys of generation_kwargs
    "stop": "rl.stop_strings", "stop_strings": "rl.stop_strings", "max_tokens": "rl.max_completion_length",
    "max_new_tokens": "rl.max_completion_length", "temperature": "rl.temperature", "top_p": "rl.top_p",
    "top_k": "rl.top_k", "min_p": "rl.min_p", "repetition_penalty": "rl.repetition_penalty",
    "presence_penalty": "rl.presence_penalty", "frequency_penalty": "rl.frequency_penalty",
}  # fmt: skip
SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")


def settings_of(
    args: Mapping[str, Any] | object | None, prompts: int, world_size: int, trainer: str = "GRPOTrainer"
) -> Settings:
    """Translate TRL's arguments to settings, "section.field" → value.

    Args:
        args: a dict of TRL's names and of settings of `rl`, a GRPOConfig, or an object with such attributes.
        prompts: number of training prompts, from which the length of an epoch is computed.
        world_size: number of processes, by which TRL multiplies its batch.
        trainer: GRPOTrainer or RLOOTrainer.

    Raises:
        ConfigError: for an unsupported argument.
    """
    arguments = read_arguments(args)
    is_rloo = trainer == "RLOOTrainer"
    supported = {*RENAMED, *OURS, *TRANSLATED, *NO_EFFECT, *_unread(arguments)}
    if is_rloo:
        supported = (supported - NOT_RLOO) | {"normalize_advantages"}
    reject_unsupported(trainer, arguments, supported, UNSUPPORTED_DEFAULTS, REMEDIES)
    values = (
        DEFAULTS
        | (RLOO_DEFAULTS if is_rloo else {})
        | {name: value for name, value in arguments.values.items() if value is not None}
    )
    if values.get("max_steps", 0) <= 0:  # TRL's default is −1: by epochs
        values.pop("max_steps", None)
    settings = {path: values[name] for name, path in RENAMED.items() if name in values}
    unread = _unread(arguments)
    settings |= {f"rl.{name}": values[name] for name in OURS if name in values and name not in unread}
    settings |= _batch(values, prompts, world_size)
    steps, epoch = settings["train.train_iters"], settings.pop("epoch")
    settings |= (
        intervals(values, steps, epoch)
        | optimizer_settings(values, steps)
        | precision_settings(values, arguments)
    )
    settings |= _generation(values)
    settings |= _objective(values, arguments) | _engine(values) | other_settings(values, arguments)
    if is_rloo:
        settings |= RLOO | {
            "rl.use_kl_in_reward": values["beta"] > 0,
            "rl.whiten_advantages": bool(values.get("normalize_advantages")),
        }
    if values.get("max_tool_calling_iterations") is not None:  # calls of tools between two turns
        settings["rl.max_turns"] = values["max_tool_calling_iterations"] + 1
    return settings


def no_effect_notes(args: Mapping[str, Any] | object | None) -> list[str]:
    """Return a note for each changed argument that has no effect, with the reason."""
    arguments = read_arguments(args)
    return notes_without_effect(arguments, NO_EFFECT | _unread(arguments))


def _unread(arguments: Arguments) -> dict[str, str]:
    """Return the arguments that TRL and transformers ignore because of other arguments, with reasons."""
    values = {name: value for name, value in arguments.values.items() if value is not None}
    reasons = unread_arguments(arguments)
    if not values.get("use_vllm"):
        reasons |= dict.fromkeys(("vllm_mode", "vllm_enable_sleep_mode", *SERVER), "use_vllm is off")
    elif values.get("vllm_mode", "colocate") == "server":
        reasons["vllm_enable_sleep_mode"] = "vllm_mode is server"
    else:
        reasons |= dict.fromkeys(SERVER, "vllm_mode is colocate")
    if not values.get("sync_ref_model"):
        reasons |= dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), "sync_ref_model is off")
    return reasons


# Batches and steps


def _batch(values: dict[str, Any], prompts: int, world_size: int) -> Settings:
    """Translate batch sizes and numbers of steps. Also returns `epoch`, the number of optimizer steps per epoch."""
    accumulation = values.get("gradient_accumulation_steps", 1)
    micro_batch = values["per_device_train_batch_size"] * world_size
    per_generation = _steps_per_generation(values, micro_batch, accumulation)
    generations = values.get("num_generations", RlConfig.model_fields["num_generations"].default)
    iterations = values.get("num_iterations", 1)
    # Like TRL's sampler: complete generation batches, each repeated for its micro-steps and iterations.
    batches = prompts * generations // (micro_batch * per_generation)
    epoch = max(1, math.ceil(batches * per_generation * iterations / accumulation))
    return {
        "train.global_batch_size": micro_batch * accumulation,
        "rl.mini_batches": max(1, per_generation // accumulation),
        "train.train_iters": values.get("max_steps", math.ceil(values.get("num_train_epochs", 1) * epoch)),
        "epoch": epoch,
    }


def _steps_per_generation(values: dict[str, Any], micro_batch: int, accumulation: int) -> int:
    size = values.get("generation_batch_size")
    count = values.get("steps_per_generation", accumulation if size is None else size // micro_batch)
    if size is not None and size != count * micro_batch:
        reject(
            "generation_batch_size",
            size,
            f"it is not equal to steps_per_generation ({count}) × per_device_train_batch_size × processes "
            f"({micro_batch}); leave one of the two out",
        )
    is_fraction = accumulation % count == 0 and values.get("num_iterations", 1) == 1
    if count % accumulation and not (is_fraction and str(values.get("scale_rewards")) != "batch"):
        reject(
            "steps_per_generation",
            count,
            f"an optimizer step of {accumulation} gradient_accumulation_steps would cross generation batches; choose "
            f"a multiple of {accumulation}",
        )
    return count


# The objective and the engine


def _objective(values: dict[str, Any], arguments: Arguments) -> Settings:
    loss_type = values.get("loss_type", "dapo")
    if not is_extension(loss_type, LOSSES):
        reason = " (bnpo divides by each micro-batch's tokens)" if loss_type == "bnpo" else ""
        reject("loss_type", loss_type, f"choose among {', '.join(LOSSES)}{reason}")
    if "max_completion_length" in arguments.values and arguments.values["max_completion_length"] is None:
        reject("max_completion_length", None, "a completion needs a maximum number of tokens; set it")
    max_tokens = values.get("max_completion_length", RlConfig.model_fields["max_completion_length"].default)
    settings = {"data.seq_length": values["max_prompt_length"] + max_tokens} | _aggregation(values)
    if "vllm_importance_sampling_cap" in values:
        settings["rl.vllm_importance_sampling_clip_max"] = values["vllm_importance_sampling_cap"]
    elif "vllm_importance_sampling_clip_max" in arguments.defaults:
        settings |= _mismatch(values)
    return settings


def _aggregation(values: dict[str, Any]) -> Settings:
    """Return the advantage estimator that sums and normalizes several rewards in TRL's order."""
    order = values.get("multi_objective_aggregation", "sum_then_normalize")
    if order == "normalize_then_sum":
        return {"rl.advantage_estimator": "gdpo"}
    if order != "sum_then_normalize":
        reject("multi_objective_aggregation", order, "choose sum_then_normalize or normalize_then_sum")
    return {}


def _mismatch(values: dict[str, Any]) -> Settings:
    """Return Megalith's mode without bounds if TRL's clip_max is None, because None removes the upper bound in all of
    TRL's modes.
    """
    mode, clip_min = (values.get(f"vllm_importance_sampling_{name}") for name in ("mode", "clip_min"))
    if "vllm_importance_sampling_clip_max" in values:
        return {}
    if clip_min is not None:
        reason = f"with clip_min, {mode} needs an upper bound; set it"
        reject("vllm_importance_sampling_clip_max", None, reason)
    return {"rl.vllm_importance_sampling_mode": f"{mode.partition('_')[0]}_unbounded"}


def _generation(values: dict[str, Any]) -> Settings:
    """Translate generation_kwargs, with vLLM's or transformers' names."""
    settings: Settings = {}
    arguments = values.get("generation_kwargs") or {}
    if not isinstance(arguments, Mapping):
        reject("generation_kwargs", arguments, "pass a dict")
    for name, value in arguments.items():
        if name not in GENERATION:
            reject("generation_kwargs", {name: value}, f"choose among {', '.join(GENERATION)}")
        settings[GENERATION[name]] = value
    return settings


def _engine(values: dict[str, Any]) -> Settings:
    if not values.get("use_vllm"):
        return {}
    settings: Settings = {"rl.engine": "vllm"}
    if values.get("vllm_mode", "colocate") == "server":
        host, port = values.get("vllm_server_host", "127.0.0.1"), values.get("vllm_server_port", 8000)
        host = "127.0.0.1" if host == "0.0.0.0" else host
        settings["rl.engine_url"] = values.get("vllm_server_base_url", f"http://{host}:{port}")
        if values.get("vllm_server_timeout", 240.0) != 240.0:
            settings["rl.weight_sync_timeout"] = values["vllm_server_timeout"]
    elif "vllm_enable_sleep_mode" in values:
        settings["rl.vllm_sleep_level"] = 2 if values["vllm_enable_sleep_mode"] else 0
    return settings
