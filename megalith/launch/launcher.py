"""Starting the processes of a job, and joining them.

`megalith train --nproc N` and torchrun do the same: torch's elastic agent starts a process for each device and tells
it through its environment which rank it is (RANK, WORLD_SIZE, LOCAL_RANK) and where the others meet (MASTER_ADDR,
MASTER_PORT). Several machines run the same command with `--nnodes` and a common `--rdzv-endpoint`, where the agents
find each other.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megalith.errors import ConfigError, TrainingError
from megalith.launch.failure import CRASH_FILE, RankLost, report_uncaught
from megalith.launch.parent import LAUNCHER, exit_with_launcher
from megalith.launch.rendezvous import (
    CONNECTED_FILE,
    JOB,
    connect_store,
    is_loopback,
    serve_store,
    use_loopback_interface,
    use_network_interface,
)
from megalith.launch.stops import STOP_CODE_FILE

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TIMEOUT = timedelta(minutes=10)  # where no configuration says how long


@dataclass(frozen=True)
class Process:
    """Which process of the job this is."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1  # processes on this machine

    @property
    def is_first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0


def this_process() -> Process:
    """This process as its launcher numbered it; without a launcher the only one.

    A scheduler that gives no LOCAL_RANK starts either one process a GPU, machine after machine, or containers that see
    one GPU each; both are the rank modulo the GPUs here.
    Raises ConfigError where the environment gives half a number.
    """
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return Process()
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank = int(given["LOCAL_RANK"]) if "LOCAL_RANK" in given else _number_here(rank)
        local_world_size = int(given.get("LOCAL_WORLD_SIZE", world_size))
    except (KeyError, ValueError):
        raise ConfigError(
            f"the environment has {given}; a process of a job needs RANK and WORLD_SIZE as whole numbers: start it "
            "with --nproc or torchrun, or unset them to train in one process"
        ) from None
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK is {rank} and WORLD_SIZE is {world_size}; ranks count from 0 to {world_size - 1}: start the "
            "processes with --nproc or torchrun"
        )
    return Process(rank, world_size, local_rank, local_world_size)


def _number_here(rank: int) -> int:
    gpus = torch.cuda.device_count()
    return rank % gpus if gpus else rank


def init_distributed(
    device: torch.device, timeout: timedelta = TIMEOUT, mute_other_ranks: bool = True
) -> Process:
    """Joins the job's other processes, if it has any; a single process gets no process group.

    `timeout` is how long a collective waits for the others. `device` is this process's own. Of many processes only
    the first keeps its standard output, where `mute_other_ranks`.
    """
    exit_with_launcher()
    process = this_process()
    report_uncaught()
    if process.world_size == 1:
        return process
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE is {process.world_size} but {name} is not set, so there is no rendezvous; start them "
                "with --nproc or torchrun, or set it to the first process's"
            )
    if is_loopback(os.environ["MASTER_ADDR"]):  # all of the job is on this machine
        use_loopback_interface()
    else:
        use_network_interface(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    options = dict(
        store=open_store(process, timeout), rank=process.rank, world_size=process.world_size, timeout=timeout
    )
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
        else:
            dist.init_process_group("gloo", **options)
    except RuntimeError as error:
        raise RankLost(_unreachable(process, error)) from error
    if path := os.environ.get(CONNECTED_FILE):
        with open(path, "ab", buffering=0) as file:
            file.write(b".")
    if mute_other_ranks and not process.is_first:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (to the end of the process)
    return process


def _unreachable(process: Process, error: RuntimeError) -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "the one of this machine's own name")
    return (
        f"rank {process.rank} of {process.world_size} could not connect to the others ({str(error).splitlines()[0]}); "
        f"if no other has failed: the machines have to reach each other at every port, here by the network interface "
        f"{interface}; open the ports, or name the interface that they share in GLOO_SOCKET_IFNAME and "
        "NCCL_SOCKET_IFNAME"
    )


