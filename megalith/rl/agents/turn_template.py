"""Tokens that the chat template adds between two turns of the policy.

A sampled turn ends with an id of the tokenizer's `stop_ids`. What follows it, up to the start of the next turn, is the
difference of two renderings:

    before   render(messages … assistant)                                        ends with …<eos> and maybe a newline
    after    render(messages … assistant, tool answers, generation prompt)

`after` must start with `before` up to its last <eos>; the rest is tokenized by itself and added. Sampled tokens are
never rendered and tokenized again, so they cannot change. A template fails this check if it renders an earlier turn
differently once others follow it, for example without its reasoning. In that case, the added messages are rendered
after a short conversation of one question and one turn, and the text after the end of that turn is used. The end is
found by counting <eos>, or is the token after the turn's text (gpt-oss ends an earlier turn with <|end|>). The policy's
own turns stay as sampled, and a metric counts such trajectories.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megalith.data.chat.chat_template import ChatTemplate, rendered_ids
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError

Message = dict[str, Any]
SENTINEL = "sentinel"


class TurnTemplate:
    """Tokenizes prompts, and the text between two turns, with a chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        """Check that the template ends a turn with a token that also ends sampling.

        Raises:
            ConfigError: if the template ends turns with another token.
        """
        self._tokenizer, self._template = tokenizer, template
        texts = {tokenizer.decode([one]): one for one in tokenizer.stop_ids}
        self._ends = {text: one for text, one in texts.items() if text}
        self._end = re.compile("|".join(map(re.escape, self._ends)) or r"(?!)")
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SENTINEL}]
        try:
            text = template.render(messages)
        except ValueError as error:
            raise ConfigError(
                f"{error}; rollouts with several turns need a chat template that renders conversations"
            ) from None
        if not self._end.search(text.rpartition(SENTINEL)[2]):
            raise ConfigError(
                f"the chat template does not end the assistant's turn with the tokenizer's end of sequence "
                f"({', '.join(self._ends) or 'it has none'}), so the end of a turn cannot be found "
                "among the sampled tokens; set eos_token in tokenizer_config.json, or eos_token_id in "
                "generation_config.json, to the token that ends a turn"
            )

    def prompt_ids(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation with a generation prompt. Raise ValueError if it cannot be rendered."""
        text = self._template.render(list(messages), add_generation_prompt=True, **arguments)
        return rendered_ids(self._tokenizer, text)

    def added_ids(
        self,
        messages: Sequence[Message],
        added: Sequence[Message],
        arguments: Mapping[str, Any],
        sampled_end: int | None = None,
    ) -> tuple[list[int], bool]:
        """Return the tokens between a turn and the next one.

        Args:
            messages: conversation up to the turn that the policy has sampled.
            added: messages after that turn: tool answers, or an environment's observation.
            arguments: additional arguments for the template, such as tools.
            sampled_end: last id of that turn. Default: the id that the template ends it with.

        Returns:
            The tokens, and True if the template would render the earlier conversation differently.

        Raises:
            ConfigError: if the template cannot render `added` after a turn.
        """
        try:
            end, ids = self._difference(messages, added, arguments)
            return ids, sampled_end not in (None, end)
        except ValueError:
            pass
        names = [one["name"] for one in added if "name" in one]
        calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
        turn: Message = {"role": "assistant", "content": "" if calls else SENTINEL}
        alone = [{"role": "user", "content": "?"}, turn | ({"tool_calls": calls} if calls else {})]
        try:
            return self._difference(alone, added, {}, is_alone=True)[1], True
        except ValueError as error:
            roles = ", ".join(str(one["role"]) for one in added)
            raise ConfigError(
                f"the chat template cannot continue a conversation after an assistant's turn with messages of {roles}: "
                f"{error}; use a template that supports tools"
            ) from None

    def _difference(
        self,
        messages: Sequence[Message],
        added: Sequence[Message],
        arguments: Mapping[str, Any],
        is_alone: bool = False,
    ) -> tuple[int, list[int]]:
        """Return the token that ends `messages`, and the tokens of the text that follows it.

        With `is_alone`, the text before that token may differ between the two renderings.
        """
        before = self._template.render(list(messages), **arguments)
        after = self._template.render([*messages, *added], add_generation_prompt=True, **arguments)
        ends = [*self._end.finditer(before)]
        if not ends:
            raise ValueError("it does not end the turn")
        marker, rest = ends[-1][0], after[ends[-1].end() :]
        end_id = self._ends[marker]
        if is_alone:
            end_id, marker, rest = self._after_turns(after, len(ends))
        elif not after.startswith(before[: ends[-1].end()]):
            raise ValueError("it renders earlier turns differently if others follow")
        ids = rendered_ids(self._tokenizer, marker + rest)
        if ids[:1] != [end_id]:
            raise ValueError(f"the tokenizer joins {marker} with the text after it")
        return end_id, ids[1:]

    def _after_turns(self, text: str, turns: int) -> tuple[int, str, str]:
        """Return the token that ends turn number `turns` (counted from 1), as id and as text, and the text after it."""
        ends = [*self._end.finditer(text)]
        if len(ends) >= turns:
            end = ends[turns - 1]
            return self._ends[end[0]], end[0], text[end.end() :]
        rest = text.partition(SENTINEL)[2]
        for one in self._tokenizer.special_ids:
            marker = self._tokenizer.decode([one])
            if marker and rest.startswith(marker):
                return one, marker, rest[len(marker) :]
        raise ValueError(f"it renders fewer {', '.join(self._ends)} if other messages follow")
