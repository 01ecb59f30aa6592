"""What operators and schedulers say in the environment is read as they mean it."""

import os
import socket

import forked
import pytest

from megalith.errors import ConfigError
from megalith.launch import network
from megalith.launch.scheduler_env import LaunchSettings, first_host, read_launch_settings, tasks_by_node

MASTER = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
POD = MASTER | {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "WORLD_SIZE": "16", "RANK": "1"}
TRAINJOB = {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
STEP = {
    "SLURM_JOB_ID": "71234",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_GPUS_ON_NODE": "8",
}
MET = LaunchSettings(8, "2", "gpu007:31234")


@pytest.mark.parametrize(
    ("environment", "nproc", "nnodes", "meant"),
    [
        ({}, None, None, LaunchSettings()),
        ({}, 4, None, LaunchSettings(4)),
        (MASTER, 4, "2", LaunchSettings(4, "2", "job-master-0:23456")),
        (MASTER | {"RANK": "1", "WORLD_SIZE": "2"}, None, None, LaunchSettings(endpoint="job-master-0:23456")),
        (MASTER | {"RANK": "1", "WORLD_SIZE": "2"}, 8, None, LaunchSettings(8, "2", "job-master-0:23456")),
        (POD, None, None, LaunchSettings(8, "2", "job-master-0:23456")),
        (POD, 4, None, LaunchSettings(4, "2", "job-master-0:23456")),
        (POD | {"LOCAL_RANK": "3"}, None, None, LaunchSettings(endpoint="job-master-0:23456")),
        (POD | {"PET_NNODES": "1:4", "PET_RDZV_ENDPOINT": "w-0:99", "PET_MAX_RESTARTS": "3"}, None, None,
         LaunchSettings(8, "1:4", "w-0:99", 3)),
        (POD | {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, None, None, LaunchSettings()),
        (TRAINJOB, None, None, LaunchSettings(8, "4", "job-node-0-0.job:29400")),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2"}, None, None, MET),
        (STEP | {"SLURM_STEP_NUM_TASKS": "2"} | MASTER, 4, None, LaunchSettings(4, "2", "job-master-0:23456")),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, None, None, LaunchSettings()),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}, None, None, LaunchSettings()),  # in the batch script itself
    ],
)  # fmt: skip
def test_the_environment_says_what_to_start_and_the_command_line_holds_against_it(
    environment, nproc, nnodes, meant
):
    assert read_launch_settings(environment, nproc, nnodes) == meant


def test_tasks_of_srun_are_ranks_where_a_machine_has_several():
    step = STEP | {"SLURM_STEP_NUM_TASKS": "12", "SLURM_STEP_TASKS_PER_NODE": "8,4"}
    given = read_launch_settings(step, None, None)
    assert given.nproc is None and given.variables == {
        "RANK": "9",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu007",
        "MASTER_PORT": "31234",
    }
    with pytest.raises(ConfigError, match=r"12 tasks on 2 machines, and --nproc 8 .*--ntasks-per-node=1"):
        read_launch_settings(step, 8, None)


def test_the_first_pod_is_reached_by_its_name_though_it_is_told_localhost():
    told = POD | {"MASTER_ADDR": "localhost", "RANK": "0"}
    assert read_launch_settings(told, None, None).endpoint == f"{socket.gethostname()}:23456"


def test_numbers_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="PET_NPROC_PER_NODE is 'many'; it must be a number"):
        read_launch_settings(POD | {"PET_NPROC_PER_NODE": "many"}, None, None)
    with pytest.raises(ConfigError, match="SLURM_STEP_NUM_TASKS is 'x' in the environment"):
        read_launch_settings({"SLURM_STEP_NUM_TASKS": "x"}, None, None)


def test_lists_of_slurm_are_read():
    lists = {"gpu[007-010,12],login1": "gpu007", "a1,b2": "a1", "n[3]-ib": "n3-ib", "r1n[02,05]": "r1n02"}
    assert {text: first_host(text) for text in lists} == lists
    assert tasks_by_node("8(x2),4") == [8, 8, 4]


def test_a_name_that_is_not_yet_known_is_awaited(monkeypatch):
    answers = [OSError(), OSError(), []]

    def resolve(host, port):
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer

    monkeypatch.setattr(network.socket, "getaddrinfo", resolve)
    monkeypatch.setattr(network.time, "sleep", lambda seconds: None)
    network.await_name("job-node-0-0.job")
    assert not answers


RUN = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, vocab_size: 64}
data: {mock: true, seq_length: 16}
train: {micro_batch_size: 1, global_batch_size: 4, train_iters: 2, eval_iters: 0, output_dir: out}
optim: {lr: 1.0e-3}
log: {layout_report: false, log_interval: 1}
"""


@pytest.mark.full
def test_two_pods_of_a_pytorchjob_train_together(tmp_path, monkeypatch):
    """Each with the environment that the operator gives it: RANK is its own, WORLD_SIZE is that of all processes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    operator = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(forked.free_port()), "WORLD_SIZE": "4"}
    operator |= {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2"}
    logs = [tmp_path / f"pod{rank}.log" for rank in (0, 1)]
    words = ["-m", "megalith", "train", "run.yaml"]
    pods = [
        forked.Forked(words, log, env=os.environ | operator | {"RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    codes = [pod.wait() for pod in pods]
    said = [log.read_text() for log in logs]
    assert codes == [0, 0], said
    assert sum("iteration        2/" in text for text in said) == 1, said  # one job, not two
    assert "4 processes" in "".join(said) or "4 ranks" in "".join(said), said
