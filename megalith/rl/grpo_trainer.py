"""GRPOTrainer with TRL's signature, for scripts that were written for it.

    from megalith.rl import GRPOTrainer
    GRPOTrainer(model="models/Qwen2.5-0.5B", reward_funcs=f, args={"max_steps": 100, …}, train_dataset=records).train()

`args` is a dict, TRL's GRPOConfig, or anything with its attributes. What ours are called stands in ARGUMENTS; names of
the section rl are TRL's own. Of an object the arguments that we do not have are left out; in a dict they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.bridge.peft import ONLY
from megalith.config import RlConfig, RunConfig
from megalith.errors import ConfigError, nearest_of
from megalith.launch.launcher import this_process
from megalith.rl.grpo import RewardGiven, train_grpo
from megalith.training.trainer import TrainingResult

ARGUMENTS: dict[str, str] = {
    "learning_rate": "optim.lr",
    "weight_decay": "optim.weight_decay",
    "adam_beta1": "optim.adam_beta1",
    "adam_beta2": "optim.adam_beta2",
    "adam_epsilon": "optim.adam_eps",
    "max_grad_norm": "optim.clip_grad",
    "warmup_steps": "optim.lr_warmup_iters",
    "max_steps": "train.train_iters",
    "per_device_train_batch_size": "train.micro_batch_size",
    "output_dir": "train.output_dir",
    "seed": "train.seed",
    "logging_steps": "log.log_interval",
    "eval_steps": "train.eval_interval",
    "save_steps": "checkpoint.save_interval",
    "save_total_limit": "checkpoint.keep_last",
    "max_prompt_length": "rl.max_prompt_length",
}
OTHERS = (
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_train_epochs",
    "bf16",
    "eval_strategy",
    "lr_scheduler_type",
)
"""What needs more than another name."""
OUR_RL = [
    name
    for name in RlConfig.model_fields
    if name not in ("prompts", "eval_prompts", "rollouts", "reward_funcs")
]
DEFAULTS = {
    "learning_rate": 1e-6,
    "per_device_train_batch_size": 8,
    "max_prompt_length": 512,
    "output_dir": "runs/grpo",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}

OF_TRL = {
    "processing_class": ": the tokenizer is that of the weights; name another one by "
    'settings={"data.tokenizer_type": …, "data.tokenizer_model": …}',
}
LORA = {"r": "lora.rank", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout"}


class GRPOTrainer:
    """Trains the policy in `model`, a Hugging Face folder or a run of ours, on `train_dataset`."""

    def __init__(
        self,
        model: str | Path,
        reward_funcs: str | RewardGiven | Sequence[str | RewardGiven],
        args: Mapping[str, Any] | object | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        peft_config: Mapping[str, Any] | object | None = None,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ):
        """`train_dataset`: records with a `prompt`, such as a Hugging Face dataset; `eval_dataset`: those that the
        policy is judged by, at the end and by `eval_strategy`. `peft_config`: PEFT's LoraConfig, or a dict of its
        fields. `settings`: of ours, such as {"parallel.tensor_model_parallel_size": 2}. Raises ConfigError for
        `others`, TRL's further arguments, and for what we do not have of these."""
        if given := [name for name, value in others.items() if value is not None]:
            raise ConfigError(f"GRPOTrainer takes no {given[0]}{OF_TRL.get(given[0], '; leave it out')}")
        if not isinstance(model, str | Path):
            raise ConfigError(
                f"model is a {type(model).__name__}; give the folder of its weights, for layouts are chosen at loading"
            )
        if train_dataset is None:
            raise ConfigError("train_dataset is not given; GRPOTrainer needs records with prompts")
        self.reward_funcs, self.train_dataset = reward_funcs, list(train_dataset)
        self.eval_dataset = None if eval_dataset is None else list(eval_dataset)
        tree: dict[str, dict[str, Any]] = {"model": {"init_from": str(model)}}
        given = settings_of(args, len(self.train_dataset), this_process().world_size)
        given |= {**lora_settings(peft_config), **(settings or {})}
        for path, value in given.items():
            section, _, key = path.partition(".")
            tree.setdefault(section, {})[key] = value
        tree.setdefault("rl", {}).update(prompts="train_dataset", reward_funcs=["reward_funcs"])
        self.config = RunConfig.from_tree(tree)

    def train(self) -> TrainingResult:
        """Trains to the end; raises as `megalith.grpo` does. The result has the last evaluation's figures."""
        return train_grpo(self.config, self.reward_funcs, self.train_dataset, self.eval_dataset)


