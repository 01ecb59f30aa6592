"""Derive chat data, optimizer, schedule, precision, adapters, evaluation and output from Oumi's keys."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megalith.dialects.oumi.oumi_errors import SETTING_TO_KEY
from megalith.dialects.oumi.oumi_keys import ACTOR, ENGINE_KEYS, KWARGS_WITH_KEYS, TRAINER_KWARGS, VERL_PREFIX
from megalith.dialects.oumi.oumi_values import OumiDataset, OumiKeys

PRECISIONS = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16",
              "float32": "fp32", "fp32": "fp32", "float": "fp32", "auto": "auto", "none": "none"}  # fmt: skip
OPTIMIZERS = {
    **dict.fromkeys(("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("paged_adamw", "paged_adamw_32bit"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw in 8 bits"),
    "sgd": "sgd",
}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine", "constant": "constant",
             "constant_with_warmup": "constant"}  # fmt: skip
MXFP4 = {"quant_method": "mxfp4"}  # gpt-oss
TEXT_MODULES = {
    f"model.layers.0.{part}"
    for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
                 "mlp.up_proj", "mlp.down_proj", "mlp.experts")
}  # fmt: skip


def set_model(keys: OumiKeys) -> None:
    """Check model.model_kwargs. Only gpt-oss's MXFP4 quantization is supported."""
    kwargs = dict(keys["model.model_kwargs"])
    if kwargs.get("quantization_config") == MXFP4:
        del kwargs["quantization_config"]
        keys.notes.append("model.model_kwargs: published MXFP4 weights are dequantized before training")
    if kwargs:
        keys.problems.append(
            f"model.model_kwargs is {kwargs!r:.60}, which is not supported: the model follows its config.json; change "
            "that file"
        )


def set_chat(keys: OumiKeys, trainer: str, datasets: Sequence[OumiDataset]) -> None:
    """Set sequence length, loss masking, packing and chat template of SFT and DPO."""
    keys.set("data.seq_length", keys["model.model_max_length"] or 1024)
    keys.set(f"{trainer}.truncation_mode", "keep_start")
    collator, target = keys["data.train.collator_name"], keys["data.train.train_target"]
    if collator not in (None, "text_with_padding", "text_completions_only_with_padding"):
        keys.problems.append(
            f"data.train.collator_name is {collator!r}; for text use text_with_padding or "
            "text_completions_only_with_padding"
        )
    if str(target).lower() == "final_assistant_turn":
        keys.problems.append(
            "data.train.train_target is FINAL_ASSISTANT_TURN, which is not supported; use ALL_ASSISTANT_TURNS"
        )
    if trainer == "sft":
        masks_prompts = collator == "text_completions_only_with_padding" or target is not None
        keys.set("sft.assistant_only_loss", masks_prompts)
        keys.set("sft.completion_only_loss", masks_prompts)
        keys.set("sft.packing", keys["data.train.pack"])
    template = keys["model.chat_template"]
    if template not in (None, "auto") and "/" not in template and not template.endswith(".jinja"):
        if path := find_oumi_template(template):
            keys.values["model.chat_template"] = str(path)
        else:
            keys.problems.append(
                f"model.chat_template is {template!r}, a template of Oumi's package, which is not installed or has "
                "no such template; leave model.chat_template out for the tokenizer's template, or set it to the path "
                "of a Jinja file"
            )
    harmless = {"hf_dataset_path", "return_conversations", "return_tensors", "return_conversations_format"}
    for key, value in keys.values.items():
        if key.endswith("].sample_count") and not key.startswith("data.test."):
            keys.problems.append(
                f"{key} is {value}, which this trainer does not support, because it reads complete files; cut the "
                "files beforehand"
            )
    for index, dataset in enumerate(datasets):
        unsupported = {name for name in dataset.kwargs if name not in harmless} - {"messages_column"}
        if dataset.kwargs.get("messages_column", "messages") != "messages":
            unsupported.add("messages_column")
        if unsupported:
            keys.problems.append(
                f"data.train.datasets[{index}].dataset_kwargs has {', '.join(sorted(unsupported))}, which is not "
                "supported: docs/sft.md lists the record formats; convert the records beforehand"
            )


def find_oumi_template(name: str) -> Path | None:
    """Return the Jinja file of one of Oumi's chat templates, or None. Does not import Oumi."""
    spec = find_spec("oumi")
    if not spec or not spec.origin:
        return None
    path = Path(spec.origin).parent / "datasets" / "chat_templates" / f"{name}.jinja"
    return path if path.is_file() else None


