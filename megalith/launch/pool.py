"""A process pool for many small distributed jobs, used by `megalith parity` and `megalith doctor`.

    pool = Pool(4)
    values = pool.run(function, *args)      # function(*args) on ranks 0 to 3; returns their values in order

The function must be at the top level of a module, and arguments and return values must be picklable. Starting a worker
takes seconds, so workers live on between jobs. A worker only imports modules, and forks a child for each job, so that
no threads, descriptors, caches or communicators of a job survive it.
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
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from megalith.launch.failure import COLLECTIVE_WORDS
from megalith.launch.parent import exit_with_parent

PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "megalith.models.transformer"]


ENDED = "the process ended with"
CAUSE_DELAY = 1.0  # seconds to wait for the failure that made other ranks lose their connection


class RankFailed(Exception):
    """Raised if a rank failed.

    The message is the rank's traceback; the cause is its exception, if that can be pickled.
    """


class Pool:
    """Pool of `size` worker processes, started with the first job.

    Args:
        size: number of workers.
        timeout: seconds that a job may take.
        device_type: "cpu", or "cuda" for a GPU per worker.
    """

    def __init__(self, size: int, timeout: float = 120.0, device_type: str = "cpu"):
        self.size = size
        self.timeout = timeout
        self.device_type = device_type
        self._workers: list[tuple[Any, Connection]] = []
        self._jobs = 0
        self._store = None

    def run(self, function: Callable, *args: Any, size: int | None = None) -> list[Any]:
        """Run `function(*args)` on ranks 0 to size − 1, by default on all ranks, in a process group of that size.

        Returns:
            The return values in rank order.

        Raises:
            RankFailed: with the traceback of the rank that failed first.
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
                raise RankFailed(f"ranks {sorted(waiting.values())} did not answer within {self.timeout} s")
            for pipe in ready:
                rank = waiting.pop(pipe)
                results[rank] = self._receive(rank, pipe, waiting)
        return results

    def run_cases(
        self, function: Callable, cases: Mapping[Hashable, tuple], size: int | None = None
    ) -> dict[Hashable, list[Any]]:
        """Run `function(*args)` for the args of each case, one after the other in one job.

        Returns:
            The return values in rank order, by case.

        Raises:
            RankFailed: for the first case that fails, with its name in the traceback.
        """
        ranks = self.run(_run_cases, function, list(cases.items()), size=size)
        return {name: list(values) for name, values in zip(cases, zip(*ranks))}

    def close(self) -> None:
        """Terminate the workers. The next job starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            with suppress(ProcessLookupError):  # a worker that has just started has no process group yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        self._workers, self._jobs, self._store = [], 0, None

    def _receive(self, rank: int, pipe: Connection, waiting: dict[Connection, int]) -> Any:
        try:
            succeeded, content = pipe.recv()
        except (EOFError, OSError):
            self.close()
            raise RankFailed(f"rank {rank}'s process ended without a message") from None
        if succeeded:
            return pickle.loads(content)
        text, error = content
        if any(word in text for word in COLLECTIVE_WORDS):
            for other in wait(list(waiting), CAUSE_DELAY):  # the cause may not be reported yet
                rest = {pipe: rank for pipe, rank in waiting.items() if pipe is not other}
                self._receive(waiting[other], other, rest)
        self.close()
        raise RankFailed(f"rank {rank}:\n{text}") from (pickle.loads(error) if error else None)

    def _start(self) -> None:
        if self._workers:
            return
        from megalith.launch.tcp_store import serve_store

        processes = multiprocessing.get_context("forkserver")
        processes.set_forkserver_preload(PRELOADED)
        self._store = serve_store()
        for _ in range(self.size):
            parent_end, worker_end = processes.Pipe()
            process = processes.Process(target=_work, args=(worker_end,), daemon=True)
            process.start()
            worker_end.close()
            self._workers.append((process, parent_end))


def _run_cases(function: Callable, cases: Sequence[tuple[Hashable, tuple]]) -> list[Any]:
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

    os.setpgid(0, 0)  # `close` kills the group, with the current job's child
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts and ends the pool
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    stacks = tempfile.TemporaryFile("w+")  # noqa: SIM115 (thread stacks of a child that crashes)
    gc.freeze()  # garbage collection in the children skips the imported modules
    while True:
        try:
            path, modules, job = pipe.recv()
            sys.path[:] = path
            for name in modules:  # import here once, not again in every job's child
                with suppress(Exception):  # the child raises it again and reports it
                    importlib.import_module(name)
            stacks.seek(0)
            stacks.truncate()
            child = os.fork()
            if child == 0:
                exit_with_parent()
                faulthandler.enable(stacks)
                # A fork keeps no threads of torch's pool; without this, autograd's threads would each recreate it.
                torch.set_num_threads(1)
                outcome = _run_job(*job)
                sys.stdout.flush()
                pipe.send(outcome)
                os._exit(0)
            code = _await_job(child, pipe)
            if code:
                stacks.seek(0)
                pipe.send((False, (f"{ENDED} {_exit_text(code)}\n{stacks.read()}", None)))
        except (EOFError, OSError):  # the parent has exited
            return


def _await_job(child: int, pipe: Connection) -> int:
    """Return the exit code of a job's process. Kill it if the pool's process exits."""
    if hasattr(os, "pidfd_open"):  # on Linux
        ended = os.pidfd_open(child)
        wait([pipe, ended])
        os.close(ended)
        with socket.socket(fileno=os.dup(pipe.fileno())) as connection, suppress(BlockingIOError):
            if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):  # not the next job
                os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _exit_text(code: int) -> str:
    return f"exit code {code}" if code > 0 else signal.Signals(-code).name


def _run_job(
    number: int, rank: int, size: int, device_type: str, port: int, timeout: float, job: bytes
) -> tuple[bool, Any]:
    """Run a pickled job as one rank of a process group.

    Returns (True, pickled value), or (False, (traceback, pickled error or None)) if the job raises.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.elastic.utils.store import barrier

    from megalith.launch.network import LOOPBACK, use_loopback_interface

    faulthandler.dump_traceback_later(timeout)
    try:
        function, args = pickle.loads(job)
        use_loopback_interface()
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        _pin_to_core(rank, size)
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
        barrier(store, size, "done", timeout)  # no rank exits while another may still read from it
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


def _pin_to_core(rank: int, size: int) -> None:
    """Pin a rank's threads to one core if there are more ranks than cores.

    Each collective wakes three threads of a rank. Pinned, four ranks on two cores took 3.0 s instead of 5.2 s for
    TP4 + SP, and 2.1 s instead of 2.6 s for CP4; eight ranks took the same time.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if size > len(cores):
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
