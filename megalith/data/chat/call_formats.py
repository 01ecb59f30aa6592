"""Tool call formats: parse the text of a turn into a message and its tool calls.

| format | a call |
|---|---|
| hermes | `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, several per turn (Hermes, Qwen) |
| llama3_json | `{"name": …, "parameters": {…}}` as the whole turn, several separated by `;` (Llama 3) |
| qwen3_coder, glm45 | a tag per argument (tagged_calls.py) |
| harmony | messages in channels (harmony.py; gpt-oss) |
| response_template | as defined by the tokenizer's response template, parsed by transformers |

A format is a function (text, context) → ParsedTurn; `rl.tool_call_format` takes a user's own as `path.py:function`. A
malformed call becomes an error message, which the policy receives as the result of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megalith.config.extensions import CALL_FORMATS
from megalith.config.load_extension import load_extension
from megalith.data.tokenizers.huggingface import CONFIG
from megalith.data.tokenizers.tokenizer import Tokenizer, read_json
from megalith.errors import ConfigError

Message = dict[str, Any]
THINK_END = "</think>"


@dataclass(frozen=True)
class ToolCall:
    """A tool call. `error` is the message for a malformed call, which is not run."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class ParsedTurn:
    """A turn of the policy."""

    message: Message
    """{role, content, …} for the chat template and the rewards."""
    calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, content: str, calls: list[ToolCall], others: Message | None = None) -> ParsedTurn:
        """Build an assistant turn from its content and calls.

        The message contains the valid calls and the keys of `others`.
        """
        message: Message = {"role": "assistant", "content": content, **(others or {})}
        valid = [call for call in calls if call.error is None]
        if valid:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in valid
            ]
        return cls(message, calls)


@dataclass(frozen=True)
class ParseContext:
    """Context that a tool-call parser may need besides the turn's text."""

    prefix: str = ""
    """Text before the turn."""
    tools: Sequence[dict[str, Any]] = ()
    """JSON schemas of the tools."""
    eos: str = ""
    """Text of the token that ends the turn. The text of the turn does not include it."""
    response_template: Any = None
    """The tokenizer's response template."""


CallFormat = Callable[[str, ParseContext], ParsedTurn]


def hermes(text: str, context: ParseContext) -> ParsedTurn:
    """Parse `<tool_call>{"name": …, "arguments": {…}}</tool_call>`. Calls within the reasoning do not count."""
    answer = text.rfind(THINK_END) + len(THINK_END) if THINK_END in text else 0
    begin = text.find("<tool_call>", answer)
    if begin < 0:
        return ParsedTurn.of(text, [])
    calls = []
    for match in re.finditer(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", text[begin:], re.DOTALL):
        if match[2]:
            calls.append(_json_call(match[1], ("arguments",)))
        else:
            calls.append(_malformed("it has no closing </tool_call>", "arguments"))
    return ParsedTurn.of(text[:begin].rstrip(), calls)


def llama3_json(text: str, context: ParseContext) -> ParsedTurn:
    """Parse a turn that consists of JSON objects with `name` and `parameters`."""
    rest = text.strip().removeprefix("<|python_tag|>").lstrip()
    if not rest.startswith("{"):
        return ParsedTurn.of(text, [])
    calls, decoder = [], json.JSONDecoder()
    while rest:
        try:
            _, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            calls.append(_malformed(f"it is not JSON ({error})", "parameters"))
            break
        calls.append(_json_call(rest[:end], ("parameters", "arguments")))
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return ParsedTurn.of("", calls)


def response_template(text: str, context: ParseContext) -> ParsedTurn:
    """Parse by the tokenizer's response template (transformers 5.13 or newer)."""
    parse_response = _transformers_parser()
    try:
        message = parse_response(
            text + context.eos, context.response_template, prefix=context.prefix, tools=list(context.tools)
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return ParsedTurn.of(text, [_malformed(f"it cannot be parsed ({error})", "arguments")])
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, dict) else {}
        calls.append(_object_call(function, ("arguments",)))
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return ParsedTurn.of(others.pop("content", None) or "", calls, others)


def _transformers_parser() -> Callable[..., Message]:
    try:
        from transformers.utils.chat_parsing import parse_response
    except ImportError as error:
        raise ConfigError(
            "rl.tool_call_format is response_template, which transformers 5.13 or newer parses, but importing it "
            f"failed ({error}); pip install 'megalith[hf]', or choose hermes or llama3_json"
        ) from None
    return parse_response


def _malformed(reason: str, key: str, name: str = "invalid") -> ToolCall:
    example = f'{{"name": "…", "{key}": {{…}}}}'
    return ToolCall(name, error=f"error: the tool call is invalid: {reason}; write {example}")


def _json_call(text: str, keys: Sequence[str]) -> ToolCall:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _malformed(f"it is not JSON ({error})", keys[0])
    return _object_call(value, keys)


def _object_call(value: Any, keys: Sequence[str]) -> ToolCall:
    """Return the tool call described by a JSON object, whose arguments are under one of `keys`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed("it has no name", keys[0])
    arguments = next((value[key] for key in keys if key in value), {})
    if isinstance(arguments, str):  # some models write the arguments as a JSON text
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        return _malformed(f"its {keys[0]} are not an object", keys[0], value["name"])
    return ToolCall(value["name"], arguments)


def tokenizer_response_template(tokenizer: Tokenizer) -> Any:
    """Return the response template in the tokenizer's files, or None if there is none."""
    table = read_json(tokenizer.files[CONFIG], CONFIG) if CONFIG in tokenizer.files else {}
    return table.get("response_template") if isinstance(table, dict) else None


def call_format(name: str, template: str, response: Any, setting: str = "rl.tool_call_format") -> CallFormat:
    """Return the parser for a value of `rl.tool_call_format`.

    Args:
        name: the setting's value.
        template: source of the chat template, which decides for "auto".
        response: the tokenizer's response template, if it has one.
        setting: the setting or option that has the value, for errors.

    Raises:
        ConfigError: if "auto" finds no format, or the response template is missing.
    """
    if name == "auto":
        name = _format_of(template, response, setting)
    if name == "response_template":
        if response is None:
            raise ConfigError(
                f"{setting} is response_template, but the tokenizer's tokenizer_config.json has no "
                "response_template; choose hermes or llama3_json, or write path.py:function"
            )
        _transformers_parser()
    return load_extension(name, CALL_FORMATS, setting)


def _format_of(template: str, response: Any, setting: str) -> str:
    if response is not None:
        return "response_template"
    if "<|channel|>" in template:
        return "harmony"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "glm45" if "<arg_key>" in template else "hermes"
    if "python_tag" in template or '"parameters"' in template:
        return "llama3_json"
    raise ConfigError(
        f"{setting} is auto, but the chat template uses none of the built-in tool call formats "
        "(hermes, llama3_json, qwen3_coder, glm45, harmony), and tokenizer_config.json has no "
        "response_template; set the format, or write path.py:function"
    )
