"""OumiMegatronGrpoTrainer: GRPO behind the four methods that Oumi asks of a trainer.

    trainer = OumiMegatronGrpoTrainer(tokenizer, config, [reward], train_dataset)
    trainer.train(); trainer.save_model(config)

Every rank makes one; there is no Ray. The configuration's model is opened in `train`, in the layout of its section
megatron. Steps are saved while it trains, and hf_model/ when it is through.
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

REWARDS = "rewards_"  # in the names of our figures; Oumi's have one reward


class OumiMegatronGrpoTrainer:
    """Trains the policy of a configuration on `train_dataset`, or on its data.train.datasets where that is None, and
    judges it by `eval_dataset`, or its data.validation.datasets."""

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
        """`config`: a TrainingConfig, ours or Oumi's, or a dict of its sections. `processing_class`: the tokenizer; its
        folder is that of model.tokenizer_name, or of the weights. `reward_funcs`: names, or functions with TRL's or
        verl's signature, in the place of training.reward_functions. `megatron_checkpoint_path`: weights to begin from,
        in the place of OUTPUT/megatron_checkpoint. Raises ConfigError in Oumi's words.
        """
        if processor is not None:
            raise ConfigError(
                "OumiMegatronGrpoTrainer was given a processor; models of text alone are trained"
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
        if other := [name for name, value in kwargs.items() if value is not None and name not in harmless]:
            raise ConfigError(f"OumiMegatronGrpoTrainer takes no {', '.join(other)}; leave it out")
        self.processing_class = processing_class
        self._tree = tree_of(config)
        named = self._tree.setdefault("training", {}).setdefault("trainer_type", "MEGATRON_GRPO")
        if str(named).upper() != "MEGATRON_GRPO":
            raise ConfigError(
                f"training.trainer_type is {named}, but OumiMegatronGrpoTrainer trains by GRPO; set MEGATRON_GRPO, or "
                "train it with `megalith oumi train`"
            )
        alone = isinstance(reward_funcs, str) or callable(reward_funcs)
        self._given = [reward_funcs] if alone else [*(reward_funcs or ())]
        if wrong := [one for one in self._given if not isinstance(one, str) and not callable(one)]:
            raise ConfigError(f"reward_funcs has {wrong[0]!r:.60}; they are names and functions")
        if self._given:  # judged by these; the names are for the log
            names = [
                one if isinstance(one, str) else f"own:{getattr(one, '__name__', 'reward')}"
                for one in self._given
            ]
            self._tree["training"]["reward_functions"] = names
        self._records = _records("train_dataset", train_dataset)
        self._held_out = _records("eval_dataset", eval_dataset)
        self._begins_from = None if megatron_checkpoint_path is None else str(megatron_checkpoint_path)
        translate_oumi(self._tree, this_process().world_size)  # refused here rather than in train
        self._opened: OpenedRun | None = None
        self.result: TrainingResult | None = None

    def train(self, resume_from_checkpoint: str | None = None) -> None:
        """Trains to the end, from a step of `resume_from_checkpoint` where one is given. Every rank calls it."""
        process = this_process()
        tree = self._tree | {"training": dict(self._tree["training"])}
        if resume_from_checkpoint is not None:
            tree["training"]["resume_from_checkpoint"] = str(resume_from_checkpoint)
        asked = translate_oumi(tree, process.world_size)
        self._opened = open_run(asked, process.world_size, self._records, self._held_out)
        if process.is_first:
            for note in self._opened.notes:
                print(f"note: {printable(note)}", flush=True)
        self.result = train_run(self._opened, self._given or None, self._begins_from)

    def save_state(self) -> None:
        """Nothing is left to save: the last step is in OUTPUT/checkpoints when `train` has returned."""

    def save_model(self, config: Any = None, final: bool = True) -> None:
        """OUTPUT/hf_model of the last step, unless `train` has written it. Raises ConfigError before `train`."""
        if self.result is None or self._opened is None or self.result.checkpoint is None:
            raise ConfigError("there is no model to save yet; call train() first")
        if this_process().is_first and final:
            finish_hf_model(self._opened.config, self.result.checkpoint, self._opened.asked)

    def get_last_eval_metrics(self) -> dict[str, Any]:
        """Of the last evaluation, after the last step where the run came so far: eval/reward_mean, _std, _min, _max and
        _median, eval/accuracy, lengths and more. Empty before `train`, and without held-out prompts."""
        found = (self.result and self.result.validation_figures) or {}
        return {f"eval/{name.replace(REWARDS, 'reward_')}": value for name, value in found.items()}


def _records(name: str, given: Any) -> list[dict[str, Any]] | None:
    """Prompts with their columns. Raises ConfigError."""
    if given is None:
        return None
    records = [given] if isinstance(given, str) or not isinstance(given, Iterable) else [*given]
    if wrong := [one for one in records if not isinstance(one, Mapping)]:
        raise ConfigError(
            f"{name} has {wrong[0]!r:.60}; it needs records with a prompt, as {{'prompt': 'What is 2+2?'}}; files are "
            "named as data.train.datasets"
        )
    return [dict(record) for record in records]
