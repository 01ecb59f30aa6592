"""Run folders as a training run writes them, and hostile ones."""

import json
import math
from pathlib import Path

EVIL = "</script><img src=x onerror=\"document.title='owned'\">\x1b[31m\u202e"


def write_lines(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def run_folder(folder: Path, steps: int = 60, start: float = 8.0, spike: int = 41, evil: str = "") -> Path:
    """Write every kind of file that the report reads, with `evil` in each name and text."""
    records = [
        {
            "step": step,
            "loss": 40.0 if step == spike else None if step == 30 else start * math.exp(-step / 20) + 2,
            "grad_norm": 1 + 1 / step,
            "lr": 1e-3 * step / steps,
            "global_batch_size": 8,
            "consumed_samples": 8 * step,
            "step_time_ms": 10.0 + step % 3,
            "tokens_per_second_per_device": 5000.0,
            "tflops_per_device": 1.5,
            "mfu": 0.4,
            "max_memory_gb": 3.0,
            "skipped": int(step == 7),
            "nan_iterations": int(step == 30),
            "moe_imbalance": 1.5,
            "rewards_mean": step / steps,
            "fp8_overflow/layers.0.linear.input": 0.01,
            f"own{evil}": 2.0 * step,
        }
        for step in range(1, steps + 1)
    ]
    write_lines(folder / "metrics.jsonl", records)
    judged = {"validation_loss": 2.5, "validation_rewards_mean": 0.5}
    write_lines(folder / "evaluations.jsonl", [{"step": steps, **judged}])
    write_lines(folder / "experts.jsonl", [{"step": steps, "tokens": {f"0{evil}": [8, 0, 4, 4]}}])
    write_lines(
        folder / "events.jsonl",
        [{"time": "now", "step": spike, "event": f"loss_spike{evil}", "text": f"far above{evil}"}],
    )
    begun = {
        "time": "then", "versions": {f"megalith{evil}": "1"}, "hosts": [f"node{evil}"], "ranks": 2,
        "layout": {"pp": 2}, "summary": {f"model{evil}": f"tiny{evil}"},
        "stages": [{"stage": 0, "bytes": {f"weights{evil}": 4e6, "loss": 1e6}}, {"stage": 1, "bytes": {"loss": 2e6}}],
    }  # fmt: skip
    write_lines(folder / "starts.jsonl", [{"step": 0, **begun}, {"step": 20, **begun}])
    times = {"peak": 3e9, "compute": 5.0, "communication": 1.0, "bubble": 2.0, "idle": 0.5}
    (folder / "measured_step.json").write_text(json.dumps({"step": 5, "ranks": [times, times]}))
    rows = [["forward", 0, 0, 0.0, 1.0], ["backward", 0, 0, 2.0, 4.0]]
    (folder / "pipeline.json").write_text(json.dumps({"unit": "ms", "ranks": [rows, rows]}))
    answer = {"prompt": f"1+1={evil}", "completion": f"2{evil}", "rewards": {f"right{evil}": 1.0}}
    write_lines(folder / "completions.jsonl", [{"step": steps, **answer}])
    (folder / "config.yaml").write_text(
        json.dumps({f"model{evil}": {f"name{evil}": f"x{evil}"}, "train": {"seed": start}})
    )
    (folder / "checkpoints" / "step_00000020").mkdir(parents=True, exist_ok=True)
    return folder
