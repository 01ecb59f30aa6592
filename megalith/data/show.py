"""Samples of a run's datasets as text, for inspection before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megalith.data.blend import DataPath, build_datasets
from megalith.data.dataset import SPLITS
from megalith.data.order import SingleOrder, sample_order
from megalith.errors import LINES, ConfigError, DataError, printable


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
    """Return samples of split `which`, built for `num_samples`, as a run would use them.

    Args:
        data_path: a dataset or blend that is divided by `split`.
        seq_length: tokens per sample.
        seed: seed of the shuffles.
        num_samples: number of samples of the run.
        split: weights of train, validation and test, such as "99,1,0".
        which: train, valid or test.
        indices: sample indices within the dataset.
        positions: positions in the stream that the run reads, from 0: training data in the order of `dataloader_type`,
            evaluation data from the beginning.
        dataloader_type: cyclic or single.

    Returns:
        A dict `{"index": i, "tokens": [seq_length + 1 ids]}` for each index, then one for each position, with the key
        "position" added.

    Raises:
        ConfigError: the split is unknown, or num_samples or seq_length is below 1.
        DataError: the data cannot be read, or there is no such sample.
    """
    if which not in SPLITS:
        raise ConfigError(f"split {which!r} is not known; choose {', '.join(SPLITS)}")
    if num_samples < 1 or seq_length < 1:
        raise ConfigError(f"num_samples {num_samples} and seq_length {seq_length} must both be at least 1")
    counts = tuple(num_samples if name == which else 0 for name in SPLITS)
    dataset = build_datasets(data_path, split, seq_length, counts, seed, show_progress=True)[
        SPLITS.index(which)
    ]
    if which == "train":
        order = sample_order(dataloader_type, len(dataset), seed)
    else:
        order = SingleOrder(len(dataset), wrap=True)
    if negative := [position for position in positions if position < 0]:
        raise DataError(f"position {negative[0]} is before the first one; positions must be at least 0")
    chosen = [{"index": i} for i in indices] + [{"index": order(at), "position": at} for at in positions]
    for sample in chosen:
        if not 0 <= sample["index"] < len(dataset):
            raise DataError(
                f"sample {sample['index']} is not one of the {len(dataset)} {which} samples; "
                f"choose 0 to {len(dataset) - 1}, or raise num_samples"
            )
    return [{**sample, "tokens": dataset[sample["index"]].tolist()} for sample in chosen]


def render_samples(
    samples: Sequence[dict[str, object]], detokenize: Callable[[list[int]], str] | None = None
) -> str:
    """Format samples for a terminal: the ids and, if `detokenize` is given, the text."""
    lines = []
    for sample in samples:
        tokens: list[int] = sample["tokens"]  # type: ignore[assignment]
        at = f"position {sample['position']}, " if "position" in sample else ""
        source = sample["source"] if "source" in sample else f"sample {sample['index']}"
        lines.append(printable(f"{at}{source} ({len(tokens)} tokens)"))
        lines.append(" ".join(map(str, tokens)))
        if detokenize is not None:
            lines.append(printable(detokenize(tokens), LINES))
        lines.append("")
    return "\n".join(lines)
