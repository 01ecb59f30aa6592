"""Runs of `megalith train` as processes of their own, which tests stop, kill and start again.

`Ranks` forks each rank from a process that has torch loaded, so that a start costs a fraction of a second; apart from
that it is what a launcher starts: the command line, the environment, one process a rank.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from forked import PATIENCE, Forked, free_port, is_running, open_forkserver

SMALL = {
    "model.preset": "tiny-gpt",
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_attention_heads": 2,
    "model.vocab_size": 64,
    "data.mock": True,
    "data.seq_length": 16,
    "data.num_workers": 0,
    "optim.lr": 0.01,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 4,
    "train.eval_iters": 0,
    "train.deterministic": True,
    "log.layout_report": False,
    "runtime.device": "cpu",
}


def words(output: Path, **settings: object) -> list[str]:
    """The command line of a small run; `train__train_iters=5` sets train.train_iters."""
    given = {key.replace("__", "."): value for key, value in settings.items()}
    tree = {**SMALL, "train.output_dir": str(output), "checkpoint.load": str(output), **given}
    return ["train", *(word for key, value in tree.items() for word in (f"--{key}", json.dumps(value)))]


class Ranks:
    """`size` ranks of one job, running."""

    def __init__(
        self,
        command: Sequence[str],
        size: int,
        log: Path,
        prepare: Callable[[int], None] | None = None,
        environment: Mapping[str, str] | None = None,
    ):
        """`prepare(rank)`, at the top of a module, is called in each process before the command. What the ranks print
        goes to `log`, each into a file with its number."""
        processes = open_forkserver()
        self.logs = [log.with_name(f"{log.name}.{rank}") for rank in range(size)]
        port = free_port()
        self.processes = [
            processes.Process(
                target=_rank,
                args=(list(command), rank, size, port, self.logs[rank], prepare, dict(environment or {})),
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def send(self, number: int, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.processes)) if ranks is None else ranks:
            os.kill(self.processes[rank].pid, number)

    def end(self, within: float = PATIENCE) -> list[int]:
        """The exit codes, negative where a signal ended a rank, when all have ended. None runs on afterwards."""
        until = time.monotonic() + within
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert None not in codes, f"exit codes {codes} after {within} s:\n{self.text()}"
        return codes

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def text(self, rank: int | None = None) -> str:
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(log.read_text() for log in logs if log.exists())


def _rank(
    command: list[str],
    rank: int,
    size: int,
    port: int,
    log: Path,
    prepare: Callable[[int], None] | None,
    environment: dict[str, str],
) -> None:
    from megalith.cli.main import main

    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # multiprocessing's server ignores it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and nohup this
    torch.set_num_threads(1)
    if size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(environment)
    if prepare is not None:
        prepare(rank)
    code = main(command)
    sys.stdout.flush()
    os._exit(code)  # a rank that failed does not wait for collectives that the others will never join


def until(is_so: Callable[[], object], what: str, within: float = PATIENCE) -> None:
    """Returns when `is_so()`; fails after `within` seconds."""
    end = time.monotonic() + within
    while not is_so():
        assert time.monotonic() < end, f"{what} did not come within {within} s"
        time.sleep(0.02)


def records(path: Path) -> list[dict]:
    """The whole lines of a JSONL file that may still be written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps(output: Path) -> list[int]:
    return [record["step"] for record in records(output / "metrics.jsonl")]


def events(output: Path, kind: str) -> list[dict]:
    return [record for record in records(output / "events.jsonl") if record["event"] == kind]


def saved(output: Path) -> list[str]:
    return sorted(folder.name for folder in (output / "checkpoints").glob("step_????????"))


def stored(output: Path, step: int) -> dict[str, bytes]:
    """Weights and optimizer state as they are on disk."""
    folder = output / "checkpoints" / f"step_{step:08d}"
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


# A launcher takes another for lost after 3 heartbeats that are due and do not come: 5 s apart unless it is told.
LAUNCHER = """
import sys
from functools import partial
from megalith.cli.main import main
from megalith.launch import rendezvous
rendezvous.RendezvousParameters = partial(rendezvous.RendezvousParameters, keep_alive_interval=2)
rendezvous.LAST_CALL = 1
sys.exit(main(sys.argv[1:]))
"""


def launch(command: Sequence[str], *options: str, log: Path) -> Forked:
    """`megalith train …` with a launcher's options, as a process; what it prints goes to `log`."""
    return Forked(["-c", LAUNCHER, *command, *options], log, env={**os.environ, "OMP_NUM_THREADS": "1"})


def workers_of(launcher: Forked) -> list[int]:
    """The process ids of the ranks that a launcher has started and that still run, by rank: in the order of their
    starts, which need not be that of their numbers."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    return [int(pid) for pid in children if is_running(int(pid))]
