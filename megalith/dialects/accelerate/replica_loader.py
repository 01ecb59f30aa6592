"""The script's dataloaders: every data-parallel replica gets its own samples, in the script's order.

The script's batch is the micro-batch. A turn of the loop yields `num_micro_batches` of them to each replica: of every
global batch, the micro-batches in the sampler's order, the first replica takes the first ones. All ranks of a replica
get the same. The last global batch is filled up with samples that do not count: their labels are −100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from accelerate.data_loader import (
    _PYTORCH_DATALOADER_KWARGS,
    DataLoaderShard,
    SeedableRandomSampler,
)
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from megalith.errors import ConfigError

IGNORED = -100  # the label of what does not count
MADE_ANEW = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class ReplicaBatches(BatchSampler):
    """The samples of this replica, a turn of the loop at a time.

    `padding` is how many of the turn that was yielded last only fill it up; they stand at its end.
    """

    def __init__(
        self,
        batches: BatchSampler,
        micro_batches: int,
        replicas: int,
        replica: int,
        drop_last: bool,
        skip: int = 0,
    ):
        """`skip`: turns that are left out at the beginning."""
        self.batch_sampler, self.micro_batches, self.replicas, self.replica = (
            batches,
            micro_batches,
            replicas,
            replica,
        )
        self.micro_batch_size, self.drop_last, self.skip = batches.batch_size, drop_last, skip
        # As Accelerate's own shards of a sampler say it, for the length of the last turn:
        self.batch_size, self.num_processes = micro_batches * batches.batch_size, replicas
        self.sampler = getattr(batches, "sampler", None)

    def __len__(self) -> int:
        turn = self.micro_batches * self.replicas
        turns = len(self.batch_sampler) // turn if self.drop_last else -(-len(self.batch_sampler) // turn)
        return max(turns - self.skip, 0)

    def __iter__(self) -> Iterator[list[int]]:
        source, whole = iter(self.batch_sampler), self.batch_size * self.replicas
        first: list[int] = []
        turn = 0
        while taken := list(islice(source, self.micro_batches * self.replicas)):
            if any(len(batch) > self.micro_batch_size for batch in taken):
                raise ConfigError(
                    f"the dataloader's batch sampler gave a batch of {max(map(len, taken))} samples, but its "
                    f"batch_size is {self.micro_batch_size}; give batches of one size"
                )
            samples = [sample for batch in taken for sample in batch]
            first = first or samples
            if len(samples) < whole:
                if self.drop_last:
                    return
                samples += (first * (whole // len(first) + 1))[: whole - len(samples)]
            turn += 1
            if turn > self.skip:
                yield samples[self.replica * self.batch_size : (self.replica + 1) * self.batch_size]

    def padding(self, total: int, is_last: bool) -> int:
        """Of this replica's turn, the last of a dataset of `total` samples or not, the samples that fill it up."""
        left = total % (self.batch_size * self.replicas)
        if not is_last or self.drop_last or not left:
            return 0
        return self.batch_size - min(max(left - self.replica * self.batch_size, 0), self.batch_size)


class ReplicaLoader(DataLoaderShard):
    """Accelerate's own loader over ReplicaBatches, with the labels of what only fills up masked."""

    without_first: Callable[[int], DataLoader]
    """A loader that leaves so many turns out at its beginning."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            filler = self.padding
            if filler and isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor):
                batch = {**batch, "labels": batch["labels"].clone()}
                batch["labels"][-filler:] = IGNORED
            yield batch

    @property
    def padding(self) -> int:
        """How many samples at the end of the batch that was yielded last only fill it up."""
        sampler = self.batch_sampler.sampler
        total = len(sampler if sampler is not None else self.dataset)
        return self.batch_sampler.padding(total, self.end_of_dataloader)


def prepare_loader(
    loader: DataLoader,
    device: torch.device,
    micro_batches: int,
    replicas: int,
    replica: int,
    rng_types: list[str],
    seed: int | None = None,
    skip: int = 0,
) -> DataLoader:
    """The script's loader, for one of the replicas, without the first `skip` turns. Every rank calls it alike.

    `seed`: of a random order that begins anew in each epoch, as DataLoaderConfiguration(use_seedable_sampler=True) has
    it; None: the sampler's own.

    Raises ConfigError for a loader without batches.
    """
    if isinstance(loader.dataset, IterableDataset):
        return _stream(loader, device, micro_batches, replicas, replica, rng_types)
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    if getattr(batches, "batch_size", None) is None:
        raise ConfigError(
            "a dataloader without a batch size has no micro-batches; give it batch_size, or a batch sampler with one"
        )
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and seed is not None:
        batches.sampler = sampler = SeedableRandomSampler(
            sampler.data_source, sampler.replacement, sampler._num_samples, sampler.generator, data_seed=seed
        )
        sampler.generator = torch.Generator()
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        sampler.generator = (
            torch.Generator()
        )  # the ranks draw the same order from it: rng_types has "generator"
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    kept = {
        name: getattr(loader, name, default)
        for name, default in _PYTORCH_DATALOADER_KWARGS.items()
        if name not in MADE_ANEW
    }
    turns = ReplicaBatches(batches, micro_batches, replicas, replica, loader.drop_last, skip)
    generator = getattr(sampler, "generator", None)
    prepared = ReplicaLoader(
        loader.dataset,
        device=device,
        rng_types=[kind for kind in rng_types if kind != "generator" or generator is not None],
        synchronized_generator=generator,
        _drop_last=loader.drop_last,
        batch_sampler=turns,
        **kept,
    )
    prepared.without_first = partial(
        prepare_loader, loader, device, micro_batches, replicas, replica, rng_types, None
    )
    return prepared


class StreamLoader(DataLoaderShard):
    """Over a stream, a turn of all replicas a batch: this replica's rows, with what only fills it up masked."""

    replicas: int
    replica: int

    def __iter__(self) -> Iterator[Any]:
        share = self.batch_size // self.replicas
        for batch in super().__iter__():
            rows = find_batch_size(batch)
            self.remainder = rows % self.batch_size  # known only now: a stream has no length
            mine = torch.arange(self.replica * share, (self.replica + 1) * share, device=self.device)
            batch = recursively_apply(torch.Tensor.__getitem__, batch, mine % rows)
            if isinstance(batch, dict) and isinstance(batch.get("labels"), Tensor):
                batch["labels"][mine >= rows] = IGNORED  # a copy, by the indexing
            yield batch


def _stream(
    loader: DataLoader,
    device: torch.device,
    micro_batches: int,
    replicas: int,
    replica: int,
    rng_types: list[str],
) -> DataLoader:
    """A loader over a stream, which every rank reads whole: where it ends is known only to who reads it."""
    kept = {
        name: getattr(loader, name, default)
        for name, default in _PYTORCH_DATALOADER_KWARGS.items()
        if name not in (*MADE_ANEW, "dataset")
    }
    generator = getattr(loader.dataset, "generator", None)
    prepared = StreamLoader(
        loader.dataset,
        device=device,
        rng_types=[kind for kind in rng_types if kind != "generator" or generator is not None],
        synchronized_generator=generator,
        _drop_last=loader.drop_last,
        batch_size=loader.batch_size * micro_batches * replicas,
        drop_last=loader.drop_last,
        **kept,
    )
    prepared.replicas, prepared.replica = replicas, replica
    return prepared
