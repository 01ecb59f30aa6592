"""A separate process that renders a chat template. A template that loops forever or exhausts the memory then only
causes an error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import weakref
from collections.abc import Mapping
from contextlib import suppress
from threading import Lock
from typing import Any

from megalith.child_process import python_command
from megalith.data.chat.template_renderer import MEMORY, SECONDS, serve
from megalith.errors import ConfigError


class TemplateProcess:
    """The process that renders `source` (template_renderer.py). It is started at the first text, and again if it has
    ended."""

    def __init__(self, source: str):
        self._source, self._lock = source, Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # id of the process that started it: a forked process must start its own

    def render(self, variables: Mapping[str, Any], *, mark_turns: bool = False) -> str:
        """Return the text for these variables. Values that JSON lacks are rendered as `str`.

        With `mark_turns`, the text has markers around each message (turns.py).

        Raises:
            ValueError: if the template rejects them or exceeds its limits.
            ConfigError: if the template cannot be compiled.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            answer = self._exchange({"variables": variables, "mark_turns": mark_turns})
        if "error" in answer:
            raise ValueError(f"the chat template rejects it: {answer['error']}")
        return answer["text"]

    def _start(self) -> None:
        self._process = subprocess.Popen(
            python_command(serve),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            process_group=0,  # only this process gets the terminal's interrupts
        )  # fmt: skip
        self._owner = os.getpid()
        weakref.finalize(self, _kill, self._process)
        try:
            answer = self._exchange(self._source)
        except ValueError as error:
            raise ConfigError(f"{error}; correct the template") from error
        if "error" in answer:
            self._process.kill()
            self._stop()
            raise ConfigError(f"the chat template is invalid ({answer['error']}); correct the template")

    def _exchange(self, value: Any) -> dict[str, Any]:
        """Send a value to the process and return its answer. Raise ValueError if the process has exited."""
        try:
            request = json.dumps(value, default=str).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the chat template's variables cannot be sent: {error}") from error
        process = self._process
        try:
            process.stdin.write(request)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        except BaseException:  # an unread answer would be taken for the next one
            process.kill()
            self._stop()
            raise
        if line.endswith(b"\n"):
            return json.loads(line)
        code = self._stop()
        if code == -signal.SIGXCPU:
            raise ValueError(
                f"the chat template was stopped after {SECONDS} s of CPU time, the limit per text"
            )
        raise ValueError(
            f"the process that renders the chat template, in {MEMORY >> 30} GB of memory, ended with exit code {code}"
        )

    def _stop(self) -> int:
        process, self._process = self._process, None
        return _end(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process. Children forked since its start also hold its pipes open and must not kill it."""
    process.kill()
    _end(process)


def _end(process: subprocess.Popen[bytes]) -> int:
    """Close the pipes of a process that has ended or is about to end. Return its exit code."""
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):
            pipe.close()
    return process.wait()
