"""A run trains on a user's datasets, as docs/own_data.md shows them, and resumes bitwise."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from default_cases import in_full
from layout_job import build
from page_trials import fences
from trained_runs import comparable, losses, stored

import megalith
from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.data.own_dataset import _REGISTERED, DatasetRequest, StreamDataset, open_own_dataset
from megalith.errors import ConfigError, DataError
from megalith.training.trainer import Trainer

PAGE = Path(__file__).parents[2] / "docs" / "own_data.md"


def page_file(folder: Path, name: str) -> str:
    """Write a program that the page shows under its name; return its path."""
    [block] = [text for _, text in fences(PAGE) if text.startswith(f"# {name}")]
    (folder / name).write_text(block)
    return str(folder / name)


def configuration(folder, dataset, data=None, **sections) -> RunConfig:
    train = dict(train_iters=6, micro_batch_size=2, global_batch_size=8, eval_iters=1, deterministic=True)
    return RunConfig.from_tree(
        dict(
            model=dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=256, hidden_dropout=0.1,
                       attention_dropout=0.0),
            data=dict(dataset=dataset, seq_length=16, num_workers=1, **(data or {})),
            train=train | dict(output_dir=str(folder)) | sections.pop("train", {}),
            optim=dict(lr=1e-3), runtime=dict(device="cpu", compile=False), log=dict(layout_report=False), **sections,
        )
    )  # fmt: skip


def train_straight_and_resumed(folder, dataset, layout, data):
    """Train 6 steps straight, and 3 steps and then 3 more; return the metrics and the final states of both."""
    results = []
    for name, steps in (("straight", [6]), ("resumed", [3, 6])):
        for step in steps:
            stop = {} if step == 6 else dict(exit_interval=3)
            config = configuration(
                folder / name,
                dataset,
                data,
                parallel=layout,
                checkpoint=dict(load=str(folder / name)),
                train=stop,
            )
            (folder / name).mkdir(parents=True, exist_ok=True)
            result = Trainer(build(config)).train()
        results.append((comparable(folder / name), stored(Path(result.checkpoint))))
    return results


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "function"),
    [
        in_full("text_data.py", "lines"),
        in_full("tensor_data.py", "pairs"),
        ("stream_data.py", "counting"),
    ],
)
def test_a_run_on_the_page_s_dataset_resumes_bitwise_in_tp2_dp2(pool, tmp_path, file, function):
    dataset = f"{page_file(tmp_path, file)}:{function}"
    layout = dict(tensor_model_parallel_size=2, sequence_parallel=True)
    straight, resumed = pool.run(train_straight_and_resumed, tmp_path / "spread", dataset, layout, {})[0]
    assert straight == resumed
    megalith.train(configuration(tmp_path / "alone", dataset))
    torch.use_deterministic_algorithms(False)
    assert np.allclose(losses(tmp_path / "alone"), losses(tmp_path / "spread" / "straight"), rtol=1e-5)


def test_plan_and_statistics_count_the_samples_of_an_own_dataset(tmp_path, capsys):
    for file, function, size in (("text_data.py", "lines", 400), ("stream_data.py", "counting", None)):
        dataset = f"{page_file(tmp_path, file)}:{function}"
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration(tmp_path, dataset).to_tree()))
        assert main(["data", "plan", str(tmp_path / "run.yaml"), "--json"]) == 0
        [source] = json.loads(capsys.readouterr().out)["sources"]
        assert (source["source"], source["samples"]) == (f"data.dataset {dataset}", 48)
        assert source["tokens"] == 48 * 16 and source["epochs"] == (None if size is None else 48 / size)
        assert main(["data", "stats", "--config", str(tmp_path / "run.yaml")]) == 0
        text = " ".join(capsys.readouterr().out.split())
        epochs = "an unknown number of" if size is None else "0.12"
        assert f"48 samples, {epochs} epochs, 768 tokens of the run (100.0 %)" in text
        assert ("400 samples in the dataset" in text) == (size is not None)


def test_an_evaluation_of_an_own_dataset_without_its_splits_says_what_to_return(tmp_path, capsys):
    dataset = f"{page_file(tmp_path, 'text_data.py')}:lines"
    megalith.train(configuration(tmp_path / "run", dataset))
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--data.dataset", dataset]) == ConfigError.exit_code
    error = " ".join(capsys.readouterr().err.split())
    assert (
        "no validation and no test split to evaluate; return a dataset for one of them from data.dataset"
        in error
    )
    torch.use_deterministic_algorithms(False)


class Numbers(torch.utils.data.IterableDataset):
    """3 samples per pass: the epoch and the number in it, after a shuffle by the epoch."""

    def __init__(self):
        self.epoch = self.read = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = np.random.default_rng(self.epoch).permutation(3).tolist()
        while self.read < 3:
            self.read += 1
            yield [self.epoch, order[self.read - 1], 0]

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


def stream(repeat=True) -> StreamDataset:
    return StreamDataset(Numbers(), "numbers", 2, repeat)


def test_a_stream_continues_from_its_state_within_and_after_a_pass():
    whole = stream()
    expected = [whole[i].tolist() for i in range(10)]
    assert [e for e, _, _ in expected] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    for position in range(8):
        first, second = stream(), stream()
        first.restart(0, 1, 4)
        for i in range(position + 2):  # read ahead of the checkpoint
            first[i]
        state = first.state_at(position)
        assert (state["position"], state["epoch"]) == (position, max(0, position - 1) // 3)
        second.load_state(state)
        second.restart(position, 1, 4)
        assert [second[i].tolist() for i in range(position, 10)] == expected[position:]
    assert [whole.restarted()[i].tolist() for i in range(0, 10, 3)] == expected[::3]


def test_a_stream_that_ends_early_is_an_error():
    once = stream(repeat=False)
    with pytest.raises(DataError, match=r"data.dataset numbers ended after 3 samples"):
        once[3]


def test_a_stream_without_state_is_read_again_up_to_its_position():
    class Plain(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([[n, n, n] for n in range(4)])

    dataset = StreamDataset(Plain(), "plain", 2, repeat=True)
    assert dataset.state_at(6) is None
    dataset.restart(6, 2, 3)
    assert [dataset[i][0] for i in (6, 7, 9)] == [2, 3, 1]


@pytest.mark.parametrize("position", [0, 4, 6, 8])
def test_a_stream_of_the_datasets_library_continues_from_its_state(position):
    import datasets

    def source():
        rows = datasets.Dataset.from_dict({"ids": [[i, i, i] for i in range(6)]})
        rows = rows.to_iterable_dataset(num_shards=2)
        rows.collate = lambda samples, numbers: None
        return StreamDataset(rows, "rows", 2, repeat=True)

    def ids(dataset, first, end):
        return [dataset[i]["ids"][0] for i in range(first, end)]

    first, second = source(), source()
    first.restart(0, 2, 4)
    assert ids(first, 0, position + 3) == [i % 6 for i in range(position + 3)]
    second.load_state(first.state_at(position))
    second.restart(position, 2, 4)
    assert ids(second, position, 14) == [i % 6 for i in range(position, 14)]
    assert ids(second.restarted(), 0, 8) == [0, 1, 2, 3, 4, 5, 0, 1]


def request(**fields) -> DatasetRequest:
    data = configuration("unused", "mine").data
    values = dict(split="train", num_samples=4, seq_length=2, vocab_size=9, seed=0, tokenizer=None, data=data)
    return DatasetRequest(**(values | fields))


class Collating(list):
    def collate(self, samples, sample_numbers):
        return samples[0]


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([[1, 2]], r"sample 0 of data.dataset mine has shape \[2\] .* data.seq_length \+ 1 = 3 token ids"),
        ([[1.0, 2.0, 3.0]], "type float64"),
        ([], "without samples"),
        (3, "returns int"),
        (type("Endless", (), {"__getitem__": lambda self, i: i})(), "has no length"),
    ],
)
def test_an_unusable_dataset_is_refused(dataset, message, monkeypatch):
    monkeypatch.setitem(_REGISTERED, "mine", lambda request: dataset)
    with pytest.raises((ConfigError, DataError), match=message):
        open_own_dataset("mine", request())[0]


def test_an_unusable_batch_is_refused(monkeypatch):
    from megalith.data.own_dataset import OwnCollate

    good = [torch.zeros(1, 2, dtype=torch.int64) for _ in range(2)]
    wrong = megalith.Batch(*good, torch.zeros(1, 3), good[0], None, torch.zeros(1, dtype=torch.int64))
    for value, message in (
        (3, "returns int; it must return a megalith.Batch"),
        (wrong, r"loss_mask .*\[1, 3\]; it must be"),
    ):
        monkeypatch.setitem(_REGISTERED, "mine", lambda request, value=value: Collating([value]))
        dataset = open_own_dataset("mine", request())
        with pytest.raises(DataError, match=message):
            OwnCollate(dataset)([dataset[0]], np.array([0]))


def test_settings_that_contradict_an_own_dataset_are_refused(tmp_path):
    for data, message in ((dict(mock=True), "data.mock are both set"), ({}, "there is no file missing.py")):
        with pytest.raises(ConfigError, match=message):
            megalith.train(configuration(tmp_path, "missing.py:data", data))
    with pytest.raises(ConfigError, match=r"use a built-in name or path.py:function"):
        megalith.train(configuration(tmp_path, "unregistered"))
    assert "missing" not in sys.modules


def test_evaluate_runs_the_code_of_a_dataset_only_if_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = "open('ran', 'w')\ndef rows(request): return [list(range(n, n + 9)) for n in range(40)]\n"
    (tmp_path / "rows.py").write_text(code)
    tree = dict(
        model=dict(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=64),
        data=dict(dataset="rows.py:rows", seq_length=8),
        optim=dict(lr=1e-3),
        train=dict(train_iters=1, micro_batch_size=2, global_batch_size=2, eval_iters=1, output_dir="run"),
    )
    megalith.train(RunConfig.from_tree(tree))
    (tmp_path / "ran").unlink()
    assert main(["evaluate", "run"]) == 2
    error = capsys.readouterr().err
    assert "data.dataset 'rows.py:rows', which is a Python file, and code that a checkpoint names" in error
    assert "is not run; if you trust the file, pass it with --data.dataset" in error
    assert not (tmp_path / "ran").exists()
    assert main(["evaluate", "run", "--data.dataset", "rows.py:rows"]) == 0
    assert (tmp_path / "ran").exists()
