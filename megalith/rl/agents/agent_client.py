"""The client passed to an agent: `openai.AsyncOpenAI` if the package is installed, otherwise a small replacement."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any


class AgentRequestError(Exception):
    """Raised if the server refuses a request. `status_code` is the HTTP status."""

    def __init__(self, message: str, status_code: int):
        super().__init__(message)
        self.status_code = status_code


def make_client(base_url: str, timeout: float) -> Any:
    """Return a client for an endpoint.

    Args:
        base_url: address that ends with /v1.
        timeout: seconds per request.
    """
    try:
        from openai import AsyncOpenAI
    except ImportError:
        return SmallClient(base_url, timeout)
    return AsyncOpenAI(base_url=base_url, api_key="session", timeout=timeout, max_retries=0)


class SmallClient:
    """Replacement for OpenAI's client with `chat.completions.create` and `completions.create`. It does not stream."""

    api_key = "session"

    def __init__(self, base_url: str, timeout: float):
        self.base_url, self._timeout = base_url, timeout
        self.completions = SimpleNamespace(create=lambda **body: self._post("/completions", body))
        chat = SimpleNamespace(create=lambda **body: self._post("/chat/completions", body))
        self.chat = SimpleNamespace(completions=chat)
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the response, with attributes in the form of OpenAI's client."""
        extra = body.pop("extra_body", None) or {}
        content = json.dumps(body | extra, default=_plain).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + path, content, headers)
        return json.loads(await asyncio.to_thread(self._send, request), object_hook=AgentAnswer)

    def _send(self, request: urllib.request.Request) -> bytes:
        try:
            with self._opener.open(request, timeout=self._timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            with contextlib.suppress(ValueError, LookupError, TypeError):
                text = json.loads(text)["error"]["message"]
            raise AgentRequestError(f"{text} (status {error.code})", error.code) from None


class AgentAnswer(SimpleNamespace):
    """A JSON object of a response, with its fields as attributes. Absent fields are None."""

    def __init__(self, fields: dict[str, Any]):
        super().__init__(**fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Return the object as a JSON value."""
        return json.loads(json.dumps(self, default=_plain))


def _plain(value: Any) -> Any:
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"a {type(value).__name__} is not JSON")
