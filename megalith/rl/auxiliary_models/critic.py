"""PPO's critic: a second trained model that returns a value per token. It has the policy's layout.

For a rollout batch, its values give the advantages (gae.py). In each step it is trained on the step's tokens, with its
own optimizer, before the policy's update. A checkpoint has the critic's weights and optimizer state as additional
parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalith.checkpoint.read import Checkpoint
from megalith.checkpoint.state import load_part, state_shards
from megalith.config import RunConfig
from megalith.parallel.shards import LocalShard
from megalith.planner.counts import count_parameters
from megalith.rl.advantages.gae import ValueLoss, with_gae
from megalith.rl.auxiliary_models.frozen_model import frozen_config, load_trained
from megalith.rl.auxiliary_models.reference import LogProbs
from megalith.rl.objectives.policy_loss import RolloutBatch, without_routes
from megalith.rl.rollouts.rollout_data import RolloutData
from megalith.rl.rollouts.rollout_source import RolloutSource
from megalith.training.build import vocabulary_rows
from megalith.training.custom_loop import Optimizer
from megalith.training.run_state import Run

PARTS = {"model": "critic", "optimizer": "critic_optimizer"}  # of a checkpoint, by those of the policy


def critic_config(config: RunConfig) -> RunConfig:
    """Return the critic's configuration, for the model in rl.critic.

    Without rl.critic, the critic starts from the policy's initial weights.
    """
    path = config.rl.critic or config.model.init_from
    if path is not None:
        return frozen_config(config, path, "rl.critic", is_critic=True)
    return config.with_settings({"model.score_head": True, "lora.rank": None})


class Critic:
    """The critic of a run, and its optimizer."""

    def __init__(self, run: Run):
        """Build the critic with its initial weights. Collective over all ranks."""
        self._run, self._rl, self.config = run, run.config.rl, critic_config(run.config)
        self.model = load_trained(self.config, run.mesh, run.device)
        self._updates = Optimizer(self.model, run.config.optim, run.config.train.precision)
        self._loss = ValueLoss(self._rl.cliprange_value)
        count = count_parameters(self.config.model).total
        self.note = f"the memory estimate excludes the critic ({count:,} parameters, with optimizer state)"

    def with_advantages(self, steps: Sequence[Sequence[RolloutBatch]]) -> list[list[RolloutBatch]]:
        """Return the micro-batches of a rollout batch, by step, with advantages, values and returns."""
        flat = [batch for step in steps for batch in step]
        values = self.model.all_logprobs(without_routes(flat))
        batches = iter(with_gae(flat, values, self._rl.gamma, self._rl.lam, self._run.mesh.dp))
        return [[next(batches) for _ in step] for step in steps]

    def train_step(self, micro_batches: Sequence[RolloutBatch]) -> Callable[[], dict[str, Any]]:
        """Train the critic for one step on these micro-batches. Return a function that returns the metrics of the
        update.
        """
        run, updates = self._run, self._updates
        loss = self.model.backward(
            without_routes(micro_batches), self._loss, loss_scale=updates.loss_scale.scale
        )
        lr = run.schedule.learning_rate(*run.schedule_position)
        if self._rl.critic_lr is not None:
            lr *= self._rl.critic_lr / run.config.optim.lr
        result = updates.step(lr, run.schedule.weight_decay(*run.schedule_position))
        sums = self._loss.reduce_sums(run.mesh, run.device)
        return lambda: {
            "value_loss": loss.item(),
            "critic_grad_norm": result.grad_norm.item(),
            **self._loss.means(sums),
        }

    def parts(self) -> dict[str, Mapping[str, LocalShard]]:
        """Return this rank's shards of weights and optimizer state, keyed by checkpoint part (critic,
        critic_optimizer).
        """
        optimizer = self._updates.optimizer if self._run.config.checkpoint.save_optim else None
        shards = state_shards(self.model.chunks, optimizer, vocabulary_rows(self.config))
        return {PARTS[part]: shards[part] for part in shards}

    def load(self, checkpoint: Checkpoint, with_optimizer: bool) -> None:
        """Restore what `parts` returned. Collective over all ranks."""
        rows, world = vocabulary_rows(self.config), self._run.mesh.world
        load_part(checkpoint, PARTS["model"], self.model.chunks, None, rows, world)
        if with_optimizer:
            load_part(checkpoint, PARTS["optimizer"], self.model.chunks, self._updates.optimizer, rows, world)


class CriticRolloutData(RolloutData):
    """Rollout data with advantages computed by a critic."""

    def __init__(self, run: Run, source: RolloutSource, reference: LogProbs | None, critic: Critic):
        super().__init__(run, source, reference)
        self._critic = critic
        self.notes.append(critic.note)

    def _with_logprobs(self, number: int, steps: list[list[RolloutBatch]]) -> list[list[RolloutBatch]]:
        return self._critic.with_advantages(super()._with_logprobs(number, steps))

    def ready_batches(self, step: int) -> list[RolloutBatch]:
        """Return this rank's micro-batches of the current step."""
        return self._ready[step % self._rl.steps_per_batch % self._rl.mini_batches]
