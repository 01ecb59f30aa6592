"""Translates transformers' TrainingArguments, which all of TRL's trainers share, to settings."""

from __future__ import annotations

import math
import os
from typing import Any, NoReturn

from megalith.errors import ConfigError
from megalith.rl.from_trl.arguments import Arguments

Settings = dict[str, Any]
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
FP32 = ("float32", "torch.float32", "fp32", "None")


def reject(name: str, value: Any, reason: str) -> NoReturn:
    """Raise ConfigError for an argument's value."""
    raise ConfigError(f"args.{name} is {value!r:.80}, which is not supported: {reason}")


def intervals(values: dict[str, Any], steps: int, epoch: int) -> Settings:
    """Translate the intervals of logging, evaluation and checkpoints. A number below 1 is a fraction of all steps."""

    def interval(kind: str, default: Any, never: int | None) -> int | None:
        strategy = values.get(f"{kind}_strategy", "steps" if kind != "eval" else "no")
        if strategy not in ("no", "steps", "epoch"):
            reject(f"{kind}_strategy", strategy, "choose among no, steps and epoch")
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


def optimizer_settings(values: dict[str, Any], steps: int) -> Settings:
    """Translate the optimizer and schedule arguments, for a run of `steps` steps."""
    name, schedule = values.get("optim", "adamw_torch"), values.get("lr_scheduler_type", "linear")
    if name not in OPTIMIZERS:
        reject(
            "optim",
            name,
            f"choose among {', '.join(OPTIMIZERS)}, or pass settings={{'optim.optimizer': …}}",
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
        reject(
            "lr_scheduler_kwargs",
            all_kwargs,
            f"{schedule} supports none; cosine_with_min_lr supports min_lr or min_lr_rate",
        )
    if not has_min_lr:
        return {}
    return {"optim.min_lr": min_lr if min_lr is not None else min_lr_rate * values["learning_rate"]}


def precision_settings(values: dict[str, Any], arguments: Arguments) -> Settings:
    """Translate the precision. Returns no settings if `values` is a dict without a precision."""
    if values.get("bf16"):
        return {"train.precision": "bf16"}
    if values.get("fp16"):
        return {"train.precision": "fp16"}
    return {"train.precision": "fp32"} if "bf16" in arguments.values else {}


def other_settings(values: dict[str, Any], arguments: Arguments) -> Settings:
    """Translate the arguments of device, dropout, checkpoints, model and trackers."""
    settings: Settings = {}
    if "output_dir" in values:  # transformers expands ~
        settings["train.output_dir"] = os.path.expanduser(str(values["output_dir"]))
    if values.get("use_cpu"):
        settings["runtime.device"] = "cpu"
    if values.get("disable_dropout"):
        settings |= {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
    if values.get("save_only_model"):
        settings["checkpoint.save_optim"] = False
    if "ddp_timeout" in arguments.changed:
        settings["runtime.distributed_timeout_minutes"] = values["ddp_timeout"] / 60
    for key, value in (values.get("model_init_kwargs") or {}).items():
        check_model_argument("model_init_kwargs", key, value)
    return settings | _trackers(values)


def check_model_argument(name: str, key: str, value: Any) -> None:
    """Raise ConfigError if entry `key` of the dict argument `name`, passed to from_pretrained, would change results."""
    if key not in MODEL_KWARGS and not (key in ("dtype", "torch_dtype") and str(value) in FP32):
        reject(f"{name}[{key!r}]", value, "weights are fp32, and the folder determines the model; omit it")


def _trackers(values: dict[str, Any]) -> Settings:
    names = values.get("report_to") or []
    names = [names] if isinstance(names, str) else names
    settings: Settings = {}
    for name in (name for name in names if name != "none"):
        if name not in TRACKERS:
            reject(
                "report_to",
                values["report_to"],
                f"only {' and '.join(TRACKERS)} are supported; omit the others",
            )
        settings[TRACKERS[name]] = True
    if "log.wandb" in settings and values.get("run_name"):
        settings["log.wandb_name"] = values["run_name"]
    return settings
