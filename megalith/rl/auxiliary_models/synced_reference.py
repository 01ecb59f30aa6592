"""A reference model that is periodically updated from the policy (TR-DPO, Gorbatovski et al. 2024).

Every `ref_model_sync_steps` steps, each rank updates its shards of the reference, which has the policy's layout:

    reference = alpha · policy + (1 − alpha) · reference

A checkpoint has the reference's weights as a part of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from megalith.checkpoint.read import Checkpoint
from megalith.checkpoint.state import load_part, state_shards
from megalith.config.reference_sync import ReferenceSync
from megalith.data.batch import Batch
from megalith.parallel.data.data_parallel import reshard_parameters
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.shards import LocalShard
from megalith.rl.auxiliary_models.frozen_model import load_trained
from megalith.rl.auxiliary_models.reference import LogProbs, reference_logprobs
from megalith.training.build import vocabulary_rows
from megalith.training.run_state import Run, Task

PART = "reference"  # of a checkpoint


class SyncedReference:
    """The reference model of a run with `sync_ref_model`. It is built at its first use."""

    def __init__(self, run: Run, settings: ReferenceSync, temperature: float, vocab_size: int | None):
        self._run, self._settings = run, settings
        self._softmax = temperature, vocab_size

    @cached_property
    def model(self) -> ParallelModel:
        """The reference model. It starts with the run's initial weights. Every rank accesses it."""
        return load_trained(self._run.config, self._run.mesh, self._run.device)

    def __call__(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Return the log-probabilities of micro-batches, as `reference_logprobs` does."""
        return self.model.all_logprobs(batches, *self._softmax)

    @torch.no_grad()
    def end_step(self) -> None:
        """Mix the policy into the reference if an update is due after the step that has just ended."""
        settings, alpha = self._settings, self._settings.ref_model_mixup_alpha
        if self._run.step % settings.ref_model_sync_steps:
            return
        reshard_parameters(self.model.chunks)
        policy = dict(self._run.model.parameters.named)
        for name, weight in self.model.parameters.named:
            weight.mul_(1 - alpha).add_(policy[name], alpha=alpha)

    def parts(self) -> dict[str, Mapping[str, LocalShard]]:
        """Return this rank's weight shards, to be saved in the checkpoint."""
        reshard_parameters(self.model.chunks)
        shards = state_shards(self.model.chunks, None, vocabulary_rows(self._run.config))
        return {PART: shards["model"]}

    def load(self, checkpoint: Checkpoint) -> None:
        """Restore the weights. If the checkpoint has none, the reference keeps the run's initial weights."""
        if PART in checkpoint.manifest.tensors:
            rows = vocabulary_rows(self._run.config)
            reshard_parameters(self.model.chunks)
            load_part(checkpoint, PART, self.model.chunks, None, rows, self._run.mesh.world)


class ReferenceTask(Task):
    """A task that compares the policy with a reference model. `open_reference` opens it."""

    synced: SyncedReference | None = None

    def open_reference(
        self, run: Run, settings: ReferenceSync, temperature: float = 1.0, vocab_size: int | None = None
    ) -> LogProbs:
        """Return a function that computes the reference's log-probabilities, as `reference_logprobs` does."""
        if not settings.sync_ref_model:
            return reference_logprobs(run, temperature, vocab_size)
        self.synced = SyncedReference(run, settings, temperature, vocab_size)
        return self.synced

    def end_step(self, run: Run) -> None:
        if self.synced is not None:
            self.synced.end_step()

    def parts(self, run: Run) -> dict[str, Mapping[str, LocalShard]]:
        return {} if self.synced is None else self.synced.parts()

    def load_parts(self, run: Run, checkpoint: Checkpoint, with_optimizer: bool) -> None:
        if self.synced is not None:
            self.synced.load(checkpoint)
