"""The train, validation and test datasets of a run, from `data_path` and `split`.

`data_path` is one dataset or a blend, as a string (`"a"`, `"a b"`, `"0.7 a 0.3 b"`) or as a list (`["a"]`, `[0.7,
"a", 0.3, "b"]`, `[{path: a, weight: 0.7}, {path: b, weight: 0.3, max_epochs: 2}]`). Each dataset of a blend is built
for its share of the samples plus 0.5 %; greedy.py determines which dataset provides each sample. Datasets without
weights are weighted by their number of samples, as in Megatron core, and built for one epoch if that is enough.
mixture.py has weights that change, and caps on epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megalith.config.data import DataConfig
from megalith.data.blended_dataset import BlendedDataset
from megalith.data.dataset import SPLITS, GPTDataset, SampleDataset, split_ranges
from megalith.data.indexed import IndexedDataset
from megalith.data.masked_lm import MaskedLMDataset
from megalith.data.mixture import Mixture, MixtureSettings, scheduled, tempered
from megalith.data.packed_dataset import PackedDataset
from megalith.data.streams.blended_stream import BlendedStream
from megalith.data.streams.stream import SampleStream
from megalith.errors import ConfigError, DataError
from megalith.progress import Progress

DataPath = str | Sequence[str | float | Mapping[str, object]]


def indexed_datasets(dataset: SampleDataset) -> Iterator[IndexedDataset]:
    """Yield the indexed datasets that a dataset uses; none for mock data."""
    if isinstance(dataset, BlendedDataset):
        for part in dataset.datasets:
            yield from indexed_datasets(part)
    elif isinstance(dataset, GPTDataset | MaskedLMDataset | PackedDataset):
        yield dataset.indexed


class BlendEntry(NamedTuple):
    """A dataset of a data path."""

    path: str
    weight: float | None = None
    max_epochs: float | None = None
    """Upper bound of its epochs; None: data.max_epochs_per_source."""


def parse_data_path(data_path: DataPath) -> tuple[list[str], list[float] | None]:
    """Return the dataset prefixes and their weights (None if the path sets none). Raise ConfigError if it is
    malformed.
    """
    entries = parse_entries(data_path)
    weights = [entry.weight for entry in entries if entry.weight is not None]
    return [entry.path for entry in entries], weights or None


def parse_entries(data_path: DataPath) -> list[BlendEntry]:
    """Return the datasets of a data path. Raise ConfigError if it is malformed."""
    if isinstance(data_path, str):
        parts = [data_path] if _is_path(data_path) else data_path.split()
    else:
        parts = list(data_path)
    if any(isinstance(part, Mapping) for part in parts):
        return _parse_mappings(parts)
    if not parts:
        raise ConfigError(
            "data_path is empty; set it to the prefix of a dataset's files, as in data/books_text_document"
        )
    numeric = [_number(part) is not None for part in parts]
    if not any(numeric):
        return [BlendEntry(str(part)) for part in parts]
    if numeric != [True, False] * (len(parts) // 2):
        raise ConfigError(
            f"data_path {data_path!r} is neither a list of paths nor pairs of weight and path; "
            'write it as "a b" or as "0.7 a 0.3 b"'
        )
    return [BlendEntry(str(path), _weight(weight)) for weight, path in zip(parts[::2], parts[1::2])]


def _is_path(text: str) -> bool:
    """Return True if a text with spaces is the path of one dataset or file."""
    return " " in text and any(Path(f"{text}{ending}").exists() for ending in ("", ".idx"))


def dataset_prefixes(data: DataConfig) -> list[str]:
    """Return the prefixes of all dataset files that a run uses."""
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    return [prefix for path in paths if path is not None for prefix in parse_data_path(path)[0]]


def build_datasets(
    data_path: DataPath | None,
    split: str,
    seq_length: int,
    num_samples: tuple[int, int, int],
    seed: int,
    *,
    train_data_path: DataPath | None = None,
    valid_data_path: DataPath | None = None,
    test_data_path: DataPath | None = None,
    make: DatasetFactory | None = None,
    mixture: MixtureSettings | None = None,
    open_stream: OpenStream | None = None,
    show_progress: bool = False,
) -> tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]:
    """Build the train, validation and test datasets.

    Args:
        data_path: a dataset or blend that is divided by `split`.
        split: weights of train, validation and test, such as "99,1,0".
        seq_length: tokens per sample.
        num_samples: numbers of samples of train, validation and test.
        seed: seed of the shuffles.
        train_data_path: dataset or blend of which all documents are used for training, instead of a split of
            `data_path`.
        valid_data_path: the same for validation data.
        test_data_path: the same for test data.
        make: function that builds the samples of one split's part of an indexed dataset. Default: GPT samples.
        mixture: schedule, temperature and caps of the training blend. Evaluation data uses the weights in its own data
            path.
        open_stream: function that opens those entries that are streams. Default: all entries are indexed datasets.
        show_progress: show a progress bar.

    Returns:
        Train, validation and test dataset; None where num_samples is 0.

    Raises:
        ConfigError: if the paths are missing, contradictory or malformed.
        DataError: if a requested split has no documents or too few tokens.
    """
    split_paths = (train_data_path, valid_data_path, test_data_path)
    if data_path is None and not any(split_paths):
        raise ConfigError(
            "no data is set; set data_path, or train_data_path, valid_data_path and test_data_path, or mock"
        )
    if data_path is not None and any(split_paths):
        raise ConfigError(
            f"data_path {data_path!r} and a data path of one split are both set; use data_path with split, "
            "or train_data_path, valid_data_path and test_data_path without it"
        )
    make = make or partial(_gpt_samples, seq_length, seed)
    opened: dict[str, IndexedDataset] = {}
    open_stream = open_stream or (lambda path, is_training: None)
    built: list[SampleDataset | None] = []
    with Progress("order the samples", sum(num_samples), "samples", show=show_progress) as progress:
        for number, (name, split_path, samples) in enumerate(zip(SPLITS, split_paths, num_samples)):
            if samples == 0:
                built.append(None)
                continue
            path = split_path if data_path is None else data_path
            if path is None:
                raise ConfigError(
                    f"{samples} {name} samples are needed, but there is no data path for them; set {name}_data_path, "
                    f"or request no {name} samples"
                )
            shares, share = (split, number) if data_path is not None else ("1", 0)
            settings = mixture or MixtureSettings() if name == "train" else None
            try:
                built.append(
                    _build(path, opened, make, open_stream, shares, share, samples, settings, progress)
                )
            except DataError as error:
                raise DataError(f"{name} data (split {shares}): {error}") from error
    return built[0], built[1], built[2]


DatasetFactory = Callable[[IndexedDataset, str, int, int, Progress], SampleDataset]
"""Builds a part of an indexed dataset: (indexed, split, index of the part, samples, progress) → dataset."""
OpenStream = Callable[[str, bool], SampleStream | None]
"""Opens a stream: (entry of a data path, True for training data) → stream, or None for other entries."""


def _gpt_samples(
    seq_length: int,
    seed: int,
    indexed: IndexedDataset,
    split: str,
    number: int,
    samples: int,
    progress: Progress,
) -> GPTDataset:
    first, last = split_ranges(split, len(indexed))[number]
    return GPTDataset(indexed, first, last, seq_length, samples, seed, progress)


def _build(
    data_path: DataPath,
    opened: dict[str, IndexedDataset],
    make: DatasetFactory,
    open_stream: OpenStream,
    split: str,
    number: int,
    num_samples: int,
    settings: MixtureSettings | None,
    progress: Progress,
) -> SampleDataset:
    """Build dataset `number` of a data path for `split`. `opened` caches open files by prefix.

    `settings` is None for evaluation data, where the caps on epochs are ignored too.
    """
    is_training, settings = settings is not None, settings or MixtureSettings()
    entries = parse_entries(data_path)
    streams: dict[str, SampleStream] = {}
    for entry in entries:
        if (stream := open_stream(entry.path, is_training)) is not None:
            streams[entry.path] = stream
        elif entry.path not in opened:
            opened[entry.path] = IndexedDataset(entry.path)

    def part(entry: BlendEntry, samples: int) -> SampleDataset:
        return streams.get(entry.path) or make(opened[entry.path], split, number, samples, progress)

    weights = [entry.weight for entry in entries if entry.weight is not None]
    is_weighted, epoch = bool(weights), None
    if streams:
        _check_streams(entries, streams, settings, is_training)
        if len(entries) == 1:
            return part(entries[0], num_samples)
    elif not is_weighted:
        weights = [float(opened[entry.path].num_tokens) for entry in entries]
        if not any(weights):
            return part(entries[0], num_samples)  # raises DataError: no tokens
        if settings.temperature is not None:
            weights = tempered(weights, settings.temperature)
        elif len(entries) > 1 and (counts := _samples_per_epoch([part(entry, 1) for entry in entries])):
            weights = [float(count) for count in counts]
            epoch = None if settings.points else counts
    elif settings.temperature is not None:
        raise ConfigError(
            f"data.blend_temperature is {settings.temperature}, but the data path has weights; leave one of the two "
            "out"
        )
    capacities = [math.inf] * len(entries)
    for i, entry in enumerate(entries):
        maximum = settings.max_epochs if entry.max_epochs is None else entry.max_epochs
        if is_training and maximum is not None:
            capacities[i] = float(part(entry, 1).samples_in_epochs(maximum))
    mixture = Mixture(
        scheduled(weights, settings.points), np.array(capacities), [entry.path for entry in entries], epoch
    )
    if len(entries) == 1 and not is_weighted:
        mixture.weights(num_samples)  # raises if the cap does not permit the samples
        return part(entries[0], num_samples)
    blend = BlendedStream if streams else BlendedDataset
    return blend([part(e, n) for e, n in zip(entries, mixture.sizes(num_samples))], mixture, num_samples)


def _samples_per_epoch(datasets: Sequence[SampleDataset]) -> list[int] | None:
    """Return the number of samples in an epoch of each dataset, or None if a kind of dataset does not tell."""
    if not all(isinstance(dataset, GPTDataset | PackedDataset) for dataset in datasets):
        return None
    return [dataset.samples_in_epochs(1) for dataset in datasets]


def _check_streams(
    entries: Sequence[BlendEntry],
    streams: Mapping[str, SampleStream],
    settings: MixtureSettings,
    is_training: bool,
) -> None:
    """Raise ConfigError for settings that need the length of a stream."""
    name = next(iter(streams))
    caps = [settings.max_epochs, *(entry.max_epochs for entry in entries)]
    if is_training and (settings.temperature is not None or any(cap is not None for cap in caps)):
        raise ConfigError(
            f"{name} is a stream, whose length is unknown, but data.blend_temperature or a maximum number of epochs "
            "is set, which need lengths; leave them out, or set data.streaming to false to tokenize the stream "
            "before the first step"
        )
    if len(entries) > 1 and entries[0].weight is None:
        raise ConfigError(
            f"{name} is a stream, whose length is unknown, and the data path has {len(entries)} sources "
            f"without weights; add weights, as in [0.5, {entries[0].path}, 0.5, {entries[1].path}]"
        )
    if len({entry.path for entry in entries}) < len(entries):
        raise ConfigError(f"the data path with the stream {name} has a source twice; list each source once")


def _parse_mappings(parts: Sequence[object]) -> list[BlendEntry]:
    entries = []
    for part in parts:
        if not isinstance(part, Mapping) or not {"path"} <= set(part) <= {"path", "weight", "max_epochs"}:
            raise ConfigError(
                f"data_path entry {part!r} does not have the form {{path: …, weight: …}}; max_epochs may be added"
            )
        weight = _weight(part["weight"]) if "weight" in part else None
        max_epochs = _number(part["max_epochs"]) if "max_epochs" in part else None
        if "max_epochs" in part and (max_epochs is None or not 0 < max_epochs < math.inf):
            raise ConfigError(f"data_path max_epochs {part['max_epochs']!r} must be a number above 0")
        entries.append(BlendEntry(str(part["path"]), weight, max_epochs))
    weights = sum(entry.weight is not None for entry in entries)
    if 0 < weights < len(entries):
        raise ConfigError(
            f"{weights} of the {len(entries)} data_path entries have a weight; set a weight for all of them "
            "or for none"
        )
    return entries


def _number(part: object) -> float | None:
    try:
        return float(part)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _weight(part: object) -> float:
    weight = _number(part)
    if weight is None or not 0 < weight < math.inf:
        raise ConfigError(
            f"data_path weight {part!r} is not a number above 0; remove datasets that should have no weight"
        )
    return weight
