"""The hang watch: finds a rank that hangs, names it and the collective that the others wait in, and ends the job.

A thread of each rank writes its progress (heartbeat) into the job's store, and watches two things: whether its own loop
has made progress within the timeout, and whether the next rank's thread still writes, which that of a stopped process
or of a lost machine does not. Each rank watches one other, so that the store has little to do in a job of any size.
Only after a timeout does a rank read the last heartbeat of all, and says which differ:

    rank 1 does not answer (stopped, or its machine is lost): it was in step 7, training; ranks 0, 2, 3: step 7,
    training, all_reduce number 31 of default_pg, called from summed (megalith/comm/collectives.py:147)

The number of a collective is from torch's flight recorder: a rank that left one out has a lower one than the others.
A save may take any time (`Heartbeat.long_work`). The thread also ends this rank when the process that has started it is
gone, or the store is, so that none is left behind.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, Store, distributed_c10d

from megalith.errors import HangError, TrainingError
from megalith.io import replace_file
from megalith.launch.failure import CRASH_FILE, RankLost, report
from megalith.launch.heartbeat import Heartbeat
from megalith.launch.last_collectives import flight_recorder, pending_collective
from megalith.launch.launcher import Process
from megalith.launch.restart import this_attempt

LOOKS = 10  # within a time-out
LISTENING_LOOKS = 3  # in which a rank that writes nothing is silent
PATIENT_LOOKS = 12  # for which a rank waits for another's verdict
STORE_PATIENCE = 30.0  # seconds in which the store may fail to answer


@dataclass(frozen=True)
class Sign:
    """What a rank's thread wrote last."""

    look: int
    step: int
    phase: str
    where: str = ""
    """The collective that it stands in and who called it, when its loop has stood still for a while."""

    def text(self) -> str:
        return f"step {self.step}, {self.phase}" + (f", {self.where}" if self.where else "")


class HangWatch:
    """Watches over `heartbeat`, which the main thread of `rank` beats, in its `with`."""

    def __init__(
        self,
        heartbeat: Heartbeat,
        rank: int,
        world_size: int,
        timeout: float,
        store: Store | None,
        output: Path,
    ):
        """`timeout` in seconds. `store` is this thread's own connection; without one, for a single rank, only the
        launcher is watched. A dump of the flight recorder goes into `output`."""
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
        """Ends the rank where the watch fails: without it a hang would never be reported."""
        try:
            self._watch()
        except Exception as error:
            report(error)
            os._exit(TrainingError.exit_code)

    def _watch(self) -> None:
        interval = min(self._timeout / LOOKS, 1.0)
        next_rank = (self._rank + 1) % self._world_size
        heard, heard_at = "", time.monotonic()
        answered_at = time.monotonic()
        look = 0
        while look == 0 or not self._stopped.wait(interval):
            look += 1
            if self._parent not in (None, os.getppid()):
                os._exit(1)  # the launcher is gone, and its ranks with it
            if self._crash is not None and os.path.exists(self._crash):
                report(RankLost("another rank of this machine has died"))
                os._exit(RankLost.exit_code)
            if self._store is None:
                continue
            now = time.monotonic()
            try:
                self._say(look, interval)
                said = self._read(next_rank)
                answered_at = now
                if said != heard:
                    heard, heard_at = said, now
                stands = not self._heartbeat.is_long and now - self._heartbeat.last_beat > self._timeout
                if stands or (heard and now - heard_at > self._timeout):
                    self._end(look, interval)
            except RuntimeError as error:  # torch's errors of a store and its connection
                if now - answered_at > min(STORE_PATIENCE, self._timeout) and not self._stopped.is_set():
                    report(_no_answer(error))
                    os._exit(TrainingError.exit_code)

    def _say(self, look: int, interval: float) -> None:
        heartbeat = self._heartbeat
        still = time.monotonic() - heartbeat.last_beat > 2 * interval
        where = pending_collective(self._main) if still and not heartbeat.is_long else ""
        sign = Sign(look, heartbeat.step, heartbeat.phase, where)
        self._store.set(f"rank{self._rank}", json.dumps(asdict(sign)))

    def _read(self, rank: int) -> str:
        key = f"rank{rank}"
        return _text(self._store.get(key)) if self._store.check([key]) else ""

    def _read_all(self) -> list[str]:
        """What every rank wrote last, by rank; "" of one that has written nothing yet."""
        keys = [f"rank{rank}" for rank in range(self._world_size)]
        if self._store.check(keys):
            return [_text(said) for said in self._store.multi_get(keys)]
        return [self._read(rank) for rank in range(self._world_size)]

    def _end(self, look: int, interval: float) -> None:
        """Tells what stands and ends this rank. Of those that find it one reads what all wrote, and finds for all."""
        self._dump()
        text = self._verdict(look, interval)
        report(HangError(text))
        os._exit(HangError.exit_code)

    def _verdict(self, look: int, interval: float) -> str:
        """The first that asks finds it; the others go on writing, so as not to be taken for silent, until it is there.

        Where the first is lost meanwhile, they find it themselves.
        """
        begins = 0 if self._store.add("finders", 1) == 1 else PATIENT_LOOKS
        before: list[str] = []
        for later in range(begins + LISTENING_LOOKS):
            if later == begins:
                before = self._read_all()
            time.sleep(interval)
            self._say(look + later + 1, interval)
            if self._store.check(["verdict"]):
                return _text(self._store.get("verdict"))
        return self._find(before)

    def _find(self, before: list[str]) -> str:
        after = self._read_all()
        signs = {rank: _sign(said) for rank, said in enumerate(after) if said}
        silent = {rank for rank in range(self._world_size) if before[rank] == after[rank]}
        text = hang_message(signs, silent, self._world_size, self._timeout)
        return _text(self._store.compare_set("verdict", "", text))

    def _dump(self) -> None:
        if self._output.is_dir():
            path = self._output / f"flight_recorder_rank{self._rank}.json"
            with suppress(OSError):  # a full disk is no reason to keep the verdict back
                replace_file(path, json.dumps(flight_recorder()))


