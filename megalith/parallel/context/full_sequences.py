"""Passes over full sequences under context parallelism, such as those of `ParallelModel.__call__`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class ShardedOrFull:
    """A core of attention, a convolution or a recurrence that handles sharded and full sequences.

    Args:
        sharded: computes this rank's tokens of sequences that are sharded over the context axis.
        full: computes full sequences, in passes whose layout has `full_sequence`.
    """

    def __init__(self, sharded: Callable[..., Tensor], full: Callable[..., Tensor]):
        self.sharded, self.full = sharded, full

    def __call__(self, *args, full_sequence: bool = False, **settings) -> Tensor:
        """Call `full` if `full_sequence` is set, otherwise `sharded`."""
        return (self.full if full_sequence else self.sharded)(*args, **settings)
