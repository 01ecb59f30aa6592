"""Warm-up of the process that test processes are forked from: two steps of each kind of model.

Initialization on first use would otherwise be repeated in every fork, a third of the time of a short job. Memory is
then moved to huge pages, because a fork copies the page table: for 287 MB this takes 6 ms instead of 18.
"""

import ctypes
import gc
import os
import re
import tempfile
import threading
import warnings

import torch
from tqdm import tqdm

from megalith.config import RunConfig
from megalith.parity.job import run_job

HUGE = 1 << 21  # bytes of a page
MADV_COLLAPSE = 25  # Linux 6.1; what cannot be collapsed stays as it is


def collapse_memory() -> None:
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:
        private = re.findall(r"^(\w+)-(\w+) rw-p 00000000 00:00 0 +(?:\[heap\])?$", maps.read(), re.MULTILINE)
    for first, end in private:
        for page in range(-(-int(first, 16) // HUGE) * HUGE, int(end, 16) - HUGE + 1, HUGE):
            libc.madvise(ctypes.c_void_p(page), ctypes.c_size_t(HUGE), MADV_COLLAPSE)


os.fsync = os.fstat  # waiting for the disk took a tenth of a short run
environment, random = dict(os.environ), torch.get_rng_state()
torch.set_num_threads(1)
# By default a lock that all forks share: one that is killed while it draws a bar would block the others forever.
tqdm.set_lock(threading.RLock())
with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
    for preset in ("tiny-gpt", "tiny-mixtral"):
        run_job(
            RunConfig.from_tree(
                {
                    "model": {"preset": preset, "vocab_size": 64, "max_position_embeddings": 16},
                    "data": {"mock": True, "seq_length": 16, "num_workers": 0},
                    "optim": {"lr": 1e-2},
                    "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 2, "eval_iters": 1,
                              "output_dir": folder},
                    "runtime": {"device": "cpu"},
                }
            )
        )  # fmt: skip

    torch.compile(lambda x: x.sin().sum(), fullgraph=True, backend="aot_eager")(
        torch.ones(2).requires_grad_()
    ).backward()
torch._dynamo.reset()
torch.use_deterministic_algorithms(False)
torch.set_rng_state(random)
os.environ.clear()
os.environ.update(environment)
gc.collect()
gc.freeze()  # none of it is garbage: a process that looks through it has to copy it, too
if os.path.exists("/proc/self/maps"):
    collapse_memory()
