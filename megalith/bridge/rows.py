"""Rules that map rows of Hugging Face tensors to rows of Megalith's tensors, and back.

Besides names, the two formats differ in which rows of which tensor a matrix consists of. Hugging Face has separate
query, key and value matrices; Megalith has one, grouped by KV head. Gate and up are two matrices in Hugging Face, and
alternating rows of one in Megalith. GPT-2 stores matrices transposed, so its columns are Megalith's rows. A rule lists
runs of rows. The runs cover each row of both sides once, so one list serves import, export and sharded reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from megalith.config import ModelConfig


@dataclass(frozen=True)
class RowRun:
    """`count` consecutive rows that a Hugging Face tensor and a Megalith tensor have in common.

    Rows `theirs`, `theirs` + 1, … of the Hugging Face tensor are rows `ours`, `ours` + step, … of Megalith's.
    """

    source: int  # index into the rule's names
    theirs: int
    ours: int
    count: int
    step: int = 1

    def inside(self, first: int, rows: int) -> RowRun:
        """Return the rows of this run within Megalith's rows [first, first + rows), relative to `first`.

        The result may be empty.
        """
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
    """Assembles one Megalith tensor from Hugging Face tensors.

    With one name, the sources of `order`'s runs are consecutive blocks of that tensor: queries, then keys, then values.
    """

    names: tuple[str, ...]
    """Names of the Hugging Face tensors. They may contain the numbers {layer}, {decoder} (the layer, counted from the
    start of the decoder of an encoder-decoder), {before} and {last} (the previous and the last layer of the tensor's
    stack, counted from its start) and {expert} (Megalith's tensor has the experts as its first dimension)."""
    order: Callable[[ModelConfig, int], list[RowRun]]
    """Function (model, number of rows of Megalith's tensor) → the runs that cover these rows."""
    transposed: bool = False  # Hugging Face has [columns, rows]
    stacked: bool = False  # Hugging Face has one tensor for all experts, with experts as first dimension
    flat: bool = False  # a stacked tensor has experts and rows as one dimension
    ones: tuple[int, int] | None = None  # Hugging Face has so many dimensions of size 1 before and after ours

    def runs(self, model: ModelConfig, rows: int) -> list[RowRun]:
        """Return the runs of consecutive Hugging Face rows that together are Megalith's tensor. `rows` is its number of
        rows.
        """
        runs = self.order(model, rows)
        return runs if len(self.names) > 1 else from_one_tensor(runs)


def replace_prefix(tensors: Mapping[str, Rule], old: str, new: str = "") -> dict[str, Rule]:
    """Return a table whose Hugging Face names begin with `new` where they began with `old`."""
    return {
        ours: replace(
            rule,
            names=tuple(
                new + name.removeprefix(old) if name.startswith(old) else name for name in rule.names
            ),
        )
        for ours, rule in tensors.items()
    }


def same(name: str) -> Rule:
    """Return the mapping rule of an identical tensor under another name."""
    return Rule((name,), lambda model, rows: [RowRun(0, 0, 0, rows)])


def transposed(name: str) -> Rule:
    """Return the mapping rule of a matrix stored as [in, out] (GPT-2's Conv1D)."""
    return Rule((name,), lambda model, rows: [RowRun(0, 0, 0, rows)], transposed=True)


def row_vector(name: str) -> Rule:
    """Return the mapping rule of a vector stored as [1, size]."""
    return with_ones(name, 1, 0)


def with_ones(name: str, before: int, after: int) -> Rule:
    """Return the mapping rule of a vector that is stored with `before` and `after` additional dimensions of size 1."""
    return replace(same(name), ones=(before, after))


def stacked(rule: Rule, transposed: bool = False, flat: bool = False) -> Rule:
    """Return the mapping rule of a tensor that contains the matrices of all experts. `rule` applies to each expert;
    with `flat`, the matrices are concatenated by rows.
    """
    return replace(rule, stacked=True, transposed=transposed, flat=flat)


def first_last(name: str, count: int) -> Rule:
    """Return the row order of a matrix whose first `count` rows in Hugging Face's format are Megalith's last ones."""
    return Rule(
        (name,), lambda model, rows: [RowRun(0, count, 0, rows - count), RowRun(0, 0, rows - count, count)]
    )


def qkv(*names: str, transposed: bool = False) -> Rule:
    """Return the mapping rule of queries, keys and values.

    Hugging Face has three tensors, or one with all queries, then all keys, then all values.
    """
    return Rule(names, _by_group, transposed)


def interleaved_qkv(*names: str) -> Rule:
    """Return the mapping rule of `qkv` with interleaved rotary pairs in queries and keys (GPT-J)."""
    return Rule(names, _by_group_interleaved)


def swapped_halves_qkv(*names: str) -> Rule:
    """Return the mapping rule of `qkv` in which the two halves of each query and key are swapped, for RoPE in the
    opposite direction.
    """
    return Rule(names, _by_group_swapped)


def one_each(*names: str) -> Rule:
    """Return the mapping rule of a vector that is stored as one tensor per element."""
    return Rule(names, lambda model, rows: [RowRun(source, 0, source, 1) for source in range(len(names))])


def interleaved_heads(name: str, plain: str) -> Rule:
    """Return the mapping rule of heads in which `plain` rows without RoPE precede interleaved rotary pairs.

    `plain` names the setting with the number of rows without RoPE: `qk_head_dim`, or the size of a latent.
    """

    def order(model: ModelConfig, rows: int) -> list[RowRun]:
        first, size = getattr(model, plain), model.qk_pos_emb_head_dim
        runs = []
        for head in range(0, rows, first + size):
            runs.append(RowRun(0, head, head, first))
            runs += deinterleave(0, head + first, head + first, size)
        return runs

    return Rule((name,), order)


def gate_up(*names: str) -> Rule:
    """Return the mapping rule of gate and up, stored as two tensors or as one tensor with the gate first."""
    return Rule(names, lambda model, rows: [RowRun(part, 0, part, rows // 2, step=2) for part in (0, 1)])


def up_gate(name: str) -> Rule:
    """Return the mapping rule of one tensor with the up before the gate."""
    return Rule(
        (name,), lambda model, rows: [RowRun(1 - part, 0, part, rows // 2, step=2) for part in (0, 1)]
    )


def by_group(
    groups: Callable[[ModelConfig], int], rows_of: Callable[[ModelConfig], Sequence[int]]
) -> Callable[[ModelConfig, int], list[RowRun]]:
    """Return the row order by group (or head): for each group, its rows of every source; `rows_of` gives the numbers of
    rows of the sources."""

    def order(model: ModelConfig, rows: int) -> list[RowRun]:
        count, runs, ours = groups(model), [], 0
        for group in range(count):
            for source, size in enumerate(rows_of(model)):
                part = size // count
                runs.append(RowRun(source, group * part, ours, part))
                ours += part
        return runs

    return order


def cut_into(
    order: Callable[[ModelConfig, int], list[RowRun]], rows_of: Callable[[ModelConfig], Sequence[int]]
) -> Callable[[ModelConfig, int], list[RowRun]]:
    """Return a row order for the same rows in other tensors: the sources of `order`, joined, and cut into tensors of
    `rows_of` rows. The last one has all further rows.
    """

    def cut(model: ModelConfig, rows: int) -> list[RowRun]:
        starts = [0, *accumulate(rows_of(model)[:-1])]
        return [part for run in from_one_tensor(order(model, rows)) for part in _parts(run, starts)]

    return cut


def _parts(run: RowRun, starts: Sequence[int]) -> Iterator[RowRun]:
    """Yield the parts of a run of one tensor if this is cut before each of the rows `starts`."""
    last = run.theirs + run.count
    for source, (start, stop) in enumerate(pairwise([*starts, max(last, starts[-1])])):
        first = max(run.theirs, start)
        if first < min(last, stop):
            ours = run.ours + (first - run.theirs) * run.step
            yield RowRun(source, first - start, ours, min(last, stop) - first, run.step)


def keys_values(keys: str, values: str) -> Rule:
    """Return the mapping rule of cross-attention's keys and values.

    Hugging Face has two tensors. Megalith's has a key, then a value, for each KV group.
    """
    return Rule((keys, values), _keys_values)


def _keys_values(model: ModelConfig, rows: int) -> list[RowRun]:
    size, groups = model.head_dim, range(model.query_groups)
    return [
        RowRun(part, group * size, (2 * group + part) * size, size) for group in groups for part in (0, 1)
    ]


def _by_group(model: ModelConfig, rows: int) -> list[RowRun]:
    """Order rows by KV group: queries, key, value."""
    size = model.head_dim
    heads = (
        model.num_attention_heads // model.query_groups,
        1,
        1,
    )  # numbers of queries, keys and values in a group
    runs, ours = [], 0
    for group in range(model.query_groups):
        for source, count in enumerate(heads):
            runs.append(RowRun(source, group * count * size, ours, count * size))
            ours += count * size
    return runs


def _by_group_interleaved(model: ModelConfig, rows: int) -> list[RowRun]:
    size, rotary, runs = model.head_dim, model.rotary_size, []
    for run in _by_group(model, rows):
        heads = range(0, run.count, size) if run.source < 2 else ()
        for head in heads:
            theirs, ours = run.theirs + head, run.ours + head
            runs += deinterleave(run.source, theirs, ours, rotary)
            runs.append(RowRun(run.source, theirs + rotary, ours + rotary, size - rotary))
        if not heads:
            runs.append(run)
    return [run for run in runs if run.count]


def _by_group_swapped(model: ModelConfig, rows: int) -> list[RowRun]:
    half, runs = model.head_dim // 2, []
    for run in _by_group(model, rows):
        if run.source == 2:
            runs.append(run)
            continue
        for head in range(0, run.count, 2 * half):
            theirs, ours = run.theirs + head, run.ours + head
            runs.append(RowRun(run.source, theirs, ours + half, half))
            runs.append(RowRun(run.source, theirs + half, ours, half))
    return runs


def deinterleave(source: int, theirs: int, ours: int, size: int) -> list[RowRun]:
    """Return runs that undo the interleaving of rotary pairs in `size` rows.

    Pair j is rows (2j, 2j + 1) in Hugging Face's tensor, and rows (j, j + size / 2) in Megalith's.
    """
    return [RowRun(source, theirs + 2 * pair, ours + pair, 2, step=size // 2) for pair in range(size // 2)]


def from_one_tensor(runs: list[RowRun]) -> list[RowRun]:
    """Return the runs for sources that are consecutive blocks of one tensor."""
    starts, total = {}, 0
    for source in sorted({run.source for run in runs}):
        starts[source] = total
        total += sum(run.count for run in runs if run.source == source)
    return [replace(run, source=0, theirs=run.theirs + starts[run.source]) for run in runs]
