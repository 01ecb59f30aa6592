"""An HTTP/1.1 server on asyncio, with bounded requests, in a thread of its own.

It has what an API for JSON needs: bodies with a Content-Length, keep-alive, and responses as a whole or in chunks.
Everything that a client decides is bounded: connections, sizes of heads and bodies, and the time to send and receive
them. A client that leaves cancels its handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from megalith.errors import ConfigError

MAX_HEAD = 1 << 16  # bytes of request line and headers
READ = 1 << 16
CONTENT_TYPE = "application/json"
EVENTS = "text/event-stream"


@dataclass(frozen=True)
class Limits:
    """Bounds on the clients' use of the server."""

    max_connections: int = 1024
    max_body: int = 16 << 20
    """Bytes of a request's body."""
    seconds: float = 60.0
    """Time for a client to send a request, and to receive a part of the response."""


@dataclass(frozen=True)
class HttpRequest:
    """A request. Names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass(frozen=True)
class HttpResponse:
    """A response: a JSON value, or chunks that are sent as they arrive. `first` is sent before them."""

    value: Any = None
    status: int = 200
    parts: AsyncGenerator[bytes] | None = None
    first: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class HttpError(Exception):
    """An HTTP error response to the client: its status and message."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status, self.message = status, message

    def response(self) -> HttpResponse:
        """Return the error as a response in OpenAI's format."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": None, "code": self.status}
        return HttpResponse({"error": error}, self.status)


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class HttpServer:
    """A server that listens from `start` to `close`."""

    def __init__(
        self,
        handle: Handler,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: Limits = Limits(),
        report: Callable[[str], None] = lambda line: None,
    ):
        """Prepare to listen.

        Args:
            handle: answers a request, or raises HttpError. It is cancelled if the client leaves.
            host: address to listen on.
            port: port; 0: a free one.
            limits: bounds on the clients' use.
            report: called with a line for each internal error.
        """
        self._handle, self._limits, self._report = handle, limits, report
        self._host, self.port = host, port
        self._connections = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="http server", daemon=True)
        self._server: asyncio.Server | None = None

    @property
    def url(self) -> str:
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.port}"

    def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: if the address cannot be used.
        """
        self._thread.start()
        listening = asyncio.start_server(self._serve, self._host, self.port, limit=READ)
        try:
            self._server = asyncio.run_coroutine_threadsafe(listening, self.loop).result()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the server cannot listen on {self._host}:{self.port} ({error.strerror or error}); choose another "
                "address or port"
            ) from None
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Stop listening and end all connections."""

        async def end() -> None:
            if self._server is not None:
                self._server.close()
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.loop.shutdown_default_executor()

        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(end(), self.loop).result()
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()
        self.loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _Connection(reader, writer, self._limits)
        self._connections += 1
        try:
            if self._connections > self._limits.max_connections:
                await connection.send(
                    HttpError(503, "there are too many connections; try again later").response()
                )
                return
            while await self._serve_one(connection):
                pass
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client has left, or is too slow
        except asyncio.CancelledError:
            pass  # the server closes
        finally:
            self._connections -= 1
            writer.close()

    async def _serve_one(self, connection: _Connection) -> bool:
        """Answer a request. Return False if the connection ends with it."""
        try:
            request = await connection.receive()
        except HttpError as error:
            await connection.send(error.response())
            return False
        if request is None:
            return False
        handler = asyncio.ensure_future(self._answer(connection, request))
        watch = asyncio.ensure_future(connection.wait_for_end())
        try:
            await asyncio.wait({handler, watch}, return_when=asyncio.FIRST_COMPLETED)
            return handler.done() and handler.result() and connection.keeps_alive
        finally:
            for task in (handler, watch):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError, TimeoutError):
                    await task

    async def _answer(self, connection: _Connection, request: HttpRequest) -> bool:
        """Send the handler's response. Return False if it could not be completed."""
        try:
            response = await self._handle(request)
        except HttpError as error:
            response = error.response()
        except Exception as error:
            self._report(f"{request.method} {request.path} failed with {type(error).__name__}: {error}")
            response = HttpError(500, "the server failed; see its log").response()
        try:
            await connection.send(response)
        except (OSError, asyncio.CancelledError):
            raise
        except Exception as error:  # of the parts: the response is cut, which the client sees
            self._report(f"{request.method} {request.path} failed with {type(error).__name__}: {error}")
            return False
        return True


