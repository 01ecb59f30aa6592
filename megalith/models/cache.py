"""Interface of the KV cache used in generation, which lets a forward pass process only the new tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """Keys and values of earlier tokens. The implementations are in generation/static_cache.py."""

    def at_layer(self, number: int) -> Cache:
        """Return the cache of one layer."""

    def attend(
        self,
        core: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        chunk: int | None = None,
        **how,
    ) -> Tensor:
        """Store the new keys and values, and return `core`'s attention over the cached and the new ones.

        `chunk` is the length of the chunks that attention stays within; None means no chunks.
        """

    def convolve(self, x: Tensor, taps: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply ops.causal_conv.causal_conv to x, preceded by the layer's last tokens, and store x's last tokens."""

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor) -> Tensor:
        """Apply ops.delta_rule.gated_delta_rule, starting from the layer's state, and store the new state."""

    def state_space(
        self, x: Tensor, step: Tensor, decay: Tensor, b: Tensor, c: Tensor, skip: Tensor
    ) -> Tensor:
        """Apply ops.state_space.state_space, starting from the layer's state, and store the new state."""
