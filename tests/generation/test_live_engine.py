"""Requests at any time: the tokens of the engine's own batch, whatever else runs, in every layout."""

import sys
from collections import Counter
from functools import partial
from threading import Event, Thread, get_ident

import pytest
from generation.brief_training import chains, trained_model
from generation.engine_job import live_tokens

from megalith.bench.simulated_engine import SimulatedEngine
from megalith.errors import ConfigError
from megalith.generation import live_engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.requests import MAX_GENERATIONS, Sampling
from megalith.generation.sync import engine_for
from megalith.generation.window_length import WindowLength

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 4, 9, 17]
CHAINS = [row[:length].tolist() for row, length in zip(chains(10, 40, 99), LENGTHS)]
KINDS = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (0.9, 20, 0.9, 0.05)]
SETTINGS = [KINDS[number % len(KINDS)] for number in range(len(CHAINS))]


@pytest.fixture(scope="module")
def model():
    return trained_model(steps=24)[0]


@pytest.fixture(scope="module")
def expected(model) -> list[tuple[list[int], list[float]]]:
    """By the batch call, each with its settings and key."""
    engine, done = engine_for(model, max_rows=1, max_tokens=96), []
    for number, (prompt, settings) in enumerate(zip(CHAINS, SETTINGS)):
        sampling = Sampling(12, *settings, seed=4, stop=(3,))
        (one,) = engine.generate([prompt], sampling, keys=[number])
        done.append((one.ids, one.logprobs))
    return done


def requests() -> list[LiveRequest]:
    return [
        LiveRequest(prompt, 12, *settings, seed=4, key=number * MAX_GENERATIONS, reports_once=number % 3 == 0)
        for number, (prompt, settings) in enumerate(zip(CHAINS, SETTINGS))
    ]


def run_in_thread(live: LiveEngine) -> Thread:
    thread = Thread(target=live.run)
    thread.start()
    return thread


def test_requests_get_the_tokens_of_a_batch_call_of_their_own(model, expected):
    """With settings that differ, some of them submitted while others run and one cancelled among them."""
    live = LiveEngine(engine_for(model, max_rows=3, max_tokens=96), stop=(3,))
    results, ended, seen = [([], []) for _ in CHAINS], [Event() for _ in CHAINS], []
    calls = [0] * len(CHAINS)

    def callback(number: int):
        def on_tokens(ids, logprobs, reason):
            results[number][0].extend(ids)
            results[number][1].extend(logprobs)
            calls[number] += 1
            if reason is not None:
                assert reason == ("stop" if ids[-1] == 3 else "length")
                ended[number].set()

        return on_tokens

    live.warm_up()
    thread = run_in_thread(live)
    endless = live.submit([LiveRequest([5, 6], 90, ignores_stop=True)], [lambda *event: seen.append(event)])
    asked = requests()
    for number in range(5):
        live.submit([asked[number]], [callback(number)])
    ended[1].wait(30)
    live.cancel(endless[0])
    for number in range(5, 10):
        live.submit([asked[number]], [callback(number)])
    assert all(event.wait(30) for event in ended)
    live.close()
    thread.join()
    for (ids, logprobs), (their_ids, their_logprobs) in zip(results, expected):
        assert ids == their_ids and logprobs == pytest.approx(their_logprobs, abs=1e-4)
    assert calls[0::3] == [1] * 4 and sum(calls) > 2 * len(calls)
    assert live.open_requests == 0 and len(seen) < 90 and all(reason is None for *_, reason in seen)


def test_windows_of_changing_lengths_give_the_same_tokens(model, expected, monkeypatch):
    class Changing(WindowLength):
        def record(self, waited: float, elapsed: float) -> None:
            self.steps = self.steps % 8 + 1

    monkeypatch.setattr(live_engine, "WindowLength", Changing)
    engine = engine_for(model, max_rows=3, max_tokens=96)
    engine.window = 8
    live, results, ended = LiveEngine(engine, stop=(3,)), [([], []) for _ in CHAINS], []

    def on_tokens(number: int, ids: list[int], logprobs: list[float], reason: str | None) -> None:
        results[number][0].extend(ids)
        results[number][1].extend(logprobs)
        if reason is not None:
            ended.append(number)
        if len(ended) == len(CHAINS):
            live.close()

    for number, request in enumerate(requests()):
        live.submit([request], [partial(on_tokens, number)])
    live.run()
    assert sorted(ended) == [*range(len(CHAINS))]
    for (ids, logprobs), (their_ids, their_logprobs) in zip(results, expected):
        assert ids == their_ids and logprobs == pytest.approx(their_logprobs, abs=1e-4)


def test_the_engines_thread_makes_few_calls_per_token(model):
    """A GPU waits if the host needs longer for a window than the GPU. Calls are counted, because times depend on what
    else the machine does."""
    engine = SimulatedEngine(model.config, 64, 96, step_seconds=0.0, prefill_seconds=0.0)
    live, received, calls, own = LiveEngine(engine), Counter(), Counter(), get_ident()

    def on_tokens(number: int, ids: list[int], logprobs: list[float], reason: str | None) -> None:
        received[number] += len(ids)
        if received.total() == 64 * 64:
            live.close()

    for number in range(64):
        live.submit([LiveRequest([1, 2], 64, ignores_stop=True)], [partial(on_tokens, number)])
    sys.setprofile(lambda frame, event, argument: calls.update([event]) if get_ident() == own else None)
    try:
        live.run()
    finally:
        sys.setprofile(None)
    assert set(received.values()) == {64}
    per_token = (calls["call"] + calls["c_call"]) / received.total()
    assert per_token < 4, per_token


def test_windows_are_short_while_the_host_waits_for_the_gpu():
    length, steps = WindowLength(8), []
    rounds = [[0.0] + [0.7] * 15, [0.9] * 16, [0.4] * 16, [0.9] * 14 + [0.0] * 2, [0.4] * 16]
    for waits in rounds:
        for waited in waits:
            length.record(waited, 1.0)
        steps.append(length.steps)
    assert steps == [4, 4, 4, 8, 8]
    alone = WindowLength(1)
    for _ in range(16):
        alone.record(1.0, 1.0)
    assert alone.steps == 1


def test_requests_that_do_not_fit_are_refused_and_closing_ends_the_open_ones(model):
    live = LiveEngine(engine_for(model, max_rows=1, max_tokens=32))
    thread, ended, first = run_in_thread(live), [], Event()

    def on_tokens(ids, logprobs, reason):
        first.set()
        if reason is not None:
            ended.append(reason)

    for request, message in (
        (LiveRequest([1] * 30, 3), "room for 32"),
        (LiveRequest([1000], 3), "token 1000"),
        (LiveRequest([1], 3, top_p=0), "top_p is 0"),
        (LiveRequest([1], 3, key=-1), "from 0 to 2\\^63 - 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            live.submit([request], [on_tokens])
    live.submit([LiveRequest([1], 31), LiveRequest([1], 31)], [on_tokens] * 2)
    first.wait(30)
    live.close()
    thread.join()
    assert ended == ["closed", "closed"]
    with pytest.raises(ConfigError, match="closed"):
        live.submit([LiveRequest([1], 3)], [on_tokens])


@pytest.mark.parametrize("size", [2, 1])
def test_replicas_of_tensor_parallel_ranks_share_the_requests(pool, model, expected, size):
    first, *others = pool.run(live_tokens, model.config, dict(model.state_dict()), requests(), size)
    assert [ids for ids, _ in first] == [ids for ids, _ in expected] and others == [None] * 3
