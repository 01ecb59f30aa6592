"""A small run whose saving and loading is disturbed."""

from __future__ import annotations

import resource
from contextlib import contextmanager
from pathlib import Path

from megalith.config import RunConfig
from megalith.errors import CheckpointError
from megalith.parity.job import start
from megalith.training.run_state import Run

ZERO1 = {"data_parallel_sharding_strategy": "optim"}
TP2 = {"tensor_model_parallel_size": 2}


def run_config(output: Path | str, parallel: dict | None = None, **checkpoint) -> RunConfig:
    """A run of tiny steps into `output`."""
    return RunConfig.from_tree(
        {
            "model": {
                "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 67,
                "max_position_embeddings": 8, "hidden_dropout": 0.0, "attention_dropout": 0.0,
            },
            "parallel": parallel or {},
            "data": {"mock": True, "seq_length": 8, "num_workers": 0},
            "optim": {"lr": 1e-2},
            "train": {"train_iters": 12, "micro_batch_size": 1, "global_batch_size": 2, "eval_iters": 0,
                      "output_dir": str(output)},
            "checkpoint": {name: str(v) if name == "load" else v for name, v in checkpoint.items()},
            "runtime": {"device": "cpu"},
        }
    )  # fmt: skip


def started(config: RunConfig) -> tuple[Run, list[str]]:
    """This rank's run, and the list that gets what it tells."""
    run = start(config)
    told: list[str] = []
    run.log = told.append
    return run, told


def train(run: Run, steps: int, save_each: bool = True) -> None:
    """Steps, with a save after each."""
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        for _ in range(steps):
            run.train_step(batches)
            if save_each:
                run.save()


def save_steps(config: RunConfig, steps: int) -> None:
    """Trains and saves each step."""
    run, _ = started(config)
    train(run, steps)
    run.save_last()


def save_on_a_bad_disk(config: RunConfig, steps: int, limited: dict[int, int]) -> tuple[int, list[str], str]:
    """Trains with a save after each step, the last once more as at a run's end.

    On the ranks of `limited` files can have no more than so many bytes. Returns the steps made, what was told, and how
    the last save failed.
    """
    run, told = started(config)
    with file_size_limit(limited.get(run.mesh.world.rank)):
        train(run, steps)
        try:
            run.save_last()
            failure = ""
        except CheckpointError as error:
            failure = str(error)
    return run.step, told, failure


@contextmanager
def file_size_limit(size: int | None):
    """Files that grow over `size` bytes are an error of the operating system's: EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
