"""What the processes of tests are forked from: a first step's lazy work is done here once, not in each of them.

It is imported by the fork server (conftest.py), after PRELOADED and without a process group.
"""

import gc

import pytest  # noqa: F401 (every module of tests has it)
import torch

gc.disable()  # while modules are imported, nothing is garbage

from megalith.config import RunConfig  # noqa: E402
from megalith.parity.job import run_job  # noqa: E402

torch.set_num_threads(1)  # autograd's and OpenMP's pools would not live through a fork
SMALL = {
    "model": dict(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, max_position_embeddings=16),
    "data": dict(mock=True, seq_length=16, num_workers=0),
    "optim": dict(lr=1e-3),
    "train": dict(train_iters=2, micro_batch_size=1, global_batch_size=1, eval_iters=1),
    "runtime": dict(device="cpu", compile=False),
}
run_job(RunConfig.from_tree(SMALL))

gc.collect()
gc.freeze()  # what stands by now stays: no process goes through it again, or copies its pages by doing so
gc.enable()
gc.set_threshold(50_000, 20, 50)
