"""From `data_path` and `split` to the three datasets of a run.

`data_path` names one dataset or a blend, as a string (`"a"`, `"a b"`, `"0.7 a 0.3 b"`) or as a list (`["a"]`,
`[0.7, "a", 0.3, "b"]`, `[{path: a, weight: 0.7}, {path: b, weight: 0.3}]`). Each dataset of a blend is built for
its share of the samples and half a per cent more, and blend.py says which of them gives the next sample.
Datasets named without weights count by their tokens.

The order in which a blend takes its datasets: Megatron's greedy rule, computed many blocks at a time.

Sample n is taken from the dataset that is furthest behind its share: the argmax over i of
`w[i] * max(n, 1) - count[i]`, the lowest i on a tie. Each choice needs the counts that the choices before it
left, so a plain loop takes 0.4 microseconds a sample and more. But the rule forgets: started from any fair guess
of the counts, it soon makes the same choices as the true run. So the samples are cut into blocks, every block is
started a little early from a guess, and all blocks advance together, one numpy step for all. Then each block's
first counts are compared with those that the block before it left; blocks that guessed wrong run again from the
right counts, until all agree. Agreement proves, block by block from the first, that the order is the exact one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from megalith.config.data import DataConfig
from megalith.data.dataset import SPLITS, GPTDataset, SampleDataset, split_ranges
from megalith.data.indexed import IndexedDataset
from megalith.data.masked_lm import MaskedLMDataset
from megalith.data.order import SingleOrder, sample_order
from megalith.errors import LINES, ConfigError, DataError, printable
from megalith.progress import Progress

BLOCK = 4096  # samples
WARM_UP = 8  # steps for each dataset that a block starts early, so that its guess can settle


def greedy_order(weights: np.ndarray, num_samples: int) -> tuple[np.ndarray, np.ndarray]:
    """The dataset of each sample, and how many samples each dataset has given before each block.

    `weights` float64 [datasets] sums to 1. Returns choices uint8 or uint16 [num_samples] and counts int64
    [ceil(num_samples / BLOCK), datasets].
    """
    starts = np.arange(0, num_samples, BLOCK)  # [blocks]
    steps = min(BLOCK, num_samples)
    choices = np.empty((len(starts), steps), dtype=_choice_dtype(weights))
    early = np.maximum(starts - WARM_UP * len(weights), 0)
    first = _fair_counts(weights, early)
    for lead in np.unique(starts - early):
        lanes = np.flatnonzero(starts - early == lead)
        first[lanes], _ = _advance(weights, early[lanes], first[lanes], int(lead))
    last = np.empty_like(first)
    lanes = np.arange(len(starts))
    while len(lanes):
        last[lanes], choices[lanes] = _advance(weights, starts[lanes], first[lanes], steps)
        lanes = 1 + np.flatnonzero((first[1:] != last[:-1]).any(axis=1))
        first[lanes] = last[lanes - 1]
    return choices.reshape(-1)[:num_samples], first.astype(np.int64)


def _choice_dtype(weights: np.ndarray) -> type[np.unsignedinteger]:
    return np.uint8 if len(weights) <= 256 else np.uint16


def _fair_counts(weights: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Whole numbers near `weights * n` that sum to n, for each n: the largest remainders are rounded up."""
    shares = weights * n[:, None]  # [blocks, datasets]
    counts = np.floor(shares)
    rank = np.argsort(np.argsort(counts - shares, axis=1), axis=1)
    return counts + (rank < (n - counts.sum(axis=1))[:, None])


