"""Reward functions of completions: built-in ones by name, and user-defined ones.

A function is called with a complete group, the completions of one prompt, so that its result does not depend on the
layout. It has one of two signatures, distinguished by the parameter names. The first may be `async def`:

    TRL    f(prompts, completions, completion_ids, **columns, trainer_state, log_extra, log_metric) -> list
    verl   compute_score(data_source, solution_str, ground_truth, extra_info) -> number or {"score": number, …}

User functions run in worker processes with a time limit per call (reward_workers.py). After an exception, a
time-out or an invalid result, the run stops with an error that names the completion. None and NaN are absent rewards.

For a completion with several turns, a built-in reward reads the last turn and counts sampled tokens. As in TRL, a
function with TRL's signature gets all messages and all tokens. As in verl, one with verl's signature gets the text of
all tokens.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from megalith.config.extensions import REWARDS
from megalith.config.load_extension import load_extension
from megalith.errors import ConfigError, DataError
from megalith.rl.reward_functions.answers import ground_truth
from megalith.rl.rewards.reward_workers import RewardWorker, run_jobs
from megalith.rl.rollouts.prompts import Prompt

Turns = dict[str, Any]
"""A completion of several turns as JSON values: messages, text of all tokens, and sampled_ids."""


@dataclass(frozen=True)
class CompletionGroup:
    """The completions of one prompt."""

    prompt: Prompt
    texts: list[str]  # of completions with several turns, the last one
    ids: list[list[int]]
    turns: list[Turns] | None = None  # one per completion; None: each completion is one turn

    def part(self, number: int) -> CompletionGroup:
        """Return the group with only completion `number`."""
        cut = slice(number, number + 1)
        return CompletionGroup(
            self.prompt, self.texts[cut], self.ids[cut], None if self.turns is None else self.turns[cut]
        )


@dataclass
class RewardResults:
    """Rewards of several groups, and the values that reward functions logged."""

    rewards: list[np.ndarray]  # one float64 [completions, kinds] per group, NaN where absent
    metrics: dict[str, list[float]] = field(default_factory=dict)  # from log_metric
    extras: list[list[dict[str, str]]] = field(
        default_factory=list
    )  # from log_extra, per group and completion
    logged: dict[str, list[str]] = field(
        default_factory=dict
    )  # from log_extra, of the current group, by name


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with its name."""

    name: str
    function: Callable
    is_builtin: bool = False

    @property
    def is_verl(self) -> bool:
        return "solution_str" in inspect.signature(self.function).parameters

    def __call__(
        self, group: CompletionGroup, state: SimpleNamespace, max_tokens: int, log: RewardResults
    ) -> list[Any]:
        prompt, turns = group.prompt, group.turns
        if self.is_builtin:
            counted = group.ids if turns is None else [one["sampled_ids"] for one in turns]
            return [self.function(text, prompt, ids, max_tokens) for text, ids in zip(group.texts, counted)]
        if self.is_verl:
            texts = group.texts if turns is None else [one["text"] for one in turns]
            return [self._score(prompt, text, log) for text in texts]
        count, chat = len(group.texts), prompt.messages is not None
        arguments: dict[str, Any] = {name: [value] * count for name, value in prompt.columns.items()}
        arguments |= dict(
            prompts=[prompt.messages if chat else prompt.text] * count,
            completions=[[{"role": "assistant", "content": t}] if chat else t for t in group.texts]
            if turns is None
            else [one["messages"] for one in turns],
            completion_ids=group.ids,
            trainer_state=state,
            log_metric=lambda name, value: log.metrics.setdefault(name, []).append(float(value)),
            log_extra=lambda name, values: log.logged.setdefault(name, []).extend(map(str, values)),
        )
        parameters = inspect.signature(self.function).parameters.values()
        if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
            arguments = {one.name: arguments[one.name] for one in parameters if one.name in arguments}
        result = self.function(**arguments)
        return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result

    def _score(self, prompt: Prompt, text: str, log: RewardResults) -> Any:
        columns = prompt.columns
        result = self.function(
            data_source=columns.get("data_source"),
            solution_str=text,
            ground_truth=ground_truth(prompt),
            extra_info=columns.get("extra_info"),
        )
        if not isinstance(result, Mapping):
            return result
        for name, value in result.items():
            if name != "score" and isinstance(value, numbers.Real):
                log.metrics.setdefault(name, []).append(float(value))
        return result.get("score")