def open_store(process: Process, timeout: timedelta) -> dist.Store:
    """The store at MASTER_ADDR:MASTER_PORT, with the keys of this start of the job only.

    An elastic launcher's store outlives its ranks, and gloo would take the addresses that the last attempt left there
    for those of this one. So rank 0 gives each start a name, for a prefix. A rank asks for it under a key that it has
    just made up, for what it would read under one of old might be of old.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if process.is_first:
            store = _hold_store(host, port, timeout)
        else:
            store = connect_store(host, port, timeout, timeout.total_seconds())
        return dist.PrefixStore("only", store)
    store = dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    made_up = uuid.uuid4().hex
    if process.is_first:
        _name_start(store, made_up, range(1, process.world_size), time.monotonic() + timeout.total_seconds())
        return dist.PrefixStore(made_up, store)
    store.set(f"asks/{process.rank}", made_up)
    name = store.get(f"answer/{made_up}").decode()
    store.add(f"{name}/answered", 1)
    return dist.PrefixStore(name, store)


def _hold_store(host: str, port: int, timeout: timedelta) -> dist.Store:
    try:
        return serve_store(host, port, timeout)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen at port {port} for the other ranks ({error.strerror}); set MASTER_PORT to a port "
            "that no other program of its machine uses"
        ) from None


def _name_start(store: dist.Store, name: str, others: Collection[int], deadline: float) -> None:
    answered: set[str] = set()
    while store.add(f"{name}/answered", 0) < len(others):
        for key in (f"asks/{rank}" for rank in others):
            asked = store.get(key).decode() if store.check([key]) else ""
            if asked and asked not in answered:
                store.set(f"answer/{asked}", name)
                answered.add(asked)
        if time.monotonic() > deadline:
            raise TrainingError(
                f"not all of the job's {len(others) + 1} ranks have come; look at what the others say"
            )
        time.sleep(0.01)


def end_distributed() -> None:
    """Leaves the job after it has gone well. After an error a process just ends: the others are stopped.

    Models hold their groups, in cycles, and gloo's have threads. Where one of these lets go of a tensor while the
    interpreter ends, the process aborts; so what is garbage then is collected before.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
        atexit.register(gc.collect)


def launch(
    nproc: int,
    command: Sequence[str],
    *,
    nnodes: str = "1",
    max_restarts: int = 0,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    check: Callable[[Sequence[int]], None] | None = None,
) -> int:
    """Runs `python *command` in `nproc` processes on this machine, of `nnodes` alike; returns the job's exit code.

    With several machines ("4", or "2:4" for as many as there are) each calls this with the same `rdzv_endpoint`,
    "host:port" on one of them, and the same `rdzv_id`, by default made of the command. Where there is room for a
    machine that comes later, the ranks save and start again together with its own. When a process fails, the others
    are stopped within seconds and its error is printed. Up to `max_restarts` times the machines that are left then
    meet and start again; after that the failed process's
    exit code (128 + the signal's number) is returned. A stop signal is handed to the processes, and the code of the
    stop (stops.py) returned when they have ended. Raises ConfigError for numbers that cannot be, and before any process
    starts what `check` raises, which is given the world sizes that the job may have.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from megalith.launch.agent import build_agent

    least, most = _check(nproc, nnodes, max_restarts, rdzv_endpoint)
    if check is not None:
        check(range(least * nproc, most * nproc + 1, nproc))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    logging.disable(logging.CRITICAL)  # the agent's own account of what is printed below
    try:
        with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
            code_file = os.environ[STOP_CODE_FILE] = os.path.join(folder, "stop_code")
            agent = build_agent(nproc, command, (least, most), max_restarts, rdzv_endpoint, rdzv_id, folder)
            crash_file = os.path.join(folder, "crashed")
            connected_file = os.path.join(folder, "connected")
            os.environ |= {LAUNCHER: str(os.getpid()), JOB: agent.job}
            os.environ |= {CRASH_FILE: crash_file, CONNECTED_FILE: connected_file}
            try:
                result = agent.run()
            finally:
                agent._worker_group.spec.rdzv_handler.shutdown()
            if result is None:  # as many machines as --nnodes allows were there without this one
                return 0
            if not result.is_failed():
                return int(open(code_file).read()) if os.path.exists(code_file) else 0
    except SignalException as error:  # before there were processes to hand it to
        return 128 + error.sigval
    except RendezvousError as error:
        print(f"error: the machines of the job could not rendezvous: {error}", file=sys.stderr)
        return 1
    finally:
        for name in (STOP_CODE_FILE, CRASH_FILE, CONNECTED_FILE, LAUNCHER, JOB):  # they were for the workers
            os.environ.pop(name, None)
        logging.disable(logging.NOTSET)
    first, last = agent.failures[0], agent.failures[-1]
    print(last.sentence(agent.world_size), file=sys.stderr)
    if first is not last:
        print(f"the first of these {len(agent.failures)} failures: {first.sentence()}", file=sys.stderr)
    return last.exit_code


def _check(nproc: int, nnodes: str, max_restarts: int, rdzv_endpoint: str | None) -> tuple[int, int]:
    """The least and the most machines."""
    low, _, high = nnodes.partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"--nnodes is {nnodes!r}; give a number of machines, or MIN:MAX") from None
    if nproc < 1 or not 1 <= least <= most or max_restarts < 0:
        raise ConfigError(
            f"--nproc is {nproc}, --nnodes {nnodes} and --max-restarts {max_restarts}; processes and machines count "
            "from 1, and MIN is at most MAX"
        )
    if most > 1 and rdzv_endpoint is None:
        raise ConfigError(
            f"--nnodes is {nnodes} but there is no --rdzv-endpoint for the machines' rendezvous; give each the same "
            "host:port, on one of them"
        )
    return least, most
