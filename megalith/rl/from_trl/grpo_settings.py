"""TRL's GRPOConfig, or a dict with its names, as settings of ours.

A value that is not the default of its class is a setting here, or without an effect for a reason that the run prints,
or refused by name: nothing is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megalith.config import RlConfig
from megalith.errors import ConfigError, nearest_of
from megalith.rl.from_trl.given_arguments import GivenArguments, given_arguments
from megalith.rl.from_trl.grpo_arguments import NO_EFFECT, OURS, RENAMED, TRANSLATED, UNCHANGED, WAYS

Settings = dict[str, Any]
DEFAULTS = {  # of a dict
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
LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "luspo", "cispo")
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
    """Translate TRL's arguments: "section.field" → value.

    Args:
        args: a dict of TRL's names and of settings of `rl`, a GRPOConfig, or an object with such attributes.
        prompts: number of training prompts, of which an epoch is made.
        world_size: number of processes, by which TRL multiplies its batch.

    Raises:
        ConfigError: for an argument that is not honoured.
    """
    given = given_arguments(args)
    _refuse_others(given)
    values = DEFAULTS | {name: value for name, value in given.values.items() if value is not None}
    if values.get("max_steps", 0) <= 0:  # TRL's default is −1: by epochs
        values.pop("max_steps", None)
    found = {path: values[name] for name, path in RENAMED.items() if name in values}
    found |= {f"rl.{name}": values[name] for name in OURS if name in values}
    found |= _batch(values, prompts, world_size)
    steps, epoch = found["train.train_iters"], found.pop("epoch")
    found |= _intervals(values, steps, epoch) | _optimizer(values, steps) | _precision(values, given)
    found |= _objective(values, given) | _engine(values) | _others(values, given)
    return found


def no_effect_notes(args: Mapping[str, Any] | object | None) -> list[str]:
    """Name the arguments that were changed and have no effect here, each with its reason."""
    given = given_arguments(args)
    reasons = NO_EFFECT | _unread(given)
    return [
        f"args.{name} has no effect: {reason}" for name, reason in reasons.items() if name in given.changed
    ]


def _unread(given: GivenArguments) -> dict[str, str]:
    """Arguments that TRL and transformers read only with others, each with its reason."""
    values = {name: value for name, value in given.values.items() if value is not None}
    found: dict[str, str] = {}
    if not values.get("use_vllm"):
        found |= dict.fromkeys(("vllm_mode", "vllm_enable_sleep_mode", *SERVER), "use_vllm is off")
    elif values.get("vllm_mode", "colocate") == "server":
        found["vllm_enable_sleep_mode"] = "vllm_mode is server"
    else:
        found |= dict.fromkeys(SERVER, "vllm_mode is colocate")
    if not values.get("sync_ref_model"):
        found |= dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), "sync_ref_model is off")
    if not values.get("load_best_model_at_end") and values.get("save_strategy") != "best":
        found |= dict.fromkeys(
            ("metric_for_best_model", "greater_is_better"), "load_best_model_at_end is off"
        )
    if values.get("tf32") is False or values.get("bf16") or values.get("fp16"):
        found["tf32"] = "matmuls have the run's precision, without TF32"
    for kind, strategy in {"logging": "steps", "save": "steps", "eval": "no"}.items():
        if (chosen := values.get(f"{kind}_strategy", strategy)) != "steps":
            found[f"{kind}_steps"] = f"{kind}_strategy is {chosen}"
    if "wandb" not in (values.get("report_to") or ()):
        found["run_name"] = "it is a name for Weights & Biases, which report_to does not have"
    if values.get("lr_scheduler_type") == "constant":
        found |= dict.fromkeys(
            ("warmup_steps", "warmup_ratio"), "lr_scheduler_type is constant, without a warm-up"
        )
    return found


def _refuse_others(given: GivenArguments) -> None:
    known = {*RENAMED, *OURS, *TRANSLATED, *NO_EFFECT, *_unread(given)}
    defaults = UNCHANGED | given.defaults
    for name, value in given.changed.items():
        if name in known or (name in defaults and not given.defaults and value == defaults[name]):
            continue
        if name in defaults or name in WAYS:
            default = f", {defaults[name]!r:.40}" if name in defaults else ""
            raise ConfigError(
                f"args.{name} is {given.changed[name]!r:.80}, which GRPOTrainer does not have{WAYS.get(name, '')}; "
                f"leave it at its default{default}"
            )
        raise ConfigError(
            f"GRPOTrainer has no argument {name!r}{nearest_of(name, known)}; leave it out, or give ours as settings"
        )


def _refuse(name: str, value: Any, way: str) -> None:
    raise ConfigError(f"args.{name} is {value!r:.80}, which is refused: {way}")


# Batches and steps


def _batch(values: dict[str, Any], prompts: int, world_size: int) -> Settings:
    """With `epoch`, the optimizer steps of one."""
    accumulation = values.get("gradient_accumulation_steps", 1)
    together = values["per_device_train_batch_size"] * world_size
    per_generation = _steps_per_generation(values, together, accumulation)
    each = values.get("num_generations", RlConfig.model_fields["num_generations"].default)
    iterations = values.get("num_iterations", 1)
    # As TRL's sampler: whole generation batches, each repeated for its micro-steps and iterations.
    batches = prompts * each // (together * per_generation)
    epoch = max(1, math.ceil(batches * per_generation * iterations / accumulation))
    return {
        "train.global_batch_size": together * accumulation,
        "rl.mini_batches": max(1, per_generation // accumulation),
        "train.train_iters": values.get("max_steps", math.ceil(values.get("num_train_epochs", 1) * epoch)),
        "epoch": epoch,
    }


def _steps_per_generation(values: dict[str, Any], together: int, accumulation: int) -> int:
    size = values.get("generation_batch_size")
    count = values.get("steps_per_generation", accumulation if size is None else size // together)
    if size is not None and size != count * together:
        _refuse(
            "generation_batch_size",
            size,
            f"it is not steps_per_generation ({count}) × per_device_train_batch_size × processes ({together}); leave "
            "one of them out",
        )
    is_fraction = accumulation % count == 0 and values.get("num_iterations", 1) == 1
    if count % accumulation and not (is_fraction and str(values.get("scale_rewards")) != "batch"):
        _refuse(
            "steps_per_generation",
            count,
            f"an optimizer step of {accumulation} gradient_accumulation_steps would cross generation batches; choose "
            f"a multiple of {accumulation}",
        )
    return count


def _intervals(values: dict[str, Any], steps: int, epoch: int) -> Settings:
    """Return the intervals of log, evaluations and checkpoints; a number below 1 is a share of all steps."""

    def interval(kind: str, default: Any, never: int | None) -> int | None:
        when = values.get(f"{kind}_strategy", "steps" if kind != "eval" else "no")
        if when not in ("no", "steps", "epoch"):
            _refuse(f"{kind}_strategy", when, "choose among no, steps and epoch")
        if when != "steps":
            return epoch if when == "epoch" else never
        return _steps(values.get(f"{kind}_steps", default), steps)

    found = {
        "log.log_interval": interval("logging", None, steps),
        "train.eval_interval": interval("eval", values.get("logging_steps", 500), steps),
    }
    found = {path: value for path, value in found.items() if value is not None}
    if "save_steps" in values or "save_strategy" in values:
        found["checkpoint.save_interval"] = interval("save", None, None)
    return found


def _steps(value: float | None, steps: int) -> int | None:
    if value is None:
        return None
    return math.ceil(steps * value) if 0 < value < 1 else int(value)


# Optimizer, schedule and precision


def _optimizer(values: dict[str, Any], steps: int) -> Settings:
    name, schedule = values.get("optim", "adamw_torch"), values.get("lr_scheduler_type", "linear")
    if name not in OPTIMIZERS:
        _refuse(
            "optim", name, f"choose among {', '.join(OPTIMIZERS)}, or give settings={{'optim.optimizer': …}}"
        )
    if schedule not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type is {schedule}; choose among {', '.join(SCHEDULES)}")
    found: Settings = {"optim.lr_decay_style": SCHEDULES[schedule]}
    if OPTIMIZERS[name] == "sgd":
        found |= {"optim.optimizer": "sgd", "optim.sgd_momentum": 0.0}
    warmup = values.get("warmup_steps") or values.get("warmup_ratio") or 0
    if schedule != "constant" and (
        warmup or "warmup_steps" in values
    ):  # transformers' constant has no warm-up
        found["optim.lr_warmup_iters"] = _steps(warmup, steps)
    return found | _least_rate(values, schedule)


def _least_rate(values: dict[str, Any], schedule: str) -> Settings:
    kwargs = dict(values.get("lr_scheduler_kwargs") or {})
    given = dict(kwargs)
    if schedule.startswith("cosine") and kwargs.get("num_cycles") == 0.5:
        del kwargs["num_cycles"]
    least, share = (kwargs.pop(name, None) for name in ("min_lr", "min_lr_rate"))
    has_least = (least is None) != (share is None)
    if kwargs or has_least != (schedule == "cosine_with_min_lr"):
        _refuse(
            "lr_scheduler_kwargs",
            given,
            f"{schedule} takes none here; cosine_with_min_lr takes min_lr or min_lr_rate",
        )
    if not has_least:
        return {}
    return {"optim.min_lr": least if least is not None else share * values["learning_rate"]}


def _precision(values: dict[str, Any], given: GivenArguments) -> Settings:
    if values.get("bf16"):
        return {"train.precision": "bf16"}
    if values.get("fp16"):
        return {"train.precision": "fp16"}
    return {"train.precision": "fp32"} if "bf16" in given.values else {}


# The objective and the engine


def _objective(values: dict[str, Any], given: GivenArguments) -> Settings:
    loss_type = values.get("loss_type", "dapo")
    if loss_type not in LOSS_TYPES:
        why = " (bnpo divides by each micro-batch's tokens)" if loss_type == "bnpo" else ""
        _refuse("loss_type", loss_type, f"choose among {', '.join(LOSS_TYPES)}{why}")
    if "max_completion_length" in given.values and given.values["max_completion_length"] is None:
        _refuse("max_completion_length", None, "a completion needs a bound; give the most tokens of one")
    longest = values.get("max_completion_length", RlConfig.model_fields["max_completion_length"].default)
    found = {"data.seq_length": values["max_prompt_length"] + longest}
    if "vllm_importance_sampling_cap" in values:
        found["rl.vllm_importance_sampling_clip_max"] = values["vllm_importance_sampling_cap"]
    elif "vllm_importance_sampling_clip_max" in given.defaults:
        found |= _mismatch(values)
    return found


def _mismatch(values: dict[str, Any]) -> Settings:
    """A bound that is None is none in TRL, whatever the mode."""
    mode, least = (values.get(f"vllm_importance_sampling_{name}") for name in ("mode", "clip_min"))
    if "vllm_importance_sampling_clip_max" in values:
        return {}
    if least is not None:
        way = f"with a clip_min {mode} needs an upper bound here; give one"
        _refuse("vllm_importance_sampling_clip_max", None, way)
    return {"rl.vllm_importance_sampling_mode": f"{mode.partition('_')[0]}_unbounded"}


def _engine(values: dict[str, Any]) -> Settings:
    if not values.get("use_vllm"):
        return {}
    found: Settings = {"rl.engine": "vllm"}
    if values.get("vllm_mode", "colocate") == "server":
        host, port = values.get("vllm_server_host", "127.0.0.1"), values.get("vllm_server_port", 8000)
        host = "127.0.0.1" if host == "0.0.0.0" else host
        found["rl.engine_url"] = values.get("vllm_server_base_url", f"http://{host}:{port}")
        if values.get("vllm_server_timeout", 240.0) != 240.0:
            found["rl.weight_sync_timeout"] = values["vllm_server_timeout"]
    elif "vllm_enable_sleep_mode" in values:
        found["rl.vllm_sleep_level"] = 2 if values["vllm_enable_sleep_mode"] else 0
    return found


def _others(values: dict[str, Any], given: GivenArguments) -> Settings:
    found: Settings = {}
    if values.get("use_cpu"):
        found["runtime.device"] = "cpu"
    if values.get("disable_dropout"):
        found |= {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
    if values.get("save_only_model"):
        found["checkpoint.save_optim"] = False
    if "ddp_timeout" in given.changed:
        found["runtime.distributed_timeout_minutes"] = values["ddp_timeout"] / 60
    for key, value in (values.get("model_init_kwargs") or {}).items():
        is_fp32 = key in ("dtype", "torch_dtype") and str(value) in FP32
        if key not in MODEL_KWARGS and not is_fp32:
            _refuse(
                f"model_init_kwargs[{key!r}]",
                value,
                "weights are held in fp32, and the model is what its folder says; leave it out",
            )
    return found | _trackers(values)


def _trackers(values: dict[str, Any]) -> Settings:
    names = values.get("report_to") or []
    names = [names] if isinstance(names, str) else names
    found: Settings = {}
    for name in (name for name in names if name != "none"):
        if name not in TRACKERS:
            _refuse(
                "report_to", values["report_to"], f"there are {' and '.join(TRACKERS)}; leave the others out"
            )
        found[TRACKERS[name]] = True
    if "log.wandb" in found and values.get("run_name"):
        found["log.wandb_name"] = values["run_name"]
    return found
