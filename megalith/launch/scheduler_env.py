"""Launch settings from the environment variables of schedulers and operators.

Kubeflow's operators set PET_NNODES, PET_NPROC_PER_NODE and the rendezvous address, which torchrun reads as its options.
A PyTorchJob also sets RANK to the pod's rank, and WORLD_SIZE to the number of processes or of pods (operators before
1.6, and jobs without nprocPerNode). Slurm's `srun` sets the numbers of tasks and nodes: a single task per node starts
that node's processes; if there are several tasks per node, each task is a rank.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from megalith.errors import ConfigError
from megalith.launch.network import is_loopback

DEFAULT_PORT = 29500
RANK_VARIABLES = ("TORCHELASTIC_RUN_ID", "LOCAL_RANK")  # set by a launcher for its ranks


@dataclass(frozen=True)
class LaunchSettings:
    """Processes, machines and rendezvous of a job."""

    nproc: int | None = None
    """Processes to start on this machine; None: this process is itself a rank, or the only one."""
    nnodes: str = "1"
    """Number of machines, as for `--nnodes`."""
    endpoint: str | None = None
    """Address host:port of the machines' rendezvous."""
    max_restarts: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that a launcher would set. They are set here for a rank that srun started."""


def read_launch_settings(environ: Mapping[str, str], nproc: int | None, nnodes: str | None) -> LaunchSettings:
    """Read the launch settings from environment variables. `nproc` and `nnodes`, from the command line, override them.

    Raises:
        ConfigError: the command line contradicts the environment, or a variable is not a number.
    """
    settings = LaunchSettings(nproc, nnodes or "1", _endpoint(environ, "MASTER_ADDR", "MASTER_PORT"))
    if any(name in environ for name in RANK_VARIABLES):
        return settings
    if "PET_NNODES" in environ or "PET_NPROC_PER_NODE" in environ:
        return _operator_settings(environ, nproc, nnodes)
    if "RANK" not in environ and _number(environ, "SLURM_STEP_NUM_TASKS", 1) > 1 and nnodes is None:
        return _slurm_settings(environ, nproc)
    if nproc is not None and nnodes is None and _number(environ, "WORLD_SIZE", 1) > 1:
        endpoint = _reachable_endpoint(settings.endpoint, environ, "RANK")
        return LaunchSettings(nproc, environ["WORLD_SIZE"], endpoint)
    return settings


def _operator_settings(environ: Mapping[str, str], nproc: int | None, nnodes: str | None) -> LaunchSettings:
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
    return LaunchSettings(nproc, nnodes, _reachable_endpoint(endpoint, environ, rank), restarts)


def _slurm_settings(environ: Mapping[str, str], nproc: int | None) -> LaunchSettings:
    tasks, nodes = _number(environ, "SLURM_STEP_NUM_TASKS", 1), _number(environ, "SLURM_STEP_NUM_NODES", 1)
    head = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
    port = str(20000 + _number(environ, "SLURM_JOB_ID", 0) % 20000)
    head, port = environ.get("MASTER_ADDR", head), environ.get("MASTER_PORT", port)
    if tasks == nodes:
        nproc = nproc or _number(environ, "SLURM_GPUS_ON_NODE", 1)
        return LaunchSettings(nproc, str(nodes), f"{head}:{port}")
    if nproc is not None:
        raise ConfigError(
            f"srun has started {tasks} tasks on {nodes} machines, and --nproc {nproc} makes each task start {nproc} "
            "processes; run srun with --ntasks-per-node=1, or remove --nproc so that each task is a rank"
        )
    tasks_per_node = tasks_by_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = _number(environ, "SLURM_NODEID", 0)
    ranks = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks_per_node[node] if node < len(tasks_per_node) else tasks // nodes),
        "MASTER_ADDR": head,
        "MASTER_PORT": port,
    }
    return LaunchSettings(variables=ranks)


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `gpu[007-010,12],login1` → `gpu007`."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]*)[^\]]*\])?([^,\[]*)", nodelist)
    return "".join(part or "" for part in match.groups())


def tasks_by_node(text: str) -> list[int]:
    """Parse Slurm's notation for tasks per node: `8(x2),4` → [8, 8, 4]."""
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in groups for _ in range(int(times or 1))]


def _processes(text: str) -> int:
    """Parse torchrun's --nproc-per-node: a number, or `gpu`, `cpu` or `auto` for the number of devices."""
    if text.isdigit() and int(text):
        return int(text)
    if text not in ("auto", "gpu", "cpu"):
        raise ConfigError(
            f"PET_NPROC_PER_NODE is {text!r}; it must be a number of processes, auto, gpu or cpu"
        )
    import torch

    gpus = 0 if text == "cpu" else torch.cuda.device_count()
    if text == "gpu" and not gpus:
        raise ConfigError(
            "PET_NPROC_PER_NODE is gpu, but PyTorch finds no GPU on this machine; set it to a number"
        )
    return gpus or os.cpu_count() or 1


def _endpoint(environ: Mapping[str, str], address: str, port: str) -> str | None:
    return f"{environ[address]}:{environ.get(port, DEFAULT_PORT)}" if environ.get(address) else None


def _reachable_endpoint(endpoint: str | None, environ: Mapping[str, str], rank: str) -> str | None:
    """Replace `localhost` with the hostname on rank 0, because the other pods get the hostname."""
    host, _, port = (endpoint or "").rpartition(":")
    if host and is_loopback(host) and environ.get(rank) == "0" and socket.gethostname() != host:
        return f"{socket.gethostname()}:{port}"
    return endpoint


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdigit():
        raise ConfigError(f"{name} is {text!r} in the environment; it must be a whole number")
    return int(text)
