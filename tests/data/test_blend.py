"""Blends: the order is the greedy rule's, choice by choice, and every way of writing data_path means one thing."""

import math
import random

import numpy as np
import pytest
from default_cases import in_full

from megalith.data import greedy
from megalith.data.blend import BlendedDataset, build_datasets, parse_data_path
from megalith.data.dataset import GPTDataset
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.mixture import normalize, samples_for_weight
from megalith.errors import ConfigError, DataError


def greedy_loop(weights, num_samples):
    counts, choices = [0] * len(weights), []
    for n in range(num_samples):
        behind = [w * max(float(n), 1.0) - c for w, c in zip(weights, counts)]
        choices.append(behind.index(max(behind)))
        counts[choices[-1]] += 1
    return choices


class Numbered:
    """Sample i of dataset `name` is [name, i]."""

    def __init__(self, name, num_samples=10**9):
        self.name, self.num_samples = name, num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, i):
        assert 0 <= i < self.num_samples
        return np.array([self.name, i])

    def epochs(self):
        return {}

    def describe(self, i):
        return f"sample {i} of dataset {self.name}"


def write(folder, name, documents, length=20):
    with IndexedWriter(folder / name, np.uint16) as writer:
        for d in range(documents):
            writer.add_document(np.arange(length) + 1000 * ord(name[0]) % 60_000 + d)
    return str(folder / name)


@pytest.mark.parametrize(
    "block, warm_up", [in_full(4096, 8), (64, 0), in_full(64, 1), (64, 8), in_full(50, 100)]
)
def test_order_equals_the_plain_loop_for_any_block_and_guess(monkeypatch, block, warm_up):
    monkeypatch.setattr(greedy, "BLOCK", block)
    monkeypatch.setattr(greedy, "WARM_UP", warm_up)
    rng = random.Random(0)
    for datasets in (1, 2, 2, 3, 3, 5, 5, 12, 40):
        kind = rng.choice([lambda: rng.random(), lambda: rng.randint(1, 5), lambda: rng.random() ** 6 + 1e-9])
        weights = normalize([kind() for _ in range(datasets)])
        for num_samples in (1, 63, 64, 65, 3000):
            choices, counts = greedy.greedy_order(weights, num_samples)
            expected = greedy_loop(weights.tolist(), num_samples)
            assert choices.tolist() == expected
            for k, start in enumerate(range(0, num_samples, block)):
                assert counts[k].tolist() == [expected[:start].count(i) for i in range(datasets)]


def test_more_than_256_datasets_keep_their_numbers():
    choices, _ = greedy.greedy_order(normalize([1.0] * 300), 600)
    assert sorted(choices.tolist()) == sorted([*range(300)] * 2)


def test_a_blend_takes_each_datasets_samples_once_and_in_order(monkeypatch):
    monkeypatch.setattr(greedy, "BLOCK", 64)
    monkeypatch.setattr("megalith.data.blended_dataset.BLOCK", 64)
    blend = BlendedDataset([Numbered(k) for k in range(3)], [5, 3, 2], 1000)
    taken = [blend[i].tolist() for i in range(len(blend))]
    for k, share in enumerate((500, 300, 200)):
        assert [i for name, i in taken if name == k] == list(range(share))
    assert blend.describe(0) == "sample 0 of dataset 0"
    for i in (-1, 1000):
        with pytest.raises(IndexError):
            blend[i]


def test_no_blend_asks_a_dataset_for_more_than_it_is_built_for():
    rng = random.Random(0)
    for _ in range(200):
        weights = normalize([rng.random() ** 3 + 1e-6 for _ in range(rng.randint(1, 6))])
        num_samples = rng.randint(1, 400)
        choices, _ = greedy.greedy_order(weights, num_samples)
        for k, weight in enumerate(weights.tolist()):
            asked = math.ceil(math.ceil(num_samples * weight) * 1.005)
            assert np.count_nonzero(choices == k) <= asked == samples_for_weight(weight, num_samples)


@pytest.mark.parametrize(
    "data_path, expected",
    [
        ("a", (["a"], None)),
        (["a"], (["a"], None)),
        ("a b  c", (["a", "b", "c"], None)),
        ("a b", (["a", "b"], None)),
        ("0.7 a 0.3 b", (["a", "b"], [0.7, 0.3])),
        ([0.7, "a", 0.3, "b"], (["a", "b"], [0.7, 0.3])),
        (["7", "a", 3, "b c"], (["a", "b c"], [7.0, 3.0])),
        ([{"path": "a", "weight": 0.7}, {"path": "b", "weight": 1}], (["a", "b"], [0.7, 1.0])),
        ([{"path": "a"}, {"path": "b"}], (["a", "b"], None)),
    ],
)
def test_data_path_forms(data_path, expected):
    assert parse_data_path(data_path) == expected


@pytest.mark.parametrize(
    "data_path",
    [
        "",
        [],
        "0.7",
        "0.7 a b",
        "0.7 a 0.3",
        "a 0.7",
        "0.7 a b 0.3",
        "0 a 1 b",
        "-1 a 1 b",
        "nan a 1 b",
        "inf a 1 b",
        [{"path": "a", "weight": 1}, {"path": "b"}],
        [{"path": "a", "wieght": 1}],
        [{"path": "a"}, "b"],
        [{"path": "a", "weight": "much"}],
    ],
)
def test_malformed_data_paths_are_refused(data_path):
    with pytest.raises(ConfigError, match="data_path"):
        parse_data_path(data_path)


