"""What ranks do in the tests over S3."""

from __future__ import annotations

import faulthandler
import os
import signal

import numpy as np

from megalith.config import RunConfig
from megalith.data.idx_format import _fetch
from megalith.data.indexed import IndexedDataset
from megalith.errors import CheckpointError
from megalith.parity.job import start


def s3_config(corpus: str, parallel: dict, output: str, iterations: int, **checkpoint: object) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": {
                "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16,
                "hidden_dropout": 0.0, "attention_dropout": 0.0,
            },
            "parallel": parallel,
            "data": {"data_path": corpus, "split": "100,0,0", "seq_length": 16, "tokenizer_type": "ByteTokenizer"},
            "optim": {"lr": 1e-2},
            "train": {"train_iters": iterations, "micro_batch_size": 1, "global_batch_size": 4, "eval_iters": 0,
                      "output_dir": output},
            "checkpoint": checkpoint,
            "runtime": {"device": "cpu"},
        }
    )  # fmt: skip


def train_and_save(
    environment: dict[str, str], config: RunConfig, until: int
) -> tuple[list[float], list[str], str]:
    """Trains to a step with a save after each. Returns the losses, what was told, and how the last save failed."""
    os.environ.update(environment)
    run, told = start(config), []
    run.log = told.append
    losses, failure = [], ""
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        while run.step < until:
            losses.append(run.train_step(batches).loss.item())
            run.save()
    try:
        run.save_last()
    except CheckpointError as error:
        failure = str(error)
    return losses, told, failure


def read_again_behind_a_fork(environment: dict[str, str], prefix: str, local: str) -> int:
    """Reads a document of a dataset here and then in a forked child. Returns the child's exit code.

    Called in a job of the pool: a test's own process holds whatever the tests before it left, and a child that
    collects, say, a dead process group there waits for threads that it does not have.
    """
    os.environ.update(environment)
    ours, theirs = IndexedDataset(prefix), IndexedDataset(local)
    if not np.array_equal(ours.get(5), theirs.get(5)):
        return 3
    if not (child := os.fork()):
        try:
            faulthandler.register(signal.SIGALRM, chain=True)  # tells where it waits, and ends it
            signal.alarm(60)
            _fetch.cache_clear()
            os._exit(0 if np.array_equal(ours.get(5), theirs.get(5)) else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
