"""GPTDataset against a plain transcription of Megatron's algorithm: build the indices, walk, back up one token."""

import random

import numpy as np
import pytest

from megalith.data import dataset as dataset_module
from megalith.data import idx_format
from megalith.data.dataset import GPTDataset, epoch_plan, parse_split, split_ranges
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.errors import ConfigError, DataError
from megalith.progress import Progress


def write(folder, documents, name="d"):
    with IndexedWriter(folder / name, np.int32, overwrite=True) as writer:
        for document in documents:
            writer.add_document(np.array(document, np.int32))
    return IndexedDataset(folder / name)


def random_documents(rng, count, longest):
    token = iter(range(10**6))  # every token is different, so that equality leaves no doubt
    lengths = [rng.choice([0, 1, rng.randint(0, longest), rng.randint(0, longest)]) for _ in range(count)]
    return [[next(token) for _ in range(length)] for length in lengths]


def transcription(documents, first, last, seq_length, num_samples, seed):
    """Every sample, in order, and the number of epochs and whether the last was shuffled alone."""
    tokens = sum(len(documents[d]) for d in range(first, last))
    epochs = 1
    while (epochs * tokens - 1) // seq_length < num_samples:
        epochs += 1
    separate = False
    if epochs > 1:
        sans = ((epochs - 1) * tokens - 1) // seq_length
        separate = num_samples - sans < int(0.8 * ((tokens - 1) // seq_length))
    rng = np.random.RandomState(seed)

    def document_index(times):
        index = np.array([d for _ in range(times) for d in range(first, last)], dtype=np.int32)
        rng.shuffle(index)
        return index.tolist()

    index = document_index(epochs - 1) + document_index(1) if separate else document_index(epochs)

    at, offset, starts = 0, 0, [(0, 0)]
    for _ in range((epochs * tokens - 1) // seq_length):
        remaining = seq_length + 1
        while remaining > 0:
            length = len(documents[index[at]]) - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
            else:
                at, offset = at + 1, 0
        starts.append((at, offset))

    total = len(starts) - 1
    bounds = [(0, sans), (sans, total)] if separate else [(0, total)]
    order = []
    for low, high in bounds:
        part = np.arange(low, high, dtype=np.uint32)
        rng.shuffle(part)
        order += part.tolist()

    samples = []
    for j in order:
        (a, from_), (b, to) = starts[j], starts[j + 1]
        if a == b:
            samples.append(documents[index[a]][from_ : to + 1])
        else:
            middle = [t for k in range(a + 1, b) for t in documents[index[k]]]
            samples.append(documents[index[a]][from_:] + middle + documents[index[b]][: to + 1])
    return samples, epochs, separate


def assert_equal_to_transcription(folder, documents, first, last, seq_length, num_samples, seed):
    expected, epochs, separate = transcription(documents, first, last, seq_length, num_samples, seed)
    dataset = GPTDataset(write(folder, documents), first, last, seq_length, num_samples, seed)
    assert len(dataset) == len(expected) >= num_samples
    for i, sample in enumerate(expected):
        assert dataset[i].dtype == np.int64 and dataset[i].tolist() == sample
    return epochs, separate


def test_random_datasets_give_megatrons_samples_token_for_token(tmp_path):
    rng, seen, cases = random.Random(1), set(), 0
    while cases < 120:
        documents = random_documents(rng, rng.randint(1, 150), rng.choice([1, 5, 40]))
        first = rng.randint(0, len(documents) - 1)
        last = rng.randint(first + 1, len(documents))
        seq_length = rng.choice([1, 2, 7, 16])
        tokens = sum(map(len, documents[first:last]))
        if tokens <= seq_length:
            continue
        num_samples = rng.randint(1, max(1, 3 * tokens // seq_length))
        seed = rng.randint(0, 2**32 - 1)
        epochs, separate = assert_equal_to_transcription(
            tmp_path, documents, first, last, seq_length, num_samples, seed
        )
        seen.add((min(epochs, 2), separate))
        cases += 1
    assert seen == {(1, False), (2, False), (2, True)}


def test_runs_of_empty_documents_longer_than_a_block_change_nothing(tmp_path):
    empty = [[]] * (2 * dataset_module.BLOCK + 3)
    documents = [*empty, [1, 2, 3], *empty, [4, 5, 6, 7], *empty]
    assert_equal_to_transcription(tmp_path, documents, 0, len(documents), 2, 8, seed=3)


def test_cumulative_sums_built_in_several_chunks_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(idx_format, "CHUNK", 2 * dataset_module.BLOCK)
    documents = random_documents(random.Random(2), 1000, 9)
    assert_equal_to_transcription(tmp_path, documents, 0, 1000, 16, 100, seed=5)


def test_every_split_holds_its_own_documents_only(tmp_path):
    documents = [[100 * d + k for k in range(10)] for d in range(50)]
    indexed = write(tmp_path, documents)
    for first, last in split_ranges("80,15,5", 50):
        dataset = GPTDataset(indexed, first, last, 4, 3, seed=0)
        assert {int(t) // 100 for i in range(len(dataset)) for t in dataset[i]} <= set(range(first, last))


def test_split_bounds_are_rounded_shares():
    assert split_ranges("969,30,1", 1000) == [(0, 969), (969, 999), (999, 1000)]
    assert split_ranges("99,1,0", 50) == [(0, 50), (50, 50), (50, 50)]  # round(49.5) is 50, half to even
    assert split_ranges("1,1,1", 10) == [(0, 3), (3, 7), (7, 10)]
    assert split_ranges("1", 7) == [(0, 7), (7, 7), (7, 7)]
    assert parse_split("0.5, 0.5") == (0.0, 0.5, 1.0, 1.0)


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "-1,2", "0,0,0", "nan,1", "1,,2"])
def test_a_split_that_is_no_split_is_refused(split):
    with pytest.raises(ConfigError, match="split"):
        parse_split(split)


def test_the_last_epoch_is_alone_when_little_of_it_is_used():
    assert epoch_plan(tokens=101, seq_length=10, num_samples=10) == (1, None)
    assert epoch_plan(tokens=101, seq_length=10, num_samples=11) == (2, 10)
    assert epoch_plan(tokens=101, seq_length=10, num_samples=18) == (2, None)


@pytest.mark.parametrize("first, last, documents", [(0, 0, 0), (3, 3, 0), (0, 2, 2), (1, 2, 1)])
def test_too_few_tokens_for_one_sample_is_an_error_not_a_loop(tmp_path, first, last, documents):
    indexed = write(tmp_path, [[1, 2], [], [3] * 90])
    with pytest.raises(DataError, match=f"{documents} documents .* tokens .*seq_length \\+ 1 = 5"):
        GPTDataset(indexed, first, last, 4, 10, seed=0)


@pytest.mark.parametrize("num_samples", [20, 118, 300])  # of one epoch, a last one alone, and all together
def test_the_progress_of_opening_ends_at_the_samples_that_were_asked_for(tmp_path, num_samples):
    indexed = write(tmp_path, random_documents(random.Random(5), 40, 30))
    with Progress("order the samples", num_samples, "samples", show=False) as progress:
        GPTDataset(indexed, 0, 40, 8, num_samples, seed=3, progress=progress)
    assert progress.done == pytest.approx(num_samples)


def test_an_index_outside_is_an_index_error(tmp_path):
    dataset = GPTDataset(write(tmp_path, [[1] * 9]), 0, 1, 4, 2, seed=0)
    for i in (-1, len(dataset)):
        with pytest.raises(IndexError):
            dataset[i]


def test_a_dataset_knows_for_which_other_lengths_it_would_have_the_same_order(tmp_path):
    indexed = write(tmp_path, random_documents(random.Random(5), 40, 30))
    counts = [1, 20, 40, 41, 60, 75, 79, 80, 100, 118, 120, 300]
    made = [GPTDataset(indexed, 0, 40, 8, count, seed=3) for count in counts]
    known = set()
    for one in made:
        for count, other in zip(counts, made):
            both = min(len(one), len(other))
            alike = all(one[i].tolist() == other[i].tolist() for i in range(both))
            assert one.preserves_order(count) == alike
            known.add(alike)
    assert known == {True, False}


def test_a_dataset_tells_how_often_it_goes_over_its_documents(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_document(np.arange(41))
    dataset = IndexedDataset(tmp_path / "a")
    assert [GPTDataset(dataset, 0, 1, 4, n, 1).epochs() for n in (10, 11)] == [
        {dataset.prefix: 1},
        {dataset.prefix: 2},
    ]
