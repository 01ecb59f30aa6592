"""Many saves cost no more disk, descriptors, threads or memory than a few."""

import gc
import os
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from default_cases import by_default
from storage_job import ZERO1, run_config, started, train

SAVES = int(os.environ.get("MEGALITH_SAVES", 20))
# an old step may just be going
COME_AND_GO = {"descriptors": 3, "threads": 0, "entries": 6, "memory": 4_000_000}


def use(folder: Path) -> dict[str, int]:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "entries": sum(len(folders + files) for _, folders, files in os.walk(folder / "checkpoints")),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def save_often(config, saves: int) -> list[dict[str, int]]:
    """Return what is in use after a few saves, after `saves` more, and after as many again."""
    torch.set_num_threads(1)
    trainer, _ = started(config)
    measured = []
    train(trainer, 1, save_each=False)
    for count in (saves // 4, saves, saves):
        for _ in range(count):
            trainer.step += 1
            trainer.save()
        trainer.save_last()
        measured.append(use(Path(config.train.output_dir)))
    return measured


@pytest.mark.parametrize("async_save", by_default([False, True], True), ids=["at once", "in the background"])
@pytest.mark.fault(26)
def test_disk_descriptors_threads_and_memory_stay_flat_over_many_saves(pool, tmp_path, async_save):
    config = run_config(tmp_path, ZERO1, async_save=async_save, keep_last=2)
    for measured in pool.run(save_often, config, SAVES, size=2):
        print(f"{SAVES} saves each: {measured}")
        for name, most in COME_AND_GO.items():
            grown = [after[name] - before[name] for before, after in pairwise(measured)]
            # A leak of memory grows each time; the allocator takes 4 MB once, after some saves.
            assert (min(grown) if name == "memory" else max(grown)) <= most, (name, grown)
