"""`megalith data show` reads exactly what training would read."""

import numpy as np
import pytest
import torch

from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.dataset import GPTDataset
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.show import render_samples, show_samples
from megalith.errors import ConfigError, DataError
from megalith.training.build import Data


@pytest.fixture
def prefix(tmp_path):
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        for d in range(50):
            writer.add_document(np.arange(20) + d)
    return str(tmp_path / "a")


def test_samples_shown_are_the_datasets(prefix):
    dataset = GPTDataset(IndexedDataset(prefix), 40, 50, 16, 9, seed=3)
    shown = show_samples([prefix], 16, 3, 9, "80,20", "valid", [0, 8, 0])
    assert shown == [{"index": i, "tokens": dataset[i].tolist()} for i in (0, 8, 0)]
    blend = show_samples([0.5, prefix, 0.5, prefix], 16, 3, 9, "1", "train", [2])
    assert len(blend[0]["tokens"]) == 17 and isinstance(blend[0]["tokens"][0], int)


def test_an_index_out_of_range_is_refused(prefix):
    for index in (-1, 62):  # 50 documents of 20 tokens
        with pytest.raises(DataError, match=f"sample {index} is not one of the 62 train samples"):
            show_samples(prefix, 16, 3, 9, "1", "train", [index])
    assert show_samples(prefix, 16, 3, 9, "1", "train", [61])[0]["index"] == 61
    with pytest.raises(DataError, match="position -1 is before the first"):
        show_samples(prefix, 16, 3, 9, "1", "train", positions=[-1])


@pytest.mark.parametrize("kind", ["cyclic", "single"])
def test_samples_by_position_are_those_that_a_run_reads(prefix, kind):
    tree = {
        "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 99},
        "data": {"data_path": prefix, "split": "80,20", "seq_length": 16, "dataloader_type": kind},
        "train": {"seed": 3, "global_batch_size": 4, "train_iters": 20, "eval_iters": 1},
    }
    config, consumed = RunConfig.from_tree(tree), 80  # twice over the data
    data = Data(config, BatchSizeSchedule(4, 4, 1), 20, None, Axis(1))
    with data.train_loader(0, 0, torch.device("cpu")) as loader:
        batches = [torch.cat([batch.input_ids, batch.labels[:, -1:]], 1) for batch in loader]
    asked = (prefix, 16, 3, consumed, "80,20")
    shown = show_samples(*asked, "train", positions=range(consumed), dataloader_type=kind)
    assert [sample["tokens"] for sample in shown] == torch.cat(batches).tolist()
    assert [sample["position"] for sample in shown] == [*range(consumed)]
    with data.evaluation_loader(data.valid, torch.device("cpu")) as loader:
        read = [row for batch in loader for row in batch.input_ids.tolist()]
    shown = show_samples(prefix, 16, 3, 4, "80,20", "valid", positions=range(len(read)))
    assert [sample["tokens"][:-1] for sample in shown] == read


def test_bad_arguments_are_refused(prefix):
    with pytest.raises(ConfigError, match="'dev' is not known"):
        show_samples(prefix, 16, 3, 9, "1", "dev", [0])
    with pytest.raises(ConfigError, match="at least 1"):
        show_samples(prefix, 16, 3, 0, "1", "train", [0])


def test_text_has_the_ids_and_what_they_say():
    samples = [{"index": 4, "tokens": [1, 22]}]
    assert render_samples(samples) == "sample 4 (2 tokens)\n1 22\n"
    assert render_samples([{**samples[0], "position": 7}]).startswith("position 7, sample 4 (2 tokens)")
    assert "one two" in render_samples(samples, lambda ids: "one two")
