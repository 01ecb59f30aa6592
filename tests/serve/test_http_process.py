"""The server in a process of its own: the answers are those of a server in the engine's process, and no end is lost."""

import json
import os
import signal
import socket
from multiprocessing import Pipe
from threading import Thread

import pytest
from serve.http_client import Client
from serve.test_serve import chat, live, make_engine, run_live, serve, tokenizer, wait_for  # noqa: F401 (fixtures)

from megalith.errors import ConfigError
from megalith.generation.grammar import GrammarCompiler
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.logits_processing import LogitsProcessing
from megalith.serve.http_process import HttpProcess, ServerSettings
from megalith.serve.openai_service import Access
from megalith.serve.remote_engine import EngineFacts, RemoteEngine

USER = [{"role": "user", "content": "the sum"}]
TEXT = {
    "prompt": ["once", "and then"],
    "max_tokens": 12,
    "seed": 5,
    "n": 2,
    "logprobs": 1,
    "return_token_ids": True,
}
REQUESTS = {
    "texts": TEXT,
    "stream": TEXT | {"stream": True, "stream_options": {"include_usage": True}},
    "ids": {"prompt": [3, 4, 5], "max_tokens": 9, "temperature": 0, "return_token_ids": True},
    "stop": {"prompt": "once", "max_tokens": 40, "temperature": 0, "stop": ["a", "e"]},
    "penalties": {"prompt": "once", "max_tokens": 12, "seed": 1, "repetition_penalty": 1.5, "logit_bias": {"7": 9}},
    "chat": {"messages": USER, "max_tokens": 12, "seed": 2},
    "json": {"messages": USER, "max_tokens": 60, "seed": 2, "response_format": {"type": "json_object"}},
    "too long": {"prompt": "x", "max_tokens": 4000},
    "no field": {"prompt": "x", "temprature": 1},
}  # fmt: skip


def answers(client: Client) -> dict:
    """The statuses and values of all requests. Times and random ids are left out, and how a stream is cut."""
    result = {}
    for name, body in REQUESTS.items():
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status, value = client.post(path, body)
        if isinstance(value, list):
            *parts, usage = [chunk["choices"] or chunk["usage"] for chunk in value]
            texts = ["".join(one["text"] for (one,) in parts if one["index"] == index) for index in range(4)]
            value = {"texts": texts, "usage": usage}
        result[name] = status, {key: part for key, part in value.items() if key not in ("id", "created")}
    return result


def logprobs_of(received: dict) -> list[float]:
    """Remove the log-probabilities, whose last bits depend on the batch, and return them."""
    choices = [choice for _, value in received.values() for choice in value.get("choices", ())]
    lists = [one["logprobs"].pop("token_logprobs") for one in choices if one["logprobs"]]
    assert len(lists) == 4
    return [value for values in lists for value in values]


class Served:
    """A server's process and the engine that runs for it, as a context manager."""

    def __init__(self, tokenizer, engine):  # noqa: F811
        self.live = LiveEngine(
            engine, (tokenizer.eod,), tokenizer.vocab_size, grammars=GrammarCompiler(tokenizer)
        )
        self.http, self.error = HttpProcess(), None
        self._settings = ServerSettings("127.0.0.1", 0, "tiny", tokenizer, Access())
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.http.run(self.live)
        except ConfigError as error:
            self.error = error

    def __enter__(self):
        self.http.__enter__()
        self.client = Client(int(self.http.start(self._settings, self.live).rpartition(":")[2]))
        self._thread.start()
        return self

    def join(self) -> None:
        self._thread.join()

    def __exit__(self, *error) -> None:
        self.live.close()
        self.join()
        self.http.__exit__(*error)


def test_answers_are_those_of_a_server_in_the_engines_process(serve, tokenizer):  # noqa: F811
    engine = make_engine(tokenizer)
    for in_process in run_live(engine, tokenizer):
        expected = answers(serve(in_process))
    with Served(tokenizer, engine) as served:
        received = answers(served.client)
        wait_for(lambda: served.live.open_requests == 0)
        assert served.http._request_ids == {}
        health = served.client.get("/health")[1]
    assert served.error is None and served.http._process.returncode == 0
    assert logprobs_of(received) == pytest.approx(logprobs_of(expected), abs=1e-5)
    assert received == expected
    statuses = {name: status for name, (status, _) in expected.items()}
    assert statuses == dict.fromkeys(REQUESTS, 200) | {"too long": 400, "no field": 400}
    assert health["prefill_tokens"] > 0


def begin(client: Client, **fields) -> socket.socket:
    """Send a request for completions that take long, and return its connection."""
    body = json.dumps({"prompt": "x", "max_tokens": 2900, "ignore_eos": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    connection = socket.create_connection(("127.0.0.1", client.port), timeout=30)
    connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    return connection


def test_completions_end_with_their_client_and_the_server_ends_with_its_engine(tokenizer):  # noqa: F811
    with Served(tokenizer, make_engine(tokenizer, 3000)) as served:
        connection = begin(served.client, n=3)
        wait_for(lambda: served.live.open_requests == 3)
        connection.close()
        wait_for(lambda: served.live.open_requests == 0)
        assert served.http._request_ids == {} and not served.live.is_over
        connection = begin(served.client)
        wait_for(lambda: served.live.open_requests == 1)
    assert served.error is None and served.http._process.returncode == 0
    with connection:
        answer = connection.recv(1 << 16)
    assert not answer or b" 503 " in answer


def test_a_server_that_is_killed_ends_the_engine_with_a_sentence(tokenizer):  # noqa: F811
    with Served(tokenizer, make_engine(tokenizer, 3000)) as served, begin(served.client):
        wait_for(lambda: served.live.open_requests == 1)
        os.kill(served.http.pid, signal.SIGKILL)
        served.join()
    assert "the process of the HTTP server ended early (exit status -9)" in str(served.error)


def test_a_port_that_is_taken_is_refused_by_name(tokenizer):  # noqa: F811
    live = LiveEngine(make_engine(tokenizer))  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken, HttpProcess() as http:
        port = taken.getsockname()[1]
        settings = ServerSettings("127.0.0.1", port, "tiny", tokenizer, Access())
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port} "):
            http.start(settings, live)


def test_each_request_is_sent_with_its_own_processing(tokenizer):  # noqa: F811
    engine = make_engine(tokenizer)
    ours, theirs = Pipe()
    remote = RemoteEngine(theirs, EngineFacts(engine.config, engine.max_tokens, engine.slots))
    penalty = LogitsProcessing(repetition_penalty=2.0)
    requests = [LiveRequest([1], 2), LiveRequest([1], 2, processing=penalty)]
    remote.submit(requests, [lambda *event: None] * 2)
    kind, first, sent, (without, values) = ours.recv()
    assert (kind, first, without) == ("submit", 0, None) and sent == [requests[0]] * 2
    assert LogitsProcessing.from_json(values, None) == penalty
