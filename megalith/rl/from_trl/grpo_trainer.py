"""GRPOTrainer and RLOOTrainer with TRL's signatures, for scripts written for TRL.

    from megalith.rl import GRPOTrainer
    GRPOTrainer(model="models/Qwen2.5-0.5B", reward_funcs=f, args={"max_steps": 100, …}, train_dataset=records).train()

`args` is a dict, TRL's GRPOConfig, or an object with its attributes (from_trl/). An argument that differs from its
default becomes a setting, is ignored with a printed reason, or raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.bridge.adapters.adapter_settings import trains_tied_embedding
from megalith.bridge.load import with_init_from
from megalith.bridge.peft.peft_names import ONLY
from megalith.config import RunConfig
from megalith.config.rl_tools import FACTORY
from megalith.config.rules.rollout_rules import check_rollouts
from megalith.errors import ConfigError
from megalith.launch.launcher import this_process
from megalith.rl.from_trl.arguments import read_arguments
from megalith.rl.from_trl.grpo_settings import no_effect_notes, settings_of
from megalith.rl.from_trl.passed_datasets import records_of
from megalith.rl.from_trl.trainer_calls import TrainerCalls
from megalith.rl.grpo import RewardFunc, train_grpo
from megalith.training.trainer import TrainingResult

UNSUPPORTED = {
    "processing_class": (
        ": the tokenizer is that of the weights; set another one with "
        'settings={"data.tokenizer_type": …, "data.tokenizer_model": …}'
    ),
    "tokenizer": (
        ": the tokenizer is that of the weights; set another one with "
        'settings={"data.tokenizer_type": …, "data.tokenizer_model": …}'
    ),
    "formatting_func": "; map the dataset to records with messages, prompt and completion, or text",
    "ref_model": ": the reference model is a copy of the initial weights; omit it if it has the same weights",
    "optimizers": "; args.optim and args.lr_scheduler_type choose the optimizer and the schedule",
}
LORA = {
    "r": "lora.rank",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "rank_pattern": "lora.rank_pattern",
    "alpha_pattern": "lora.alpha_pattern",
    "layers_to_transform": "lora.layers_to_transform",
    "use_dora": "lora.use_dora",
    "init_lora_weights": "lora.init_lora_weights",
    "modules_to_save": "lora.modules_to_save",
    "trainable_token_indices": "lora.trainable_token_indices",
}
LOFTQ_FORMATS = {4: "nf4", 8: "int8"}  # by loftq_bits
TARGET_FIELDS = ("target_modules", "target_parameters")
LORA_NO_EFFECT = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)


class GRPOTrainer(TrainerCalls):
    """Trains the policy in `model`, a Hugging Face folder or a Megalith run, on `train_dataset`."""

    def __init__(
        self,
        model: str | Path,
        reward_funcs: str | RewardFunc | Sequence[str | RewardFunc] | None = None,
        args: Mapping[str, Any] | object | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        peft_config: Mapping[str, Any] | object | None = None,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Callable[..., Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ):
        """Build the run configuration.

        Args:
            model: folder of the initial weights.
            reward_funcs: one or more rewards, by name or as functions. Optional if the environment gives rewards.
            args: TRL's GRPOConfig or a dict of its fields.
            train_dataset: records with a `prompt`, such as a Hugging Face dataset.
            eval_dataset: records for evaluation, at the end and by `eval_strategy`.
            peft_config: PEFT's LoraConfig or a dict of its fields.
            tools: functions that the policy may call (docs/agents.md).
            environment_factory: class or function that makes environments, one per completion.
            settings: Megalith settings, such as {"parallel.tensor_model_parallel_size": 2}.
            others: any other arguments of TRL's GRPOTrainer, which raise an error unless they are None.

        Raises:
            ConfigError: if one of `others` is not None, or an argument has an unsupported value.
        """
        name = type(self).__name__
        unsupported = [key for key, value in others.items() if value not in (None, (None, None))]
        if unsupported:
            remedy = UNSUPPORTED.get(unsupported[0], "; omit it")
            raise ConfigError(f"{name} takes no {unsupported[0]}{remedy}")
        if not isinstance(model, str | Path):
            raise ConfigError(
                f"model is a {type(model).__name__}; pass the folder of its weights, because the layout is chosen when "
                "they are loaded"
            )
        if isinstance(environment_factory, Mapping):
            raise ConfigError(
                f"environment_factory is a dict of {len(environment_factory)} environments, but a "
                "run has one class of environment; pass one class, whose reset can choose by the "
                "record's columns"
            )
        if train_dataset is None:
            raise ConfigError(f"train_dataset is not set; {name} needs records with prompts")
        self.reward_funcs, self.train_dataset = reward_funcs, records_of(train_dataset, "train_dataset")
        self.tools, self.environment_factory = list(tools or ()), environment_factory
        self.eval_dataset = None if eval_dataset is None else records_of(eval_dataset, "eval_dataset")
        tree: dict[str, dict[str, Any]] = {"model": {"init_from": str(model)}}
        translated = settings_of(args, len(self.train_dataset), this_process().world_size, name)
        translated |= {**lora_settings(peft_config), **(settings or {})}
        for path, value in translated.items():
            section, _, key = path.partition(".")
            tree.setdefault(section, {})[key] = value
        is_single = isinstance(reward_funcs, str) or callable(reward_funcs)
        # Placeholders: train_grpo sets the functions' names.
        names = ["reward_funcs"] * (1 if is_single else len(reward_funcs or ()))
        tree.setdefault("rl", {}).update(prompts="train_dataset", reward_funcs=names)
        if self.tools:
            tree["rl"]["tools"] = [getattr(one, "__name__", "tool") for one in self.tools]
        if environment_factory is not None:
            tree["rl"]["environment"] = FACTORY
        config = RunConfig.from_tree(tree)
        check_weight_tying(peft_config, config)
        if "data.seq_length" not in (settings or {}):
            config = limit_to_positions(config)
        self.config = config.with_notes(no_effect_notes(args))
        check_rollouts(self.config)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainingResult:
        """Train to the end and return the result, with the metrics of the last evaluation. Raises the same errors as
        `megalith.grpo`.

        `resume_from_checkpoint` is True for the last checkpoint in output_dir, or the folder of a run or a step.
        """
        return train_grpo(
            self._config_of(resume_from_checkpoint),
            self.reward_funcs,
            self.train_dataset,
            self.eval_dataset,
            self.tools,
            self.environment_factory,
        )


class RLOOTrainer(GRPOTrainer):
    """Trains the policy with RLOO (Ahmadian et al. 2024) as TRL does: a leave-one-out baseline, the KL in the reward,
    and PPO's clip of the ratio of whole sequences."""


