"""Translation of TRL's GRPOConfig, or a dict with its names, to settings.

A value that differs from the class's default becomes a setting, or has no effect for a printed reason, or is an
error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.config import RlConfig
from megalith.config.extensions import LOSSES, is_extension
from megalith.errors import ConfigError, nearest_of
from megalith.rl.from_trl.arguments import Arguments, read_arguments
from megalith.rl.from_trl.grpo_arguments import (
    NO_EFFECT,
    OURS,
    REMEDIES,
    RENAMED,
    TRANSLATED,
    UNSUPPORTED_DEFAULTS,
)

Settings = dict[str, Any]
DEFAULTS = {  # for a dict
    "learning_rate": 1e-6,
    "per_device_train_batch_size": 8,
    "max_prompt_length": 512,
    "output_dir": "runs/grpo",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_apex_fused": "adamw", "sgd": "sgd"}
TRACKERS = {"tensorboard": "log.tensorboard", "wandb": "log.wandb"}
MODEL_KWARGS = (
    "attn_implementation",
    "device_map",
    "low_cpu_mem_usage",
    "use_cache",
    "use_kernels",
)
"""Keys of model_init_kwargs that do not change results."""
SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
FP32 = ("float32", "torch.float32", "fp32", "None")


def settings_of(args: Mapping[str, Any] | object | None, prompts: int, world_size: int) -> Settings:
    """Translate TRL's arguments to settings, "section.field" → value.

    Args:
        args: a dict of TRL's names and of settings of `rl`, a GRPOConfig, or an object with such attributes.
        prompts: number of training prompts, which determines the length of an epoch.
        world_size: number of processes, by which TRL multiplies its batch.

    Raises:
        ConfigError: for an unsupported argument.
    """
    arguments = read_arguments(args)
    _reject_unsupported(arguments)
    values = DEFAULTS | {name: value for name, value in arguments.values.items() if value is not None}
    if values.get("max_steps", 0) <= 0:  # TRL's default is −1: by epochs
        values.pop("max_steps", None)
    settings = {path: values[name] for name, path in RENAMED.items() if name in values}
    settings |= {f"rl.{name}": values[name] for name in OURS if name in values}
    settings |= _batch(values, prompts, world_size)
    steps, epoch = settings["train.train_iters"], settings.pop("epoch")
    settings |= _intervals(values, steps, epoch) | _optimizer(values, steps) | _precision(values, arguments)
    settings |= _objective(values, arguments) | _engine(values) | _others(values, arguments)
    return settings


def no_effect_notes(args: Mapping[str, Any] | object | None) -> list[str]:
    """Return a note for each changed argument that has no effect, with the reason."""
    arguments = read_arguments(args)
    reasons = NO_EFFECT | _unread(arguments)
    return [
        f"args.{name} has no effect: {reason}"
        for name, reason in reasons.items()
        if name in arguments.changed
    ]


def _unread(arguments: Arguments) -> dict[str, str]:
    """Return the arguments that TRL and transformers ignore because of other arguments, with reasons."""
    values = {name: value for name, value in arguments.values.items() if value is not None}
    reasons: dict[str, str] = {}
    if not values.get("use_vllm"):
        reasons |= dict.fromkeys(("vllm_mode", "vllm_enable_sleep_mode", *SERVER), "use_vllm is off")
    elif values.get("vllm_mode", "colocate") == "server":
        reasons["vllm_enable_sleep_mode"] = "vllm_mode is server"
    else:
        reasons |= dict.fromkeys(SERVER, "vllm_mode is colocate")
    if not values.get("sync_ref_model"):
        reasons |= dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), "sync_ref_model is off")
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


def _reject_unsupported(arguments: Arguments) -> None:
    supported = {*RENAMED, *OURS, *TRANSLATED, *NO_EFFECT, *_unread(arguments)}
    defaults = UNSUPPORTED_DEFAULTS | arguments.defaults
    for name, value in arguments.changed.items():
        if name in supported or (name in defaults and not arguments.defaults and value == defaults[name]):
            continue
        if name in defaults or name in REMEDIES:
            default = f", {defaults[name]!r:.40}" if name in defaults else ""
            raise ConfigError(
                f"args.{name} is {arguments.changed[name]!r:.80}, which GRPOTrainer does not support"
                f"{REMEDIES.get(name, '')}; keep its default{default}"
            )
        raise ConfigError(
            f"GRPOTrainer has no argument {name!r}{nearest_of(name, supported)}; omit it, or pass "
            "Megalith's settings as `settings`"
        )


def _reject(name: str, value: Any, reason: str) -> None:
    raise ConfigError(f"args.{name} is {value!r:.80}, which is not supported: {reason}")


# Batches and steps


def _batch(values: dict[str, Any], prompts: int, world_size: int) -> Settings:
    """Return the settings of batches and steps, and `epoch`: the optimizer steps per epoch."""
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
        _reject(
            "generation_batch_size",
            size,
            f"it is not steps_per_generation ({count}) × per_device_train_batch_size × processes ({micro_batch}); "
            "omit one of them",
        )
    is_fraction = accumulation % count == 0 and values.get("num_iterations", 1) == 1
    if count % accumulation and not (is_fraction and str(values.get("scale_rewards")) != "batch"):
        _reject(
            "steps_per_generation",
            count,
            f"an optimizer step of {accumulation} gradient_accumulation_steps would cross generation batches; choose "
            f"a multiple of {accumulation}",
        )
    return count


def _intervals(values: dict[str, Any], steps: int, epoch: int) -> Settings:
    """Return the intervals of logging, evaluation and checkpoints. A number below 1 is a fraction of all steps."""

    def interval(kind: str, default: Any, never: int | None) -> int | None:
        strategy = values.get(f"{kind}_strategy", "steps" if kind != "eval" else "no")
        if strategy not in ("no", "steps", "epoch"):
            _reject(f"{kind}_strategy", strategy, "choose among no, steps and epoch")
        if strategy != "steps":
            return epoch if strategy == "epoch" else never
        return _steps(values.get(f"{kind}_steps", default), steps)

    settings = {
        "log.log_interval": interval("logging", None, steps),
        "train.eval_interval": interval("eval", values.get("logging_steps", 500), steps),
    }
    settings = {path: value for path, value in settings.items() if value is not None}
    if "save_steps" in values or "save_strategy" in values:
        settings["checkpoint.save_interval"] = interval("save", None, None)
    return settings


def _steps(value: float | None, steps: int) -> int | None:
    if value is None:
        return None
    return math.ceil(steps * value) if 0 < value < 1 else int(value)


# Optimizer, schedule and precision


def _optimizer(values: dict[str, Any], steps: int) -> Settings:
    name, schedule = values.get("optim", "adamw_torch"), values.get("lr_scheduler_type", "linear")
    if name not in OPTIMIZERS:
        _reject(
            "optim", name, f"choose among {', '.join(OPTIMIZERS)}, or give settings={{'optim.optimizer': …}}"
        )
    if schedule not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type is {schedule}; choose among {', '.join(SCHEDULES)}")
    settings: Settings = {"optim.lr_decay_style": SCHEDULES[schedule]}
    if OPTIMIZERS[name] == "sgd":
        settings |= {"optim.optimizer": "sgd", "optim.sgd_momentum": 0.0}
    warmup = values.get("warmup_steps") or values.get("warmup_ratio") or 0
    if schedule != "constant" and (
        warmup or "warmup_steps" in values
    ):  # transformers' constant has no warm-up
        settings["optim.lr_warmup_iters"] = _steps(warmup, steps)
    return settings | _min_lr(values, schedule)


def _min_lr(values: dict[str, Any], schedule: str) -> Settings:
    kwargs = dict(values.get("lr_scheduler_kwargs") or {})
    all_kwargs = dict(kwargs)
    if schedule.startswith("cosine") and kwargs.get("num_cycles") == 0.5:
        del kwargs["num_cycles"]
    min_lr, min_lr_rate = (kwargs.pop(name, None) for name in ("min_lr", "min_lr_rate"))
    has_min_lr = (min_lr is None) != (min_lr_rate is None)
    if kwargs or has_min_lr != (schedule == "cosine_with_min_lr"):
        _reject(
            "lr_scheduler_kwargs",
            all_kwargs,
            f"{schedule} supports none; cosine_with_min_lr supports min_lr or min_lr_rate",
        )
    if not has_min_lr:
        return {}
    return {"optim.min_lr": min_lr if min_lr is not None else min_lr_rate * values["learning_rate"]}


def _precision(values: dict[str, Any], arguments: Arguments) -> Settings:
    if values.get("bf16"):
        return {"train.precision": "bf16"}
    if values.get("fp16"):
        return {"train.precision": "fp16"}
    return {"train.precision": "fp32"} if "bf16" in arguments.values else {}


# The objective and the engine


def _objective(values: dict[str, Any], arguments: Arguments) -> Settings:
    loss_type = values.get("loss_type", "dapo")
    if not is_extension(loss_type, LOSSES):
        reason = " (bnpo divides by each micro-batch's tokens)" if loss_type == "bnpo" else ""
        _reject("loss_type", loss_type, f"choose among {', '.join(LOSSES)}{reason}")
    if "max_completion_length" in arguments.values and arguments.values["max_completion_length"] is None:
        _reject("max_completion_length", None, "a completion needs a maximum number of tokens; set it")
    max_tokens = values.get("max_completion_length", RlConfig.model_fields["max_completion_length"].default)
    settings = {"data.seq_length": values["max_prompt_length"] + max_tokens} | _aggregation(values)
    if "vllm_importance_sampling_cap" in values:
        settings["rl.vllm_importance_sampling_clip_max"] = values["vllm_importance_sampling_cap"]
    elif "vllm_importance_sampling_clip_max" in arguments.defaults:
        settings |= _mismatch(values)
    return settings


def _aggregation(values: dict[str, Any]) -> Settings:
    """Return the estimator for TRL's order of summing several rewards and normalizing them."""
    order = values.get("multi_objective_aggregation", "sum_then_normalize")
    if order == "normalize_then_sum":
        return {"rl.advantage_estimator": "gdpo"}
    if order != "sum_then_normalize":
        _reject("multi_objective_aggregation", order, "choose sum_then_normalize or normalize_then_sum")
    return {}


