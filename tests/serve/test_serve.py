"""OpenAI's API: the engine's tokens as text and ids, tools, streams, and what clients may not do."""

import asyncio
import io
import json
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from default_cases import by_default
from serve.http_client import Client, ScriptedLive

sys.path.append(str(Path(__file__).parents[1] / "rl"))
from tool_policy import call, shared_template, tokenizer_in

from megalith.cli.main import main
from megalith.config import ModelConfig
from megalith.data.tokenizers.plain import ByteTokenizer
from megalith.errors import ConfigError
from megalith.generation.choice_text import ChoiceText
from megalith.generation.engine import Engine
from megalith.generation.grammar import GrammarCompiler
from megalith.generation.live_engine import LiveEngine
from megalith.generation.logits_processing import LogitsProcessing, bad_word_ids
from megalith.generation.noise_keys import noise_key, noise_keys
from megalith.generation.requests import Sampling
from megalith.models.init import initialize
from megalith.models.model_types import make_model
from megalith.serve.chat_format import ChatFormat
from megalith.serve.chat_session import ChatSession
from megalith.serve.event_relay import EventRelay, merged
from megalith.serve.http_server import HttpError, HttpServer, Limits
from megalith.serve.openai_requests import read_json
from megalith.serve.openai_service import Access, OpenAiService

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chat(tokenizer) -> ChatFormat:
    return ChatFormat(tokenizer, shared_template(tokenizer))


@pytest.fixture
def serve(tokenizer, chat):
    """`serve(live, **access)` → client."""
    servers, problems = [], []

    def serve(live, max_body: int = 1 << 20, **access) -> Client:
        service = OpenAiService(live, tokenizer, chat, "tiny", Access(**access))
        server = HttpServer(service, limits=Limits(max_body=max_body), report=problems.append)
        server.start()
        servers.append(server)
        return Client(server.port)

    yield serve
    for server in servers:
        server.close()
    assert problems == []


@pytest.fixture(scope="module")
def engine(tokenizer) -> Engine:
    return make_engine(tokenizer)


