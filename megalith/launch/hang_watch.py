"""Hang detection: finds the rank that hangs, reports it with the collective in which the others wait, and ends the
job.

A thread of each rank publishes its progress (heartbeat.py) in the job's store. It checks that its own training loop
makes progress within the timeout, and that the next rank's thread still publishes. The thread of a stopped process or a
lost machine does not. Each rank watches only one other, so the store's load stays low in large jobs. After a timeout a
rank reads the status of all ranks and reports the ones that differ:

    rank 1 does not answer (stopped, or its machine is lost): it was in step 7, training; ranks 0, 2, 3: step 7,
    training, all_reduce number 31 of default_pg, called from summed (megalith/comm/collectives.py:147)

Collective numbers come from torch's flight recorder; a rank that skipped a collective has a lower number. Long work,
such as a save, has no timeout. The thread also ends its rank when the launcher or the store is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store

from megalith.compat.process_groups import default_store
from megalith.errors import HangError, TrainingError
from megalith.io import replace_file
from megalith.launch.failure import CRASH_FILE, RankLost, report
from megalith.launch.heartbeat import Heartbeat
from megalith.launch.in_process import InProcessRestart
from megalith.launch.last_collectives import flight_recorder, pending_collective
from megalith.launch.launcher import Process
from megalith.launch.network import limited_silence
from megalith.launch.restart import this_attempt

CHECKS_PER_TIMEOUT = 10
LISTENING_CHECKS = 3  # checks without a new status after which a rank counts as silent
VERDICT_CHECKS = 12  # checks for which a rank waits for another rank's verdict
STORE_TIMEOUT = 30.0  # seconds
REPLACEMENT_TIMEOUT = 30.0  # seconds in which the launcher replaces a rank that hangs
WAY_OUT = "start the job again, it resumes from the newest checkpoint"  # if no rank is replaced


@dataclass(frozen=True)
class RankStatus:
    """The status that a rank has published."""

    check_count: int
    step: int
    phase: str
    where: str = ""
    """Pending collective and its caller, if the loop has made no progress for a while."""

    def text(self) -> str:
        return f"step {self.step}, {self.phase}" + (f", {self.where}" if self.where else "")


class HangWatch:
    """Context manager that watches the heartbeats of this rank's main thread and of the next rank.

    It also ends this rank after the launcher has exited or another rank of this machine has crashed.

    Args:
        heartbeat: progress of this rank.
        rank: this rank.
        world_size: ranks of the job.
        timeout: seconds without progress.
        store: a connection that only this thread uses. None for a single rank, where only the launcher is watched.
        output: folder for a dump of the flight recorder.
        restart: in-process restart of this rank, or None if a hang always ends the job.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        rank: int,
        world_size: int,
        timeout: float,
        store: Store | None,
        output: Path,
        restart: InProcessRestart | None = None,
    ):
        self._restart = restart if restart is not None and restart.is_active else None
        self._heartbeat, self._rank, self._world_size, self._timeout = heartbeat, rank, world_size, timeout
        self._store, self._output = store, output
        self._parent = os.getppid() if this_attempt().launcher else None
        self._crash = os.environ.get(CRASH_FILE)
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch_or_end, name="hang watch", daemon=True)

    def __enter__(self) -> HangWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch_or_end(self) -> None:
        """End the rank if the watch itself fails, because a hang would no longer be reported."""
        try:
            self._watch()
        except Exception as error:
            report(error)
            os._exit(TrainingError.exit_code)

    def _watch(self) -> None:
        interval = min(self._timeout / CHECKS_PER_TIMEOUT, 1.0)
        next_rank = (self._rank + 1) % self._world_size
        next_status, next_status_at = "", time.monotonic()
        answered_at = time.monotonic()
        check_count = 0
        while check_count == 0 or not self._stopped.wait(interval):
            check_count += 1
            if self._parent not in (None, os.getppid()):
                os._exit(1)  # the launcher has exited
            if self._crash is not None and os.path.exists(self._crash):
                report(RankLost("another rank of this machine has died"))
                os._exit(RankLost.exit_code)
            if self._store is None:
                continue
            if (
                self._restart is not None and self._restart.is_aborted()
            ):  # until the main thread stops this watch
                continue
            now = time.monotonic()
            try:
                self._publish(check_count, interval)
                status = self._read(next_rank)
                answered_at = now
                if status != next_status:
                    next_status, next_status_at = status, now
                hangs = not self._heartbeat.is_long and now - self._heartbeat.last_beat > self._timeout
                if hangs or (next_status and now - next_status_at > self._timeout):
                    self._end_job(check_count, interval)
            except RuntimeError as error:  # torch's store errors
                if now - answered_at > min(STORE_TIMEOUT, self._timeout) and not self._stopped.is_set():
                    report(_store_error(error))
                    os._exit(TrainingError.exit_code)

    def _publish(self, check_count: int, interval: float) -> None:
        heartbeat = self._heartbeat
        is_waiting = time.monotonic() - heartbeat.last_beat > 2 * interval
        where = pending_collective(self._main) if is_waiting and not heartbeat.is_long else ""
        status = RankStatus(check_count, heartbeat.step, heartbeat.phase, where)
        self._store.set(f"rank{self._rank}", json.dumps(asdict(status)))

    def _read(self, rank: int) -> str:
        key = f"rank{rank}"
        return _text(self._store.get(key)) if self._store.check([key]) else ""

    def _read_all(self) -> list[str]:
        """Return the last status text of every rank, "" for a rank that has published none."""
        keys = [f"rank{rank}" for rank in range(self._world_size)]
        if self._store.check(keys):
            return [_text(content) for content in self._store.multi_get(keys)]
        return [self._read(rank) for rank in range(self._world_size)]

    def _end_job(self, check_count: int, interval: float) -> None:
        """Report the hang and exit. If several ranks detect it, one of them decides for all."""
        self._dump()
        text = self._verdict(check_count, interval)
        if self._restart is not None and self._stopped.wait(REPLACEMENT_TIMEOUT):
            return
        report(HangError(f"{text}; {WAY_OUT}"))
        os._exit(HangError.exit_code)

    def _verdict(self, check_count: int, interval: float) -> str:
        """Return the verdict on the hang. The first rank that detects the hang decides it.

        The other ranks wait for it and keep publishing meanwhile, so that they do not count as silent. If the first
        rank is lost, they decide themselves.
        """
        start = 0 if self._store.add("finders", 1) == 1 else VERDICT_CHECKS
        before: list[str] = []
        for check in range(start + LISTENING_CHECKS):
            if check == start:
                before = self._read_all()
            time.sleep(interval)
            self._publish(check_count + check + 1, interval)
            if self._store.check(["verdict"]):
                return _text(self._store.get("verdict"))
        return self._decide(before)

    def _decide(self, before: list[str]) -> str:
        """Publish a verdict unless another rank has done so, and return the published one.

        A rank whose status equals that in `before` counts as silent.
        """
        after = self._read_all()
        statuses = {rank: _parse_status(text) for rank, text in enumerate(after) if text}
        silent = {rank for rank in range(self._world_size) if before[rank] == after[rank]}
        text = hang_message(statuses, silent, self._world_size, self._timeout)
        verdict = _text(self._store.compare_set("verdict", "", text))
        if self._restart is not None and verdict == text:
            self._replace(silent or differing_ranks(statuses), text)
        return verdict

    def _replace(self, ranks: set[int], text: str) -> None:
        """Request that the launchers replace the ranks that hang. If no rank differs from the others, end the job."""
        if not ranks:
            report(HangError(f"{text}; {WAY_OUT}"))
            os._exit(HangError.exit_code)
        self._restart.request_replacement(sorted(ranks))
        print(text, file=sys.stderr, flush=True)

    def _dump(self) -> None:
        if self._output.is_dir():
            path = self._output / f"flight_recorder_rank{self._rank}.json"
            with suppress(OSError):  # a full disk must not prevent the verdict
                replace_file(path, json.dumps(flight_recorder()))


