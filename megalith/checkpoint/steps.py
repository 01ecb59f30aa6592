"""The names of step folders, and the order in which they were saved.

    checkpoints/
      step_00000100/   model-RRRRR-NNN.safetensors  optimizer-RRRRR-NNN.safetensors  tokenizer/…  manifest.json
      latest           the name of the step saved last, for people and scripts

A rank R writes its files N of the model and of the optimizer's state; the manifest says what is where.

Loading does not trust `latest`: it goes by the order of saving that the manifests state.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from megalith.checkpoint.manifest import MANIFEST

CHECKPOINTS = "checkpoints"
LATEST = "latest"
TOKENIZER = "tokenizer"
STEP = re.compile(r"step_(\d{8,})")
REPLACED = re.compile(r"step_(\d{8,})\.replaced")


def list_steps(checkpoints: Path) -> dict[int, Path]:
    """The steps in a checkpoints folder with their folders, in order of the step. They are not checked."""
    steps: dict[int, Path] = {}
    for pattern in (REPLACED, STEP):  # a step that has its name goes before one that was set aside
        for folder in checkpoints.iterdir():
            match = pattern.fullmatch(folder.name)
            if match and folder.is_dir():
                steps[int(match[1])] = folder
    return dict(sorted(steps.items()))


@cache
def _save_number(path: Path, time: int, size: int) -> int:
    """Read once for each manifest as it is: a large job's has megabytes, and every save asks for that of every step."""
    return int(json.loads(path.read_bytes())["save_number"])


def save_order(folder: Path, unreadable: int) -> tuple[int, int, str]:
    """Sorts steps by when they were saved; those with an unreadable manifest go last (1) or first (-1)."""
    try:
        path = folder / MANIFEST
        status = path.stat()
        return (0, _save_number(path, status.st_mtime_ns, status.st_size), folder.name)
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return (unreadable, 0, folder.name)


def next_save_number(checkpoints: Path) -> int:
    """The save number that a step gets which is saved now."""
    return 1 + max(
        (save_order(step, unreadable=0)[1] for step in list_steps(checkpoints).values()), default=0
    )