def _advance(
    weights: np.ndarray, n: np.ndarray, counts: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Take `steps` samples in every lane: the counts after, [lanes, datasets], and the choices [lanes, steps].

    Lane b stands before sample n[b] with counts[b]. Counts are float64, exact below 2^53.
    """
    counts, n = counts.copy(), n.astype(np.float64)[:, None]
    flat, base = counts.reshape(-1), np.arange(len(counts)) * len(weights)
    behind = np.empty_like(counts)
    choices = np.empty((len(counts), steps), dtype=_choice_dtype(weights))
    for step in range(steps):
        np.multiply(weights, np.maximum(n, 1.0), out=behind)
        np.subtract(behind, counts, out=behind)
        choices[:, step] = choice = behind.argmax(axis=1)
        flat[base + choice] += 1
        n += 1
    return counts, choices


DataPath = str | Sequence[str | float | Mapping[str, object]]


class BlendedDataset:
    """`num_samples` samples out of several datasets, by their weights (any positive numbers).

    Memory is one byte a sample (two from 257 datasets on).
    """

    def __init__(self, datasets: Sequence[SampleDataset], weights: Sequence[float], num_samples: int) -> None:
        self.datasets, self._weights = list(datasets), normalize(weights)
        self._choices, self._counts = greedy_order(self._weights, num_samples)

    def __len__(self) -> int:
        return len(self._choices)

    def __getitem__(self, i: int) -> np.ndarray:
        dataset, sample = self.locate(i)
        return self.datasets[dataset][sample]

    def locate(self, i: int) -> tuple[int, int]:
        """Which dataset gives sample i, and which of its samples."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a blend that has {len(self)}")
        dataset, block = int(self._choices[i]), i // BLOCK
        in_block = np.count_nonzero(self._choices[block * BLOCK : i] == dataset)
        return dataset, int(self._counts[block, dataset]) + in_block

    def describe(self, i: int) -> str:
        dataset, sample = self.locate(i)
        return self.datasets[dataset].describe(sample)

    def epochs(self) -> dict[str, int]:
        return {prefix: count for dataset in self.datasets for prefix, count in dataset.epochs().items()}

    def in_order_of(self, num_samples: int, permuted: bool = False) -> bool:
        if permuted and num_samples != len(self):
            return False
        shares = [samples_of_share(weight, num_samples) for weight in self._weights.tolist()]
        return all(dataset.in_order_of(share) for dataset, share in zip(self.datasets, shares))


def indexed_datasets(dataset: SampleDataset) -> Iterator[IndexedDataset]:
    """The datasets with files that a dataset's samples come from; none of made-up ones."""
    if isinstance(dataset, BlendedDataset):
        for part in dataset.datasets:
            yield from indexed_datasets(part)
    elif isinstance(dataset, GPTDataset | MaskedLMDataset):
        yield dataset.indexed


def normalize(weights: Sequence[float]) -> np.ndarray:
    """The weights as float64 with a sum of 1."""
    array = np.asarray(weights, dtype=np.float64)
    return array / np.sum(array)


def samples_of_share(weight: float, num_samples: int) -> int:
    """The samples that a dataset of normalised `weight` is built for: ceil(ceil(N * w) * 1.005)."""
    return math.ceil(math.ceil(num_samples * weight) * 1.005)


def parse_data_path(data_path: DataPath) -> tuple[list[str], list[float] | None]:
    """The dataset prefixes, and their weights or None where none are given. ConfigError on any other form."""
    parts = data_path.split() if isinstance(data_path, str) else list(data_path)
    if any(isinstance(part, Mapping) for part in parts):
        return _parse_mappings(parts)
    if not parts:
        raise ConfigError(
            "data_path is empty; name a dataset by its files' prefix, as in data/books_text_document"
        )
    numeric = [_number(part) is not None for part in parts]
    if not any(numeric):
        return [str(part) for part in parts], None
    if numeric != [True, False] * (len(parts) // 2):
        raise ConfigError(
            f"data_path {data_path!r} is neither a list of paths nor pairs of weight and path; "
            'write it as "a b" or as "0.7 a 0.3 b"'
        )
    return [str(part) for part in parts[1::2]], [_weight(part) for part in parts[::2]]


def dataset_prefixes(data: DataConfig) -> list[str]:
    """The prefixes of all the files that a run names."""
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
    make: MakeDataset | None = None,
    show_progress: bool = False,
) -> tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]:
    """The train, valid and test datasets for `num_samples` samples each; None where that is 0.

    Either `data_path` is divided by `split`, or each split has a data path of its own, used whole. `make` gives the
    samples of a part of an indexed dataset; None: those of a GPTDataset. DataError
    when a split that is asked for has no documents or too few tokens.
    """
    own_paths = (train_data_path, valid_data_path, test_data_path)
    if data_path is None and not any(own_paths):
        raise ConfigError("no data is named; set data_path, or train_data_path and its kin, or mock")
    if data_path is not None and any(own_paths):
        raise ConfigError(
            f"data_path {data_path!r} and a data path of one split are both set; use data_path with split, "
            "or train_data_path, valid_data_path and test_data_path without it"
        )
    make = make or partial(_gpt_samples, seq_length, seed)
    opened: dict[str, IndexedDataset] = {}
    built: list[SampleDataset | None] = []
    with Progress("order the samples", sum(num_samples), "samples", show=show_progress) as progress:
        for number, (name, own_path, wanted) in enumerate(zip(SPLITS, own_paths, num_samples)):
            if wanted == 0:
                built.append(None)
                continue
            path = own_path if data_path is None else data_path
            if path is None:
                raise ConfigError(
                    f"{wanted} {name} samples are asked for; set {name}_data_path, or ask for none"
                )
            shares, share = (split, number) if data_path is not None else ("1", 0)
            try:
                built.append(_build(path, opened, make, shares, share, wanted, progress))
            except DataError as error:
                raise DataError(f"{name} data (split {shares}): {error}") from error
    return built[0], built[1], built[2]


