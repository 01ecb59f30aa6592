"""`megalith grpo`: a run that is trained on rollouts from files, by the trainer's own loop.

The loop, optimizer, checkpoints and report are those of pre-training; what differs is the Task: the data, the loss and
the figures of a step. The reference of the KL term are the weights that the run began from: with adapters the model
with them switched off, else a second model in the same layout, loaded when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.load import begin_from
from megalith.comm.collectives import summed
from megalith.config import RunConfig
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.models.adapters import adapters
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.seams import plug
from megalith.rl.objective import PolicyLoss, RolloutBatch
from megalith.rl.rollout_data import LogProbs, RolloutData
from megalith.rl.rollouts import Rollouts, load_rollouts
from megalith.training.build import build_model, vocabulary_rows
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
        tokenizer=tokenizer and tokenizer.fingerprint,
    )


class PolicyTask(Task):
    """What the trainer's loop needs to know of GRPO."""

    def begin(self, run: Run) -> RolloutData:
        self.loss = PolicyLoss(run.config.rl)
        reference = _reference(run) if run.config.rl.beta else None
        return RolloutData(run, open_rollouts(run.config, run.tokenizer), reference)

    def figures(self, run: Run) -> Callable[[], dict[str, Any]]:
        """Of the step that `run` is about to count. Every rank calls it."""
        sums, mesh = self.loss.take_sums(), run.mesh
        if sums is None:
            sums = torch.zeros(len(PolicyLoss.FIGURES), dtype=torch.float64, device=run.device)
        sums = summed(summed(sums, mesh.dp), mesh.pp)
        known = run.data.step(run.step).figures
        return lambda: {**self._read(sums), **known}

    def _read(self, sums: Tensor) -> dict[str, float | None]:
        tokens, *rest = sums.tolist()
        found = dict(zip(PolicyLoss.FIGURES[1:], (value / max(tokens, 1) for value in rest)))
        found["kl"] = found["kl"] if self.loss.rl.beta else None
        found["entropy"] = found["entropy"] if self.loss.needs_entropy else None
        return found


def _reference(run: Run) -> LogProbs:
    """What gives the reference's log-probabilities of micro-batches."""
    temperature = run.config.rl.temperature
    if run.config.lora.rank is not None:
        return lambda batches: _without_adapters(run.model, batches, temperature)
    models: list[ParallelModel] = []

    def logprobs(batches: Sequence[RolloutBatch]) -> list[Tensor]:
        if not models:
            models.append(_first_weights(run))
        return models[0].all_logprobs(batches, temperature)

    return logprobs


def _first_weights(run: Run) -> ParallelModel:
    """A model in the run's layout with the weights that it began from."""
    config, model = run.config, build_model(run.config, run.mesh, run.device)
    if config.model.init_from is not None:
        rows = vocabulary_rows(config)
        begin_from(config.model.init_from, model.chunks, rows, config.train.seed, run.mesh.world)
    return model


def _without_adapters(
    model: ParallelModel, batches: Sequence[RolloutBatch], temperature: float
) -> list[Tensor]:
    found = [adapter for chunk in model.chunks for _, adapter in adapters(chunk)]
    scalings = [adapter.scaling for adapter in found]
    for adapter in found:
        plug(adapter, "scaling", 0.0)
    try:
        return model.all_logprobs(batches, temperature)
    finally:
        for adapter, scaling in zip(found, scalings):
            plug(adapter, "scaling", scaling)
