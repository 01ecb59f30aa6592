"""User-defined datasets: registration, the datasets that a run builds from them, and a check of their batches.

`data.dataset` is the name under which a function was registered (`register_dataset`), or `path.py:function`. The
function returns a `torch.utils.data.Dataset`, which the run reads by index, or an `IterableDataset`, which it reads as
one stream.

Every data-parallel rank iterates over the whole stream and uses its own positions, so that samples do not depend on
the number of ranks. The state of a stream at the end of a step is stored in checkpoints if the dataset has
`state_dict` and `load_state_dict`; otherwise a resumed run reads the consumed samples again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from megalith.config.data import DataConfig
from megalith.config.load_extension import load_extension
from megalith.data.batch import Batch
from megalith.data.streams.stream import STREAM_LENGTH, SampleStream, State
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError


@dataclass(frozen=True)
class DatasetRequest:
    """A request for one split of a run's data. Dataset functions receive it as argument."""

    split: str
    """`train`, `valid` or `test`."""
    num_samples: int
    """Number of samples that the run reads from the split. A dataset may have more; one with fewer is repeated."""
    seq_length: int
    """Tokens per sequence, data.seq_length."""
    vocab_size: int
    """Number of vocabulary entries; token ids are below it."""
    seed: int
    """train.seed."""
    tokenizer: Tokenizer | None
    """The run's tokenizer; None without data.tokenizer_type."""
    data: DataConfig
    """The section `data` of the configuration, with data_path and the paths of the splits."""


DatasetFunction = Callable[[DatasetRequest], Any]
_REGISTERED: dict[str, DatasetFunction] = {}


def register_dataset(name: str) -> Callable[[DatasetFunction], DatasetFunction]:
    """Register the decorated function as a value of `data.dataset`.

    The function receives a `DatasetRequest` and returns a Dataset, an IterableDataset, or None for a split without
    data. Register it in every process, before `megalith.train`.
    """

    def register(function: DatasetFunction) -> DatasetFunction:
        _REGISTERED[name] = function
        return function

    return register


def load_dataset_function(name: str) -> DatasetFunction:
    """Return the function that `data.dataset` names. Raise ConfigError if there is none."""
    return _REGISTERED.get(name) or load_extension(name, {name: "" for name in _REGISTERED}, "data.dataset")


class _OwnDataset:
    """Base of user-defined datasets. Without a method `collate`, samples are converted to int64 [seq_length + 1]."""

    def __init__(self, dataset: Dataset, name: str, seq_length: int):
        self.dataset, self.name, self.seq_length = dataset, name, seq_length
        self.collates = callable(getattr(dataset, "collate", None))

    @property
    def source(self) -> str:
        """Name in messages."""
        return f"data.dataset {self.name}"

    def describe(self, i: int) -> str:
        return f"sample {i} of {self.source}"

    def epochs(self) -> dict[str, int]:
        return {}

    def preserves_order(self, num_samples: int, permuted: bool = False) -> bool:
        return True  # samples do not depend on the length of the run

    def _converted(self, sample: Any, i: int) -> Any:
        if self.collates:
            return sample
        row = np.asarray(sample)
        if row.shape != (self.seq_length + 1,) or row.dtype.kind not in "iu":
            raise DataError(
                f"{self.describe(i)} has shape {list(row.shape)} and type {row.dtype}, but without a collate method "
                f"a sample is data.seq_length + 1 = {self.seq_length + 1} token ids; return such samples, or add a "
                "collate method"
            )
        return row.astype(np.int64)


