"""Converts a conversation to tokens, and a sampled turn to a message with tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megalith.data.chat.call_formats import (
    CallFormat,
    ParseContext,
    ParsedTurn,
    call_format,
    hermes,
    llama3_json,
    tokenizer_response_template,
)
from megalith.data.chat.chat_template import ChatTemplate, rendered_ids
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.generation.grammar import call_grammar, json_grammar

Message = dict[str, Any]


class ChatFormat:
    """The chat template of a tokenizer, and the format of the model's tool calls."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, calls: str = "auto"):
        """Choose the format of tool calls.

        Args:
            tokenizer: the model's tokenizer.
            template: the model's chat template.
            calls: name of the format of tool calls, or path.py:function. auto: detect it from the template, and parse
                no tool calls if the template has none of the known formats.

        Raises:
            ConfigError: if a format is named that cannot be used.
        """
        self._tokenizer, self._template = tokenizer, template
        self._response_template = tokenizer_response_template(tokenizer)
        self._parse: CallFormat | None = None
        try:
            self._parse = call_format(
                calls, template.tool_source, self._response_template, "--tool-call-format"
            )
        except ConfigError:
            if calls != "auto":
                raise

    def prompt_ids(self, messages: Sequence[Message], arguments: Mapping[str, Any]) -> list[int]:
        """Return the tokens of a conversation with a generation prompt. Raise ValueError if it cannot be rendered."""
        text = self._template.render(list(messages), add_generation_prompt=True, **arguments)
        return rendered_ids(self._tokenizer, text)

    @property
    def supports_tools(self) -> bool:
        """True if tool calls can be parsed."""
        return self._parse is not None

    def call_grammar(self, tools: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
        """Return the source of a grammar for one call of one of the tools in `names`.

        Raises:
            ConfigError: if the format of calls is neither hermes nor llama3_json.
        """
        if self._parse not in (hermes, llama3_json):
            raise ConfigError(
                "tool_choice requires a call, which is supported only with the formats hermes "
                "and llama3_json; use tool_choice auto"
            )
        key = "arguments" if self._parse is hermes else "parameters"
        functions = [tool["function"] for tool in tools if tool["function"].get("name") in names]
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": one["name"]},
                    key: one.get("parameters") or {"type": "object"},
                },
                "required": ["name", key],
                "additionalProperties": False,
            }
            for one in functions
        ]
        schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
        if self._parse is llama3_json:
            return json_grammar(schema)
        begin, end = (self._marker(text) for text in ("<tool_call>", "</tool_call>"))
        return call_grammar(f'{begin} "\\n"', schema, f'"\\n" {end}')

    def _marker(self, text: str) -> str:
        """Return a marker in the grammar's syntax: special tokens as tokens, other markers as quoted text."""
        return text if self._tokenizer.token_id(text) in self._tokenizer.special_ids else f'"{text}"'

    def parse(
        self, text: str, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]]
    ) -> ParsedTurn:
        """Return the message of a turn. A turn with a malformed call becomes text without calls.

        Args:
            text: text of the turn, without the token that ends it.
            ids: tokens of the turn.
            prompt_ids: tokens before it.
            tools: JSON schemas of the tools.
        """
        plain = ParsedTurn({"role": "assistant", "content": text})
        if not tools or self._parse is None:
            return plain
        prefix = self._tokenizer.decode(prompt_ids) if self._response_template else ""
        end = self._tokenizer.decode([i for i in ids[-1:] if i in self._tokenizer.stop_ids])
        context = ParseContext(prefix, tools, end, self._response_template)
        turn = self._parse(text, context)
        return plain if any(call.error is not None for call in turn.calls) else turn
