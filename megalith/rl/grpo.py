"""`megalith grpo`: a run that is trained on rollouts from files, by the trainer's own loop.

The loop, optimizer, checkpoints and report are those of pre-training; what differs is the Task: the data, the loss and
the figures of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from megalith.config import RunConfig
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.rl.objective import PolicyLoss
from megalith.rl.reference import reference_logprobs
from megalith.rl.rollout_data import RolloutData
from megalith.rl.rollouts import Rollouts, load_rollouts
from megalith.training.run_state import Run, Task
from megalith.training.trainer import TrainingResult, train


def train_grpo(config: RunConfig) -> TrainingResult:
    """Trains on the files that `rl.rollouts` names, as `megalith.train` does on a dataset; raises as it does."""
    require_rollouts(config)
    return train(config, PolicyTask())


def require_rollouts(config: RunConfig) -> None:
    """Raises ConfigError for a run that names none."""
    if not config.rl.files:
        raise ConfigError(
            "rl.rollouts is not set; name the files of rollouts to train on, which megalith.rl.save_rollouts "
            "writes (docs/grpo_objective.md)"
        )


def open_rollouts(config: RunConfig, tokenizer: Tokenizer | None) -> Rollouts:
    """The run's rollouts, checked against its model, lengths, groups and tokenizer. Raises DataError."""
    return load_rollouts(
        config.rl.files,
        vocab_size=config.model.vocab_size,
        max_tokens=config.data.seq_length + 1,
        num_generations=config.rl.num_generations,
        version=config.rl.rollout_version,
        tokenizer=tokenizer and tokenizer.fingerprint,
    )


class PolicyTask(Task):
    """What the trainer's loop needs to know of GRPO."""

    def begin(self, run: Run) -> RolloutData:
        self.loss = PolicyLoss(run.config.rl)
        rl = run.config.rl
        reference = reference_logprobs(run, rl.temperature) if rl.beta else None
        return RolloutData(run, open_rollouts(run.config, run.tokenizer), reference)

    def figures(self, run: Run) -> Callable[[], dict[str, Any]]:
        """Of the step that `run` is about to count. Every rank calls it."""
        sums = self.loss.take_all_sums(run.mesh, run.device)
        known = run.data.step(run.step).figures
        return lambda: {**self._read(sums), **known}

    def _read(self, sums: Tensor) -> dict[str, float | None]:
        found = self.loss.means(sums)
        found["kl"] = found["kl"] if self.loss.rl.beta else None
        found["entropy"] = found["entropy"] if self.loss.needs_entropy else None
        return found
