"""A cheap name for a model's weights: a digest of a few values of each tensor, the same in every layout.

Adapters belong to the weights that they were trained on, which their checkpoints do not hold. A step of training moves
nearly every weight, so a sample of them tells whether a base has been trained on since, or is another; reading all of
it would take as long as loading it. The sample is taken from the weights in memory, each value by a rank that has it.

What is in a step, by its global tensors: digests that are the same in every layout, and differences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalith.checkpoint.files import byte_view
from megalith.checkpoint.read import Checkpoint
from megalith.checkpoint.rewrite import stored_values
from megalith.comm.collectives import Axis, gather_json
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress

VALUES = 16  # of each tensor, evenly over its elements

Sample = dict[str, dict[int, str]]  # by tensor and number: a value's bytes in hexadecimal


def fingerprint(shards: Mapping[str, LocalShard], world: Axis) -> str | None:
    """The name, on rank 0, of the tensors that the ranks have these shards of; None on the others.

    Every rank of `world` calls it. The shards are to be those without rows that only pad the vocabulary.
    """
    own = {name: list(sample(shard).items()) for name, shard in shards.items() if shard.owned}
    merged: Sample = {}
    for named in gather_json(own, world, to_first=True):
        for name, values in named.items():
            merged.setdefault(name, {}).update((number, value) for number, value in values)
    return None if world.rank else digest(merged)


def sample(shard: LocalShard) -> dict[int, str]:
    """Those of a tensor's VALUES that are in a shard of it, by number: their bytes in hexadecimal."""
    count = torch.Size(shard.shape).numel()
    numbers, places = [], []
    for number in range(VALUES if count else 0):
        rest, place = (2 * number + 1) * count // (2 * VALUES), []
        for size in reversed(shard.shape):
            rest, at = divmod(rest, size)
            place.insert(0, at)
        place = [at - start for at, start in zip(place, shard.offset)]
        if all(0 <= at < size for at, size in zip(place, shard.values.shape)):
            numbers.append(number)
            places.append(place)
    if not numbers:
        return {}
    index = torch.tensor(places, dtype=torch.int64, device=shard.values.device)  # [values, dimensions]
    values = byte_view(shard.values[index.unbind(1)].expand(len(numbers)).cpu()).view(len(numbers), -1)
    return {number: bytes(value.tolist()).hex() for number, value in zip(numbers, values)}


def digest(samples: Sample) -> str:
    """SHA-256, in hexadecimal, of the samples of a model's tensors."""
    ordered = {name: sorted(values.items()) for name, values in sorted(samples.items())}
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


def tensor_digests(
    checkpoint: Checkpoint, part: str, progress: Progress | None = None
) -> Iterator[tuple[str, str]]:
    """Each tensor of a part with the SHA-256, in hexadecimal, of its type, shape and bytes in row-major order."""
    for name, values in sorted(stored_values(checkpoint, part, progress).items()):
        digest = hashlib.sha256(f"{checkpoint.table(part)[name]}\n".encode())
        for stretch in values.byte_chunks():
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


def differences(
    a: Checkpoint, b: Checkpoint, part: str, progress: Progress | None = None
) -> Iterator[Difference]:
    """The tensors of a part that are not bitwise the same in both, by name."""
    ours, theirs = (c.manifest.tensors.get(part, {}) for c in (a, b))
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield Difference(name, "only in the first")
        elif name not in ours:
            yield Difference(name, "only in the second")
        elif str(ours[name]) != str(theirs[name]):
            yield Difference(name, f"{ours[name]} in the first, {theirs[name]} in the second")
        elif found := _compare(a, b, part, name, progress):
            yield Difference(name, found)


def _compare(a: Checkpoint, b: Checkpoint, part: str, name: str, progress: Progress | None) -> str | None:
    different, largest, total = 0, 0.0, 0
    for x, y in zip(*(stored_values(c, part, told)[name].blocks() for c, told in ((a, progress), (b, None)))):
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