def set_optimizer(keys: OumiKeys) -> None:
    """Set the optimizer, the dtypes of its moments, the learning rate and the weight decay."""
    name = keys["training.optimizer"].lower()
    if name not in OPTIMIZERS:
        keys.problems.append(f"training.optimizer is {name!r}; use one of {', '.join(OPTIMIZERS)}")
        return
    keys.set("optim.optimizer", OPTIMIZERS[name].split()[0])
    if OPTIMIZERS[name].endswith("8 bits") and keys.tree["optim"].get("optimizer_cpu_offload"):
        keys.notes.append(f"training.optimizer {name}: offloaded moments are fp32")
    elif OPTIMIZERS[name].endswith("8 bits"):
        keys.set("optim.exp_avg_dtype", "fp8")
        keys.set("optim.exp_avg_sq_dtype", "fp8")
    if OPTIMIZERS[name] == "sgd":
        for moment in ("adam_beta1", "adam_beta2", "adam_eps"):
            keys.tree["optim"].pop(moment, None)
    else:
        keys.tree["optim"].pop("sgd_momentum", None)
    if name.startswith("paged"):
        keys.notes.append(
            f"training.optimizer {name}: paging is not supported; offload with megatron.optimizer_config"
        )
    for name, key in (("lr", "training.learning_rate"), ("weight_decay", "training.weight_decay")):
        keys.set(f"optim.{name}", keys.value_of(key, f"{ACTOR}optim.{name}", default=keys[key]))


def set_schedule(keys: OumiKeys) -> None:
    """Set the learning-rate schedule: decay style, minimum, warmup."""
    name = keys.value_of(
        "training.lr_scheduler_type", f"{ACTOR}optim.lr_scheduler_type", default="linear"
    ).lower()
    if name not in SCHEDULES:
        keys.problems.append(f"training.lr_scheduler_type is {name!r}; use one of {', '.join(SCHEDULES)}")
        return
    keys.set("optim.lr_decay_style", SCHEDULES[name])
    kwargs = dict(keys["training.lr_scheduler_kwargs"])
    min_lr_text = kwargs.pop("min_lr", None)
    ratio_text = kwargs.pop("min_lr_rate", keys[f"{ACTOR}optim.min_lr_ratio"])
    lr, min_lr, ratio = map(_finite, (keys.tree["optim"]["lr"], min_lr_text, ratio_text))
    unread = (min_lr_text is not None and min_lr is None) or (ratio_text is not None and ratio is None)
    if kwargs.pop("num_cycles", 0.5) != 0.5 or kwargs or unread:
        keys.problems.append(
            f"training.lr_scheduler_kwargs is {keys['training.lr_scheduler_kwargs']}; min_lr, min_lr_rate and "
            "num_cycles 0.5 are supported"
        )
    if min_lr is not None:
        keys.set("optim.min_lr", min_lr)
    elif ratio is not None and lr is not None:  # optim.lr itself reports a rate that is not a number
        keys.set("optim.min_lr", lr * ratio)
    steps = keys.value_of("training.warmup_steps", f"{ACTOR}optim.lr_warmup_steps", default=0)
    if steps:
        keys.set("optim.lr_warmup_iters", steps)
    elif keys["training.warmup_ratio"]:
        keys.set("optim.lr_warmup_fraction", keys["training.warmup_ratio"])


def _finite(value: Any) -> float | None:
    try:
        return number if math.isfinite(number := float(value)) else None
    except (TypeError, ValueError, OverflowError):
        return None


def set_precision(keys: OumiKeys) -> bool:
    """Set train.precision. Returns True if the precision must be taken from the weights."""
    dtype, mixed = (
        str(keys[key]).lower() for key in ("model.torch_dtype_str", "training.mixed_precision_dtype")
    )
    for key, name in (("model.torch_dtype_str", dtype), ("training.mixed_precision_dtype", mixed)):
        if name not in PRECISIONS:
            keys.problems.append(f"{key} is {name!r}; use one of {', '.join(PRECISIONS)}")
            return False
    precision = PRECISIONS[mixed] if mixed != "none" else PRECISIONS[dtype]
    if precision == "auto":
        return True
    keys.set("train.precision", precision)
    return False


def set_steps(keys: OumiKeys, trainer: str) -> float | None:
    """Set the number of steps or epochs. Returns GRPO's epochs, whose steps depend on the number of prompts.

    Returns None if the number of steps is known, or for another trainer.
    """
    steps = keys.value_of("training.max_steps", f"{VERL_PREFIX}trainer.total_training_steps", default=-1)
    if steps > 0:
        keys.set("train.train_iters", steps)
        return None
    epochs = keys.value_of("training.num_train_epochs", f"{VERL_PREFIX}trainer.total_epochs", default=3)
    if trainer == "grpo":
        return epochs
    keys.set(f"{trainer}.num_train_epochs", epochs)
    return None


def set_output(keys: OumiKeys) -> None:
    """Set checkpoints, determinism, compilation and trackers."""
    steps = keys.value_of("training.save_steps", f"{VERL_PREFIX}trainer.save_freq", default=500)
    if steps > 0:
        keys.set("checkpoint.save_interval", steps)
    if keys["training.use_deterministic"] or keys["training.full_determinism"]:
        keys.set("train.deterministic", True)
    if keys["training.compile"]:
        keys.set("runtime.compile", True)
    uses_tensorboard = keys["training.enable_tensorboard"]
    if uses_tensorboard and find_spec("tensorboard") is None:
        if "training.enable_tensorboard" in keys:
            keys.notes.append(
                "training.enable_tensorboard has no effect because TensorBoard is not installed"
            )
        uses_tensorboard = False
    keys.set("log.tensorboard", uses_tensorboard)
    if not uses_tensorboard:
        keys.tree["log"].pop("tensorboard_dir", None)
    if not keys.tree["log"].get("wandb"):
        for name in ("wandb_name", "wandb_project"):
            keys.tree["log"].pop(name, None)
    if keys["training.try_resume_from_last_checkpoint"] and not keys["training.resume_from_checkpoint"]:
        keys.set("checkpoint.load", keys["training.output_dir"])


