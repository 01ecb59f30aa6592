"""The script's dataloaders: every data-parallel replica gets its own samples, in the script's order.

The script's batch is the micro-batch. A turn of the loop yields `num_micro_batches` of them to each replica: of every
global batch, the micro-batches in the sampler's order, the first replica takes the first ones. All ranks of a replica
get the same. The last global batch is filled up with samples that do not count: their labels are −100.
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
from megalith.errors import ConfigError
from megalith.hardware import to_device

IGNORED = -100  # the label of what does not count
MADE_ANEW = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


@dataclass(frozen=True)
class Share:
    """Which samples of a dataset's are this rank's, and where they go."""

    micro_batches: int
    replicas: int
    replica: int
    device: torch.device
    rng_types: tuple[str, ...] = ()
    """Which random states the ranks share at the beginning of an epoch."""
    seed: int | None = None
    """Of a random order that begins anew in each epoch, as DataLoaderConfiguration(use_seedable_sampler=True) has it;
    None: the sampler's own."""
    skip: int = 0
    """Turns that are left out at the beginning."""
    epoch: int = 0


class ReplicaBatches(BatchSampler):
    """The samples of this replica, a turn of the loop at a time.

    `padding` is how many of the turn that was yielded last only fill it up; they stand at its end.
    """

    def __init__(self, batches: BatchSampler, share: Share, drop_last: bool):
        self.batch_sampler, self.drop_last, self.skip = batches, drop_last, share.skip
        self.micro_batches, self.replicas, self.replica = share.micro_batches, share.replicas, share.replica
        self.micro_batch_size = batches.batch_size
        # As Accelerate's own shards of a sampler say it, for the length of the last turn:
        self.batch_size, self.num_processes = share.micro_batches * batches.batch_size, share.replicas
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


def filled_up_rows(loader: Any, rows: int) -> int:
    """Of so many samples that a loader has yielded last, how many at the end only fill them up; 0 where they are not
    this loader's, or it is none of ours. One of Accelerate's own that leaves out turns of ours is."""
    turns = getattr(loader, "batch_sampler", None)
    turns = turns.batch_sampler if isinstance(turns, SkipBatchSampler) else turns
    if not isinstance(turns, ReplicaBatches) or rows != turns.batch_size:
        return 0
    total = len(turns.sampler if turns.sampler is not None else loader.dataset)
    return turns.padding(total, loader.end_of_dataloader)


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """Accelerate's own; a loader of ours leaves out so many turns, without reading them where it has a sampler."""
    again = getattr(dataloader, "without_first", None)
    return skip_by_accelerate(dataloader, num_batches) if again is None else again(num_batches)


Copied = list[tuple[Tensor, int, Tensor]]
"""Of a batch each tensor on the device, its version, and the one on the host that it is a copy of."""


def copied_to(device: torch.device, batch: Any) -> tuple[Any, Copied]:
    """A batch on the device, and where its tensors came from: the model reads on the host what of a batch decides its
    passes, and to copy that back would wait for all that the device has still to do."""
    copied: Copied = []

    def copy(own: Tensor) -> Tensor:
        there = to_device(own, device)
        copied.append((there, there._version, own))
        return there

    return send_to_device(recursively_apply(copy, batch), device), copied


def host_copy(tensor: Tensor, *sources: Any) -> Tensor:
    """The tensor on the host; of one that a source has yielded last, and that nobody has changed, what it was."""
    for there, version, own in (one for source in sources for one in getattr(source, "copied", ())):
        if there is tensor and there._version == version:
            return own
    return tensor.cpu()


class OnDevice(DataLoaderShard):
    """Yields what `on_host` makes, on the rank's device."""

    place: torch.device
    without_first: Callable[[int], DataLoader]
    """A loader that leaves so many turns out at its beginning."""
    copied: Copied = []
    """Of the batch that was yielded last."""

    def on_host(self) -> Iterator[Any]:
        """The batches of this replica."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self.on_host():
            batch, self.copied = copied_to(self.place, batch)
            yield batch


class ReplicaLoader(OnDevice):
    """Accelerate's own loader over ReplicaBatches, with the labels of what only fills up masked."""

    def on_host(self) -> Iterator[Any]:
        for batch in DataLoaderShard.__iter__(self):
            labels = batch.get("labels") if isinstance(batch, Mapping) else None
            if isinstance(labels, Tensor) and (filler := filled_up_rows(self, len(labels))):
                batch["labels"] = labels.clone()
                batch["labels"][-filler:] = IGNORED
            yield batch