class MapDataset(_OwnDataset):
    """Adapter for a user's `torch.utils.data.Dataset`."""

    def __init__(self, dataset: Dataset, name: str, seq_length: int):
        super().__init__(dataset, name, seq_length)
        try:
            self._length = len(dataset)
        except TypeError:
            raise ConfigError(
                f"data.dataset {name} returns {type(dataset).__name__}, which has no length; add "
                "__len__, or derive the class from torch.utils.data.IterableDataset"
            ) from None
        if self._length == 0:
            raise DataError(f"data.dataset {name} returns a dataset without samples; add some")

    def __len__(self) -> int:
        return self._length

    @property
    def samples_per_epoch(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Any:
        return self._converted(self.dataset[i], i)


class StreamDataset(_OwnDataset, SampleStream):
    """Adapter for a user's `IterableDataset`. Item i is the i-th sample; items must be read in ascending order.

    Args:
        dataset: the stream; `set_epoch(epoch)` is called before each pass if it exists.
        name: value of data.dataset, for errors.
        seq_length: tokens per sequence.
        repeat: start again after the last item; if false, reading past it raises an error.
    """

    def __init__(self, dataset: IterableDataset, name: str, seq_length: int, repeat: bool):
        super().__init__(dataset, name, seq_length)
        self._repeat, self._lock = repeat, threading.Lock()
        self._saved: dict[str, Any] | None = None
        self._has_state = all(
            callable(getattr(dataset, method, None)) for method in ("state_dict", "load_state_dict")
        )
        self._initial = self._has_state and self._text_of(dataset.state_dict())
        self.restart()

    def restart(self, position: int = 0, stride: int = 1, kept_states: int = 1) -> None:
        """See SampleStream."""
        with self._lock:
            self._states: dict[int, str] = {}
            saved = self._saved
            if saved is not None and saved["position"] <= position:
                self._position, self._epoch, self._in_epoch = (
                    saved["position"],
                    saved["epoch"],
                    saved["in_epoch"],
                )
                self._begin_pass(saved["state"])
            else:
                self._position = self._epoch = self._in_epoch = 0
                self._begin_pass(json.loads(self._initial) if self._has_state else None)
            self._first, self._stride, self._kept_states = position, stride, 0
            self._advance(position)
            self._kept_states = kept_states

    def __len__(self) -> int:
        return STREAM_LENGTH

    def __getitem__(self, position: int) -> Any:
        with self._lock:
            if position < self._position:
                raise IndexError(
                    f"sample {position} cannot be read, because the stream is at "
                    f"sample {self._position}; read a stream in order"
                )
            self._advance(position)
            self._keep_state()
            return self._converted(self._next(), position)

    def state_at(self, position: int) -> State | None:
        """See SampleStream. None without `state_dict`."""
        if not self._has_state:
            return None
        with self._lock:
            if position >= self._position:
                self._advance(position)
                self._keep_state()
            text = self._states.get(position)
        return None if text is None else json.loads(text)

    def load_state(self, state: State | None) -> None:
        self._saved = state

    def _advance(self, position: int) -> None:
        while self._position < position:
            self._keep_state()
            self._next()

    def _keep_state(self) -> None:
        is_kept = self._has_state and self._kept_states and (self._position - self._first) % self._stride == 0
        if not is_kept or self._position in self._states:
            return
        state = self._text_of(self.dataset.state_dict())
        about = dict(position=self._position, epoch=self._epoch, in_epoch=self._in_epoch)
        self._states[self._position] = json.dumps({**about, "state": json.loads(state)})
        while len(self._states) > self._kept_states:
            del self._states[min(self._states)]

    def _text_of(self, state: Any) -> str:
        try:
            return json.dumps(state)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the state_dict of data.dataset {self.name} cannot be stored as JSON ({error}); return numbers, "
                "texts, lists and dictionaries"
            ) from None

    def _next(self) -> Any:
        try:
            sample = next(self._iterator)
        except StopIteration:
            sample = self._first_of_next_pass()
        self._position += 1
        self._in_epoch += 1
        return sample

    def _begin_pass(self, state: Any) -> None:
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(self._epoch)
        if self._has_state:
            self.dataset.load_state_dict(state)
        self._iterator: Iterator[Any] = iter(self.dataset)

    def _first_of_next_pass(self) -> Any:
        if not self._repeat or self._in_epoch == 0:
            raise DataError(
                f"data.dataset {self.name} ended after {self._position:,} samples, but the run reads more; lower "
                "train.train_iters, or set data.dataloader_type to cyclic to read the dataset again"
            )
        self._epoch, self._in_epoch = self._epoch + 1, 0
        self._begin_pass(json.loads(self._initial) if self._has_state else None)
        try:
            return next(self._iterator)
        except StopIteration:
            raise DataError(
                f"data.dataset {self.name} has no sample in pass {self._epoch + 1}; let __iter__ begin again from "
                "the first sample"
            ) from None


OwnDataset = MapDataset | StreamDataset


def open_own_dataset(name: str, request: DatasetRequest) -> OwnDataset | None:
    """Open `data.dataset` for one split. Returns None if the dataset has no data for the split.

    Raises:
        ConfigError: there is no such function, or it does not return a dataset.
        DataError: the dataset is empty.
    """
    dataset = load_dataset_function(name)(request)
    if dataset is None:
        return None
    if isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    ):
        return StreamDataset(dataset, name, request.seq_length, request.data.dataloader_type == "cyclic")
    if not hasattr(dataset, "__getitem__"):
        raise ConfigError(
            f"data.dataset {name} returns {type(dataset).__name__}; return a torch.utils.data.Dataset, an "
            "IterableDataset or None"
        )
    return MapDataset(dataset, name, request.seq_length)


class OwnCollate:
    """Collate function of a dataset with a method `collate`. Checks the batches that the method returns."""

    takes_list = True  # samples are passed on unchanged

    def __init__(self, dataset: OwnDataset):
        self._dataset, self._seq_length = dataset, dataset.seq_length

    def __call__(self, samples: Sequence[Any], sample_numbers: np.ndarray) -> Batch:
        """Return the batch of samples at stream positions `sample_numbers`, int64 [batch].

        Raises:
            DataError: the dataset's `collate` does not return a Batch, or a field does not have the shape [batch,
                seq_length] or has the wrong dtype.
        """
        batch = self._dataset.dataset.collate(samples, torch.from_numpy(sample_numbers))
        source = f"collate of data.dataset {self._dataset.name} returns"
        if not isinstance(batch, Batch):
            raise DataError(f"{source} {type(batch).__name__}; it must return a megalith.Batch")
        shape = [len(samples), self._seq_length]
        for name, dtype in FIELD_DTYPES.items():
            tensor = batch[name]
            if list(tensor.shape) != shape or tensor.dtype != dtype:
                raise DataError(
                    f"{source} {name} as {tensor.dtype} {list(tensor.shape)}; it must be {dtype} {shape}"
                )
        return batch


FIELD_DTYPES = {
    "input_ids": torch.int64,
    "labels": torch.int64,
    "position_ids": torch.int64,
    "loss_mask": torch.float32,
}
