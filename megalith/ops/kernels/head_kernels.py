"""The local part of Ulysses' all-to-all by copy engines, in one pass over memory.

See parallel/overlap/copy_engine_heads.py. A program copies some columns of some tokens of one sequence for one rank of
the axis: into the slot (a buffer in symmetric memory), from which that rank fetches them, or, for this rank, into the
result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from megalith.ops.kernels.kernel_launch import Launcher

HEADS_ROWS, HEADS_COLUMNS, HEADS_WARPS = 64, 128, 4  # a tile has 16 KB in bf16


@triton.jit
def _share_heads(
    first, second, third, slot, out, seq, rank,
    first_batch, first_token, first_head, second_batch, second_token, second_head, third_batch, third_token, third_head,
    FIRST: tl.constexpr, SECOND: tl.constexpr, THIRD: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    RANKS: tl.constexpr, TO_HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    firsts: tl.constexpr = (FIRST + COLUMNS - 1) // COLUMNS
    seconds: tl.constexpr = (SECOND + COLUMNS - 1) // COLUMNS
    thirds: tl.constexpr = (THIRD + COLUMNS - 1) // COLUMNS
    width: tl.constexpr = FIRST + SECOND + THIRD
    share = tl.program_id(0) // (firsts + seconds + thirds)
    block = tl.program_id(0) % (firsts + seconds + thirds)
    if block < firsts:
        _copy(
            first, slot, out, first_batch, first_token, first_head, seq, rank, share, block,
            FIRST, 0, width, GROUPS, SIZE, RANKS, TO_HEADS, ROWS, COLUMNS,
        )  # fmt: skip
    elif THIRD > 0:
        if block < firsts + seconds:
            _copy(
                second, slot, out, second_batch, second_token, second_head, seq, rank, share, block - firsts,
                SECOND, FIRST, width, GROUPS, SIZE, RANKS, TO_HEADS, ROWS, COLUMNS,
            )  # fmt: skip
        else:
            _copy(
                third, slot, out, third_batch, third_token, third_head, seq, rank, share,
                block - firsts - seconds,
                THIRD, FIRST + SECOND, width, GROUPS, SIZE, RANKS, TO_HEADS, ROWS, COLUMNS,
            )  # fmt: skip


@triton.jit
def _copy(
    x, slot, out, by_batch, by_token, by_head, seq, rank, share, block,
    COUNT: tl.constexpr, BEFORE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    RANKS: tl.constexpr, TO_HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = block * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    batch = tl.program_id(2).to(tl.int64)
    inside = (columns < COUNT) & (tokens < seq)
    head, half = (columns // SIZE).to(tl.int64), seq // 2
    # Positions in the full sequence follow zigzag.spans.
    if TO_HEADS:
        head += share * (COUNT // SIZE)
        positions = tl.where(tokens < half, rank * half, (2 * RANKS - 2 - rank) * half) + tokens
        source = tokens
    else:
        positions = tl.where(tokens < half, share * half, (2 * RANKS - 2 - share) * half) + tokens
        source = positions
    x += batch * by_batch + source.to(tl.int64) * by_token + head * by_head + columns % SIZE
    value = tl.load(x, mask=inside, other=0.0)
    # The columns of a share are ordered by group, with per_group of this tensor in each.
    per_group: tl.constexpr = COUNT // GROUPS
    columns_there = columns // per_group * (WIDTH // GROUPS) + BEFORE // GROUPS + columns % per_group
    if share != rank:
        part = tl.where(share > rank, share - 1, share).to(tl.int64)
        row = (part * tl.num_programs(2) + batch) * seq + tokens
        tl.store(slot + row * WIDTH + columns_there, value, mask=inside)
    elif TO_HEADS:
        row = batch * RANKS * seq + positions
        tl.store(out + row * WIDTH + columns_there, value, mask=inside)
    else:
        row = batch * seq + tokens
        tl.store(out + (row * RANKS + rank) * WIDTH + columns_there, value, mask=inside)


_launch = Launcher(_share_heads)


def share_heads(xs: list[Tensor], slot: Tensor, out: Tensor, rank: int, to_heads: bool) -> None:
    """Copy each rank's share of one or three tensors: this rank's share into `out`, the others' into `slot`.

    Both are contiguous. `slot` has a part per other rank, in order: [ranks - 1, batch, seq, share of all heads, size].
    A share contains its heads of the first tensor, then of the second, then of the third. Without `to_heads`, heads are
    in this order within each group, and the third tensor has one head per group.

    Args:
        xs: with `to_heads` this rank's tokens [batch, seq, heads, size], otherwise [batch, ranks · seq, share of the
            heads, size].
        slot: the memory from which other ranks fetch their shares.
        out: with `to_heads` [batch, ranks · seq, share of all heads, size], otherwise [batch, seq, all heads, size],
            ordered by rank.
        rank: this rank.
        to_heads: exchange sequence shards for head shards, otherwise back.
    """
    xs = [x if x.stride(3) == 1 else x.contiguous() for x in xs]
    others, batch, seq, _, size = slot.shape
    cut = others + 1 if to_heads else 1
    groups = 1 if to_heads else xs[-1].shape[2]
    widths = [x.shape[2] // cut * size for x in xs] + [0] * (3 - len(xs))
    first, second, third = (xs * 3)[:3]
    blocks, tiles = sum([-(-width // HEADS_COLUMNS) for width in widths]), -(-seq // HEADS_ROWS)
    _launch(
        ((others + 1) * blocks, tiles, batch),
        (first, second, third, slot, out),
        (seq, rank, *first.stride()[:3], *second.stride()[:3], *third.stride()[:3]),
        (),
        (*widths, groups, size, others + 1, to_heads, HEADS_ROWS, HEADS_COLUMNS),
        HEADS_WARPS,
    )
