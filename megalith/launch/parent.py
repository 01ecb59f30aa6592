"""A rank ends with the launcher that has started it, however early that one is lost."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

LAUNCHER = "MEGALITH_LAUNCHER"  # the launcher's process id
PR_SET_PDEATHSIG = 1  # of Linux's prctl


def exit_with_launcher() -> None:
    """For a rank to call first thing: when its launcher is gone, or goes, so is this process.

    The kernel sees to it from here on (on Linux; elsewhere the hang watch does, once it runs). A launcher that was gone
    before is not the parent any more. Does nothing in a process that no launcher has started.
    """
    launcher = os.environ.pop(LAUNCHER, None)  # not for what this process starts itself
    if launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if launcher is not None and os.getppid() != int(launcher):
        os._exit(1)


def process_start_time(pid: int) -> int | None:
    """When the system started a process, in ticks since its boot; None where it does not tell (Linux does)."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str:
    """Names this start of the system; empty where it does not tell (Linux does)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