def make_engine(tokenizer, max_tokens: int = 128) -> Engine:
    config = ModelConfig(
        num_layers=1, hidden_size=32, num_attention_heads=2, vocab_size=tokenizer.vocab_size, init_method_std=0.4,
        make_vocab_size_divisible_by=1, max_position_embeddings=2 * max_tokens, position_embedding_type="rope",
        hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = make_model(config)
    initialize(model, config, seed=1)
    return Engine(config, "cpu", model.compute_dtype, max_rows=8, max_tokens=max_tokens, model=model.eval())


@pytest.fixture
def live(engine, tokenizer):
    yield from run_live(engine, tokenizer)


@pytest.fixture
def long_live(tokenizer):
    yield from run_live(make_engine(tokenizer, 600), tokenizer)


def run_live(engine, tokenizer):
    sizes = dict(stop=(tokenizer.eod,), vocab_size=tokenizer.vocab_size)
    live = LiveEngine(engine, **sizes, grammars=GrammarCompiler(tokenizer))
    thread = Thread(target=live.run)
    thread.start()
    yield live
    live.close()
    thread.join()


def test_completions_are_the_engines_by_text_and_by_ids(serve, live, tokenizer):
    client = serve(live)
    prompts = ["the sum of 1 and 2", "and then"]
    status, value = client.post(
        "/v1/completions",
        dict(
            model="tiny", prompt=prompts, max_tokens=12, temperature=0, logprobs=0, n=2, return_token_ids=True
        ),
    )
    assert status == 200 and [one["index"] for one in value["choices"]] == [0, 1, 2, 3]
    live.close()
    other = LiveEngine(live.engine)  # the batch call needs the engine alone
    ids = [tokenizer.encode(text) for text in prompts]
    done = live.engine.generate(ids, Sampling(12, 0, stop=(tokenizer.eod,), vocab_size=tokenizer.vocab_size))
    assert other.open_requests == 0
    for one, at in zip(value["choices"], (0, 0, 1, 1)):
        assert one["token_ids"] == done[at].ids and one["prompt_token_ids"] == ids[at]
        assert one["logprobs"]["token_logprobs"] == pytest.approx(done[at].logprobs, abs=1e-5)
        assert one["text"] == tokenizer.decode(done[at].ids) and one["finish_reason"] == "length"
    assert value["usage"] == {
        "prompt_tokens": sum(map(len, ids)), "completion_tokens": 48, "total_tokens": sum(map(len, ids)) + 48
    }  # fmt: skip


def test_a_seed_decides_the_samples_and_a_stream_has_the_same(serve, live, tokenizer):
    client = serve(live)
    body = dict(
        prompt=tokenizer.encode("once"), max_tokens=16, seed=5, n=2, logprobs=1, return_token_ids=True
    )
    _, whole = client.post("/v1/completions", body)
    _, again = client.post("/v1/completions", body)
    _, other = client.post("/v1/completions", body | {"seed": 6})
    ids = [one["token_ids"] for one in whole["choices"]]
    assert ids == [one["token_ids"] for one in again["choices"]] and ids[0] != ids[1]
    assert ids != [one["token_ids"] for one in other["choices"]]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, (*chunks, usage) = client.post("/v1/completions", body | options)
    assert usage["usage"] == whole["usage"] and usage["choices"] == []
    for index, one in enumerate(whole["choices"]):
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(part["text"] for part in parts) == one["text"]
        assert [token for part in parts for token in part.get("token_ids", ())] == one["token_ids"]
        assert parts[-1]["finish_reason"] == one["finish_reason"] and len(parts) > 2


def test_a_prompt_that_continues_an_earlier_request_reuses_its_keys_and_values(serve, live, tokenizer):
    client, prompt = serve(live), tokenizer.encode("the sum of 1 and 2 and of the others")
    body = dict(max_tokens=8, temperature=0, return_token_ids=True)
    _, first = client.post("/v1/completions", body | {"prompt": prompt})
    before = client.get("/health")[1]
    longer = [*prompt, *first["choices"][0]["token_ids"], *tokenizer.encode(" so")]
    client.post("/v1/completions", body | {"prompt": longer})
    after = client.get("/health")[1]
    reused = after["prefill_tokens_reused"] - before["prefill_tokens_reused"]
    assert reused == len(prompt) + 7 and after["prefill_tokens"] - before["prefill_tokens"] < 6


def test_penalties_biases_and_bad_words_are_the_engines(serve, live, tokenizer):
    client, prompt = serve(live), tokenizer.encode("once")
    body = dict(prompt=prompt, max_tokens=16, seed=5, temperature=0.8, return_token_ids=True, logprobs=1)
    token = tokenizer.encode("e")[0]
    settings = dict(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    _, value = client.post(
        "/v1/completions", body | settings | {"logit_bias": {str(token): 2.5}, "bad_words": ["a", "th"]}
    )
    _, plain = client.post("/v1/completions", body)
    live.close()
    processing = LogitsProcessing(*settings.values(), ((token, 2.5),), bad_word_ids(tokenizer, ["a", "th"]))
    sampling = Sampling(
        16, 0.8, seed=5, stop=(tokenizer.eod,), vocab_size=tokenizer.vocab_size, processing=processing
    )
    (done,) = live.engine.generate([prompt], sampling)
    (one,), (other,) = value["choices"], plain["choices"]
    assert one["token_ids"] == done.ids != other["token_ids"]
    assert one["logprobs"]["token_logprobs"] == pytest.approx(done.logprobs, abs=1e-5)


def test_without_llguidance_a_json_request_is_refused_and_names_the_extra(serve, tokenizer, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    client = serve(ScriptedLive(tokenizer, lambda text: "x"))
    status, value = client.chat("x", response_format={"type": "json_object"})
    assert status == 400 and "need the llguidance package" in value["error"]["message"]


def test_texts_and_calls_follow_their_json_schema(serve, long_live):
    pytest.importorskip("llguidance", reason="pip install 'megalith[grammar]'")
    client = serve(long_live)
    compact = {"x-guidance": {"whitespace_flexible": False}}
    schema = {
        "type": "object", "properties": {"n": {"enum": [1, 23]}}, "required": ["n"], "additionalProperties": False
    } | compact  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    for fields in ({"response_format": wanted}, {"structured_outputs": {"json": schema}}):
        _, value = client.chat("x", n=3, max_tokens=40, **fields)
        for one in value["choices"]:
            assert json.loads(one["message"]["content"]) in ({"n": 1}, {"n": 23})
            assert one["finish_reason"] == "stop"
    _, (*chunks, _) = client.post(
        "/v1/completions",
        dict(
            prompt="a",
            stream=True,
            max_tokens=40,
            response_format=wanted,
            stream_options={"include_usage": True},
        ),
    )
    assert json.loads("".join(chunk["choices"][0]["text"] for chunk in chunks)) in ({"n": 1}, {"n": 23})
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    for choice in ("required", {"type": "function", "function": {"name": "pick"}}):
        _, value = client.chat("x", tools=[tool], tool_choice=choice, max_tokens=90, temperature=0)
        (one,) = value["choices"]
        (made,) = one["message"]["tool_calls"]
        assert one["finish_reason"] == "tool_calls" and made["function"]["name"] == "pick"
        assert json.loads(made["function"]["arguments"]) in ({"n": 1}, {"n": 23})
    status, value = client.chat("x", response_format=wanted, tools=[tool], tool_choice="required")
    assert status == 400 and "leave one of them out" in value["error"]["message"]
    status, value = client.chat("x", structured_outputs={"json": {"not": {}}})
    assert status == 400 and "the grammar is not supported" in value["error"]["message"]


def test_tools_are_called_and_answered(serve, tokenizer):
    turns = iter(["hm " + call("add", a=1, b=2) + call("add", a=3, b=4), "it is 3"])
    live = ScriptedLive(tokenizer, lambda text: next(turns))
    client = serve(live)
    _, value = client.chat("1 + 2?", tools=[ADD], tool_choice="auto")
    (choice,) = value["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "hm"
    functions = [one["function"] for one in choice["message"]["tool_calls"]]
    assert [(one["name"], json.loads(one["arguments"])) for one in functions] == [
        ("add", {"a": 1, "b": 2}),
        ("add", {"a": 3, "b": 4}),
    ]
    call_id = choice["message"]["tool_calls"][0]["id"]
    answer = {"role": "tool", "tool_call_id": call_id, "content": "3"}
    _, chunks = client.chat("1 + 2?", choice["message"], answer, tools=[ADD], stream=True, logprobs=True)
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["delta"].get("content", "") for one in deltas) == "it is 3"
    assert deltas[-1]["finish_reason"] == "stop"
    prompt = tokenizer.decode(live.requests[1].prompt)
    assert prompt.count("<tool_call>") == 2 and "<tool_response>\n3\n" in prompt


def test_calls_in_a_stream_come_whole_and_malformed_ones_stay_text(serve, tokenizer):
    client = serve(
        ScriptedLive(tokenizer, lambda text: call("add", a=1) if "good" in text else "<tool_call>{")
    )
    _, chunks = client.chat("good", tools=[ADD], stream=True)
    (last,) = chunks[-1]["choices"]
    assert last["finish_reason"] == "tool_calls"
    assert json.loads(last["delta"]["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    _, value = client.chat("bad", tools=[ADD])
    assert value["choices"][0]["message"] == {"role": "assistant", "content": "<tool_call>{"}
    assert value["choices"][0]["finish_reason"] == "stop"


def test_text_stops_before_a_stop_text_and_in_whole_characters(tokenizer):
    ids = tokenizer.encode("naïve 日本 END of it")
    for size in (1, 3):
        choice, parts = ChoiceText(tokenizer, ["END", "never"], frozenset(), True), []
        for at in range(0, len(ids), size):
            choice.add(ids[at : at + size], [0.0] * len(ids[at : at + size]), None)
            parts.append(choice.take())
        assert "".join(parts) == "naïve 日本 " == choice.text and choice.reason == "stop"
        assert not any("\ufffd" in part for part in parts) and len(parts) > 5
        assert tokenizer.decode(choice.ids).endswith("END")
    silent = ChoiceText(tokenizer, [], frozenset({ids[2]}), True)
    silent.add(ids[:4], [0.0] * 4, None)
    assert (silent.text, silent.reason, silent.ids) == ("na", "stop", ids[:3])


def test_a_client_that_leaves_cancels_its_completions(serve, tokenizer):
    live = ScriptedLive(tokenizer, lambda text: None)
    client = serve(live, max_requests=3)
    for stream in (False, True):
        body = json.dumps({"prompt": "x", "n": 3, "stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(("127.0.0.1", client.port)) as sock:
            sock.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            wait_for(lambda: client.get("/health")[1]["requests"] == 3)
            status, value = client.post("/v1/completions", {"prompt": "y"})
            message = "the request needs 1 completions, but 3 of at most 3 are in progress; try again later"
            assert (status, value["error"]["message"]) == (429, message)
        wait_for(lambda: client.get("/health")[1]["requests"] == 0)
    assert live.cancelled == [0, 1, 2, 3, 4, 5]


def test_a_request_that_can_never_be_admitted_is_a_400(serve, tokenizer):
    client = serve(ScriptedLive(tokenizer, lambda text: "z"), max_requests=3)
    for request in ({"prompt": "x", "n": 4}, {"prompt": ["x", "y"], "n": 2}):
        status, value = client.post("/v1/completions", request)
        message = "the request needs 4 completions, but the server allows 3; request fewer"
        assert (status, value["error"]["message"]) == (400, message)
    assert client.post("/v1/completions", {"prompt": "x", "n": 3})[0] == 200


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


USER = {"role": "user", "content": "x"}
GOOD = {"model": "tiny", "messages": [USER]}
BAD = [  # body, status, message
    ({}, 400, "messages is missing"),
    ({"messages": []}, 400, "messages is []; it must be a list of messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role is 'king'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "a part that is not text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "must have a function with a name"),
    (GOOD | {"temperature": -1}, 400, "temperature is -1; it must be a number from 0 to 100"),
    (GOOD | {"n": 1000}, 400, "n is 1000; it must be a whole number from 1 to 128"),
    (GOOD | {"presence_penalty": 5}, 400, "presence_penalty is 5; it must be a number from -2 to 2"),
    (GOOD | {"repetition_penalty": 0}, 400, "repetition_penalty is 0; it must be a number above 0"),
    (
        GOOD | {"logit_bias": {"a": 1}},
        400,
        "logit_bias is {'a': 1}; it must be an object of up to 1024 token ids",
    ),
    (
        GOOD | {"response_format": {"type": "xml"}},
        400,
        "it must be of type text, json_object, or json_schema",
    ),
    (GOOD | {"structured_outputs": {"regex": "a"}}, 400, 'it must be {"json": schema}'),
    (GOOD | {"top_logprobs": 5}, 400, "top_logprobs 5 is not supported"),
    (GOOD | {"tool_choice": "required"}, 400, "tool_choice is 'required', but tools has no such function"),
    (GOOD | {"tool_choice": "any"}, 400, "tool_choice is 'any'; it must be auto, none, required"),
    (GOOD | {"temprature": 1}, 400, "'temprature' is not a field of this request"),
    (GOOD | {"model": "other"}, 404, "there is no model 'other'; the server has tiny"),
    (GOOD | {"stop": [""]}, 400, "none of them empty"),
]


def test_bad_requests_are_refused_with_a_sentence(serve, tokenizer):
    client = serve(ScriptedLive(tokenizer, lambda text: "x"), max_body=5000)
    for body, expected, message in BAD:
        status, value = client.post("/v1/chat/completions", body)
        assert status == expected and value["error"]["type"] == "invalid_request_error", body
        assert message in value["error"]["message"], value
    deep = b'{"messages": ' + b"[" * 70 + b"]" * 70 + b"}"
    for body, expected, message in (
        (deep, 400, "more than 64 levels"),
        (b"[" * 4000, 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[]", 400, "a JSON list; send an object"),
        (b"x" * 5001, 413, "5,001 bytes"),
        (json.dumps({"messages": [USER | {"content": "\ud800"}]}).encode(), 400, "surrogate"),
    ):
        status, value = client.post("/v1/chat/completions", body)
        assert status == expected and message in value["error"]["message"], value
    assert client.get("/v1/nothing")[0] == 404 and client.get("/v1/completions")[0] == 405
    assert client.post("/v1/completions", {"prompt": [[]]})[0] == 400
    assert (
        client.request("POST", "/v1/completions", {"prompt": "x"}, **{"Content-Type": "text/plain"})[0] == 415
    )
    status, value = client.get("/health", Host="evil.example")
    assert status == 403 and "evil.example" in value["error"]["message"]
    with socket.create_connection(("127.0.0.1", client.port)) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * 70000 + b"\r\n\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 431")
    with socket.create_connection(("127.0.0.1", client.port)) as sock:
        sock.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 411")
    status, value = client.get("/health")
    assert (status, value["status"], value["requests"]) == (200, "ok", 0)


def test_prompts_that_do_not_fit_the_engine_are_refused(serve, live):
    client = serve(live)
    status, value = client.post("/v1/completions", {"prompt": "x", "max_tokens": 200})
    assert status == 400 and "has room for 128" in value["error"]["message"]
    status, value = client.post("/v1/completions", {"prompt": [10**6]})
    assert status == 400 and "has token 1000000" in value["error"]["message"]


def test_a_key_is_needed_if_one_is_set(serve, tokenizer):
    client = serve(ScriptedLive(tokenizer, lambda text: "x"), key="secret")
    assert client.get("/health")[0] == 200
    assert client.get("/v1/models")[0] == 401
    assert client.get("/v1/models", Authorization="Bearer wrong")[0] == 401
    status, value = client.get("/v1/models", Authorization="Bearer secret")
    assert status == 200 and value["data"][0]["id"] == "tiny"


@pytest.mark.parametrize(
    "number",
    by_default([signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1], signal.SIGHUP),
    ids=lambda number: number.name,
)
def test_the_command_serves_a_run_until_a_stop_signal(run, tmp_path, capsys, number):
    """The run has a byte tokenizer without chat."""
    before = signal.signal(number, signal.default_int_handler)  # `nohup` would make the command ignore SIGHUP
    run(data={"tokenizer_type": "ByteTokenizer"}, train={"train_iters": 1, "save_interval": 1})
    results = []

    def use(port: int) -> None:
        client = Client(port)
        wait_for(lambda: is_up(client))
        results.append(
            client.post("/v1/completions", {"prompt": "the cat", "max_tokens": 3, "return_token_ids": True})
        )
        results.append(client.chat("x", model="served"))
        os.kill(os.getpid(), number)

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    thread = Thread(target=use, args=(port,))
    thread.start()
    options = ["--port", str(port), "--rows", "2", "--served-model-name", "served", "--device", "cpu"]
    assert main(["serve", str(tmp_path / "run"), *options]) == 0
    thread.join()
    assert signal.getsignal(number) is signal.default_int_handler
    signal.signal(number, before)
    (status, value), (chat_status, refusal) = results
    assert status == 200 and len(value["choices"][0]["token_ids"]) == 3 and value["model"] == "served"
    assert chat_status == 400 and "no chat template" in refusal["error"]["message"]
    assert f"serving served at http://127.0.0.1:{port}/v1: 2 rows" in capsys.readouterr().out


def is_up(client: Client) -> bool:
    try:
        return client.get("/health")[0] == 200
    except OSError:
        return False


def test_a_chat_in_this_process_gets_the_answers_of_the_server(serve, live, engine, tokenizer, chat):
    session = ChatSession(engine.model, tokenizer, Sampling(8, 0), system="Be brief.")
    answers = [session.say("the sum of 1 and 2"), session.say("and then")]
    assert [one["role"] for one in session.messages] == ["system", *["user", "assistant"] * 2]
    client = serve(live)
    for number, answer in enumerate(answers):
        body = dict(model="tiny", messages=session.messages[: 2 * number + 2], max_tokens=8, temperature=0)
        status, value = client.post("/v1/chat/completions", body)
        assert status == 200 and value["choices"][0]["message"]["content"] == answer
    before = list(session.messages)
    with pytest.raises(
        ConfigError,
        match="tokens and the model has 256 positions, so no room is left; start a new conversation",
    ):
        session.say("and " * 300)
    assert session.messages == before


def test_chat_reads_messages_from_options_and_from_standard_input(engine, tokenizer, monkeypatch, capsys):
    load = lambda *words, **names: (engine.model, tokenizer)  # noqa: E731
    monkeypatch.setattr("megalith.training.loading.load_with_tokenizer", load)
    words = ["chat", "run", "--temperature", "0", "--max-new-tokens", "8", "--device", "cpu"]
    assert main([*words, "--message", "and then", "--message", "once", "--json"]) == 0
    messages = json.loads(capsys.readouterr().out)["messages"]
    assert [one["content"] for one in messages[::2]] == ["and then", "once"]
    monkeypatch.setattr("sys.stdin", io.StringIO("and then\n\nonce\n"))
    assert main(words) == 0
    assert capsys.readouterr().out == "".join(f"{one['content']}\n" for one in messages[1::2])


def test_a_model_without_a_chat_template_is_refused(engine):
    with pytest.raises(ConfigError, match="no chat template; train the model with `megalith sft`"):
        ChatSession(engine.model, ByteTokenizer())


@pytest.mark.parametrize("stop", [(), ("♥♥",)])
def test_a_streams_text_is_that_of_all_ids_wherever_its_pieces_end(stop):
    """Characters of up to four bytes, over many windows of the decoder, in pieces of any size."""
    tokenizer, rng = ByteTokenizer(), random.Random(0)
    for _ in range(20):
        text = "".join(rng.choice("aé♥🙂 ") for _ in range(60)) + "end"
        ids, parts, at = tokenizer.encode(text), [], 0
        choice = ChoiceText(tokenizer, stop, frozenset(), ends_with_eod=True)
        while at < len(ids) and choice.reason is None:
            size = rng.randrange(1, 6)
            choice.add(ids[at : at + size], [0.0] * size, "length" if at + size >= len(ids) else None)
            parts.append(choice.take())
            at += size
        expected = text if not stop else text.partition(stop[0])[0]
        assert "".join(parts) == choice.text == expected


def test_events_of_a_thread_reach_their_mailboxes_in_order_with_few_wake_ups():
    async def main() -> tuple[list[list[int]], int]:
        relay, loop, wakeups = EventRelay(), asyncio.get_running_loop(), []
        mailboxes = [relay.mailbox() for _ in range(3)]
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *call: (wakeups.append(call), wake(*call))

        def send() -> None:
            for number in range(900):
                mailboxes[number % 3].put((number, [], [], None))

        thread = Thread(target=send)
        thread.start()
        thread.join()
        found = []
        for mailbox in mailboxes:
            numbers: list[int] = []
            while len(numbers) < 300:
                numbers += [event[0] for event in await mailbox.take()]
            found.append(numbers)
        return found, len(wakeups)

    found, wakeups = asyncio.run(main())
    assert found == [list(range(first, 900, 3)) for first in range(3)] and wakeups == 1


def test_waiting_events_of_a_choice_are_joined():
    first, other = (1, [5], [-0.5], None), (0, [7], [-0.1], None)
    last = (1, [6, 2], [-1.5, -2.0], "stop")
    joined = [(1, [5, 6, 2], [-0.5, -1.5, -2.0], "stop"), other]
    assert merged([first, other, last]) == joined and merged([first]) == [first]
    assert first == (1, [5], [-0.5], None)


def test_bodies_with_half_of_a_surrogate_pair_are_refused_in_any_encoding():
    for body in (b'{"a": "\\uD800"}', b'{"a": "\xed\xa0\x80"}', '{"a": "\\ud800"}'.encode("utf-16")):
        with pytest.raises(HttpError, match="surrogate"):
            read_json(body)
    for text in ("🙂", "한", "\u0000"):
        for body in (json.dumps({"a": text}).encode(), json.dumps({"a": text}, ensure_ascii=False).encode()):
            assert read_json(body) == {"a": text}
    assert read_json(json.dumps({"a": "🙂"}).encode("utf-32")) == {"a": "🙂"}


def test_the_key_of_one_request_is_that_of_a_batch():
    rng = random.Random(0)
    for _ in range(300):
        seed, key = rng.getrandbits(32), rng.getrandbits(rng.choice([4, 31, 33, 63]))
        assert [noise_key(seed, key)] == noise_keys(seed, [key])
