"""A training job on a cluster, independent of the scheduler, and the checks of its options.

Every node runs the same command, `megalith train RUN --nproc G`, and finds the others through the scheduler's
environment variables. A job that is stopped early saves within the grace period, and resumes when it is restarted:
`checkpoint.load` is the folder that it saves to.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from posixpath import normpath

from megalith.config import RunConfig
from megalith.data.tokenizers.hub import is_hub_name
from megalith.errors import ConfigError
from megalith.remote import is_inside, is_url, open_location

PORT = 29500
HUB_SETTINGS = (
    "data.tokenizer_model",
    "model.init_from",
)  # settings that may be names on the Hugging Face hub
STATE_BYTES = 12  # per parameter in a checkpoint: fp32 weight and two moments
DISK_RATE = 1e9  # assumed write speed of each node, bytes/s
MIN_GRACE = 120  # seconds
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
SCHEDULER_VARIABLES = re.compile(
    r"(PET_\w+|SLURM_\w+|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT)="
)
EFA_VARIABLES = {
    "FI_PROVIDER": "efa",
    "FI_EFA_USE_DEVICE_RDMA": "1",
    "FI_EFA_FORK_SAFE": "1",
    "NCCL_SOCKET_IFNAME": "^lo,docker",
}


@dataclass(frozen=True)
class ClusterJob:
    """Options of a cluster job. Strings are unquoted, exactly as the user gave them."""

    name: str
    program: str
    """`train`, `sft`, `dpo`, `kto`, `reward`, `distill` or `grpo`."""
    run_file: str
    settings: tuple[str, ...]
    """Arguments after the run file: `--section.key value`."""
    output: str
    nodes: int
    gpus: int
    """GPUs per node; each gets a process."""
    grace: int
    """Seconds between the signal to save and the end of the job."""
    restarts: int = 3
    """Number of failures after which the launchers restart the job."""
    time: str | None = None
    """Slurm's time limit."""
    cpus: int | None = None
    """CPU cores per node."""
    memory: str | None = None
    """Memory per node, in the scheduler's notation."""
    image: str | None = None
    """Container image."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables."""
    volumes: tuple[tuple[str, str], ...] = ()
    """Pairs (source, mount path). The source is a volume claim, or a folder for Slurm's containers."""
    queue: str | None = None
    """Kueue's queue or Slurm's partition."""
    account: str | None = None
    topology: str | None = None
    """Kubernetes: label of nodes that are near each other. Slurm: maximum number of switches."""
    efa: int = 0
    """EFA devices per node."""
    namespace: str | None = None
    before: tuple[tuple[str, ...], ...] = ()
    """Commands of megalith that run as separate jobs before the training."""
    after: tuple[tuple[str, ...], ...] = ()
    """Commands of megalith that run as separate jobs after the training."""

    def command(self, run_file: str | None = None) -> list[str]:
        """Return the command of every node, `megalith train …`, without the rendezvous."""
        processes = ["--nproc", str(self.gpus), "--max-restarts", str(self.restarts)]
        return ["megalith", self.program, run_file or self.run_file, *processes, *self.settings]

    @property
    def environment(self) -> dict[str, str]:
        return {"NCCL_DEBUG": "WARN", **(EFA_VARIABLES if self.efa else {}), **self.variables}


def job_name(run_file: str) -> str:
    """Derive a job name from the run file's name."""
    stem = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(run_file).stem.lower()).strip("-")[:40].rstrip("-")
    return stem if NAME.fullmatch(stem) else f"run-{stem}"[:40].rstrip("-")


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--name is {name!r}, but jobs, pods and hosts get this name; use at most 40 characters of a-z, "
            "0-9 and -, beginning with a letter"
        )


def parse_variables(words: Sequence[str]) -> dict[str, str]:
    """Parse the values of `--env`, NAME=VALUE."""
    for word in words:
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", word):
            raise ConfigError(
                f"--env is {word!r}; write NAME=VALUE, where NAME consists of letters, digits and _"
            )
        if SCHEDULER_VARIABLES.match(word):
            raise ConfigError(f"--env is {word!r}, which the scheduler sets on each node; leave it out")
    return dict(word.partition("=")[::2] for word in words)


