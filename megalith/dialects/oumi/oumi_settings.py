"""Translate an Oumi configuration into a Megalith run.

Keys that map to one setting are rows of the table in oumi_keys.py. Settings that depend on several keys are derived in
oumi_layout.py, oumi_grpo.py and oumi_recipe.py. All problems are reported in one error. The translation imports no
PyTorch and reads no model or data; oumi_run.py opens the model and the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.config import RunConfig
from megalith.dialects.oumi import oumi_grpo, oumi_layout, oumi_recipe
from megalith.dialects.oumi.oumi_errors import oumi_key_errors
from megalith.dialects.oumi.oumi_keys import ALL_KEYS, VERL_PREFIX, Assigns, Ignored, MustBe, Read, row_of
from megalith.dialects.oumi.oumi_values import OumiDataset, OumiKeys, read_datasets, read_sections
from megalith.errors import ConfigError

TRAINERS = {"MEGATRON_GRPO": "grpo", "TRL_SFT": "sft", "TRL_DPO": "dpo"}


@dataclass(frozen=True)
class OumiRun:
    """A translated configuration: sections of a run file, and the run's other inputs."""

    trainer: str
    """grpo, sft or dpo."""
    tree: dict[str, dict[str, Any]]
    """Sections of a run file without the model and the data, which oumi_run.py adds."""
    notes: list[str]
    model_name: str
    tokenizer_name: str | None
    train: list[OumiDataset]
    validation: list[OumiDataset]
    chat_template: str | None
    rewards: list[str]
    epochs: float | None
    """GRPO's number of epochs if the number of steps is not set."""
    eval_strategy: str
    """no, steps or epoch. With `no`, GRPO evaluates after the last step only."""
    infers_precision: bool
    """Take the precision from the weights: torch_dtype_str is auto."""
    exports_hf: bool
    """Write hf_model/ at the end."""
    writes_bin: bool
    """Include pytorch_model.bin in hf_model/."""
    merges_adapters: bool
    """Export LoRA adapters merged into the base model, instead of only the adapters."""
    model_parallel: int
    """TP × PP × CP."""

    def config(self, model: Mapping[str, Any]) -> RunConfig:
        """Return the run's configuration.

        Args:
            model: settings of the model, such as {"init_from": folder} or {"preset": name}.

        Raises:
            ConfigError: names Oumi's keys.
        """
        with oumi_key_errors():
            return RunConfig.from_tree(self.tree | {"model": self.tree.get("model", {}) | dict(model)})


def translate_oumi(tree: Mapping[str, Any], world_size: int | None = None) -> OumiRun:
    """Translate an Oumi configuration.

    Args:
        tree: sections of the configuration.
        world_size: number of processes; None uses the size of the model-parallel layout.

    Raises:
        ConfigError: lists every problem, one sentence each.
    """
    keys = OumiKeys({}, world_size)
    read_sections(keys, tree)
    datasets = {split: read_datasets(keys, split) for split in ("train", "validation")}
    name = keys["training.trainer_type"].upper() if "training.trainer_type" in keys else ""
    trainer = TRAINERS.get(name)
    if trainer is None:
        keys.problems.append(_unsupported_trainer(name))
    if not keys.values.get("model.model_name"):
        keys.problems.append("model.model_name is missing: the folder of the weights, or their hub name")
    _reject_values(keys, trainer)
    derived: dict[str, Any] = {}
    if trainer is not None:
        _set_single_keys(keys, trainer)
        derived = _set_derived(keys, trainer, datasets["train"])
        if trainer != "grpo" and not datasets["train"]:
            keys.problems.append("data.train.datasets is empty; add a dataset with its dataset_path")
    if keys.problems:
        raise ConfigError(*dict.fromkeys(keys.problems))
    if keys["model.torch_dtype_str"] == "auto":
        keys.notes.append("model.torch_dtype_str is auto: the precision is taken from the weights")
    model_name, tokenizer_name, template = (
        keys[f"model.{key}"] for key in ("model_name", "tokenizer_name", "chat_template")
    )
    no_effect = _no_effect_note(keys, name)
    return OumiRun(
        trainer,
        keys.tree,
        [*keys.notes, *([no_effect] if no_effect else [])],
        model_name,
        tokenizer_name,
        datasets["train"],
        datasets["validation"],
        template,
        **derived,
    )


