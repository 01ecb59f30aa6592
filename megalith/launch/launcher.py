"""Start the processes of a job, and join the process group from each of them.

`megalith train --nproc N` works as torchrun does: torch's elastic agent starts one process per device and sets its
rank (RANK, WORLD_SIZE, LOCAL_RANK) and the address of the rank store (MASTER_ADDR, MASTER_PORT) in its environment.
On several machines, run the same command with `--nnodes` and a common `--rdzv-endpoint`.
"""

from __future__ import annotations

import atexit
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

from megalith.compat.process_groups import has_nccl_group, release_groups
from megalith.errors import ConfigError, TrainingError
from megalith.launch.failure import CRASH_FILE, RankLost, is_failing, report_uncaught
from megalith.launch.network import is_loopback, use_loopback_interface, use_network_interface
from megalith.launch.parent import JOB, LAUNCHER, exit_with_launcher
from megalith.launch.peer_watch import CONNECTED_FILE
from megalith.launch.stops import STOP_CODE_FILE
from megalith.launch.tcp_store import connect_store, serve_store

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
TIMEOUT = timedelta(minutes=10)  # default timeout of collectives


@dataclass(frozen=True)
class Process:
    """Rank and world size of a process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1  # processes on this machine

    @property
    def is_first(self) -> bool:
        """True on rank 0, which prints and writes."""
        return self.rank == 0


def this_process() -> Process:
    """Return this process's rank and world size from the launcher's environment variables.

    Without a launcher: rank 0 of 1.

    If LOCAL_RANK is not set, it is the rank modulo the number of visible GPUs. This fits schedulers that start one
    process per GPU, node by node, and containers that see one GPU each.

    Raises:
        ConfigError: RANK or WORLD_SIZE is missing or not an integer.
    """
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return Process()
    try:
        rank, world_size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
        local_rank = int(variables["LOCAL_RANK"]) if "LOCAL_RANK" in variables else _default_local_rank(rank)
        local_world_size = int(variables.get("LOCAL_WORLD_SIZE", world_size))
    except (KeyError, ValueError):
        raise ConfigError(
            f"the environment has {variables}, but a process of a job needs RANK and WORLD_SIZE as whole numbers; "
            "start it with --nproc or torchrun, or unset these variables to train in one process"
        ) from None
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK is {rank} and WORLD_SIZE is {world_size}, but ranks count from 0 to {world_size - 1}; start the "
            "processes with --nproc or torchrun"
        )
    return Process(rank, world_size, local_rank, local_world_size)


def _default_local_rank(rank: int) -> int:
    gpus = torch.cuda.device_count()
    return rank % gpus if gpus else rank


def init_distributed(
    device: torch.device,
    timeout: timedelta = TIMEOUT,
    mute_other_ranks: bool = True,
    store: dist.Store | None = None,
) -> Process:
    """Initialize the process group. A single process gets none.

    Args:
        device: this process's device. CUDA gets NCCL and gloo, the CPU only gloo.
        timeout: timeout of collectives.
        mute_other_ranks: discard the standard output of all ranks but 0.
        store: store of the process group. Default: the job's store, with a key prefix for this start of the job.

    Returns:
        This process's ranks.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is not set, or the port is taken.
        RankLost: the other ranks cannot be reached.
    """
    exit_with_launcher()
    process = this_process()
    report_uncaught()
    if process.world_size == 1:
        return process
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE is {process.world_size} but {name} is not set, so the processes cannot find each other; "
                f"start them with --nproc or torchrun, or set {name} to that of rank 0"
            )
    if is_loopback(os.environ["MASTER_ADDR"]):  # a single-node job
        use_loopback_interface()
    else:
        use_network_interface(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = open_store(process, timeout) if store is None else store
    options = dict(store=store, rank=process.rank, world_size=process.world_size, timeout=timeout)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **options)
        else:
            dist.init_process_group("gloo", **options)
    except RuntimeError as error:
        raise RankLost(_unreachable(process, error)) from error
    end_at_exit()
    if path := os.environ.get(CONNECTED_FILE):
        with open(path, "ab", buffering=0) as file:
            file.write(b".")
    if mute_other_ranks and not process.is_first and not _is_muted():
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (to the end of the process)
    return process


def _is_muted() -> bool:
    """Return True if an earlier call in this process has discarded standard output."""
    return getattr(sys.stdout, "name", None) == os.devnull


def _unreachable(process: Process, error: RuntimeError) -> str:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "that this machine's hostname resolves to")
    return (
        f"rank {process.rank} of {process.world_size} could not connect to the others ({str(error).splitlines()[0]}); "
        f"if no other rank has failed: the machines must reach each other at every port, here by the network interface "
        f"{interface}; open the ports, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that the "
        "machines share"
    )


def open_store(process: Process, timeout: timedelta) -> dist.Store:
    """Open the store at MASTER_ADDR:MASTER_PORT, with a key prefix that is unique to this start of the job.

    An elastic launcher's store outlives its ranks, so gloo could otherwise read the addresses of an earlier attempt.
    Rank 0 chooses the prefix. Every other rank requests it under a fresh random key, because under a fixed key it
    might read the answer to an earlier attempt.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if process.is_first:
            store = _serve_store(host, port, timeout)
        else:
            store = connect_store(host, port, timeout, timeout.total_seconds())
        return dist.PrefixStore("only", store)
    store = dist.TCPStore(host, port, timeout=timeout, wait_for_workers=False)
    token = uuid.uuid4().hex
    if process.is_first:
        _send_prefix(store, token, range(1, process.world_size), time.monotonic() + timeout.total_seconds())
        return dist.PrefixStore(token, store)
    store.set(f"request/{process.rank}", token)
    prefix = store.get(f"answer/{token}").decode()
    store.add(f"{prefix}/received", 1)
    return dist.PrefixStore(prefix, store)


