"""Best-fit decreasing bin packing: pieces are placed in order of decreasing length, each into the fullest row with room
for it.
"""

from __future__ import annotations

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Pack pieces by best-fit decreasing. Returns the row of each piece and the number of rows.

    Pieces of equal length are placed together: a row with room for k of them takes k. The result is the same as if they
    were placed one by one.

    Args:
        lengths: tokens of each piece, in descending order, from 1 to `capacity`.
        capacity: tokens of a row.

    Returns:
        The row of each piece, int32 [pieces], and the number of rows.
    """
    rows = np.empty(len(lengths), dtype=np.int32)
    by_room: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # rows by their free tokens
    has_rows = np.zeros(capacity + 1, dtype=bool)
    num_rows, at = 0, 0
    bounds = np.flatnonzero(np.diff(lengths)) + 1
    for end in [*bounds.tolist(), len(lengths)] if len(lengths) else []:
        length = int(lengths[at])
        while at < end:
            room = length + int(has_rows[length:].argmax())
            is_new = not has_rows[room]
            if is_new:
                room = capacity
            per_row = room // length
            wanted = -(-(end - at) // per_row)
            if is_new:
                taken = np.arange(num_rows, num_rows + wanted, dtype=np.int32)
                num_rows += wanted
            else:
                candidates = by_room[room][0] if len(by_room[room]) == 1 else np.concatenate(by_room[room])
                taken, rest = candidates[: -wanted - 1 : -1], candidates[:-wanted]
                by_room[room] = [rest] if len(rest) else []
                has_rows[room] = bool(len(rest))
            placed = min(end - at, len(taken) * per_row)
            rows[at : at + placed] = np.repeat(taken, per_row)[:placed]
            at += placed
            last = placed - (len(taken) - 1) * per_row  # pieces in the last row
            for part, count in ((taken[:-1], per_row), (taken[-1:], last)):
                if len(part):
                    by_room[room - count * length].append(part)
                    has_rows[room - count * length] = True
    return rows, num_rows


def best_fit_decreasing(lengths: np.ndarray, room: int, seed: int) -> list[list[int]]:
    """Pack samples into rows of `room` tokens.

    Returns the sample indices of each row, with rows and indices in ascending order.

    Samples of equal length are placed in an order that depends on the seed.
    """
    order = np.random.default_rng([seed, len(lengths)]).permutation(len(lengths))
    order = order[np.argsort(-lengths[order], kind="stable")]
    rows, count = pack(lengths[order], room)
    members: list[list[int]] = [[] for _ in range(count)]
    for sample, row in zip(order.tolist(), rows.tolist()):
        members[row].append(sample)
    return sorted(sorted(row) for row in members)
