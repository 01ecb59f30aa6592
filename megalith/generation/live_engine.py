"""An engine that accepts requests at any time, from any thread, over tensor-parallel replicas.

     submit, cancel (any thread) ─▶ first rank: commands ─▶ all ranks: one window of steps ─▶ tokens to the first rank
                                       ▲                                                              │
                                       └──────────────────── callbacks ◀──────────────────────────────┘

The first rank calls `run`, the others `follow`. Before each window, the first rank sends the new requests and the
cancelled ones to all; each replica runs the requests that are assigned to it. A completion depends on the weights and
on its request's seed and key, not on the other requests, their order or the layout.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition
from typing import Any, get_args

from torch import Tensor

from megalith.comm.collectives import Axis, gather_json
from megalith.errors import ConfigError, MegalithError
from megalith.generation.engine import Engine
from megalith.generation.grammar import GrammarCompiler
from megalith.generation.live_request import LiveRequest, OnTokens, check_requests
from megalith.generation.logits_processing import OFF, LogitsProcessing
from megalith.generation.noise_keys import noise_key
from megalith.generation.requests import RowSequence, Sampling
from megalith.generation.running_batch import KvCache, RunningBatch
from megalith.generation.window_length import WindowLength

HEARTBEAT = 20.0  # seconds after which idle ranks exchange a message, so that no collective times out
WARM_UP_TOKENS = 4  # minimum of the sequences that `warm_up` runs, with the sampled one
WARM_UP_PASSES = 16, 64, 256, 1024, 4096  # tokens of the prefill passes that it runs

LoadAdapter = Callable[[str], Mapping[str, tuple[Tensor, Tensor]]]
"""Function that returns the A and B of the adapter in a folder, as `Engine.set_adapter` takes them."""


@dataclass
class _Ticket:
    """An open request, as the first rank records it."""

    on_tokens: OnTokens
    replica: int
    adapter: int


@dataclass
class _Inbox:
    """Requests and changes that have arrived since the last window."""

    added: list[tuple[int, int, LiveRequest, OnTokens]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    weights: list[Any] | None = None  # version, and KvCache
    adapters: list[tuple[int, str, Future]] = field(default_factory=list)  # slot, path, its error or None


class LiveEngine:
    """Runs requests of any thread on an engine, together with the other ranks."""

    def __init__(
        self,
        engine: Engine,
        stop: Sequence[int] = (),
        vocab_size: int | None = None,
        group: Axis = Axis(),  # noqa: B008 (immutable)
        grammars: GrammarCompiler | None = None,
        load_weights: Callable[[int], None] | None = None,
        load_adapter: LoadAdapter | None = None,
    ):
        """Prepare to run.

        Args:
            engine: this rank's engine.
            stop: ids that end a completion; they are part of it.
            vocab_size: sample only token ids below this. Default: all.
            group: the ranks that run together, one or more replicas of the engine's tensor-parallel axis.
            grammars: compiles the requests' grammars. Default: requests have none.
            load_weights: loads this rank's weights of a version into the engine, for `update_weights`. Every rank calls
                it between the same two windows.
            load_adapter: reads an adapter for `set_adapter`. Default: adapters cannot be changed.
        """
        self._load_weights = load_weights
        self.sampled_version = engine.version
        """Version of the weights that sampled the ids of the current callback."""
        self.grammars = grammars
        self.on_delivered: Callable[[], None] = lambda: None
        """Called by the thread of `run` after the callbacks of a window."""
        self.engine, self._load_adapter = engine, load_adapter
        self._stop, self._group = frozenset(stop), group
        self._sampling = Sampling(stop=tuple(stop), vocab_size=vocab_size, by_row=True)
        self._replicas = max(1, group.size // engine.tp.size)
        self._replica = group.rank // engine.tp.size
        self._sequences: dict[int, RowSequence] = {}  # of this replica
        self._tickets: dict[int, _Ticket] = {}  # first rank: open requests
        self._inbox, self._next, self._is_over = _Inbox(), 0, False
        self._futures: list[Future] = []  # first rank: of the adapters that the next window loads
        self._changed = Condition()

    def submit(self, requests: Sequence[LiveRequest], on_tokens: Sequence[OnTokens]) -> list[int]:
        """Queue requests with the same prompt, which is prefilled once. Returns the requests' numbers.

        Args:
            requests: the requests.
            on_tokens: one callback per request, called by the thread of `run`.

        Raises:
            ConfigError: if a request does not fit the engine, or the engine is closed.
        """
        check_requests(requests, self.engine)
        with self._changed:
            if self._is_over:
                raise ConfigError("the engine is closed; send the request to a running one")
            request_ids = list(range(self._next, self._next + len(requests)))
            self._next += len(requests)
            for number, request, callback in zip(request_ids, requests, on_tokens, strict=True):
                self._inbox.added.append((number, request_ids[0], request, callback))
            self._changed.notify()
        return request_ids

    def cancel(self, number: int) -> None:
        """End a request without another callback. Has no effect on one that has ended."""
        with self._changed:
            self._inbox.cancelled.append(number)
            self._changed.notify()

    def update_weights(self, version: int, kv_cache: KvCache = "recompute") -> None:
        """Load weights of version `version` before the next window (see RunningBatch.update_weights).

        Any thread may call it.

        Open requests continue with the new weights. An update that has not been loaded yet is replaced.

        Raises:
            ConfigError: the engine has no `load_weights`, or `kv_cache` is neither keep nor recompute.
        """
        if self._load_weights is None:
            raise ConfigError(
                "this LiveEngine cannot load other weights; pass it `load_weights`, a function "
                "that loads the weights of a version"
            )
        if kv_cache not in get_args(KvCache):
            raise ConfigError(f"kv_cache is {kv_cache}; choose {' or '.join(get_args(KvCache))}")
        with self._changed:
            self._inbox.weights = [version, kv_cache]
            self._changed.notify()

    def set_adapter(self, slot: int, path: str) -> Future[str | None]:
        """Load the adapter in `path` into a slot between two windows. No open request may use the slot.

        Returns:
            A future: None, or the reason why a rank could not load it.
        """
        future: Future[str | None] = Future()
        with self._changed:
            if self._is_over:
                future.set_result("the engine is closed")
            else:
                self._inbox.adapters.append((slot, path, future))
                self._changed.notify()
        return future

    @property
    def used_slots(self) -> set[int]:
        """Slots of the adapters of open requests."""
        with self._changed:
            waiting = {request.adapter for _, _, request, _ in self._inbox.added}
            return waiting | {ticket.adapter for ticket in [*self._tickets.values()]}

    def close(self) -> None:
        """Let `run` return after the current window. Open requests end with the reason "closed"."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    @property
    def is_over(self) -> bool:
        """True once the engine is closed."""
        return self._is_over

    @property
    def open_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._tickets) + len(self._inbox.added)

    def warm_up(self) -> None:
        """Compile the layers, capture the CUDA graphs of decode steps, and run prefill passes of several sizes.

        Collective over all ranks, before any request.

        Otherwise the first requests would wait for this, and for libraries that load the kernels of a size when it
        first occurs. It changes no sample.
        """
        if self.engine.max_tokens < WARM_UP_TOKENS:
            return
        for top_p in (1.0, 0.5):  # steps without and with filters
            self._run_alone([[0] * (WARM_UP_TOKENS - 1)], top_p)
        vocab_size = self.engine.config.vocab_size
        for size in WARM_UP_PASSES:
            length = min(size, self.engine.max_tokens - 1)
            rows = min(size // length, self.engine.max_rows)
            for second in (0, 1):  # the second pass may reuse the first half of the first
                halves = [(row % vocab_size, (row + second) % vocab_size) for row in range(rows)]
                rest = length - length // 2
                self._run_alone([[one] * (length // 2) + [other] * rest for one, other in halves])
        self.engine.take_prefill_tokens()
        self.engine.take_draft_metrics()

    def _run_alone(self, prompts: Sequence[list[int]], top_p: float = 1.0) -> None:
        """Sample a token after each prompt."""
        sequences = [RowSequence(at, ids, at, 0, 1, frozenset()) for at, ids in enumerate(prompts)]
        for sequence in sequences:
            sequence.sampling = (1.0, 0, top_p, 0)
        batch = RunningBatch(self.engine, self._sampling)
        batch.add(sequences)
        while batch.is_busy:
            batch.step()

    def run(self) -> None:
        """Run requests until `close`. Call it on the first rank only."""
        batch, length = RunningBatch(self.engine, self._sampling), WindowLength(self.engine.window)
        try:
            while not self._is_over:
                commands = self._commands(batch) | {"steps": length.steps}
                waits, began = self.engine.wait_seconds, time.perf_counter()
                self._window(batch, commands)
                length.record(self.engine.wait_seconds - waits, time.perf_counter() - began)
            self._window(batch, {"is_over": True})
        finally:
            self._is_over = True
            self._end_all()

    def follow(self) -> None:
        """Run the commands that the first rank sends. The other ranks call it."""
        batch = RunningBatch(self.engine, self._sampling)
        while not self._window(batch, None):
            pass

    def _commands(self, batch: RunningBatch) -> dict[str, Any]:
        """Return the commands that have arrived since the last window. Waits for one if there are no open requests."""
        with self._changed:
            is_idle = not self._tickets and not batch.is_busy and not self._inbox.added
            has_change = self._inbox.cancelled or self._inbox.weights or self._inbox.adapters
            if is_idle and not has_change and not self._is_over:
                self._changed.wait(HEARTBEAT)
            inbox, self._inbox = self._inbox, _Inbox()
            self._futures = [future for _, _, future in inbox.adapters]
            cancelled = set(inbox.cancelled)
            load = Counter(ticket.replica for ticket in self._tickets.values()) if inbox.added else Counter()
            added = [
                self._assigned(load, *entry) for entry in inbox.added if entry[0] not in cancelled
            ]  # fmt: skip
        for number in cancelled:
            self._tickets.pop(number, None)
        adapters = [[slot, path] for slot, path, _ in inbox.adapters]
        commands = {"added": added, "cancelled": sorted(cancelled), "adapters": adapters, "is_over": False}
        return commands if inbox.weights is None else commands | {"weights": inbox.weights}

    def _assigned(
        self, load: Counter[int], number: int, prompt: int, request: LiveRequest, on_tokens: OnTokens
    ) -> list[Any]:
        """Assign a request to the replica with the fewest open requests according to `load`. Return the request's
        fields as JSON.
        """
        replica = min(range(self._replicas), key=lambda one: load[one])
        load[replica] += 1
        self._tickets[number] = _Ticket(on_tokens, replica, request.adapter)
        noise = noise_key(request.seed, request.key)
        limit, ids = request.max_new_tokens, list(map(int, request.prompt))
        processing = None if request.processing is OFF else request.processing.to_json()
        return [
            replica,
            number,
            prompt,
            ids,
            limit,
            request.settings,
            noise,
            request.ignores_stop,
            processing,
            request.adapter,
            request.reports_once,
        ]

    def _window(self, batch: RunningBatch, commands: dict[str, Any] | None) -> bool:
        """Run one window on every rank. Return True if it was the last one."""
        if self._group.size > 1:
            commands = gather_json(commands, self._group)[0]
        if commands["is_over"]:
            for sequence in self._sequences.values():
                batch.cancel(sequence)
            self._sequences.clear()
            return True
        for number in commands["cancelled"]:
            if (sequence := self._sequences.pop(number, None)) is not None:
                batch.cancel(sequence)
        if "weights" in commands:
            self._update(batch, *commands["weights"])
        if commands["adapters"]:
            self._change_adapters(commands["adapters"])
        for (
            replica,
            number,
            prompt_index,
            ids,
            limit,
            settings,
            noise,
            ignores_stop,
            values,
            adapter,
            reports_once,
        ) in commands["added"]:
            if replica == self._replica:
                stop = frozenset() if ignores_stop else self._stop
                sequence = RowSequence(number, ids, prompt_index, 0, limit, stop, noise=noise)
                sequence.sampling, sequence.adapter = tuple(settings), adapter
                sequence.reports_once = reports_once
                if values is not None:
                    compile_grammar = None if self.grammars is None else self.grammars.compile
                    sequence.processing = LogitsProcessing.from_json(values, compile_grammar)
                    sequence.masks = sequence.processing.masks()
                self._sequences[number] = sequence
                batch.add([sequence])
        self._deliver(self._events(batch.step(commands["steps"])))
        return False

    def _change_adapters(self, changes: Sequence[Sequence[Any]]) -> None:
        """Load adapters on every rank, and set the results of the first rank's futures."""
        for number, (slot, path) in enumerate(changes):
            error = None
            try:
                self.engine.set_adapter(slot, self._load_adapter(path))
            except (MegalithError, OSError) as raised:
                error = str(raised)
            errors = gather_json(error, self._group) if self._group.size > 1 else [error]
            if self._group.rank == 0:
                self._futures[number].set_result(next((one for one in errors if one is not None), None))

    def _update(self, batch: RunningBatch, version: int, kv_cache: KvCache) -> None:
        """Load weights, and deliver the tokens that were sampled with the earlier weights."""

        def load() -> None:
            self._load_weights(version)
            self.engine.version = version

        self._deliver(self._events(batch.update_weights(load, kv_cache)))

    def _events(self, added: list[tuple[RowSequence, list[int]]]) -> list[list[Any]]:
        """Return on the first rank the events of all replicas: each request's new tokens and, if it has ended, the
        reason.
        """
        events = []
        for sequence, ids in added:
            reason = None
            if sequence.ended:
                reason = "stop" if sequence.stopped else "length"
                self._sequences.pop(sequence.number, None)
            if sequence.reports_once:
                if reason is None:
                    continue
                ids = sequence.ids
            begin = len(sequence.ids) - len(ids)
            version = sequence.versions[-1] if ids else self.engine.version
            events.append([sequence.number, ids, sequence.logprobs[begin:], reason, version])
        if self._replicas == 1:
            return events
        mine = events if self.engine.tp.rank == 0 else []
        return [event for share in gather_json(mine, self._group, to_first=True) for event in share]

    def _deliver(self, events: list[list[Any]]) -> None:
        """Call the callbacks of the requests with these events. Only the first rank has open requests."""
        for number, ids, logprobs, reason, version in events:
            ticket = self._tickets.get(number)
            if ticket is not None:
                self.sampled_version = version
                if reason is not None:
                    del self._tickets[number]
                ticket.on_tokens(ids, logprobs, reason)
        self.on_delivered()

    def _end_all(self) -> None:
        tickets, self._tickets = self._tickets, {}
        with self._changed:
            inbox, self._inbox = self._inbox, _Inbox()
        for future in [*self._futures, *(future for _, _, future in inbox.adapters)]:
            if not future.done():
                future.set_result("the engine is closed")
        for on_tokens in [ticket.on_tokens for ticket in tickets.values()] + [one[3] for one in inbox.added]:
            on_tokens([], [], "closed")
