"""A training job on a cluster: what Slurm's file and Kubernetes' manifests say of it alike.

Every machine runs the same command, `megalith train RUN --nproc G`, and finds the others by what its scheduler says.
Where the job is stopped before its end it saves, and when it is started again it goes on: `checkpoint.load` is where
it saves. The time that a save may take is the grace before a machine is taken away.
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
HUB_NAMES = ("data.tokenizer_model", "model.init_from")  # what the hub can have, too
STATE_BYTES = 12  # a parameter in a checkpoint: fp32 weights and two moments
DISK_RATE = 1e9  # bytes a second that each machine is taken to write
LEAST_GRACE = 120  # seconds
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
SCHEDULERS = re.compile(
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
    """What is to be run where. Names and words are as the user gave them: whoever writes a file quotes them."""

    name: str
    program: str
    """`train`, `sft`, `dpo`, `distill` or `grpo`."""
    run_file: str
    settings: tuple[str, ...]
    """Words that follow it: `--section.key value`."""
    output: str
    nodes: int
    gpus: int
    """Of each node, with a process each."""
    grace: int
    """Seconds before its end at which the job gets a signal, for a last checkpoint."""
    restarts: int = 3
    """Failures of a process after which the launchers start all again by themselves."""
    time: str | None = None
    cpus: int | None = None
    memory: str | None = None
    image: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    volumes: tuple[tuple[str, str], ...] = ()
    """(claim, where it is mounted) or, with Slurm's containers, (folder, where it is mounted)."""
    queue: str | None = None
    """Kueue's queue, Slurm's partition."""
    account: str | None = None
    topology: str | None = None
    """Kubernetes: the label of nodes that are near each other. Slurm: how many switches."""
    efa: int = 0
    """EFA devices of a node."""
    namespace: str | None = None
    before: tuple[tuple[str, ...], ...] = ()
    after: tuple[tuple[str, ...], ...] = ()
    """Commands of megalith that run as jobs of their own."""

    def command(self, run_file: str | None = None) -> list[str]:
        """`megalith train …`, the same on every node, but where the nodes meet."""
        processes = ["--nproc", str(self.gpus), "--max-restarts", str(self.restarts)]
        return ["megalith", self.program, run_file or self.run_file, *processes, *self.settings]

    @property
    def environment(self) -> dict[str, str]:
        return {"NCCL_DEBUG": "WARN", **(EFA_VARIABLES if self.efa else {}), **self.variables}


def job_name(run_file: str) -> str:
    """A name for a job, made of its run file's."""
    stem = re.sub(r"[^a-z0-9]+", "-", PurePosixPath(run_file).stem.lower()).strip("-")[:40].rstrip("-")
    return stem if NAME.fullmatch(stem) else f"run-{stem}"[:40].rstrip("-")


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--name is {name!r}; it names jobs, pods and hosts: give at most 40 of a-z, 0-9 and -, a letter first"
        )


def variables(given: Sequence[str]) -> dict[str, str]:
    """`--env NAME=VALUE` …"""
    for word in given:
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", word):
            raise ConfigError(f"--env is {word!r}; give NAME=VALUE, the name of letters, digits and _")
        if SCHEDULERS.match(word):
            raise ConfigError(f"--env is {word!r}, which the scheduler says to each node; leave it out")
    return dict(word.partition("=")[::2] for word in given)