def _serve_store(host: str, port: int, timeout: timedelta) -> dist.Store:
    try:
        return serve_store(host, port, timeout)
    except OSError as error:
        raise ConfigError(
            f"rank 0 cannot listen on port {port} for the other ranks ({error.strerror}); set MASTER_PORT to a port "
            "that no other program of its machine uses"
        ) from None


def _send_prefix(store: dist.Store, prefix: str, other_ranks: Collection[int], deadline: float) -> None:
    """Answer the requests of all other ranks. Raises TrainingError at the deadline."""
    answered: set[str] = set()
    while store.add(f"{prefix}/received", 0) < len(other_ranks):
        for key in (f"request/{rank}" for rank in other_ranks):
            token = store.get(key).decode() if store.check([key]) else ""
            if token and token not in answered:
                store.set(f"answer/{token}", prefix)
                answered.add(token)
        if time.monotonic() > deadline:
            raise TrainingError(
                f"not all of the job's {len(other_ranks) + 1} ranks have connected; the output of the other "
                "ranks shows why"
            )
        time.sleep(0.01)


def end_distributed() -> None:
    """Destroy the process groups. Call it only after a successful run.

    After an error, the launcher stops the other ranks instead.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def end_at_exit() -> None:
    """End the process groups and gloo's threads when the interpreter exits, unless an error ends the process.

    Models reference their groups, some in cycles, and gloo groups have threads. If such a thread releases a tensor
    during interpreter shutdown, the process aborts. Groups with NCCL that are still in use are left to torch.
    """
    atexit.unregister(_end_groups)
    atexit.register(_end_groups, os.getpid())


def _end_groups(pid: int) -> None:
    """Destroy the process groups of process `pid`.

    A forked child lacks gloo's threads and would wait for them forever.
    """
    if os.getpid() == pid and not is_failing() and not has_nccl_group():
        release_groups()


def launch(
    nproc: int,
    command: Sequence[str],
    *,
    nnodes: str = "1",
    max_restarts: int = 0,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
    spares: int = 0,
    check: Callable[[Sequence[int]], None] | None = None,
) -> int:
    """Run `python *command` in `nproc` processes on this machine, as part of a job on `nnodes` machines.

    If a process fails, the others are stopped within seconds and its error is printed. Stop signals are passed on to
    the processes.

    Args:
        nproc: processes on this machine.
        command: arguments of the Python interpreter.
        nnodes: number of machines, "4", or "2:4" for an elastic job: if a machine joins later, all ranks save and
            restart together with its ranks.
        max_restarts: number of failures after which the remaining machines restart the job.
        rdzv_endpoint: "host:port" on one of the machines, the same on all of them; required for several.
        rdzv_id: name of the job, the same on all machines; by default derived from the command.
        spares: processes that wait, with everything imported, to replace a rank in an in-process restart.
        check: called before any process starts, with the world sizes that the job may have; its errors propagate.

    Returns:
        The job's exit code: 0, the code of the stop (stops.py), the failed process's exit code, or 128 + the number
        of the signal that ended it.

    Raises:
        ConfigError: impossible numbers of processes, machines or restarts, or no endpoint for several machines.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous import RendezvousError

    from megalith.launch.agent import build_agent

    min_nodes, max_nodes = _parse_nnodes(nproc, nnodes, max_restarts, rdzv_endpoint)
    if spares < 0:
        raise ConfigError(f"--spares is {spares}, but must be at least 0")
    if check is not None:
        check(range(min_nodes * nproc, max_nodes * nproc + 1, nproc))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    logging.disable(logging.CRITICAL)  # the agent logs the failures that are printed below
    try:
        with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
            code_file = os.environ[STOP_CODE_FILE] = os.path.join(folder, "stop_code")
            nodes = min_nodes, max_nodes
            agent = build_agent(nproc, command, nodes, max_restarts, rdzv_endpoint, rdzv_id, folder, spares)
            crash_file = os.path.join(folder, "crashed")
            connected_file = os.path.join(folder, "connected")
            os.environ |= {LAUNCHER: str(os.getpid()), JOB: agent.job}
            os.environ |= {CRASH_FILE: crash_file, CONNECTED_FILE: connected_file}
            try:
                result = agent.run()
            finally:
                agent.stop_spares()
                agent.get_worker_group().spec.rdzv_handler.shutdown()
            if result is None:  # the job already had the maximum number of machines
                return 0
            if not result.is_failed():
                return int(open(code_file).read()) if os.path.exists(code_file) else 0
    except SignalException as error:  # received before the processes started
        return 128 + error.sigval
    except RendezvousError as error:
        print(f"error: the launchers of the job could not connect to each other: {error}", file=sys.stderr)
        return 1
    finally:
        for name in (STOP_CODE_FILE, CRASH_FILE, CONNECTED_FILE, LAUNCHER, JOB):  # only for the workers
            os.environ.pop(name, None)
        logging.disable(logging.NOTSET)
    first, last = agent.failures[0], agent.failures[-1]
    print(last.message(agent.world_size), file=sys.stderr)
    if first is not last:
        print(f"first of the {len(agent.failures)} failures: {first.message()}", file=sys.stderr)
    return last.exit_code


def _parse_nnodes(nproc: int, nnodes: str, max_restarts: int, rdzv_endpoint: str | None) -> tuple[int, int]:
    """Parse `--nnodes N` or `MIN:MAX` into the minimum and maximum number of machines. Raises ConfigError."""
    low, _, high = nnodes.partition(":")
    try:
        min_nodes, max_nodes = int(low), int(high or low)
    except ValueError:
        raise ConfigError(f"--nnodes is {nnodes!r}; write a number of machines, or MIN:MAX") from None
    if nproc < 1 or not 1 <= min_nodes <= max_nodes or max_restarts < 0:
        raise ConfigError(
            f"--nproc is {nproc}, --nnodes {nnodes} and --max-restarts {max_restarts}; there must be at least "
            "1 process, 1 machine and 0 restarts, and MIN must not exceed MAX"
        )
    if max_nodes > 1 and rdzv_endpoint is None:
        raise ConfigError(
            f"--nnodes is {nnodes}, which needs --rdzv-endpoint: pass the same HOST:PORT on all machines, where HOST "
            "is one of them"
        )
    return min_nodes, max_nodes
