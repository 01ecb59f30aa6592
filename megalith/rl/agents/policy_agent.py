"""The policy as an agent: multi-turn rollouts with tools and environments.

    start environments ─▶ sample one turn of every open trajectory ─▶ parse its calls ─▶ run them in other processes
                                        ▲                                                          │
                                        └────────── append the tokens that the template adds ◀─────┘

A turn depends only on the weights and on (seed, position of the prompt, number in the group, tokens so far), and tool
results are appended in the order of the calls. A trajectory therefore depends neither on the other trajectories of the
batch nor on the order in which tools return. Ranks that generate together sample the same tokens; the first one runs
the tools and sends the added tokens to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import current_thread, main_thread
from typing import Any

from megalith.config.rl import RlConfig
from megalith.data.chat.call_formats import call_format, tokenizer_response_template
from megalith.data.chat.chat_template import template_of
from megalith.data.chat.conversations import template_arguments
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError, MegalithError
from megalith.generation.requests import MAX_GENERATIONS, Completion, Sampling
from megalith.rl.agents.overlapped_turns import sample_overlapped
from megalith.rl.agents.trajectory import Trajectory
from megalith.rl.agents.turn_steps import LoggedMetrics, TurnSteps
from megalith.rl.agents.turn_template import TurnTemplate
from megalith.rl.environments.environments import EnvironmentHost, EnvironmentKind, Factory
from megalith.rl.rollouts.prompts import Prompt
from megalith.rl.tools.tool_functions import Schema, load_tools, tool_schema
from megalith.rl.tools.tool_pool import ToolPool

Share = Callable[[Any], Any]
"""Returns the first rank's JSON value on every rank of a replica."""
RequestKey = Callable[[int, int, int], int]
"""Sampling key of a request from (position of the prompt, index of the completion, number of its tokens so far)."""


