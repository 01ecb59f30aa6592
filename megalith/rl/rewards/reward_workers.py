"""Worker processes for reward functions, tools and environments.

A worker is forked, so that closures and their data need no pickling. It is not a daemon, because reward functions may
start processes of their own. These are in the worker's process group, and ending the worker kills the group.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

Job = Sequence[Any]
"""Arguments of a call, as JSON values."""


class RewardWorker:
    """A process that runs jobs, one at a time.

    Args:
        work: called with each job.
        is_replaced: start a new process if the process has ended. If False, `has_ended` becomes True instead.
    """

    def __init__(self, work: Callable[[Job], dict[str, Any]], is_replaced: bool = True):
        self._work, self._is_replaced, self.has_ended = work, is_replaced, False
        self.restart(first=True)

    def restart(self, first: bool = False) -> None:
        if not first:
            self.end()
        if not (first or self._is_replaced):
            return
        fork = multiprocessing.get_context("fork")
        self.pipe, theirs = fork.Pipe()
        self._process = fork.Process(target=_serve, args=(theirs, self._work), daemon=False)
        self._process.start()
        with contextlib.suppress(OSError):  # the process does the same; one of them comes first
            os.setpgid(self._process.pid, self._process.pid)
        theirs.close()

    def send(self, job: Job) -> None:
        with contextlib.suppress(OSError):  # a worker that has ended: `receive` returns an error
            self.pipe.send_bytes(json.dumps(job).encode())

    def receive(self) -> dict[str, Any]:
        try:
            return json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            self.restart()
            return {"error": f"its process ended with exit code {code}", "at": None}

    def end(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()
        self.pipe.close()
        self.has_ended = not self._is_replaced


def run_jobs(
    workers: Sequence[RewardWorker], jobs: Sequence[Job], timeout: float, is_pinned: bool = False
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Distribute jobs over workers and yield each job's number and result, in the order in which they end.

    A job that takes longer than `timeout` seconds has the result None, and its worker is restarted. Closing the
    iterator restarts the workers that are busy. If all workers have ended, the remaining jobs get an error.

    Args:
        workers: started worker processes.
        jobs: arguments of each call of the workers' `work`.
        timeout: seconds per job.
        is_pinned: give job i to worker i, instead of to any free worker.
    """
    waiting, idle = deque(range(len(jobs))), list(workers)
    busy: dict[Connection, tuple[RewardWorker, int, float]] = {}
    try:
        while waiting or busy:
            while waiting and idle:
                number = waiting.popleft()
                worker = idle.pop(0) if is_pinned else idle.pop()
                worker.send(jobs[number])
                busy[worker.pipe] = (worker, number, time.monotonic() + timeout)
            if not busy:
                for number in waiting:
                    yield number, {"error": "was not started, because all processes have ended", "at": None}
                return
            next_deadline = min(deadline for *_, deadline in busy.values())
            for pipe in wait(list(busy), max(0.0, next_deadline - time.monotonic())):
                worker, number, _ = busy.pop(pipe)
                result = worker.receive()
                idle += [] if is_pinned or worker.has_ended else [worker]
                yield number, result
            for pipe, (worker, number, deadline) in list(busy.items()):
                if time.monotonic() >= deadline:
                    del busy[pipe]
                    worker.restart()
                    idle += [] if is_pinned or worker.has_ended else [worker]
                    yield number, None
    finally:
        for worker, *_ in busy.values():
            worker.restart()


def _serve(pipe: Connection, work: Callable[[Job], dict[str, Any]]) -> None:
    """Run jobs in the worker until the trainer has ended."""
    os.setpgid(0, 0)  # only the trainer gets the terminal's interrupts
    signal.set_wakeup_fd(-1)
    os.register_at_fork(
        before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_reset_signals
    )
    gc.freeze()  # do not destroy the trainer's objects: destroying a process group would wait for its threads
    while True:
        try:
            job = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)
        pipe.send_bytes(json.dumps(work(job)).encode())


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_masks = threading.local()  # the thread's mask before it forks


def _block_signals() -> None:
    """Block signals during a fork. A signal that arrives before `_reset_signals` would otherwise be recorded by the
    trainer's handler in the child, and lost.
    """
    _masks.previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.previous)


def _reset_signals() -> None:
    """Restore default signal handling in a process started by a reward.

    The trainer's handlers only record a signal, so a pool of processes would never end.
    """
    for number in SIGNALS:
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    _unblock_signals()
