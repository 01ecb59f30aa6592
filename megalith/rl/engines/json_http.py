"""Requests to an engine's server: JSON both ways, each within a time-out, each failure a sentence.

Plain HTTP without a password, as these servers speak it: for this machine or a network that only the job is in. An
answer is bounded, and a redirect is not followed: another host would get the prompts, and its answer would be taken.
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

PIECE = 1 << 16  # bytes of an answer that are read at a time
MOST_BYTES = 64 << 20  # of an answer without completions
TOKEN_BYTES = 1 << 10  # of each token of a completion: its id and text, its log-probability by both
POLL_SECONDS = 0.2  # between two looks at a server that is not there yet
SHOWN = 300  # characters of a server's own words
ANOTHER = ", which no engine does; rl.engine_url may name another program"
NOT_UP = (
    502,
    503,
)  # what a server says that loads or whose engine has died, and a proxy before one that is not there


class ServerLost(TrainingError):
    """A server has died, is not up, or was restarted: once it is there and has the weights again, a run can go on."""


class RequestRefused(TrainingError):
    """The server answered with an error. `status` is HTTP's."""

    def __init__(self, *sentences: str, status: int = 0):
        super().__init__(*sentences)
        self.status = status


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class JsonServer:
    """An HTTP server at `url`. `name` is what it is, for errors."""

    def __init__(self, url: str, name: str):
        parts = urlsplit(url)
        self.url, self.host, self.name = url.rstrip("/"), parts.hostname, name
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)

    def __str__(self) -> str:
        return f"{self.name} at {self.url}"

    def get(self, path: str, deadline: Deadline) -> Any:
        return self._ask("GET", path, None, deadline)

    def post(self, path: str, body: Any, deadline: Deadline, tokens: int = 0) -> Any:
        """Return the answer, which may have so many `tokens` of completions."""
        return self._ask("POST", path, json.dumps({} if body is None else body).encode(), deadline, tokens)

    def wait_until_up(self, deadline: Deadline, path: str = "/health") -> None:
        """Waits for a server that is starting, or starts again. Raises TrainingError for one that does not come."""
        while True:
            try:
                self.get(path, deadline)
                return
            except ServerLost as lost:
                if deadline.left() <= 2 * POLL_SECONDS:
                    raise TrainingError(
                        f"{lost}; it was waited for during {deadline.seconds:g} s ({deadline.setting})"
                    ) from None
            time.sleep(POLL_SECONDS)

    def _ask(self, method: str, path: str, body: bytes | None, deadline: Deadline, tokens: int = 0) -> Any:
        """What the answer says: JSON, or text where it is none."""
        what, most = f"{method} {path.partition('?')[0]}", MOST_BYTES + tokens * TOKEN_BYTES
        asking = InThread(lambda: self._answered(method, path, body, what, deadline, most))
        if not asking.is_over(deadline.left()):
            raise self._late(what, deadline)
        said = asking.result()
        try:
            return json.loads(said)
        except RecursionError:
            raise TrainingError(
                f"{self} answers {what} with JSON nested too deeply to read{ANOTHER}"
            ) from None
        except ValueError:
            return said.decode("utf-8", errors="replace")

    def _answered(
        self, method: str, path: str, body: bytes | None, what: str, deadline: Deadline, most: int
    ) -> bytes:
        """An answer's bytes. A server that trickles them may hold it up for ever, within the socket's time-out."""
        request = urllib.request.Request(self.url + path, body, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with self._opener.open(request, timeout=deadline.left()) as answer:
                return self._read(answer, what, deadline, most)
        except urllib.error.HTTPError as error:
            raise self._refusal(error, what) from None
        except TimeoutError:
            raise self._late(what, deadline) from None
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise self._late(what, deadline) from None
            raise ServerLost(
                f"{self} cannot be reached for {what} ({error.reason}): it does not run, or not yet; start it, or "
                "correct rl.engine_url"
            ) from None
        except (OSError, HTTPException) as error:
            raise ServerLost(
                f"{self} ended the connection during {what} ({type(error).__name__}): it has died or was restarted; "
                "its own log says why. Start it again and go on from the last checkpoint"
            ) from None

    def _read(self, answer: Any, what: str, deadline: Deadline, most: int) -> bytes:
        pieces, size = [], 0
        while piece := answer.read1(PIECE):
            pieces.append(piece)
            size += len(piece)
            if deadline.over:
                raise self._late(what, deadline)
            if size > most:
                raise TrainingError(f"{self} answers {what} with more than {most:,} bytes{ANOTHER}")
        if answer.length:  # of what its headers promise
            raise IncompleteRead(b"".join(pieces), answer.length)
        return b"".join(pieces)

    def _late(self, what: str, deadline: Deadline) -> TrainingError:
        return TrainingError(
            f"{self} has not answered {what} within {deadline.seconds:g} s ({deadline.setting}); look at its log, or "
            "raise that"
        )

    def _refusal(self, error: urllib.error.HTTPError, what: str) -> TrainingError:
        if 300 <= error.code < 400:
            target = f"{error.headers.get('Location')}"[:SHOWN]
            return TrainingError(
                f"{self} redirects {what} to {target}, and redirects are not followed; set rl.engine_url to the "
                "engine's own address"
            )
        try:
            said = " ".join(error.read(PIECE).decode("utf-8", errors="replace").split())
        except (OSError, HTTPException):
            said = ""
        sentence = f"{self} refuses {what} with {error.code}: {said[:SHOWN] or error.reason}"
        return ServerLost(sentence) if error.code in NOT_UP else RequestRefused(sentence, status=error.code)
