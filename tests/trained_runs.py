"""Runs of a small GPT on the tiny corpus, and their files."""

from pathlib import Path

from megalith.config import RunConfig
from megalith.report.metrics import read_records


def configuration(corpus: str, output: Path, **sections) -> RunConfig:
    tree = {
        "model": dict(preset="tiny-gpt", hidden_size=32, num_attention_heads=2, hidden_dropout=0.0,
                      attention_dropout=0.0),
        "data": dict(data_path=corpus, split="80,10,10", seq_length=16, tokenizer_type="ByteTokenizer",
                     num_workers=0),
        "optim": dict(lr=1e-2),
        "train": dict(train_iters=8, micro_batch_size=4, global_batch_size=8, eval_iters=2, eval_interval=4,
                      output_dir=str(output)),
    }  # fmt: skip
    for section, values in sections.items():
        tree[section] = {**tree.get(section, {}), **values}
    return RunConfig.from_tree(tree)


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_records(folder / "metrics.jsonl")]


def comparable(folder: Path) -> list[dict]:
    """Return the metrics without times."""
    timed = ("step_time_ms", "tokens_per_second_per_device", "tflops_per_device")
    return [
        {key: value for key, value in record.items() if key not in timed}
        for record in read_records(folder / "metrics.jsonl")
    ]


def stored(checkpoint: Path) -> dict[str, bytes]:
    """Return weights and optimizer state as stored on disk."""
    return {path.name: path.read_bytes() for path in sorted(checkpoint.glob("*.safetensors"))}
