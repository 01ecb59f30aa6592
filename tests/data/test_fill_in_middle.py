"""Fill-in-the-middle samples are Megatron core's, and a rearranged document still has its text."""

import json
from pathlib import Path

import fim_cases
import numpy as np
import pytest
import torch

from megalith.comm.collectives import Axis
from megalith.config.rules.run_rules import check_training
from megalith.config.train import BatchSizeSchedule
from megalith.data.dataset import GPTDataset
from megalith.data.fill_in_middle import FillInMiddle
from megalith.data.indexed import IndexedDataset
from megalith.errors import ConfigError
from megalith.training.build import resolve_config
from megalith.training.run_datasets import Data

GOLDEN = json.loads(Path(__file__).with_name("fim_golden.json").read_text())


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """Folder, tokenizer and dataset prefix."""
    folder = tmp_path_factory.mktemp("fim")
    tokenizer = fim_cases.build_tokenizer(folder)
    return folder, tokenizer, fim_cases.write_documents(folder, tokenizer)


def open_data(code, axis=None, **settings):
    folder, tokenizer, prefix = code
    config = resolve_config(fim_cases.config(prefix, folder, **settings), tokenizer)
    check_training(config)
    return Data(config, BatchSizeSchedule(4, 2, 1), 3, tokenizer, axis or Axis())


@pytest.mark.parametrize("case", fim_cases.CASES)
def test_samples_equal_megatron_cores_for_the_same_generator(code, case):
    settings = fim_cases.CASES[case]
    _, tokenizer, prefix = code
    data = fim_cases.config(prefix, "unused", **settings).data
    rearrange, rng = FillInMiddle(data, tokenizer), np.random.RandomState(fim_cases.SEED)
    indexed = IndexedDataset(prefix)
    plain = GPTDataset(indexed, 0, len(indexed), fim_cases.SEQ, fim_cases.SAMPLES, fim_cases.SEED)
    in_order = [rearrange(plain[i], rng).tolist() for i in range(fim_cases.SAMPLES)]
    assert in_order == GOLDEN[case]["in order of reads"]
    assert in_order != [plain[i].tolist() for i in range(fim_cases.SAMPLES)]
    of_run = open_data(code, **settings).train
    assert [of_run[i].tolist() for i in range(fim_cases.SAMPLES)] == GOLDEN[case]["seeded by sample"]


def test_a_rearranged_document_has_its_text_in_the_published_orders(code):
    _, tokenizer, prefix = code
    text = fim_cases.documents()[1].replace(fim_cases.SPLIT, "")
    document = np.array(tokenizer.encode(text))
    for spm in (0.0, 1.0):
        data = fim_cases.config(prefix, "unused", fim_rate=1.0, fim_spm_rate=spm).data
        rearrange = FillInMiddle(data, tokenizer)
        padded = np.concatenate([document, np.full(60, rearrange.tokens.eod)])
        for seed in range(5):
            ids = rearrange(padded, np.random.RandomState(seed)).tolist()
            ids = ids[: ids.index(rearrange.tokens.eod)]
            decoded = tokenizer.decode(ids)
            if spm:
                suffix, rest = decoded.removeprefix("<fim_prefix><fim_suffix>").split("<fim_middle>")
                assert rest + suffix == text
            else:
                prefix_text, rest = decoded.removeprefix("<fim_prefix>").split("<fim_suffix>")
                suffix, middle = rest.split("<fim_middle>")
                assert prefix_text + middle + suffix == text


def test_ranks_and_resumed_runs_read_the_same_samples(code):
    def read(axis, step):
        with open_data(code, axis).train_loader(step, 4 * step, torch.device("cpu")) as loader:
            return {
                int(n): row.tolist()
                for batch in loader
                for n, row in zip(batch.sample_numbers, batch.input_ids)
            }

    whole = read(Axis(), 0)
    resumed = read(Axis(size=2, rank=0), 1) | read(Axis(size=2, rank=1), 1)
    assert resumed == {n: row for n, row in whole.items() if n >= 4}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"fim_middle_token": "<mid>"}, "fim_middle_token is '<mid>', which is not a token"),
        ({"fim_split_sample": "<fim_pad>"}, "fim_fragment_rate is not set"),
        ({"data_path": None, "mock": True}, "data.mock is set"),
    ],
)
def test_settings_that_cannot_work_are_refused(code, settings, message):
    with pytest.raises(ConfigError, match=message):
        open_data(code, **settings)
