"""The reference policy: a frozen copy of the run's initial weights, used for the KL term.

With LoRA, the reference is the policy without its adapters, in which the modules of `lora.modules_to_save` have the
base model's values. Otherwise it is a second model, sharded like the policy, whose weights are loaded at the first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.load import load_initial_weights
from megalith.checkpoint.state import checkpoint_shards
from megalith.data.batch import Batch
from megalith.data.dataset import SampleDataset
from megalith.models.adapters import adapters
from megalith.models.saved_modules import saved_names_of
from megalith.parallel.data.data_parallel import reshard_parameters
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.seams import plug
from megalith.rl.auxiliary_models.frozen_model import load_frozen
from megalith.training.build import vocabulary_rows
from megalith.training.run_datasets import Data
from megalith.training.run_state import Run

LogProbs = Callable[[Sequence[Batch]], list[Tensor]]
"""Function that computes the log-probabilities of the labels of micro-batches, float32 [batch, seq] each.

Collective over all ranks.
"""


def reference_logprobs(run: Run, temperature: float = 1.0, vocab_size: int | None = None) -> LogProbs:
    """Return a function that computes the reference's log-probabilities.

    Args:
        run: the run; its model may be built later than this call, but before the function's first call.
        temperature: divisor of the logits.
        vocab_size: number of vocabulary entries in the softmax; None means all.
    """
    if run.config.lora.rank is not None:
        return adapter_free_logprobs(run, temperature, vocab_size)
    models: list[ParallelModel] = []

    def logprobs(batches: Sequence[Batch]) -> list[Tensor]:
        if not models:
            models.append(load_frozen(run.config, run.mesh, run.device))
        return models[0].all_logprobs(batches, temperature, vocab_size)

    return logprobs


def adapter_free_logprobs(run: Run, temperature: float, vocab_size: int | None) -> LogProbs:
    """Return a function that computes the log-probabilities of the run's model without its adapters."""

    def logprobs(batches: Sequence[Batch]) -> list[Tensor]:
        with without_adapters(run) as model:
            return model.all_logprobs(batches, temperature, vocab_size)

    return logprobs


@contextmanager
def without_adapters(run: Run) -> Iterator[ParallelModel]:
    """Return a context manager that switches the adapters of the run's model off. Every rank enters it.

    Meanwhile the modules in `lora.modules_to_save` have the base model's values. Each rank loads its shards of these
    values at the first use, and keeps them for later uses.
    """
    model = run.model
    lora_adapters = [adapter for chunk in model.chunks for _, adapter in adapters(chunk)]
    scalings = [adapter.scaling for adapter in lora_adapters]
    for adapter in lora_adapters:
        plug(adapter, "scaling", 0.0)
    trained = _swap_in_base_values(run)
    try:
        yield model
    finally:
        for adapter, scaling in zip(lora_adapters, scalings):
            plug(adapter, "scaling", scaling)
        _swap_in_values(model, trained)


def _swap_in_base_values(run: Run) -> dict[str, Tensor]:
    """Load the base model's values into the modules of `lora.modules_to_save`.

    Returns copies of this rank's previous shards.
    """
    model, config = run.model, run.config
    saved = saved_names_of(model.chunks)
    if not saved:
        return {}
    reshard_parameters(model.chunks)
    shards = {name: shard for name, shard in checkpoint_shards(model.chunks).items() if name in saved}
    trained = {name: shard.values.clone() for name, shard in shards.items()}
    if run.base_values is not None:
        _swap_in_values(model, run.base_values)
        return trained
    load_initial_weights(
        config.model.init_from,
        model.chunks,
        vocabulary_rows(config),
        config.train.seed,
        run.mesh.world,
        config.checkpoint.trust,
        names=saved,
    )
    run.base_values = {name: shard.values.clone() for name, shard in shards.items()}
    return trained


@torch.no_grad()
def _swap_in_values(model: ParallelModel, values: Mapping[str, Tensor]) -> None:
    """Set this rank's shards of parameters and buffers to `values`, by name."""
    if not values:
        return
    reshard_parameters(model.chunks)
    shards = checkpoint_shards(model.chunks)
    for name, value in values.items():
        shards[name].values.copy_(value)


class StepData(Data):
    """Data that adds an auxiliary model's outputs to each micro-batch.

    The outputs are computed for all micro-batches of a step at once, to reduce pipeline bubbles.
    """

    def augment(self, batches: Sequence[Batch]) -> list[Batch]:
        """Add the auxiliary model's outputs to the micro-batches of a step. Collective over all ranks."""
        raise NotImplementedError(f"{type(self).__name__} does not implement augment")

    def augment_evaluation(self, batches: Sequence[Batch]) -> list[Batch]:
        """Add the auxiliary model's outputs to evaluation micro-batches. The default is `augment`."""
        return self.augment(batches)

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

        return closing(self._augmented(loader, counts(), self.augment))

    def evaluation_loader(self, dataset: SampleDataset, device: torch.device) -> closing:
        loader = super().evaluation_loader(dataset, device)
        train = self._config.train
        count = self._batch_sizes.global_batch_size // (train.micro_batch_size * self._dp.size)
        return closing(self._augmented(loader, iter(lambda: count, None), self.augment_evaluation))

    def _augmented(
        self, loader: Any, counts: Iterator[int], augment: Callable[[Sequence[Batch]], list[Batch]]
    ) -> Iterator[Batch]:
        with loader as batches:
            for count in counts:
                step = list(islice(batches, count))
                if not step:
                    return
                yield from augment(step)
