"""JSON requests to an engine's server, with time limits and readable errors.

The servers use plain HTTP without authentication, so run them on this machine or in the job's private network.
Responses have a size limit. Redirects are not followed, because another host would receive the prompts.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http.client import HTTPException, IncompleteRead
from typing import Any
from urllib.parse import urlsplit

from megalith.errors import TrainingError
from megalith.rl.engines.deadline import Deadline, InThread

PIECE = 1 << 16  # bytes per read
MAX_BYTES = 64 << 20  # of a response without completions
TOKEN_BYTES = 1 << 10  # per completion token: id, text and log-probability
POLL_SECONDS = 0.2  # between requests to a server that is starting
SHOWN = 300  # characters of a server's error message
NO_ENGINE = ", which no engine does; {} may be the address of another program"
NOT_UP = (
    502,
    503,
)  # status while a server loads or after its engine died; also from a proxy without a server


class ServerLost(TrainingError):
    """Raised if a server has crashed, restarted or is not up.

    The run can continue once it is up and has the weights again.
    """


class RequestRefused(TrainingError):
    """Raised if the server answers with an error. `status` is the HTTP status."""

    def __init__(self, *sentences: str, status: int = 0):
        super().__init__(*sentences)
        self.status = status


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class JsonServer:
    """Client of an HTTP server at `url`.

    Errors quote the server program, `name`, and the config key of its address, `setting`.
    """

    def __init__(self, url: str, name: str, setting: str = "rl.engine_url"):
        parts = urlsplit(url)
        self.url, self.host, self.name, self.setting = url.rstrip("/"), parts.hostname, name, setting
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def __str__(self) -> str:
        return f"{self.name} at {self.url}"

    def get(self, path: str, deadline: Deadline) -> Any:
        return self._request("GET", path, None, deadline)

    def post(self, path: str, body: Any, deadline: Deadline, completion_bytes: int = 0) -> Any:
        """Post `body` as JSON and return the response. `completion_bytes` is added to the maximum response size."""
        return self._request(
            "POST", path, json.dumps({} if body is None else body).encode(), deadline, completion_bytes
        )

    def wait_until_up(self, deadline: Deadline, path: str = "/health") -> None:
        """Wait for a server that is starting or restarting. Raise TrainingError at the deadline."""
        while True:
            try:
                self.get(path, deadline)
                return
            except ServerLost as lost:
                if deadline.left() <= 2 * POLL_SECONDS:
                    raise TrainingError(
                        f"{lost}; stopped waiting after {deadline.seconds:g} s ({deadline.setting})"
                    ) from None
            time.sleep(POLL_SECONDS)

    def _request(
        self, method: str, path: str, body: bytes | None, deadline: Deadline, completion_bytes: int = 0
    ) -> Any:
        """Return the response body, parsed if it is JSON, otherwise as text."""
        request, max_bytes = f"{method} {path.partition('?')[0]}", MAX_BYTES + completion_bytes
        thread = InThread(lambda: self._response(method, path, body, request, deadline, max_bytes))
        if not thread.wait(deadline.left()):
            raise self._late(request, deadline)
        content = thread.result()
        try:
            return json.loads(content)
        except RecursionError:
            raise TrainingError(
                f"{self} answers {request} with JSON nested too deeply to read{NO_ENGINE.format(self.setting)}"
            ) from None
        except ValueError:
            return content.decode("utf-8", errors="replace")

    def _response(
        self, method: str, path: str, body: bytes | None, request: str, deadline: Deadline, max_bytes: int
    ) -> bytes:
        """Return the bytes of the response. A socket's time-out does not limit the duration of a slow response; the
        deadline of the calling thread does.
        """
        http_request = urllib.request.Request(self.url + path, body, method=method)
        http_request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(http_request, timeout=deadline.left()) as answer:
                return self._read(answer, request, deadline, max_bytes)
        except urllib.error.HTTPError as error:
            raise self._refusal(error, request) from None
        except TimeoutError:
            raise self._late(request, deadline) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._late(request, deadline) from None
            raise ServerLost(
                f"{self} cannot be reached for {request} ({error.reason}): it is not running, or "
                f"still starting; start it, or correct {self.setting}"
            ) from None
        except (OSError, HTTPException) as error:
            raise ServerLost(
                f"{self} closed the connection during {request} ({type(error).__name__}), so it stopped or was "
                "restarted; look at its log, and start it again"
            ) from None

    def _read(self, answer: Any, request: str, deadline: Deadline, max_bytes: int) -> bytes:
        pieces, size = [], 0
        while piece := answer.read1(PIECE):
            pieces.append(piece)
            size += len(piece)
            if deadline.is_over:
                raise self._late(request, deadline)
            if size > max_bytes:
                raise TrainingError(
                    f"{self} answers {request} with more than {max_bytes:,} bytes{NO_ENGINE.format(self.setting)}"
                )
        if answer.length:  # bytes missing, by its Content-Length
            raise IncompleteRead(b"".join(pieces), answer.length)
        return b"".join(pieces)

    def _late(self, request: str, deadline: Deadline) -> TrainingError:
        return TrainingError(
            f"{self} has not answered {request} within {deadline.seconds:g} s ({deadline.setting}); look at the "
            f"server's log, or raise {deadline.setting}"
        )

    def _refusal(self, error: urllib.error.HTTPError, request: str) -> TrainingError:
        if 300 <= error.code < 400:
            target = f"{error.headers.get('Location')}"[:SHOWN]
            return TrainingError(
                f"{self} redirects {request} to {target}, but redirects are not followed; set {self.setting} to the "
                "engine's own address"
            )
        try:
            message = " ".join(error.read(PIECE).decode("utf-8", errors="replace").split())
        except (OSError, HTTPException):
            message = ""
        sentence = f"{self} refuses {request} with {error.code}: {message[:SHOWN] or error.reason}"
        if error.code in NOT_UP:
            return ServerLost(f"{sentence}; look at its log, and start it again")
        return RequestRefused(sentence, status=error.code)