class _Connection:
    """A connection of a client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits):
        self._reader, self._writer, self._limits = reader, writer, limits
        self._buffer = bytearray()
        self.keeps_alive = True

    async def wait_for_end(self) -> None:
        """Return when the client has closed the connection. Data that the client sends before that is kept for the next
        request.
        """
        while len(self._buffer) < MAX_HEAD:
            piece = await self._reader.read(READ)
            if not piece:
                return
            self._buffer += piece
        await asyncio.Event().wait()  # it sends without waiting for responses: no longer watched

    async def receive(self) -> HttpRequest | None:
        """Return the next request, or None if the client has closed the connection.

        Raises:
            HttpError: if it is malformed or exceeds a limit.
        """
        async with asyncio.timeout(self._limits.seconds):
            while (end := self._buffer.find(b"\r\n\r\n")) < 0 and len(self._buffer) <= MAX_HEAD:
                if not await self._read():
                    return None
            if not 0 <= end <= MAX_HEAD:
                raise HttpError(431, f"the request has more than {MAX_HEAD:,} bytes of headers")
            head, self._buffer = bytes(self._buffer[:end]), self._buffer[end + 4 :]
            method, path, headers = _parse_head(head)
            self.keeps_alive = headers.get("connection", "").lower() != "close" and self.keeps_alive
            length = _content_length(headers)
            if length > self._limits.max_body:
                raise HttpError(
                    413, f"the body has {length:,} bytes, but at most {self._limits.max_body:,} are accepted"
                )
            if headers.get("expect", "").lower() == "100-continue":
                self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            while len(self._buffer) < length:
                if not await self._read():
                    return None
        body, self._buffer = bytes(self._buffer[:length]), self._buffer[length:]
        return HttpRequest(method, path, headers, body)

    async def _read(self) -> bool:
        piece = await self._reader.read(READ)
        self._buffer += piece
        return bool(piece)

    async def send(self, response: HttpResponse) -> None:
        """Send a response."""
        headers = {"Connection": "keep-alive" if self.keeps_alive else "close", **response.headers}
        if response.parts is None:
            body = b"" if response.value is None else json.dumps(response.value).encode()
            headers |= {"Content-Type": CONTENT_TYPE, "Content-Length": str(len(body))}
            await self._write(_head(response.status, headers) + body)
            return
        headers |= {"Content-Type": EVENTS, "Cache-Control": "no-cache", "Transfer-Encoding": "chunked"}
        async with contextlib.aclosing(response.parts) as parts:
            await self._write(_head(response.status, headers) + _chunk(response.first))
            async for part in parts:
                await self._write(_chunk(part))
            await self._write(b"0\r\n\r\n")

    async def _write(self, content: bytes) -> None:
        self._writer.write(content)
        transport = self._writer.transport
        if not transport.get_write_buffer_size() and not transport.is_closing():
            return  # the system has taken all of it
        async with asyncio.timeout(self._limits.seconds):
            await self._writer.drain()


def _parse_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Return method, path and headers."""
    line, *lines = head.decode("latin-1").split("\r\n")
    parts = line.split(" ")
    if len(parts) != 3 or parts[2] != "HTTP/1.1":
        raise HttpError(400, f"the request line is {line!r:.60}; send METHOD PATH HTTP/1.1")
    headers: dict[str, str] = {}
    for each in lines:
        name, colon, value = each.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name in headers and name == "content-length"):
            raise HttpError(400, f"the header {each!r:.60} is malformed or repeated; send NAME: VALUE once")
        headers[name] = value.strip()
    try:
        path = urlsplit(parts[1]).path
    except ValueError:
        raise HttpError(400, f"the path {parts[1]!r:.60} is not valid; correct it") from None
    return parts[0], path, headers


def _content_length(headers: dict[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise HttpError(411, "the body has no Content-Length; send it unchunked, with a Content-Length")
    value = headers.get("content-length", "0")
    if not (value.isascii() and value.isdigit() and len(value) < 19):
        raise HttpError(
            400,
            f"Content-Length is {value!r:.40}, which is not a number; send the length of the body in bytes",
        )
    return int(value)


def _chunk(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part) if part else b""


def _head(status: int, headers: dict[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
