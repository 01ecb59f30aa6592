"""A trajectory: a multi-turn completion in progress.

    prompt ids │ turn (sampled) │ tool results (added) │ turn (sampled) │ …

Sampled ids are kept as sampled. `ids` holds the tokens after the prompt; the next request sends prompt and `ids` to the
engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.generation.requests import Completion
from megalith.rl.rollouts.routes import EncodedRoutes, new_routes
from megalith.rl.rollouts.segments import append_segment

Message = dict[str, Any]


@dataclass
class Trajectory:
    """A trajectory in progress. All ranks that generate together store its tokens; only the first stores its
    messages.
    """

    slot: int  # number within its batch, and of its environment
    position: int  # of its prompt in the run's stream
    generation: int
    prompt_index: int
    prompt_ids: list[int]
    has_own_prompt: bool = False  # the environment has changed the prompt
    messages: list[Message] = field(default_factory=list)  # prompt and transcript
    prompt_messages: int = 0  # of these, the prompt's
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    routes: list[EncodedRoutes] = field(default_factory=list)  # in pieces, as in Sampled
    routed_tokens: int = 0  # tokens of prompt and completion whose routes are recorded
    last_turn: list[int] = field(default_factory=list)
    turns: int = 0
    calls: int = 0
    has_ended: bool = False
    is_truncated: bool = False
    is_lost: bool = False  # its environment hung, crashed or raised
    is_rewritten: bool = False  # the template would render its history differently
    reward: float | None = None  # the environment's or the agent's
    turn_rewards: list[float] = field(default_factory=list)  # the environment's for each step
    branches: list[Trajectory] = field(
        default_factory=list
    )  # other conversations of its session (agent_session.py)

    @property
    def request(self) -> list[int]:
        """Token ids of the prompt and all turns so far, which are the prompt of the next turn."""
        return [*self.prompt_ids, *self.ids]

    @property
    def transcript(self) -> list[Message]:
        """Messages of the trajectory after the prompt."""
        return self.messages[self.prompt_messages :]

    def sample(self, completion: Completion) -> None:
        """Append a sampled turn. A truncated turn, without an end-of-sequence token, ends the trajectory."""
        ids, versions = list(completion.ids), list(map(int, completion.versions))
        self.routes += new_routes(completion.routes, self.routed_tokens)
        self.routed_tokens = len(self.request) + len(ids) - 1
        self.ids += ids
        self.logprobs += map(float, completion.logprobs)
        self.versions += versions if len(versions) == len(ids) else versions * len(ids)
        self.segments = append_segment(self.segments, len(ids), is_sampled=True)
        self.last_turn = ids
        self.turns += 1
        if completion.truncated:
            self.end(is_truncated=True)

    def ends_with(self, stop_ids: Sequence[int]) -> bool:
        """Return True if the last token of the last turn is one of these ids."""
        return bool(self.last_turn) and self.last_turn[-1] in stop_ids

    def add(self, ids: Sequence[int]) -> None:
        """Append tokens that the model did not sample."""
        self.ids += ids
        self.logprobs += [float("nan")] * len(ids)
        self.versions += self.versions[-1:] * len(ids)
        self.segments = append_segment(self.segments, len(ids), is_sampled=False)

    def end(self, is_truncated: bool = False) -> None:
        """End the trajectory."""
        self.has_ended, self.is_truncated = True, is_truncated
