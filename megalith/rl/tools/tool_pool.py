"""Processes that run tools and environments for a rank, with time limits.

Tools have no state and run in any of `rl.tool_workers` processes. Every instance of an environment has a process of its
own, so that an instance that hangs or crashes loses only its completion. Processes are started when they are first
needed and are used again in later rollout batches.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalith.data.chat.call_formats import ToolCall
from megalith.rl.environments.environments import EnvironmentHost
from megalith.rl.rewards.reward_workers import RewardWorker, run_jobs
from megalith.rl.tools.tool_functions import run_tool

Answer = dict[str, Any]
"""A tool's answer: text, is_error and seconds, and `lost` if the environment's process has ended."""


class ToolPool:
    """The worker processes of a rank, which run until `close`."""

    def __init__(
        self,
        functions: Mapping[str, Callable],
        make_host: Callable[[], EnvironmentHost] | None,
        *,
        workers: int,
        timeout: float,
    ):
        """Prepare to run tools.

        Args:
            functions: the tools by name.
            make_host: makes the host of an environment's instance; None means there is no environment.
            workers: number of processes for tools; 0: run everything in this process, without a time limit.
            timeout: seconds per call.
        """
        self._functions, self._make_host, self._timeout = dict(functions), make_host, timeout
        self._size, self._owner = workers, os.getpid()
        self._workers: list[RewardWorker] = []
        self._hosts: list[Any] = []  # by slot: RewardWorker, or EnvironmentHost without processes
        atexit.register(self.close)  # before multiprocessing waits for processes that are no daemons

    def prepare(self, environments: int) -> None:
        """Start all processes for tools, and processes for this number of environments, if the run uses them."""
        if self._functions:
            self._start_workers(self._size)
        if self._make_host is not None:
            self._start_hosts(environments)

    def _start_workers(self, count: int) -> None:
        while len(self._workers) < min(self._size, count):
            self._workers.append(RewardWorker(lambda job: run_tool(self._functions, *job)))

    def _start_hosts(self, count: int) -> None:
        for _ in range(len(self._hosts), count):
            host = self._make_host()
            self._hosts.append(RewardWorker(host) if self._size else host)

    def call_tools(self, calls: Sequence[ToolCall]) -> list[Answer]:
        """Return the results of tool calls, in order."""
        jobs = [(call.name, call.arguments) for call in calls]
        if not self._size:
            return [run_tool(self._functions, *job) for job in jobs]
        self._start_workers(len(jobs))
        answers: list[Any] = [None] * len(jobs)
        for number, answer in run_jobs(self._workers, jobs, self._timeout):
            answers[number] = self._checked(answer, jobs[number][0])
        return answers

    def _checked(self, answer: Answer | None, name: str) -> Answer:
        """Return the result of a call, or an error message if the process returned none."""
        if answer is not None and "error" not in answer:
            return answer
        reason = (
            f"did not return within {self._timeout:g} s" if answer is None else f"failed: {answer['error']}"
        )
        seconds = self._timeout if answer is None else 0.0
        return {"text": f"error: {name} {reason}", "is_error": True, "seconds": seconds, "lost": True}

    def run_environments(self, jobs: Mapping[int, Sequence[Any]]) -> dict[int, dict[str, Any]]:
        """Run one job per environment and return the results, both keyed by slot. EnvironmentHost lists the jobs.

        Returns:
            The results by slot. If an environment hung or crashed, its result has `lost`, and the reason in `text`.
        """
        slots = list(jobs)
        self._start_hosts(max(slots, default=-1) + 1)
        if not self._size:
            return {slot: self._hosts[slot](jobs[slot]) for slot in slots}
        results, workers = {}, [self._hosts[slot] for slot in slots]
        running = run_jobs(workers, [jobs[slot] for slot in slots], self._timeout, is_pinned=True)
        for number, result in running:
            results[slots[number]] = self._checked(result, "the environment")
        return results

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return
        for worker in [*self._workers, *self._hosts]:
            if isinstance(worker, RewardWorker):
                worker.end()
        self._workers, self._hosts = [], []
