"""The reference policy: the weights that a run began from, which the policy is kept close to.

With adapters it is the model with them switched off. Else it is a second model in the run's layout, sharded like the
first, whose weights are loaded when it is first asked for.

And the old policy, where later weights no longer give its log-probabilities: as a checkpoint has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import Tensor

from megalith.bridge.load import load_initial_weights
from megalith.comm.collectives import gather_json
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.errors import DataError
from megalith.models.adapters import adapters
from megalith.parallel.mesh import Mesh
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.seams import plug
from megalith.rl.rollouts import unzstd
from megalith.training.build import Data, build_model, vocabulary_rows
from megalith.training.run_state import Run

LogProbs = Callable[[Sequence[Batch]], list[Tensor]]
"""Of micro-batches the log-probabilities of their labels, float32 [batch, seq] each. Every rank calls it."""


def reference_logprobs(run: Run, temperature: float = 1.0, vocab_size: int | None = None) -> LogProbs:
    """The reference's, of logits / temperature, over the first `vocab_size` entries of the vocabulary.

    `run` may be without its model until it is first asked."""
    if run.config.lora.rank is not None:
        return lambda batches: _without_adapters(run.model, batches, temperature, vocab_size)
    models: list[ParallelModel] = []

    def logprobs(batches: Sequence[Batch]) -> list[Tensor]:
        if not models:
            models.append(_first_weights(run))
        return models[0].all_logprobs(batches, temperature, vocab_size)

    return logprobs


def _first_weights(run: Run) -> ParallelModel:
    """A model in the run's layout with the weights that it began from."""
    config, model = run.config, build_model(run.config, run.mesh, run.device)
    if config.model.init_from is not None:
        rows = vocabulary_rows(config)
        trust = config.checkpoint.trust
        load_initial_weights(
            config.model.init_from, model.chunks, rows, config.train.seed, run.mesh.world, trust
        )
    return model


def _without_adapters(
    model: ParallelModel, batches: Sequence[Batch], temperature: float, vocab_size: int | None
) -> list[Tensor]:
    found = [adapter for chunk in model.chunks for _, adapter in adapters(chunk)]
    scalings = [adapter.scaling for adapter in found]
    for adapter in found:
        plug(adapter, "scaling", 0.0)
    try:
        return model.all_logprobs(batches, temperature, vocab_size)
    finally:
        for adapter, scaling in zip(found, scalings):
            plug(adapter, "scaling", scaling)


class StepData(Data):
    """A run's data, whose micro-batches get what another model says of them: for all of a step at once, with which a
    pipeline has fewer bubbles."""

    def completed(self, batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches of a step, with what they get. Every rank calls it."""
        raise NotImplementedError(f"{type(self).__name__} completes no batches")

    def train_loader(
        self, step: int, consumed_samples: int, device: torch.device, left_out: Sequence[Sequence[int]] = ()
    ) -> closing:
        loader = super().train_loader(step, consumed_samples, device, left_out)
        sizes = self._batch_sizes

        def counts() -> Iterator[int]:
            consumed = consumed_samples
            while True:
                yield sizes.micro_batches(consumed)
                consumed += sizes.size(consumed)

        return closing(self._completed(loader, counts()))

    def evaluation_loader(self, dataset: SampleDataset, device: torch.device) -> closing:
        loader = super().evaluation_loader(dataset, device)
        train = self._config.train
        count = self._batch_sizes.global_batch_size // (train.micro_batch_size * self._dp.size)
        return closing(self._completed(loader, iter(lambda: count, None)))

    def _completed(self, loader: Any, counts: Iterator[int]) -> Iterator[Batch]:
        with loader as batches:
            for count in counts:
                step = list(islice(batches, count))
                if not step:
                    return
                yield from self.completed(step)


Place = tuple[
    int, int, int
]  # of a row in a rollout batch: mini-batch, number in it, tokens; the same in every layout
Rows = dict[tuple[int, int], list[float]]  # by mini-batch and number


def logprobs_file(
    mesh: Mesh, number: int, places: Sequence[Sequence[Place]], found: Sequence[Tensor]
) -> bytes:
    """The log-probabilities of a rollout batch, of whose micro-batches `places` are this rank's, as a checkpoint has
    them: on the first rank. Every rank calls it."""
    own = []
    if mesh.tp.rank == mesh.cp.rank == mesh.pp.rank == 0:
        for rows, values in zip(places, found, strict=True):
            for n, (mini, at, tokens) in enumerate(rows):
                own.append([mini, at, values[n, :tokens].tolist()])
    ranks = gather_json(own, mesh.world, to_first=True)
    return zstandard.compress(json.dumps([number, [row for rank in ranks for row in rank]]).encode())


def read_logprobs(path: Path) -> tuple[int, Rows]:
    """The rollout batch's number, and its rows."""
    number, rows = json.loads(unzstd(path.read_bytes()))
    return number, {(mini, at): values for mini, at, values in rows}


def kept_logprobs(kept: Rows, rows: Sequence[Place], like: Tensor) -> Tensor:
    """Those of a micro-batch's rows, float32 like `like` [batch, seq]. Raises DataError where others were kept."""
    found = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    for n, (mini, at, tokens) in enumerate(rows):
        values = kept.get((mini, at), [])
        if len(values) != tokens:
            raise DataError(
                f"the checkpoint stands inside of a rollout batch whose row {at} of mini-batch {mini} had "
                f"{len(values)} tokens and has {tokens} now; leave rl.packing, data.seq_length, "
                "train.global_batch_size and rl.mini_batches as they were, or go on from a checkpoint between "
                "rollout batches"
            )
        found[n, :tokens] = torch.tensor(values)
    return found
