"""Micro-batches out of a dataset, for one data-parallel rank, read ahead by worker processes.

A run is one stream of samples. Step by step it takes the next `global_batch_size` positions, in sub-blocks of
micro_batch_size * data_parallel_size, of which rank r has `[r * micro_batch_size, (r + 1) * micro_batch_size)`.
So the samples of a step never depend on how many ranks share them, and the only state is the number of samples
consumed: a loader begun there goes on as if it had never stopped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch.utils.data import DataLoader

from megalith.data.batch import Batch, BoundaryRules, make_batch
from megalith.data.dataset import SampleDataset
from megalith.data.order import SampleOrder
from megalith.errors import ConfigError, DataError, MegalithError


class Loader:
    """An iterator of Batch, one micro-batch each. Close it, or use it in a `with`, to stop its workers.

    `batch_sizes` gives the global batch size of each coming step; the loader ends with it. `consumed_samples` is
    where in the stream it begins. Iterating draws from no global random state, and the number of workers changes
    nothing but the speed. A bad token or the end of the data is a DataError from `next`, at the micro-batch that
    it belongs to.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        order: SampleOrder,
        *,
        micro_batch_size: int,
        batch_sizes: Iterable[int],
        vocab_size: int,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        rules: BoundaryRules | None = None,
    ) -> None:
        positions = micro_batch_positions(
            batch_sizes, micro_batch_size, data_parallel_rank, data_parallel_size, consumed_samples
        )
        loader = DataLoader(
            _MicroBatches(dataset, vocab_size, rules or BoundaryRules()),  # type: ignore[arg-type]
            batch_size=None,
            sampler=_requests(positions, order),  # type: ignore[arg-type]
            collate_fn=_as_it_is,
            num_workers=num_workers,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # without its own, an iterator draws a seed from the global one
        )
        self._batches: Iterator[Batch | MegalithError] | None = iter(loader)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            raise StopIteration
        try:
            batch = next(self._batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            batch = DataError(f"a data worker process died ({error}); set data.num_workers to 0 to see why")
        if isinstance(batch, MegalithError):
            self.close()
            raise batch
        return batch

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker processes. The loader is then at its end."""
        self._batches = None  # the iterator stops its workers when it is dropped


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
    """The map-style dataset of the DataLoader: a request gives a Batch, or the error that it met.

    An error is returned, not raised, because the DataLoader would bring it back from a worker with its
    traceback for a message.
    """

    def __init__(self, dataset: SampleDataset, vocab_size: int, rules: BoundaryRules) -> None:
        self.dataset = dataset
        self.vocab_size = vocab_size
        self.rules = rules

    def __getitem__(self, request: tuple[range, list[int]] | MegalithError) -> Batch | MegalithError:
        if isinstance(request, MegalithError):
            return request
        positions, indices = request
        try:
            samples = np.stack([self.dataset[i] for i in indices])  # [batch, seq + 1]
            self._check_tokens(samples, indices)
        except MegalithError as error:
            return error
        return make_batch(samples, np.array(positions, dtype=np.int64), self.rules)

    def _check_tokens(self, samples: np.ndarray, indices: list[int]) -> None:
        if samples.min() >= 0 and samples.max() < self.vocab_size:
            return
        row, at = np.argwhere((samples < 0) | (samples >= self.vocab_size))[0]
        raise DataError(
            f"{self.dataset.describe(indices[row])} has token id {samples[row, at]} at position {at}, but the "
            f"vocabulary has {self.vocab_size}; preprocess the data with this run's tokenizer, or raise vocab_size"
        )


def _requests(
    positions: Iterator[range], order: SampleOrder
) -> Iterator[tuple[range, list[int]] | MegalithError]:
    """Each micro-batch's positions and dataset indices. An error takes the place of the micro-batch it stops,
    and is not raised: requests are made ahead of time, while good micro-batches are still under way.
    """
    try:
        for span in positions:
            yield span, [order(position) for position in span]
    except MegalithError as error:
        yield error


def _as_it_is(batch: object) -> object:
    return batch
