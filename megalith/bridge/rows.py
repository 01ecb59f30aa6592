"""How the rows of our tensors are made of the rows of Hugging Face's, and back.

Every difference between the two is an order of rows. Queries, keys and values are three matrices there and one here,
by KV group; gate and up are two there and one here, alternating; GPT-2 keeps its matrices transposed, so its columns
are our rows. A rule says which runs of rows go where. As the runs cover each row of both sides once, one list serves
import (runs copied from theirs to ours), export (from ours to theirs) and a rank that wants a slice (the part of the
runs inside it), and none of them can differ from the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megalith.config import ModelConfig


@dataclass(frozen=True)
class RowRun:
    """Rows `theirs`, `theirs` + 1, … of a tensor of theirs are our rows `ours`, `ours` + step, …: `count` of them."""

    source: int  # which of the rule's names
    theirs: int
    ours: int
    count: int
    step: int = 1

    def inside(self, first: int, rows: int) -> RowRun:
        """The part of this run in our rows first … first + rows - 1, counted from `first`; its count may be 0."""
        skipped = max(0, -(-(first - self.ours) // self.step))
        stop = min(self.count, max(0, -(-(first + rows - self.ours) // self.step)))
        return replace(
            self,
            theirs=self.theirs + skipped,
            ours=self.ours + skipped * self.step - first,
            count=max(0, stop - skipped),
        )


@dataclass(frozen=True)
class Rule:
    """The tensors of theirs that one of ours is made of.

    `names` may hold {layer}, {before} and {last}, the numbers of the layer, the one before it and the last one,
    {decoder}, the layer's number among the decoder's where an encoder's come first, and {expert} where ours has a first
    dimension of experts. `order` gives the runs for a model and the number of our rows; the names count as one tensor
    of all the rows where only one is given.
    """

    names: tuple[str, ...]
    order: Callable[[ModelConfig, int], list[RowRun]]
    transposed: bool = False  # theirs are [columns, rows]
    stacked: bool = False  # theirs have a first dimension of experts too: one tensor of all

    def runs(self, model: ModelConfig, rows: int) -> list[RowRun]:
        """The runs that make up our `rows` rows."""
        runs = self.order(model, rows)
        return runs if len(self.names) > 1 else _joined(runs)


def same(name: str) -> Rule:
    """The same tensor under another name."""
    return Rule((name,), lambda model, rows: [RowRun(0, 0, 0, rows)])


def transposed(name: str) -> Rule:
    """A matrix that is stored [in, out] there (GPT-2's Conv1D)."""
    return Rule((name,), lambda model, rows: [RowRun(0, 0, 0, rows)], transposed=True)


def stacked(rule: Rule, transposed: bool = False) -> Rule:
    """The same of each expert, where one tensor has them all."""
    return replace(rule, stacked=True, transposed=transposed)


def first_last(name: str, count: int) -> Rule:
    """A table whose first `count` rows there are its last here."""
    return Rule(
        (name,), lambda model, rows: [RowRun(0, count, 0, rows - count), RowRun(0, 0, rows - count, count)]
    )


def qkv(*names: str, transposed: bool = False) -> Rule:
    """Queries, keys and values: three tensors of theirs, or one with all queries before all keys before all values."""
    return Rule(names, _by_group, transposed)


def turning_qkv(*names: str) -> Rule:
    """As `qkv`, where the pairs of a query's and a key's first dimensions that turn stand side by side there."""
    return Rule(names, _by_group_turning)


def turning(name: str, plain: str) -> Rule:
    """Heads, each `plain` rows and then rows that turn in pairs, which stand side by side there.

    `plain` is the field that has the number of the first: the size of a head's part without position, or of a latent.
    """

    def order(model: ModelConfig, rows: int) -> list[RowRun]:
        first, size = getattr(model, plain), model.qk_pos_emb_head_dim
        runs = []
        for head in range(0, rows, first + size):
            runs.append(RowRun(0, head, head, first))
            runs += pairs_apart(0, head + first, head + first, size)
        return runs

    return Rule((name,), order)


def gate_up(*names: str) -> Rule:
    """Gate and up: two tensors of theirs, or one with the whole gate before the whole up."""
    return Rule(names, lambda model, rows: [RowRun(part, 0, part, rows // 2, step=2) for part in (0, 1)])


def keys_values(keys: str, values: str) -> Rule:
    """Keys and values of cross-attention: two tensors of theirs; ours has for each KV group its key, then its value."""
    return Rule((keys, values), _keys_values)


def _keys_values(model: ModelConfig, rows: int) -> list[RowRun]:
    size, groups = model.head_dim, range(model.query_groups)
    return [
        RowRun(part, group * size, (2 * group + part) * size, size) for group in groups for part in (0, 1)
    ]


def _by_group(model: ModelConfig, rows: int) -> list[RowRun]:
    """Ours: for each KV group its queries, its key, its value."""
    size = model.head_dim
    heads = (model.num_attention_heads // model.query_groups, 1, 1)  # of queries, keys and values in a group
    runs, ours = [], 0
    for group in range(model.query_groups):
        for source, count in enumerate(heads):
            runs.append(RowRun(source, group * count * size, ours, count * size))
            ours += count * size
    return runs


def _by_group_turning(model: ModelConfig, rows: int) -> list[RowRun]:
    size, turns, runs = model.head_dim, model.rotary_size, []
    for run in _by_group(model, rows):
        heads = range(0, run.count, size) if run.source < 2 else ()
        for head in heads:
            theirs, ours = run.theirs + head, run.ours + head
            runs += pairs_apart(run.source, theirs, ours, turns)
            runs.append(RowRun(run.source, theirs + turns, ours + turns, size - turns))
        if not heads:
            runs.append(run)
    return [run for run in runs if run.count]


def pairs_apart(source: int, theirs: int, ours: int, size: int) -> list[RowRun]:
    """`size` rows that turn in pairs: (0, 1), (2, 3), … there, (0, size / 2), (1, size / 2 + 1), … here."""
    return [RowRun(source, theirs + 2 * pair, ours + pair, 2, step=size // 2) for pair in range(size // 2)]


def _joined(runs: list[RowRun]) -> list[RowRun]:
    """The same runs where the sources are parts of one tensor, one after the other."""
    starts, total = {}, 0
    for source in sorted({run.source for run in runs}):
        starts[source] = total
        total += sum(run.count for run in runs if run.source == source)
    return [replace(run, source=0, theirs=run.theirs + starts[run.source]) for run in runs]
