"""Locations of a conversation's turns in the text that a chat template renders.

A template writes each message in an iteration of a loop over the messages. Every loop body gets a marker at its start
and its end, so one rendering of the full conversation shows the bounds of the messages. This also works for templates
whose rendering of a message depends on later messages, for example if they drop the reasoning of earlier turns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

Span = tuple[int, int]  # characters [start, end)

OPEN, CLOSE, CONTENT = "\ufdd2", "\ufdd3", "\ufdd4"  # code points that no text may contain
MARKER = re.compile(f"[{OPEN}{CLOSE}](\\d*);|{CONTENT}")
REASONING_END = re.compile(r"</(?:\w+:)?think>\s*|\[/THINK\]\s*")
OPEN_TURN, CLOSE_TURN = "_megalith_open_turn", "_megalith_close_turn"  # names in the marked template


def marked_template(environment: jinja2.Environment, source: str) -> jinja2.Template:
    """Compile `source` with calls of OPEN_TURN and CLOSE_TURN around each loop body, with the loop's variables."""
    tree = environment.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        targets = [loop.target, *loop.target.find_all(nodes.Name)]
        names = [target.name for target in targets if isinstance(target, nodes.Name)]
        loop.body = [*_calls(OPEN_TURN, names), *_closed(loop.body, names), *_calls(CLOSE_TURN, names)]
    return environment.from_string(tree.set_environment(environment))


def turn_markers(messages: Sequence[Any]) -> dict[str, Any]:
    """Return the functions that a marked template calls.

    They write a message's index, and nothing for other values.
    """
    indices = {id(message): index for index, message in enumerate(messages)}

    def marker(kind: str) -> Any:
        return lambda value: f"{kind}{indices[id(value)]};" if id(value) in indices else ""

    return {OPEN_TURN: marker(OPEN), CLOSE_TURN: marker(CLOSE)}


def without_markers(text: str) -> str:
    return MARKER.sub("", text)


def find_turns(marked: str) -> dict[int, Span]:
    """Return the span of each message in the text without markers. If a template writes a message twice, the longer
    span is returned.
    """
    turns: dict[int, Span] = {}
    begins: dict[str, int] = {}
    for position, marker in _markers(marked):
        number = marker[1:-1]
        if marker[0] == OPEN:
            begins[number] = position
        elif marker[0] == CLOSE:
            begin = begins.get(number, position)
            first, end = turns.get(int(number), (0, 0))
            if position - begin >= end - first:
                turns[int(number)] = (begin, position)
    return turns


def content_positions(marked: str) -> list[int]:
    """Return the positions of `mark_content`'s markers in the unmarked text."""
    return [position for position, marker in _markers(marked) if marker == CONTENT]


def mark_content(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with a marker at the start of its text, and another one after its reasoning."""
    content = message.get("content")
    if content is None:
        return dict(message)
    begin = len(content) - len(content.lstrip())
    marked = REASONING_END.sub(lambda match: match.group() + CONTENT, content[begin:])
    return {**message, "content": content[:begin] + CONTENT + marked}


def answer_of(message: Mapping[str, Any]) -> str:
    """Return the message's text without reasoning and surrounding space."""
    return REASONING_END.split(message.get("content") or "")[-1].strip()


def common_prefix(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other)) if a != b),
        min(len(one), len(other)),
    )


def _markers(marked: str) -> list[tuple[int, str]]:
    """Return each marker with its position in the text without markers."""
    markers, removed = [], 0
    for match in MARKER.finditer(marked):
        markers.append((match.start() - removed, match.group()))
        removed += len(match.group())
    return markers


def _calls(function: str, names: Sequence[str]) -> list[nodes.Node]:
    calls = [
        nodes.Call(nodes.Name(function, "load"), [nodes.Name(name, "load")], [], None, None) for name in names
    ]
    return [nodes.Output(calls).set_lineno(1)]


def _closed(body: Sequence[nodes.Node], names: Sequence[str]) -> list[nodes.Node]:
    """Return the body with a closing marker before each `continue` and `break` of this loop."""
    closed: list[nodes.Node] = []
    for node in body:
        if isinstance(node, nodes.Continue | nodes.Break):
            closed += _calls(CLOSE_TURN, names)
        for field in ("body", "elif_", "else_"):
            if not isinstance(node, nodes.For) and isinstance(getattr(node, field, None), list):
                setattr(node, field, _closed(getattr(node, field), names))
        closed.append(node)
    return closed
