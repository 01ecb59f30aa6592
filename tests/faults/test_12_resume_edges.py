"""12: going on at an epoch's end, before the first save, and at the last step."""

import signal

import pytest
import torch
from ranks import Ranks, saved, steps, stored, until, words

import megalith
from megalith.config import RunConfig
from megalith.data.indexed import IndexedDataset


@pytest.fixture
def config(corpus):
    """A run of 30 steps over 60 short documents; about 13 steps are an epoch of their tokens."""

    def config(output, **train) -> RunConfig:
        return RunConfig.from_tree(
            {
                "model": {"preset": "tiny-gpt", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2},
                "data": {"data_path": corpus, "split": "1", "seq_length": 16, "num_workers": 0,
                         "tokenizer_type": "ByteTokenizer"},
                "optim": {"lr": 0.01},
                "train": {"train_iters": 30, "micro_batch_size": 4, "global_batch_size": 16, "eval_iters": 0,
                          "deterministic": True, "output_dir": str(output), **train},
                "checkpoint": {"load": str(output)},
            }
        )  # fmt: skip

    yield config

    torch.use_deterministic_algorithms(False)


@pytest.mark.fault(12)
def test_at_and_around_the_end_of_an_epoch_the_run_goes_on_bitwise(config, corpus, tmp_path):
    per_epoch = (IndexedDataset(corpus).num_tokens - 1) // 16
    last = per_epoch // 16  # the step in which the second epoch begins
    assert 5 < last < 25
    megalith.train(config(tmp_path / "straight"))
    for stop in (last, last + 1, 30):  # before it, after it, and at the run's last step
        ended = megalith.train(config(tmp_path / "stopped", exit_interval=stop)).step
        assert ended == stop
    assert stored(tmp_path / "stopped", 30) == stored(tmp_path / "straight", 30)
    before = stored(tmp_path / "stopped", 30)
    again = megalith.train(config(tmp_path / "stopped"))  # nothing is left to do
    assert again.step == 30 and stored(tmp_path / "stopped", 30) == before


@pytest.mark.fault(12)
def test_a_run_killed_before_its_first_save_starts_from_its_beginning(tmp_path):
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    command = words(killed, train__train_iters=100_000)
    running = Ranks(command, 1, tmp_path / "log")
    until(lambda: len(steps(killed)) >= 2, "step 2")
    running.send(signal.SIGKILL)
    assert running.end() == [-signal.SIGKILL] and saved(killed) == []
    for output in (killed, straight):
        rest = Ranks(words(output, train__train_iters=100_000, train__exit_interval=4), 1, tmp_path / "log")
        assert rest.end() == [20], rest.text()
    assert stored(killed, 4) == stored(straight, 4) and steps(killed) == [1, 2, 3, 4]
