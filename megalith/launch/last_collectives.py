"""The last and the pending collectives of this rank, from torch's flight recorder."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from torch.distributed import distributed_c10d

from megalith.compat.process_groups import flight_recorder

PACKAGE = str(Path(__file__).parents[1])


def last_collectives(count: int) -> str:
    """Return the last collectives on one line, newest first."""
    entries = flight_recorder()[-count:]
    return ", ".join(
        _describe(entry) + ("" if entry["retired"] else " (pending)") for entry in reversed(entries)
    )


def pending_collective(thread: int | None) -> str:
    """Return as text the newest pending collective and the innermost function of this package that waits for it.

    Args:
        thread: identifier of the main thread.
    """
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame else []
    parts = [_pending() or _torch_function(stack)]
    frames = [
        f for f in stack if f.filename.startswith(PACKAGE) and not f.filename.endswith("collectives.py")
    ]
    if frames:
        path = os.path.relpath(frames[-1].filename, os.path.dirname(PACKAGE))
        parts.append(f"called from {frames[-1].name} ({path}:{frames[-1].lineno})")
    return ", ".join(part for part in parts if part)


def _torch_function(stack: traceback.StackSummary) -> str:
    """Return the torch.distributed function that the thread is executing.

    The flight recorder omits some gloo collectives.
    """
    names = [f.name for f in stack if f.filename == distributed_c10d.__file__ and f.name != "wrapper"]
    return names[0] if names else ""


def _pending() -> str:
    for entry in reversed(flight_recorder()):
        if not entry["retired"]:
            return _describe(entry)
    return ""


def _describe(entry: dict) -> str:
    name = entry["profiling_name"].partition(":")[2]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return f"{name} number {number} of {entry['process_group'][1]}"
