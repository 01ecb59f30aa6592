"""Documents packed by best fit: none is cut that fits into a sample, and padding has no loss."""

import json
from bisect import bisect_left

import numpy as np
import pytest
import torch

from megalith.cli.main import main
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_training
from megalith.config.train import BatchSizeSchedule
from megalith.data.batch import PADDING, BoundaryRules, make_batch
from megalith.data.best_fit import pack
from megalith.data.blend import BlendedDataset
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.packed_dataset import PackedDataset, divide
from megalith.errors import ConfigError, DataError
from megalith.training.run_datasets import Data

EOD, SEQ = 0, 31


def one_by_one(lengths, capacity):
    """Best fit of one piece after another; among rows with equal room the one that has it most recently."""
    rows, rooms = [], []  # rooms: [free tokens, rows], ascending
    for length in lengths:
        at = bisect_left(rooms, [length, []])
        row, free = (
            (rooms[at][1].pop(), rooms[at][0]) if at < len(rooms) else (max(rows, default=-1) + 1, capacity)
        )
        rooms = [room for room in rooms if room[1]]
        rows.append(row)
        for room in rooms:
            if room[0] == free - length:
                room[1].append(row)
                break
        else:
            rooms = sorted([*rooms, [free - length, [row]]])
    return rows


@pytest.mark.parametrize("seed", range(6))
def test_pieces_are_placed_as_one_by_one(seed):
    rng = np.random.default_rng(seed)
    capacity = int(rng.integers(1, 40))
    lengths = -np.sort(-np.minimum(rng.geometric(0.1, 150), capacity))
    rows, count = pack(lengths, capacity)
    assert rows.tolist() == one_by_one(lengths.tolist(), capacity) and count == rows.max() + 1
    assert np.bincount(rows, lengths).max() <= capacity
    assert pack(lengths[:0], capacity)[1] == 0


def test_long_documents_are_divided_with_an_overlap_of_one_token():
    documents, starts, lengths = divide(np.array([0, 1, 5, 6, 9, 10], np.int32), 4)
    pieces = list(zip(documents.tolist(), starts.tolist(), lengths.tolist()))
    assert pieces == [(1, 0, 1), (2, 0, 5), (3, 0, 5), (3, 4, 2), (4, 0, 5), (4, 4, 5),
                      (5, 0, 5), (5, 4, 5), (5, 8, 2)]  # fmt: skip


def write(folder, name, lengths, first=1):
    """Documents of tokens that no other has, with EOD at the end."""
    with IndexedWriter(folder / name, np.int32) as writer:
        for length in lengths:
            writer.add_document(np.append(np.arange(first, first + length - 1), EOD))
            first += length
    return str(folder / name)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    lengths = np.random.default_rng(1).integers(2, 60, 80)
    return write(tmp_path_factory.mktemp("packed"), "a", lengths)


def test_each_epoch_has_each_label_once_and_cuts_only_documents_that_do_not_fit(prefix):
    indexed = IndexedDataset(prefix)
    dataset = PackedDataset(indexed, 10, 80, SEQ, 100, seed=5)
    per_epoch = dataset.samples_per_epoch
    assert len(dataset) == per_epoch * -(-100 // per_epoch) and dataset.epochs() == {
        prefix: len(dataset) // per_epoch
    }
    expected = [indexed.get(d) for d in range(10, 80)]
    labels = sorted(t for document in expected for t in document[1:].tolist() if t != EOD)
    orders = []
    for epoch in range(len(dataset) // per_epoch):
        samples = [dataset[epoch * per_epoch + at] for at in range(per_epoch)]
        rows = np.stack(samples)
        follows = (rows[:, 1:] == rows[:, :-1] + 1) & (rows[:, :-1] > 0)
        assert sorted(rows[:, 1:][follows].tolist()) == labels
        whole = [d for d in expected if len(d) <= SEQ + 1]
        texts = [" ".join(map(str, row.tolist())) + " " for row in samples]
        assert all(
            sum(" ".join(map(str, d.tolist())) + " " in text for text in texts) == 1 for d in whole[:20]
        )
        is_padding = rows == PADDING
        assert (np.diff(is_padding.astype(int), axis=1) >= 0).all()
        assert dataset.fill == pytest.approx(1 - is_padding.mean())
        orders.append(rows.tolist())
    assert orders[0] != orders[1] and sorted(map(sorted, orders[0])) != sorted(map(sorted, orders[1]))
    again, longer = (PackedDataset(indexed, 10, 80, SEQ, n, seed=5) for n in (100, 300))
    for other in (again, longer):
        assert all(np.array_equal(dataset[i], other[i]) for i in range(len(dataset)))
    assert dataset.preserves_order(300) and not dataset.preserves_order(300, permuted=True)
    assert dataset.cut_documents == sum(len(d) > SEQ + 1 for d in expected)


def test_padding_has_no_loss_and_ends_no_document():
    samples = np.array([[5, 6, EOD, 7, PADDING, PADDING], [1, 2, 3, 4, 8, 9]])
    rules = BoundaryRules(EOD, reset_position_ids=True, reset_attention_mask=True)
    batch = make_batch(samples, np.arange(2), rules)
    assert batch.loss_mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch.input_ids.tolist() == [[5, 6, EOD, 7, EOD], [1, 2, 3, 4, 8]]
    assert batch.labels.min() >= 0 and batch.position_ids[0].tolist() == [0, 1, 2, 0, 1]
    assert batch.document_ends[0, :2].tolist() == [3, 5]


def run_config(folder, prefix, **data):
    tree = {
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 6000},
        "data": {"data_path": prefix, "split": "90,10", "seq_length": SEQ, "packing": "best_fit"} | data,
        "train": {
            "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 20, "eval_iters": 1,
            "output_dir": str(folder / "run"),
        },
        "optim": {"lr": 1e-3},
    }  # fmt: skip
    return RunConfig.from_tree(tree)


