"""A client of the tests: raw HTTP, and a scripted engine that needs no model."""

import http.client
import json
from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace

from megalith.generation.live_request import LiveRequest


class Client:
    """Sends JSON and returns (status, value); of streams, the list of chunks."""

    def __init__(self, port: int, prefix: str = "", **headers: str):
        self.port, self.prefix, self.headers = port, prefix, headers

    def request(self, method: str, path: str, body=None, **headers: str):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | self.headers | headers
        connection.request(method, self.prefix + path, content, headers)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        if answer.headers.get("Content-Type") == "text/event-stream":
            lines = [line.removeprefix(b"data: ") for line in content.split(b"\n\n") if line]
            assert lines.pop() == b"[DONE]"
            return answer.status, [json.loads(line) for line in lines]
        return answer.status, json.loads(content) if content else None

    def post(self, path: str, body, **headers: str):
        return self.request("POST", path, body, **headers)

    def get(self, path: str, **headers: str):
        return self.request("GET", path, **headers)

    def chat(self, *messages: dict | str, **fields):
        turns = [one if isinstance(one, dict) else {"role": "user", "content": one} for one in messages]
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": turns} | fields)


class ScriptedLive:
    """A live engine that answers with what `script(text of the prompt)` returns, in pieces of two tokens."""

    def __init__(self, tokenizer, script: Callable[[str], str | list[int]], room: int = 4096):
        self.tokenizer, self.script = tokenizer, script
        self.engine = SimpleNamespace(max_tokens=room, prefill_tokens=0, reused_tokens=0)
        self.requests: list[LiveRequest] = []
        self.cancelled: list[int] = []

    def submit(self, requests, on_tokens) -> list[int]:
        first = len(self.requests)
        self.requests += requests
        for request, callback in zip(requests, on_tokens, strict=True):
            Thread(target=self._answer, args=(request, callback)).start()
        return list(range(first, len(self.requests)))

    def _answer(self, request: LiveRequest, callback) -> None:
        answer = self.script(self.tokenizer.decode(list(request.prompt)))
        if answer is None:  # never
            return
        ids = answer if isinstance(answer, list) else self.tokenizer.encode(answer)
        whole = [*ids, self.tokenizer.eod]
        ids = whole[: request.max_new_tokens]
        for at in range(0, len(ids), 2):
            reason = None if at + 2 < len(ids) else "stop" if ids == whole else "length"
            callback(ids[at : at + 2], [-0.01 * (n + 1) for n in range(at, min(at + 2, len(ids)))], reason)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