async def _awaited(value: Any) -> Any:
    return await value


def reward_function(reward: str | Callable) -> RewardFunction:
    """Return a reward function: a built-in one by name, one from `path.py:function`, or the given function.

    Raise ConfigError if it does not exist.
    """
    if callable(reward):
        return _checked(RewardFunction(getattr(reward, "__name__", type(reward).__name__), reward))
    function = load_extension(reward, REWARDS, "rl.reward_funcs")
    getattr(function, "requires", lambda: None)()
    return _checked(RewardFunction(reward.rpartition(":")[2], function, is_builtin=reward in REWARDS))


def _checked(reward: RewardFunction) -> RewardFunction:
    """Return `reward`. Raise ConfigError if it reads TRL's environments, which are in other processes here."""
    if "environments" in inspect.signature(reward.function).parameters:
        raise ConfigError(
            f"the reward function {reward.name} has the parameter environments, but environments run in their own "
            "processes, so reward functions cannot read them; return the reward from the environment's get_reward"
        )
    return reward


class _InvalidResult(Exception):
    """Raised if a reward function returns an unusable value."""


def _reward_values(result: Any, count: int) -> list[float]:
    """Return one float per completion, NaN where absent."""
    if isinstance(result, str) or not hasattr(result, "__len__") or not hasattr(result, "__getitem__"):
        raise _InvalidResult(f"it returned {result!r:.60}, not a list with one number per completion")
    if len(result) != count:
        raise _InvalidResult(
            f"it returned {len(result)} rewards for {count} completions; return one per completion"
        )
    values = [value.item() if hasattr(value, "item") else value for value in result]
    for number, value in enumerate(values):
        if value is not None and not isinstance(value, numbers.Real):
            raise _InvalidResult(
                f"it returned {value!r:.60} for completion {number}; return a number or None"
            )
        if value is not None and math.isinf(value):
            raise _InvalidResult(
                f"it returned {value} for completion {number}; return a finite number or None"
            )
    return [math.nan if value is None else float(value) for value in values]


def _score_group(
    function: RewardFunction,
    group: CompletionGroup,
    state: SimpleNamespace,
    max_tokens: int,
    is_single: bool = False,
) -> dict[str, Any]:
    """Return the rewards of a group and the logged values, as JSON values.

    After an error, the result has `error` instead, and `at`: the index of the completion, if known.
    """
    log, count = RewardResults([]), len(group.texts)
    try:
        values = _reward_values(function(group, state, max_tokens, log), count)
        return {"values": values, "metrics": log.metrics, "extras": log.logged}
    except Exception as error:
        message = (
            str(error) if isinstance(error, _InvalidResult) else f"it raised {type(error).__name__}: {error}"
        )
        if is_single or isinstance(error, _InvalidResult):
            return {"error": message, "at": 0 if is_single else None}
    for number in range(count):
        single = group.part(number)
        outcome = _score_group(function, single, state, max_tokens, is_single=True)
        if "error" in outcome:
            return {"error": outcome["error"], "at": number}
    return {"error": message, "at": None}


