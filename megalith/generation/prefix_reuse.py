"""Reuse of keys and values: a new sequence copies those of the longest cached prefix of its tokens.

     rows in use and idle rows ─┐
     copies within a budget  ───┴─▶ longest common prefix ─▶ copied into the sequence's row; only the rest is prefilled

An idle row keeps its keys and values until another sequence gets it; then they are copied if the memory budget allows.
A completion thus shares the prefill of its prompt with the other completions of the group, and a turn of a conversation
reuses the earlier turns.

An idle row writes to its first position in each step (engine.py), so the keys and values of first tokens are stored
separately.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.generation.requests import RowSequence

BLOCK = 16  # tokens per entry of the index; a shorter common prefix is prefilled again
TOKEN_BITS = 32  # of a token's number, below those of its adapter
CANDIDATES = 16  # holders of the same blocks that are compared


@dataclass(eq=False)
class Holder:
    """A stored sequence: tokens whose keys and values are in a row of the cache or in a copy of one."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # hash of the tokens up to each complete block's end
    sequence: RowSequence | None = None  # in progress in the row
    row: int | None = None
    copy: Tensor | None = None  # [attention layers, 2, tokens, groups, head_dim]
    used: int = 0  # time of its last use


@dataclass(frozen=True)
class PrefixMatch:
    """A stored sequence and the length of the prefix that it shares with a new sequence."""

    holder: Holder | None = None
    length: int = 0


