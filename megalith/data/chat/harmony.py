"""Parser for Harmony, the turn format of gpt-oss: messages in channels, some of them addressed to a tool.

     <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.add
     <|constrain|>json<|message|>{"a": 1}<|call|>

The recipient is named in the channel or after the role. This parser follows OpenAI's description of the format and
reads text; openai-harmony reads token ids and downloads their vocabulary.
"""

from __future__ import annotations

import json
import re

from megalith.data.chat.call_formats import ParseContext, ParsedTurn, ToolCall

START, MESSAGE = "<|start|>", "<|message|>"
END = re.compile(r"(<\|end\|>|<\|call\|>|<\|return\|>)\s*$")
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
FUNCTIONS = "functions."  # namespace of the tools in a request


def harmony(text: str, context: ParseContext) -> ParsedTurn:
    """Parse a turn.

    The channel analysis becomes the reasoning, other channels the content, and messages to a tool become calls.
    """
    thinking: list[str] = []
    content: list[str] = []
    calls: list[ToolCall] = []
    for part in text.split(START):
        header, separator, body = END.sub("", part).partition(MESSAGE)
        if not separator:
            if part == text and "<|" not in header:  # no harmony at all
                content.append(header)
            continue
        channel = CHANNEL.search(header)
        if (recipient := RECIPIENT.search(header)) is not None:
            calls.append(_call(recipient[1].removeprefix(FUNCTIONS), body))
        elif channel is not None and channel[1] == "analysis":
            thinking.append(body)
        else:
            content.append(body)
    text, others = "\n".join(content), {}
    if thinking:
        others["thinking"] = others["reasoning_content"] = "\n".join(thinking)
        if any(call.error is None for call in calls):  # gpt-oss's template takes one of them beside calls
            others["thinking"] = "\n".join([*thinking, *content])
            text = ""
    return ParsedTurn.of(text, calls, others)


def _call(name: str, body: str) -> ToolCall:
    try:
        arguments = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError) as error:
        return _malformed(name, f"its arguments are not JSON ({error})")
    if not isinstance(arguments, dict):
        return _malformed(name, "its arguments are not an object")
    return ToolCall(name, arguments)


def _malformed(name: str, reason: str) -> ToolCall:
    return ToolCall(
        name, error=f"error: the tool call is invalid: {reason}; write the arguments as a JSON object"
    )