def lora_settings(peft_config: Mapping[str, Any] | object | None) -> dict[str, Any]:
    """Our settings of PEFT's LoraConfig, with its defaults. ConfigError: it is more than plain LoRA."""
    if peft_config is None:
        return {}
    fields = dict(peft_config if isinstance(peft_config, Mapping) else vars(peft_config))
    for name, only in {**ONLY, "init_lora_weights": True, "layers_to_transform": None}.items():
        value = getattr(fields.get(name), "value", fields.get(name))
        if value not in (None, only):
            raise ConfigError(
                f"peft_config has {name} {value!r:.60}, which is more than plain LoRA; leave it out (docs/lora.md)"
            )
    found = {"lora.rank": 8, "lora.alpha": 8, "lora.dropout": 0.0}
    found |= {ours: fields[name] for name, ours in LORA.items() if name in fields}
    if fields.get("use_rslora"):
        found["lora.alpha"] *= math.sqrt(found["lora.rank"])
    targets = fields.get("target_modules")
    if targets is None:
        raise ConfigError(
            "peft_config has no target_modules; name them, such as q_proj and v_proj, or all-linear"
        )
    if targets != "all-linear":
        found["lora.targets"] = [targets] if isinstance(targets, str) else sorted(targets)
    return found


def settings_of(args: Mapping[str, Any] | object | None, prompts: int, world_size: int) -> dict[str, Any]:
    """Our settings, "section.field" → value, of TRL's arguments."""
    known = {*ARGUMENTS, *OTHERS, *OUR_RL}
    if isinstance(args, Mapping):
        if unknown := [name for name in args if name not in known]:
            raise ConfigError(
                f"GRPOTrainer has no argument {unknown[0]!r}{nearest_of(unknown[0], known)}; leave it out, or give "
                "ours as settings"
            )
        given = dict(args)
    else:
        given = {name: getattr(args, name) for name in known if getattr(args, name, None) is not None}
    given = DEFAULTS | given
    if given.get("max_steps", 0) <= 0:  # TRL's default is −1: by epochs
        given.pop("max_steps", None)
    found = {path: given[name] for name, path in ARGUMENTS.items() if given.get(name) is not None}
    found |= {f"rl.{name}": given[name] for name in OUR_RL if given.get(name) is not None}
    accumulation = given.get("gradient_accumulation_steps") or 1
    size = given["per_device_train_batch_size"] * accumulation * world_size
    found["train.global_batch_size"] = size
    rl = RlConfig.model_fields
    each = given.get("num_generations") or rl["num_generations"].default
    minis = max(1, (given.get("steps_per_generation") or accumulation) // accumulation)
    found["rl.mini_batches"] = minis
    iterations = given.get("num_iterations") or 1
    if "train.train_iters" not in found:
        found["train.train_iters"] = (
            math.ceil((given.get("num_train_epochs") or 1) * prompts * each / size) * iterations
        )
    longest = given.get("max_completion_length") or rl["max_completion_length"].default
    when = str(getattr(given.get("eval_strategy"), "value", given.get("eval_strategy") or "no"))
    if when not in ("no", "steps", "epoch"):
        raise ConfigError(f"eval_strategy is {when}; choose among no, steps and epoch")
    if when == "steps":  # TRL's default is every logging_steps
        found.setdefault("train.eval_interval", given.get("logging_steps") or 500)
    else:
        epoch = math.ceil(prompts * each / size) * iterations
        found["train.eval_interval"] = epoch if when == "epoch" else found["train.train_iters"]
    found["data.seq_length"] = given["max_prompt_length"] + longest
    if given.get("bf16"):
        found["train.precision"] = "bf16"
    schedule = str(
        getattr(given.get("lr_scheduler_type"), "value", given.get("lr_scheduler_type") or "linear")
    )
    if schedule not in SCHEDULES:
        raise ConfigError(f"lr_scheduler_type is {schedule}; choose among {', '.join(SCHEDULES)}")
    found["optim.lr_decay_style"] = SCHEDULES[schedule]
    return found
