"""Appends an environment's text to prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def with_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Append `text`, after an empty line, to the last message if it is the user's. Otherwise add a user message with
    the text.
    """
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    *others, last = messages
    content = f"{last['content']}\n\n{text}" if last["content"] else text
    return [*others, {**last, "content": content}]
