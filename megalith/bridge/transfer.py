"""Tensors from theirs to ours and back, a group at a time, by the runs of its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megalith.bridge.family import Group
from megalith.bridge.rows import Run

Read = Callable[
    [str], Tensor
]  # a tensor of theirs by its name; mapped from a file, so that only what is used is read


def to_ours(
    group: Group, read: Read, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
) -> Tensor:
    """Our tensor in float32, or the box of it that begins at `offset` and has this `shape`."""
    offset = [0] * len(group.shape) if offset is None else offset
    out = torch.empty(group.shape if shape is None else tuple(shape), dtype=torch.float32)
    if group.experts is None:
        _gather(group, group.names(), read, offset, out)
    else:
        for number, part in enumerate(out):
            _gather(group, group.names(offset[0] + number), read, offset[1:], part)
    return out


def _gather(group: Group, names: Sequence[str], read: Read, offset: Sequence[int], out: Tensor) -> None:
    sources: dict[str, Tensor] = {}
    columns = tuple(slice(at, at + size) for at, size in zip(offset[1:], out.shape[1:]))
    for run in group.runs:
        part = run.inside(offset[0], len(out))
        if not part.count:
            continue
        name = names[part.source]
        if name not in sources:
            sources[name] = read(name).T if group.rule.transposed and columns else read(name)
        out[_ours(part)] = sources[name][(slice(part.theirs, part.theirs + part.count), *columns)]


def to_theirs(
    group: Group, tensor: Tensor, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of theirs with its name, contiguous and in its dtype, from the whole of ours."""
    parts = [(None, tensor)] if group.experts is None else enumerate(tensor)
    for expert, part in parts:
        for source, name in enumerate(group.names(expert)):
            out = torch.empty(group.sources[name], dtype=dtypes[name])
            rows = out.T if group.rule.transposed and out.ndim > 1 else out
            for run in group.runs:
                if run.source == source:
                    rows[run.theirs : run.theirs + run.count] = part[_ours(run)]
            yield name, out


def _ours(run: Run) -> slice:
    return slice(run.ours, run.ours + (run.count - 1) * run.step + 1, run.step)
