"""Tokens that the chat template adds between two turns of the policy.

A sampled turn ends with the end-of-sequence token. What follows it, up to the start of the next turn, is the
difference of two renderings:

    before   render(messages … assistant)                                        ends with …<eos> and maybe a newline
    after    render(messages … assistant, tool answers, generation prompt)

`after` must start with `before` up to its last <eos>; the rest is added as tokens of its own. Sampled tokens are never
rendered and tokenized again, so they cannot change. A template that renders earlier turns differently once others
follow (one that drops their reasoning) fails this check. The added messages are then rendered after a short
conversation of one question and one turn, and their text begins after as many <eos> as that conversation has. The
policy keeps its turns as sampled, and the trajectory is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalith.data.chat.chat_template import ChatTemplate
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError

Message = dict[str, Any]
SENTINEL = "sentinel"


class TurnTemplate:
    """Renders prompts, and the tokens between turns."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate):
        """Check that the template ends a turn with the tokenizer's end of sequence.

        Raises:
            ConfigError: if it does not.
        """
        self._tokenizer, self._template = tokenizer, template
        self.eos = "" if tokenizer.eod is None else tokenizer.decode([tokenizer.eod])
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": SENTINEL}]
        try:
            text = template.render(messages)
        except ValueError as error:
            raise ConfigError(
                f"{error}; rollouts of several turns need a template for conversations"
            ) from None
        if not self.eos or self.eos not in text.rpartition(SENTINEL)[2]:
            raise ConfigError(
                f"the chat template does not end the assistant's turn with the tokenizer's end of sequence "
                f"({self.eos or 'it has none'}), so turns cannot be told apart from sampled tokens; set eos_token in "
                "tokenizer_config.json to the token that ends a turn"
            )

    def prompt_ids(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation with a generation prompt. Raise ValueError if it cannot be rendered."""
        text = self._template.render(list(messages), add_generation_prompt=True, **arguments)
        return self._ids(text)

    def added_ids(
        self, messages: Sequence[Message], added: Sequence[Message], arguments: Mapping[str, Any]
    ) -> tuple[list[int], bool]:
        """Return the tokens between a turn and the next one.

        Args:
            messages: conversation up to the turn that the policy has sampled.
            added: messages after it: tool answers, or an environment's observation.
            arguments: further arguments of the template, such as tools.

        Returns:
            The tokens, and True if the template would render the earlier conversation differently.

        Raises:
            ConfigError: if the template cannot render `added` after a turn.
        """
        try:
            return self._difference(messages, added, arguments), False
        except ValueError:
            pass
        names = [one["name"] for one in added if "name" in one]
        calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
        turn: Message = {"role": "assistant", "content": "" if calls else SENTINEL}
        alone = [{"role": "user", "content": "?"}, turn | ({"tool_calls": calls} if calls else {})]
        try:
            return self._difference(alone, added, {}, by_count=True), True
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
        by_count: bool = False,
    ) -> list[int]:
        """Return the tokens of the text that follows the last end of sequence of `messages`.

        With `by_count`, the text before it may differ between the two renderings.
        """
        before = self._template.render(list(messages), **arguments)
        after = self._template.render([*messages, *added], add_generation_prompt=True, **arguments)
        end = before.rfind(self.eos) + len(self.eos)
        if by_count:
            turns = after.split(self.eos, before.count(self.eos))
            end = len(after) - len(turns[-1])
            if len(turns) <= before.count(self.eos):
                raise ValueError(f"it renders fewer {self.eos} if other messages follow")
        elif self.eos not in before or not after.startswith(before[:end]):
            raise ValueError("it renders earlier turns differently if others follow")
        ids = self._ids(self.eos + after[end:])
        if ids[:1] != [self._tokenizer.eod]:
            raise ValueError(f"the tokenizer joins {self.eos} with the text after it")
        return ids[1:]

    def _ids(self, text: str) -> list[int]:
        ids = self._tokenizer.encode_marked([text], [[(0, len(text))]])[0]
        if isinstance(ids, str):
            raise ValueError(ids)
        return [int(one) for one in ids[0]]
