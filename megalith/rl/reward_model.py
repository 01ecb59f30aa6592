"""Training of a reward model (`megalith reward`).

Data are chat data. A sample is a pair of answers, a labelled answer, or an answer with labelled steps. The model is a
ScoreModel, and the loss reads the score of each answer's last token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megalith.config import RunConfig, require_run_config
from megalith.errors import ConfigError
from megalith.rl.objectives.answer_batch import AnswerBatch, answer_fields, count_tokens
from megalith.rl.objectives.reward_loss import reward_loss
from megalith.rl.objectives.summed_loss_task import SummedLossTask
from megalith.training.run_datasets import Data
from megalith.training.run_state import Run
from megalith.training.trainer import TrainingResult
from megalith.training.training_job import train


def train_reward(config: RunConfig) -> TrainingResult:
    """Train a reward model.

    Args:
        config: run configuration with `reward.enabled` set.

    Returns:
        The result, as for `megalith.train`.

    Raises:
        ConfigError: if `reward.enabled` is off. Other errors are the same as for `megalith.train`.
    """
    require_run_config(config, "train_reward")
    if not config.reward.enabled:
        raise ConfigError(
            "reward.enabled is false, so there is no reward model to train; set reward.enabled to true"
        )
    return train(config, RewardTask())


class RewardTask(SummedLossTask):
    """Reward model task: provides the data, the loss and the metrics."""

    restarts_in_process = False

    console_metrics = ("accuracy", "margin")
    loss_name = "preference loss"

    def build_data(self, run: Run) -> RewardData:
        self.loss, self.evaluation_loss = (reward_loss(run.config.reward) for _ in range(2))
        if not run.config.reward.compares_pairs:
            self.console_metrics = ("accuracy", "mean_reward")
        return RewardData(run.config, run.batch_sizes, run.total_steps, run.tokenizer, run.mesh.dp)


def make_reward_batch(rows: np.ndarray, sample_numbers: np.ndarray) -> AnswerBatch:
    """Collate rows (`answer_fields`), with a loss_mask of 1 at the tokens whose scores count."""
    batch = AnswerBatch(**answer_fields(rows, sample_numbers))
    # An answer's last token is the label of the last token in the loss.
    ends = torch.zeros_like(batch.loss_mask)
    ends[:, 1:] = batch.loss_mask[:, :-1] * (1 - batch.loss_mask[:, 1:])
    counts = count_tokens(ends, batch.sequence_ids, len(batch.sequence_tokens))
    return replace(batch, loss_mask=ends, sequence_tokens=counts)


class RewardData(Data):
    """Data of a reward-model run: answers with their loss masks at the last token."""

    make_chat_batch = staticmethod(make_reward_batch)
