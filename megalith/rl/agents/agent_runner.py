"""Agent functions, each run in its own process or as an asynchronous task of this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megalith.rl.agents.agent_client import make_client
from megalith.rl.rewards.reward_number import reward_number
from megalith.rl.rewards.reward_workers import RewardWorker, run_jobs
from megalith.rl.tools.tool_functions import answer_text

Agent = Callable[[Any, Mapping[str, Any]], Any]
Result = dict[str, Any]
"""`reward`, a number or None; or `failed`, a message."""


async def run_agent(agent: Agent, row: Mapping[str, Any], base_url: str, timeout: float) -> Result:
    """Call an agent. Returns its reward, or a description of its failure.

    Args:
        agent: sync or async function of (client, row).
        row: columns of the prompt's record.
        base_url: address of the session's endpoint.
        timeout: seconds per request.
    """
    try:
        value = agent(make_client(base_url, timeout), dict(row))
        value = await value if inspect.isawaitable(value) else value
        return {"reward": reward_number(value, "it returned")}
    except Exception as error:
        return {"failed": answer_text(f"raised {type(error).__name__}: {error}")}


class AgentRunner:
    """Runs the agents of a rollout batch. Processes are reused in later batches."""

    def __init__(self, agent: Agent, rows: Sequence[Mapping[str, Any]], workers: int, timeout: float):
        """Prepare to run.

        Args:
            agent: the function.
            rows: columns of all prompts, by index.
            workers: number of agents that run at the same time, each in its own process; 0: run them as tasks of this
                process.
            timeout: seconds per agent.
        """
        self._agent, self._rows, self._size, self._timeout = agent, rows, workers, timeout
        self._workers: list[RewardWorker] = []

    def prepare(self, jobs: int) -> None:
        """Start the processes for this number of jobs. Call it in the main thread, because forks in other threads may
        crash.

        For the same reason, a process that has ended is replaced here, before the next batch.
        """
        self._workers = [worker for worker in self._workers if not worker.has_ended]
        while len(self._workers) < min(self._size, jobs):
            self._workers.append(RewardWorker(lambda job: asyncio.run(self._call(*job)), is_replaced=False))

    def run(self, jobs: Sequence[tuple[int, str]], on_end: Callable[[int, Result], None]) -> None:
        """Run an agent for each job, in the processes that `prepare` has started.

        Args:
            jobs: prompt index and address of the session's endpoint, for each job.
            on_end: called with each job's number and result, in the order in which they end.
        """
        if not self._size:
            asyncio.run(self._gather(jobs, on_end))
            return
        for number, result in run_jobs(self._workers, jobs, self._timeout):
            if result is None:
                result = self._late()
            elif "error" in result:
                result = {"failed": result["error"]}
            on_end(number, result)

    def _late(self) -> Result:
        return {"failed": f"did not return within {self._timeout:g} s (rl.agent_timeout)"}

    async def _call(self, index: int, base_url: str) -> Result:
        return await run_agent(self._agent, self._rows[index], base_url, self._timeout)

    async def _gather(self, jobs: Sequence[tuple[int, str]], on_end: Callable[[int, Result], None]) -> None:
        async def bounded(number: int, job: tuple[int, str]) -> None:
            try:
                result = await asyncio.wait_for(self._call(*job), self._timeout)
            except TimeoutError:
                result = self._late()
            on_end(number, result)

        await asyncio.gather(*(bounded(number, job) for number, job in enumerate(jobs)))

    def close(self) -> None:
        """End the processes."""
        for worker in self._workers:
            if not worker.has_ended:
                worker.end()
        self._workers = []
