"""Many of everything: 50 shards of a dataset, files of 100,000 samples, 200 checkpoints, 60,000 steps of metrics.

Bounds are in seconds of CPU time of an idle core. A core that is shared with other work is measured with a loop.
"""

import json
import os
import random
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from ranks import SMALL, saved, steps
from storage_job import run_config

import megalith
from megalith.checkpoint import list_steps, open_checkpoint
from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.report.metrics import StepMetrics

pytestmark = pytest.mark.full
SHARDS, SAMPLES, KEPT, LOGGED = 50, 100_000, 200, 60_000


def cpu_seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds that a call takes. On a busy machine they are more than on an idle one."""
    before = os.times()
    call()
    after = os.times()
    return after.user - before.user + after.system - before.system


def small_config(output: Path, **settings: object) -> RunConfig:
    tree = {
        **SMALL,
        "train.output_dir": str(output),
        **{key.replace("__", "."): v for key, v in settings.items()},
    }
    return RunConfig.load(
        None, [word for key, value in tree.items() for word in (f"--{key}", json.dumps(value))]
    )


def write_lines(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_dataset_of_50_shards_is_read_completely(tmp_path):
    for shard in range(SHARDS):
        lines = [{"text": f"{chr(97 + shard % 26)}{shard}" * 20} for _ in range(4)]
        source = write_lines(tmp_path / f"{shard}.jsonl", lines)
        words = ["preprocess", "--input", source, "--output-prefix", tmp_path / f"shard{shard}"]
        assert main([*map(str, words), "--tokenizer-type", "ByteTokenizer"]) == 0
    prefixes = sorted(str(path.with_suffix("")) for path in tmp_path.glob("shard*.idx"))
    assert len(prefixes) == SHARDS
    settings = {"data__mock": False, "data__data_path": prefixes, "data__tokenizer_type": "ByteTokenizer"}
    settings |= {"data__split": "100,0,0", "model__vocab_size": 257, "train__train_iters": 50}
    before = len(os.listdir("/proc/self/fd"))
    result = megalith.train(small_config(tmp_path / "run", **settings))
    assert result.step == 50 and steps(tmp_path / "run") == list(range(1, 51))
    assert len(os.listdir("/proc/self/fd")) <= before + SHARDS


@pytest.mark.parametrize("kind", ["conversations", "prompts"])
def test_a_file_of_100_000_samples_is_read_in_seconds(tmp_path, kind):
    if kind == "conversations":
        records = [{"prompt": f"{n % 10}", "completion": f" {n % 7}"} for n in range(SAMPLES)]
        path = write_lines(tmp_path / "samples.jsonl", records)
        settings = {
            "data__mock": False,
            "data__data_path": str(path),
            "data__tokenizer_type": "NullTokenizer",
        }
        settings |= {
            "data__split": "100,0,0",
            "sft__enabled": True,
            "sft__packing": True,
            "train__train_iters": 3,
        }
        seconds = cpu_seconds(lambda: megalith.train(small_config(tmp_path / "run", **settings)))
        assert steps(tmp_path / "run") == [1, 2, 3]
    else:
        from test_phases import grpo

        records = [{"id": f"q{n}", "prompt": f"{n % 10} {n % 7} 1"} for n in range(SAMPLES)]
        write_lines(tmp_path / "prompts.jsonl", records)
        seconds = cpu_seconds(lambda: main(grpo(tmp_path / "run", 3)))
        assert steps(tmp_path / "run") == [1, 2, 3]
    assert seconds < 40


def test_200_kept_checkpoints_cost_neither_a_save_nor_a_start(tmp_path, capsys):
    output = tmp_path / "run"
    config = run_config(output, save_interval=1).with_settings({"train.train_iters": KEPT})
    megalith.train(config)
    assert len(saved(output)) == KEPT == len(list_steps(output / "checkpoints"))
    metrics = [
        json.loads(line)["step_time_ms"] for line in (output / "metrics.jsonl").read_text().splitlines()
    ]
    assert np.median(metrics[-20:]) < 3 * np.median(metrics[10:30]) + 5
    assert cpu_seconds(lambda: open_checkpoint(output)) < 1
    assert cpu_seconds(lambda: main(["checkpoint", "list", str(output)])) < 10
    assert f"step_{KEPT:08d}" in capsys.readouterr().out
    more = config.with_settings({"train.train_iters": KEPT + 2, "checkpoint.load": str(output)})
    assert megalith.train(more).step == KEPT + 2


@pytest.fixture(scope="module")
def long_run(tmp_path_factory):
    folder, chance = tmp_path_factory.mktemp("long") / "run", random.Random(1)
    folder.mkdir()
    names = [field.name for field in fields(StepMetrics)]
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, LOGGED + 1):
            record = {name: 3 * chance.random() for name in names}
            record |= {
                "step": step,
                "nan_iterations": int(step % 10 == 0),
                "consumed_samples": 4 * step,
                "global_batch_size": 4,
                "skipped": False,
            }
            file.write(json.dumps(record | {"loss": 3 + 10 / step + chance.random()}) + "\n")
    evaluations = [
        {"step": step, "validation_loss": 3.0, "validation_perplexity": 20.1}
        for step in range(100, LOGGED + 1, 100)
    ]
    write_lines(folder / "evaluations.jsonl", evaluations)
    return folder


@pytest.mark.parametrize("command", ["report", "plot"])
def test_60_000_steps_of_metrics_are_drawn_in_seconds(long_run, command):
    """2.8 and 3.9 CPU seconds on an idle machine; the bound leaves room for a busy one."""
    assert cpu_seconds(lambda: main([command, str(long_run)])) < 6
