"""Rewards: how good a completion is, by a formula that has a name here or by a function of the user's own.

A function is called with a whole group, the completions of one prompt, so that what it returns does not depend on the
layout. It has one of two signatures, told apart by their names:

    TRL    f(prompts, completions, completion_ids, **columns, trainer_state, log_extra, log_metric) -> list, or async
    verl   compute_score(data_source, solution_str, ground_truth, extra_info) -> number or {"score": number, …}

The user's functions run in processes of their own, forked with the prompts in them, each call with a time-out: what
raises, hangs or returns something else ends with a sentence that names the completion. They may start processes, which
end with theirs. None and NaN are absent rewards.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import importlib.util
import inspect
import json
import math
import multiprocessing
import numbers
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from megalith.errors import ConfigError, DataError, nearest_of
from megalith.rl.named_rewards import IN_PROCESSES, NAMED, ground_truth, require_math_verify
from megalith.rl.prompts import Prompt


@dataclass(frozen=True)
class Graded:
    """The completions of one prompt."""

    prompt: Prompt
    texts: list[str]
    ids: list[list[int]]


@dataclass
class Verdicts:
    """What the rewards say of groups."""

    rewards: list[np.ndarray]  # of each group float64 [completions, kinds], NaN where absent
    metrics: dict[str, list[float]] = field(default_factory=dict)  # by log_metric
    extras: list[list[dict[str, str]]] = field(
        default_factory=list
    )  # by log_extra, of each group's completions
    logged: dict[str, list[str]] = field(default_factory=dict)  # the same of the group at hand, by name


@dataclass(frozen=True)
class RewardFunction:
    """A reward by its name, with its function."""

    name: str
    function: Callable
    named: bool = False

    @property
    def is_verl(self) -> bool:
        return "solution_str" in inspect.signature(self.function).parameters

    def __call__(self, group: Graded, step: int, longest: int, log: Verdicts) -> list[Any]:
        prompt = group.prompt
        if self.named:
            return [self.function(text, prompt, ids, longest) for text, ids in zip(group.texts, group.ids)]
        if self.is_verl:
            return [self._score(prompt, text, log) for text in group.texts]
        count, chat = len(group.texts), prompt.messages is not None
        given: dict[str, Any] = {name: [value] * count for name, value in prompt.columns.items()}
        given |= dict(
            prompts=[prompt.messages if chat else prompt.text] * count,
            completions=[[{"role": "assistant", "content": t}] if chat else t for t in group.texts],
            completion_ids=group.ids,
            trainer_state=SimpleNamespace(global_step=step),
            log_metric=lambda name, value: log.metrics.setdefault(name, []).append(float(value)),
            log_extra=lambda name, values: log.logged.setdefault(name, []).extend(map(str, values)),
        )
        parameters = inspect.signature(self.function).parameters.values()
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            given = {one.name: given[one.name] for one in parameters if one.name in given}
        found = self.function(**given)
        return asyncio.run(_awaited(found)) if inspect.isawaitable(found) else found

    def _score(self, prompt: Prompt, text: str, log: Verdicts) -> Any:
        columns = prompt.columns
        found = self.function(
            data_source=columns.get("data_source"),
            solution_str=text,
            ground_truth=ground_truth(prompt),
            extra_info=columns.get("extra_info"),
        )
        if not isinstance(found, Mapping):
            return found
        for name, value in found.items():
            if name != "score" and isinstance(value, numbers.Real):
                log.metrics.setdefault(name, []).append(float(value))
        return found.get("score")


async def _awaited(value: Any) -> Any:
    return await value


def reward_function(given: str | Callable) -> RewardFunction:
    """By its name, as path.py:function, or as it is. Raises ConfigError."""
    if callable(given):
        return RewardFunction(getattr(given, "__name__", type(given).__name__), given)
    if given == "math_verify":
        require_math_verify()
    if given in NAMED:
        return RewardFunction(given, NAMED[given], named=True)
    path, colon, name = given.rpartition(":")
    if not colon:
        raise ConfigError(
            f"rl.reward_funcs has {given!r}{nearest_of(given, NAMED)}; rewards are {', '.join(NAMED)}, or "
            "path.py:function of your own"
        )
    if not Path(path).is_file():
        raise ConfigError(f"rl.reward_funcs has {given!r}, but there is no file {path}; correct the path")
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            f"rl.reward_funcs has {given!r}, but importing it raised {type(error).__name__}: {error}; correct the file"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(
            f"rl.reward_funcs has {given!r}, but {path} has no function {name}; correct the name"
        )
    return RewardFunction(name, function)


class _Bad(Exception):
    """What a reward returned cannot be used."""


def _numbers_of(found: Any, count: int) -> list[float]:
    """A float a completion, NaN where it is absent."""
    if isinstance(found, str) or not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
        raise _Bad(f"it returned {found!r:.60}, not a list with one number a completion")
    if len(found) != count:
        raise _Bad(f"it returned {len(found)} rewards for {count} completions; one for each is needed")
    values = [one.item() if hasattr(one, "item") else one for one in found]
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, numbers.Real):
            raise _Bad(f"it returned {value!r:.60} for completion {number}; a number or None is needed")
        if value is not None and math.isinf(value):
            raise _Bad(f"it returned {value} for completion {number}; a finite number or None is needed")
    return [math.nan if value is None else float(value) for value in values]


def _one(
    function: RewardFunction, group: Graded, step: int, longest: int, alone: bool = False
) -> dict[str, Any]:
    """The rewards of a group with what was logged, as JSON takes it; or the `error`, and where it is known of which
    completion."""
    log, count = Verdicts([]), len(group.texts)
    try:
        values = _numbers_of(function(group, step, longest, log), count)
        return {"values": values, "metrics": log.metrics, "extras": log.logged}
    except Exception as error:
        said = str(error) if isinstance(error, _Bad) else f"it raised {type(error).__name__}: {error}"
        if alone or isinstance(error, _Bad):
            return {"error": said, "at": 0 if alone else None}
    for number in range(count):
        single = Graded(group.prompt, group.texts[number : number + 1], group.ids[number : number + 1])
        found = _one(function, single, step, longest, alone=True)
        if "error" in found:
            return {"error": found["error"], "at": number}
    return {"error": said, "at": None}


class Rewards:
    """The rewards of a run. `close` ends their processes."""

    def __init__(
        self,
        functions: Sequence[str | Callable],
        prompts: Sequence[Prompt],
        *,
        longest: int,
        workers: int = 4,
        timeout: float = 60.0,
    ):
        """`longest`: tokens of a completion; `timeout`: seconds of a call with a group. workers 0: in this process,
        where nothing can be timed. Raises ConfigError for a function that there is not."""
        self.functions = [reward_function(one) for one in functions]
        names = [one.name for one in self.functions]
        self.names = [f"{n}_{k}" if names.count(n) > 1 else n for k, n in enumerate(names)]
        self.prompts, self._longest, self._timeout = list(prompts), longest, timeout
        apart = any(not one.named or one.name in IN_PROCESSES for one in self.functions)
        self._workers = [_Worker(self) for _ in range(workers if apart else 0)]
        self._owner = os.getpid()
        atexit.register(self.close)  # before multiprocessing waits for processes that are no daemons

    def __call__(self, groups: Sequence[tuple[int, list[str], list[list[int]]]], step: int = 0) -> Verdicts:
        """Of groups (index of the prompt, texts, ids). Raises DataError, which names function and completion."""
        jobs = [
            (kind, index, texts, ids, step)
            for index, texts, ids in groups
            for kind in range(len(self.functions))
        ]
        found = self._spread(jobs) if self._workers else [self.work(job) for job in jobs]
        verdicts = Verdicts([])
        for job, said in zip(jobs, found):
            if "error" in said:
                raise self._error(job, said)
            for name, values in said["metrics"].items():
                verdicts.metrics.setdefault(name, []).extend(values)
        kinds = len(self.functions)
        for at in range(0, len(found), kinds):
            of_group = found[at : at + kinds]
            verdicts.rewards.append(np.array([said["values"] for said in of_group], dtype=float).T)
            logged = {name: values for said in of_group for name, values in said["extras"].items()}
            count = len(verdicts.rewards[-1])
            rows = [
                {name: values[n] for name, values in logged.items() if n < len(values)} for n in range(count)
            ]
            verdicts.extras.append(rows)
        return verdicts

    def work(self, job: Sequence[Any]) -> dict[str, Any]:
        """What `_one` says of a job (kind, prompt, texts, ids, step), in this process."""
        kind, index, texts, ids, step = job
        return _one(self.functions[kind], Graded(self.prompts[index], texts, ids), step, self._longest)

    def _error(self, job: Sequence[Any], said: dict[str, Any]) -> DataError:
        kind, index, texts, *_ = job
        at, prompt = said["at"], self.prompts[index]
        which = f"completion {at}, {texts[at]!r:.80}," if at is not None else f"the {len(texts)} completions"
        out = "correct the function, or return None where there is no reward"
        if self.functions[kind].named:
            out = "correct the data, or choose another of rl.reward_funcs"
        return DataError(
            f"the reward {self.names[kind]} failed on {which} of prompt {prompt.id} ({prompt.where}): "
            f"{said['error']}; {out}"
        )

    def _spread(self, jobs: Sequence[Any]) -> list[dict[str, Any]]:
        """Of each job what a worker says of it, in order; the first error ends it."""
        found: list[Any] = [None] * len(jobs)
        waiting, busy = deque(range(len(jobs))), {}
        idle = list(self._workers)
        while waiting or busy:
            while waiting and idle:
                worker, number = idle.pop(), waiting.popleft()
                worker.send(jobs[number])
                busy[worker.pipe] = (worker, number, time.monotonic() + self._timeout)
            soonest = min(deadline for *_, deadline in busy.values())
            for pipe in wait(list(busy), max(0.0, soonest - time.monotonic())):
                worker, number, _ = busy.pop(pipe)
                found[number] = worker.receive()
                idle.append(worker)
                if "error" in found[number]:
                    self._stop(busy)
                    raise self._error(jobs[number], found[number])
            for _, number, deadline in list(busy.values()):
                if time.monotonic() >= deadline:
                    self._stop(busy)
                    raise self._error(jobs[number], self._hanging(jobs[number]))
        return found

    def _stop(self, busy: dict) -> None:
        """Ends the workers that are at work, and starts others in their places."""
        for worker, *_ in busy.values():
            worker.restart()
        busy.clear()

    def _hanging(self, job: Sequence[Any]) -> dict[str, Any]:
        """Which completion of a job took too long: each is tried alone."""
        kind, index, texts, ids, step = job
        worker = self._workers[0]
        for at in range(len(texts)):
            worker.send((kind, index, texts[at : at + 1], ids[at : at + 1], step))
            if not worker.pipe.poll(self._timeout):
                worker.restart()
                return {
                    "error": f"it did not return within {self._timeout:g} s (rl.reward_timeout)",
                    "at": at,
                }
            worker.receive()
        return {
            "error": f"together they took longer than {self._timeout:g} s (rl.reward_timeout)",
            "at": None,
        }

    def close(self) -> None:
        atexit.unregister(self.close)
        if os.getpid() != self._owner:  # what a reward has forked ends by itself
            return
        for worker in self._workers:
            worker.end()
        self._workers = []


class _Worker:
    """A forked process that works for `rewards`: closures, and what they hold, need no pickling. It is no daemon, which
    could have no processes of its own, but the first of a group that is killed together."""

    def __init__(self, rewards: Rewards):
        self._rewards = rewards
        self.restart(first=True)

    def restart(self, first: bool = False) -> None:
        if not first:
            self.end()
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(theirs, self._rewards), daemon=False)
        self._process.start()
        with contextlib.suppress(OSError):  # the process does so too, whichever comes first
            os.setpgid(self._process.pid, self._process.pid)
        theirs.close()

    def send(self, job: Sequence[Any]) -> None:
        with contextlib.suppress(OSError):  # of one that is gone: `receive` says so
            self.pipe.send_bytes(json.dumps(job).encode())

    def receive(self) -> dict[str, Any]:
        try:
            return json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            self.restart()
            return {"error": f"its process ended with exit code {code}", "at": None}

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self.pipe.close()


def _serve(pipe: Connection, rewards: Rewards) -> None:
    """In the worker: one job after the other, until the trainer is gone."""
    os.setpgid(0, 0)  # an interrupt is the trainer's
    signal.set_wakeup_fd(-1)
    os.register_at_fork(after_in_child=_take_signals)
    gc.freeze()  # what the trainer left behind is not ended here: a process group's end waits for threads of its own
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)
        pipe.send_bytes(json.dumps(rewards.work(job)).encode())


def _take_signals() -> None:
    """In a process that a reward starts: the trainer's handlers take note of a signal and go on, so that a pool of
    processes would never end."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
