"""Micro-batches out of a dataset, for one data-parallel rank, read ahead by threads.

A run is one stream of samples. Step by step it takes the next `global_batch_size` positions, in sub-blocks of
micro_batch_size * data_parallel_size, of which rank r has `[r * micro_batch_size, (r + 1) * micro_batch_size)`.
So the samples of a step never depend on how many ranks share them, and the only state is the number of samples
consumed: a loader begun there goes on as if it had never stopped.

A micro-batch takes a tenth of a millisecond to make; to fetch it from another process takes two. So threads make them:
what may be slow, reading the file and pinning the memory, leaves the interpreter to the thread that trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from megalith.data.batch import Batch, BoundaryRules, make_batch
from megalith.data.dataset import SampleDataset
from megalith.data.order import SampleOrder, SingleOrder
from megalith.errors import ConfigError, DataError, MegalithError

Collate = Callable[[np.ndarray, np.ndarray], Batch]  # of samples, and their places in the stream
Request = tuple[range, list[int]]  # positions in the stream, and the dataset's samples that stand there


class Loader:
    """An iterator of Batch, one micro-batch each. Close it, or use it in a `with`, to stop its threads.

    `order` says which sample stands where in the stream; None: the dataset's own order, again and again.
    `batch_sizes` gives the global batch size of each coming step; the loader ends with it. `consumed_samples` is
    where in the stream it begins. Iterating draws from no global random state, and the number of threads changes
    nothing but the speed; together they are at most `ahead` micro-batches ahead. `collate` makes the Batch of a dataset
    whose samples are not tokens alone, and has checked them. A bad token or the end of the data
    is a DataError from `next`, at the micro-batch that it belongs to.
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
    ) -> None:
        order = order or SingleOrder(len(dataset), wrap=True)
        positions = micro_batch_positions(
            batch_sizes, micro_batch_size, data_parallel_rank, data_parallel_size, consumed_samples
        )
        self._make = _MicroBatches(dataset, vocab_size, rules or BoundaryRules(), pin_memory, collate)
        self._requests: Iterator[Request] | None = (
            (span, [order(position) for position in span]) for span in positions
        )
        self._coming: deque[Future[Batch]] = deque()
        self._ahead = ahead
        self._failure: MegalithError | None = (
            None  # of a request, once the good ones before it have been given
        )
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
            self._read_ahead(self._threads)
            if not self._coming:
                raise self._failure or StopIteration
            return self._coming.popleft().result()
        except (MegalithError, StopIteration):
            self.close()
            raise

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the threads. The loader is then at its end."""
        self._requests = None
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _read_ahead(self, threads: ThreadPoolExecutor) -> None:
        """Has the next micro-batches made, until `ahead` are under way or a request fails."""
        while len(self._coming) < self._ahead and self._failure is None:
            try:
                request = next(self._requests, None)
            except MegalithError as error:
                self._failure = error
                return
            if request is None:
                return
            self._coming.append(threads.submit(self._make, request))


def micro_batch_positions(
    batch_sizes: Iterable[int], micro_batch_size: int, rank: int, size: int, consumed_samples: int
) -> Iterator[range]:
    """The stream positions of each micro-batch of data-parallel `rank` of `size`."""
    together = micro_batch_size * size
    start = consumed_samples
    for batch_size in batch_sizes:
        if batch_size % together:
            raise ConfigError(
                f"global_batch_size {batch_size} is not divisible by micro_batch_size ({micro_batch_size}) × "
                f"data-parallel size ({size}) = {together}; change one of them"
            )
        for block in range(start, start + batch_size, together):
            first = block + rank * micro_batch_size
            yield range(first, first + micro_batch_size)
        start += batch_size


class _MicroBatches:
    """Makes the micro-batch that a request asks for."""

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

    def __call__(self, request: Request) -> Batch:
        positions, indices = request
        samples = np.stack([self.dataset[i] for i in indices])  # [batch, seq + 1], or as collate takes them
        numbers = np.array(positions, dtype=np.int64)
        if self.collate is not None:
            batch = self.collate(samples, numbers)
        else:
            self._check_tokens(samples, indices)
            batch = make_batch(samples, numbers, self.rules)
        return batch.pin_memory() if self.pin_memory else batch

    def _check_tokens(self, samples: np.ndarray, indices: list[int]) -> None:
        if samples.min() >= 0 and samples.max() < self.vocab_size:
            return
        row, at = np.argwhere((samples < 0) | (samples >= self.vocab_size))[0]
        raise DataError(
            f"{self.dataset.describe(indices[row])} has token id {samples[row, at]} at position {at}, but the "
            f"vocabulary has {self.vocab_size}; preprocess the data with this run's tokenizer, or raise vocab_size"
        )