def _text(content: bytes) -> str:
    """Text of the store, into which others than the job's ranks may have written."""
    return content.decode(errors="replace")


def _sign(said: str) -> Sign | None:
    """Return a rank's sign, None if what it wrote is something else."""
    try:
        return Sign(**json.loads(said))
    except (ValueError, TypeError, RecursionError):
        return None


def hang_message(signs: Mapping[int, Sign | None], silent: set[int], world_size: int, timeout: float) -> str:
    """Return the sentence for a job that hangs.

    Args:
        signs: the last sign of each rank that wrote something; None where it cannot be read.
        silent: ranks that no longer write.
        world_size: ranks of the job.
        timeout: seconds without progress.
    """
    parts = []
    for rank in sorted(silent):
        sign = signs.get(rank)
        last = f": it was in {sign.text()}" if sign else ""
        parts.append(f"rank {rank} does not answer (stopped, or its machine is lost){last}")
    same: dict[str, list[int]] = {}
    for rank in range(world_size):
        if rank in signs and rank not in silent:
            sign = signs[rank]
            text = "what it wrote cannot be read" if sign is None else sign.text()
            same.setdefault(text, []).append(rank)
    for text, ranks in sorted(
        same.items(), key=lambda item: len(item[1])
    ):  # who differs from most comes first
        parts.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {text}")
    return (
        f"no progress within {timeout:g} s (runtime.distributed_timeout_minutes): {'; '.join(parts)}; start the job "
        "again, it resumes from the newest checkpoint"
    )


def _own_connection() -> Store:
    """A connection to the store that the ranks met at, for another thread than the main one."""
    met = distributed_c10d._get_default_store()
    timeout = met.timeout
    met.set_timeout(timedelta(seconds=STORE_PATIENCE / 2))  # torch tries to connect for twice as long
    try:
        store = PrefixStore("watch", met.clone())
    except RuntimeError as error:
        raise _no_answer(error) from error
    finally:
        met.set_timeout(timeout)
    store.set_timeout(timedelta(seconds=STORE_PATIENCE))
    return store


def _no_answer(error: RuntimeError) -> TrainingError:
    return TrainingError(f"the store that the ranks met at does not answer: {error}")


def open_hang_watch(
    heartbeat: Heartbeat, process: Process, timeout: timedelta, output: Path
) -> AbstractContextManager:
    """The watch of a process that has others or a launcher; one that does nothing where it stands by itself."""
    if process.world_size == 1 and this_attempt().launcher is None:
        return nullcontext()
    store = None
    if process.world_size > 1:
        store = _own_connection()
    return HangWatch(heartbeat, process.rank, process.world_size, timeout.total_seconds(), store, output)