def test_a_path_with_spaces_that_exists_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my file.jsonl", "my data.idx", "a"):
        (tmp_path / name).touch()
    for path in ("my file.jsonl", "my data"):
        assert parse_data_path(path) == ([path], None)
    assert parse_data_path("a my") == (["a", "my"], None)
    assert parse_data_path("0.5 a 0.5 b") == (["a", "b"], [0.5, 0.5])


def test_three_splits_of_one_path_are_the_three_datasets(tmp_path):
    path = write(tmp_path, "a", 100)
    train, valid, test = build_datasets(path, "80,20,0", 16, (30, 5, 0), seed=4)
    indexed = IndexedDataset(path)
    assert test is None
    for dataset, (first, last), n in ((train, (0, 80), 30), (valid, (80, 100), 5)):
        alone = GPTDataset(indexed, first, last, 16, n, seed=4)
        assert [s.tolist() for s in (dataset[i] for i in range(n))] == [alone[i].tolist() for i in range(n)]


def test_a_weighted_path_is_a_blend_of_the_datasets_built_for_their_shares(tmp_path):
    a, b = write(tmp_path, "a", 50), write(tmp_path, "b", 50)
    train, _, _ = build_datasets(f"3 {a} 1 {b}", "1", 16, (40, 0, 0), seed=1)
    alone = [
        GPTDataset(IndexedDataset(a), 0, 50, 16, math.ceil(30 * 1.005), seed=1),
        GPTDataset(IndexedDataset(b), 0, 50, 16, math.ceil(10 * 1.005), seed=1),
    ]
    taken = [0, 0]
    for i, choice in enumerate(greedy_loop([0.75, 0.25], 40)):
        assert train[i].tolist() == alone[choice][taken[choice]].tolist()
        taken[choice] += 1


def test_paths_without_weights_are_read_for_one_epoch_in_proportion_to_their_samples(tmp_path):
    paths = [write(tmp_path, "a", 30), write(tmp_path, "b", 10, length=49)]
    counts = [599 // 8, 489 // 8]
    alone = [
        GPTDataset(IndexedDataset(path), 0, documents, 8, count, seed=1)
        for path, documents, count in zip(paths, (30, 10), counts)
    ]
    order = greedy_loop([count / sum(counts) for count in counts], sum(counts))
    samples = [[dataset[i].tolist() for i in range(count)] for dataset, count in zip(alone, counts)]
    expected = [samples[choice][order[:i].count(choice)] for i, choice in enumerate(order)]
    for taken in (20, sum(counts)):
        blend, _, _ = build_datasets(" ".join(paths), "1", 8, (taken, 0, 0), seed=1)
        assert [blend[i].tolist() for i in range(taken)] == expected[:taken]
    longer, _, _ = build_datasets(" ".join(paths), "1", 8, (sum(counts) + 1, 0, 0), seed=1)
    assert len(longer) == sum(counts) + 1 and not blend.preserves_order(len(longer))


def test_the_weights_of_a_split_are_its_own_samples(tmp_path):
    sizes = [[20] * 8 + [40] * 2, [20] * 10]
    for name, lengths in zip("ab", sizes):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            for length in lengths:
                writer.add_document(np.arange(length) + 100 * ord(name))
    valid = build_datasets(f"{tmp_path}/a {tmp_path}/b", "80,20,0", 9, (0, 12, 0), seed=1)[1]
    assert valid.sample_counts() == [8, 4]


def test_each_split_may_have_a_path_of_its_own(tmp_path):
    a, b = write(tmp_path, "a", 30), write(tmp_path, "b", 10)
    train, valid, test = build_datasets(
        None, "99,1,0", 8, (10, 3, 0), 1, train_data_path=a, valid_data_path=[b]
    )
    assert train.indexed.prefix == a and valid.indexed.prefix == b and test is None
    with pytest.raises(ConfigError, match="test_data_path"):
        build_datasets(None, "1", 8, (1, 0, 1), 1, train_data_path=a)
    with pytest.raises(ConfigError, match="both set"):
        build_datasets(a, "1", 8, (1, 0, 0), 1, train_data_path=a)
    with pytest.raises(ConfigError, match="no data"):
        build_datasets(None, "1", 8, (1, 0, 0), 1)


def test_a_split_that_is_needed_but_empty_is_named(tmp_path):
    path = write(tmp_path, "a", 10)
    assert build_datasets(path, "99,1,0", 8, (5, 0, 0), 1)[1] is None
    with pytest.raises(DataError, match=r"valid data \(split 99,1,0\): .* 0 documents"):
        build_datasets(path, "99,1,0", 8, (5, 1, 0), 1)


def test_a_blend_keeps_its_order_while_no_part_takes_more_epochs(tmp_path):
    path = f"3 {write(tmp_path, 'a', 50)} 1 {write(tmp_path, 'b', 50)}"
    blends = {count: build_datasets(path, "1", 16, (count, 0, 0), seed=1)[0] for count in (20, 40, 60, 200)}
    for count, blend in blends.items():
        alike = all(blend[i].tolist() == blends[40][i].tolist() for i in range(min(count, 40)))
        assert blends[40].preserves_order(count) == alike == (count < 200)
        assert blends[40].preserves_order(count, permuted=True) == (count == 40)