class PrefixReuse:
    """Cached prefixes of an engine's rows.

    The state depends only on the calls, so all ranks of a tensor-parallel axis reuse the same rows.
    """

    def __init__(self, cache: Tensor, budget: int = 0):
        """Start with empty rows.

        Args:
            cache: the engine's keys and values, [attention layers, 2, rows, room, groups, head_dim].
            budget: maximum bytes of copies, which are made of rows before other sequences overwrite them.
        """
        self._cache, self._budget = cache, budget
        self._first = torch.zeros_like(cache[:, :, :, 0])  # of the first token of each row
        self._rows = [Holder(row=row) for row in range(cache.shape[2])]
        self._copies: dict[Holder, None] = {}  # least recently used first
        self._index: dict[int, dict[Holder, None]] = {}
        self._time = 0

    @property
    def nbytes(self) -> int:
        """Memory of the copied rows and of the stored first keys and values, in bytes."""
        return self._first.nbytes + sum(holder.copy.nbytes for holder in self._copies)

    def forget(self) -> None:
        """Drop all cached prefixes, because the weights have changed."""
        self._index.clear()
        self._copies.clear()
        self._rows = [Holder(row=row) for row in range(len(self._rows))]

    # Choice of rows

    def choose_rows(self, sequences: Sequence[RowSequence], free: Collection[int]) -> list[int]:
        """Select the free row that holds a sequence's longest known prefix, or the least recently used one.

        The first applies if the prefix has more than half of the row's tokens.
        """
        self._refresh()
        rows: list[int | None] = [None] * len(sequences)
        left = set(free)
        for number, sequence in enumerate(sequences):
            match = self._match(_prefilled(sequence))
            holder = match.holder
            if holder is not None and holder.row in left and 2 * match.length > len(holder.tokens):
                rows[number] = holder.row
                left.remove(holder.row)
        others = iter(sorted(left, key=lambda row: (self._rows[row].used, row)))
        return [next(others) if row is None else row for row in rows]

    # Filling and moving rows

    def place(self, groups: Sequence[tuple[list[int], list[int]]]) -> list[int]:
        """Copy the longest cached prefix of each group's tokens into the group's rows.

        Args:
            groups: (tokens to prefill, rows that receive them) of each group.

        Returns:
            Length of each group's prefix.
        """
        self._refresh()
        self._time += 1
        matches = [self._match(tokens) for tokens, _ in groups]
        targets = {row for _, rows in groups for row in rows}
        saved: dict[Holder, Tensor] = {}
        for match, (_, rows) in zip(matches, groups):
            holder = match.holder
            if holder is not None:
                holder.used = self._time
                if holder.row in targets and rows != [holder.row] and holder not in saved:
                    saved[holder] = self._values(holder).clone()
        for row in sorted(targets):
            self._keep(self._rows[row], matches)
        for match, (_, rows) in zip(matches, groups):
            if match.holder is not None:
                values = saved[match.holder] if match.holder in saved else self._values(match.holder)
                for row in rows:
                    if row != match.holder.row:
                        self._cache[:, :, row, : match.length] = values[:, :, : match.length]
                    self._cache[:, :, row, 0] = values[:, :, 0]
        for holder in self._copies.copy():
            if holder.used == self._time:  # recently used ones are dropped last
                self._copies[holder] = self._copies.pop(holder)
        return [match.length for match in matches]

    def filled(self, begun: Sequence[tuple[int, RowSequence]]) -> None:
        """Record that the sequences' tokens have been prefilled into these rows."""
        for row, sequence in begun:
            self._remove(self._rows[row])
            self._rows[row] = Holder(row=row, used=self._time)
            if sequence.length > 1:  # otherwise the first token, which is not prefilled, is not in `_first`
                self._rows[row].sequence = sequence
        rows = torch.tensor([row for row, _ in begun], device=self._cache.device)
        self._first[:, :, rows] = self._cache[:, :, rows, 0]
        self._refresh()

    def moved(self, source: int, target: int) -> None:
        """Record that a row was copied to another row."""
        holder = self._rows[source]
        self._remove(self._rows[target])
        self._rows[target] = Holder(row=target, sequence=holder.sequence, used=holder.used)
        holder.sequence = None
        self._first[:, :, target] = self._first[:, :, source]
        self._refresh()

    # Index

    def _refresh(self) -> None:
        """Append the tokens that the rows' sequences have received since the last call."""
        for holder in self._rows:
            if holder.sequence is not None and holder.sequence.length - 1 > len(holder.tokens):
                holder.tokens += _prefilled(holder.sequence, len(holder.tokens))
                self._add(holder, holder.tokens)
                if holder.sequence.ended:
                    holder.sequence = None

    def _add(self, holder: Holder, tokens: Sequence[int]) -> None:
        for block in _blocks(tokens, holder.blocks):
            self._index.setdefault(block, {})[holder] = None

    def _remove(self, holder: Holder) -> None:
        for block in holder.blocks:
            holders = self._index[block]
            holders.pop(holder, None)
            if not holders:
                del self._index[block]
        holder.blocks.clear()

    def _match(self, tokens: Sequence[int]) -> PrefixMatch:
        """Return the stored sequence that shares the longest prefix with `tokens`, and the prefix's length. The match
        is empty if the prefix is shorter than BLOCK.
        """
        blocks: list[int] = []
        holders: dict[Holder, None] = {}
        for block in _blocks(tokens, blocks):
            if block not in self._index:
                break
            holders = self._index[block]
        best = PrefixMatch()
        for holder in list(holders)[:CANDIDATES]:
            length = _common(holder.tokens, tokens)
            if length > best.length and length >= BLOCK:
                best = PrefixMatch(holder, length)
        return best

    # Copies

    def _values(self, holder: Holder) -> Tensor:
        """Return a stored sequence's keys and values, [attention layers, 2, tokens, groups, head_dim]."""
        if holder.copy is not None:
            return holder.copy
        values = self._cache[:, :, holder.row, : len(holder.tokens)]
        values[:, :, 0] = self._first[:, :, holder.row]
        return values

    def _keep(self, holder: Holder, matches: Sequence[PrefixMatch]) -> None:
        """Save a copy of a row that is about to be overwritten, within the memory budget."""
        size = self._cache[:, :, 0, 0].nbytes * len(holder.tokens)
        is_continued = any(
            match.holder is holder and match.length == len(holder.tokens) for match in matches
        )  # fmt: skip
        if len(holder.tokens) < BLOCK or size > self._budget or is_continued:
            return
        used = sum(each.copy.nbytes for each in self._copies)
        for oldest in list(self._copies):
            if used + size <= self._budget:
                break
            used -= oldest.copy.nbytes
            del self._copies[oldest]
            self._remove(oldest)
        kept = Holder(list(holder.tokens), copy=self._values(holder).clone(), used=holder.used)
        self._copies[kept] = None
        self._add(kept, kept.tokens)


def _prefilled(sequence: RowSequence, first: int = 0) -> list[int]:
    """Return a row's tokens from index `first`, except the newest one, which has no keys and values yet."""
    prompt, sampled = sequence.prompt[first:], sequence.ids[max(first - len(sequence.prompt), 0) :]
    return tokens_of_adapter([*prompt, *sampled][:-1], sequence.adapter)


def tokens_of_adapter(tokens: list[int], adapter: int) -> list[int]:
    """Return tokens with the adapter's slot in their high bits, because keys and values depend on the adapter."""
    return tokens if adapter == 0 else [token + (adapter << TOKEN_BITS) for token in tokens]


def _blocks(tokens: Sequence[int], hashes: list[int]) -> Iterator[int]:
    """Yield the hash of each block of `tokens` that `hashes` lacks, and append it to `hashes`."""
    for begin in range(len(hashes) * BLOCK, len(tokens) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1] if hashes else 0, *tokens[begin : begin + BLOCK])))
        yield hashes[-1]


def _common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Return the length of the common prefix of two token sequences."""
    longest = min(len(tokens), len(others))
    if tokens[:longest] == others[:longest]:
        return longest
    return next(at for at in range(longest) if tokens[at] != others[at])
