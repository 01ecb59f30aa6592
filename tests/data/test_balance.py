"""The assignment of a step's packed samples to ranks by cost, and sequence lengths that change during a run."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from trained_runs import configuration

from megalith import Mesh, RunConfig, parallelize
from megalith.config.train import BatchSizeSchedule
from megalith.data.balance import assign, in_order, slowest
from megalith.data.batch import BoundaryRules, make_batch
from megalith.data.length_schedule import LengthSchedule
from megalith.data.tokenizers.open_tokenizer import build_tokenizer
from megalith.errors import ConfigError
from megalith.training.build import prepare
from megalith.training.run_datasets import Data


@pytest.mark.parametrize(("samples", "micro_batch", "ranks"), [(8, 1, 8), (64, 2, 8), (60, 3, 4), (16, 4, 1)])
def test_an_assignment_uses_each_sample_once_and_lowers_the_slowest_rank(samples, micro_batch, ranks):
    rng, before, after = np.random.default_rng(0), [], []
    for _ in range(50):
        costs = rng.lognormal(0, 1, samples)
        chosen = assign(costs, micro_batch, ranks)
        assert chosen.shape == (samples // micro_batch // ranks, ranks, micro_batch)
        assert sorted(chosen.ravel()) == list(range(samples))
        steps = np.sort(costs[chosen].reshape(len(chosen), -1), axis=1)
        assert (
            steps[:-1, 0] >= steps[1:, -1]
        ).all()  # ranks that synchronize per micro-batch wait little, too
        before.append(slowest(costs, in_order(samples, micro_batch, ranks)))
        after.append(slowest(costs, chosen))
    assert np.mean(after) <= np.mean(before) and (
        samples // ranks < 8 or np.mean(after) < 1 + np.mean(before) / 5
    )


def packed(corpus, tmp_path, **data) -> RunConfig:
    data = dict(packing="best_fit", reset_attention_mask=True, seq_length=64) | data
    train = dict(train_iters=3, micro_batch_size=2, global_batch_size=16)
    return prepare(configuration(corpus, tmp_path, data=data, train=train), 1).config


def batches_of(config: RunConfig, ranks: int) -> tuple[list[list], list[str]]:
    """Return the micro-batches of all ranks of each step, and the notes."""
    sizes = BatchSizeSchedule.from_config(config.train, data_parallel_size=ranks)
    steps, notes = [[] for _ in range(3)], []
    for rank in range(ranks):
        dp = SimpleNamespace(rank=rank, size=ranks)
        data = Data(config, sizes, 3, build_tokenizer("ByteTokenizer"), dp)
        notes += data.notes
        with data.train_loader(0, 0, torch.device("cpu")) as loader:
            for step in steps:
                step += [next(loader) for _ in range(sizes.micro_batches(0))]
    return steps, notes


def test_a_balanced_step_has_the_samples_and_the_loss_of_the_step_in_order(corpus, tmp_path):
    in_order_steps, _ = batches_of(packed(corpus, tmp_path), 4)
    steps, notes = batches_of(packed(corpus, tmp_path, balance_batches=True), 4)
    [note] = {note for note in notes if "balance" in note}
    told = re.search(r"of 4 data-parallel ranks has ([\d.]+) × the mean work \(([\d.]+) × without bal", note)
    balanced, plain = map(float, told.groups())
    assert 1 <= balanced < plain
    model = parallelize(packed(corpus, tmp_path), Mesh.alone(), torch.device("cpu"))
    moved = 0
    for ours, theirs in zip(steps, in_order_steps):
        numbers = [torch.cat([batch.sample_numbers for batch in step]) for step in (ours, theirs)]
        assert torch.equal(*(each.sort()[0] for each in numbers))
        moved += int((numbers[0] != numbers[1]).sum())
        (loss, tokens), (other_loss, other_tokens) = (
            map(sum, zip(*(model.evaluate([batch]) for batch in step))) for step in (ours, theirs)
        )
        assert tokens == other_tokens and torch.allclose(loss, other_loss, rtol=1e-5)
    assert moved


def test_balancing_other_data_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="needs packed samples whose documents do not attend to each other"):
        packed(corpus, tmp_path, packing="concat", balance_batches=True)


def test_a_schedule_divides_samples_into_shorter_sequences():
    points = [dict(samples=0, seq_length=2), dict(tokens=6.0e1, seq_length=4), dict(samples=20, seq_length=8)]
    rules = BoundaryRules(9, reset_attention_mask=True, length_schedule=LengthSchedule(points, 8))
    samples = np.array([[1, 9, 2, 3, 4, 5, 6, 7, 8]] * 4)
    batch = make_batch(samples, np.array([0, 7, 8, 20]), rules)
    assert batch.position_ids.tolist() == [[0, 1] * 4, [0, 1] * 4, [0, 1, 2, 3] * 2, list(range(8))]
    ends = [sorted(set(row)) for row in batch.document_ends.tolist()]
    assert ends == [[2, 4, 6, 8], [2, 4, 6, 8], [2, 4, 8], [2, 8]]
    assert batch.loss_mask.all() and torch.equal(batch.labels, torch.from_numpy(samples[:, 1:]))
    whole = make_batch(samples[:1], np.array([20]), BoundaryRules(length_schedule=LengthSchedule(points, 8)))
    assert whole.document_ends is None


def test_a_step_of_shorter_sequences_equals_one_on_samples_of_that_length(corpus, tmp_path):
    config = prepare(configuration(corpus, tmp_path, data=dict(seq_length=32)), 1).config
    model = parallelize(config, Mesh.alone(), torch.device("cpu"))
    samples = np.random.default_rng(0).integers(0, 256, (2, 33))
    schedule = LengthSchedule([dict(samples=0, seq_length=8)], 32)
    divided = make_batch(samples, np.arange(2), BoundaryRules(length_schedule=schedule))
    short = np.concatenate([samples[:, start : start + 9] for start in range(0, 32, 8)])
    loss, tokens = model.evaluate([divided])
    other_loss, other_tokens = model.evaluate([make_batch(short, np.arange(8), BoundaryRules())])
    assert tokens == other_tokens == 64 and torch.allclose(loss, other_loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "begin with a point at sample 0"),
        ([dict(samples=4, seq_length=8)], "begin with a point at sample 0"),
        ([dict(samples=0, seq_length=3)], "does not divide data.seq_length 16; choose a divisor"),
        ([dict(samples=0)], "each entry must be"),
        ([dict(samples=0, seq_length=8.5)], "each entry must be"),
    ],
)
def test_a_malformed_schedule_is_refused_before_the_start(corpus, tmp_path, points, message):
    with pytest.raises(ConfigError, match=message):
        prepare(configuration(corpus, tmp_path, data=dict(seq_length_schedule=points)), 1)
