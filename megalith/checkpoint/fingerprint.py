"""A cheap name for a model's weights: a digest of a few values of each tensor, the same in every layout.

Adapters belong to the weights that they were trained on, which their checkpoints do not hold. A step of training moves
nearly every weight, so a sample of them tells whether a base has been trained on since, or is another; reading all of
it would take as long as loading it. The sample is taken from the weights in memory, each value by a rank that has it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch

from megalith.checkpoint.agree import collect
from megalith.checkpoint.files import byte_view
from megalith.comm.collectives import Axis
from megalith.parallel.shards import Box

VALUES = 16  # of each tensor, evenly over its elements

Sample = dict[str, dict[int, str]]  # by tensor and number: a value's bytes in hexadecimal


def fingerprint(boxes: Mapping[str, Box], world: Axis) -> str | None:
    """The name, on rank 0, of the tensors that the ranks have these boxes of; None on the others.

    Every rank of `world` calls it. The boxes are to be those without rows that only pad the vocabulary.
    """
    own = {name: list(sample(box).items()) for name, box in boxes.items() if box.owned}
    merged: Sample = {}
    for named in collect(own, world):
        for name, values in named.items():
            merged.setdefault(name, {}).update((number, value) for number, value in values)
    return None if world.rank else digest(merged)


def sample(box: Box) -> dict[int, str]:
    """Those of a tensor's VALUES that are in a box of it, by number: their bytes in hexadecimal."""
    count = torch.Size(box.shape).numel()
    numbers, places = [], []
    for number in range(VALUES if count else 0):
        rest, place = (2 * number + 1) * count // (2 * VALUES), []
        for size in reversed(box.shape):
            rest, at = divmod(rest, size)
            place.insert(0, at)
        place = [at - start for at, start in zip(place, box.offset)]
        if all(0 <= at < size for at, size in zip(place, box.values.shape)):
            numbers.append(number)
            places.append(place)
    if not numbers:
        return {}
    index = torch.tensor(places, dtype=torch.int64, device=box.values.device)  # [values, dimensions]
    values = byte_view(box.values[index.unbind(1)].expand(len(numbers)).cpu()).view(len(numbers), -1)
    return {number: bytes(value.tolist()).hex() for number, value in zip(numbers, values)}


def digest(samples: Sample) -> str:
    """SHA-256, in hexadecimal, of the samples of a model's tensors."""
    ordered = {name: sorted(values.items()) for name, values in sorted(samples.items())}
    return hashlib.sha256(json.dumps(ordered).encode()).hexdigest()
