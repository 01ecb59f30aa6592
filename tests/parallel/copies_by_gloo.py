"""The exchange of heads for tokens by copy engines, played through without them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist

from megalith.comm.collectives import Axis
from megalith.parallel.context import ulysses
from megalith.parallel.context.zigzag import spans
from megalith.parallel.overlap import copy_engine_heads as direct_heads
from megalith.parallel.overlap.cuda_driver import StridedRows


def positions(rank: int, size: int, seq: int) -> list[int]:
    return [place for span in spans(rank, size, seq) for place in span]


def by_group(xs: list[torch.Tensor]) -> torch.Tensor:
    """Heads of one tensor, or of queries, keys and values, in the order of linear_qkv's rows."""
    groups = xs[-1].shape[2]
    return torch.cat([x.unflatten(2, (groups, -1)) for x in xs], 3).flatten(2, 3)


def share_by_formula(xs, slot, out, rank, to_heads) -> None:
    """What fused.share_heads writes."""
    size, seq = len(slot) + 1, slot.shape[2]
    for other in range(size):
        if to_heads:
            share = torch.cat([x.chunk(size, 2)[other] for x in xs], 2)
        else:
            share = by_group(xs)[:, positions(other, size, seq)]
        if other != rank:
            slot[other - (other > rank)] = share
        elif to_heads:
            out[:, positions(rank, size, seq)] = share
        else:
            out.chunk(size, 2)[rank].copy_(share)


def fetch(pull: StridedRows, slot: torch.Tensor, out: torch.Tensor) -> None:
    """What the copy engine does, on bytes."""
    source, target = (x.view(-1).view(torch.uint8) for x in (slot, out))
    shape = (pull.height, pull.width)
    rows = torch.as_strided(source, shape, (pull.source_pitch, 1), pull.source)
    torch.as_strided(target, shape, (pull.target_pitch, 1), pull.target).copy_(rows)


def fill(xs, out, rank, size, to_heads, share) -> torch.Tensor:
    """The local pass: a rank's slot."""
    batch, seq, _, head_dim = (xs[0] if to_heads else out).shape
    heads = out.numel() // (size * batch * seq * head_dim)
    slot = out.new_full((size - 1, batch, seq, heads, head_dim), float("nan"))
    share(xs, slot, out, rank, to_heads)
    return slot


def fetch_all(xs, slots, out, rank, to_heads) -> None:
    """The copies: what stands in the others' slots comes into a rank's result."""
    size, (_, batch, seq, _, _) = len(slots), slots[0].shape
    row = out.nbytes // (size * batch * seq)
    pulls = direct_heads.heads_pulls if to_heads else direct_heads.tokens_pulls
    for peer in range(size):
        if peer != rank:
            for pull in pulls(rank, peer, size, batch, seq, row):
                fetch(pull, slots[peer], out)


def by_gloo(xs, out, size, group, to_heads) -> torch.Tensor:
    """What direct_heads._begin does, where slots are gathered and not read in place."""
    rank = dist.get_rank()
    slot = fill(xs, out, rank, size, to_heads, share_by_formula)
    slots = [torch.empty_like(slot) for _ in range(size)]
    dist.all_gather(slots, slot)
    fetch_all(xs, slots, out, rank, to_heads)
    return out


def are_heads(axis: Axis, x: torch.Tensor) -> bool:
    """True for the exchange of heads, but not for that of recurrent states by the same axis."""
    return vars(ulysses) is sys._getframe(1).f_globals and x.ndim > 2 and x.is_floating_point()


@contextmanager
def as_if_direct() -> Iterator[None]:
    """Heads, and nothing else, go as by copy engines."""
    with (
        mock.patch.object(direct_heads, "_begin", by_gloo),
        mock.patch.object(Axis, "uses_copy_engine", are_heads),
    ):
        yield
