"""Generates Slurm batch files with one task per node, which starts the node's processes.

Jobs are requeued at the time limit.

Slurm sends SIGUSR1 some time before the limit. The run saves and exits with code 23, and the script requeues the job.
After a node failure Slurm restarts the job (`--requeue`), and the run resumes. The scripts are in templates/.
"""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from megalith.errors import ConfigError
from megalith.launch.cluster.cluster_job import ClusterJob
from megalith.launch.cluster.templates import render

DIRECTIVE = re.compile(r"[\w.:/@%+=,\[\]-]+")
TIME_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")  # D-H:M:S, D-H:M, D-H, H:M:S, M:S or M
MAX_GRACE = 65535  # seconds: limit of sbatch --signal


def slurm_files(job: ClusterJob, array: tuple[str, Sequence[str]] | None = None) -> dict[str, str]:
    """Build the batch files of a job.

    Args:
        job: the job.
        array: a setting and its values. Each array task is a separate run in a folder of its own.

    Returns:
        Text by file name, in the order in which to submit the files. Each job must run after the previous one.

    Raises:
        ConfigError: a name is not possible in a #SBATCH line, or the time limit leaves no time to train.
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
    if job.grace > MAX_GRACE:
        raise ConfigError(
            f"the grace period is {job.grace:,} s, but Slurm signals a job at most {MAX_GRACE:,} "
            f"s before its end; set --grace to {MAX_GRACE}, or use more --nodes, which save faster"
        )
    if job.time is not None and _seconds(job.time) <= job.grace:
        raise ConfigError(
            f"--time is {job.time}, and Slurm signals the job to save {job.grace} s before that, so the job would be "
            "requeued as soon as it starts and would never train; use a longer --time, or a shorter --grace"
        )


def _seconds(limit: str) -> float:
    """Return the seconds of a time limit in Slurm's notation."""
    if limit.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if (match := TIME_LIMIT.fullmatch(limit)) is None:
        raise ConfigError(f"--time is {limit!r}; write minutes, HH:MM:SS or D-HH:MM:SS, such as 24:00:00")
    days, *rest = match.groups()
    first, second, third = (int(each or 0) for each in rest)
    if days is None and rest[-1] is None:
        seconds = 60 * first + second
    else:
        seconds = 86400 * int(days or 0) + 3600 * first + 60 * second + third
    return seconds or math.inf  # 0 is no limit


def _training(job: ClusterJob, array: tuple[str, Sequence[str]] | None) -> str:
    directives = {
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
    words = [shlex.quote(word) for word in job.command()]
    if array:
        setting, values = array
        words += [
            f"--{setting}",
            '"$value"',
            "--train.output_dir",
            '"$output"',
            "--checkpoint.load",
            '"$output"',
        ]
    return render(
        "train.sbatch.j2",
        job=job,
        directives=_directives(directives, ["exclusive", "requeue"]),
        exports=_exports(job),
        array_values=" ".join(map(shlex.quote, values)) if array else "",
        container=_container(job),
        command=" ".join(words),
    )


def _step(job: ClusterJob, name: str, words: Sequence[str]) -> str:
    directives = {
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
    return render(
        "step.sbatch.j2",
        directives=_directives(directives, []),
        exports=_exports(job),
        container=_container(job),
        command=shlex.join(("megalith", *words)),
    )


def _directives(options: Mapping[str, object], flags: Sequence[str]) -> str:
    for name, value in options.items():
        if value is not None and not DIRECTIVE.fullmatch(str(value)):
            raise ConfigError(
                f"{str(value)!r} cannot be used in the line `#SBATCH --{name}=`, which may "
                "contain only letters, digits and ._:/@%+=,[]-; choose another name"
            )
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    return "\n".join([*lines, *(f"#SBATCH --{flag}" for flag in flags)])


def _exports(job: ClusterJob) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.environment.items())


def _container(job: ClusterJob) -> str:
    """Return srun's options for pyxis, Slurm's container plugin."""
    if job.image is None:
        return ""
    mounts = ",".join(f"{source}:{path}" for source, path in job.volumes)
    options = [f"--container-image={job.image}", *([f"--container-mounts={mounts}"] if mounts else [])]
    return " ".join([*map(shlex.quote, options), ""])


def submit(files: Mapping[str, str]) -> list[str]:
    """Submit the files with sbatch, each to start after the previous one has succeeded. Returns the job ids."""
    ids: list[str] = []
    for name, text in files.items():
        after = [f"--dependency=afterok:{ids[-1]}", "--kill-on-invalid-dep=yes"] if ids else []
        ids.append(run_tool(["sbatch", "--parsable", *after], text, name).partition(";")[0])
    return ids


def run_tool(command: Sequence[str], text: str, name: str) -> str:
    """Run a scheduler command with `text` as its input. Returns its output. Raises ConfigError if it fails."""
    try:
        done = subprocess.run(command, input=text, text=True, capture_output=True, check=True)
    except OSError as error:
        raise ConfigError(
            f"{command[0]} cannot be run ({error.strerror}): submit on a machine of the cluster, or omit --submit and "
            "copy the files there"
        ) from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"{' '.join(command)} rejected {name}: {error.stderr.strip()}") from None
    return done.stdout.strip()
