"""GRPOTrainer with TRL's signature, for scripts that were written for it.

    from megalith.rl import GRPOTrainer
    GRPOTrainer(model="models/Qwen2.5-0.5B", reward_funcs=f, args={"max_steps": 100, …}, train_dataset=records).train()

`args` is a dict, TRL's GRPOConfig, or anything with its attributes (from_trl/). An argument that differs from its
default is a setting of ours, or has no effect for a reason that the run prints, or is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.bridge.load import with_init_from
from megalith.bridge.peft import ONLY
from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_rollouts
from megalith.errors import ConfigError
from megalith.launch.launcher import this_process
from megalith.rl.from_trl.given_arguments import given_arguments
from megalith.rl.from_trl.grpo_settings import no_effect_notes, settings_of
from megalith.rl.grpo import RewardGiven, train_grpo
from megalith.training.trainer import TrainingResult

OF_TRL = {
    "processing_class": ": the tokenizer is that of the weights; name another one by "
    'settings={"data.tokenizer_type": …, "data.tokenizer_model": …}',
}
LORA = {"r": "lora.rank", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout"}
PLAIN_LORA = {**ONLY, "init_lora_weights": True, "layers_to_transform": None}
LORA_NO_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)


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
        if given := [name for name, value in others.items() if value not in (None, (None, None))]:
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
        is_one = isinstance(reward_funcs, str) or callable(reward_funcs)
        names = ["reward_funcs"] * (1 if is_one else len(reward_funcs))  # train_grpo has their own names
        tree.setdefault("rl", {}).update(prompts="train_dataset", reward_funcs=names)
        config = RunConfig.from_tree(tree)
        if "data.seq_length" not in (settings or {}):
            config = within_positions(config)
        self.config = config.with_notes(no_effect_notes(args))
        check_rollouts(self.config)

    def train(self) -> TrainingResult:
        """Trains to the end; raises as `megalith.grpo` does. The result has the last evaluation's figures."""
        return train_grpo(self.config, self.reward_funcs, self.train_dataset, self.eval_dataset)


def within_positions(config: RunConfig) -> RunConfig:
    """`config` with rows no longer than the model's positions: prompts that leave no room for a completion are refused
    one by one, not for the length that they may have."""
    positions = with_init_from(config).model.max_position_embeddings
    if positions is None or config.data.seq_length <= positions:
        return config
    return config.with_settings({"data.seq_length": positions, "rl.max_prompt_length": None})


def lora_settings(peft_config: Mapping[str, Any] | object | None) -> dict[str, Any]:
    """Our settings of PEFT's LoraConfig, with its defaults. ConfigError: it is more than plain LoRA."""
    if peft_config is None:
        return {}
    given = given_arguments(peft_config)
    fields = given.values
    for name, only in PLAIN_LORA.items():
        if fields.get(name) not in (None, only):
            raise ConfigError(
                f"peft_config has {name} {fields[name]!r:.60}, which is more than plain LoRA; leave it out "
                "(docs/lora.md)"
            )
    others = given.changed.keys() - {*LORA, *PLAIN_LORA, *LORA_NO_EFFECT, "use_rslora", "target_modules"}
    for name in sorted(others):
        if given.defaults or given.changed[name]:  # nothing, of a dict, is PEFT's default
            raise ConfigError(
                f"peft_config has {name} {given.changed[name]!r:.60}, which GRPOTrainer does not have; leave it out "
                "(docs/lora.md)"
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