@pytest.mark.parametrize("order", ["cyclic", "single"])
def test_ranks_and_resumed_runs_read_the_same_rows(prefix, tmp_path, order):
    other = write(tmp_path, "b", [40, 7, 9] * 20, first=3000)
    config = run_config(tmp_path, [0.75, prefix, 0.25, other], dataloader_type=order)

    def read(axis, step):
        data = Data(config, BatchSizeSchedule(4, 2, 1), 20, None, axis)
        assert isinstance(data.train, BlendedDataset)
        with data.train_loader(step, 4 * step, torch.device("cpu")) as loader:
            return {
                int(n): (row.tolist(), mask.tolist())
                for batch in loader
                for n, row, mask in zip(batch.sample_numbers, batch.input_ids, batch.loss_mask)
            }

    whole = read(Axis(), 0)
    resumed = read(Axis(size=2, rank=0), 7) | read(Axis(size=2, rank=1), 7)
    assert resumed == {n: row for n, row in whole.items() if n >= 28}
    assert any(0 in mask for _, mask in whole.values())


def test_statistics_and_plan_count_rows_and_cut_documents(prefix, tmp_path, capsys):
    path = tmp_path / "run.yaml"
    config = run_config(tmp_path, [{"path": prefix, "max_epochs": 2}])
    path.write_text(json.dumps(config.model_dump(exclude_unset=True)))
    assert main(["data", "stats", "--config", str(path), "--json"]) == 0
    source = json.loads(capsys.readouterr().out)["train"]["sources"][prefix]
    indexed = IndexedDataset(prefix)
    dataset = PackedDataset(indexed, 0, 72, SEQ, 80, seed=config.train.seed)
    assert (source["rows"], source["packing"]) == (dataset.samples_per_epoch, dataset.fill)
    assert source["cut_documents"] == dataset.cut_documents / 72
    assert main(["data", "stats", "--config", str(path)]) == 0
    assert "samples per epoch" in capsys.readouterr().out
    assert main(["data", "plan", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["sources"][0]["epochs"] == pytest.approx(80 / dataset.samples_per_epoch)
    capped = run_config(tmp_path, [{"path": prefix, "max_epochs": 1}])
    with pytest.raises(ConfigError, match=f"takes 80 samples, but .* permit {dataset.samples_per_epoch};"):
        Data(capped, BatchSizeSchedule(4, 2, 1), 20, None, Axis())


def test_what_cannot_be_packed_is_refused(prefix, tmp_path):
    for data, message in (
        ({"fim_data": True}, "leave one of the two settings out"),
        ({"data_path": None, "mock": True}, r"leave data\.mock out, or data\.packing"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_training(run_config(tmp_path, prefix, **data))
    with pytest.raises(DataError, match="has no document with tokens"):
        PackedDataset(IndexedDataset(prefix), 5, 5, SEQ, 1, seed=1)