class StreamLoader(OnDevice):
    """Over a stream, a turn of all replicas a batch: this replica's rows, with what only fills it up masked."""

    share: Share

    def on_host(self) -> Iterator[Any]:
        replicas, replica = self.share.replicas, self.share.replica
        share, is_first = self.batch_size // replicas, True
        for batch in DataLoaderShard.__iter__(self):
            if is_first:
                require_the_same_everywhere(batch)
                is_first = False
            rows = find_batch_size(batch)
            self.remainder = rows % self.batch_size  # known only now: a stream has no length
            mine = torch.arange(replica * share, (replica + 1) * share)
            batch = recursively_apply(torch.Tensor.__getitem__, batch, mine % rows)
            if isinstance(batch, Mapping) and isinstance(batch.get("labels"), Tensor):
                batch["labels"][mine >= rows] = IGNORED  # a copy, by the indexing
            yield batch


def require_the_same_everywhere(batch: Any) -> None:
    """Every rank reads a stream whole, and takes its share. Raises ConfigError where they have read others."""
    sums: list[str] = []
    recursively_apply(lambda tensor: sums.append(str(tensor.double().sum().item())), batch)
    every = gather_json(sums, Axis(PartialState().num_processes, group=dist.group.WORLD))
    if any(one != every[0] for one in every):
        ranks = [rank for rank, one in enumerate(every) if one != every[0]]
        raise ConfigError(
            f"the dataset gives rank {ranks[0]} other samples than rank 0, but every rank reads a stream whole and "
            "takes its share of each batch; let it give all ranks the same, in one order, such as by a shuffle's seed"
        )


def prepare_loader(loader: DataLoader, share: Share) -> DataLoader:
    """The script's loader, for one of the replicas. Every rank calls it alike.

    Raises ConfigError for a loader without batches.
    """
    streams = isinstance(loader.dataset, IterableDataset)
    prepared = _stream(loader, share) if streams else _indexed(loader, share)

    prepared.place = share.device

    def without_first(turns: int) -> DataLoader:
        return prepare_loader(loader, replace(share, seed=None, skip=turns, epoch=prepared.iteration))

    prepared.without_first = without_first
    return prepared


def _indexed(loader: DataLoader, share: Share) -> ReplicaLoader:
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    if getattr(batches, "batch_size", None) is None:
        raise ConfigError(
            "a dataloader without a batch size has no micro-batches; give it batch_size, or a batch sampler with one"
        )
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and share.seed is not None:
        batches.sampler = sampler = SeedableRandomSampler(
            sampler.data_source,
            sampler.replacement,
            sampler._num_samples,
            sampler.generator,
            data_seed=share.seed,
        )
        sampler.generator = torch.Generator()
    if isinstance(sampler, RandomSampler) and sampler.generator is None:
        # The ranks draw the same order from it: rng_types has "generator".
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    generator = getattr(sampler, "generator", None)
    turns = ReplicaBatches(batches, share, loader.drop_last)
    return ReplicaLoader(**_options(loader, share, generator), batch_sampler=turns)


def _stream(loader: DataLoader, share: Share) -> StreamLoader:
    """A loader over a stream, which every rank reads whole: where it ends is known only to who reads it."""
    prepared = StreamLoader(
        **_options(loader, share, getattr(loader.dataset, "generator", None)),
        batch_size=loader.batch_size * share.micro_batches * share.replicas,
        drop_last=loader.drop_last,
        skip_batches=share.skip,
    )
    prepared.share = share
    return prepared


def _options(loader: DataLoader, share: Share, generator: Any) -> dict[str, Any]:
    """What a loader of Accelerate's takes over from the script's."""
    names = {name: default for name, default in _PYTORCH_DATALOADER_KWARGS.items() if name not in MADE_ANEW}
    kept = {name: getattr(loader, name, default) for name, default in names.items()}
    return kept | {
        "dataset": loader.dataset,
        "device": None,
        "rng_types": [kind for kind in share.rng_types if kind != "generator" or generator is not None],
        "synchronized_generator": generator,
        "iteration": share.epoch,
        "_drop_last": loader.drop_last,
    }
