"""Loader of micro-batches for one data-parallel rank, with prefetching threads.

A run is one stream of samples. Each step takes the next `global_batch_size` positions, in blocks of micro_batch_size *
data_parallel_size. In each block, rank r takes the positions from r * micro_batch_size to (r + 1) * micro_batch_size,
or positions chosen by cost (balance.py). The samples of a step therefore do not depend on the number of ranks, and the
only state is the number of consumed samples.

Threads prepare micro-batches. Making one takes 0.1 ms; transferring it from another process would take longer. The slow
parts, reading files and pinning memory, release the interpreter lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from megalith.data.balance import BatchCosts, balanced_positions
from megalith.data.batch import PADDING, Batch, BoundaryRules, make_batch
from megalith.data.dataset import SampleDataset
from megalith.data.dynamic_context import ContextGroup
from megalith.data.order import SampleOrder, SingleOrder
from megalith.data.streams.stream import SampleStream
from megalith.errors import ConfigError, DataError, MegalithError

Collate = Callable[[np.ndarray, np.ndarray], Batch]  # (samples, positions in the stream) → batch
Request = tuple[Sequence[int], list[int]]  # positions in the stream, and the indices of their samples
GroupRequest = tuple[range, ContextGroup]  # positions of the global batch, and a row of it
Passes = Callable[[range], Sequence[ContextGroup]]
"""Function from the stream positions of a global batch to one rank's rows, one per pass."""


class Loader:
    """Iterator over the micro-batches of a data-parallel rank. Close it or use it as a context manager to stop its
    threads.

    Args:
        dataset: samples by index.
        order: maps positions in the stream to sample indices; None means the dataset's order, repeated.
        micro_batch_size: samples per micro-batch.
        batch_sizes: global batch size of each step; the loader ends after the last one.
        vocab_size: upper bound of token ids.
        data_parallel_rank: this rank.
        data_parallel_size: number of data-parallel ranks.
        consumed_samples: position in the stream to start from.
        num_workers: number of threads; 0: load in the calling thread. It affects only speed.
        ahead: maximum number of prefetched micro-batches over all threads.
        pin_memory: return batches in pinned memory.
        rules: treatment of document boundaries.
        collate: makes and checks a Batch if samples are more than token ids; with an attribute `takes_list`, it gets a
            list of samples, otherwise they are stacked.
        interleaved: distribution of samples to ranks, see `micro_batch_positions`.
        costs: costs of samples by position, by which the samples of each step are assigned to ranks; None: in order.
        passes: rows of each step under dynamic context parallelism, in which sequences of different samples are
            regrouped.

    Raises:
        DataError: from `next`, at the micro-batch with an invalid token or after the end of the data.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        order: SampleOrder | None = None,
        *,
        micro_batch_size: int,
        batch_sizes: Iterable[int],
        vocab_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
        ahead: int = 4,
        pin_memory: bool = False,
        rules: BoundaryRules | None = None,
        collate: Collate | None = None,
        costs: BatchCosts | None = None,
        interleaved: bool = False,
        passes: Passes | None = None,
    ) -> None:
        order = order or SingleOrder(len(dataset), wrap=True)
        layout = (micro_batch_size, data_parallel_rank, data_parallel_size)
        batches = global_batches(batch_sizes, micro_batch_size, data_parallel_size, consumed_samples)
        if costs is None:
            positions = micro_batch_positions(batches, *layout, interleaved)
        else:
            positions = balanced_positions(batches, costs, *layout)
        self._make = _MicroBatchMaker(dataset, vocab_size, rules or BoundaryRules(), pin_memory, collate)
        self._requests: Iterator[Request | GroupRequest] | None = (
            ((span, [order(position) for position in span]) for span in positions)
            if passes is None
            else ((batch, group) for batch in batches for group in passes(batch))
        )
        self._pending: deque[Future[Batch]] = deque()
        self._ahead = ahead
        self._failure: MegalithError | None = None  # raised after the micro-batches before it
        self._threads = None
        if num_workers:
            device = (torch.cuda.set_device, (torch.cuda.current_device(),)) if pin_memory else (None, ())
            self._threads = ThreadPoolExecutor(num_workers, "data", *device)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._requests is None:
            raise StopIteration
        try:
            if self._threads is None:
                return self._make(next(self._requests))
            self._prefetch(self._threads)
            if not self._pending:
                raise self._failure or StopIteration
            return self._pending.popleft().result()
        except (MegalithError, StopIteration):
            self.close()
            raise

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the threads and end the iteration. A stream stops reading ahead."""
        self._requests = None
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        if isinstance(self._make.dataset, SampleStream):
            self._make.dataset.close()

    def _prefetch(self, threads: ThreadPoolExecutor) -> None:
        """Submit requests until `ahead` are pending or one fails."""
        while len(self._pending) < self._ahead and self._failure is None:
            try:
                request = next(self._requests, None)
            except MegalithError as error:
                self._failure = error
                return
            if request is None:
                return
            self._pending.append(threads.submit(self._make, request))