def _mismatch(values: dict[str, Any]) -> Settings:
    """Return the mode for TRL's missing bounds: None means no bound in TRL, in every mode."""
    mode, clip_min = (values.get(f"vllm_importance_sampling_{name}") for name in ("mode", "clip_min"))
    if "vllm_importance_sampling_clip_max" in values:
        return {}
    if clip_min is not None:
        reason = f"with clip_min, {mode} needs an upper bound; set it"
        _reject("vllm_importance_sampling_clip_max", None, reason)
    return {"rl.vllm_importance_sampling_mode": f"{mode.partition('_')[0]}_unbounded"}


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


def _others(values: dict[str, Any], arguments: Arguments) -> Settings:
    settings: Settings = {}
    if values.get("use_cpu"):
        settings["runtime.device"] = "cpu"
    if values.get("disable_dropout"):
        settings |= {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
    if values.get("max_tool_calling_iterations") is not None:  # calls of tools between two turns
        settings["rl.max_turns"] = values["max_tool_calling_iterations"] + 1
    if values.get("save_only_model"):
        settings["checkpoint.save_optim"] = False
    if "ddp_timeout" in arguments.changed:
        settings["runtime.distributed_timeout_minutes"] = values["ddp_timeout"] / 60
    for key, value in (values.get("model_init_kwargs") or {}).items():
        is_fp32 = key in ("dtype", "torch_dtype") and str(value) in FP32
        if key not in MODEL_KWARGS and not is_fp32:
            _reject(
                f"model_init_kwargs[{key!r}]",
                value,
                "weights are fp32, and the folder determines the model; omit it",
            )
    return settings | _trackers(values)


def _trackers(values: dict[str, Any]) -> Settings:
    names = values.get("report_to") or []
    names = [names] if isinstance(names, str) else names
    settings: Settings = {}
    for name in (name for name in names if name != "none"):
        if name not in TRACKERS:
            _reject(
                "report_to",
                values["report_to"],
                f"only {' and '.join(TRACKERS)} are supported; omit the others",
            )
        settings[TRACKERS[name]] = True
    if "log.wandb" in settings and values.get("run_name"):
        settings["log.wandb_name"] = values["run_name"]
    return settings
