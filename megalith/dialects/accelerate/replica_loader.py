"""Split the batches of the script's dataloaders over the data-parallel replicas, in the script's order.

The script's batch is the micro-batch. Each iteration yields `num_micro_batches` of them to each replica; the first
replica gets the first micro-batches of the global batch. All ranks of a replica get the same samples. The last global
batch is padded with samples whose labels are −100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from accelerate.data_loader import (
    _PYTORCH_DATALOADER_KWARGS,
    DataLoaderShard,
    SeedableRandomSampler,
    SkipBatchSampler,
)
from accelerate.data_loader import skip_first_batches as skip_by_accelerate
from accelerate.state import PartialState
from accelerate.utils import find_batch_size, recursively_apply, send_to_device
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from megalith.comm.collectives import Axis, gather_json
from megalith.compat.training_objects import requested_samples, tensor_version
from megalith.errors import ConfigError
from megalith.hardware import to_device

IGNORED = -100  # label of tokens that do not count
REPLACED_ARGUMENTS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


@dataclass(frozen=True)
class ReplicaSharding:
    """Determines the samples of a dataloader that one replica uses, and the device to which they are copied."""

    micro_batches: int
    replicas: int
    replica: int
    device: torch.device
    rng_types: tuple[str, ...] = ()
    """Random states that are synchronized over the ranks at the beginning of an epoch."""
    seed: int | None = None
    """Seed of the shuffle, for DataLoaderConfiguration(use_seedable_sampler=True); None keeps the sampler."""
    skip: int = 0
    """Iterations to skip at the beginning."""
    epoch: int = 0


class ReplicaBatches(BatchSampler):
    """Batch sampler that yields this replica's samples of each iteration."""

    def __init__(self, batches: BatchSampler, sharding: ReplicaSharding, drop_last: bool):
        self.batch_sampler, self.drop_last, self.skip = batches, drop_last, sharding.skip
        self.micro_batches, self.replicas, self.replica = (
            sharding.micro_batches,
            sharding.replicas,
            sharding.replica,
        )
        self.micro_batch_size = batches.batch_size
        # Accelerate reads these names to compute the length of the last batch.
        self.batch_size, self.num_processes = sharding.micro_batches * batches.batch_size, sharding.replicas
        self.sampler = getattr(batches, "sampler", None)

    def __len__(self) -> int:
        per_step = self.micro_batches * self.replicas
        batches = len(self.batch_sampler)
        steps = batches // per_step if self.drop_last else -(-batches // per_step)
        return max(steps - self.skip, 0)

    def __iter__(self) -> Iterator[list[int]]:
        source, global_batch = iter(self.batch_sampler), self.batch_size * self.replicas
        first: list[int] = []
        step = 0
        while batches := list(islice(source, self.micro_batches * self.replicas)):
            if any(len(batch) > self.micro_batch_size for batch in batches):
                raise ConfigError(
                    f"the dataloader's batch sampler yielded a batch of {max(map(len, batches))} samples, but its "
                    f"batch_size is {self.micro_batch_size}; yield batches of one size"
                )
            samples = [sample for batch in batches for sample in batch]
            first = first or samples
            if len(samples) < global_batch:
                if self.drop_last:
                    return
                samples += (first * (global_batch // len(first) + 1))[: global_batch - len(samples)]
            step += 1
            if step > self.skip:
                yield samples[self.replica * self.batch_size : (self.replica + 1) * self.batch_size]

    def padding(self, total: int, is_last: bool) -> int:
        """Return the number of padding samples at the end of this replica's batch.

        Args:
            total: samples in the dataset.
            is_last: the batch is the last one of the epoch.
        """
        remainder = total % (self.batch_size * self.replicas)
        if not is_last or self.drop_last or not remainder:
            return 0
        return self.batch_size - min(max(remainder - self.replica * self.batch_size, 0), self.batch_size)


def num_padding_rows(loader: Any, rows: int) -> int:
    """Return the number of padding samples at the end of a loader's most recent batch.

    Args:
        loader: any dataloader. The result is 0 unless it iterates over ReplicaBatches, directly or through
            Accelerate's SkipBatchSampler.
        rows: samples in the batch. The result is 0 if they do not match the loader's batch size.
    """
    batches = getattr(loader, "batch_sampler", None)
    batches = batches.batch_sampler if isinstance(batches, SkipBatchSampler) else batches
    if not isinstance(batches, ReplicaBatches) or rows != batches.batch_size:
        return 0
    total = len(batches.sampler if batches.sampler is not None else loader.dataset)
    return batches.padding(total, loader.end_of_dataloader)


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """Return a loader that skips the first iterations, without reading them if the loader has a sampler."""
    skipping = getattr(dataloader, "skipping", None)
    return skip_by_accelerate(dataloader, num_batches) if skipping is None else skipping(num_batches)


HostCopies = list[tuple[Tensor, int, Tensor]]
"""For each tensor of a batch: the tensor on the device, its version, and the tensor on the host it was copied from."""


def copy_to_device(device: torch.device, batch: Any) -> tuple[Any, HostCopies]:
    """Copy a batch to the device. Returns the copy and the host tensors.

    The model reads masks and labels on the host to plan its passes. Keeping the host tensors avoids copying them back,
    which would wait for the device.
    """
    host_copies: HostCopies = []

    def copy(host_tensor: Tensor) -> Tensor:
        tensor = to_device(host_tensor, device)
        host_copies.append((tensor, tensor_version(tensor), host_tensor))
        return tensor

    return send_to_device(recursively_apply(copy, batch), device), host_copies


def host_copy(tensor: Tensor, *sources: Any) -> Tensor:
    """Return the tensor on the host, without a copy if possible.

    If a source still keeps the host tensor that `tensor` was copied from, and `tensor` has not been changed since, that
    host tensor is returned.
    """
    for source in sources:
        for copy, version, host_tensor in getattr(source, "host_copies", ()):
            if copy is tensor and tensor_version(copy) == version:
                return host_tensor
    return tensor.cpu()


class DeviceLoader(DataLoaderShard):
    """Loader that copies the batches of `host_batches` to the rank's device."""

    target_device: torch.device
    skipping: Callable[[int], DataLoader]
    """Function that returns a loader without this many iterations at the beginning."""
    host_copies: HostCopies = []
    """Host tensors of the batch yielded last."""

    def host_batches(self) -> Iterator[Any]:
        """Yield this replica's batches on the host."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self.host_batches():
            batch, self.host_copies = copy_to_device(self.target_device, batch)
            yield batch


class ReplicaLoader(DeviceLoader):
    """Accelerate's loader over ReplicaBatches, with the labels of padding samples masked."""

    def host_batches(self) -> Iterator[Any]:
        for batch in DataLoaderShard.__iter__(self):
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if isinstance(labels, Tensor) and (padding := num_padding_rows(self, len(labels))):
                batch["labels"] = labels.clone()
                batch["labels"][-padding:] = IGNORED
            yield batch


class StreamLoader(DeviceLoader):
    """Loader of an iterable dataset. It reads global batches and yields this replica's rows, with padding masked."""

    sharding: ReplicaSharding

    def host_batches(self) -> Iterator[Any]:
        replicas, replica = self.sharding.replicas, self.sharding.replica
        local_rows, is_first = self.batch_size // replicas, True
        for batch in DataLoaderShard.__iter__(self):
            if is_first:
                check_same_on_all_ranks(batch)
                is_first = False
            rows = find_batch_size(batch)
            self.remainder = rows % self.batch_size  # a stream has no length, so it is known only now
            indices = torch.arange(replica * local_rows, (replica + 1) * local_rows)
            batch = recursively_apply(torch.Tensor.__getitem__, batch, indices % rows)
            if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
                batch["labels"][indices >= rows] = IGNORED  # the indexing has made a copy
            yield batch


def check_same_on_all_ranks(batch: Any) -> None:
    """Raise ConfigError if the ranks have read different batches from an iterable dataset."""
    sums: list[str] = []
    recursively_apply(lambda tensor: sums.append(str(tensor.double().sum().item())), batch)
    sums_of_ranks = gather_json(sums, Axis(PartialState().num_processes, group=dist.group.WORLD))
    if different := [rank for rank, other in enumerate(sums_of_ranks) if other != sums_of_ranks[0]]:
        raise ConfigError(
            f"the dataset yields other samples on rank {different[0]} than on rank 0, but every rank reads the full "
            "stream and uses its part of each batch; yield the same samples in the same order on all ranks, for "
            "example with a fixed shuffle seed"
        )


def prepare_loader(loader: DataLoader, sharding: ReplicaSharding) -> DataLoader:
    """Return the script's loader restricted to one replica. Collective over all ranks.

    Raises ConfigError for a loader without a batch size.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    prepared = _stream_loader(loader, sharding) if is_stream else _replica_loader(loader, sharding)
    prepared.target_device = sharding.device

    def skipping(steps: int) -> DataLoader:
        return prepare_loader(loader, replace(sharding, seed=None, skip=steps, epoch=prepared.iteration))

    prepared.skipping = skipping
    return prepared


def _replica_loader(loader: DataLoader, sharding: ReplicaSharding) -> ReplicaLoader:
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    if getattr(batches, "batch_size", None) is None:
        raise ConfigError(
            "a dataloader needs a batch size, which is the micro-batch; set batch_size, or use a batch sampler with one"
        )
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and sharding.seed is not None:
        batches.sampler = sampler = SeedableRandomSampler(
            sampler.data_source,
            sampler.replacement,
            requested_samples(sampler),
            sampler.generator,
            data_seed=sharding.seed,
        )
        sampler.generator = torch.Generator()
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        # rng_types contains "generator", so all ranks draw the same order from it.
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    generator = getattr(sampler, "generator", None)
    replica_batches = ReplicaBatches(batches, sharding, loader.drop_last)
    return ReplicaLoader(**_options(loader, sharding, generator), batch_sampler=replica_batches)


def _stream_loader(loader: DataLoader, sharding: ReplicaSharding) -> StreamLoader:
    """Return a loader of an iterable dataset, which every rank reads in full because its length is unknown."""
    prepared = StreamLoader(
        **_options(loader, sharding, getattr(loader.dataset, "generator", None)),
        batch_size=loader.batch_size * sharding.micro_batches * sharding.replicas,
        drop_last=loader.drop_last,
        skip_batches=sharding.skip,
    )
    prepared.sharding = sharding
    return prepared


def _options(loader: DataLoader, sharding: ReplicaSharding, generator: Any) -> dict[str, Any]:
    """Return the arguments of Accelerate's loader that come from the script's loader."""
    options = {
        name: getattr(loader, name, default)
        for name, default in _PYTORCH_DATALOADER_KWARGS.items()
        if name not in REPLACED_ARGUMENTS
    }
    return options | {
        "dataset": loader.dataset,
        "device": None,
        "rng_types": [kind for kind in sharding.rng_types if kind != "generator" or generator is not None],
        "synchronized_generator": generator,
        "iteration": sharding.epoch,
        "_drop_last": loader.drop_last,
    }
