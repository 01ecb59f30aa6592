"""A request queue for an engine's servers, with the interface of generation/live_engine.py.

     submit (any thread) ─▶ queue ─▶ worker threads, one request each ─▶ servers ─▶ callback with the whole completion

An error of a server ends all requests, and `run` raises it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Condition, Thread
from typing import TYPE_CHECKING

from megalith.config import ModelConfig
from megalith.errors import ConfigError, MegalithError
from megalith.generation.live_request import LiveRequest, OnTokens
from megalith.generation.requests import Sampling, check_prompt

if TYPE_CHECKING:
    from megalith.rl.engines.server_engine import ServerEngine

MAX_WORKERS = 256


@dataclass(frozen=True)
class ServerLimits:
    """Attributes of an engine that the endpoint (serve/openai_service.py) needs."""

    max_tokens: int
    prefill_tokens: int = 0
    reused_tokens: int = 0


class ServerRequests:
    """Open requests to the servers of an engine."""

    def __init__(self, engine: ServerEngine, sampling: Sampling, model: ModelConfig, max_tokens: int):
        """Prepare to run.

        Args:
            engine: the servers, with the weights of the current step.
            sampling: stop ids and vocabulary of all requests.
            model: the policy's architecture.
            max_tokens: maximum length of a prompt with its completion.
        """
        self.engine = ServerLimits(max_tokens)
        self._servers, self._sampling, self._model = engine, sampling, model
        self._queue: SimpleQueue[tuple[int, LiveRequest] | None] = SimpleQueue()
        self._tickets: dict[int, OnTokens] = {}
        self._next, self._workers = 0, 0
        self._is_over = False
        self._error: Exception | None = None
        self._changed = Condition()

    def submit(self, requests: Sequence[LiveRequest], on_tokens: Sequence[OnTokens]) -> list[int]:
        """Queue requests and return their numbers; see LiveEngine.submit.

        Raises:
            ConfigError: if a request is longer than `max_tokens`, or the engine is closed.
        """
        for request in requests:
            self._sampling_of(request).check()
            check_prompt(0, request.prompt, request.max_new_tokens, self._model, self.engine.max_tokens)
        with self._changed:
            if self._is_over:
                raise ConfigError("the engine is closed; send the request to a running one")
            request_ids = list(range(self._next, self._next + len(requests)))
            self._next += len(requests)
            self._tickets.update(zip(request_ids, on_tokens, strict=True))
            for entry in zip(request_ids, requests):
                self._queue.put(entry)
            missing = min(len(self._tickets), MAX_WORKERS) - self._workers
            for _ in range(missing):
                Thread(target=self._work, daemon=True, name="request to a server").start()
            self._workers += max(missing, 0)
        return request_ids

    def cancel(self, number: int) -> None:
        """Discard the result of a request. The server may still complete it."""
        with self._changed:
            self._tickets.pop(number, None)

    def close(self) -> None:
        """Make `run` return. Pending requests end with the reason "closed"."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def run(self) -> None:
        """Process requests until `close` is called.

        Raises:
            ServerLost: if the requests can be repeated after another update of the weights.
            TrainingError: if a server fails or returns something invalid.
        """
        try:
            self._servers.require_versions()
            with self._changed:
                self._changed.wait_for(lambda: self._is_over)
            if self._error is None:
                self._servers.require_versions()
        finally:
            self._end_all()
        if self._error is not None:
            raise self._error

    def _end_all(self) -> None:
        with self._changed:
            self._is_over = True
            tickets, self._tickets = self._tickets, {}
            for _ in range(self._workers):
                self._queue.put(None)
        for on_tokens in tickets.values():
            on_tokens([], [], "closed")

    def _sampling_of(self, request: LiveRequest) -> Sampling:
        stop = () if request.ignores_stop else self._sampling.stop
        return Sampling(
            request.max_new_tokens, request.temperature, request.top_k, request.top_p, request.min_p, request.seed,
            stop=stop, vocab_size=self._sampling.vocab_size,
        )  # fmt: skip

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            number, request = entry
            if number not in self._tickets:
                continue
            try:
                done = self._servers.sample(
                    request.prompt, self._sampling_of(request), key=request.key, number=number
                )
            except (MegalithError, OSError, RuntimeError) as error:
                with self._changed:
                    self._error, self._is_over = self._error or error, True
                    self._changed.notify_all()
                return
            with self._changed:
                on_tokens = self._tickets.pop(number, None)
            if on_tokens is not None:
                on_tokens(done.ids, done.logprobs, "length" if done.truncated else "stop")
