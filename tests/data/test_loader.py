"""The loader: one stream of samples whatever the layout, the workers or the restarts; document ends; errors."""

import itertools
import random
import threading
from dataclasses import fields

import numpy as np
import pytest
import torch

from megalith.data.batch import BoundaryRules, make_batch
from megalith.data.loader import Loader
from megalith.data.mock_datasets import MockDataset
from megalith.data.order import CyclicOrder, SingleOrder, sample_order, skip_range, stream_position
from megalith.errors import ConfigError, DataError
from megalith.ops.documents import document_ids


class Numbered:
    """Sample i is [i, i + 1, i + 2, i + 3]."""

    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, i):
        if i == 66:
            raise DataError("sample 66 is bad: the way out")
        return np.arange(i, i + 4)

    def describe(self, i):
        return f"sample {i} of numbers"


def load(dataset=None, order=None, batch_sizes=None, **options):
    dataset = dataset or Numbered(60)
    options = {"micro_batch_size": 2, "vocab_size": 1000, **options}
    return Loader(
        dataset,
        order or SingleOrder(len(dataset), wrap=True),
        batch_sizes=batch_sizes or itertools.repeat(4),
        **options,
    )


def tensors(batch):
    return [getattr(batch, field.name) for field in fields(batch)]


def test_each_rank_takes_its_part_of_each_sub_block():
    for rank, expected in ((0, [[0, 1], [4, 5], [8, 9]]), (1, [[2, 3], [6, 7], [10, 11]])):
        loader = load(batch_sizes=[8, 4], data_parallel_rank=rank, data_parallel_size=2)
        assert [batch.input_ids[:, 0].tolist() for batch in loader] == expected


def test_a_batch_holds_inputs_labels_and_stream_positions():
    batch = next(load(consumed_samples=3))
    assert batch.input_ids.tolist() == [[3, 4, 5], [4, 5, 6]] and batch.labels.tolist() == [
        [4, 5, 6],
        [5, 6, 7],
    ]
    assert batch.position_ids.tolist() == [[0, 1, 2]] * 2 and batch.loss_mask.tolist() == [[1.0] * 3] * 2
    assert batch.document_ends is None and batch.sample_numbers.tolist() == [3, 4]
    dtypes = [torch.int64, torch.int64, torch.float32, torch.int64, None, torch.int64, None, None, None, None]
    assert [tensor if tensor is None else tensor.dtype for tensor in tensors(batch)] == dtypes


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.fault(11)
def test_restarts_and_changes_of_data_parallel_size_leave_one_stream(kind):
    rng = random.Random(0)
    dataset, seed, total = Numbered(60), 7, 57 if kind == "single" else 250
    expected = [sample_order(kind, 60, seed)(j) for j in range(total)]
    if kind == "cyclic":
        assert sorted(expected[:60]) == sorted(expected[60:120]) == list(range(60))
        assert expected[:60] != expected[60:120]
    for _ in range(20):
        consumed, stream = 0, {}
        while consumed < total:
            size, micro = rng.choice([1, 2, 3, 4]), rng.choice([1, 2])
            batch_size, steps = size * micro * rng.randint(1, 3), rng.randint(1, 4)
            steps = min(steps, (total - consumed) // batch_size)
            if steps == 0:
                size, micro, batch_size, steps = 1, 1, 1, 1
            for rank in range(size):
                loader = load(
                    dataset,
                    sample_order(kind, 60, seed),
                    [batch_size] * steps,
                    micro_batch_size=micro,
                    data_parallel_rank=rank,
                    data_parallel_size=size,
                    consumed_samples=consumed,
                )
                for batch in loader:
                    for position, index in zip(batch.sample_numbers.tolist(), batch.input_ids[:, 0].tolist()):
                        assert position not in stream
                        stream[position] = index
            consumed += batch_size * steps
        assert [stream[j] for j in range(total)] == expected


def test_a_batch_size_ramp_shifts_steps_but_not_the_stream():
    batches = list(load(batch_sizes=[2, 4, 6]))
    assert [i for batch in batches for i in batch.input_ids[:, 0].tolist()] == list(range(12))


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_nothing(workers):
    rules = BoundaryRules(0, True, True, True)
    dataset = MockDataset(50, 16, 40, seed=1, eod=0)
    order = CyclicOrder(40, seed=3)
    options = {"batch_sizes": [4] * 15, "rules": rules, "vocab_size": 50}
    with load(dataset, order, num_workers=workers, **options) as loader:
        got = list(loader)
    expected = list(load(dataset, CyclicOrder(40, seed=3), **options))
    assert len(got) == len(expected) == 30
    for a, b in zip(got, expected):
        assert all(x is y or torch.equal(x, y) for x, y in zip(tensors(a), tensors(b)))


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_draws_from_no_global_random_state(workers):
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with load(MockDataset(50, 16, 40, 1), CyclicOrder(40, 3), num_workers=workers) as loader:
        for _ in range(4):
            next(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1]) and random.getstate() == before[2]


def test_closing_leaves_no_worker_behind():
    before = threading.active_count()
    loader = load(num_workers=2)
    next(loader)
    assert threading.active_count() > before
    loader.close()
    assert threading.active_count() == before
    assert list(loader) == []


def test_threads_are_at_most_so_far_ahead():
    class Counted(Numbered):
        read = 0

        def __getitem__(self, i):
            self.read += 1
            return super().__getitem__(i)

    dataset = Counted(60)
    with load(dataset, num_workers=1, ahead=3) as loader:
        next(loader)
    assert dataset.read in (2, 4, 6)  # samples of 1 to 3 micro-batches: closing lets none begin


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_arrives_as_it_was_raised_after_the_good_batches(workers):
    with load(Numbered(80), batch_sizes=[4] * 20, num_workers=workers) as loader:
        for _ in range(33):
            next(loader)
        with pytest.raises(DataError) as caught:
            next(loader)
        assert list(loader) == []
    assert str(caught.value) == "sample 66 is bad: the way out"


