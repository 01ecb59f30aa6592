"""A job on two hosts, each a network namespace with its own address: what a user sees when something goes wrong."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from forked import Forked
from in_process_job import LINK_SWITCH, MARKS, PLAN
from in_process_trials import JOB, Failure, left_by
from ranks import records, saved, steps, stored, until, words, workers_of
from test_phases import STEPS, grpo, training

pytestmark = pytest.mark.full
HOSTS = {f"megalith{os.getpid()}{letter}": f"10.77.0.{number}" for number, letter in ((1, "a"), (2, "b"))}
(FIRST, ADDRESS), (SECOND, _) = HOSTS.items()
LINK = "link0"
CLONE_NEWNET = 0x40000000
ENTER = f"""import ctypes, os, sys
host = os.open("/run/netns/" + sys.argv[1], os.O_RDONLY)
assert ctypes.CDLL(None).setns(host, {CLONE_NEWNET}) == 0
"""
COMMAND = ENTER + "from megalith.cli.main import main\nsys.exit(main(sys.argv[2:]))"
WITH_POINTS = f"""{ENTER}
import runpy
sys.argv = [{str(JOB)!r}, *sys.argv[2:]]
sys.path.insert(0, {str(JOB.parent)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
JOIN = """from datetime import timedelta
from megalith.launch.tcp_store import connect_store
connect_store(sys.argv[2], int(sys.argv[3]), timedelta(seconds=9), connect_timeout=1.0)
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def set_link(state: str) -> None:
    ip("-n", SECOND, "link", "set", LINK, state)


@pytest.fixture(scope="module", autouse=True)
def hosts() -> Iterator[None]:
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        ip("link", "add", LINK, "netns", FIRST, "type", "veth", "peer", "name", LINK, "netns", SECOND)
        for host, address in HOSTS.items():
            ip("-n", host, "addr", "add", f"{address}/24", "dev", LINK)
            for interface in ("lo", LINK):
                ip("-n", host, "link", "set", interface, "up")
        yield
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces are not permitted here: {getattr(error, 'stderr', None) or error}")
    finally:
        for host in HOSTS:
            with suppress(OSError):
                subprocess.run(["ip", "netns", "delete", host], capture_output=True)


class Job:
    """The launchers of both hosts, of one rank each; the second one `late`."""

    def __init__(
        self,
        folder: Path,
        port: int,
        late: bool = False,
        failures: Sequence[Failure] | None = None,
        command: Sequence[str] | None = None,
        nnodes: Sequence[str] = ("2",),
        **settings: object,
    ):
        """Start the launchers.

        `nnodes` is the option's value, and further options of the launchers. With `failures`, the ranks have the points
        of in_process_job.py. `command` replaces the training.
        """
        self.output = folder / "run"
        self.logs = folder / "first", folder / "second"
        limits = {"checkpoint__save_interval": 2, "runtime__distributed_timeout_minutes": 0.1}
        command = words(self.output, **limits, **settings) if command is None else command
        script, environment = COMMAND, dict(os.environ)
        if failures is not None:
            (folder / "marks").mkdir(exist_ok=True)
            script = WITH_POINTS
            environment |= {PLAN: json.dumps(failures), MARKS: str(folder / "marks")}
            environment |= {LINK_SWITCH: f"ip -n {SECOND} link set {LINK}", "OMP_NUM_THREADS": "1"}
        options = ("--nproc", "1", "--nnodes", *nnodes, "--rdzv-endpoint", f"{ADDRESS}:{port}")
        self.launchers = []
        for host, log in zip(HOSTS, self.logs):
            self.launchers.append(Forked(["-c", script, host, *command, *options], log, env=environment))
            if late and host == FIRST:
                until(
                    lambda: f"waiting at {ADDRESS}:{port} for the launchers of 2" in self.told(), "the first"
                )

    def told(self) -> str:
        return self.logs[0].read_text()

    def ends(self) -> list[int]:
        return [launcher.wait() for launcher in self.launchers]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


def limit(*queue: str) -> bool:
    """Gives the link a queue; whether this kernel has it."""
    command = ["ip", "netns", "exec", SECOND, "tc", "qdisc", "replace", "dev", LINK, "root", *queue]
    return not subprocess.run(command, capture_output=True).returncode


def test_a_node_that_comes_late_over_a_slow_link_is_waited_for(tmp_path):
    slow = limit("netem", "delay", "20ms", "rate", "10mbit") or limit(
        "tbf", "rate", "10mbit", "burst", "32kbit", "latency", "400ms"
    )
    assert slow, "this kernel has neither netem nor tbf"
    with Job(tmp_path, 29401, late=True, train__train_iters=4) as job:
        assert job.ends() == [0, 0], job.told()
    assert "2 ranks = " in job.told() and steps(job.output) == [1, 2, 3, 4]
    subprocess.run(["ip", "netns", "exec", SECOND, "tc", "qdisc", "del", "dev", LINK, "root"], check=True)


def test_a_link_that_is_cut_for_a_second_and_mended_costs_that_time_alone(tmp_path):
    with Job(tmp_path, 29402, train__train_iters=100) as job:
        until(lambda: saved(job.output), "a checkpoint")
        set_link("down")
        before = len(steps(job.output))
        with pytest.raises(AssertionError):  # at most the step that was under way ends
            until(lambda: len(steps(job.output)) > before + 1, "more steps", within=1.0)
        set_link("up")
        assert job.ends() == [0, 0], job.told()
    assert steps(job.output) == list(range(1, 101)) and "error" not in job.told()


def test_a_host_that_is_lost_is_named_and_the_job_resumes_without_loss(tmp_path):
    with Job(tmp_path, 29403, train__train_iters=10_000) as job:
        until(lambda: saved(job.output), "a checkpoint")
        ranks = workers_of(job.launchers[1])
        set_link("down")  # nothing says goodbye
        job.launchers[1].kill()
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        assert job.launchers[0].wait(60) == 6, job.told()
        set_link("up")
    told = " ".join(job.told().split())
    assert (
        "no progress within 6 s" in told
        and "rank 1 does not answer (stopped, or its machine is lost)" in told
    )
    assert "start the job again, it resumes from the newest checkpoint" in told


def test_a_host_behind_a_cut_link_is_left_behind_and_the_other_goes_on_in_its_process(tmp_path):
    """As in the smaller layout from the same snapshot, which is stored too."""
    sizes = {"train__train_iters": STEPS, "checkpoint__memory_interval": 2, "model__hidden_dropout": 0.1}
    cut = [(1, "step", 6, "cut")]
    elastic = ("1:2", "--max-restarts", "1")
    try:
        with Job(tmp_path, 29409, failures=cut, nnodes=elastic, **sizes) as job:
            assert job.launchers[0].wait() == 0, job.told()
            assert job.launchers[1].wait() != 0
    finally:
        set_link("up")
    assert "continuing with 1 rank on 1 machine" in job.told() and "restarting (" not in job.told()
    (start,) = map(int, re.findall(r"continuing from memory: step (\d+)", job.told()))
    assert start in (2, 4) and steps(job.output) == list(range(1, STEPS + 1))
    shutil.copytree(
        job.output / "checkpoints" / f"step_{start:08d}", tmp_path / "start" / f"step_{start:08d}"
    )
    command = words(tmp_path / "alone", **sizes, checkpoint__load=str(tmp_path / "start"))
    log = tmp_path / "log"
    assert Forked(["-m", "megalith", *command], log, env={**os.environ, "OMP_NUM_THREADS": "1"}).wait() == 0
    both = [
        {each["step"]: each["loss"] for each in records(o / "metrics.jsonl")}
        for o in (job.output, tmp_path / "alone")
    ]
    assert both[1] == {step: loss for step, loss in both[0].items() if step > start}
    assert stored(job.output, STEPS) == stored(tmp_path / "alone", STEPS)


PHASES = {
    "save": (training, "save", 1),
    "sync": (grpo, "weight sync", 2),
    "rendezvous": (training, "connecting", 1),
}


def phase_command(folder: Path, phase: str) -> list[str]:
    return [*PHASES[phase][0](folder / "run"), "--runtime.distributed_timeout_minutes", "0.3"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function from a phase to the state that its job leaves if the link stays up."""
    results = {}

    def left(phase: str) -> tuple:
        command, *_ = PHASES[phase]
        if command not in results:
            folder = tmp_path_factory.mktemp("undisturbed")
            with Job(folder, 29405, command=phase_command(folder, phase), failures=[]) as job:
                assert job.ends() == [0, 0], job.told()
            results[command] = left_by(job.output, STEPS)[:2]
        return results[command]

    return left


@pytest.mark.parametrize("phase", PHASES)
def test_a_link_that_is_cut_for_two_seconds_in_each_phase_changes_nothing(tmp_path, phase, undisturbed):
    failures = [(1, *PHASES[phase][1:], "cut 2")]
    with Job(tmp_path, 29406, command=phase_command(tmp_path, phase), failures=failures) as job:
        assert job.ends() == [0, 0], job.told()
    assert len(list((tmp_path / "marks").iterdir())) == 1
    assert left_by(job.output, STEPS)[:2] == undisturbed(phase)


@pytest.mark.parametrize("phase", PHASES)
def test_a_link_that_is_cut_for_good_in_each_phase_ends_both_hosts_and_loses_nothing(
    tmp_path, phase, undisturbed
):
    failures = [(1, *PHASES[phase][1:], "cut")]
    try:
        with Job(tmp_path, 29407, command=phase_command(tmp_path, phase), failures=failures) as job:
            codes = [launcher.wait(300) for launcher in job.launchers]
            assert set(codes) <= {1, 6}, (codes, *(log.read_text() for log in job.logs))
            assert all("error" in log.read_text() for log in job.logs)
    finally:
        set_link("up")
    with Job(tmp_path, 29408, command=phase_command(tmp_path, phase), failures=[]) as job:
        assert job.ends() == [0, 0], job.told()
    assert left_by(job.output, STEPS)[:2] == undisturbed(phase)


def in_second_host(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, SECOND, *arguments], capture_output=True, text=True, timeout=60
    )


def test_a_port_at_which_nothing_listens_is_named_by_the_rendezvous_and_by_the_doctor():
    joining = in_second_host(ENTER + JOIN, ADDRESS, "29404")
    assert f"nothing listens on {ADDRESS}:29404 (Connection refused)" in joining.stderr
    doctor = in_second_host(COMMAND, "doctor", "--quick", "--reach", f"{ADDRESS}:29404")
    assert doctor.returncode == 1
    assert f"bad   reach {ADDRESS}:29404" in doctor.stdout and "open the port" in doctor.stdout
