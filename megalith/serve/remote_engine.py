"""Proxy of the engine in the server process: sends requests to the engine process and receives tokens."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any, Protocol

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.generation.live_request import LiveRequest, OnTokens, check_requests
from megalith.generation.logits_processing import OFF

RequestEvent = tuple[int, list[int], list[float], str | None]
"""Number of a request, new ids, their log-probabilities, and the reason for its end, None before the end."""


@dataclass
class EngineFacts:
    """Attributes of an Engine that the server needs, with the same names."""

    config: ModelConfig
    max_tokens: int
    slots: int
    prefill_tokens: int = 0
    reused_tokens: int = 0


class ServedEngine(Protocol):
    """Interface of an engine for the server. LiveEngine and RemoteEngine implement it."""

    engine: Any
    """An Engine or EngineFacts."""

    def submit(self, requests: Sequence[LiveRequest], on_tokens: Sequence[OnTokens]) -> list[int]:
        """See LiveEngine.submit."""

    def cancel(self, number: int) -> None:
        """See LiveEngine.cancel."""

    def set_adapter(self, slot: int, path: str) -> Future[str | None]:
        """See LiveEngine.set_adapter."""

    @property
    def used_slots(self) -> set[int]:
        """See LiveEngine.used_slots."""


class RemoteEngine:
    """A LiveEngine in another process, at the other end of a connection (HttpProcess)."""

    def __init__(self, connection: Connection, engine: EngineFacts):
        self.engine = engine
        self._connection, self._lock = connection, Lock()
        self._tickets: dict[int, tuple[OnTokens, int]] = {}  # callback and adapter of each open request
        self._adapters: dict[int, Future[str | None]] = {}
        self._next, self._is_closed = 0, False

    def submit(self, requests: Sequence[LiveRequest], on_tokens: Sequence[OnTokens]) -> list[int]:
        """Send requests with the same prompt to the engine (see LiveEngine.submit). `run` calls the callbacks.

        Raises:
            ConfigError: if a request does not fit the engine, or the engine is closed.
        """
        check_requests(requests, self.engine)
        first = self._next
        self._next += len(requests)
        for number, (request, callback) in enumerate(zip(requests, on_tokens, strict=True), first):
            self._tickets[number] = callback, request.adapter
        processing = [None if one.processing is OFF else one.processing.to_json() for one in requests]
        plain = [  # compiled grammars are not sent
            one if values is None else replace(one, processing=OFF)
            for one, values in zip(requests, processing)
        ]
        if not self._send("submit", first, plain, processing):
            for number in range(first, self._next):
                self._tickets.pop(number, None)
            raise ConfigError("the engine is closed; send the request to a running one")
        return list(range(first, self._next))

    def cancel(self, number: int) -> None:
        """End a request without another callback. Has no effect on a request that has ended."""
        if self._tickets.pop(number, None) is not None:
            self._send("cancel", number)

    def set_adapter(self, slot: int, path: str) -> Future[str | None]:
        """Load the adapter in `path`, on the engine's machine, into a slot (see LiveEngine.set_adapter)."""
        future: Future[str | None] = Future()
        self._adapters[slot] = future
        if not self._send("adapter", slot, path):
            self._end_adapters()
        return future

    @property
    def used_slots(self) -> set[int]:
        """Slots of the adapters of open requests."""
        return {adapter for _, adapter in [*self._tickets.values()]}

    def run(self) -> None:
        """Call the callbacks for the engine's messages until it closes. Open requests then end with "closed"."""
        try:
            while (message := self._connection.recv())[0] != "close":
                kind, *values = message
                {"events": self._deliver, "adapter": self._end_adapter}[kind](*values)
        except (EOFError, OSError):
            pass  # the process of the engine has ended
        self._is_closed = True
        tickets, self._tickets = self._tickets, {}
        for on_tokens, _ in tickets.values():
            on_tokens([], [], "closed")
        self._end_adapters()

    def _send(self, *message: Any) -> bool:
        """Send a message to the engine. Return False if it is closed."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                self._connection.send_bytes(pickle.dumps(message))  # faster than `send` for small messages
            except OSError:
                self._is_closed = True
            return not self._is_closed

    def _deliver(self, events: Sequence[RequestEvent], prefill_tokens: int, reused_tokens: int) -> None:
        self.engine.prefill_tokens, self.engine.reused_tokens = prefill_tokens, reused_tokens
        for number, ids, logprobs, reason in events:
            ticket = self._tickets.get(number) if reason is None else self._tickets.pop(number, None)
            if ticket is not None:
                ticket[0](ids, logprobs, reason)

    def _end_adapter(self, slot: int, error: str | None) -> None:
        self._adapters.pop(slot).set_result(error)

    def _end_adapters(self) -> None:
        while self._adapters:
            self._adapters.popitem()[1].set_result("the engine is closed")
