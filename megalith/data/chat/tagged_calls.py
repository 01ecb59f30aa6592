"""Tool calls with one tag per argument, in the formats of Qwen3-Coder and GLM-4.5.

| format | a call |
|---|---|
| qwen3_coder | `<tool_call><function=add><parameter=a>1</parameter></function></tool_call>` |
| glm45 | `<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>` |

A value is text if the tool's schema says so, otherwise JSON. A value that is not JSON is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from megalith.data.chat.call_formats import THINK_END, ParseContext, ParsedTurn, ToolCall

CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*\Z", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
KEY_VALUE = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

Reader = Callable[[str], tuple[str, list[tuple[str, str]]] | None]
"""Function from the text of a call to its name and arguments; None if the call is malformed."""


def qwen3_coder(text: str, context: ParseContext) -> ParsedTurn:
    """Parse Qwen3-Coder's calls. Calls within the reasoning do not count."""
    example = "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>"
    return _parsed(text, context, _function, example)


def glm45(text: str, context: ParseContext) -> ParsedTurn:
    """Parse GLM-4.5's calls. Calls within the reasoning do not count."""
    example = "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>"
    return _parsed(text, context, _key_values, example)


def _function(body: str) -> tuple[str, list[tuple[str, str]]] | None:
    match = FUNCTION.match(body)
    return None if match is None else (match[1], PARAMETER.findall(match[2]))


def _key_values(body: str) -> tuple[str, list[tuple[str, str]]] | None:
    name = body.partition("<arg_key>")[0].strip()
    return (name, KEY_VALUE.findall(body)) if name and "<" not in name else None


def _parsed(text: str, context: ParseContext, read: Reader, example: str) -> ParsedTurn:
    answer = text.rfind(THINK_END) + len(THINK_END) if THINK_END in text else 0
    begin = text.find("<tool_call>", answer)
    if begin < 0:
        return ParsedTurn({"role": "assistant", "content": text})
    calls = []
    for match in CALL.finditer(text, begin):
        call = read(match[1]) if match[2] else None
        if call is None:
            error = f"error: the tool call is invalid; write {example}"
            calls.append(ToolCall("invalid", error=error))
        else:
            name, arguments = call
            types = _types(name, context)
            values = {key.strip(): _value(value, types.get(key.strip())) for key, value in arguments}
            calls.append(ToolCall(name, values))
    return ParsedTurn.of(text[:begin].rstrip(), calls)


def _types(name: str, context: ParseContext) -> dict[str, Any]:
    """Return the JSON types of a tool's parameters, by name."""
    for tool in context.tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return {key: each.get("type") for key, each in properties.items()}
    return {}


def _value(text: str, kind: Any) -> Any:
    text = text.removeprefix("\n").removesuffix("\n")
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
