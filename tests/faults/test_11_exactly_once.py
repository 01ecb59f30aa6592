"""11: over 20 random restarts with changes of the world's size, each sample once an epoch and in the same order.

Through the configuration's own loaders, with a blend and a batch size that is ramped up. Restarts of whole runs:
kill_trials.py and test_17_fewer_workers.py.
"""

import itertools
import random

import pytest
import torch

from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.order import skip_range, stream_position
from megalith.training.build import prepare
from megalith.training.run_datasets import Data

STEPS, RESTARTS = 60, 20
DEVICE = torch.device("cpu")


def configuration(data_path, dataloader_type: str) -> RunConfig:
    return RunConfig.from_tree(
        {
            "model": {"preset": "tiny-gpt", "hidden_size": 32, "num_attention_heads": 2},
            "data": {"data_path": data_path, "split": "1", "seq_length": 16, "num_workers": 0,
                     "tokenizer_type": "ByteTokenizer", "dataloader_type": dataloader_type},
            "optim": {"lr": 0.01},
            "train": {"train_iters": STEPS, "micro_batch_size": 1, "global_batch_size": 12, "eval_iters": 0,
                      "rampup_batch_size": [4, 4, 200]},
        }
    )  # fmt: skip


class Job:
    """The data of one start of a run on `size` data-parallel ranks."""

    def __init__(self, config: RunConfig, size: int):
        config, tokenizer, _ = prepare(config, size)
        self.schedule = BatchSizeSchedule.from_config(config.train, size)
        axes = [Axis(size, rank) for rank in range(size)]
        self.ranks = [Data(config, self.schedule, STEPS, tokenizer, axis) for axis in axes]

    def run(self, step: int, consumed: int, steps: int, left_out=()) -> tuple[int, list[tuple[int, tuple]]]:
        """Makes `steps` steps; returns the samples consumed then, and each sample's place and tokens, in order."""
        given = []
        for data in self.ranks:
            end = consumed
            with data.train_loader(step, consumed, DEVICE, left_out) as batches:
                for _ in range(steps):
                    for _ in range(self.schedule.micro_batches(end)):
                        batch = next(batches)
                        given += list(
                            zip(batch.sample_numbers.tolist(), map(tuple, batch.input_ids.tolist()))
                        )
                    end += self.schedule.size(end)
        return end, sorted(given)


@pytest.mark.parametrize("dataloader_type", ["single", "cyclic"])
@pytest.mark.parametrize("blended", [False, True], ids=["one dataset", "a blend"])
@pytest.mark.fault(11)
def test_each_sample_comes_once_and_in_the_same_order_over_20_restarts(corpus, dataloader_type, blended):
    data_path = ["0.7", corpus, "0.3", corpus] if blended else corpus
    config = configuration(data_path, dataloader_type)
    total, straight = Job(config, 1).run(0, 0, STEPS)
    assert [place for place, _ in straight] == list(range(total))
    chance = random.Random(5)
    cuts = [0, *sorted(chance.sample(range(1, STEPS), RESTARTS)), STEPS]
    jobs = {size: Job(config, size) for size in (1, 2, 4)}
    consumed, given, sizes = 0, [], []
    for step, until in itertools.pairwise(cuts):
        sizes.append(chance.choice([1, 2, 4]))
        consumed, samples = jobs[sizes[-1]].run(step, consumed, until - step)
        given += samples
    assert consumed == total and len(sizes) == RESTARTS + 1 and set(sizes) == {1, 2, 4}
    assert given == straight


def test_what_is_left_out_is_missing_and_all_else_keeps_its_order(corpus):
    config = configuration(corpus, "cyclic")
    job = Job(config, 2)
    _, straight = job.run(0, 0, STEPS)
    tokens = [sample for _, sample in straight]
    left_out = skip_range(skip_range([], 8, 16), 20, 28)
    assert left_out == [[8, 16], [28, 36]]
    _, samples = job.run(0, 0, 30, left_out)
    kept = tokens[:8] + tokens[16:28] + tokens[36:]
    assert [sample for _, sample in samples] == kept[: len(samples)]


def test_leaving_out_again_what_was_behind_a_gap_joins_the_two():
    left_out = skip_range(skip_range([], 8, 16), 6, 10)  # positions 6, 7, 16 and 17
    assert left_out == [[6, 18]]
    assert [stream_position(consumed, left_out) for consumed in (0, 5, 6, 7)] == [0, 5, 18, 19]
    assert skip_range(left_out, 0, 2) == [[0, 2], [6, 18]]