def global_batches(
    batch_sizes: Iterable[int], micro_batch_size: int, size: int, consumed_samples: int
) -> Iterator[range]:
    """Yield the stream positions of each global batch of `size` data-parallel ranks."""
    start, block_size = consumed_samples, micro_batch_size * size
    for batch_size in batch_sizes:
        if batch_size % block_size:
            raise ConfigError(
                f"global_batch_size {batch_size} is not divisible by micro_batch_size ({micro_batch_size}) × "
                f"data-parallel size ({size}) = {block_size}; change one of these sizes"
            )
        yield range(start, start + batch_size)
        start += batch_size


def micro_batch_positions(
    batches: Iterable[range], micro_batch_size: int, rank: int, size: int, interleaved: bool = False
) -> Iterator[range]:
    """Yield the stream positions of each micro-batch of data-parallel `rank` of `size`.

    `interleaved`: consecutive samples go to consecutive ranks, so that a rank's samples do not depend on
    micro_batch_size. Otherwise a micro-batch consists of consecutive samples.
    """
    for batch in batches:
        if interleaved:
            share = batch[rank::size]
            for first in range(0, len(share), micro_batch_size):
                yield share[first : first + micro_batch_size]
            continue
        for block in range(0, len(batch), micro_batch_size * size):
            first = block + rank * micro_batch_size
            yield batch[first : first + micro_batch_size]


class _MicroBatchMaker:
    """Makes the micro-batch of a request."""

    def __init__(
        self,
        dataset: SampleDataset,
        vocab_size: int,
        rules: BoundaryRules,
        pin_memory: bool,
        collate: Collate | None,
    ) -> None:
        self.dataset = dataset
        self.vocab_size = vocab_size
        self.rules = rules
        self.collate = collate
        self.pin_memory = pin_memory
        self._pads = getattr(dataset, "pads", False)

    def __call__(self, request: Request | GroupRequest) -> Batch:
        if isinstance(request[1], ContextGroup):
            return self._regrouped(*request)
        positions, indices = request
        samples = [self.dataset[i] for i in indices]
        if not getattr(self.collate, "takes_list", False):
            samples = np.stack(samples)  # [batch, seq + 1], or as `collate` expects them
        sample_numbers = np.array(positions, dtype=np.int64)
        if self.collate is not None:
            batch = self.collate(samples, sample_numbers)
        else:
            self._check_tokens(samples, indices)
            batch = make_batch(samples, sample_numbers, self.rules, self._pads)
        return batch.pin_memory() if self.pin_memory else batch

    def _regrouped(self, positions: range, group: ContextGroup) -> Batch:
        """Build the micro-batch of a group: one row with the group's sequences from the global batch."""
        row = self.dataset.packed_row(group.sequences, group.length)
        batch = self.collate(row[None], np.array([positions.start], dtype=np.int64))
        batch.cp_size = group.degree
        if batch.all_padding is not None:  # a row may be longer than a sample, and so than learned positions
            batch.position_ids.masked_fill_(batch.all_padding, 0)
        return batch.pin_memory() if self.pin_memory else batch

    def _check_tokens(self, samples: np.ndarray, indices: list[int]) -> None:
        lowest = PADDING if self._pads else 0
        if samples.min() >= lowest and samples.max() < self.vocab_size:
            return
        row, at = np.argwhere((samples < lowest) | (samples >= self.vocab_size))[0]
        raise DataError(
            f"{self.dataset.describe(indices[row])} has token id {samples[row, at]} at position {at}, but the "
            f"vocabulary has {self.vocab_size} entries; preprocess the data with this run's tokenizer, or raise "
            "vocab_size"
        )
