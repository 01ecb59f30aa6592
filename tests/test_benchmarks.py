"""Every benchmark that is shipped runs in small on a CPU, so that a rename elsewhere cannot break it unnoticed."""

import importlib
import inspect
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import ForkedPopen

from benchmarks import data_open
from megalith.bench import peers, training_speed
from megalith.bench.bench_command import GPU_ONLY, OTHERS, TRAINING, run_command
from megalith.bench.workloads import LAYOUTS, WORKLOADS, layout_of, run_tree
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.training.build import prepare

BENCHMARKS = sorted(path.stem for path in (Path(__file__).parents[1] / "benchmarks").glob("*.py"))
NEEDS_TRL = "trl_losses", "trl_objective"
SMALL = ["model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "data.seq_length=16"]


@pytest.fixture(autouse=True)
def small_processes(monkeypatch, tmp_path):
    """Fork the jobs that are measured from a process that has torch, and work in a folder of the test's own."""
    monkeypatch.setattr(subprocess, "Popen", ForkedPopen)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bench(monkeypatch, capsys):
    """Call a benchmark's main, in this process, as `megalith bench` does; return what it prints."""

    def call(name: str, *words: object) -> str:
        module = importlib.import_module(f"megalith.bench.{OTHERS.get(name, TRAINING)}")
        words = [str(word) for word in ((name, *words) if name in WORKLOADS else words)]
        monkeypatch.setattr(sys, "argv", ["bench", *words])
        module.main(*([words] if inspect.signature(module.main).parameters else []))
        return capsys.readouterr().out

    return call


def test_generation_is_measured_beside_transformers(bench):
    options = (
        "--batch",
        2,
        "--prompt",
        8,
        "--new-tokens",
        8,
        "--device",
        "cpu",
        "--peer",
        "hf",
        "--peer-tokens",
        4,
    )
    ours, theirs = map(json.loads, bench("generate", "tiny", *options).splitlines())
    assert ours["step_ms"] > 0 and ours["prefill_s"] > 0 and theirs["tokens_per_second"] > 0


def test_weights_of_a_model_are_synced_to_an_engine(bench):
    result = json.loads(bench("generate", "tiny", "--sync", "--device", "cpu"))
    assert len(result["gb_per_second"]) == 4


@pytest.mark.parametrize("name", GPU_ONLY)
def test_benchmarks_of_kernels_need_a_gpu(name):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="measures kernels of a GPU"):
        run_command([name])


@pytest.mark.parametrize("name", sorted({*OTHERS} - {*GPU_ONLY}))
def test_every_benchmark_has_help(name, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command([name, "--help"])
    assert ended.value.code == 0 and "usage" in capsys.readouterr().out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_one_that_the_trainer_takes(layout, tmp_path):
    workload = (
        "qwen3-30b-a3b" if "ep" in layout else "gpt2-large" if layout.startswith("pp2-v") else "llama3-8b"
    )
    config = RunConfig.from_tree(run_tree(workload, layout, {"mock": True}, str(tmp_path), batch=32))
    prepare(config, LAYOUTS[layout]["processes"])


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_is_one_that_the_trainer_takes(workload, tmp_path):
    prepare(RunConfig.from_tree(run_tree(workload, "one", {"mock": True}, str(tmp_path))), 1)


def test_layouts_are_described_by_degrees():
    layout = layout_of("tp=2,pp=2,dp=2,sequence_parallel=true")
    assert layout["processes"] == 8
    assert layout["parallel"] == {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "sequence_parallel": True,
    }
    assert layout_of("dp=8,ep=8")["processes"] == 8  # experts do not multiply the processes
    for name, said in (
        ("tp3", "there is no layout"),
        ("tp=0", "positive integer"),
        ("dp=two", "positive integer"),
    ):
        with pytest.raises(ConfigError, match=said):
            layout_of(name)


@pytest.mark.parametrize("name", ["hf", "plain", "peft"])
def test_a_peer_of_one_process_trains(name, monkeypatch, capsys):
    if name == "peft":
        pytest.importorskip("peft")
    workload = "gpt2" if name == "plain" else "tiny"
    words = [name, workload, "--batch", "1", "--steps", "2", "--warmup", "1", "--set", *SMALL]
    monkeypatch.setattr(sys, "argv", ["peers", *words])
    monkeypatch.setattr(torch, "compile", lambda model: model)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    peers.main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["step_time_ms"] > 0


@pytest.mark.parametrize("name", ["ligre", "hf:never", "liger:always", "liger:never,"])
def test_a_peer_that_there_is_not_is_refused(name, capsys):
    with pytest.raises(SystemExit):
        run_command(["tiny", "--peer", name])
    assert "none of" in capsys.readouterr().err


def test_a_peer_out_of_memory_is_tried_with_half_the_micro_batch(bench, monkeypatch):
    tried = []

    def run_peer(args, name, layout, batch, micro, options):
        tried.append((micro, *options))
        return {"failed": "failed with 1: out of memory; …"} if micro > 1 else {"step_time_ms": 5.0}

    monkeypatch.setattr(training_speed, "_run_peer", run_peer)
    monkeypatch.setattr(training_speed, "measure", lambda *given: {"step_time_ms": 4.0})
    text = bench("llama3-8b", "--batch", 4, "--set", "train.micro_batch_size=4", "--peer", "liger:never")
    assert tried == [(size, "--reshard", "never") for size in (4, 2, 1)]
    assert "liger:never runs out of memory with 4 sequences" in text and "micro_batch_size 1" in text


@pytest.mark.parametrize("name", sorted({*BENCHMARKS} - {*NEEDS_TRL}))
def test_every_module_of_benchmarks_is_imported(name):
    importlib.import_module(f"benchmarks.{name}")


def program(monkeypatch, module, *words: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
    module.main()


def test_a_large_dataset_is_opened(monkeypatch, capsys, tmp_path):
    program(monkeypatch, data_open, "--documents", 2000, "--seq-length", 64, "--folder", tmp_path)
    assert "2,000 documents" in capsys.readouterr().out


def test_the_old_name_of_the_training_benchmark_has_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.train", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("benchmarks.train", run_name="__main__")
    assert "--layout" in capsys.readouterr().out
