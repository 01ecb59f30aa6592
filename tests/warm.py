"""What the processes of tests are forked from: a first step's lazy work is done here once, not in each of them.

It is imported by the fork server (conftest.py), after PRELOADED and without a process group.
"""

import gc
import os

import pytest  # noqa: F401 (every module of tests has it)
import torch
import torch.distributed as dist

gc.disable()  # while modules are imported, nothing is garbage

from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from megalith.config import RunConfig  # noqa: E402
from megalith.parity.job import run_job, start  # noqa: E402

torch.set_num_threads(1)  # autograd's and OpenMP's pools would not live through a fork
SMALL = {
    "model": dict(
        num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, max_position_embeddings=16
    ),
    "data": dict(mock=True, seq_length=16, num_workers=0),
    "optim": dict(lr=1e-3),
    "train": dict(train_iters=2, micro_batch_size=1, global_batch_size=1, eval_iters=1),
    "runtime": dict(device="cpu", compile=False),
}
run_job(RunConfig.from_tree(SMALL))

# And sharded, with collectives that do nothing. torch caches by mesh what rank 0 would do: no mesh of the tests has the
# ranks of these.
TP, SIZE = 16, 64
os.environ |= {"RANK": "0", "WORLD_SIZE": str(SIZE), "LOCAL_RANK": "0"}
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
sharded = start(
    RunConfig.from_tree(
        SMALL
        | {
            "model": SMALL["model"] | {"num_attention_heads": TP},
            "train": SMALL["train"] | {"global_batch_size": SIZE // TP},
            "parallel": dict(
                tensor_model_parallel_size=TP,
                sequence_parallel=True,
                data_parallel_sharding_strategy="optim_grads_params",
            ),
        }
    )
)
with sharded.data.train_loader(0, 0, sharded.device) as batches:
    sharded.train_step(batches)
del sharded, batches
dist.destroy_process_group()
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
    del os.environ[name]

gc.collect()
gc.freeze()  # what stands by now stays: no process goes through it again, or copies its pages by doing so
gc.enable()
gc.set_threshold(50_000, 20, 50)
