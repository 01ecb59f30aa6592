"""OumiMegatronGrpoTrainer: GRPO with the trainer interface of Oumi.

    trainer = OumiMegatronGrpoTrainer(tokenizer, config, [reward], train_dataset)
    trainer.train(); trainer.save_model(config)

Every rank constructs one; Ray is not used. `train` opens the model in the layout of the megatron section, saves
checkpoints during training and hf_model/ at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalith.dialects.oumi.oumi_params import tree_of
from megalith.dialects.oumi.oumi_run import OpenedRun, finish_hf_model, open_run, train_run
from megalith.dialects.oumi.oumi_settings import translate_oumi
from megalith.errors import ConfigError, printable
from megalith.launch.launcher import this_process
from megalith.training.trainer import TrainingResult

REWARDS = "rewards_"  # prefix of Megalith's metrics; Oumi's is reward_


class OumiMegatronGrpoTrainer:
    """Trains a policy with GRPO.

    Prompts come from `train_dataset`, or from data.train.datasets if it is None; evaluation prompts come from
    `eval_dataset`, or from data.validation.datasets.
    """

    def __init__(
        self,
        processing_class: Any,
        config: Any,
        reward_funcs: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None = None,
        train_dataset: Iterable[Mapping[str, Any]] | None = None,
        eval_dataset: Iterable[Mapping[str, Any]] | None = None,
        processor: Any = None,
        megatron_checkpoint_path: str | Path | None = None,
        **kwargs: Any,
    ):
        """Translate and validate the configuration.

        Args:
            processing_class: the tokenizer. Its files are read from model.tokenizer_name, or from the weights' folder.
            config: Megalith's or Oumi's TrainingConfig, or a dict of its sections.
            reward_funcs: names, or functions with TRL's or verl's signature; replaces training.reward_functions.
            train_dataset: prompt records; replaces data.train.datasets.
            eval_dataset: prompt records; replaces data.validation.datasets.
            processor: must be None; only language models are trained.
            megatron_checkpoint_path: initial weights; replaces OUTPUT/megatron_checkpoint.

        Raises:
            ConfigError: names Oumi's keys.
        """
        if processor is not None:
            raise ConfigError(
                "OumiMegatronGrpoTrainer was called with a processor, but supports only language models; leave "
                "processor out"
            )
        harmless = {
            "model",
            "args",
            "callbacks",
            "cache_dir",
            "rollout_function",
            "collator",
            "data_collator",
        }
        if unsupported := [
            name for name, value in kwargs.items() if value is not None and name not in harmless
        ]:
            raise ConfigError(
                f"OumiMegatronGrpoTrainer does not support {', '.join(unsupported)}; leave {', '.join(unsupported)} "
                "out"
            )
        self.processing_class = processing_class
        self._tree = tree_of(config)
        trainer_type = self._tree.setdefault("training", {}).setdefault("trainer_type", "MEGATRON_GRPO")
        if str(trainer_type).upper() != "MEGATRON_GRPO":
            raise ConfigError(
                f"training.trainer_type is {trainer_type}, but OumiMegatronGrpoTrainer trains with GRPO; set "
                "training.trainer_type to MEGATRON_GRPO, or run `megalith oumi train`"
            )
        is_single = isinstance(reward_funcs, str) or callable(reward_funcs)
        self._reward_funcs = [reward_funcs] if is_single else [*(reward_funcs or ())]
        if wrong := [
            reward for reward in self._reward_funcs if not isinstance(reward, str) and not callable(reward)
        ]:
            raise ConfigError(f"reward_funcs has {wrong[0]!r:.60}; use names or functions")
        if self._reward_funcs:  # the names are only for the log
            self._tree["training"]["reward_functions"] = [
                reward if isinstance(reward, str) else f"own:{getattr(reward, '__name__', 'reward')}"
                for reward in self._reward_funcs
            ]
        self._records = _records("train_dataset", train_dataset)
        self._eval_records = _records("eval_dataset", eval_dataset)
        self._init_from = None if megatron_checkpoint_path is None else str(megatron_checkpoint_path)
        translate_oumi(self._tree, this_process().world_size)  # fail before train()
        self._opened: OpenedRun | None = None
        self.result: TrainingResult | None = None

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Train to the end, resuming from `resume_from_checkpoint` if it is set. Collective over all ranks."""
        process = this_process()
        tree = self._tree | {"training": dict(self._tree["training"])}
        if resume_from_checkpoint is not None:
            tree["training"]["resume_from_checkpoint"] = str(resume_from_checkpoint)
        run = translate_oumi(tree, process.world_size)
        self._opened = open_run(run, process.world_size, self._records, self._eval_records)
        if process.is_first:
            for note in self._opened.notes:
                print(f"note: {printable(note)}", flush=True)
        self.result = train_run(self._opened, self._reward_funcs or None, self._init_from)

    def save_state(self) -> None:
        """Do nothing, because `train` has saved the last step in OUTPUT/checkpoints."""

    def save_model(self, config: Any = None, final: bool = True) -> None:
        """Write OUTPUT/hf_model from the last step unless `train` has. Raises ConfigError before `train`."""
        if self.result is None or self._opened is None or self.result.checkpoint is None:
            raise ConfigError("there is no model to save yet; call train() first")
        if this_process().is_first and final:
            finish_hf_model(self._opened.config, self.result.checkpoint, self._opened.run)

    def get_last_eval_metrics(self) -> dict[str, Any]:
        """Return the metrics of the last evaluation: eval/reward_mean, _std, _min, _max, _median, eval/accuracy, …

        Empty before `train` and without evaluation prompts.
        """
        metrics = (self.result and self.result.validation_figures) or {}
        return {f"eval/{name.replace(REWARDS, 'reward_')}": value for name, value in metrics.items()}


def _records(name: str, dataset: Any) -> list[dict[str, Any]] | None:
    """Return a dataset's prompt records. Raises ConfigError if an entry is not a mapping."""
    if dataset is None:
        return None
    records = [dataset] if isinstance(dataset, str) or not isinstance(dataset, Iterable) else [*dataset]
    if wrong := [record for record in records if not isinstance(record, Mapping)]:
        raise ConfigError(
            f"{name} has {wrong[0]!r:.60}; it needs records with a prompt, such as {{'prompt': 'What is 2+2?'}}; name "
            "files in data.train.datasets"
        )
    return [dict(record) for record in records]