def set_evaluation(keys: OumiKeys, trainer: str) -> str:
    """Set the evaluations on data.validation. Returns Oumi's eval_strategy."""
    strategy = keys["training.eval_strategy"].lower()
    supported = ("no", "steps", "epoch") if trainer == "grpo" else ("no", "steps")
    if strategy not in supported:
        keys.problems.append(f"training.eval_strategy is {strategy!r}; use one of {', '.join(supported)}")
    if trainer == "grpo":
        interval = keys[f"{VERL_PREFIX}trainer.test_freq"]
        strategy = "steps" if interval > 0 else strategy
        max_prompts = keys[f"{VERL_PREFIX}data.val_max_samples"]
        if max_prompts > 0:
            keys.set("rl.max_eval_prompts", max_prompts)
        if strategy == "steps":
            keys.set("train.eval_interval", interval if interval > 0 else keys["training.eval_steps"])
    elif strategy == "steps":
        keys.set("train.eval_interval", keys["training.eval_steps"])
    else:
        keys.set("train.eval_iters", 0)
    if any(key.startswith("data.test.datasets[") for key in keys.values):
        keys.notes.append(
            "data.test has no effect: no trainer reads it, in Megalith or in Oumi; evaluations use data.validation"
        )
    return strategy


INITIALIZATIONS = {"PISA": "pissa", "OLORA": "olora"}  # Oumi's names of PEFT's methods


def set_adapters(keys: OumiKeys) -> None:
    """Set the settings of LoRA."""
    if not keys["training.use_peft"]:
        return
    keys.set("lora.rank", keys["peft.lora_r"])
    keys.set("lora.alpha", keys["peft.lora_alpha"])
    keys.set("lora.dropout", keys["peft.lora_dropout"])
    if keys["peft.lora_modules_to_save"]:
        keys.set("lora.modules_to_save", keys["peft.lora_modules_to_save"])
    method = keys["peft.lora_init_weights"].upper()
    if method in INITIALIZATIONS:
        keys.set("lora.init_lora_weights", INITIALIZATIONS[method])
    elif method != "DEFAULT":
        keys.problems.append(
            f"peft.lora_init_weights is {method}; use DEFAULT, {' or '.join(INITIALIZATIONS)}"
        )
    mode = keys["peft.peft_save_mode"].upper()
    if mode not in ("ADAPTER_ONLY", "MERGED"):
        keys.problems.append(f"peft.peft_save_mode is {mode}; use ADAPTER_ONLY or MERGED")
    for pattern in keys["peft.lora_exclude_modules"] or ():
        if any(_pattern_matches(str(pattern), module) for module in TEXT_MODULES):
            keys.problems.append(
                f"peft.lora_exclude_modules has {pattern!r}, which excludes modules of the language model; list the "
                "modules with adapters in lora_target_modules instead"
            )
    targets = keys["peft.lora_target_modules"]
    if targets is None:
        keys.problems.append(
            "peft.lora_target_modules is not set; set it to modules, such as [q_proj, v_proj], or all-linear"
        )
    elif targets != ["all-linear"]:
        keys.set("lora.targets", targets)


def _pattern_matches(pattern: str, module: str) -> bool:
    """Return True if a name or a regular expression, in PEFT's syntax, matches a module."""
    try:
        return module.endswith(f".{pattern}") or re.fullmatch(pattern, module) is not None
    except re.error:
        return True


def read_trainer_kwargs(keys: OumiKeys, trainer: str) -> bool:
    """Set the settings in training.trainer_kwargs. Returns True if pytorch_model.bin must be written."""
    kwargs, settings = dict(keys["training.trainer_kwargs"]), TRAINER_KWARGS[trainer]
    safetensors = kwargs.pop("save_safetensors", True)
    for name, value in kwargs.items():
        if name not in settings:
            keys.problems.append(
                f"training.trainer_kwargs has {name!r}, which is not supported; this trainer reads "
                f"{', '.join(sorted(settings))}"
            )
        elif (path := settings[name]) is not None:
            section, _, setting = path.partition(".")
            old = keys.tree.get(section, {}).get(setting)
            if (
                trainer == "grpo"
                and old != value
                and (name in KWARGS_WITH_KEYS or (path != "rl.engine" and ENGINE_KEYS.get(path) in keys))
            ):
                key = ENGINE_KEYS.get(path) or SETTING_TO_KEY[path]
                keys.problems.append(
                    f"training.trainer_kwargs.{name} is {value}, but {key} is {old}; remove {name} from "
                    "training.trainer_kwargs"
                )
            keys.set(path, value)
    return not safetensors
