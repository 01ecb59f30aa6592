"""Interface of the cache of earlier tokens, with which generating a token costs the work of one token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor


class Cache(Protocol):
    """Keys and values of the tokens before those of a pass: generation/static_cache.py has two."""

    def at_layer(self, number: int) -> Cache:
        """What a layer gets: the cache of its own keys and values."""

    def attend(self, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
        """What `core` gives with these arguments over the layer's cached tokens and the new ones, which are kept."""

    def convolve(self, x: Tensor, taps: Tensor) -> Tensor:
        """As ops.delta_rule.causal_conv of the new tokens behind the layer's last ones, which are kept."""

    def delta_rule(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, share: Tensor) -> Tensor:
        """As ops.delta_rule.gated_delta_rule of the new tokens behind the layer's state, which is kept."""
