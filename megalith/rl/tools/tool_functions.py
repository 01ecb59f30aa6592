"""Tools: Python functions that the policy calls, their JSON schemas, and their answers as text."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from megalith.config.load_extension import load_extension
from megalith.errors import ConfigError

MAX_ANSWER = 1 << 16  # characters of an answer; more is cut
UNPRINTABLE = re.compile(
    "[\ud800-\udfff\ufdd0-\ufdd4]"
)  # halves of surrogate pairs, and the templates' markers

Schema = dict[str, Any]


def load_tools(tools: Sequence[str | Callable], setting: str = "rl.tools") -> dict[str, Callable]:
    """Return the tools by name.

    Args:
        tools: `path.py:function`, or functions.
        setting: the setting that names them, for errors.

    Raises:
        ConfigError: if a function does not exist or two have the same name.
    """
    functions: dict[str, Callable] = {}
    for tool in tools:
        function = tool if callable(tool) else load_extension(tool, {}, setting)
        name = getattr(function, "__name__", type(function).__name__)
        if name in functions:
            raise ConfigError(f"{setting} has two tools with the name {name}; rename one")
        functions[name] = function
    return functions


def tool_schema(function: Callable, setting: str = "rl.tools") -> Schema:
    """Return the JSON schema of a tool for the chat template, by transformers' get_json_schema.

    Raises:
        ConfigError: if the function lacks type hints or a docstring.
    """
    try:
        from transformers.utils import get_json_schema
    except ImportError as error:
        raise ConfigError(
            f"{setting} is set, but transformers, which reads the tools' type hints and docstrings, cannot be imported "
            f"({error}); pip install 'megalith[hf]'"
        ) from None
    try:
        return get_json_schema(function)
    except Exception as error:  # transformers raises classes of its own, derived from Exception
        raise ConfigError(
            f"{setting} has {getattr(function, '__name__', function)!s}, which cannot be described to the policy: "
            f"{error}; give every argument a type hint and a line in the docstring's Args section"
        ) from None


class InvalidAnswer(Exception):
    """A tool returned something that is not text."""


def answer_text(value: Any) -> str:
    """Return a tool's result as text: text unchanged, numbers as `str`, lists and objects as JSON.

    Raises:
        InvalidAnswer: if the result is none of these.
    """
    if isinstance(value, list | dict | tuple):
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidAnswer(f"it returned a {type(value).__name__} that is not JSON ({error})") from None
    if not isinstance(value, str | int | float | None):
        raise InvalidAnswer(f"it returned a {type(value).__name__}, which is not text")
    text = UNPRINTABLE.sub("\ufffd", str(value))
    return (
        text
        if len(text) <= MAX_ANSWER
        else f"{text[:MAX_ANSWER]}… ({len(text) - MAX_ANSWER} more characters)"
    )


async def _awaited(value: Awaitable) -> Any:
    return await value


def call_function(function: Callable, *args: Any, **arguments: Any) -> Any:
    """Call a function, sync or async, and return its result."""
    result = function(*args, **arguments)
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


def run_tool(functions: Mapping[str, Callable], name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Call a tool and return its answer as JSON values: text, is_error and seconds.

    An exception or an unusable result becomes an error message that the policy can read.
    """
    start = time.perf_counter()
    text, is_error = _tool_text(functions, name, arguments)
    return {"text": text, "is_error": is_error, "seconds": time.perf_counter() - start}


def _tool_text(
    functions: Mapping[str, Callable], name: str, arguments: Mapping[str, Any]
) -> tuple[str, bool]:
    function = functions.get(name)
    if function is None:
        return f"error: there is no tool {name!r:.80}; the tools are {', '.join(functions)}", True
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return f"error: {name} cannot be called with these arguments: {error}", True
    try:
        return answer_text(call_function(function, **arguments)), False
    except InvalidAnswer as error:
        return f"error: {name} failed: {error}", True
    except Exception as error:
        return answer_text(f"error: {name} raised {type(error).__name__}: {error}"), True