def parse_volumes(words: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Parse the values of `--volume`, CLAIM:/PATH."""
    volumes = tuple((claim, path) for claim, _, path in (word.rpartition(":") for word in words))
    for word, (claim, path) in zip(words, volumes):
        if not claim or not path.startswith("/"):
            raise ConfigError(
                f"--volume is {word!r}; write CLAIM:/PATH, where PATH is the mount path in the job"
            )
        if path.startswith("//") or normpath(path) not in (path, path.rstrip("/")):
            plain = normpath("/" + path.lstrip("/"))
            raise ConfigError(
                f"--volume is {word!r}, a path with '..', '.' or '//' in it; write {claim}:{plain}"
            )
    paths = [path.rstrip("/") for _, path in volumes]
    if duplicates := [word for word, path in zip(words, paths) if paths.count(path) > 1]:
        raise ConfigError(
            f"--volume {' and --volume '.join(duplicates)} have the same path; mount each at another path"
        )
    return volumes


def grace_seconds(parameters: int, nodes: int) -> int:
    """Return the seconds allowed for the last step and a save: 60, plus twice the time to write a checkpoint at
    DISK_RATE.
    """
    return max(MIN_GRACE, round(60 + 2 * STATE_BYTES * parameters / (nodes * DISK_RATE)))


def check_resumes(config: RunConfig) -> list[str]:
    """Return the command-line arguments with which a restarted job resumes.

    Raises:
        ConfigError: the run saves no checkpoints, or would start from another run's checkpoint each time.
    """
    load, run_folder = config.checkpoint.load, config.run_folder
    if config.checkpoint.save_interval is None:
        raise ConfigError(
            "checkpoint.save_interval is not set, but a cluster's machines may fail at any time; "
            "set it to the number of steps between checkpoints, such as 500"
        )
    if load is None:
        return ["--checkpoint.load", str(run_folder)]
    if not is_inside(open_location(load), open_location(str(run_folder))):
        raise ConfigError(
            f"checkpoint.load is {load}, but this run saves to {run_folder}, so after a failure it would start from "
            f"{load} again; set model.init_from instead of checkpoint.load, or copy {load} to {run_folder}"
        )
    return []


def check_within_nodes(config: RunConfig, gpus: int) -> list[str]:
    """Return notes on parallel axes that span nodes. Raises ConfigError if tensor parallelism does."""
    parallel = config.parallel
    tensor, expert = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if gpus % tensor:
        raise ConfigError(
            f"parallel.tensor_model_parallel_size {tensor} does not divide --gpus-per-node {gpus}, so "
            "tensor-parallel ranks would span nodes and every layer would wait for the network; choose a divisor, "
            "and use parallel.pipeline_model_parallel_size across nodes"
        )
    experts = expert * (parallel.expert_tensor_parallel_size or tensor)
    if config.model.num_experts and gpus % experts:
        return [
            f"parallel.expert_model_parallel_size {expert} (× expert tensor parallel: {experts} ranks) spans nodes of "
            f"{gpus} GPUs: tokens are dispatched over the network"
        ]
    return []


def check_on_volumes(config: RunConfig, volumes: Sequence[tuple[str, str]], users: str = "pods") -> list[str]:
    """Check that all paths of a run are on volumes, so that all pods or containers can access them.

    Args:
        config: the run.
        volumes: pairs (source, mount path).
        users: "pods" or "containers", for messages.

    Returns:
        Notes on settings that are names on the hub.

    Raises:
        ConfigError: a path is on no volume.
    """
    data, notes = config.data, []
    paths = {"train.output_dir": config.train.output_dir, "data.tokenizer_model": data.tokenizer_model}
    paths |= {"model.init_from": config.model.init_from}
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        value = getattr(data, name)
        words = value if isinstance(value, list | tuple) else [value]
        paths |= {f"data.{name}": word for word in words if isinstance(word, str) and "/" in word}
    for setting, path in paths.items():
        if path is None or is_url(path) or (setting != "train.output_dir" and "/" not in path):
            continue
        if not any(PurePosixPath(normpath(path)).is_relative_to(mount) for _, mount in volumes):
            mounts = ", ".join(mount for _, mount in volumes) or "none"
            if setting in HUB_SETTINGS and is_hub_name(path) and not Path(path).exists():
                notes.append(
                    f"{setting} {path} is a name on the Hugging Face hub: each of the {users} downloads it, which "
                    "needs a network connection, and HF_TOKEN in the environment if it is gated"
                )
                continue
            raise ConfigError(
                f"{setting} is {path}, which is not on a volume of the {users} ({mounts}), so they would not find "
                "it, or would lose it when they end; choose a path on a volume, and mount the volume with "
                f"--volume {'CLAIM' if users == 'pods' else 'FOLDER'}:/PATH"
            )
    return notes


def path_in_container(run_file: str, volumes: Sequence[tuple[str, str]]) -> str:
    """Return the run file's path in containers with these volumes (folder, mount path). Raises ConfigError if it is
    on none."""
    local_path = Path(run_file).resolve()
    for folder, path in volumes:
        if local_path.is_relative_to(Path(folder).resolve()):
            return str(PurePosixPath(path) / local_path.relative_to(Path(folder).resolve()))
    raise ConfigError(
        f"the run file {run_file} is not in a folder of --volume, so the containers of --image "
        f"would not see it; add --volume {local_path.parent}:/PATH"
    )
