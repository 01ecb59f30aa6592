"""Slurm's batch files: one task a node, which starts the node's processes; requeued where its time is up.

Slurm sends SIGUSR1 some time before the end; the run saves and exits with 23, and the file puts itself into the queue
again. A node that fails is Slurm's own matter: `--requeue` lets it start the job anew, and the job goes on.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from megalith.errors import ConfigError
from megalith.launch.cluster.cluster_job import ClusterJob

DIRECTIVE = re.compile(r"[\w.:/@%+=,\[\]-]+")
LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")  # of time: D-H:M:S, D-H:M, D-H, H:M:S, M:S, M
LONGEST_GRACE = 65535  # seconds that sbatch takes of --signal

SCRIPT = """\
#!/bin/bash
# {title}
{directives}

set -u
{exports}
{choice}head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
srun --kill-on-bad-exit=0 --wait=60 {container}{command} \\
    --nnodes "$SLURM_JOB_NUM_NODES" --rdzv-endpoint "$head:$port" --rdzv-id "$SLURM_JOB_ID"
code=$?
if [ "$code" -eq 23 ]; then  # saved, for the time is up
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

STEP = """\
#!/bin/bash
# {title}
{directives}

set -u
{exports}
srun {container}{command}
"""


def slurm_files(job: ClusterJob, array: tuple[str, Sequence[str]] | None = None) -> dict[str, str]:
    """File name → text, in the order in which they are to be submitted, each after the one before.

    `array`: a setting and its values; each task of the array is a run of its own, in a folder of its own.
    Raises ConfigError where a name cannot stand in a #SBATCH line, and for a limit that leaves no time to train.
    """
    _check_times(job)
    files = {}
    for number, words in enumerate(job.before, 1):
        files[f"{job.name}-before-{number}.sbatch"] = _step(job, f"{job.name}-before-{number}", words)
    files[f"{job.name}.sbatch"] = _training(job, array)
    for number, words in enumerate(job.after, 1):
        files[f"{job.name}-after-{number}.sbatch"] = _step(job, f"{job.name}-after-{number}", words)
    return files


def _check_times(job: ClusterJob) -> None:
    if job.grace > LONGEST_GRACE:
        raise ConfigError(
            f"the grace is {job.grace:,} s, and Slurm sends no signal earlier than {LONGEST_GRACE:,} s before the end; "
            f"give --grace {LONGEST_GRACE}, or more --nodes to save with"
        )
    if job.time is not None and _seconds(job.time) <= job.grace:
        raise ConfigError(
            f"--time is {job.time}, and {job.grace} s before its end Slurm has the job save: that is at its start, so "
            "it would be queued again and again and never train; give a longer --time, or a shorter --grace"
        )


def _seconds(limit: str) -> float:
    """Of a limit as Slurm writes it."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if (found := LIMIT.fullmatch(limit)) is None:
        raise ConfigError(f"--time is {limit!r}; give minutes, HH:MM:SS or D-HH:MM:SS, as 24:00:00")
    days, *rest = found.groups()
    first, second, third = (int(each or 0) for each in rest)
    if days is None and rest[-1] is None:
        seconds = 60 * first + second
    else:
        seconds = 86400 * int(days or 0) + 3600 * first + 60 * second + third
    return seconds or math.inf  # 0 is no limit


def _training(job: ClusterJob, array: tuple[str, Sequence[str]] | None) -> str:
    given = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus,
        "cpus-per-task": job.cpus,
        "mem": job.memory,
        "time": job.time,
        "partition": job.queue,
        "account": job.account,
        "switches": job.topology,
        "array": array and f"0-{len(array[1]) - 1}",
        "signal": f"USR1@{job.grace}",
        "output": "%x-%A_%a.out" if array else "%x-%j.out",
        "open-mode": "append",
    }
    words = [_quoted(word) for word in job.command()]
    choice = ""
    if array:
        setting, values = array
        choice = (
            f"values=({' '.join(map(_quoted, values))})\nvalue=${{values[$SLURM_ARRAY_TASK_ID]}}\n"
            f"output={_quoted(job.output)}/$SLURM_ARRAY_TASK_ID\n"
        )
        words += [
            f"--{setting}",
            '"$value"',
            "--train.output_dir",
            '"$output"',
            "--checkpoint.load",
            '"$output"',
        ]
    return SCRIPT.format(
        title=f"{job.nodes} nodes of {job.gpus} GPUs; made by `megalith launch slurm`",
        directives=_directives(given, ["exclusive", "requeue"]),
        exports=_exports(job),
        choice=choice,
        container=_container(job),
        command=" ".join(words),
    )


def _step(job: ClusterJob, name: str, words: Sequence[str]) -> str:
    given = {
        "job-name": name,
        "nodes": 1,
        "ntasks": 1,
        "cpus-per-task": job.cpus,
        "mem": job.memory,
        "time": job.time,
        "partition": job.queue,
        "account": job.account,
        "output": "%x-%j.out",
    }
    return STEP.format(
        title="made by `megalith launch slurm`",
        directives=_directives(given, []),
        exports=_exports(job),
        container=_container(job),
        command=" ".join(map(_quoted, ("megalith", *words))),
    )


def _directives(given: Mapping[str, object], flags: Sequence[str]) -> str:
    for name, value in given.items():
        if value is not None and not DIRECTIVE.fullmatch(str(value)):
            raise ConfigError(
                f"{str(value)!r} would stand in the line `#SBATCH --{name}=`, which takes letters, digits and "
                "._:/@%+=,[]- alone; choose another name"
            )
    lines = [f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None]
    return "\n".join([*lines, *(f"#SBATCH --{flag}" for flag in flags)])


def _exports(job: ClusterJob) -> str:
    return "\n".join(f"export {name}={_quoted(value)}" for name, value in job.environment.items())


def _container(job: ClusterJob) -> str:
    """Of pyxis, Slurm's plugin for containers."""
    if job.image is None:
        return ""
    mounts = ",".join(f"{source}:{path}" for source, path in job.volumes)
    options = [f"--container-image={job.image}", *([f"--container-mounts={mounts}"] if mounts else [])]
    return " ".join([*map(_quoted, options), ""])


def _quoted(word: str) -> str:
    return shlex.quote(word)


def submit(files: Mapping[str, str]) -> list[str]:
    """Hands the files to sbatch, each to begin when the one before has ended well; returns the jobs' ids."""
    ids: list[str] = []
    for name, text in files.items():
        after = [f"--dependency=afterok:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
        ids.append(run_tool(["sbatch", "--parsable", *after], text, name).partition(";")[0])
    return ids


def run_tool(command: Sequence[str], text: str, name: str) -> str:
    """What a cluster's own command prints when it gets `text`. Raises ConfigError where it is absent or refuses."""
    try:
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=True)
    except OSError as error:
        raise ConfigError(
            f"{command[0]} cannot be run ({error.strerror}): submit from a machine of the cluster, or leave out "
            "--submit and take the files there"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{' '.join(command)} has refused {name}: {error.stderr.strip()}") from None
    return done.stdout.strip()