def volumes(given: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """`--volume CLAIM:/PATH` …"""
    found = tuple((claim, path) for claim, _, path in (word.rpartition(":") for word in given))
    for word, (claim, path) in zip(given, found):
        if not claim or not path.startswith("/"):
            raise ConfigError(f"--volume is {word!r}; give CLAIM:/PATH, the path being where the job sees it")
        if path.startswith("//") or normpath(path) not in (path, path.rstrip("/")):
            plain = normpath("/" + path.lstrip("/"))
            raise ConfigError(
                f"--volume is {word!r}, a path with '..', '.' or '//' in it; give {claim}:{plain}"
            )
    paths = [path.rstrip("/") for _, path in found]
    if twice := [word for word, path in zip(given, paths) if paths.count(path) > 1]:
        raise ConfigError(
            f"--volume {' and --volume '.join(twice)} are at one path; give each a path of its own"
        )
    return found


def grace_seconds(parameters: int, nodes: int) -> int:
    """Seconds that a last step and a save are given: twice what the checkpoint takes at DISK_RATE, and a minute."""
    return max(LEAST_GRACE, round(60 + 2 * STATE_BYTES * parameters / (nodes * DISK_RATE)))


def check_resumes(config: RunConfig) -> list[str]:
    """The words with which the job goes on by itself when it is started again.

    Raises ConfigError where it would not: without saves, or where it would begin from another run each time.
    """
    load, own = config.checkpoint.load, config.run_folder
    if config.checkpoint.save_interval is None:
        raise ConfigError(
            "checkpoint.save_interval is not set, and a machine of a cluster may fail at any time; set the steps "
            "between checkpoints, such as 500"
        )
    if load is None:
        return ["--checkpoint.load", str(own)]
    if not is_inside(open_location(load), open_location(str(own))):
        raise ConfigError(
            f"checkpoint.load is {load}, and this run saves in {own}: started again after a failure, it would begin "
            f"from {load} anew; give it as model.init_from, or copy it to {own}"
        )
    return []


def check_within_nodes(config: RunConfig, gpus: int) -> list[str]:
    """Notes on axes that span nodes. Raises ConfigError where tensor parallelism does: it exchanges in every layer."""
    parallel = config.parallel
    tensor, expert = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if gpus % tensor:
        raise ConfigError(
            f"parallel.tensor_model_parallel_size {tensor} does not divide --gpus-per-node {gpus}, so its ranks would "
            "be on several nodes and every layer would wait for the network; choose a divisor, and "
            "pipeline_model_parallel_size between nodes"
        )
    experts = expert * (parallel.expert_tensor_parallel_size or tensor)
    if config.model.num_experts and gpus % experts:
        return [
            f"parallel.expert_model_parallel_size {expert} (× expert tensor parallel: {experts} ranks) spans nodes of "
            f"{gpus} GPUs: tokens go to their experts over the network"
        ]
    return []


def check_on_volumes(config: RunConfig, mounted: Sequence[tuple[str, str]], who: str = "pods") -> list[str]:
    """Notes on hub names. Raises ConfigError for a path that pods would not share, or containers not see: what is in
    none of their volumes."""
    data, notes = config.data, []
    paths = {"train.output_dir": config.train.output_dir, "data.tokenizer_model": data.tokenizer_model}
    paths |= {"model.init_from": config.model.init_from}
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        given = getattr(data, name)
        words = given if isinstance(given, list | tuple) else [given]
        paths |= {f"data.{name}": word for word in words if isinstance(word, str) and "/" in word}
    for setting, path in paths.items():
        if path is None or is_url(path) or (setting != "train.output_dir" and "/" not in path):
            continue
        if not any(PurePosixPath(normpath(path)).is_relative_to(mount) for _, mount in mounted):
            there = ", ".join(mount for _, mount in mounted) or "none"
            if setting in HUB_NAMES and is_hub_name(path) and not Path(path).exists():
                notes.append(
                    f"{setting} {path} is a name on the Hugging Face hub: each of the {who} fetches it, which takes a "
                    "network there, and HF_TOKEN in the environment if it is gated"
                )
                continue
            raise ConfigError(
                f"{setting} is {path}, which is on no volume of the {who} ({there}): it would be lost with them, or "
                f"not be there; name a path below one, --volume {'CLAIM' if who == 'pods' else 'FOLDER'}:/PATH"
            )
    return notes


def path_in_container(run_file: str, mounted: Sequence[tuple[str, str]]) -> str:
    """The run file as containers see it, of which `mounted` has (folder, where). Raises ConfigError where none does."""
    here = Path(run_file).resolve()
    for folder, path in mounted:
        if here.is_relative_to(Path(folder).resolve()):
            return str(PurePosixPath(path) / here.relative_to(Path(folder).resolve()))
    raise ConfigError(
        f"the run file {run_file} is in no folder of --volume, so the containers of --image would not have it; add "
        f"--volume {here.parent}:/PATH"
    )
