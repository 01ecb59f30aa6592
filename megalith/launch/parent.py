"""Makes a rank exit when its launcher exits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

LAUNCHER = "MEGALITH_LAUNCHER"  # environment variable: the launcher's process id
JOB = "MEGALITH_JOB"  # environment variable: unique name of the job, the same for all ranks and attempts
PR_SET_PDEATHSIG = 1  # Linux: prctl option


def exit_with_launcher() -> None:
    """Make this process exit when its launcher exits, or at once if the launcher has exited already. A rank calls this
    first.

    On Linux the kernel kills the process; elsewhere the hang watch ends it once it runs. A launcher that has exited
    before this call is recognized because it is no longer the parent process. Does nothing in a process without a
    launcher.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # not inherited by this process's children
    if launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    exit_with_parent()
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)


def exit_with_parent() -> None:
    """Have the kernel kill this process when its parent exits. Only on Linux, and not inherited by children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def process_start_time(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot, or None off Linux."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str:
    """Return the id of the current boot, or an empty string off Linux."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
