"""Python processes that import the same modules as their parent, however the parent found them."""

from __future__ import annotations

import sys
from collections.abc import Callable


def python_command(function: Callable[..., None], *arguments: int) -> list[str]:
    """Return the command of a Python process that calls a module's function, with this process's import path."""
    path, name = [str(entry) for entry in sys.path], function.__name__
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path[:] = {path}; from {function.__module__} import {name}; {name}(*{arguments})",
    ]
