"""The names of step folders, and the order in which they were saved.

    checkpoints/
      step_00000100/   model-RRRRR-NNN.safetensors  optimizer-RRRRR-NNN.safetensors  tokenizer/…  task/…  manifest.json
      latest           the name of the step saved last, for people and scripts

A rank R writes its files N of the model and of the optimizer's state; what a task goes on with besides, such as a queue
of rollouts, stands in `task`. The manifest says what is where.

In an object store the files of a step stand one level deeper, below a name that each save draws anew, and a step
without its manifest is none.

Loading does not trust `latest`: it goes by the order of saving that the manifests state.
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
    """The steps in a checkpoints folder with their folders, in order of the step. They are not checked."""
    steps: dict[int, Path | StorePath] = {}
    folders = list(checkpoints.iterdir())
    for pattern in (REPLACED, STEP):  # a step that has its name goes before one that was set aside
        for folder in folders:
            match = pattern.fullmatch(folder.name)
            if match and ((folder / MANIFEST).exists() if isinstance(folder, StorePath) else folder.is_dir()):
                steps[int(match[1])] = folder
    return dict(sorted(steps.items()))


@cache
def _save_number(folder: Path | StorePath, version: Any) -> int:
    """Read once for each manifest as it is: a large job's has megabytes, and every save asks for that of every step."""
    number = json.loads(manifest_bytes(folder))["save_number"]
    if type(number) is not int:
        raise ValueError(f"save_number is {number}")
    return number


def save_number(folder: Path | StorePath) -> int | None:
    """The order of a step among its folder's saves; None where its manifest is absent or damaged.

    Raises OSError where it cannot be read now, as on a network filesystem that does not answer: it may be whole.
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
    """Sorts steps by when they were saved; those with an unreadable manifest go last (1) or first (-1)."""
    number = None
    with contextlib.suppress(OSError):
        number = save_number(folder)
    return (unreadable, 0, folder.name) if number is None else (0, number, folder.name)


def next_save_number(checkpoints: Path | StorePath) -> int:
    """The save number that a step gets which is saved now: above all others, those that cannot be read now too.

    These may be the last ones saved, which count up one by one.
    """
    orders = [save_order(step, unreadable=1) for step in list_steps(checkpoints).values()]
    return 1 + max((number for _, number, _ in orders), default=0) + sum(order[0] for order in orders)