def differing_ranks(statuses: Mapping[int, RankStatus | None]) -> set[int]:
    """Return the ranks whose step, phase or pending collective differs from the majority's.

    Empty if there is no majority.
    """
    ranks_by_text: dict[str, set[int]] = {}
    for rank, status in statuses.items():
        ranks_by_text.setdefault("" if status is None else status.text(), set()).add(rank)
    usual = max(ranks_by_text.values(), key=len)
    return set(statuses) - usual if 2 * len(usual) > len(statuses) else set()


def _text(content: bytes) -> str:
    """Decode a value of the store. Other programs may have written it."""
    return content.decode(errors="replace")


def _parse_status(text: str) -> RankStatus | None:
    """Parse a rank's status. Returns None if the text is invalid."""
    try:
        return RankStatus(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None


def hang_message(
    statuses: Mapping[int, RankStatus | None], silent: set[int], world_size: int, timeout: float
) -> str:
    """Return the description of a job's hang.

    Args:
        statuses: last status of each rank that has published one, or None if it cannot be parsed.
        silent: ranks that no longer publish.
        world_size: ranks of the job.
        timeout: seconds without progress.
    """
    parts = []
    for rank in sorted(silent):
        status = statuses.get(rank)
        last = f": it was in {status.text()}" if status else ""
        parts.append(f"rank {rank} does not answer (stopped, or its machine is lost){last}")
    ranks_by_text: dict[str, list[int]] = {}
    for rank in range(world_size):
        if rank in statuses and rank not in silent:
            status = statuses[rank]
            text = "its status cannot be parsed" if status is None else status.text()
            ranks_by_text.setdefault(text, []).append(rank)
    # The ranks that differ from most come first.
    for text, ranks in sorted(ranks_by_text.items(), key=lambda item: len(item[1])):
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}")
    return f"no progress within {timeout:g} s (runtime.distributed_timeout_minutes): {'; '.join(parts)}"


def _clone_store() -> Store:
    """Open another connection to the ranks' store, for the watch's thread."""
    rank_store = default_store()
    timeout = rank_store.timeout
    rank_store.set_timeout(timedelta(seconds=STORE_TIMEOUT / 2))  # torch tries to connect for twice as long
    try:
        with limited_silence(STORE_TIMEOUT):
            store = PrefixStore("watch", rank_store.clone())
    except RuntimeError as error:
        raise _store_error(error) from error
    finally:
        rank_store.set_timeout(timeout)
    store.set_timeout(timedelta(seconds=STORE_TIMEOUT))
    return store


def _store_error(error: RuntimeError) -> TrainingError:
    return TrainingError(f"the ranks' store does not answer: {error}")


def open_hang_watch(
    heartbeat: Heartbeat,
    process: Process,
    timeout: timedelta,
    output: Path,
    restart: InProcessRestart | None = None,
) -> AbstractContextManager:
    """Return a HangWatch, or a null context for a single process without a launcher."""
    if process.world_size == 1 and this_attempt().launcher is None:
        return nullcontext()
    store = None
    if process.world_size > 1:
        store = _clone_store()
    seconds = timeout.total_seconds()
    return HangWatch(heartbeat, process.rank, process.world_size, seconds, store, output, restart)
