"""SFTTrainer, DPOTrainer, ORPOTrainer, KTOTrainer, RewardTrainer and GKDTrainer with TRL's signatures.

    from megalith.rl import DPOTrainer
    DPOTrainer(model="models/Qwen2.5-0.5B", args={"max_steps": 100, …}, train_dataset=records).train()

`args` is a dict, TRL's config object, or an object with its attributes (from_trl/). An argument that differs from its
default becomes a setting, is ignored with a printed reason, or raises an error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from megalith.bridge.load import with_init_from
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.io import atomic_path
from megalith.launch.launcher import this_process
from megalith.rl.distill import require_teacher, train_distilled
from megalith.rl.dpo import train_dpo
from megalith.rl.from_trl.grpo_trainer import UNSUPPORTED, check_weight_tying, lora_settings
from megalith.rl.from_trl.passed_datasets import records_of
from megalith.rl.from_trl.trainer_calls import TrainerCalls
from megalith.rl.from_trl.tuning_settings import no_effect_notes, sets_max_steps, tuning_settings
from megalith.rl.kto import train_kto
from megalith.rl.reward_model import train_reward
from megalith.training.build import count_training_rows
from megalith.training.trainer import TrainingResult
from megalith.training.training_job import train

OTHER_FORMS = ("input_ids", "messages", "prompt", "conversations", "instruction")
"""Keys of records that are not plain text, even if they have a column `text`."""


class _TuningTrainer(TrainerCalls):
    """Trains the model in `model`, a Hugging Face folder or a Megalith run, on `train_dataset`."""

    section: ClassVar[str]
    """The method's name in from_trl/tuning_settings.py."""
    run: ClassVar[Callable[[RunConfig], TrainingResult]]

    def __init__(
        self,
        model: str | Path,
        args: Mapping[str, Any] | object | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        *,
        peft_config: Mapping[str, Any] | object | None = None,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ):
        """Build the run configuration.

        Args:
            model: folder of the initial weights.
            args: TRL's config object or a dict of its fields.
            train_dataset: records, such as a Hugging Face dataset.
            eval_dataset: records for evaluation, at the end and by `eval_strategy`.
            peft_config: PEFT's LoraConfig or a dict of its fields.
            settings: Megalith settings, such as {"parallel.tensor_model_parallel_size": 2}.
            others: any other arguments of TRL's class, which raise an error unless they are None.

        Raises:
            ConfigError: if one of `others` is not None, or an argument has an unsupported value.
        """
        name = type(self).__name__
        unsupported = [key for key, value in others.items() if value not in (None, (None, None))]
        if unsupported:
            raise ConfigError(
                f"{name} takes no {unsupported[0]}{UNSUPPORTED.get(unsupported[0], '; omit it')}"
            )
        if not isinstance(model, str | Path):
            raise ConfigError(
                f"model is a {type(model).__name__}; pass the folder of its weights, because the layout is chosen when "
                "they are loaded"
            )
        if train_dataset is None:
            raise ConfigError(
                f"train_dataset is not set, but {name} trains on it; pass a Dataset or a list of records"
            )
        records = [self._record(record) for record in records_of(train_dataset, "train_dataset")]
        others = lora_settings(peft_config) | dict(settings or {})
        world_size = this_process().world_size
        translated = tuning_settings(self.section, args, len(records), world_size) | others
        output = Path(translated["train.output_dir"])
        paths = {"data.train_data_path": str(_write_records(records, output))}
        if eval_dataset is not None:
            held_out = [self._record(record) for record in records_of(eval_dataset, "eval_dataset")]
            paths["data.valid_data_path"] = str(_write_records(held_out, output))
        config = _run_config(model, translated | paths, "data.seq_length" not in others)
        check_weight_tying(peft_config, config)
        has_other_rows = config.chat.packing or config.chat.truncation_mode == "drop" or config.kto.enabled
        if has_other_rows and not sets_max_steps(args):
            rows = count_training_rows(config)
            translated = tuning_settings(self.section, args, rows, world_size) | others
            config = _run_config(model, translated | paths, "data.seq_length" not in others)
        notes = no_effect_notes(self.section, args)
        if config.kto.enabled and config.data.dataloader_type == "cyclic":
            notes.append(
                "each epoch is shuffled, but KTOConfig's default train_sampling_strategy is sequential; "
                "settings={'data.dataloader_type': 'single'} reads the samples once in their order"
            )
        self.config = config.with_notes(notes)

    @staticmethod
    def _record(record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a record to the form that Megalith's dataset expects."""
        return record

    def train(self, resume_from_checkpoint: str | bool | None = None) -> TrainingResult:
        """Train to the end and return the result. Raises the same errors as `megalith.train`.

        `resume_from_checkpoint` is True for the last checkpoint in output_dir, or the folder of a run or a step.
        """
        return type(self).run(self._config_of(resume_from_checkpoint))


class SFTTrainer(_TuningTrainer):
    """Fine-tunes on conversations, prompts with completions, or plain text (`megalith sft`)."""

    section, run = "sft", staticmethod(train)

    @staticmethod
    def _record(record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert plain text to a completion without a prompt.

        As in TRL, all tokens and an end-of-sequence token are trained.
        """
        if "text" not in record or any(key in record for key in OTHER_FORMS):
            return record
        return {"prompt": "", "completion": record["text"]}


class DPOTrainer(_TuningTrainer):
    """Trains on pairs of a chosen and a rejected answer (`megalith dpo`)."""

    section, run = "dpo", staticmethod(train_dpo)


class ORPOTrainer(_TuningTrainer):
    """Trains on pairs without a reference model (`megalith dpo` with `dpo.loss_type: orpo`).

    As in the paper, the likelihood covers the answer only. TRL's class includes the prompt.
    """

    section, run = "orpo", staticmethod(train_dpo)


class KTOTrainer(_TuningTrainer):
    """Trains on answers that are marked as desirable or undesirable (`megalith kto`)."""

    section, run = "kto", staticmethod(train_kto)


class RewardTrainer(_TuningTrainer):
    """Trains a reward model on pairs (`megalith reward`)."""

    section, run = "reward", staticmethod(train_reward)


class GKDTrainer(_TuningTrainer):
    """Distills a teacher into the model, in part on answers that the model samples itself (`megalith distill`)."""

    section, run = "gkd", staticmethod(train_distilled)

    def __init__(
        self,
        model: str | Path,
        teacher_model: str | Path | None = None,
        args: Mapping[str, Any] | object | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        **others: Any,
    ):
        """Build the run configuration.

        Args:
            model: folder of the student's weights.
            teacher_model: folder of the teacher's weights. Default: args.teacher_model_name_or_path.
            args: TRL's GKDConfig or a dict of its fields.
            train_dataset: records with `messages`, or with `prompt` and `completion`.
            eval_dataset: records for evaluation, at the end and by `eval_strategy`.
            settings: Megalith settings, such as {"parallel.tensor_model_parallel_size": 2}.
            others: peft_config, and further arguments of TRL's GKDTrainer.

        Raises:
            ConfigError: if there is no teacher, or an argument has an unsupported value.
        """
        if teacher_model is not None and not isinstance(teacher_model, str | Path):
            raise ConfigError(
                f"teacher_model is a {type(teacher_model).__name__}; pass the folder of its weights, because the "
                "layout is chosen when they are loaded"
            )
        named = {} if teacher_model is None else {"distill.teacher": str(teacher_model)}
        settings = named | dict(settings or {})
        super().__init__(model, args, train_dataset, eval_dataset, settings=settings, **others)
        require_teacher(self.config)

    @staticmethod
    def _record(record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Mark the last message of a record as its completion, like TRL's DataCollatorForChatML."""
        messages = record.get("messages")
        if not messages or "prompt" in record:
            return record
        return {"prompt": messages[:-1], "completion": messages[-1:]}


def _write_records(records: Iterable[Mapping[str, Any]], output: Path) -> Path:
    """Write records to a file whose name is the hash of its content, and return its path. Several processes may call it
    at the same time.
    """
    text = "".join(json.dumps(dict(record), ensure_ascii=False, default=_plain) + "\n" for record in records)
    folder = output / "records"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    if not path.exists():
        with atomic_path(path) as partial:
            partial.write_text(text, encoding="utf-8")
    return path


def _plain(value: Any) -> Any:
    """Return a dataset value as JSON: NumPy values as lists or numbers, times as text.

    Any other value becomes a JSON object. It raises an error in columns that are read as text, and is ignored in unused
    columns.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.isoformat() if hasattr(value, "isoformat") else {"unsupported_value": type(value).__name__}


def _run_config(model: str | Path, settings: Mapping[str, Any], limits_length: bool) -> RunConfig:
    """Return the configuration of a run that starts from the weights in `model`. With `limits_length`, sequences fit
    the model's positions.
    """
    tree: dict[str, dict[str, Any]] = {"model": {"init_from": str(model)}}
    for path, value in settings.items():
        section, _, key = path.partition(".")
        tree.setdefault(section, {})[key] = value
    config = RunConfig.from_tree(tree)
    return _limit_to_positions(config) if limits_length else config


def _limit_to_positions(config: RunConfig) -> RunConfig:
    """Return `config` with data.seq_length reduced, if necessary, to the model's maximum number of positions."""
    positions = with_init_from(config).model.max_position_embeddings
    if positions is None or config.data.seq_length <= positions:
        return config
    return config.with_settings({"data.seq_length": positions})
