"""The server process: HTTP, chat templates, tokenization and detokenization.

     clients ─▶ process of the server: HttpServer, OpenAiService, RemoteEngine ─▶ process of the engine: LiveEngine
                                                                   ▲                                │
                                                                   └── tokens, once per window ◀────┘

Python runs one thread of a process at a time. A server in a thread of the engine's process would delay the launch of
steps by up to 5 ms, Python's switch interval, whenever both have work.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megalith.child_process import python_command
from megalith.data.chat.chat_template import template_of
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, MegalithError, printable
from megalith.generation.grammar import GrammarCompiler
from megalith.generation.live_request import LiveRequest
from megalith.generation.logits_processing import LogitsProcessing
from megalith.launch.signals import STOP_SIGNALS
from megalith.serve.chat_format import ChatFormat
from megalith.serve.http_server import HttpServer
from megalith.serve.openai_service import Access, OpenAiService
from megalith.serve.remote_engine import EngineFacts, RemoteEngine, RequestEvent
from megalith.serve.served_adapters import ServedAdapter, ServedAdapters

if TYPE_CHECKING:
    from megalith.generation.live_engine import LiveEngine

END_TIMEOUT = 10.0  # seconds for the server to end its connections


@dataclass(frozen=True)
class ServerSettings:
    """Address, model and clients of a server."""

    host: str
    port: int
    """0: a free port."""
    name: str
    """Name of the served model."""
    tokenizer: Tokenizer
    access: Access
    tool_call_format: str = "auto"
    """See ChatFormat."""
    adapters: Sequence[ServedAdapter] = ()
    """Adapters that the engine has in its slots."""
    may_change_adapters: bool = False


class HttpProcess:
    """Context manager for the server process. The process starts its imports immediately; it listens after `start`."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            python_command(main, theirs.fileno()), pass_fds=[theirs.fileno()], env=environment
        )
        theirs.close()
        self._events: list[RequestEvent] = []
        self._outgoing: SimpleQueue[tuple] = SimpleQueue()
        self._request_ids: dict[int, int] = {}  # the engine's ids of open requests, by the server's
        self._lock = Lock()  # of `_request_ids`
        self._has_ended = self._is_listening = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        if not self._is_listening:
            self._process.kill()
        try:
            self._process.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def start(self, settings: ServerSettings, live: LiveEngine) -> str:
        """Listen, and return the server's URL. Requests wait until `run`.

        Raises:
            ConfigError: if the address cannot be used, or the process has ended.
        """
        engine = live.engine
        try:
            self._connection.send((settings, EngineFacts(engine.config, engine.max_tokens, engine.slots)))
            is_listening, text = self._connection.recv()
        except (EOFError, OSError):
            raise self._ended() from None
        if not is_listening:
            raise ConfigError(text)
        self._is_listening = True
        return text

    def run(self, live: LiveEngine) -> None:
        """Run the engine for the server's clients until `live.close`, then end the server.

        Raises:
            ConfigError: if the server's process has ended, for example because it was killed.
        """
        live.on_delivered = partial(self._flush, live)
        sender = Thread(target=self._send_all, name="to the server", daemon=True)
        receiver = Thread(target=self._receive_all, args=(live,), name="from the server", daemon=True)
        for thread in (sender, receiver):
            thread.start()
        try:
            live.run()
        finally:
            self._flush(live)
            self._outgoing.put(("close",))
            sender.join()
            receiver.join(END_TIMEOUT)
        if self._has_ended:
            raise self._ended()

    def _ended(self) -> ConfigError:
        return ConfigError(
            f"the process of the HTTP server ended early (exit status {self._process.wait()}), perhaps killed for "
            "lack of memory, or its traceback is above; start the command again"
        )

    def _flush(self, live: LiveEngine) -> None:
        """Send the collected tokens of a window to the server's process."""
        if self._events:
            events, self._events = self._events, []
            self._put(live, events)

    def _put(self, live: LiveEngine, events: list[RequestEvent]) -> None:
        self._outgoing.put(("events", events, live.engine.prefill_tokens, live.engine.reused_tokens))

    def _send_all(self) -> None:
        try:
            while (message := self._outgoing.get())[0] != "close":
                self._connection.send(message)
            self._connection.send(message)
        except OSError:
            pass  # the process has ended, which the receiver sees

    def _receive_all(self, live: LiveEngine) -> None:
        actions = {"submit": self._submit, "cancel": self._cancel, "adapter": self._set_adapter}
        try:
            while True:
                kind, *values = self._connection.recv()
                actions[kind](live, *values)
        except (EOFError, OSError):
            self._has_ended = not live.is_over
            live.close()

    def _submit(
        self, live: LiveEngine, first: int, requests: list[LiveRequest], processing: list[Any | None]
    ) -> None:
        compile_grammar = live.grammars and live.grammars.compile
        requests = [
            request
            if values is None
            else replace(request, processing=LogitsProcessing.from_json(values, compile_grammar))
            for request, values in zip(requests, processing, strict=True)
        ]
        server_ids = range(first, first + len(requests))
        with self._lock:
            try:
                self._request_ids.update(
                    zip(
                        server_ids,
                        live.submit(requests, [partial(self._add, number) for number in server_ids]),
                    )
                )
            except MegalithError:  # the engine is closed; the server has checked everything else
                self._put(live, [(number, [], [], "closed") for number in server_ids])

    def _add(self, number: int, ids: list[int], logprobs: list[float], reason: str | None) -> None:
        self._events.append((number, ids, logprobs, reason))
        if reason is not None:
            with self._lock:
                self._request_ids.pop(number, None)

    def _cancel(self, live: LiveEngine, number: int) -> None:
        with self._lock:
            engine_number = self._request_ids.pop(number, None)
        if engine_number is not None:
            live.cancel(engine_number)

    def _set_adapter(self, live: LiveEngine, slot: int, path: str) -> None:
        future = live.set_adapter(slot, path)
        future.add_done_callback(lambda done: self._outgoing.put(("adapter", slot, done.result())))


def main(descriptor: int) -> None:
    """Run the server's process. `descriptor` is the server's end of the connection to the engine's process."""
    for number in STOP_SIGNALS:  # the engine's process handles them, and ends this one
        signal.signal(number, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        settings, facts = connection.recv()
    except EOFError:
        return
    engine = RemoteEngine(connection, facts)
    server = HttpServer(_service(settings, engine), settings.host, settings.port, report=_print)
    try:
        server.start()
    except ConfigError as error:
        connection.send((False, str(error)))
        return
    connection.send((True, server.url))
    engine.run()
    server.close()


def _service(settings: ServerSettings, engine: RemoteEngine) -> OpenAiService:
    tokenizer = settings.tokenizer
    template = template_of(tokenizer)
    chat = None if template is None else ChatFormat(tokenizer, template, settings.tool_call_format)
    adapters = ServedAdapters(engine, settings.name, settings.adapters, settings.may_change_adapters)
    grammars = GrammarCompiler(tokenizer)
    return OpenAiService(
        engine, tokenizer, chat, settings.name, settings.access, grammars=grammars, adapters=adapters
    )


def _print(line: str) -> None:
    print(printable(line), flush=True)
