"""Generates Kubernetes manifests: a TrainJob (Kubeflow Trainer 2), a PyTorchJob (training operator 1) or a plain
JobSet.

A pod has all GPUs of a node. Ranks are numbered pod by pod, so tensor parallelism stays within a pod. The run file is
in a ConfigMap. Restarted pods resume from the newest checkpoint; a run that exits with a configuration, data or
checkpoint error (codes 2 to 4) is not restarted. A TrainJob has its own runtime, because the cluster's
`torch-distributed` lacks shared memory, volumes and time to save. The manifests are in templates/.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import PurePosixPath
from typing import Any

import yaml

from megalith.errors import REFUSALS, ConfigError
from megalith.launch.cluster.cluster_job import PORT, ClusterJob
from megalith.launch.cluster.slurm import run_tool
from megalith.launch.cluster.templates import render

Manifest = dict[str, Any]
RUN_FILE = "/etc/megalith/run.yaml"
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# Paths that a volume must not hide; for the latter, the folders below them too.
SYSTEM = ("/", "/bin", "/etc", "/etc/megalith", "/lib", "/lib64", "/sbin", "/usr")
BELOW_TOO = ("/dev", "/proc", "/sys")
PATTERNS = {
    "namespace": (r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "at most 63 characters of a-z, 0-9 and -"),
    "queue": (r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", "the name of a LocalQueue: at most 63 "
"characters of a-z, 0-9, - and ."),
    "topology": (
        r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
        "a node label, such as topology.kubernetes.io/zone",
    ),
    "image": (r"[!-~]+", "the container image, such as registry/name:tag"),
    "memory": (r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?", "bytes, as 900Gi"),
}  # fmt: skip
"""Pattern of an option's valid values, and its description for errors."""
KINDS = ("trainjob", "pytorchjob", "jobset")


def _is_system_path(path: PurePosixPath) -> bool:
    return str(path) in SYSTEM or any(path.is_relative_to(system) for system in BELOW_TOO)


def kubernetes_files(job: ClusterJob, kind: str, run_text: str) -> dict[str, list[Manifest]]:
    """Build the manifests of a job.

    Args:
        job: the job.
        kind: one of KINDS.
        run_text: content of the run file.

    Returns:
        The documents of each file, by file name, in the order in which to apply the files. A file must be applied
        after the job of the previous one is complete.

    Raises:
        ConfigError: the job has no image, or a name that Kubernetes rejects.
    """
    _check_names(job)
    values = {"job": job, "command": job.command(RUN_FILE), "port": PORT, "refusals": sorted(REFUSALS)}
    files = _step_files(job, "before", job.before)
    config_map = _manifests("config_map.yaml.j2", job=job, run_text=run_text)
    files[f"{job.name}.yaml"] = [*config_map, *_manifests(f"{kind}.yaml.j2", **values)]
    return files | _step_files(job, "after", job.after)


def _step_files(job: ClusterJob, when: str, steps: Sequence[Sequence[str]]) -> dict[str, list[Manifest]]:
    names = [f"{job.name}-{when}-{number}" for number in range(1, len(steps) + 1)]
    return {
        f"{name}.yaml": _manifests("job.yaml.j2", job=job, name=name, command=["megalith", *words])
        for name, words in zip(names, steps)
    }


def _manifests(template: str, **values: Any) -> list[Manifest]:
    return list(yaml.safe_load_all(render(template, **values)))


def _check_names(job: ClusterJob) -> None:
    if job.image is None:
        raise ConfigError(
            "--image is missing; set it to a container image, such as one built from deploy/Dockerfile"
        )
    for option, (pattern, description) in PATTERNS.items():
        value = getattr(job, option)
        if value is not None and not re.fullmatch(pattern, value, re.ASCII):
            raise ConfigError(f"--{option} is {value!r}, which Kubernetes rejects; use {description}")
    for claim, path in job.volumes:
        if _is_system_path(PurePosixPath(path)):
            raise ConfigError(
                f"--volume {claim}:{path} would hide the container's own files in {path}; choose another path, such "
                "as /data"
            )
        if not CLAIM.fullmatch(claim):
            raise ConfigError(
                f"--volume names the claim {claim!r}; names in Kubernetes consist of a-z, 0-9, - and ."
            )


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes multi-line strings in literal style, and no aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def text_of(documents: Sequence[Manifest]) -> str:
    """Return the YAML text of several documents."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


WAITS = {"Job": "complete", "TrainJob": "Complete", "PyTorchJob": "Succeeded", "JobSet": "Completed"}
"""Condition that a completed job reports, by kind of job."""
FAILED = "Failed"  # condition of a failed job of any kind


def submit_manifests(job: ClusterJob, files: Mapping[str, Sequence[Manifest]]) -> list[str]:
    """Apply the files with kubectl, each after the job of the previous one is complete.

    Returns:
        kubectl's output for each file.

    Raises:
        ConfigError: kubectl rejects a file, or a job fails that others depend on.
    """
    namespace = ["--namespace", job.namespace] if job.namespace else []
    outputs, last = [], None
    for name, documents in files.items():
        if last is not None:
            _await_end(namespace, last, name)
        outputs.append(
            run_tool(["kubectl", "apply", *namespace, "--filename", "-"], text_of(documents), name)
        )
        last = documents[-1]
    return outputs


def _await_end(namespace: list[str], job: Manifest, following: str) -> None:
    """Wait until a job has completed or failed.

    It runs two kubectl processes, because kubectl waits for one condition.
    """
    resource = f"{job['kind'].lower()}/{job['metadata']['name']}"
    with ThreadPoolExecutor(2) as pool:
        waits = [_wait(namespace, resource, condition) for condition in (WAITS[job["kind"]], FAILED)]
        ends = {pool.submit(wait.communicate): wait for wait in waits}
        first = next(as_completed(ends))
        for wait in waits:
            wait.terminate()
    ended = ends[first]
    if ended.returncode:
        raise ConfigError(f"{' '.join(ended.args)} failed: {first.result()[1].strip()}")
    if ended is waits[1]:
        raise ConfigError(
            f"{resource} has failed, so {following} was not submitted; `kubectl describe {resource}` shows why. Write "
            "the files with --write to submit the remaining ones"
        )


def _wait(namespace: list[str], resource: str, condition: str) -> subprocess.Popen[str]:
    words = ["kubectl", "wait", *namespace, f"--for=condition={condition}", "--timeout=-1s", resource]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(words, text=True, **pipes)
