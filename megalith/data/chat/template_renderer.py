"""The process that renders chat templates, in sandboxed Jinja with limits on memory and CPU time.

It reads JSON lines from standard input and answers each with a line: first the template's source, then the variables of
one text after another. Anyone may publish a model with a template, and Jinja's sandbox limits neither loops nor the
length of a text. The kernel does: it kills the process when its CPU time is used up, and refuses memory above the
limit. This file has no slow imports, because each process would repeat them.
"""

from __future__ import annotations

import json
import math
import resource
import sys
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megalith.data.chat.turns import marked_template, turn_markers

BEGIN, END = "\ufdd0", "\ufdd1"  # around the text of a generation block; code points that no text may contain
SECONDS = 5  # processor time per text
MEMORY = 2 << 30  # bytes of address space
MAX_CHARACTERS = 1 << 25  # of a text
SHOWN = 1000  # characters of an error message
FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""Exceptions that a template can raise for a conversation that it does not support."""


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`: marks the assistant's text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def template_environment() -> jinja2.Environment:
    """Return a sandbox with the names that transformers provides to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def serve() -> None:
    """Answer requests until standard input ends. Answers are {"text": …} or {"error": reason}."""
    _set_limit(resource.RLIMIT_AS, MEMORY)
    renderer = None
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _set_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime) + SECONDS)
        answer: dict[str, Any] = {}
        try:
            if renderer is None:
                renderer = _Renderer(json.loads(line))
            else:
                answer = {"text": renderer.render(**json.loads(line))}
        except FAILURES as error:
            answer = {"error": f"{error}"[:SHOWN]}
        except MemoryError:
            answer = {"error": f"it needs more than {MEMORY >> 30} GB of memory"}
        if len(answer.get("text", "")) > MAX_CHARACTERS:
            answer = {"error": f"its text is longer than {MAX_CHARACTERS:,} characters"}
        print(json.dumps(answer), flush=True)


class _Renderer:
    def __init__(self, source: str):
        self._source, self._environment = source, template_environment()
        self._template = self._environment.from_string(source)

    def render(self, variables: dict[str, Any], mark_turns: bool) -> str:
        if not mark_turns:
            return self._template.render(variables)
        return self._with_turns.render(variables, **turn_markers(variables["messages"]))

    @cached_property
    def _with_turns(self) -> jinja2.Template:
        return marked_template(self._environment, self._source)


def _set_limit(limit: int, value: int) -> None:
    """Lower a soft limit to `value`, or to the hard limit if that is lower."""
    hard = resource.getrlimit(limit)[1]
    with suppress(OSError, ValueError):  # macOS does not limit address space
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
