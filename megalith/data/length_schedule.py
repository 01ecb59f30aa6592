"""Sequence lengths that change during a run (`data.seq_length_schedule`).

Every sample has data.seq_length tokens. While the schedule's length L is shorter, samples are divided into sequences of
L tokens: positions restart at 0, and attention stays within a sequence. Every step therefore has the same number of
tokens and the same shapes, and no token is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megalith.errors import ConfigError


class LengthSchedule:
    """Tokens per sequence as a function of the position of a sample in the run.

    Args:
        points: mappings `{samples: N, seq_length: L}` or `{tokens: N, seq_length: L}`, in ascending order, the first at
            0. Length L starts to apply at sample N (or token N) and must divide `seq_length`.
        seq_length: tokens per sample.

    Raises:
        ConfigError: a point is malformed.
    """

    def __init__(self, points: Sequence[object], seq_length: int):
        parsed = [_parse(point, seq_length) for point in points]
        starts, lengths = [start for start, _ in parsed], [length for _, length in parsed]
        if not starts or starts[0] != 0 or sorted(set(starts)) != starts:
            raise ConfigError(
                f"data.seq_length_schedule has points at samples {starts}; begin with a point at sample 0, and list "
                "points in ascending order"
            )
        self._starts, self._lengths = np.array(starts), np.array(lengths)

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the tokens per sequence of samples at stream positions, int64 [batch]."""
        return self._lengths[np.searchsorted(self._starts, positions, "right") - 1]

    def starts(self, positions: np.ndarray, seq_length: int) -> np.ndarray:
        """Return a mask of the tokens at which a sequence starts, bool [batch, seq_length].

        The first token of a row is False.
        """
        at = np.arange(seq_length)
        return (at % self.at(positions)[:, None] == 0) & (at > 0)


def _parse(point: object, seq_length: int) -> tuple[int, int]:
    keys = set(point) if isinstance(point, Mapping) else set()
    units = keys & {"samples", "tokens"}
    values = [point[key] for key in keys] if len(units) == 1 and keys == units | {"seq_length"} else [None]
    if not all(isinstance(value, int | float) and value >= 0 and value == int(value) for value in values):
        raise ConfigError(
            f"data.seq_length_schedule has {point!r}; each entry must be {{samples: N, seq_length: L}} or "
            "{tokens: N, seq_length: L} with whole numbers"
        )
    (unit,) = units
    length, count = int(point["seq_length"]), int(point[unit])
    if length < 1 or seq_length % length:
        raise ConfigError(
            f"data.seq_length_schedule has seq_length {length}, which does not divide data.seq_length {seq_length}; "
            "choose a divisor"
        )
    return (count if unit == "samples" else -(-count // seq_length)), length
