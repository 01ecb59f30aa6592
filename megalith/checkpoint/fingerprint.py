"""Fingerprints and comparisons of checkpoints by their global tensors, the same in every layout.

Adapters belong to the base weights they were trained on, which their checkpoints do not contain. `fingerprint`
identifies the base weights by a few values of each tensor: training changes nearly every weight, so a sample suffices,
and reading all would take as long as loading. The values are read from the weights in memory, each on a rank that holds
it.

`tensor_digests` hashes the complete tensors of a step, and `differences` compares two steps.
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

VALUES = 16  # sampled per tensor, evenly spaced
HALF = torch.bfloat16, torch.float16

Sample = dict[str, dict[int, str]]  # hexadecimal bytes of a value, by tensor and sample number


def fingerprint(
    shards: Mapping[str, LocalShard], world: Axis, sampled: Mapping[str, Mapping[int, str]] | None = None
) -> str | None:
    """Return a digest of sampled tensor values on rank 0, and None on other ranks. Collective over `world`.

    The shards must exclude vocabulary padding. `sampled` are samples of tensors that are no longer in memory.
    """
    local = {name: list(sample(shard).items()) for name, shard in shards.items() if shard.owned}
    local |= {name: list(values.items()) for name, values in (sampled or {}).items()}
    merged: Sample = {}
    for named in gather_json(local, world, to_first=True):
        for name, values in named.items():
            merged.setdefault(name, {}).update((number, value) for number, value in values)
    return None if world.rank else digest(merged)


def sample(shard: LocalShard) -> dict[int, str]:
    """Return the sampled values that this shard holds, as hexadecimal bytes by sample number.

    Values in bf16 and fp16 are sampled in fp32: frozen weights may be held in either.
    """
    count = torch.Size(shard.shape).numel()
    row_numbers, indices = [], []
    for number in range(VALUES if count else 0):
        rest, index = (2 * number + 1) * count // (2 * VALUES), []
        for size in reversed(shard.shape):
            rest, i = divmod(rest, size)
            index.insert(0, i)
        index = [i - start for i, start in zip(index, shard.offset)]
        if all(0 <= i < size for i, size in zip(index, shard.values.shape)):
            row_numbers.append(number)
            indices.append(index)
    if not row_numbers:
        return {}
    index = torch.tensor(indices, dtype=torch.int64, device=shard.values.device)  # [values, dimensions]
    values = shard.values[index.unbind(1)].expand(len(row_numbers)).cpu()
    values = values.float() if values.dtype in HALF else values
    values = byte_view(values).view(len(row_numbers), -1)
    return {number: bytes(value.tolist()).hex() for number, value in zip(row_numbers, values)}


def digest(samples: Sample) -> str:
    """Return the SHA-256 of the samples of a model's tensors, in hexadecimal."""
    ordered = {name: sorted(values.items()) for name, values in sorted(samples.items())}
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()


def tensor_digests(
    checkpoint: Checkpoint, part: str, progress: Progress | None = None
) -> Iterator[tuple[str, str]]:
    """Yield each tensor of a checkpoint part with the hexadecimal SHA-256 of its dtype, shape and row-major bytes."""
    for name, values in sorted(stored_values(checkpoint, part, progress).items()):
        digest = hashlib.sha256(f"{checkpoint.table(part)[name]}\n".encode())
        for chunk in values.byte_chunks():
            digest.update(memoryview(chunk.numpy()))
        yield name, digest.hexdigest()


def total_digest(digests: Iterable[tuple[str, str]]) -> str:
    """Return one digest over all tensors' digests."""
    lines = (f"{digest}  {name}\n" for name, digest in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints in one tensor."""

    name: str
    description: str


def differences(
    a: Checkpoint, b: Checkpoint, part: str, progress: Progress | None = None
) -> Iterator[Difference]:
    """Yield the names of the tensors of a checkpoint part that are not bitwise identical in both checkpoints."""
    ours, theirs = (c.manifest.tensors.get(part, {}) for c in (a, b))
    for name in sorted(ours.keys() | theirs.keys()):
        if name not in theirs:
            yield Difference(name, "only in the first")
        elif name not in ours:
            yield Difference(name, "only in the second")
        elif str(ours[name]) != str(theirs[name]):
            yield Difference(name, f"{ours[name]} in the first, {theirs[name]} in the second")
        elif description := _compare(a, b, part, name, progress):
            yield Difference(name, description)


def _compare(a: Checkpoint, b: Checkpoint, part: str, name: str, progress: Progress | None) -> str | None:
    different, largest, total = 0, 0.0, 0
    x_blocks = stored_values(a, part, progress)[name].blocks()
    y_blocks = stored_values(b, part)[name].blocks()
    for x, y in zip(x_blocks, y_blocks):
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
