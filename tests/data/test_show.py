"""`megalith data show` reads exactly what training would read."""

import numpy as np
import pytest

from megalith.data.blend import render_samples, show_samples
from megalith.data.dataset import GPTDataset
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.errors import ConfigError, DataError


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
    for index in (-1, 9):
        with pytest.raises(DataError, match=f"sample {index} is not one of the 9 train samples"):
            show_samples(prefix, 16, 3, 9, "1", "train", [index])


def test_bad_arguments_are_refused(prefix):
    with pytest.raises(ConfigError, match="'dev' is not known"):
        show_samples(prefix, 16, 3, 9, "1", "dev", [0])
    with pytest.raises(ConfigError, match="at least 1"):
        show_samples(prefix, 16, 3, 0, "1", "train", [0])


def test_text_has_the_ids_and_what_they_say():
    samples = [{"index": 4, "tokens": [1, 22]}]
    assert render_samples(samples) == "sample 4 (2 tokens)\n1 22\n"
    assert "one two" in render_samples(samples, lambda ids: "one two")
