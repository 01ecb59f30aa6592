"""Conversion of one group of tensors between Hugging Face and Megalith, by the runs of its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megalith.bridge.family import Group
from megalith.bridge.rows import RowRun

Read = Callable[[str], Tensor]  # returns a Hugging Face tensor by name, memory-mapped


class Scratch:
    """A reusable buffer. Freshly allocated memory takes three times as long to fill."""

    def __init__(self):
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor, valid until the next call."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if len(self._bytes) < size:
            self._bytes = torch.empty(size, dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(tuple(shape))


def to_ours(
    group: Group, read: Read, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None
) -> Tensor:
    """Return a group's Megalith tensor in float32. Do not write to it: it may share memory with the source.

    Args:
        group: the tensor and its sources.
        read: returns a source tensor by name.
        offset: start of the box to read; default: the whole tensor.
        shape: shape of the box.
    """
    if group.rule.ones is not None:
        stored, read = read, lambda name: stored(name).flatten()
    offset = [0] * len(group.shape) if offset is None else offset
    shape = group.shape if shape is None else tuple(shape)
    if group.experts is not None:
        out = torch.empty(shape, dtype=torch.float32)
        for number, part in enumerate(out):
            _gather(group, group.names(offset[0] + number), read, offset[1:], part)
        return out
    if group.rule.stacked:
        out = torch.empty(shape, dtype=torch.float32)
        full = {name: _by_expert(group, read(name)) for name in group.names()}
        for number, part in enumerate(out, offset[0]):
            of_expert = {name: tensor[number] for name, tensor in full.items()}
            _gather(group, group.names(), of_expert.__getitem__, offset[1:], part)
        return out
    if len(group.runs) == 1 and not group.rule.transposed and shape[1:] == group.shape[1:]:
        rows = read(group.names()[0])[offset[0] : offset[0] + shape[0]] if shape else read(group.names()[0])
        return rows.float()
    out = torch.empty(shape, dtype=torch.float32)
    _gather(group, group.names(), read, offset, out)
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
    group: Group,
    tensor: Tensor,
    dtypes: Mapping[str, torch.dtype],
    scratch: Scratch | None = None,
    first_expert: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of each Hugging Face tensor of a group, contiguous and in its dtype.

    Args:
        group: the tensor and its sources.
        tensor: Megalith's tensor; with one source per expert it may contain only some experts.
        dtypes: dtype of each source.
        scratch: buffer for the results, each of which is then valid until the next. A result may be `tensor` itself.
        first_expert: index of the first expert in `tensor`.
    """
    empty = scratch.empty if scratch else lambda shape, dtype: torch.empty(shape, dtype=dtype)
    if group.rule.stacked:
        yield from _stacked(group, tensor, dtypes, empty)
        return
    parts = [(None, tensor)] if group.experts is None else enumerate(tensor, first_expert)
    for expert, part in parts:
        for source, name in enumerate(group.names(expert)):
            if len(group.runs) == 1 and not group.rule.transposed and part.dtype == dtypes[name]:
                yield name, part.view(group.sources[name]) if group.rule.ones is not None else part
                continue
            out = empty(group.sources[name], dtypes[name])
            _scatter(group, source, part, out.view(-1) if group.rule.ones is not None else out)
            yield name, out


def _stacked(
    group: Group, tensor: Tensor, dtypes: Mapping[str, torch.dtype], empty: Callable[..., Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for source, name in enumerate(group.names()):
        out = empty(group.sources[name], dtypes[name])
        for part, full in zip(tensor, _by_expert(group, out), strict=True):
            _scatter(group, source, part, full)
        yield name, out


def _by_expert(group: Group, stored: Tensor) -> Tensor:
    """Return a stacked tensor with the experts as first dimension."""
    return stored.unflatten(0, (group.shape[0], -1)) if group.rule.flat else stored


def _scatter(group: Group, source: int, part: Tensor, out: Tensor) -> None:
    rows = out.T if group.rule.transposed and out.ndim > 1 else out
    for run in group.runs:
        if run.source == source:
            rows[run.theirs : run.theirs + run.count] = part[_ours(run)]


def _ours(run: RowRun) -> slice:
    return slice(run.ours, run.ours + (run.count - 1) * run.step + 1, run.step)