@pytest.mark.parametrize("workers", [0, 2])
def test_single_ends_with_an_error_after_every_sample_was_given(workers):
    loader = load(Numbered(10), sample_order("single", 10, 0), num_workers=workers, micro_batch_size=4)
    assert [next(loader).sample_numbers.tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataError, match="consumed 10 samples, but the dataset has 10"):
        next(loader)


def test_a_wrapping_pass_begins_again():
    order = SingleOrder(5, wrap=True)
    assert [order(j) for j in range(12)] == [0, 1, 2, 3, 4] * 2 + [0, 1]


def test_an_order_needs_samples_and_a_known_name():
    with pytest.raises(DataError, match="no samples"):
        sample_order("cyclic", 0, 1)
    with pytest.raises(ConfigError, match="'random' is unknown"):
        sample_order("random", 5, 1)


@pytest.mark.parametrize("token", [-1, 64])
def test_a_token_outside_the_vocabulary_is_named(token):
    class Bad(Numbered):
        def __getitem__(self, i):
            return np.array([1, 2, token if i == 3 else 3, 4])

    loader = load(Bad(10), vocab_size=64)
    next(loader)
    with pytest.raises(DataError, match=f"sample 3 of numbers has token id {token} at position 2.* 64"):
        next(loader)


def test_a_batch_that_the_ranks_cannot_share_is_refused():
    message = r"global_batch_size 6 .*micro_batch_size \(2\) × data-parallel size \(2\) = 4"
    with pytest.raises(ConfigError, match=message):
        next(load(batch_sizes=[6], data_parallel_size=2))


def test_document_ends_follow_megatrons_rules():
    samples = np.array([[5, 0, 7, 8, 0, 0, 4, 9], [1, 2, 3, 4, 5, 6, 7, 0]])
    numbers = np.array([0, 1])
    batch = make_batch(samples, numbers, BoundaryRules(0, True, True, True))
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6]]
    assert batch.document_ends.tolist() == [[2, 5, 6, 7, 7, 7, 7, 7], [7] * 8]
    assert batch.document_ends.dtype == torch.int32
    assert batch.loss_mask.tolist() == [[1, 0, 1, 1, 0, 0, 1], [1] * 7]
    alone = make_batch(samples[1:], numbers[1:], BoundaryRules(0, True, True, True))
    assert alone.document_ends is None  # so that attention need not look for other documents
    plain = make_batch(samples, numbers, BoundaryRules(0))
    assert plain.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6]] * 2
    assert plain.document_ends is None and plain.loss_mask.min() == 1


def test_document_ends_equal_a_token_by_token_walk():
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 4, (40, 33))
    batch = make_batch(samples, np.arange(40), BoundaryRules(0, True, True, True))
    numbers = document_ids(batch.document_ends, 32)
    for row in range(40):
        position = document = 0
        for i in range(32):
            assert batch.position_ids[row, i] == position and numbers[row, i] == document
            assert batch.loss_mask[row, i] == (samples[row, i] != 0)
            position += 1
            if samples[row, i] == 0:
                position, document = 0, document + 1


@pytest.mark.parametrize("rule", ["reset_position_ids", "reset_attention_mask", "eod_mask_loss"])
def test_a_boundary_rule_without_an_end_token_is_refused(rule):
    with pytest.raises(ConfigError, match=rule):
        BoundaryRules(None, **{rule: True})


def test_a_batch_moves_whole():
    batch = next(load(rules=BoundaryRules(0, reset_attention_mask=True))).to("meta")
    assert all(tensor.device.type == "meta" for tensor in tensors(batch) if tensor is not None)


def test_mock_samples_are_the_same_for_ever_and_end_their_documents():
    dataset = MockDataset(vocab_size=64, seq_length=128, num_samples=20, seed=3, eod=10)
    again = MockDataset(vocab_size=64, seq_length=128, num_samples=20, seed=3, eod=10)
    samples = np.stack([dataset[i] for i in range(20)])
    assert samples.shape == (20, 129) and samples.dtype == np.int64
    assert samples.min() >= 0 and samples.max() < 64
    assert np.array_equal(samples, np.stack([again[i] for i in reversed(range(20))])[::-1])
    lengths = np.diff(np.flatnonzero(samples.reshape(-1) == 10))
    assert 20 < np.count_nonzero(samples == 10) < 200 and len(set(lengths.tolist())) > 10
    assert not np.array_equal(samples[0], samples[1])
    with pytest.raises(IndexError):
        dataset[20]


def test_what_was_left_out_is_stepped_over_from_its_first_position_on():
    assert [stream_position(consumed, [[0, 3]]) for consumed in (0, 1)] == [3, 4]
    assert [stream_position(consumed, [[4, 6]]) for consumed in (3, 4, 5)] == [3, 6, 7]
    apart = [[2, 3], [4, 6], [9, 10]]
    assert [stream_position(consumed, apart) for consumed in range(8)] == [0, 1, 3, 6, 7, 8, 10, 11]
    assert skip_range([[2, 4]], 1, 2) == [[1, 2], [2, 4]] and skip_range([[2, 4]], 1, 3) == [[1, 5]]
    assert skip_range([[2, 4]], 2, 3) == [[2, 4], [4, 5]]  # what the run takes next stands right behind
