"""`megalith data show` reads exactly what training would read."""

import json

import numpy as np
import pytest
import torch

from megalith.cli.main import main
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.train import BatchSizeSchedule
from megalith.data.dataset import GPTDataset
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.show import render_samples, show_samples
from megalith.errors import ConfigError, DataError
from megalith.training.run_datasets import Data


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


RUN = {
    "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 300},
    "train": {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 20, "eval_iters": 1},
}


def run_file(folder, data):
    path = folder / "run.yaml"
    train = RUN["train"] | {"output_dir": str(folder / "run")}
    path.write_text(json.dumps(RUN | {"data": data, "train": train, "optim": {"lr": 1e-3}}))
    return str(path)


def printed(capsys, *words):
    assert main(["data", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("order", ["cyclic", "single"])
def test_the_samples_of_a_step_are_those_that_training_reads(prefix, tmp_path, capsys, order):
    data = {"data_path": prefix, "split": "80,20", "seq_length": 16, "dataloader_type": order}
    path = run_file(tmp_path, data)
    shown = json.loads(printed(capsys, "show", "--config", path, "--step", "3", "--json"))
    config = RunConfig.load(path)
    read = Data(config, BatchSizeSchedule(4, 2, 1), 20, None, Axis(1))
    with read.train_loader(2, 8, torch.device("cpu")) as batches:
        rows = [row for _ in range(2) for row in next(batches).input_ids.tolist()]
    assert [sample["tokens"][:-1] for sample in shown["samples"]] == rows and shown["step"] == 3
    assert [sample["position"] for sample in shown["samples"]] == [8, 9, 10, 11]
    assert "step 1, 4 samples" in printed(capsys, "show", "--config", path)
    some = json.loads(printed(capsys, "show", "--config", path, "--position", "9,8", "--json"))
    assert some == [shown["samples"][1], shown["samples"][0]]
    for words in (["--step", "21"], ["--step", "1", "--position", "0"], ["--index", "0"]):
        assert main(["data", "show", "--config", path, *words]) == 2
    assert main(["data", "show", prefix]) == 2


def test_statistics_of_a_blend_count_its_documents_and_the_tokens_of_each_source(prefix, tmp_path, capsys):
    with IndexedWriter(tmp_path / "b", np.uint16) as writer:
        for length in (1, 2, 3, 300):
            writer.add_document(np.zeros(length, np.uint16))
    other = str(tmp_path / "b")
    found = json.loads(printed(capsys, "stats", prefix, other, "--seq-length", "16", "--json"))["data"][
        "sources"
    ]
    documents = found[other]["documents"]
    assert documents["histogram"] == [[1, 1, 1], [2, 3, 2], *[[2**k, 2 ** (k + 1) - 1, 0] for k in range(2, 8)],
                                      [256, 511, 1]]  # fmt: skip
    assert (documents["count"], documents["tokens"], documents["max"], documents["median"]) == (
        4,
        306,
        300,
        2.5,
    )
    assert found[other]["cut_documents"] == pytest.approx((0 + 1 / 16 + 2 / 16 + 1) / 4)
    path = run_file(tmp_path, {"data_path": [0.75, prefix, 0.25, other], "split": "1", "seq_length": 16})
    train = json.loads(printed(capsys, "stats", "--config", path, "--json"))["train"]
    assert [source["samples"] for source in train["sources"].values()] == [60, 20]
    assert [source["epochs"] for source in train["sources"].values()] == [60 * 16 / 1000, 20 * 16 / 306]
    text = printed(capsys, "stats", "--config", path)
    assert "60 samples, 0.96 epochs, 960 tokens of the run (75.0 %)" in text
    assert "50 documents, 1,000 tokens" in text and "    16-31  ####" in text
    assert main(["data", "stats"]) == 2


def test_statistics_of_a_split_count_its_own_documents(prefix, tmp_path, capsys):
    for packing in ("concat", "best_fit"):
        data = {"data_path": prefix, "split": "80,20,0", "seq_length": 16, "packing": packing}
        statistics = json.loads(printed(capsys, "stats", "--config", run_file(tmp_path, data), "--json"))
        counts = {split: values["sources"][prefix]["documents"] for split, values in statistics.items()}
        assert {split: (each["count"], each["tokens"]) for split, each in counts.items()} == {
            "train": (40, 800),
            "valid": (10, 200),
        }
        assert statistics["valid"]["sources"][prefix]["longer_documents"] == 10


def test_statistics_and_steps_of_chat_data_count_rows_and_truncation(tmp_path, capsys):
    records = [{"input_ids": list(range(1, 3 + n % 30))} for n in range(40)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = {"data_path": str(tmp_path / "chat.jsonl"), "seq_length": 16, "split": "1"}
    path = run_file(tmp_path, data)
    tree = json.loads((tmp_path / "run.yaml").read_text()) | {
        "sft": {"enabled": True, "truncation_mode": "keep_start"}
    }
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    train = json.loads(printed(capsys, "stats", "--config", path, "--json"))["train"]
    assert train["samples"] == 40 and train["events"] == {"truncated (keep_start)": 15}
    assert train["packing"] == pytest.approx(train["lengths"]["tokens"] / (16 * train["rows"]))
    halves = tree | {"data": tree["data"] | {"split": "50,50,0"}}
    (tmp_path / "run.yaml").write_text(json.dumps(halves))
    statistics = json.loads(printed(capsys, "stats", "--config", path, "--json"))
    assert [statistics[split]["lengths"]["count"] for split in ("train", "valid")] == [20, 20]
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    shown = json.loads(printed(capsys, "show", "--config", path, "--step", "1", "--json"))["samples"]
    assert all("chat.jsonl line" in sample["source"] for sample in shown) and shown[0]["learned"] > 0