def limit_to_positions(config: RunConfig) -> RunConfig:
    """Return `config` with data.seq_length reduced, if necessary, to the model's maximum number of positions.

    Prompts that leave no room for a completion are then rejected individually.
    """
    positions = with_init_from(config).model.max_position_embeddings
    if positions is None or config.data.seq_length <= positions:
        return config
    return config.with_settings({"data.seq_length": positions, "rl.max_prompt_length": None})


def check_weight_tying(peft_config: Mapping[str, Any] | object | None, config: RunConfig) -> None:
    """Raise ConfigError if PEFT would train an embedding separately from the output matrix that it is tied to."""
    if peft_config is None or read_arguments(peft_config).values.get("ensure_weight_tying"):
        return
    if trains_tied_embedding(config):
        raise ConfigError(
            "peft_config has modules_to_save with the embedding, which is tied to the output matrix in this model, "
            "and without ensure_weight_tying PEFT would train a copy and leave the other unchanged; set "
            "ensure_weight_tying to True"
        )


def lora_settings(peft_config: Mapping[str, Any] | object | None) -> dict[str, Any]:
    """Translate PEFT's LoraConfig, with its defaults, to settings. Raise ConfigError if it uses more than plain
    LoRA.
    """
    if peft_config is None:
        return {}
    arguments = read_arguments(peft_config)
    fields = arguments.values
    for name, only in ONLY.items():
        if fields.get(name) not in (None, only):
            raise ConfigError(
                f"peft_config has {name} {fields[name]!r:.60}, but only plain LoRA is supported; leave {name} out "
                "(docs/lora.md)"
            )
    others = arguments.changed.keys() - {
        *LORA,
        *ONLY,
        *LORA_NO_EFFECT,
        "use_rslora",
        "loftq_config",
        *TARGET_FIELDS,
    }
    for name in sorted(others):
        if arguments.defaults or arguments.changed[name]:  # in a dict, an empty value is PEFT's default
            raise ConfigError(
                f"peft_config has {name} {arguments.changed[name]!r:.60}, which GRPOTrainer does not support; leave "
                f"{name} out (docs/lora.md)"
            )
    settings = {"lora.rank": 8, "lora.alpha": 8, "lora.dropout": 0.0}
    settings |= {ours: fields[name] for name, ours in LORA.items() if fields.get(name) is not None}
    if isinstance(layer := fields.get("layers_to_transform"), int):
        settings["lora.layers_to_transform"] = [layer]
    if fields.get("init_lora_weights") == "loftq":
        settings |= _loftq_settings(fields.get("loftq_config") or {})
    if fields.get("use_rslora"):
        settings["lora.use_rslora"] = True
    targets, parameters = fields.get("target_modules"), sorted(fields.get("target_parameters") or ())
    if targets is None and not parameters:
        raise ConfigError(
            "peft_config has no target_modules; set target_modules to names such as q_proj and v_proj, or to "
            "all-linear"
        )
    if targets != "all-linear":
        names = [targets] if isinstance(targets, str) else sorted(targets or ())
        settings["lora.targets"] = [*names, *parameters]
    return settings


def _loftq_settings(loftq_config: Mapping[str, Any] | object) -> dict[str, Any]:
    values = read_arguments(loftq_config).values if loftq_config else {}
    bits = values.get("loftq_bits", 4)
    if bits not in LOFTQ_FORMATS:
        raise ConfigError(
            f"peft_config has loftq_bits {bits!r:.20}, but PEFT supports only 4 (nf4) and 8 (int8)"
        )
    return {"lora.quantize_base": LOFTQ_FORMATS[bits], "lora.loftq_iter": values.get("loftq_iter", 1)}