MakeDataset = Callable[[IndexedDataset, str, int, int, Progress], SampleDataset]
"""(indexed, split, number of the part, samples, what counts them) → the samples of that part."""


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
    make: MakeDataset,
    split: str,
    number: int,
    num_samples: int,
    progress: Progress,
) -> SampleDataset:
    """Part `number` of `split` of a data path. `opened` keeps the files that an earlier split has opened."""
    prefixes, weights = parse_data_path(data_path)
    for prefix in prefixes:
        if prefix not in opened:
            opened[prefix] = IndexedDataset(prefix)

    def part(prefix: str, samples: int) -> SampleDataset:
        return make(opened[prefix], split, number, samples, progress)

    if weights is None and len(prefixes) == 1:
        return part(prefixes[0], num_samples)
    if weights is None:
        weights = [float(opened[prefix].num_tokens) for prefix in prefixes]
    sizes = [samples_of_share(weight, num_samples) for weight in normalize(weights).tolist()]
    return BlendedDataset([part(p, n) for p, n in zip(prefixes, sizes)], weights, num_samples)


def _parse_mappings(parts: Sequence[object]) -> tuple[list[str], list[float] | None]:
    prefixes, weights = [], []
    for part in parts:
        if not isinstance(part, Mapping) or not {"path"} <= set(part) <= {"path", "weight"}:
            raise ConfigError(f"data_path entry {part!r} does not have the form {{path: …, weight: …}}")
        prefixes.append(str(part["path"]))
        if "weight" in part:
            weights.append(_weight(part["weight"]))
    if weights and len(weights) < len(prefixes):
        raise ConfigError(
            f"{len(weights)} of the {len(prefixes)} data_path entries have a weight; give one to all or to none"
        )
    return prefixes, weights or None


def _number(part: object) -> float | None:
    try:
        return float(part)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def _weight(part: object) -> float:
    weight = _number(part)
    if weight is None or not 0 < weight < math.inf:
        raise ConfigError(
            f"data_path weight {part!r} is not a number above 0; leave out a dataset without weight"
        )
    return weight


def show_samples(
    data_path: DataPath,
    seq_length: int,
    seed: int,
    num_samples: int,
    split: str,
    which: str,
    indices: Sequence[int] = (),
    positions: Sequence[int] = (),
    dataloader_type: str = "cyclic",
) -> list[dict[str, object]]:
    """Return samples of split `which`, built for `num_samples`, as a run reads them.

    Args:
        indices: of samples in the dataset.
        positions: in the stream that the run reads, the first one 0: training data in the order of `dataloader_type`,
            evaluation data from the beginning.

    Returns:
        `{"index": i, "tokens": [seq_length + 1 ids]}` per index, then the same with "position" per position.
    """
    if which not in SPLITS:
        raise ConfigError(f"split {which!r} is not known; choose {', '.join(SPLITS)}")
    if num_samples < 1 or seq_length < 1:
        raise ConfigError(f"num_samples {num_samples} and seq_length {seq_length} must both be at least 1")
    wanted = tuple(num_samples if name == which else 0 for name in SPLITS)
    dataset = build_datasets(data_path, split, seq_length, wanted, seed, show_progress=True)[
        SPLITS.index(which)
    ]
    if which == "train":
        order = sample_order(dataloader_type, len(dataset), seed)
    else:
        order = SingleOrder(len(dataset), wrap=True)
    if negative := [position for position in positions if position < 0]:
        raise DataError(f"position {negative[0]} is before the first one, 0")
    chosen = [{"index": i} for i in indices] + [{"index": order(at), "position": at} for at in positions]
    for sample in chosen:
        if not 0 <= sample["index"] < len(dataset):
            raise DataError(
                f"sample {sample['index']} is not one of the {len(dataset)} {which} samples; "
                f"choose 0 to {len(dataset) - 1}, or ask for more samples"
            )
    return [{**sample, "tokens": dataset[sample["index"]].tolist()} for sample in chosen]


def render_samples(
    samples: Sequence[dict[str, object]], detokenize: Callable[[list[int]], str] | None = None
) -> str:
    """The samples as text for a terminal: the ids, and what they say when `detokenize` is given."""
    lines = []
    for sample in samples:
        tokens: list[int] = sample["tokens"]  # type: ignore[assignment]
        at = f"position {sample['position']}, " if "position" in sample else ""
        lines.append(f"{at}sample {sample['index']} ({len(tokens)} tokens)")
        lines.append(" ".join(map(str, tokens)))
        if detokenize is not None:
            lines.append(printable(detokenize(tokens), LINES))
        lines.append("")
    return "\n".join(lines)
