"""What is in a step, by its global tensors: digests that are the same in every layout, and differences."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.checkpoint.files import byte_view
from megalith.checkpoint.read import Checkpoint
from megalith.checkpoint.rewrite import stored_values


def tensor_digests(checkpoint: Checkpoint, part: str) -> Iterator[tuple[str, str]]:
    """Each tensor of a part with the SHA-256, in hexadecimal, of its type, shape and bytes in row-major order."""
    for name, values in sorted(stored_values(checkpoint, part).items()):
        digest = hashlib.sha256(f"{checkpoint.table(part)[name]}\n".encode())
        for stretch in values.stretches():
            digest.update(memoryview(stretch.numpy()))
        yield name, digest.hexdigest()


def total_digest(digests: Iterable[tuple[str, str]]) -> str:
    """One digest for all of them."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints under one name."""

    name: str
    what: str  # in words


def differences(a: Checkpoint, b: Checkpoint, part: str) -> Iterator[Difference]:
    """The tensors of a part that are not bitwise the same in both, by name."""
    ours, theirs = (c.manifest.tensors.get(part, {}) for c in (a, b))
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield Difference(name, "only in the first")
        elif name not in ours:
            yield Difference(name, "only in the second")
        elif str(ours[name]) != str(theirs[name]):
            yield Difference(name, f"{ours[name]} in the first, {theirs[name]} in the second")
        elif found := _compare(a, b, part, name):
            yield Difference(name, found)


def _compare(a: Checkpoint, b: Checkpoint, part: str, name: str) -> str | None:
    different, largest, total = 0, 0.0, 0
    for x, y in zip(*(stored_values(c, part)[name].blocks() for c in (a, b))):
        total += x.numel()
        unequal = (_bytes_by_element(x) != _bytes_by_element(y)).any(-1)
        if unequal.any():
            distance = (x.reshape(-1)[unequal].double() - y.reshape(-1)[unequal].double()).abs()
            different += int(unequal.sum())
            largest = max(largest, distance.nan_to_num(nan=torch.inf).max().item())
    if not different:
        return None
    return f"{different} of {total} elements differ, by at most {largest:.6g}"


def _bytes_by_element(tensor: Tensor) -> Tensor:
    return byte_view(tensor).view(-1, tensor.dtype.itemsize)
