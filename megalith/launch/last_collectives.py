"""The collectives that this rank has made last, from torch's flight recorder, and the one that it stands in."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch._C._distributed_c10d as c10d
from torch.distributed import distributed_c10d

PACKAGE = str(Path(__file__).parents[1])


def last_collectives(count: int) -> str:
    """Those begun last, the newest first, in a line."""
    entries = flight_recorder()[-count:]
    return ", ".join(
        _named(entry) + ("" if entry["retired"] else " (not ended)") for entry in reversed(entries)
    )


def pending_collective(thread: int | None) -> str:
    """The collective that was begun last and has not ended, and the innermost of our functions that waits for it."""
    frame = sys._current_frames().get(thread)
    stack = traceback.extract_stack(frame) if frame else []
    parts = [_open_collective() or _called_of_torch(stack)]
    ours = [f for f in stack if f.filename.startswith(PACKAGE) and not f.filename.endswith("collectives.py")]
    if ours:
        path = os.path.relpath(ours[-1].filename, os.path.dirname(PACKAGE))
        parts.append(f"called from {ours[-1].name} ({path}:{ours[-1].lineno})")
    return ", ".join(part for part in parts if part)


def _called_of_torch(stack: traceback.StackSummary) -> str:
    """The function of torch.distributed that the thread is in; the recorder leaves some of gloo's out."""
    names = [f.name for f in stack if f.filename == distributed_c10d.__file__ and f.name != "wrapper"]
    return names[0] if names else ""


def _open_collective() -> str:
    for entry in reversed(flight_recorder()):
        if not entry["retired"]:
            return _named(entry)
    return ""


def _named(entry: dict) -> str:
    name = entry["profiling_name"].partition(":")[2]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    return f"{name} number {number} of {entry['process_group'][1]}"


def flight_recorder() -> list[dict]:
    """What torch has recorded of this rank's last collectives, oldest first; gloo's and NCCL's stand apart there."""
    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])
