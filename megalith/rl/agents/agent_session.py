"""Agent sessions: the requests that an agent sends for one completion, and the trajectories that they form.

A request continues a branch if its conversation begins with the branch's conversation, compared as messages or as token
ids. Sampled ids are kept, and the chat template's tokens are added between turns (turn_template.py). A request that
continues no branch starts a new one, for example a conversation with a rewritten history or the first message of a
sub-agent. The conversation that a new branch begins with is its prompt, which has no loss.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from megalith.config.rl import RlConfig
from megalith.data.chat.call_formats import ParsedTurn
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.generation.choice_text import ChoiceText
from megalith.generation.live_request import LiveRequest
from megalith.generation.requests import MAX_GENERATIONS, Completion, Sampling
from megalith.rl.agents.trajectory import Message, Trajectory
from megalith.rl.agents.turn_template import TurnTemplate
from megalith.serve.openai_requests import CompletionRequest

RequestKey = Callable[[int, int, int], int]


@dataclass(frozen=True)
class SessionRules:
    """Settings that the sessions of a rollout batch share."""

    rl: RlConfig
    tokenizer: Tokenizer
    template: TurnTemplate
    sampling: Sampling
    """Sampling parameters of every request. `max_new_tokens` limits the turns and added tokens of a branch together."""
    max_prompt_tokens: int
    version: int
    """Version of the weights."""
    request_key: RequestKey
    """Sampling key of a request from (position, generation, number)."""


@dataclass
class SessionPrompt:
    """Token ids of a request, and the earlier conversation that it continues, if any."""

    ids: list[int]
    branch: Trajectory | None
    length: int  # tokens of the branch when the request came
    added: list[int]  # tokens after them
    messages: list[Message]  # conversation; empty for prompts without messages
    arguments: dict[str, Any]  # of the template
    repeat: int  # number of earlier requests with these tokens


class AgentSession:
    """The conversations of a completion, each with its own history. The server's threads call the methods."""

    def __init__(self, slot: int, position: int, generation: int, prompt_index: int, rules: SessionRules):
        self.slot, self.position, self.generation, self.prompt_index = (
            slot,
            position,
            generation,
            prompt_index,
        )
        self.branches: list[Trajectory] = []
        """The branches, in the order in which they were last extended."""
        self.turns, self.refused, self.overridden = 0, 0, 0
        self.reward: float | None = None
        self.failure: str | None = None
        """Message of an agent that raised, hung or crashed."""
        self.is_closed = False
        self._rules, self._lock = rules, Lock()
        self._arguments: dict[int, dict[str, Any]] = {}  # the template's, by id of the branch
        self._seen: Counter[bytes] = Counter()

    # The conversation of serve/openai_service.py

    def open_prompts(self, request: CompletionRequest) -> list[SessionPrompt]:
        """Return the prompts of a request as tokens. Raise ValueError if the session does not admit the request."""
        with self._lock:
            try:
                if self.is_closed:
                    raise ValueError(
                        "the session has ended, because its agent returned or failed; send no more requests"
                    )
                if request.processes_logits:
                    raise ValueError(
                        "penalties, logit_bias, bad_words, response_format and a required tool_choice change the "
                        "sampling distribution, but the trainer computes probabilities over all tokens; leave these "
                        "fields out of the request"
                    )
                prompts = (
                    [self._chat_prompt(request)] if request.is_chat else [*map(self._prompt, request.prompts)]
                )
                for prompt in prompts:
                    self._check(prompt)
                self._count_turns(len(prompts) * request.n)
            except ValueError:
                self.refused += 1
                raise
            rules = self._rules
            asks = (request.temperature, request.top_k, request.top_p, request.min_p)
            self.overridden += asks != (rules.sampling.temperature, 0, 1.0, 0.0)
        return prompts

    def live_request(
        self, request: CompletionRequest, prompt: SessionPrompt, choice: int, limit: int
    ) -> LiveRequest:
        """Translate the request for the engine. The run's sampling parameters replace the request's."""
        sampling = self._rules.sampling
        limit = min(limit, self._remaining_tokens(prompt))
        digest = hashlib.blake2b(json.dumps([prompt.ids, prompt.repeat, choice]).encode(), digest_size=5)
        key = self._rules.request_key(self.position, self.generation, int.from_bytes(digest.digest(), "big"))
        settings = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        return LiveRequest(
            prompt.ids, limit, *settings, sampling.seed, key * MAX_GENERATIONS, request.ignore_eos,
            sampling.processing,
        )  # fmt: skip

    def end_choice(self, prompt: SessionPrompt, choice: ChoiceText, turn: ParsedTurn | None) -> None:
        """Append a finished choice to the conversation that its prompt continues. If the prompt continues none, start a
        new conversation.
        """
        with self._lock:
            if self.is_closed:
                return
            branch = prompt.branch
            if branch is None or len(branch.ids) != prompt.length:  # another request has continued it
                branch = Trajectory(
                    self.slot, self.position, self.generation, self.prompt_index, list(prompt.ids)
                )
            else:
                self.branches.remove(branch)
                branch.add(prompt.added)
            is_truncated = choice.reason == "length"
            completion = Completion(0, 0, choice.ids, choice.logprobs, is_truncated, (self._rules.version,))
            branch.is_truncated = False
            branch.sample(completion)
            message = {"role": "assistant", "content": choice.text} if turn is None else turn.message
            branch.messages = [*(prompt.messages or branch.messages), message]
            branch.prompt_messages = branch.prompt_messages or len(prompt.messages)
            self._arguments[id(branch)] = prompt.arguments
            self.branches.append(branch)

    # Prompts

    def _chat_prompt(self, request: CompletionRequest) -> SessionPrompt:
        arguments = request.template_arguments | ({"tools": request.tools} if request.tools else {})
        messages, template = request.messages, self._rules.template
        branch = self._longest(lambda one: self._is_continued(one, messages, arguments))
        if branch is not None:
            earlier = len(branch.messages)
            try:
                added, is_rewritten = template.added_ids(
                    branch.messages, messages[earlier:], arguments, branch.last_turn[-1]
                )
                branch.is_rewritten |= is_rewritten
                conversation = [*branch.messages, *messages[earlier:]]
                return self._session_prompt([*branch.request, *added], branch, added, conversation, arguments)
            except ConfigError:
                pass  # the template cannot continue the conversation: a branch of its own
        ids = template.prompt_ids(messages, arguments)
        return self._session_prompt(ids, None, [], list(messages), arguments)

    def _is_continued(
        self, branch: Trajectory, messages: Sequence[Message], arguments: Mapping[str, Any]
    ) -> bool:
        earlier = branch.messages
        return (
            branch.prompt_messages > 0
            and branch.ends_with(self._rules.tokenizer.stop_ids)
            and len(messages) > len(earlier)
            and self._arguments[id(branch)] == arguments
            and all(_comparable(one) == _comparable(other) for one, other in zip(earlier, messages))
        )

    def _prompt(self, prompt: str | list[int]) -> SessionPrompt:
        ids = self._rules.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else prompt
        entries = self._rules.sampling.vocab_size
        if entries is not None and not 0 <= min(ids, default=0) <= max(ids, default=0) < entries:
            outside = next(one for one in ids if not 0 <= one < entries)
            raise ValueError(
                f"the prompt has token {outside}, but the policy's vocabulary has {entries:,} entries; use the "
                "policy's tokenizer"
            )
        branch = self._longest(lambda one: ids[: len(one.request)] == one.request)
        added = [] if branch is None else ids[len(branch.request) :]
        return self._session_prompt(list(ids), branch, added, [], {})

    def _longest(self, is_continued: Callable[[Trajectory], bool]) -> Trajectory | None:
        return max(filter(is_continued, self.branches), key=lambda one: len(one.request), default=None)

    def _session_prompt(
        self,
        ids: list[int],
        branch: Trajectory | None,
        added: list[int],
        messages: list[Message],
        arguments: dict[str, Any],
    ) -> SessionPrompt:
        digest = hashlib.blake2b(json.dumps(ids).encode()).digest()
        self._seen[digest] += 1
        length = 0 if branch is None else len(branch.ids)
        return SessionPrompt(ids, branch, length, added, messages, arguments, self._seen[digest] - 1)

    def _remaining_tokens(self, prompt: SessionPrompt) -> int:
        """Return the maximum number of tokens that may be generated after this prompt."""
        used = 0 if prompt.branch is None else prompt.length + len(prompt.added)
        return self._rules.sampling.max_new_tokens - used

    def _check(self, prompt: SessionPrompt) -> None:
        limit = self._rules.max_prompt_tokens
        if prompt.branch is None and len(prompt.ids) > limit:
            raise ValueError(
                f"the prompt has {len(prompt.ids):,} tokens, but at most {limit:,} fit (data.seq_length + 1 − "
                "rl.max_completion_length); shorten the prompt, or raise data.seq_length"
            )
        if self._remaining_tokens(prompt) < 1:
            raise ValueError(
                "the conversation has no room for another token (rl.max_completion_length is "
                f"{self._rules.sampling.max_new_tokens:,}); end the conversation, or raise rl.max_completion_length"
            )

    def _count_turns(self, turns: int) -> None:
        limit = self._rules.rl.max_turns
        if limit is not None and self.turns + turns > limit:
            raise ValueError(
                f"rl.max_turns is {limit}, and the agent has sampled {self.turns} turns; end the conversation, or "
                "raise rl.max_turns"
            )
        self.turns += turns

    # Result

    def close(self, prompt_ids: Sequence[int]) -> Trajectory:
        """Close the session. Returns the most recently extended trajectory; the others are in its `branches`.

        Args:
            prompt_ids: prompt of a session without sampled tokens.
        """
        with self._lock:
            self.is_closed = True
        if not self.branches:
            return self._empty(prompt_ids)
        *others, last = self.branches
        last.branches, last.has_own_prompt = others, True
        last.turns, last.is_lost = self.turns, self.failure is not None
        last.reward = None if last.is_lost else self.reward
        last.is_rewritten = any(one.is_rewritten for one in self.branches)
        return last

    def _empty(self, prompt_ids: Sequence[int]) -> Trajectory:
        """Return a trajectory without sampled tokens. It has no loss and no reward."""
        one = Trajectory(self.slot, self.position, self.generation, self.prompt_index, list(prompt_ids))
        one.versions = [self._rules.version]
        one.add([self._rules.tokenizer.eod or 0])
        one.versions = [self._rules.version]
        one.is_lost = True
        return one


def _comparable(message: Message) -> tuple[Any, ...]:
    """Return the fields of a message that are compared to decide whether a request continues a conversation."""
    calls = [
        (call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True))
        for call in message.get("tool_calls") or ()
    ]
    return message["role"], (message.get("content") or "").strip(), calls
