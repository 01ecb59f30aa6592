"""A copy of the servers' weights, so that only changed ones are sent (rl.weight_sync_delta).

Rank 0 keeps a copy of all sent tensors in the host's memory and compares bits. Weights are sent in units. A unit is one
module of a layer, such as layers.3.mlp, because servers fuse the matrices of a module and need all of them. If one of
its tensors has changed, the whole unit is sent. If nothing has changed, the smallest unit is sent, because the version
travels with the weights.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from megalith.bridge.family import Group
from megalith.rl.engines.weight_stream import WeightBucket, unit_of


class SentWeights:
    """Copies, on rank 0, of the tensors that the last update sent."""

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self.smallest: WeightBucket | None = None
        """The unit of the last update with the fewest bytes."""

    def forget(self) -> None:
        """Discard the copies, so that the next update sends everything.

        For use after a server restart or a failed update.
        """
        self._copies.clear()

    def changed(self, bucket: WeightBucket) -> WeightBucket:
        """Return the units of a bucket that have changed since they were last sent, and record them as sent."""
        groups: list[Group] = []
        kept: list[Tensor] = []
        tensors = iter(bucket.tensors)
        for _, members in groupby(bucket.groups, key=unit_of):
            members = list(members)
            named = [(name, next(tensors)) for group in members for name in group.sources]
            has_changed = [
                self._take_note(name, tensor) for name, tensor in named
            ]  # of all, without a shortcut
            whole = WeightBucket(members, bucket.dtype, [tensor for _, tensor in named])
            if self.smallest is None or whole.nbytes <= self.smallest.nbytes:
                self.smallest = whole
            if any(has_changed):
                groups += members
                kept += [tensor for _, tensor in named]
        return WeightBucket(groups, bucket.dtype, kept)

    def _take_note(self, name: str, tensor: Tensor) -> bool:
        """Store a copy of a tensor before it is sent. Return True if it differs bitwise from the previous copy."""
        copy, current = self._copies.get(name), tensor.cpu()
        if copy is not None and copy.shape == current.shape and torch.equal(_bytes(copy), _bytes(current)):
            return False
        self._copies[name] = current.clone() if current is tensor else current
        return True


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.dim() else x[None].view(torch.uint8)
