"""The experts' figures: what a run logs of them, and that they are drawn."""

import json

import pytest
import torch

import megalith
from megalith.config import RunConfig
from megalith.report.expert_metrics import add_expert_metrics
from megalith.report.metrics import StepMetrics
from megalith.report.plot import plot_run

MODEL = dict(preset="tiny-mixtral", hidden_size=32, num_layers=2, vocab_size=64, moe_z_loss_coeff=0.01)


def run_config(tmp_path, **model) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": MODEL | model,
            "data": {"mock": True, "seq_length": 16},
            "optim": {"lr": 1e-3},
            "train": {
                "train_iters": 4,
                "micro_batch_size": 2,
                "global_batch_size": 4,
                "eval_iters": 0,
                "output_dir": str(tmp_path),
            },
            "log": {"log_interval": 2},
        }
    )


def test_figures_of_a_tally(tmp_path):
    tallies = torch.tensor([[6.0, 2.0, 0.0, 8.0, 4.0, 2.2, 30.0], [4.0, 4.0, 4.0, 4.0, 0.0, 1.8, 10.0]])
    plain = StepMetrics(
        step=1, loss=2.0, grad_norm=1.0, lr=1e-3, global_batch_size=4, consumed_samples=4, step_time_ms=1.0,
        tokens_per_second_per_device=None, tflops_per_device=None, mfu=None, max_memory_gb=None,
    )  # fmt: skip
    load, tokens = add_expert_metrics(plain, tallies, run_config(tmp_path))
    assert tokens == {0: [6, 2, 0, 8], 1: [4, 4, 4, 4]}
    assert load.loss == 2.0
    assert load.moe_imbalance == pytest.approx((8 / 4 + 1) / 2)
    assert load.moe_dropped == 4 / 32
    assert (load.moe_aux_loss, load.moe_z_loss) == (pytest.approx(1.0), pytest.approx(10.0))
    load, _ = add_expert_metrics(plain, tallies, run_config(tmp_path, moe_aux_loss_coeff=0.0))
    assert load.moe_aux_loss is None


def test_a_run_logs_them_and_they_are_drawn(tmp_path):
    megalith.train(run_config(tmp_path, moe_expert_capacity_factor=0.5))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        assert 1 <= line["moe_imbalance"] <= 4 and 0.9 < line["moe_aux_loss"] < 2
        assert 0.4 < line["moe_dropped"] < 0.8 and line["moe_z_loss"] > 0
    records = [json.loads(line) for line in (tmp_path / "experts.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]
    assert all(sum(tokens) == 4 * 16 * 2 for record in records for tokens in record["tokens"].values())
    assert plot_run(tmp_path, tmp_path / "run.png").stat().st_size > 10_000
