"""A dataset kind is a file and a row of `DATASET_KINDS`: a run trains on a new one."""

import sys

import numpy as np
import pytest

from megalith.config import RunConfig
from megalith.data.dataset_kinds import DATASET_KINDS, load_dataset_kind
from megalith.training.build import open_datasets
from megalith.training.training_job import train

KIND = """
import numpy as np
from megalith.data.batch import BoundaryRules, make_batch
from megalith.data.dataset_kinds import DatasetKind
from megalith.data.mock_datasets import MockDataset


class Constant(MockDataset):
    def __getitem__(self, i):
        return np.full(self.seq_length + 1, i % self.vocab_size)


class ConstantKind(DatasetKind):
    collated = []

    def mock(self, num_samples, seed):
        return Constant(self.model.vocab_size, self.data.seq_length, num_samples, seed)

    def factory(self):
        return None

    @staticmethod
    def collate(samples, sample_numbers):
        ConstantKind.collated += samples[:, 0].tolist()
        return make_batch(samples, sample_numbers, BoundaryRules())
"""
SIZES = dict(num_layers=1, hidden_size=16, num_attention_heads=2, vocab_size=32, max_position_embeddings=8)


def configuration(folder, **model) -> RunConfig:
    train = dict(train_iters=2, micro_batch_size=2, global_batch_size=4, output_dir=str(folder / "run"))
    return RunConfig.from_tree(
        dict(model=SIZES | model, data=dict(mock=True, seq_length=8, dataloader_type="single"), train=train,
             optim=dict(lr=1e-3), runtime=dict(device="cpu", compile=False), log=dict(layout_report=False))
    )  # fmt: skip


def test_a_run_trains_on_a_new_kind(tmp_path, monkeypatch):
    (tmp_path / "constant_kind.py").write_text(KIND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(DATASET_KINDS, "gpt", "constant_kind:ConstantKind")
    config = configuration(tmp_path)
    train_set, valid_set, _ = open_datasets(config, (8, 4, 0), None)
    assert np.array_equal(train_set[3], np.full(9, 3)) and len(valid_set) == 4
    train(config)
    collated = sys.modules.pop("constant_kind").ConstantKind.collated  # batches are made by several threads
    assert set(collated) >= set(range(8))


@pytest.mark.parametrize(
    ("model_type", "fields"), [("bert", {"padding_mask", "labels"}), ("t5", {"text_enc"})]
)
def test_built_in_kinds_make_mock_samples_of_their_form(tmp_path, model_type, fields):
    config = configuration(
        tmp_path, model_type=model_type, **({"num_layers": 2} if model_type == "t5" else {})
    )
    kind = load_dataset_kind(config.data, config.model, None, 0)
    sample = kind.mock(3, 0)[0]
    assert fields <= set(sample.dtype.names)
    assert kind.collate(np.stack([sample]), np.array([5])).sample_numbers.tolist() == [5]
