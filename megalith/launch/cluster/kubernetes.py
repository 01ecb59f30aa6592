"""Kubernetes' manifests: a TrainJob (Kubeflow Trainer 2), a PyTorchJob (its training operator 1) or a plain JobSet.

A pod is a node with all its GPUs, so ranks of tensor parallelism are within a pod, as ranks are numbered pod by pod.
The run file travels in a ConfigMap. Restarted pods go on from the newest checkpoint; a run that was refused with a
reason (exit codes 2 to 4) is not started again. A TrainJob brings its own runtime, for the pods need what the cluster's
`torch-distributed` does not have: shared memory, volumes and time to save.
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

Manifest = dict[str, Any]
RUN_FILE = "/etc/megalith/run.yaml"
USER = 1000  # deploy/Dockerfile's
CLAIM = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
# Paths of a pod that no volume can have: of the system, and below them too.
SYSTEM = ("/", "/bin", "/etc", "/etc/megalith", "/lib", "/lib64", "/sbin", "/usr")
BELOW_TOO = ("/dev", "/proc", "/sys")
TAKES = {
    "namespace": (r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", "at most 63 of a-z, 0-9 and -"),
    "queue": (r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?", "the name of a LocalQueue: at most 63 of a-z, 0-9, - and ."),
    "topology": (
        r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-\w.]{0,61}[A-Za-z0-9])?",
        "a label of nodes, as topology.kubernetes.io/zone",
    ),
    "image": (r"[!-~]+", "the container image, as registry/name:tag"),
    "memory": (r"\d+(\.\d+)?([KMGTPE]i|[kMGTPE])?", "bytes, as 900Gi"),
}  # fmt: skip
"""Option → what Kubernetes takes, and how it is said."""
HUGE_PAGES = "5120Mi"  # that libfabric's EFA provider takes
CONTAINERS = {"trainjob": "node", "pytorchjob": "pytorch", "jobset": "node"}
"""Kind → what its operator wants the container to be called."""


def _is_taken(path: PurePosixPath) -> bool:
    return str(path) in SYSTEM or any(path.is_relative_to(system) for system in BELOW_TOO)


def kubernetes_files(job: ClusterJob, kind: str, run_text: str) -> dict[str, list[Manifest]]:
    """File name → its documents, in the order in which they are to be applied, each after the one before is complete.

    `run_text` is the run file. Raises ConfigError without an image, or for a name that Kubernetes does not take.
    """
    if job.image is None:
        raise ConfigError(
            "--image is not given; name the container image, such as one made of deploy/Dockerfile"
        )
    for option, (form, said) in TAKES.items():
        value = getattr(job, option)
        if value is not None and not re.fullmatch(form, value, re.ASCII):
            raise ConfigError(f"--{option} is {value!r}, which Kubernetes refuses; give {said}")
    for claim, path in job.volumes:
        if _is_taken(PurePosixPath(path)):
            raise ConfigError(
                f"--volume {claim}:{path} would hide what a pod has at {path}; choose another path, such as /data"
            )
        if not CLAIM.fullmatch(claim):
            raise ConfigError(
                f"--volume names the claim {claim!r}; Kubernetes' names have a-z, 0-9, - and . alone"
            )
    files = {}
    for number, words in enumerate(job.before, 1):
        files[f"{job.name}-before-{number}.yaml"] = [_step(job, f"{job.name}-before-{number}", words)]
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(job, f"{job.name}-run"),
        "data": {"run.yaml": run_text},
    }
    files[f"{job.name}.yaml"] = [config_map, *KINDS[kind](job)]
    for number, words in enumerate(job.after, 1):
        files[f"{job.name}-after-{number}.yaml"] = [_step(job, f"{job.name}-after-{number}", words)]
    return files


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as such."""

    def ignore_aliases(self, data: object) -> bool:
        return True


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def text_of(documents: Sequence[Manifest]) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def _train_job(job: ClusterJob) -> list[Manifest]:
    pods = _pod(job, CONTAINERS["trainjob"], job.gpus)
    node = {"name": "node", "template": {"metadata": _ancestor(), "spec": _job_spec(job, None, pods)}}
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(job, job.name, {"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": {"replicatedJobs": [node], "failurePolicy": _failure_policy(job)}},
        },
    }
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": job.name}
    trainer = {
        "image": job.image,
        "command": job.command(RUN_FILE),
        "env": _environment(job),
        "numNodes": job.nodes,
        "numProcPerNode": job.gpus,
        "resourcesPerNode": _resources(job, job.gpus),
    }
    train_job = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(job, job.name, _queue(job)),
        "spec": {"runtimeRef": reference, "trainer": trainer},
    }
    return [runtime, train_job]


