"""Steps between two turns: parse and run the turn's tool calls, and append their results to the trajectory as tokens.

Results are appended in the order of the calls, so the order in which tools return does not change a trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megalith.data.chat.call_formats import (
    ParseContext,
    ParsedTurn,
    ToolCall,
)
from megalith.rl.agents.trajectory import Message, Trajectory
from megalith.rl.tools.tool_pool import Answer

LoggedMetrics = dict[str, list[float]]


class TurnSteps:
    """Base class of PolicyAgent: runs a turn's tool calls and returns the tokens to append to the trajectory."""

    def turn_text(self, ids: Sequence[int]) -> str:
        """Return the text of a sampled turn, without the token that ends it."""
        return self._tokenizer.decode(ids[:-1] if ids and ids[-1] in self._tokenizer.stop_ids else ids)

    def _parsed(self, one: Trajectory) -> ParsedTurn:
        """Parse the turn that was just sampled and append its message to the trajectory."""
        text = self.turn_text(one.last_turn)
        turn = ParsedTurn({"role": "assistant", "content": text})
        if self._parse is not None and not one.has_ended:
            prefix = (
                self._tokenizer.decode(one.request[: -len(one.last_turn)]) if self._response_template else ""
            )
            end = self._tokenizer.decode(one.last_turn[-1:])
            context = ParseContext(prefix, self.schemas, end, self._response_template)
            turn = self._parse(text, context)
        one.messages.append(turn.message)
        return turn

    def _is_last_turn(self, one: Trajectory) -> bool:
        return one.has_ended or one.is_lost or one.turns == self._rl.max_turns

    def _step(self, waiting: Sequence[Trajectory]) -> dict[int, list[Message] | None]:
        """Call `step` of each environment. Return the observations, in the order of `waiting`; None where the
        trajectory ends.
        """
        present = [one for one in waiting if not one.is_lost]
        jobs = {one.slot: ["step", self.turn_text(one.last_turn)] for one in present}
        results, added = self._pool.run_environments(jobs), {}
        for one in waiting:
            result = results.get(one.slot, {})
            one.is_lost = "done" not in result
            if one.is_lost:
                one.reward, one.turn_rewards, added[one.slot] = None, [], None
                continue
            discount = self._rl.step_discount ** len(one.turn_rewards)
            one.turn_rewards.append(result["reward"])
            one.reward = (one.reward or 0.0) + discount * result["reward"]
            is_done = result["done"] or self._is_last_turn(one)
            added[one.slot] = None if is_done else result["messages"]
        return added

    def _answer(
        self, waiting: Sequence[Trajectory], turns: Sequence[ParsedTurn], logged: LoggedMetrics
    ) -> dict[int, list[Message] | None]:
        """Run the tool calls of each turn. Return the results, in the order of `waiting`; None where the trajectory
        ends.
        """
        calls = {one.slot: [] if self._is_last_turn(one) else turn.calls for one, turn in zip(waiting, turns)}
        trajectories = {one.slot: one for one in waiting}
        answers: dict[tuple[int, int], Answer] = {}
        runnable: list[tuple[int, int]] = []
        for slot, calls_of_turn in calls.items():
            for number, call in enumerate(calls_of_turn):
                if (refusal := self._refusal(trajectories[slot], call)) is not None:
                    answers[slot, number] = {"text": refusal, "is_error": True, "seconds": 0.0}
                else:
                    trajectories[slot].calls += 1
                    runnable.append((slot, number))
        methods = {} if self.environment is None else self.environment.methods
        tools = [(slot, n) for slot, n in runnable if calls[slot][n].name not in methods]
        answers |= zip(tools, self._pool.call_tools([calls[slot][n] for slot, n in tools]))
        self._call_environments(trajectories, calls, [key for key in runnable if key not in tools], answers)
        for (slot, number), answer in answers.items():
            self._log_call(logged, calls[slot][number].name, answer)
        added: dict[int, list[Message] | None] = {}
        for slot, calls_of_turn in calls.items():
            is_over = not calls_of_turn or trajectories[slot].is_lost
            added[slot] = (
                None
                if is_over
                else [
                    {"role": "tool", "name": call.name, "content": answers[slot, number]["text"]}
                    for number, call in enumerate(calls_of_turn)
                ]
            )
        return added

    def _refusal(self, one: Trajectory, call: ToolCall) -> str | None:
        """Return the error message if a tool call must not be run, otherwise None."""
        if call.error is not None:
            return call.error
        limit = self._rl.max_tool_calls
        if limit is not None and one.calls >= limit:
            return f"error: the limit of {limit} tool calls is reached; answer without tools"
        return None

    def _call_environments(
        self,
        trajectories: Mapping[int, Trajectory],
        calls: Mapping[int, Sequence[ToolCall]],
        keys: Sequence[tuple[int, int]],
        answers: dict[tuple[int, int], Answer],
    ) -> None:
        """Call methods of environments: sequentially within an environment, concurrently across environments."""
        for number in sorted({number for _, number in keys}):
            slots = [slot for slot, n in keys if n == number and not trajectories[slot].is_lost]
            jobs = {slot: ["call", calls[slot][number].name, calls[slot][number].arguments] for slot in slots}
            for slot, answer in self._pool.run_environments(jobs).items():
                trajectories[slot].is_lost = "lost" in answer
                answers[slot, number] = answer

    def _added_ids(self, one: Trajectory, added: list[Message] | None, max_tokens: int) -> list[int] | bool:
        """Return the tokens between this turn and the next one.

        If the trajectory ends here, return whether it is truncated: True if these tokens and one sampled token do not
        fit.
        """
        if one.has_ended:
            return one.is_truncated
        if added is None:
            return False
        ids, is_rewritten = self._template.added_ids(
            one.messages, added, self._arguments(one), one.last_turn[-1]
        )
        one.is_rewritten |= is_rewritten
        if len(one.ids) + len(ids) >= max_tokens:
            return True
        one.messages += added
        return ids

    def _log_call(self, logged: LoggedMetrics, name: str, answer: Answer) -> None:
        names = ["tools"]
        if len(self.schemas) > 1 and any(name == one["function"]["name"] for one in self.schemas):
            names.append(f"tools/{name}")
        for prefix in names:
            logged.setdefault(f"{prefix}/errors", []).append(float(answer["is_error"]))
            logged.setdefault(f"{prefix}/seconds", []).append(answer["seconds"])
