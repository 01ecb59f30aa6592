"""Schedules a step under dynamic context parallelism: which ranks process each sequence, and in which forward pass.

The data × context ranks of a step run the same number of passes. In each pass they are divided into groups of adjacent
ranks; the size of a group, its degree, is a power of two. A group computes a row of whole sequences, each sharded over
the group's ranks. Short sequences are packed on single ranks, without any exchange of keys and values, and long ones
take as many ranks as they need (FlexSP, Wang et al. 2024; Megatron core's dynamic context parallelism).

In every pass, a rank waits for the others, because layers gather parameters from all ranks. The schedule therefore
gives the ranks of a pass nearly the same amount of work:

1. A sequence starts with the smallest degree whose ranks have room for it.
2. From the longest to the shortest, each sequence goes where it raises the time of its pass least. A pass is added
   only if no group has room.
3. While it shortens a pass by 5 %, its slowest group is joined with its neighbours to a larger one.

Schedules in which a sequence may take less time per rank are tried too, and the fastest schedule is chosen. All costs
are integers, so that every rank computes the same schedule from the lengths of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megalith.config.rules.dynamic_context_rules import context_degrees

LEVELS = 16
"""Number of lengths that rows are padded to, as fractions of the longest. Few lengths mean few compiled shapes."""
WORST = np.iinfo(np.int64).max
SHORTER = 1.05
"""Factor by which a larger group must shorten a pass."""
LIMITS = (4, 2, 1)
"""Limits to try on a rank's time per sequence, in multiples of the mean time of a pass."""


@dataclass(frozen=True)
class PassCosts:
    """Cost of a forward and backward pass on a rank: overhead + Σ (per_token · n + per_pair · n²) / degree, summed over
    its sequences of n tokens.

    Above degree 1, the exchange of keys and values adds `per_exchanged_token` · n / degree. The unit is arbitrary.
    """

    per_token: int
    per_pair: int = 1
    per_exchanged_token: int = 0
    overhead: int = 0

    def work(self, lengths: np.ndarray) -> np.ndarray:
        """Return the cost of each sequence on one rank, int64."""
        lengths = np.asarray(lengths, dtype=np.int64)
        return self.per_token * lengths + self.per_pair * lengths * lengths

    def on_rank(self, lengths: np.ndarray, degree: int) -> np.ndarray:
        """Return the cost of each sequence per rank, if a group of `degree` ranks computes it, int64."""
        work = self.work(lengths)
        if degree > 1:
            work = work + self.per_exchanged_token * np.asarray(lengths, dtype=np.int64)
        return work // degree