def _ancestor() -> Manifest:
    return {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}}


def _pytorch_job(job: ClusterJob) -> list[Manifest]:
    pods = _pod(job, CONTAINERS["pytorchjob"], job.gpus, job.command(RUN_FILE))
    pods["spec"].pop("restartPolicy")  # it is the replicas'
    pods["spec"]["containers"][0]["ports"] = [{"containerPort": PORT, "name": "pytorchjob-port"}]
    counts = {"Master": 1, "Worker": job.nodes - 1}
    replicas = {
        kind: {"replicas": count, "restartPolicy": "OnFailure", "template": pods}
        for kind, count in counts.items()
        if count
    }
    spec = {
        "nprocPerNode": str(job.gpus),
        "runPolicy": {"backoffLimit": job.restarts, "cleanPodPolicy": "None"},
        "pytorchReplicaSpecs": replicas,
    }
    metadata = _metadata(job, job.name, _queue(job))
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}]


def _job_set(job: ClusterJob) -> list[Manifest]:
    head = f"{job.name}-node-0-0.{job.name}:{PORT}"
    command = [*job.command(RUN_FILE), "--nnodes", str(job.nodes), "--rdzv-endpoint", head]
    pods = _pod(job, CONTAINERS["jobset"], job.gpus, command)
    node = {"name": "node", "replicas": 1, "template": {"spec": _job_spec(job, job.nodes, pods)}}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": _failure_policy(job),
        "replicatedJobs": [node],
    }
    metadata = _metadata(job, job.name, _queue(job))
    return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}]


KINDS = {"trainjob": _train_job, "pytorchjob": _pytorch_job, "jobset": _job_set}


def _step(job: ClusterJob, name: str, words: Sequence[str]) -> Manifest:
    pods = _pod(job, "step", 0, ["megalith", *words], with_run=False)
    spec = {"backoffLimit": job.restarts, "template": pods}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _metadata(job, name), "spec": spec}


def _job_spec(job: ClusterJob, count: int | None, pods: Manifest) -> Manifest:
    refused = {
        "action": "FailJob",
        "onExitCodes": {"containerName": "node", "operator": "In", "values": sorted(REFUSALS)},
    }
    sizes = {"parallelism": count, "completions": count} if count else {}
    indexed = {"completionMode": "Indexed", "backoffLimit": 0, "podFailurePolicy": {"rules": [refused]}}
    return {**sizes, **indexed, "template": pods}


def _failure_policy(job: ClusterJob) -> Manifest:
    refused = {"action": "FailJobSet", "name": "refused", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": job.restarts, "rules": [refused]}


def _metadata(job: ClusterJob, name: str, labels: Mapping[str, str] | None = None) -> Manifest:
    own = {"name": name, **({"namespace": job.namespace} if job.namespace else {})}
    return own | ({"labels": dict(labels)} if labels else {})


def _queue(job: ClusterJob) -> dict[str, str]:
    return {"kueue.x-k8s.io/queue-name": job.queue} if job.queue else {}


def _environment(job: ClusterJob) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in job.environment.items()]


def _resources(job: ClusterJob, gpus: int) -> Manifest:
    limits: dict[str, str] = {"nvidia.com/gpu": str(gpus)} if gpus else {}
    if job.efa and gpus:
        limits |= {"vpc.amazonaws.com/efa": str(job.efa), "hugepages-2Mi": HUGE_PAGES}
    asked = {
        "cpu": job.cpus and str(job.cpus),
        "memory": job.memory or ("16Gi" if job.efa and gpus else None),
    }
    requests = {name: value for name, value in asked.items() if value}
    return {key: value for key, value in {"limits": limits, "requests": requests}.items() if value}


