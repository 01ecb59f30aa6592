"""What schedulers and operators say of a job in the environment of its machines, before any launcher of ours runs.

Kubeflow's operators set PET_NNODES, PET_NPROC_PER_NODE and where the machines meet, which torchrun reads as its
options. A PyTorchJob also sets RANK, the pod's, and WORLD_SIZE: that of all processes, or of the pods (operators before
1.6, and jobs that leave nprocPerNode to be found out); a process of eight in a pod has neither. Under Slurm `srun` says
how many tasks there are on how many machines: one a machine starts that machine's processes, more are themselves the
ranks.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from megalith.errors import ConfigError

DEFAULT_PORT = 29500
STARTED = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")  # what a launcher has set for a rank


@dataclass(frozen=True)
class LaunchSettings:
    """How this process takes part in its job."""

    nproc: int | None = None
    """Processes to start on this machine; None: this process is itself a rank, or the only one."""
    nnodes: str = "1"
    """Machines, as `--nnodes` has them."""
    endpoint: str | None = None
    """host:port of their rendezvous."""
    max_restarts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of a rank that srun has started: what a launcher would have set in its environment."""


def read_launch_settings(environ: Mapping[str, str], nproc: int | None, nnodes: str | None) -> LaunchSettings:
    """From the environment; what the command line gives (`nproc`, `nnodes`) holds against it.

    Raises ConfigError where the two contradict, or where the environment has no numbers.
    """
    given = LaunchSettings(nproc, nnodes or "1", _endpoint(environ, "MASTER_ADDR", "MASTER_PORT"))
    if any(name in environ for name in STARTED):
        return given
    if "PET_NNODES" in environ or "PET_NPROC_PER_NODE" in environ:
        return _of_operator(environ, nproc, nnodes)
    if "RANK" not in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and nnodes is None:
        return _of_slurm(environ, nproc)
    if nproc is not None and nnodes is None and _number(environ, "WORLD_SIZE", 1) > 1:
        return LaunchSettings(nproc, environ["WORLD_SIZE"], _reachable(given.endpoint, environ, "RANK"))
    return given


def _of_operator(environ: Mapping[str, str], nproc: int | None, nnodes: str | None) -> LaunchSettings:
    nproc = nproc or _processes(environ.get("PET_NPROC_PER_NODE", "1"))
    nnodes = nnodes or environ.get("PET_NNODES", "1")
    if nproc == 1 and nnodes == "1":
        return LaunchSettings()
    endpoint = (
        environ.get("PET_RDZV_ENDPOINT")
        or _endpoint(environ, "PET_MASTER_ADDR", "PET_MASTER_PORT")
        or _endpoint(environ, "MASTER_ADDR", "MASTER_PORT")
    )
    rank = "PET_NODE_RANK" if "PET_NODE_RANK" in environ else "RANK"
    restarts = _number(environ, "PET_MAX_RESTARTS", 0)
    return LaunchSettings(nproc, nnodes, _reachable(endpoint, environ, rank), restarts)


def _of_slurm(environ: Mapping[str, str], nproc: int | None) -> LaunchSettings:
    tasks, nodes = _number(environ, "SLURM_STEP_NUM_TASKS", 1), _number(environ, "SLURM_STEP_NUM_NODES", 1)
    head = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    port = str(20000 + _number(environ, "SLURM_JOB_ID", 0) % 20000)
    head, port = environ.get("MASTER_ADDR", head), environ.get("MASTER_PORT", port)
    if tasks == nodes:
        nproc = nproc or _number(environ, "SLURM_GPUS_ON_NODE", 1)
        return LaunchSettings(nproc, str(nodes), f"{head}:{port}")
    if nproc is not None:
        raise ConfigError(
            f"srun has started {tasks} tasks on {nodes} machines, and --nproc {nproc} asks each to start {nproc} "
            "processes; run srun with --ntasks-per-node=1, or leave out --nproc so that each task is a rank"
        )
    here = tasks_by_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    number = _number(environ, "SLURM_NODEID", 0)
    ranks = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(here[number] if number < len(here) else tasks // nodes),
        "MASTER_ADDR": head,
        "MASTER_PORT": port,
    }
    return LaunchSettings(variables=ranks)


def first_host(nodelist: str) -> str:
    """The first name of a list as Slurm writes it: `gpu[007-010,12],login1` → `gpu007`."""
    found = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodelist)
    return "".join(part or "" for part in found.groups())


def tasks_by_node(text: str) -> list[int]:
    """Tasks on each node as Slurm writes them: `8(x2),4` → [8, 8, 4]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _processes(text: str) -> int:
    """What torchrun makes of --nproc-per-node: a number, or `gpu`, `cpu` or `auto` for as many as there are."""
    if text.isdigit() and int(text):
        return int(text)
    if text not in ("auto", "gpu", "cpu"):
        raise ConfigError(f"PET_NPROC_PER_NODE is {text!r}; it is a number of processes, auto, gpu or cpu")
    import torch

    gpus = 0 if text == "cpu" else torch.cuda.device_count()
    if text == "gpu" and not gpus:
        raise ConfigError(
            "PET_NPROC_PER_NODE is gpu, but this machine has none that PyTorch sees; give a number"
        )
    return gpus or os.cpu_count() or 1


def _endpoint(environ: Mapping[str, str], address: str, port: str) -> str | None:
    return f"{environ[address]}:{environ.get(port, DEFAULT_PORT)}" if environ.get(address) else None


def _reachable(endpoint: str | None, environ: Mapping[str, str], rank: str) -> str | None:
    """The first pod may have `localhost` for its address, where the others have its name."""
    from megalith.launch.rendezvous import is_loopback  # which imports torch: seconds

    host, _, port = (endpoint or "").rpartition(":")
    if host and is_loopback(host) and environ.get(rank) == "0" and socket.gethostname() != host:
        return f"{socket.gethostname()}:{port}"
    return endpoint


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r} in the environment; it is a whole number")
    return int(text)