class PolicyAgent(TurnSteps):
    """Samples multi-turn trajectories with the tools, the environment and the chat template of a run."""

    def __init__(
        self,
        rl: RlConfig,
        tokenizer: Tokenizer | None,
        tools: Sequence[str | Callable] | None = None,
        environment: Factory | None = None,
    ):
        """Load tools and environment.

        Args:
            rl: section `rl` of the configuration.
            tokenizer: the model's tokenizer, with a chat template.
            tools: functions that replace `rl.tools`.
            environment: factory that replaces `rl.environment`.

        Raises:
            ConfigError: if a tool or the template is unusable.
        """
        self._rl = rl
        self.functions = load_tools(rl.tool_paths if tools is None else tools)
        kind = environment or rl.environment
        self.environment = None if kind is None else EnvironmentKind(kind)
        methods = {} if self.environment is None else self.environment.methods
        if repeated := sorted(self.functions.keys() & methods.keys()):
            raise ConfigError(
                f"rl.tools and rl.environment both define {repeated[0]}; rename one of the two tools"
            )
        self.schemas: list[Schema] = [tool_schema(function) for function in self.functions.values()]
        self.schemas += [] if self.environment is None else self.environment.schemas()
        template = None if tokenizer is None else template_of(tokenizer)
        if template is None:
            raise ConfigError(
                "rl.tools and rl.environment need a chat template, which the tokenizer does not have; add "
                "chat_template.jinja to its folder"
            )
        self._tokenizer, self._template = tokenizer, TurnTemplate(tokenizer, template)
        self._response_template = tokenizer_response_template(tokenizer)
        self._parse = (
            call_format(rl.tool_call_format, template.tool_source, self._response_template)
            if self.schemas
            else None
        )
        self._check_rewards()
        self._prompts: Sequence[Prompt] = ()
        self._pool: ToolPool | None = None

    def _check_rewards(self) -> None:
        if not self._rl.rewards and not (self.environment and self.environment.has_reward):
            raise ConfigError(
                "rl.reward_funcs is not set, and the environment has no get_reward, so completions would have no "
                "reward; add one of the two"
            )

    @property
    def reward_name(self) -> str | None:
        """Metric name of the environment's reward. None if the environment gives no reward."""
        has_reward = self.environment is not None and self.environment.has_reward
        return self.environment.name if has_reward else None

    def notes(self) -> list[str]:
        """Return notes to be printed in the run's log."""
        names = [schema["function"]["name"] for schema in self.schemas]
        notes = [f"tools: {', '.join(names)}"] if names else []
        if self.environment is not None:
            notes.append(f"environment: {self.environment.name}")
        return notes

    def take_problems(self) -> list[str]:
        """Return an empty list: tool failures are logged as metrics."""
        return []

    def open(self, prompts: Sequence[Prompt]) -> None:
        """Store the run's prompts. `sample` refers to them by index."""
        self._prompts = prompts

        def make_host() -> EnvironmentHost:
            return EnvironmentHost(self.environment, prompts, self._rl.prompt_column)

        self._pool = ToolPool(
            self.functions,
            make_host if self.environment else None,
            workers=self._rl.tool_workers,
            timeout=self._rl.tool_timeout,
        )

    def prepare(self, trajectories: int) -> None:
        """Start the processes for this number of trajectories. Call it before `sample` is called in another thread."""
        self._pool.prepare(trajectories)

    def close(self) -> None:
        """End the processes of tools and environments."""
        if self._pool is not None:
            self._pool.close()

    def sample(
        self,
        engine: Any,
        requests: Sequence[tuple[int, int]],
        sampling: Sampling,
        num_generations: int,
        max_prompt_tokens: int,
        *,
        is_first: bool,
        share: Share,
        request_key: RequestKey,
        timed: Callable[[str], AbstractContextManager],
    ) -> tuple[list[Trajectory], LoggedMetrics]:
        """Sample complete trajectories.

        Args:
            engine: the sampler.
            requests: position and prompt index of each group.
            sampling: sampling parameters. `max_new_tokens` limits all turns and tool results of a trajectory together.
            num_generations: trajectories per prompt.
            max_prompt_tokens: maximum tokens of a prompt that an environment has extended.
            is_first: True on the rank that runs the tools. The other ranks of its replica only sample.
            share: function that sends a value of the first rank to the others.
            request_key: function that returns sampling keys.
            timed: context manager that times a phase.

        Returns:
            Trajectories by group, then generation, and the metrics. Ranks without `is_first` return no trajectories.

        Raises:
            DataError: if an environment makes a prompt too long.
            ConfigError: if the template cannot continue a conversation.
        """
        trajectories = [
            Trajectory(n * num_generations + g, position, g, index, list(self._prompts[index].ids))
            for n, (position, index) in enumerate(requests)
            for g in range(num_generations)
        ]
        logged: LoggedMetrics = {}
        with timed("tools"):
            self._start(trajectories, is_first, share, max_prompt_tokens)
        if self._rl.overlap_tools:
            with timed("generation"):
                self._sample_overlapped(
                    engine, trajectories, sampling, request_key, logged, is_first=is_first
                )
        waiting = [one for one in trajectories if not one.has_ended]
        while waiting and not self._rl.overlap_tools:
            with timed("generation"):
                completions = self._generate(
                    engine, trajectories, waiting, sampling, num_generations, request_key
                )
                for one, completion in zip(waiting, completions, strict=True):
                    one.sample(completion)
            with timed("tools"):
                self._advance(waiting, sampling, is_first, share, logged)
            waiting = [one for one in trajectories if not one.has_ended]
        if not is_first:
            return [], {}
        with timed("tools"):
            self._read_rewards(trajectories)
        self._log(trajectories, logged)
        return trajectories, logged

    def _sample_overlapped(
        self,
        engine: Any,
        trajectories: Sequence[Trajectory],
        sampling: Sampling,
        request_key: RequestKey,
        logged: LoggedMetrics,
        is_first: bool,
    ) -> None:
        """Sample all turns with a live engine while tools run. The sampling keys are the same as in `_generate`."""
        live = engine.live_engine(sampling)
        if not is_first:
            live.follow()
            return
        if current_thread() is main_thread():  # otherwise the processes were prepared there
            self.prepare(len(trajectories))

        def key(one: Trajectory) -> int:
            if self.environment is None and not one.turns:
                return one.position * MAX_GENERATIONS + one.generation
            return request_key(one.position, one.generation, len(one.ids)) * MAX_GENERATIONS

        def advance(waiting: Sequence[Trajectory]) -> None:
            self._append(waiting, self._next_ids(waiting, sampling.max_new_tokens, logged))

        sample_overlapped(live, trajectories, sampling, engine.version, key, advance)

    def _generate(
        self,
        engine: Any,
        trajectories: Sequence[Trajectory],
        waiting: Sequence[Trajectory],
        sampling: Sampling,
        num_generations: int,
        request_key: RequestKey,
    ) -> list[Completion]:
        """Sample one turn. Without an environment, the first turns of a group are sampled in one request, as in a run
        without tools."""
        if self.environment is None and not waiting[0].turns:
            firsts = trajectories[::num_generations]
            return engine.generate(
                [one.prompt_ids for one in firsts],
                sampling,
                keys=[one.position for one in firsts],
                num_generations=num_generations,
            )
        return engine.generate(
            [one.request for one in waiting],
            sampling,
            keys=[request_key(one.position, one.generation, len(one.ids)) for one in waiting],
            max_new_tokens=[sampling.max_new_tokens - len(one.ids) for one in waiting],
        )

    # Environments at the start and at the end

    def _start(
        self, trajectories: Sequence[Trajectory], is_first: bool, share: Share, max_prompt_tokens: int
    ) -> None:
        """Start one environment per trajectory, and set the trajectories' prompts."""
        for one in trajectories:
            one.messages = list(self._prompts[one.prompt_index].messages or ())
            one.prompt_messages = len(one.messages)
        if self.environment is None:
            return

        def act() -> list[Any]:
            results = self._pool.run_environments(
                {one.slot: ["start", one.prompt_index] for one in trajectories}
            )
            prompts = [self._prompt(one, results[one.slot]) for one in trajectories]
            if trajectories and all(one.is_lost for one in trajectories):
                raise self._start_error(trajectories[0], results[trajectories[0].slot])
            return prompts

        for one, prompt_ids in zip(trajectories, self._on_first(act, is_first, share), strict=True):
            prompt = self._prompts[one.prompt_index]
            if len(prompt_ids) > max_prompt_tokens:
                raise DataError(
                    f"the environment extends prompt {prompt.id} ({prompt.where}) to "
                    f"{len(prompt_ids):,} tokens, but at most {max_prompt_tokens:,} fit "
                    "(data.seq_length + 1 − rl.max_completion_length); raise data.seq_length, or "
                    "shorten what reset returns"
                )
            one.has_own_prompt = prompt_ids != one.prompt_ids
            one.prompt_ids = prompt_ids

    def _prompt(self, one: Trajectory, result: dict[str, Any]) -> list[int]:
        """Return the prompt's token ids, including the text that the environment returned when it started."""
        one.is_lost = "messages" not in result
        if one.is_lost or result["messages"] == one.messages:
            return one.prompt_ids
        one.messages, one.prompt_messages = result["messages"], len(result["messages"])
        return self._template.prompt_ids(one.messages, self._arguments(one))

    def _start_error(self, one: Trajectory, result: dict[str, Any]) -> DataError:
        prompt = self._prompts[one.prompt_index]
        return DataError(
            f"no environment {self.environment.name} could be started; for prompt {prompt.id} ({prompt.where}), "
            f"{result.get('failed') or result['text']}; correct the environment"
        )

    def _arguments(self, one: Trajectory) -> dict[str, Any]:
        arguments = template_arguments(self._prompts[one.prompt_index].columns)
        return arguments | ({"tools": self.schemas} if self.schemas else {})

    def _read_rewards(self, trajectories: Sequence[Trajectory]) -> None:
        """Get the rewards from the environments whose processes are still running."""
        if self.environment is None or self.environment.steps or not self.environment.has_reward:
            return
        results = self._pool.run_environments(
            {one.slot: ["reward"] for one in trajectories if not one.is_lost}
        )
        for slot, result in results.items():
            one = trajectories[slot]
            one.reward, one.is_lost = result.get("reward"), "reward" not in result

    # Between two turns

    def _on_first(self, act: Callable[[], Any], is_first: bool, share: Share) -> Any:
        """Call `act` on the first rank and return its result on every rank. If it raises, raise its error on every
        rank.
        """
        value: Any = None
        if is_first:
            try:
                value = {"result": act()}
            except MegalithError as error:
                value = {"error": str(error), "is_setting": isinstance(error, ConfigError)}
        value = share(value)
        if "error" in value:
            raise (ConfigError if value["is_setting"] else DataError)(value["error"])
        return value["result"]

    def _advance(
        self,
        waiting: Sequence[Trajectory],
        sampling: Sampling,
        is_first: bool,
        share: Share,
        logged: LoggedMetrics,
    ) -> None:
        """Run the tool calls of the sampled turns.

        Append the results and the template's text, or end the trajectories.
        """

        act = lambda: self._next_ids(waiting, sampling.max_new_tokens, logged)  # noqa: E731
        self._append(waiting, self._on_first(act, is_first, share))

    def _next_ids(
        self, waiting: Sequence[Trajectory], max_tokens: int, logged: LoggedMetrics
    ) -> list[list[int] | bool]:
        """Run the tool calls of the sampled turns. Returns the result of `_added_ids` for each turn."""
        turns = [self._parsed(one) for one in waiting]
        uses_steps = self.environment is not None and self.environment.steps
        added = self._step(waiting) if uses_steps else self._answer(waiting, turns, logged)
        return [self._added_ids(one, added[one.slot], max_tokens) for one in waiting]

    @staticmethod
    def _append(waiting: Sequence[Trajectory], added: Sequence[list[int] | bool]) -> None:
        """Append the results of `_next_ids` to the trajectories, or end them."""
        for one, ids in zip(waiting, added, strict=True):
            if one.has_ended:
                continue
            if isinstance(ids, bool):
                one.end(is_truncated=ids)
            else:
                one.add(ids)

    # Metrics

    def _log(self, trajectories: Sequence[Trajectory], logged: LoggedMetrics) -> None:
        """Record the metrics of completed trajectories. Their means are logged."""
        logged["turns"] = [float(one.turns) for one in trajectories]
        logged["trajectory_length"] = [float(len(one.ids)) for one in trajectories]
        logged["history_rewritten"] = [float(one.is_rewritten) for one in trajectories]
        if self.schemas:
            logged["tools/calls"] = [float(one.calls) for one in trajectories]
        if self.environment is not None:
            logged["environments_lost"] = [float(one.is_lost) for one in trajectories]
