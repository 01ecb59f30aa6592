"""Calls of transformers' Trainer that scripts make on trainers with TRL's interface."""

from __future__ import annotations

from typing import Any

from megalith.checkpoint.steps import CHECKPOINTS, STEP, list_steps
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.remote import open_location

_EXPORT = "megalith export-hf OUTPUT_DIR FOLDER writes the Hugging Face folder of a run's last checkpoint"
METHODS = {
    "add_callback": "a run has no callbacks; metrics.jsonl has the metrics of each step",
    "create_model_card": "no model card is written",
    "evaluate": "train() evaluates at the end and by eval_strategy; megalith evaluate OUTPUT_DIR evaluates a run",
    "log_metrics": "metrics.jsonl in output_dir has the metrics of each step",
    "predict": "megalith generate OUTPUT_DIR samples from a run",
    "push_to_hub": f"{_EXPORT}, which huggingface_hub uploads",
    "remove_callback": "a run has no callbacks; metrics.jsonl has the metrics of each step",
    "save_metrics": "metrics.jsonl in output_dir has the metrics of each step",
    "save_model": _EXPORT,
    "save_pretrained": _EXPORT,
    "save_state": "checkpoints contain a run's state; train(resume_from_checkpoint=True) goes on from the last one",
}
"""Methods of transformers' Trainer that Megalith's trainers lack, and what to do instead."""


class TrainerCalls:
    """A trainer that names Trainer's methods that it lacks."""

    config: RunConfig

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            raise AttributeError(f"{type(self).__name__} has no {name}: {METHODS[name]}")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _config_of(self, resume_from_checkpoint: str | bool | None) -> RunConfig:
        """Return the configuration of a run that goes on from a checkpoint, if `Trainer.train`'s argument selects one.

        Args:
            resume_from_checkpoint: None or False: a new run. True: the last checkpoint in output_dir. Otherwise the
                folder of a run or of one of its steps.

        Raises:
            ConfigError: the folder has no checkpoint of a Megalith run.
        """
        if resume_from_checkpoint is None or resume_from_checkpoint is False:
            return self.config
        folder = (
            self.config.train.output_dir if resume_from_checkpoint is True else str(resume_from_checkpoint)
        )
        location = open_location(folder)
        holds_steps = (location / CHECKPOINTS).exists() and list_steps(location / CHECKPOINTS)
        if not holds_steps and not (STEP.fullmatch(location.name) and location.exists()):
            raise ConfigError(
                f"resume_from_checkpoint is {resume_from_checkpoint!r}, but {folder} has no checkpoint of a Megalith "
                "run; pass a run's folder or one of its checkpoints/step_NNNNNNNN, or omit it to start from the model"
            )
        return self.config.with_settings({"checkpoint.load": folder})