def _unsupported_trainer(name: str) -> str:
    supported = (
        "trainers: MEGATRON_GRPO (GRPO), TRL_SFT (fine-tuning on conversations), TRL_DPO (preferences)"
    )
    if name in ("VERL_GRPO", "TRL_GRPO"):
        return f"training.trainer_type is {name}; `megalith oumi migrate` converts it to MEGATRON_GRPO; {supported}"
    return f"training.trainer_type is {name or 'missing (HF)'}, which is not supported; {supported}"


def _set_derived(keys: OumiKeys, trainer: str, datasets: Sequence[OumiDataset]) -> dict[str, Any]:
    """Set the settings that depend on several keys. Returns the fields of OumiRun that are not settings."""
    oumi_recipe.set_model(keys)
    parallel = oumi_layout.set_layout(keys)
    rewards: list[str] = []
    if trainer == "grpo":
        oumi_grpo.set_grpo_objective(keys)
        oumi_grpo.set_rollout_engine(keys)
        rewards = oumi_grpo.reward_names(keys, datasets)
    else:
        keys.set(f"{trainer}.enabled", True)
        oumi_recipe.set_chat(keys, trainer, datasets)
    oumi_layout.set_batch(keys, trainer, parallel)
    oumi_layout.set_sharding(keys, trainer, parallel)
    oumi_layout.set_recompute(keys)
    oumi_layout.set_offload(keys)
    oumi_recipe.set_optimizer(keys)
    oumi_recipe.set_schedule(keys)
    oumi_recipe.set_output(keys)
    eval_strategy = oumi_recipe.set_evaluation(keys, trainer)
    oumi_recipe.set_adapters(keys)
    writes_bin = oumi_recipe.read_trainer_kwargs(keys, trainer)
    return {
        "rewards": rewards,
        "epochs": oumi_recipe.set_steps(keys, trainer),
        "eval_strategy": eval_strategy,
        "infers_precision": oumi_recipe.set_precision(keys),
        "exports_hf": keys["training.save_final_model"],
        "writes_bin": writes_bin,
        "merges_adapters": keys["peft.peft_save_mode"].upper() == "MERGED",
        "model_parallel": parallel,
    }


def _reject_values(keys: OumiKeys, trainer: str | None) -> None:
    """Add a problem for each value that the table does not support."""
    for key, value in keys.values.items():
        if key.startswith("data.test."):
            continue
        named = re.sub(r"\[\d+\]", "[]", key)
        _, row = row_of(named)
        if (
            isinstance(row, MustBe)
            and str(value).lower() != str(row.value).lower()
            and value not in (None, [], {})
        ):
            keys.problems.append(f"{key} is {value!r:.60}, which is not supported: {row.reason}")


def _set_single_keys(keys: OumiKeys, trainer: str) -> None:
    """Set the settings that a single key determines. Omitted keys have Oumi's defaults."""
    for key, row in ALL_KEYS.items():
        if not isinstance(row, Assigns) or (
            key not in keys and (key.startswith(VERL_PREFIX) or row.default is None)
        ):
            continue
        if trainer != "grpo" and row.path.startswith("rl."):
            continue
        value = keys[key]
        if row.values is not None:
            choice = value.lower() if isinstance(value, str) else value
            if not isinstance(value, list | dict) and choice in row.values:
                value = row.values[choice]
            elif isinstance(row.default, str | bool):
                keys.problems.append(f"{key} is {value!r:.60}; use one of {', '.join(map(str, row.values))}")
                continue
        if value is not None:
            keys.set(row.path, value)


def _no_effect_note(keys: OumiKeys, trainer: str) -> str:
    """Return the note that lists the keys without effect by reason; empty if there are none."""
    by_reason: dict[str, list[str]] = {}
    for key in keys.values:
        _, row = row_of(re.sub(r"\[\d+\]", "[]", key))
        reason = row.reason if isinstance(row, Ignored) and keys.values[key] is not None else None
        if isinstance(row, Read) and key not in keys.read and ".datasets[" not in key:
            reason = f"not read by {trainer} with the other keys"
        if reason:
            by_reason.setdefault(reason, []).append(key.removeprefix(VERL_PREFIX))
    groups = [f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()]
    return f"these keys have no effect in Megalith: {'; '.join(groups)}" if groups else ""
