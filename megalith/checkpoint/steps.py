"""Names of step folders, and the order in which they were saved.

     checkpoints/
       step_00000100/   model-RRRRR-NNN.safetensors  optimizer-RRRRR-NNN.safetensors  tokenizer/…  task/…  manifest.json
       latest           name of the step saved last, for people and scripts

R is the rank that wrote a file, N its number. `task` holds a task's state, such as a queue of rollouts. The manifest
lists which tensors are in which file.

In an object store, a step's files are one level deeper, under a name unique to each save, and a folder without a
manifest is not a step.

Loading ignores `latest` and uses the order of saves in the manifests.
"""

from __future__ import annotations

import contextlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from megalith.checkpoint.manifest import MANIFEST, manifest_bytes
from megalith.remote import StorePath
from megalith.small_files import RefusedFile

CHECKPOINTS = "checkpoints"
LATEST = "latest"
TOKENIZER = "tokenizer"
TASK = "task"
STEP = re.compile(r"step_(\d{8,})")
REPLACED = re.compile(r"step_(\d{8,})\.replaced")


def list_steps(checkpoints: Path | StorePath) -> dict[int, Path | StorePath]:
    """Return the step folders in a checkpoints folder by step, ascending. They are not verified."""
    steps: dict[int, Path | StorePath] = {}
    folders = list(checkpoints.iterdir())
    for pattern in (REPLACED, STEP):  # a completed step overrides the one it replaces
        for folder in folders:
            match = pattern.fullmatch(folder.name)
            if match and ((folder / MANIFEST).exists() if isinstance(folder, StorePath) else folder.is_dir()):
                steps[int(match[1])] = folder
    return dict(sorted(steps.items()))


@cache
def _save_number(folder: Path | StorePath, version: Any) -> int:
    """Return the save number in a manifest. The result is cached per version of the manifest, because manifests of
    large jobs take megabytes and every save needs all numbers.
    """
    number = json.loads(manifest_bytes(folder))["save_number"]
    if type(number) is not int:
        raise ValueError(f"the manifest's save_number is {number}, not a whole number")
    return number


def save_number(folder: Path | StorePath) -> int | None:
    """Return a step's position in the save order, or None if its manifest is missing or damaged.

    Raises OSError if it cannot be read at present, for example from a network filesystem that does not respond.
    """
    path = folder / MANIFEST
    try:
        if isinstance(path, StorePath):
            return _save_number(folder, path.version())
        status = path.lstat()
        return _save_number(folder, (status.st_mtime_ns, status.st_size))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, RefusedFile):
        return None
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def save_order(folder: Path | StorePath, unreadable: int) -> tuple[int, int, str]:
    """Return a sort key for the save order.

    Steps with an unreadable manifest come last (`unreadable` 1) or first (-1).
    """
    number = None
    with contextlib.suppress(OSError):
        number = save_number(folder)
    return (unreadable, 0, folder.name) if number is None else (0, number, folder.name)


def next_save_number(checkpoints: Path | StorePath) -> int:
    """Return the next save number, which exceeds the numbers of all existing steps.

    Steps that cannot be read at present are assumed to be the most recent saves, with consecutive numbers.
    """
    orders = [save_order(step, unreadable=1) for step in list_steps(checkpoints).values()]
    return 1 + max((number for _, number, _ in orders), default=0) + sum(order[0] for order in orders)
