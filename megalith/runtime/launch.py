"""Starting the processes of a job, and joining them.

`megalith train --nproc N` and torchrun do the same: torch's elastic agent starts a process for each device and tells
it through its environment which rank it is (RANK, WORLD_SIZE, LOCAL_RANK) and where the others meet (MASTER_ADDR,
MASTER_PORT). Several machines run the same command with `--nnodes` and a common `--rdzv-endpoint`, where the agents
find each other.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megalith.errors import ConfigError
from megalith.runtime.failure import report_uncaught
from megalith.runtime.stops import STOP_CODE_FILE

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

    Raises ConfigError where the environment gives half a number.
    """
    given = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if "RANK" not in given and "WORLD_SIZE" not in given:
        return Process()
    try:
        rank, world_size = int(given["RANK"]), int(given["WORLD_SIZE"])
        local_rank = int(given.get("LOCAL_RANK", rank))
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


def init_distributed(device: torch.device, timeout: timedelta = TIMEOUT) -> Process:
    """Joins the job's other processes, if it has any; a single process gets no process group.

    `timeout` is how long a collective waits for the others. `device` is this process's own. Of many processes only
    the first keeps its standard output.
    """
    process = this_process()
    report_uncaught()
    if process.world_size == 1:
        return process
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE is {process.world_size} but {name} is not set, so the processes cannot meet; start them "
                "with --nproc or torchrun, or set it to the first process's"
            )
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    if not process.is_first:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (to the end of the process)
    return process


def end_distributed() -> None:
    """Leaves the job after it has gone well. After an error a process just ends: the others are stopped."""
    if dist.is_initialized():
        dist.destroy_process_group()


def launch(
    nproc: int,
    command: Sequence[str],
    *,
    nnodes: str = "1",
    max_restarts: int = 0,
    rdzv_endpoint: str | None = None,
    rdzv_id: str | None = None,
) -> int:
    """Runs `python *command` in `nproc` processes on this machine, of `nnodes` alike; returns the job's exit code.

    With several machines ("4", or "2:4" for as many as there are) each calls this with the same `rdzv_endpoint`,
    "host:port" on one of them. When a process fails, the others are stopped within seconds and its error is printed.
    Up to `max_restarts` times the machines that are left then meet and start again; after that the failed process's
    exit code (128 + the signal's number) is returned. A stop signal is handed to the processes, and the code of the
    stop (stops.py) returned when they have ended. Raises ConfigError for numbers that cannot be.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

    from megalith.runtime.agent import build_agent

    least, most = _check(nproc, nnodes, max_restarts, rdzv_endpoint)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    logging.disable(logging.CRITICAL)  # the agent's own account of what is told below
    try:
        with tempfile.TemporaryDirectory(prefix="megalith-") as folder:
            code_file = os.environ[STOP_CODE_FILE] = os.path.join(folder, "stop_code")
            agent = build_agent(nproc, command, (least, most), max_restarts, rdzv_endpoint, rdzv_id, folder)
            try:
                result = agent.run()
            finally:
                agent._worker_group.spec.rdzv_handler.shutdown()
            if not result.is_failed():
                return int(open(code_file).read()) if os.path.exists(code_file) else 0
    except SignalException as error:  # before there were processes to hand it to
        return 128 + error.sigval
    except (RendezvousClosedError, RendezvousTimeoutError) as error:
        print(f"error: the machines of the job could not meet: {error}", file=sys.stderr)
        return 1
    finally:
        logging.disable(logging.NOTSET)
    first, last = agent.failures[0], agent.failures[-1]
    print(last.tell(agent.world_size), file=sys.stderr)
    if first is not last:
        print(f"the first of these {len(agent.failures)} failures: {first.tell()}", file=sys.stderr)
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
            f"--nnodes is {nnodes} but there is no --rdzv-endpoint for the machines to meet at; give each the same "
            "host:port, on one of them"
        )
    return least, most
