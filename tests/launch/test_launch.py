"""Starting processes, and a rank that fails: the job ends soon, with that rank's own words and exit code."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from sockets import LOOPBACK_INTERFACE

from megalith.errors import ConfigError
from megalith.launch import failure, launcher
from megalith.launch.failure import Failure
from megalith.launch.launcher import Process, init_distributed, launch, this_process
from megalith.launch.network import is_loopback

WORKER = Path(__file__).parent / "launched.py"
LAUNCHER = """import sys
from megalith.launch import agent
from megalith.launch.launcher import launch
agent.CRASH_REPORT_TIMEOUT = 60.0  # of a machine with much else to do
sys.exit(launch(2, sys.argv[1:]))
"""


def start(folder: Path, what: str, program=("-c", LAUNCHER)) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    return forked.run([*program, WORKER, folder, what], env=environment)


def seen(folder: Path, rank: int) -> dict:
    return json.loads((folder / f"rank{rank}.json").read_text())


def check_no_thread_is_left(folder: Path) -> None:
    """One of gloo's would abort the process now and then."""
    for rank in (0, 1):
        left = json.loads((folder / f"threads{rank}.json").read_text())
        assert not [name for name in left if "gloo" in name], left


def test_two_processes_find_each_other_and_the_first_prints(tmp_path):
    result = start(tmp_path, "nothing")
    assert (result.returncode, result.stdout) == (0, "the sum is 2.0\n"), result.stderr
    assert seen(tmp_path, 0)["world_size"] == seen(tmp_path, 1)["world_size"] == 2
    for rank in (0, 1):  # ports of the rank's groups, and of its launcher's store
        assert len(seen(tmp_path, rank)["listening"]) >= 2
        assert all(map(is_loopback, seen(tmp_path, rank)["listening"])), seen(tmp_path, rank)
        assert seen(tmp_path, rank)["interface"] == LOOPBACK_INTERFACE  # gloo's own choice is the host's name
    check_no_thread_is_left(tmp_path)
    assert seen(tmp_path, 1)["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


def test_groups_that_a_program_leaves_and_refers_to_end_with_it(tmp_path):
    result = start(tmp_path, "leave")
    assert result.returncode == 0, result.stderr
    check_no_thread_is_left(tmp_path)


def test_groups_are_left_when_an_error_or_a_fork_ends(monkeypatch):
    ended = []
    monkeypatch.setattr(launcher, "release_groups", lambda: ended.append(1))
    monkeypatch.setattr(launcher, "has_nccl_group", lambda: False)
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    launcher._end_groups(os.getpid())
    monkeypatch.delattr(sys, "last_value")
    launcher._end_groups(os.getppid())
    assert not ended
    launcher._end_groups(os.getpid())
    assert ended


BY_HAND = """import os, sys, time
import torch
import torch.distributed as dist
from megalith.launch.launcher import init_distributed
rank, what = init_distributed(torch.device("cpu")).rank, sys.argv[1]
group = dist.new_group([0, 1])
dist.barrier()
if what == "destroyed":
    dist.all_reduce(torch.ones(3), group=group)
    dist.destroy_process_group()
elif rank == 1 and what == "unfinished":
    time.sleep(1)  # the other has ended, but for gloo's thread
    dist.all_reduce(torch.ones(3), group=group)
else:
    dist.all_reduce(torch.ones(3), group=group, async_op=True)
    if rank == 1:
        os._exit(7)
    if what == "raises":
        raise ValueError("the reason")
"""


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.parametrize(
    ("what", "codes"), [("destroyed", [0, 0]), ("unfinished", [0, 0]), ("raises", [1, 7]), ("alone", [0, 7])]
)
def test_interpreters_of_ranks_without_a_launcher_end_in_order(tmp_path, what, codes):
    """With their own exit codes, in seconds: the timeout of collectives is 10 minutes."""
    clean = {name: value for name, value in os.environ.items() if name != failure.ERROR_FILE}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(forked.free_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", BY_HAND, what],
            env=clean | place | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == codes, errors


def test_a_rank_that_raises_ends_the_job_with_its_traceback_first(tmp_path):
    result = start(tmp_path, "raise")
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line]
    assert lines[0] == "error: rank 1 failed; the other rank was stopped"
    assert lines[1].startswith("Traceback") and "ZeroDivisionError: the reason that matters" in lines[-1]
    assert "gloo" not in result.stderr and "rank 0" not in result.stderr
    # The other waited in a collective, for 10 minutes at most.
    assert not any(forked.is_running(seen(tmp_path, rank)["pid"]) for rank in (0, 1))


def test_a_sentence_of_one_rank_is_told_once_with_its_exit_code(tmp_path):
    result = start(tmp_path, "sentence")
    assert result.returncode == 3
    assert result.stderr == "error: rank 1: token id 70000 is above the vocabulary\n"


def test_words_that_are_cut_off_by_the_launcher_are_no_words(tmp_path, monkeypatch):
    monkeypatch.setattr(failure.json, "dump", lambda words, file: file.write('{"mess') and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failure._write_error_file(str(tmp_path / "error.json"), ConfigError("no"), True, 2)
    assert not (tmp_path / "error.json").exists()


def test_a_rank_that_is_killed_is_named_and_not_its_victims(tmp_path):
    result = start(tmp_path, "die")
    assert result.returncode == 128 + 9
    assert result.stderr.startswith(
        "error: rank 1 was ended by SIGKILL, which the kernel sends when host memory"
    )


def test_a_rank_that_crashes_leaves_its_stacks_and_the_others_their_last_collectives(tmp_path):
    result = start(tmp_path, "crash")
    assert result.returncode == 128 + 6
    assert result.stderr.startswith(
        "error: rank 1 was ended by SIGABRT; the other rank was stopped\nFatal Python error"
    )
    assert 'launched.py", line' in result.stderr
    assert re.search(r"last collectives of the others: rank 0: .*all_?reduce number \d+ of ", result.stderr)


def test_a_machine_whose_rank_dies_before_they_are_connected_is_named_by_the_others(tmp_path):
    """Rank 0 would wait for 20 minutes."""
    endpoint = f"127.0.0.1:{forked.free_port()}"
    program = (
        "import sys; from megalith.launch.launcher import launch\n"
        f"sys.exit(launch(1, sys.argv[1:], nnodes='2', rdzv_endpoint='{endpoint}', rdzv_id='a job'))"
    )
    command = ["-c", program, str(WORKER), str(tmp_path), "die early"]
    logs = [tmp_path / "first", tmp_path / "second"]
    launchers = [forked.Forked(command, log) for log in logs]
    assert sorted(each.wait(300) for each in launchers) == [1, 128 + 9]
    told = sorted((log.read_text().splitlines()[-1] for log in logs), key=len)
    assert told[0].startswith("error: rank 1 was ended by SIGKILL")
    host = re.escape(socket.gethostname())
    assert re.match(
        rf"error: the ranks of this machine were stopped before they were connected: on machine {host}: error: rank 1 "
        "was ended by SIGKILL",
        told[1],
    )


@pytest.mark.full
def test_torchrun_starts_the_same_worker(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    result = start(tmp_path, "raise", torchrun)
    assert result.returncode == 1
    root_cause = result.stderr.partition("Root Cause")[2]
    assert "the reason that matters" in root_cause


def test_the_first_of_many_failures_is_the_one_that_was_nobody_elses():
    def failure(rank, exit_status, **error):
        return Failure(rank, exit_status, error or None)

    own = failure(3, 1, collective=False, nanoseconds=50)
    earlier = failure(2, 1, collective=False, nanoseconds=40)
    lost = failure(0, 1, collective=True, nanoseconds=10)
    killed, stopped = failure(1, -11), failure(4, -15)
    ranked = sorted([lost, stopped, own, killed, earlier], key=lambda one: one.order)
    assert [one.rank for one in ranked] == [2, 3, 1, 0, 4]


def test_one_process_needs_no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert init_distributed(torch.device("cpu")) == Process(0, 1, 0, 1)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("environment", "part"),
    [({"RANK": "1"}, "needs RANK and WORLD_SIZE"), ({"RANK": "4", "WORLD_SIZE": "4"}, "count from 0 to 3")],
)
def test_half_an_environment_is_refused(monkeypatch, environment, part):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=part):
        this_process()


@pytest.mark.parametrize(("gpus", "local_rank"), [(1, 0), (4, 1), (8, 5), (0, 5)])
def test_a_rank_of_a_scheduler_that_counts_no_local_ranks_takes_a_gpu_that_is_there(
    monkeypatch, gpus, local_rank
):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert this_process().local_rank == local_rank
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert this_process().local_rank == 3


def test_processes_that_cannot_meet_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set"):
        init_distributed(torch.device("cpu"))


def test_several_machines_need_a_place_to_meet():
    with pytest.raises(ConfigError, match="rdzv-endpoint"):
        launch(2, ["-c", "pass"], nnodes="2")
