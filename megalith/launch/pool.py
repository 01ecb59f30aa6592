"""A pool of processes that stays up between jobs: each job runs one function on every rank with fresh process groups.

    pool = Pool(4)
    values = pool.run(function, *args)      # function(*args) on ranks 0 to 3; their return values in order

It is what the tests and `megalith parity` run on, where hundreds of small jobs follow each other.

The function stands at the top level of a module, and what goes in and out can be pickled. Starting a worker costs
seconds; it holds the imported modules and nothing else, and forks a child for each of its jobs, which ends with it. So
nothing of a job is left for the next: no threads or descriptors of its groups, no caches, no communicator.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from megalith.launch.failure import COLLECTIVE_WORDS

PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "megalith.models.transformer"]


ENDED = "the process ended with"
CAUSE = 1.0  # seconds that the end of a rank may be reported later than by those who lost its connection


class RankFailed(Exception):
    """A rank raised: the message is its traceback. The error itself, where it can be pickled, is the cause."""


class Pool:
    """`size` worker processes, started at the first job. On "cuda" each has a GPU of its own."""

    def __init__(self, size: int, timeout: float = 120.0, device_type: str = "cpu"):
        self.size = size
        self.timeout = timeout  # seconds a job may take
        self.device_type = device_type
        self._workers: list[tuple[Any, Connection]] = []
        self._jobs = 0
        self._store = None

    def run(self, function: Callable, *args: Any, size: int | None = None) -> list[Any]:
        """`function(*args)` on ranks 0 to size - 1 (default: all), each in a process group of that size.

        Returns their values in order. Raises RankFailed with the traceback of the rank that failed first.
        """
        size = size or self.size
        assert size <= self.size, f"a pool of {self.size} cannot run a job of {size}"
        self._start()
        self._jobs += 1
        job = pickle.dumps((function, args))
        modules = sorted({thing.__module__ for thing in (function, *args) if inspect.isfunction(thing)})
        for rank, (_, pipe) in enumerate(self._workers[:size]):
            pipe.send(
                (
                    sys.path,
                    modules,
                    (self._jobs, rank, size, self.device_type, self._store.port, self.timeout, job),
                )
            )
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:size])}
        results: list[Any] = [None] * size
        while waiting:
            ready = wait(list(waiting), self.timeout + 10)
            if not ready:
                self.close()
                raise RankFailed(f"ranks {sorted(waiting.values())} gave no answer within {self.timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                results[rank] = self._receive(rank, pipe, waiting)
        return results

    def run_cases(
        self, function: Callable, cases: Mapping[Hashable, tuple], size: int | None = None
    ) -> dict[Hashable, list[Any]]:
        """`function(*args)` of each case's args in one job, one after the other: the values of its ranks, by case.

        Raises RankFailed for the first that fails, with its name in the traceback.
        """
        ranks = self.run(_run_each, function, list(cases.items()), size=size)
        return {name: list(values) for name, values in zip(cases, zip(*ranks))}

    def close(self) -> None:
        """Ends the workers; the next job starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            with suppress(ProcessLookupError):  # a worker that has only begun has no group of its own yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        self._workers, self._jobs, self._store = [], 0, None

    def _receive(self, rank: int, pipe: Connection, waiting: dict[Connection, int]) -> Any:
        try:
            succeeded, content = pipe.recv()
        except (EOFError, OSError):
            self.close()
            raise RankFailed(f"rank {rank}'s process ended without a word") from None
        if succeeded:
            return pickle.loads(content)
        text, error = content
        if any(word in text for word in COLLECTIVE_WORDS):
            for other in wait(list(waiting), CAUSE):  # the cause may be a rank whose end is not yet told
                rest = {pipe: rank for pipe, rank in waiting.items() if pipe is not other}
                self._receive(waiting[other], other, rest)
        self.close()
        raise RankFailed(f"rank {rank}:\n{text}") from (pickle.loads(error) if error else None)

    def _start(self) -> None:
        if self._workers:
            return
        from megalith.launch.rendezvous import serve_store

        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(PRELOADED)
        self._store = serve_store()
        for _ in range(self.size):
            ours, theirs = processes.Pipe()
            process = processes.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))


def _run_each(function: Callable, cases: Sequence[tuple[Hashable, tuple]]) -> list[Any]:
    values = []
    for name, args in cases:
        try:
            values.append(function(*args))
        except BaseException as error:
            error.add_note(f"in the case {name}")
            raise
    return values


def _work(pipe: Connection) -> None:
    import torch

    os.setpgid(0, 0)  # for `close` to end a job's process with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's, which ends the pool
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 (of a child that a signal ends)
    gc.freeze()  # the modules are no garbage: jobs look through what they make themselves
    while True:
        try:
            path, modules, job = pipe.recv()
            sys.path[:] = path
            for name in modules:  # here, once: each job's child would import them anew
                with suppress(Exception):  # which the child meets again, and tells
                    importlib.import_module(name)
            stacks.seek(0)
            stacks.truncate()
            child = os.fork()
            if child == 0:
                faulthandler.enable(stacks)
                # Here, for a fork leaves no threads of torch's pool: autograd's, one a GPU, would make it anew at once.
                torch.set_num_threads(1)
                outcome = _run_job(*job)
                sys.stdout.flush()
                pipe.send(outcome)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code:
                stacks.seek(0)
                pipe.send((False, (f"{ENDED} {_told(code)}\n{stacks.read()}", None)))
        except (EOFError, OSError):  # the parent has gone
            return


def _told(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _run_job(
    number: int, rank: int, size: int, device_type: str, port: int, timeout: float, job: bytes
) -> tuple[bool, Any]:
    """(True, pickled value) or (False, (traceback, pickled error or None))."""
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.utils.store import barrier

    from megalith.launch.rendezvous import LOOPBACK, use_loopback_interface

    faulthandler.dump_traceback_later(timeout)
    try:
        function, args = pickle.loads(job)
        use_loopback_interface()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        _stay_on_a_core(rank, size)
        store = dist.PrefixStore(f"job {number}", dist.TCPStore(LOOPBACK, port))
        backend, device = "gloo", None
        if device_type == "cuda":
            backend, device = "cpu:gloo,cuda:nccl", torch.device("cuda", rank)
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
            device_id=device,
        )
        value = pickle.dumps(function(*args))
        barrier(store, size, "through", timeout)  # no rank ends while another may still read from it
        return True, value
    except BaseException as error:
        text = traceback.format_exc()
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:
            pickled = None
        return False, (text, pickled)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _stay_on_a_core(rank: int, size: int) -> None:
    """Keeps the threads that a job starts on one core where its ranks outnumber the cores.

    Each collective wakes three threads of a rank. Four ranks on two cores took 3.0 s so, and 5.2 where their threads
    were moved about (TP4 + SP; CP4 2.1 and 2.6); eight ranks took the same both ways.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if size > len(cores):
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
