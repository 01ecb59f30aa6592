"""A job that its GPUs, or its CPU's machine, have no memory for is refused, or warned of, before a process starts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import megalith
from megalith.bench import training_speed
from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.config.rules.auto_settings import Machine
from megalith.errors import ConfigError
from megalith.planner import fit
from megalith.planner.fit import fullest_stage
from megalith.planner.layout import build_layout
from megalith.training import precheck, training_job

# 12.9 billion parameters in layers, and hardly anything else: 206 GB of weights, gradients and Adam's moments.
LARGE = dict(num_layers=4, hidden_size=16384, num_attention_heads=128, vocab_size=64)
SMALL = dict(num_layers=2, hidden_size=32, num_attention_heads=2, vocab_size=64)
SHARDED = dict(tensor_model_parallel_size=8, sequence_parallel=True)


@pytest.fixture
def run_file(tmp_path):
    def written(model: dict, **parallel) -> str:
        train = dict(train_iters=2, global_batch_size=8, precision="bf16", output_dir=str(tmp_path / "out"))
        data, optim = dict(mock=True, seq_length=64), dict(lr=1e-4)
        tree = dict(model=model, data=data, optim=optim, train=train, parallel=parallel)
        tree["checkpoint"] = dict(save_interval=2)
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
        return str(tmp_path / "run.yaml")

    return written


def text(capsys) -> str:
    out, err = capsys.readouterr()
    return " ".join(f"{out} {err}".split())


def test_a_dry_run_on_gpus_without_the_memory_fails_with_the_sentence_of_plan_show(run_file, capsys):
    run = run_file(LARGE)
    assert main(["plan", "show", run, "--gpus", "8", "--device", "H100"]) == 0
    sentence = text(capsys).partition(" GPU ")[0]
    assert "8 NVIDIA H100 80GB HBM3: does NOT fit" in sentence
    dry_run = ["train", run, "--dry-run", "--world-size", "8"]
    assert main([*dry_run, "--device", "H100"]) == ConfigError.exit_code
    told = text(capsys)
    assert sentence in told and "`megalith plan RUN_FILE --gpus 8` lists layouts that fit" in told
    assert "can train this" not in told
    run = run_file(LARGE, **SHARDED)
    assert main([*dry_run, "--device", "H100"]) == 0
    assert "8 processes can train this" in text(capsys)


@pytest.mark.parametrize("system", ["slurm", "kubernetes"])
def test_launch_writes_no_job_that_its_gpus_cannot_hold(run_file, tmp_path, capsys, system):
    pods = ["--image", "m:1", "--volume", f"claim:{tmp_path}"] if system == "kubernetes" else []
    launch = ["launch", system, run_file(LARGE), "--nodes", "1", *pods]
    assert main([*launch, "--device", "H200"]) == ConfigError.exit_code
    assert "8 NVIDIA H200: does NOT fit" in text(capsys)


def test_launch_without_a_device_warns_and_refuses_what_no_gpu_can_hold(run_file, capsys):
    launch = ["launch", "slurm", run_file(LARGE), "--nodes", "1"]
    assert main(launch) == 0
    assert "more than an H100's 85.0; pass --device NAME" in text(capsys)
    assert main([*launch, "--model.num_layers", "12"]) == ConfigError.exit_code
    assert "the largest GPU has only 310.0 GB; `megalith plan RUN_FILE --gpus 8`" in text(capsys)
    assert main(["launch", "slurm", run_file(LARGE, **SHARDED), "--nodes", "1"]) == 0
    assert "note" not in text(capsys)


def test_train_refuses_and_warns_before_it_starts_processes(run_file, capsys, monkeypatch):
    config = RunConfig.load(run_file(SMALL))
    monkeypatch.setattr(precheck, "pick_device", lambda *_: torch.device("cuda", 0))
    prepared = precheck.prepare(config, 2).config
    most = fullest_stage(build_layout(prepared, 2))

    def checked(memory: int) -> None:
        monkeypatch.setattr(precheck, "largest_gpu_memory", lambda: memory)
        precheck.check_job(config, [2], 2, one_machine=True)

    checked(10 * most.total)
    assert "warning" not in text(capsys)
    checked(most.weights + most.optimizer + 1)
    assert "are expected on the fullest of 2 processes" in text(capsys)
    with pytest.raises(ConfigError, match=r"weights and optimizer state alone take .* of 2 processes"):
        checked(most.weights + most.optimizer - 1)


def test_a_process_refuses_and_warns_before_it_makes_the_model(run_file, capsys, monkeypatch):
    config = RunConfig.load(run_file(SMALL), ["--runtime.device", "cpu", "--train.global_batch_size", "1"])
    most = fullest_stage(build_layout(precheck.prepare(config, 1).config, 1))
    machine = Machine(memory=most.weights + most.optimizer - 1)
    monkeypatch.setattr(training_job, "detect_machine", lambda *_: machine)
    with (
        monkeypatch.context() as patch,
        pytest.raises(ConfigError, match="weights and optimizer state alone"),
    ):
        patch.setattr(training_job, "Run", None)
        megalith.train(config)
    monkeypatch.setattr(
        training_job, "detect_machine", lambda *_: replace(machine, memory=machine.memory + 1)
    )
    megalith.train(config)
    assert "warning: " in text(capsys)


def test_a_cpu_refuses_and_warns_by_the_memory_of_all_its_processes(run_file, capsys, monkeypatch):
    config = RunConfig.load(run_file(SMALL), ["--runtime.device", "cpu"])
    stages = [fullest_stage(build_layout(precheck.prepare(config, ranks).config, ranks)) for ranks in (1, 2)]

    def checked(memory: int, ranks: int = 2) -> str:
        monkeypatch.setattr(fit, "host_memory_bytes", lambda: memory)
        precheck.check_job(config, [ranks], ranks, one_machine=True)
        return text(capsys)

    one, most = stages
    assert "warning" not in checked(2 * most.total)
    assert "are expected in 2 processes on the CPU, but this machine has only" in checked(2 * most.total - 1)
    with pytest.raises(
        ConfigError, match=r"state alone take .* GB in 2 processes on the CPU, but this machine"
    ):
        checked(2 * (most.weights + most.optimizer) - 1)
    monkeypatch.setattr(training_job, "Run", None)
    with pytest.raises(ConfigError, match="in 1 process on the CPU"):
        checked(one.weights + one.optimizer - 1, 1)
    with pytest.raises(ConfigError, match="in 1 process on the CPU"):
        megalith.train(config)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_evaluation_needs_no_memory_for_an_optimizer(run_file, tmp_path, monkeypatch, device):
    config = RunConfig.load(run_file(SMALL), ["--runtime.device", "cpu"])
    megalith.train(config)
    monkeypatch.setattr(fit, "host_memory_bytes", lambda: 1)
    monkeypatch.setattr(precheck, "largest_gpu_memory", lambda: 1)
    monkeypatch.setattr(precheck, "pick_device", lambda *_: torch.device(device))
    with pytest.raises(ConfigError, match="weights and optimizer state alone"):
        precheck.check_job(config, [1], 1, one_machine=True)
    evaluated = {"train.skip_train": True, "checkpoint.load": str(tmp_path / "out")}
    precheck.check_job(config.with_settings(evaluated), [1], 1, one_machine=True)


def test_a_benchmark_on_a_cpu_without_the_memory_warns_before_it_starts(run_file, capsys, monkeypatch):
    tree = yaml.safe_load(Path(run_file(SMALL)).read_text())
    tree["runtime"] = {"device": "cpu"}
    config = RunConfig.from_tree(tree)
    most = fullest_stage(build_layout(precheck.prepare(config, 1).config, 1))
    monkeypatch.setattr(fit, "host_memory_bytes", lambda: most.total - 1)
    monkeypatch.setattr(training_speed, "run_logged", lambda *_: (1, text(capsys)))
    _, printed = training_speed.run_training(tree, Path(run_file(SMALL)).parent, 1)
    assert "failed with 1: warning: 0.0 GB are expected in 1 process on the CPU" in printed
    monkeypatch.setattr(fit, "host_memory_bytes", lambda: most.weights)
    with pytest.raises(ConfigError, match="weights and optimizer state alone"):
        training_speed.run_training(tree, Path(run_file(SMALL)).parent, 1)


def test_the_sentence_of_plan_show_and_its_json_agree(run_file, capsys):
    show = ["plan", "show", run_file(LARGE), "--gpus", "8", "--device", "H200"]
    assert main([*show, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert main(show) == 0 and "does NOT fit" in text(capsys)
