"""Requests to a live engine, possibly in another process. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.errors import ConfigError
from megalith.generation.logits_processing import OFF, LogitsProcessing
from megalith.generation.requests import Sampling, check_prompt

OnTokens = Callable[[list[int], list[float], str | None], None]
"""Callback that receives new ids, their log-probabilities, and the reason of the end (stop, length or closed), None
before the end."""


@dataclass(frozen=True)
class LiveRequest:
    """A prompt, and the settings of its completion (see Sampling)."""

    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    key: int = 0
    """Key of the sampling noise in addition to the seed, 0 to 2^63 - 1. In a batch call it is 2^16 times the prompt's
    key plus the completion's number."""
    ignores_stop: bool = False
    """Continue after stop ids."""
    processing: LogitsProcessing = OFF
    adapter: int = 0
    """Slot of its adapter in the engine. 0: none."""
    reports_once: bool = False
    """Call back once, with all tokens, when the completion ends."""

    @property
    def settings(self) -> tuple[float, float, float, float]:
        """Sampling settings of the request's row."""
        return float(self.temperature), float(self.top_k), float(self.top_p), float(self.min_p)


def check_requests(requests: Sequence[LiveRequest], engine: Any) -> None:
    """Check that an engine can run requests.

    Args:
        requests: requests to be added to the engine.
        engine: has `config`, `max_tokens` and `slots`, like an Engine.

    Raises:
        ConfigError: if a request does not fit the engine.
    """
    for request in requests:
        Sampling(
            request.max_new_tokens, request.temperature, request.top_k, request.top_p, request.min_p, request.seed
        ).check()  # fmt: skip
        request.processing.check(engine.config.vocab_size)
        check_prompt(0, request.prompt, request.max_new_tokens, engine.config, engine.max_tokens)
        if not 0 <= request.adapter <= engine.slots:
            raise ConfigError(
                f"a request names adapter {request.adapter}, but the engine has {engine.slots} slots for "
                "adapters; load the adapter first"
            )
        if not 0 <= request.key < 2**63:
            raise ConfigError(f"the key of a request is {request.key}; it must be from 0 to 2^63 - 1")
