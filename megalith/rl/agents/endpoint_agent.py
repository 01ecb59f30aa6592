"""Agents that need no code of Megalith (`rl.agent`): they send requests to an OpenAI-compatible endpoint during
training.

    agent processes ─▶ http://127.0.0.1:PORT/SESSION/v1 ─▶ live engine of the replica
                                     │
                                     └─▶ sessions: sampled ids, log-probabilities, branches ─▶ trajectories

Each completion has a session with its own address. Every request is sampled with the run's temperature and without
filters, whatever the agent sets, because the trainer computes its log-probabilities that way. The first rank of a
replica serves; the others follow its engine.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Thread, current_thread, main_thread
from typing import Any

from megalith.config.load_extension import load_extension
from megalith.config.rl import RlConfig
from megalith.data.chat.chat_template import template_of
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.generation.live_engine import LiveEngine
from megalith.generation.requests import Sampling
from megalith.rl.agents.agent_runner import Agent, AgentRunner, Result
from megalith.rl.agents.agent_session import AgentSession, RequestKey, SessionRules
from megalith.rl.agents.trajectory import Trajectory
from megalith.rl.agents.turn_template import TurnTemplate
from megalith.rl.rollouts.prompts import Prompt
from megalith.serve.chat_format import ChatFormat
from megalith.serve.http_server import HttpServer, Limits
from megalith.serve.openai_service import Access, OpenAiService

SETTING = "rl.agent"
MAX_OPEN = 1 << 16  # connections and completions of all sessions
LoggedMetrics = dict[str, list[float]]


class EndpointAgent:
    """The agent of a run. It has the same interface as PolicyAgent."""

    schemas: Sequence[dict[str, Any]] = ()

    def __init__(self, rl: RlConfig, tokenizer: Tokenizer | None, agent: Agent | None = None):
        """Load the agent.

        Args:
            rl: section `rl` of the configuration.
            tokenizer: the model's tokenizer, with a chat template.
            agent: function that replaces `rl.agent`.

        Raises:
            ConfigError: if the function does not exist, or the template is unusable.
        """
        self._rl = rl
        self._agent = agent or load_extension(rl.agent, {}, SETTING)
        self.name = getattr(self._agent, "__name__", type(self._agent).__name__)
        template = None if tokenizer is None else template_of(tokenizer)
        if template is None:
            raise ConfigError(
                "rl.agent needs a chat template, which the tokenizer does not have; add chat_template.jinja to its "
                "folder"
            )
        self._tokenizer = tokenizer
        self._template = TurnTemplate(tokenizer, template)
        self._chat = ChatFormat(tokenizer, template, rl.tool_call_format)
        self._prompts: Sequence[Prompt] = ()
        self._runner: AgentRunner | None = None
        self._owner = os.getpid()
        self._problems: list[str] = []
        self._has_noted_sampling = False

    @property
    def reward_name(self) -> str | None:
        """Metric name of the reward that the agent returns. None if reward functions score its completions."""
        return None if self._rl.rewards else self.name

    def notes(self) -> list[str]:
        """Return notes to be printed in the run's log."""
        return [f"agent: {self.name}"]

    def take_problems(self) -> list[str]:
        """Return and clear the log lines about agents that have failed since the last call."""
        problems, self._problems = self._problems, []
        return problems

    def open(self, prompts: Sequence[Prompt]) -> None:
        """Store the run's prompts. `sample` refers to them by index."""
        self._prompts = prompts
        rows = [{self._rl.prompt_column: one.messages or one.text, **one.columns} for one in prompts]
        self._runner = AgentRunner(self._agent, rows, self._rl.agent_workers, self._rl.agent_timeout)

    def prepare(self, trajectories: int) -> None:
        """Start the processes for this number of trajectories. Call it before `sample` is called in another thread."""
        self._runner.prepare(trajectories)

    def close(self) -> None:
        """End the processes of agents."""
        if self._runner is not None and os.getpid() == self._owner:
            self._runner.close()

    def sample(
        self,
        engine: Any,
        requests: Sequence[tuple[int, int]],
        sampling: Sampling,
        num_generations: int,
        max_prompt_tokens: int,
        *,
        is_first: bool,
        share: Callable[[Any], Any],
        request_key: RequestKey,
        timed: Callable[[str], AbstractContextManager],
    ) -> tuple[list[Trajectory], LoggedMetrics]:
        """Run one agent per trajectory. See PolicyAgent.sample for arguments and results.

        Raises:
            DataError: if all agents failed before anything was sampled.
        """
        live = engine.live_engine(sampling)
        if not is_first:
            with timed("generation"):
                live.follow()
            return [], {}
        rules = SessionRules(
            self._rl,
            self._tokenizer,
            self._template,
            sampling,
            max_prompt_tokens,
            engine.version,
            request_key,
        )
        sessions = [
            AgentSession(n * num_generations + g, position, g, index, rules)
            for n, (position, index) in enumerate(requests)
            for g in range(num_generations)
        ]
        with timed("generation"):
            self._run(live, sessions)
        trajectories = [one.close(self._prompts[one.prompt_index].ids) for one in sessions]
        self._report(sessions)
        return trajectories, self._metrics(sessions, trajectories)

    def _run(self, live: LiveEngine, sessions: Sequence[AgentSession]) -> None:
        """Run the agents of all sessions, and run the engine until the last agent has returned."""
        by_token = {secrets.token_urlsafe(16): session for session in sessions}
        access = Access(max_requests=MAX_OPEN)
        service = OpenAiService(live, self._tokenizer, self._chat, "policy", access, by_token.get)
        server = HttpServer(service, limits=Limits(max_connections=MAX_OPEN), report=self._problems.append)
        if current_thread() is main_thread():  # otherwise they were prepared there
            self._runner.prepare(len(sessions))
        server.start()
        errors: list[BaseException] = []

        def run_agents() -> None:
            try:
                jobs = [(one.prompt_index, f"{server.url}/{token}/v1") for token, one in by_token.items()]
                self._runner.run(jobs, lambda number, result: self._end(sessions[number], result))
            except BaseException as error:  # raised by the thread of the engine
                errors.append(error)
            finally:
                live.close()

        thread = Thread(target=run_agents, name="agents")
        try:
            thread.start()
            live.run()
        finally:
            thread.join()
            server.close()
        if errors:
            raise errors[0]

    @staticmethod
    def _end(session: AgentSession, result: Result) -> None:
        session.is_closed = True
        session.reward, session.failure = result.get("reward"), result.get("failed")

    def _report(self, sessions: Sequence[AgentSession]) -> None:
        """Record the failures of a batch for the log. Raise DataError if nothing was sampled in any session."""
        failed = [one for one in sessions if one.failure is not None]
        if failed:
            prompt = self._prompts[failed[0].prompt_index]
            text = f"for prompt {prompt.id} ({prompt.where}), {self.name} {failed[0].failure}"
            if not any(one.branches for one in sessions):
                raise DataError(f"no agent has sampled a token: {text}; correct {SETTING}")
            self._problems.append(f"{len(failed):,} of {len(sessions):,} agents failed: {text}")
        silent = sum(not one.branches for one in sessions)
        if silent == len(sessions) and sessions:
            raise DataError(
                f"no agent has sampled a token: {self.name} returned without a request; call the "
                f"client that is passed to it ({SETTING})"
            )
        if any(one.overridden for one in sessions) and not self._has_noted_sampling:
            self._has_noted_sampling = True
            self._problems.append(
                f"{self.name} sets temperature, top_p, top_k or min_p, which have no effect: rollouts are sampled with "
                f"rl.temperature {self._rl.temperature:g}"
            )

    def _metrics(self, sessions: Sequence[AgentSession], trajectories: Sequence[Trajectory]) -> LoggedMetrics:
        """Return the metrics of the completed sessions. Their means are logged."""
        lengths = [len(one.ids) + sum(len(each.ids) for each in one.branches) for one in trajectories]
        return {
            "turns": [float(one.turns) for one in sessions],
            "trajectory_length": list(map(float, lengths)),
            "history_rewritten": [float(one.is_rewritten) for one in trajectories],
            "agents/branches": [float(len(one.branches)) for one in sessions],
            "agents/failed": [float(one.failure is not None) for one in sessions],
            "agents/empty": [float(not one.branches) for one in sessions],
            "agents/refused": [float(one.refused) for one in sessions],
        }