class Rewards:
    """The rewards of a run, and the processes that compute them until `close`."""

    def __init__(
        self,
        functions: Sequence[str | Callable],
        prompts: Sequence[Prompt],
        *,
        max_tokens: int,
        workers: int = 4,
        timeout: float = 60.0,
        environment: str | None = None,
        models: Sequence[str] = (),
        max_steps: int = 0,
    ):
        """Load the functions and start worker processes.

        Args:
            functions: names, `path.py:function`, or functions.
            prompts: all prompts, by index.
            max_tokens: maximum tokens of a completion.
            workers: number of processes; 0: compute in this process, without a time limit.
            timeout: seconds per call with a group.
            environment: name of the environment whose own reward is added to the list of rewards.
            models: names of reward models, whose rewards are absent until `ModelRewards` adds them.
            max_steps: training steps of the run, passed to the functions.

        Raises:
            ConfigError: if a function does not exist.
        """
        self.functions = [reward_function(one) for one in functions]
        names = (
            [one.name for one in self.functions] + [*models] + ([] if environment is None else [environment])
        )
        self._environment, self._models = environment, len(models)
        self.model_columns = slice(len(self.functions), len(self.functions) + len(models))
        self.names = [f"{n}_{k}" if names.count(n) > 1 else n for k, n in enumerate(names)]
        self.prompts, self._longest, self._timeout = list(prompts), max_tokens, timeout
        self._max_steps = max_steps
        needs_workers = any(
            not one.is_builtin or getattr(one.function, "is_slow", False) for one in self.functions
        )
        self._workers = [RewardWorker(self.work) for _ in range(workers if needs_workers else 0)]
        self._owner = os.getpid()
        atexit.register(self.close)  # before multiprocessing waits for processes that are no daemons

    def __call__(
        self,
        groups: Sequence[tuple[int, list[str], list[list[int]]]],
        step: int = 0,
        turns: Sequence[list[Turns]] | None = None,
    ) -> RewardResults:
        """Score groups.

        Args:
            groups: prompt index, texts and token ids of each group.
            step: training step, passed to the functions.
            turns: per-group `Turns`, for multi-turn completions. With an environment, each entry has
                `environment_reward`, which is None if the environment gave no reward.

        Raises:
            DataError: if a function fails. The message names the function and the completion.
        """
        all_turns = [None] * len(groups) if turns is None else turns
        jobs = [
            (kind, index, texts, ids, step, turns_of_group)
            for (index, texts, ids), turns_of_group in zip(groups, all_turns, strict=True)
            for kind in range(len(self.functions))
        ]
        outcomes = self._run_jobs(jobs) if self._workers else [self.work(job) for job in jobs]
        results = RewardResults([])
        for job, outcome in zip(jobs, outcomes):
            if "error" in outcome:
                raise self._error(job, outcome)
            for name, values in outcome["metrics"].items():
                results.metrics.setdefault(name, []).extend(values)
        kinds = len(self.functions)
        for number, (_, texts, _) in enumerate(groups):
            group_outcomes, count = outcomes[number * kinds : (number + 1) * kinds], len(texts)
            columns = [outcome["values"] for outcome in group_outcomes]
            columns += [[math.nan] * count] * self._models
            if self._environment is not None:
                columns.append([one["environment_reward"] for one in all_turns[number]])
            results.rewards.append(np.array(columns, dtype=float).T)
            logged = {
                name: values for outcome in group_outcomes for name, values in outcome["extras"].items()
            }
            rows = [
                {name: values[n] for name, values in logged.items() if n < len(values)} for n in range(count)
            ]
            results.extras.append(rows)
        return results

    def work(self, job: Sequence[Any]) -> dict[str, Any]:
        """Run a job (reward index, prompt index, texts, ids, step, turns) in this process and return the result of
        `_score_group`.
        """
        kind, index, texts, ids, step, turns = job
        group = CompletionGroup(self.prompts[index], texts, ids, turns)
        state = SimpleNamespace(global_step=step, max_steps=self._max_steps)
        return _score_group(self.functions[kind], group, state, self._longest)

    def _error(self, job: Sequence[Any], outcome: dict[str, Any]) -> DataError:
        kind, index, texts, *_ = job
        at, prompt = outcome["at"], self.prompts[index]
        which = f"completion {at}, {texts[at]!r:.80}," if at is not None else f"the {len(texts)} completions"
        remedy = "correct the function, or return None for a missing reward"
        if self.functions[kind].is_builtin:
            remedy = "correct the data, or choose another reward in rl.reward_funcs"
        return DataError(
            f"the reward {self.names[kind]} failed on {which} of prompt {prompt.id} ({prompt.where}): "
            f"{outcome['error']}; {remedy}"
        )

    def _run_jobs(self, jobs: Sequence[Any]) -> list[dict[str, Any]]:
        """Distribute jobs over the workers and return the outcomes in order. Stops at the first error."""
        outcomes: list[Any] = [None] * len(jobs)
        with closing(run_jobs(self._workers, jobs, self._timeout)) as results:
            for number, outcome in results:
                if outcome is None or "error" in outcome:
                    break
                outcomes[number] = outcome
            else:
                return outcomes
        raise self._error(jobs[number], outcome or self._find_timeout(jobs[number]))

    def _find_timeout(self, job: Sequence[Any]) -> dict[str, Any]:
        """Find the completion that exceeded the time limit by running each one separately."""
        kind, index, texts, ids, step, turns = job
        worker = self._workers[0]
        for at in range(len(texts)):
            cut = slice(at, at + 1)
            worker.send((kind, index, texts[cut], ids[cut], step, None if turns is None else turns[cut]))
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
        if os.getpid() != self._owner:  # a process forked by a reward ends by itself
            return
        for worker in self._workers:
            worker.end()
        self._workers = []