def _pod(
    job: ClusterJob, container: str, gpus: int, command: Sequence[str] = (), with_run: bool = True
) -> Manifest:
    shared = {"name": "shm", "emptyDir": {"medium": "Memory"}}
    disks = [
        {"name": f"disk-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(job.volumes)
    ]
    run = [{"name": "run", "configMap": {"name": f"{job.name}-run"}}] if with_run else []
    mounts = [
        {"name": "shm", "mountPath": "/dev/shm"},
        *({"name": f"disk-{number}", "mountPath": path} for number, (_, path) in enumerate(job.volumes)),
        *({"name": "run", "mountPath": RUN_FILE.rpartition("/")[0], "readOnly": True} for _ in run),
    ]
    main = {
        "name": container,
        "image": job.image,
        **({"command": list(command)} if command else {}),
        "env": _environment(job),
        "resources": _resources(job, gpus),
        "volumeMounts": mounts,
        **({"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}} if job.efa and gpus else {}),
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace,
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER,
                            "fsGroupChangePolicy": "OnRootMismatch"},
        "containers": [main],
        "volumes": [shared, *disks, *run],
        **_nearness(job, gpus),
    }  # fmt: skip
    annotations = (
        {"kueue.x-k8s.io/podset-required-topology": job.topology} if job.topology and job.queue else {}
    )
    labels = {"app.kubernetes.io/name": job.name}
    return {"metadata": {"labels": labels, **({"annotations": annotations} if annotations and gpus else {})},
            "spec": spec}  # fmt: skip


def _nearness(job: ClusterJob, gpus: int) -> Manifest:
    """Without Kueue, which has its own word for it: pods of the job near each other."""
    if not job.topology or job.queue or not gpus:
        return {}
    term = {
        "topologyKey": job.topology,
        "labelSelector": {"matchLabels": {"app.kubernetes.io/name": job.name}},
    }
    preferred = [{"weight": 100, "podAffinityTerm": term}]
    return {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}}


WAITS = {"Job": "complete", "TrainJob": "Complete", "PyTorchJob": "Succeeded", "JobSet": "Completed"}
"""Kind → the condition of one that has ended well."""
FAILED = "Failed"  # of any kind


def submit_manifests(job: ClusterJob, files: Mapping[str, Sequence[Manifest]]) -> list[str]:
    """Applies the files, each when the job of the one before is complete; returns what kubectl says of each. Raises
    ConfigError where kubectl refuses one, or where a job fails that others are to follow."""
    namespace = ["--namespace", job.namespace] if job.namespace else []
    said, last = [], None
    for name, documents in files.items():
        if last is not None:
            _await_end(namespace, last, name)
        said.append(run_tool(["kubectl", "apply", *namespace, "--filename", "-"], text_of(documents), name))
        last = documents[-1]
    return said


def _await_end(namespace: list[str], job: Manifest, following: str) -> None:
    """Until it is complete or has failed: kubectl waits for one condition, so two of it wait."""
    what = f"{job['kind'].lower()}/{job['metadata']['name']}"
    with ThreadPoolExecutor(2) as pool:
        waits = [_wait(namespace, what, condition) for condition in (WAITS[job["kind"]], FAILED)]
        ends = {pool.submit(wait.communicate): wait for wait in waits}
        first = next(as_completed(ends))
        for wait in waits:
            wait.terminate()  # nothing to one that has ended
    ended = ends[first]
    if ended.returncode:
        raise ConfigError(f"{' '.join(ended.args)} has ended by itself: {first.result()[1].strip()}")
    if ended is waits[1]:
        raise ConfigError(
            f"{what} has failed, so {following} was not submitted; `kubectl describe {what}` says why. Take "
            "what is left from the files that --write gives"
        )


def _wait(namespace: list[str], what: str, condition: str) -> subprocess.Popen[str]:
    words = ["kubectl", "wait", *namespace, f"--for=condition={condition}", "--timeout=-1s", what]
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen(words, text=True, **pipes)
