"""Sampling of turns while the tools of other trajectories run (`rl.overlap_tools`).

     live engine ─▶ ended turns ─▶ tools of all turns that have ended meanwhile ─▶ next turns ─▶ live engine

A trajectory that waits for its tools has no row of the engine. Its next turn reuses its keys and values
(generation/prefix_reuse.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any

from megalith.generation.live_request import LiveRequest
from megalith.generation.requests import Completion, Sampling
from megalith.rl.agents.trajectory import Trajectory

Ended = tuple[Trajectory, list[int], list[float], str]
"""A trajectory, the ids of its turn, their log-probabilities, and the reason why the turn ended."""


def sample_overlapped(
    live: Any,
    trajectories: Sequence[Trajectory],
    sampling: Sampling,
    version: int,
    key: Callable[[Trajectory], int],
    advance: Callable[[Sequence[Trajectory]], None],
) -> None:
    """Sample all trajectories to the end on the first rank of a replica. The other ranks repeat its engine's steps.

    Args:
        live: a LiveEngine, or the requests of servers.
        trajectories: trajectories with their prompts.
        sampling: sampling parameters. `max_new_tokens` limits all turns and tool results of a trajectory together.
        version: version of the weights.
        key: function that returns the sampling key of a trajectory's next turn.
        advance: function that runs the tools of trajectories whose turn has ended, and appends the results or ends the
            trajectories.
    """
    ended: SimpleQueue[Ended] = SimpleQueue()
    errors: list[BaseException] = []

    def drive() -> None:
        try:
            for one in trajectories:
                _submit(live, one, sampling, key(one), ended)
            remaining = sum(not one.has_ended for one in trajectories)
            while remaining:
                turns = [ended.get()]
                while not ended.empty():
                    turns.append(ended.get())
                if any(reason == "closed" for *_, reason in turns):
                    return  # the engine has failed, and its thread raises the error
                for one, ids, logprobs, reason in turns:
                    one.sample(Completion(0, 0, ids, logprobs, reason == "length", (version,)))
                waiting = [one for one, *_ in turns]
                advance(waiting)
                for one in waiting:
                    if one.has_ended:
                        remaining -= 1
                    else:
                        _submit(live, one, sampling, key(one), ended)
        except BaseException as error:  # raised by the thread of the engine
            errors.append(error)
        finally:
            live.close()

    thread = Thread(target=drive, name="tools")
    thread.start()
    try:
        live.run()
    finally:
        thread.join()
    if errors:
        raise errors[0]


def _submit(live: Any, one: Trajectory, sampling: Sampling, key: int, ended: SimpleQueue[Ended]) -> None:
    all_ids: list[int] = []
    all_logprobs: list[float] = []

    def on_tokens(ids: list[int], logprobs: list[float], reason: str | None) -> None:
        all_ids.extend(ids)
        all_logprobs.extend(logprobs)
        if reason is not None:
            ended.put((one, all_ids, all_logprobs, reason))

    settings = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
    limit = sampling.max_new_tokens - len(one.ids)
    live.submit([LiveRequest(one.request, limit, *settings, sampling.seed, key)], [on_tokens])