@dataclass(frozen=True)
class RankLimits:
    """The number of ranks in a step, and the maximum number of tokens per rank and forward pass."""

    ranks: int
    """Number of data × context ranks."""
    max_tokens: int
    """Tokens per rank and pass."""
    multiple: int = 2
    """Number that must divide the tokens of a rank: a rank has two chunks, each a multiple of the sequence-parallel
    size.
    """
    min_degree: int = 1

    @property
    def degrees(self) -> list[int]:
        """Possible group sizes: powers of two that divide the number of ranks."""
        return context_degrees(self.ranks, self.min_degree)

    @property
    def room(self) -> int:
        """Maximum number of tokens per rank and forward pass, rounded up to the multiple."""
        return -(-self.max_tokens // self.multiple) * self.multiple

    def padded(self, tokens: int, degree: int) -> int:
        """Return the padded length of a group's row with `tokens` tokens."""
        per_rank = -(-tokens // degree)
        level = max(1, -(-per_rank * LEVELS // self.room))
        steps = -(-self.room * level // (LEVELS * self.multiple))
        return degree * max(steps * self.multiple, -(-per_rank // self.multiple) * self.multiple)


@dataclass(frozen=True)
class ContextGroup:
    """Adjacent ranks that process one row of sequences in a forward pass."""

    first_rank: int
    degree: int
    sequences: tuple[int, ...]
    """Indices of the sequences in the step, in the order of the row. Empty: the row is padding."""
    length: int
    """Tokens of the row, with padding."""


@dataclass(frozen=True)
class StepSchedule:
    """The groups of each forward pass of a step, in rank order."""

    passes: tuple[tuple[ContextGroup, ...], ...]
    cost: int
    """Sum over the passes of the cost of the slowest rank."""
    work: int
    """Cost of all sequences on one rank."""

    def of_rank(self, rank: int) -> list[ContextGroup]:
        """Return a rank's group in each forward pass."""
        return [
            next(group for group in groups if group.first_rank <= rank < group.first_rank + group.degree)
            for groups in self.passes
        ]


def schedule_step(lengths: Sequence[int], limits: RankLimits, costs: PassCosts) -> StepSchedule:
    """Return the schedule of a step.

    Args:
        lengths: number of tokens of each sequence. The longest must fit into the largest group.
        limits: the ranks and their memory.
        costs: cost of passes.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    fewest = _fewest_ranks(lengths, limits)
    schedules = [_schedule(lengths, fewest, limits, costs)]
    if len(limits.degrees) > 1 and len(lengths):
        passes = len(schedules[0].passes)
        mean = int(costs.work(lengths).sum()) // (limits.ranks * passes)
        tried = {fewest.tobytes()}
        for limit in LIMITS:
            degrees = _degrees_within(lengths, fewest, limit * mean, limits, costs)
            if degrees.tobytes() not in tried:
                tried.add(degrees.tobytes())
                schedules.append(_schedule(lengths, degrees, limits, costs))
    return min(schedules, key=lambda schedule: schedule.cost)


def with_padding(schedule: StepSchedule, passes: int, limits: RankLimits) -> StepSchedule:
    """Return the schedule padded to `passes` forward passes."""
    more = passes - len(schedule.passes)
    empty = _groups({}, np.zeros(0, np.int64), limits)
    return replace(schedule, passes=schedule.passes + (empty,) * more) if more else schedule


def _fewest_ranks(lengths: np.ndarray, limits: RankLimits) -> np.ndarray:
    """Return the smallest degree with room for each sequence, int64."""
    degrees = np.array(limits.degrees, dtype=np.int64)
    room = degrees * limits.room
    if len(lengths) and lengths.max() > room[-1]:
        raise ValueError(
            f"a sequence has {lengths.max()} tokens, but {degrees[-1]} ranks have room for {room[-1]}; raise "
            f"parallel.max_seqlen_per_dp_cp_rank (now {limits.max_tokens})"
        )
    return degrees[np.searchsorted(room, lengths)]


def _degrees_within(
    lengths: np.ndarray, fewest: np.ndarray, limit: int, limits: RankLimits, costs: PassCosts
) -> np.ndarray:
    """Return the smallest degree, at least `fewest`, at which a sequence costs at most `limit`.

    If there is none, return the largest degree.
    """
    degrees = np.full_like(fewest, limits.degrees[-1])
    for degree in reversed(limits.degrees[:-1]):
        fits = (degree >= fewest) & (costs.on_rank(lengths, degree) <= limit)
        degrees[fits] = degree
    return degrees


class _Passes:
    """Forward passes that are being filled with sequences. Arrays are [passes, ranks]."""

    def __init__(self, ranks: int):
        self.costs = np.zeros((0, ranks), dtype=np.int64)
        self.tokens = np.zeros((0, ranks), dtype=np.int64)
        self.degrees = np.zeros((0, ranks), dtype=np.int64)  # 0: without sequences
        self.sequences: list[dict[int, list[int]]] = []  # per pass, by first rank

    def add_pass(self) -> None:
        for name in ("costs", "tokens", "degrees"):
            setattr(self, name, np.pad(getattr(self, name), ((0, 1), (0, 0))))
        self.sequences.append({})


def _schedule(lengths: np.ndarray, degrees: np.ndarray, limits: RankLimits, costs: PassCosts) -> StepSchedule:
    """Return the schedule of sequences with these degrees, after joining groups."""
    passes = _Passes(limits.ranks)
    for degree in reversed(limits.degrees):
        members = np.flatnonzero(degrees == degree)
        _place(passes, members[np.argsort(-lengths[members], kind="stable")], degree, lengths, limits, costs)
    if not passes.sequences:
        passes.add_pass()
    groups, total = [], 0
    for number, sequences in enumerate(passes.sequences):
        blocks = {
            first: (int(passes.degrees[number, first]), tuple(each)) for first, each in sequences.items()
        }
        blocks, slowest = _join_slowest(blocks, lengths, limits, costs)
        groups.append(_groups(blocks, lengths, limits))
        total += slowest + costs.overhead
    return StepSchedule(tuple(groups), total, max(int(costs.work(lengths).sum()), 1))


def _place(
    passes: _Passes,
    members: np.ndarray,
    degree: int,
    lengths: np.ndarray,
    limits: RankLimits,
    costs: PassCosts,
) -> None:
    """Add the sequences `members`, longest first, each to a group of `degree` ranks."""
    on_rank, room = costs.on_rank(lengths[members], degree), degree * limits.room
    for sequence, cost in zip(members.tolist(), on_rank.tolist()):
        length = int(lengths[sequence])
        place = _best_group(passes, degree, cost, room - length)
        if place is None:
            passes.add_pass()
            place = len(passes.sequences) - 1, 0
        number, first = place
        block = slice(first, first + degree)
        passes.costs[number, block] += cost
        passes.tokens[number, block] += length
        passes.degrees[number, block] = degree
        passes.sequences[number].setdefault(first, []).append(sequence)


def _best_group(passes: _Passes, degree: int, cost: int, room: int) -> tuple[int, int] | None:
    """Find the group whose forward pass grows least when a sequence is added.

    Returns its pass and first rank, or None if no group has room.
    """
    if not passes.sequences:
        return None
    shape = (len(passes.sequences), -1, degree)
    owners = passes.degrees.reshape(shape)
    usable = (owners[..., 0] == degree) | (owners.max(-1) == 0)
    usable &= passes.tokens.reshape(shape)[..., 0] <= room
    if not usable.any():
        return None
    later = passes.costs.reshape(shape)[..., 0] + cost - passes.costs.max(1, keepdims=True)
    best = int(np.where(usable, later, WORST).argmin())
    number, block = divmod(best, usable.shape[1])
    return number, block * degree


Blocks = dict[int, tuple[int, tuple[int, ...]]]
"""Degree and sequences of groups, by first rank."""


def _join_slowest(
    blocks: Blocks, lengths: np.ndarray, limits: RankLimits, costs: PassCosts
) -> tuple[Blocks, int]:
    """Merge the slowest group of a forward pass with its neighbours as long as this makes the pass at least 5 %
    faster.

    Returns the groups of the pass and the cost of its slowest rank.
    """

    def cost(block: tuple[int, tuple[int, ...]]) -> int:
        degree, sequences = block
        return int(costs.on_rank(lengths[list(sequences)], degree).sum()) if sequences else 0

    by_rank = {first: cost(block) for first, block in blocks.items()}
    while by_rank:
        slowest = max(by_rank.values())
        first = min(rank for rank in by_rank if by_rank[rank] == slowest)
        joined = []
        for degree in limits.degrees:
            if degree <= blocks[first][0]:
                continue
            start = first // degree * degree
            inside = [rank for rank in sorted(blocks) if start <= rank < start + degree]
            block = degree, tuple(sequence for rank in inside for sequence in blocks[rank][1])
            others = max((by_rank[rank] for rank in by_rank if rank not in inside), default=0)
            joined.append((max(cost(block), others), start, inside, block))
        shortest = min((each[0] for each in joined), default=slowest)
        if slowest <= SHORTER * shortest:
            break
        # The smallest group that is about as good: it exchanges least.
        _, start, inside, block = next(each for each in joined if each[0] <= SHORTER * shortest)
        for rank in inside:
            del blocks[rank], by_rank[rank]
        blocks[start], by_rank[start] = block, cost(block)
    return blocks, max(by_rank.values(), default=0)


def _groups(blocks: Blocks, lengths: np.ndarray, limits: RankLimits) -> tuple[ContextGroup, ...]:
    """Return the groups of a forward pass. Ranks without sequences form groups of the smallest degree."""
    groups, rank = [], 0
    while rank < limits.ranks:
        degree, sequences = blocks.get(rank, (limits.degrees[0], ()))
        tokens = int(lengths[list(sequences)].sum()) if sequences else 1
        groups.append(ContextGroup(rank, degree, sequences, limits.padded(tokens, degree)))
        rank += degree
    return tuple(groups)
