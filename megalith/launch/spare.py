"""Warm spares: processes that have finished their imports and wait to replace a rank (`--spares`)."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from megalith.io import replace_file
from megalith.launch.parent import LAUNCHER, exit_with_launcher

SPARE = "MEGALITH_SPARE"  # environment variable: path of the file that assigns a rank to this process
POLL_INTERVAL = 0.02  # seconds


def wait_as_spare() -> None:
    """Wait in a spare until the launcher assigns it a rank, and set the rank's environment variables.

    Returns at once in other processes.
    """
    path = os.environ.pop(SPARE, None)
    if path is None:
        return
    exit_with_launcher()
    while not os.path.exists(path):
        time.sleep(POLL_INTERVAL)
    os.environ.update(json.loads(Path(path).read_text(encoding="utf-8")))
    os.environ.pop(LAUNCHER, None)


def assign(path: Path, environment: Mapping[str, str]) -> None:
    """Assign a rank, by its environment variables, to the spare that waits for `path`."""
    replace_file(path, json.dumps(dict(environment)))
