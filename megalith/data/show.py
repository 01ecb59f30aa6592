"""`megalith data show`: the tokens of chosen samples, as training would read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megalith.data.blend import DataPath, build_datasets
from megalith.data.dataset import SPLITS
from megalith.errors import LINES, ConfigError, DataError, printable


def show_samples(
    data_path: DataPath,
    seq_length: int,
    seed: int,
    num_samples: int,
    split: str,
    which: str,
    indices: Sequence[int],
) -> list[dict[str, object]]:
    """`[{"index": i, "tokens": [seq_length + 1 ids]}, …]` of split `which`, built for `num_samples` samples."""
    if which not in SPLITS:
        raise ConfigError(f"split {which!r} is not known; choose {', '.join(SPLITS)}")
    if num_samples < 1 or seq_length < 1:
        raise ConfigError(f"num_samples {num_samples} and seq_length {seq_length} must both be at least 1")
    wanted = tuple(num_samples if name == which else 0 for name in SPLITS)
    dataset = build_datasets(data_path, split, seq_length, wanted, seed)[SPLITS.index(which)]
    for i in indices:
        if not 0 <= i < num_samples:
            raise DataError(
                f"sample {i} is not one of the {num_samples} {which} samples; "
                f"choose 0 to {num_samples - 1}, or ask for more samples"
            )
    return [{"index": i, "tokens": dataset[i].tolist()} for i in indices]


def render_samples(
    samples: Sequence[dict[str, object]], detokenize: Callable[[list[int]], str] | None = None
) -> str:
    """The samples as text for a terminal: the ids, and what they say when `detokenize` is given."""
    lines = []
    for sample in samples:
        tokens: list[int] = sample["tokens"]  # type: ignore[assignment]
        lines.append(f"sample {sample['index']} ({len(tokens)} tokens)")
        lines.append(" ".join(map(str, tokens)))
        if detokenize is not None:
            lines.append(printable(detokenize(tokens), LINES))
        lines.append("")
    return "\n".join(lines)
