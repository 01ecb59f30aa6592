"""A save that takes longer than training's collectives may: no rank gives up on it."""

import threading
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from megalith.checkpoint import RunRecord, Saver, open_checkpoint
from megalith.checkpoint.writer import ShardWriter
from megalith.comm import Axis

LIMIT = 0.5  # seconds that training's collectives may take


def save_slowly(folder, background: bool) -> str:
    """Saves with rank 1 three times as slow as the limit; returns how it went."""
    rank = dist.get_rank()
    world = Axis(2, rank, dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT)))
    finish = ShardWriter.finish

    def finish_late(self):
        threading.Event().wait(3 * LIMIT * rank)
        return finish(self)

    ShardWriter.finish = finish_late
    try:
        saver = Saver(folder, world, background=background)
        saver.save(RunRecord(step=1, consumed_samples=0, config={}), nn.Linear(8, 8), None)
        (saved,) = saver.finished(wait=True)
    finally:
        ShardWriter.finish = finish
    return str(saved.error)


def test_a_save_longer_than_the_collective_time_out_ends_well(pool, tmp_path):
    for background in (False, True):
        folder = tmp_path / str(background)
        assert pool.run(save_slowly, folder, background, size=2) == ["None", "None"]
        assert open_checkpoint(folder, ("model",)).manifest.step == 1
