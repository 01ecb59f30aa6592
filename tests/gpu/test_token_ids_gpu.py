"""Ids of a batch that is on the GPU already are checked there, without a wait, and refused by a later call."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import megalith
from megalith.config import RunConfig
from megalith.data.batch import BoundaryRules, make_batch
from megalith.errors import DataError
from megalith.parallel.mesh import Mesh

TREE = {
    "model": {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "vocab_size": 40,
              "make_vocab_size_divisible_by": 64, "position_embedding_type": "rope"},
    "data": {"seq_length": 16, "mock": True},
    "train": {"global_batch_size": 2, "train_iters": 2},
    "runtime": {"device": "cuda", "compile": False},
}  # fmt: skip


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_an_id_in_the_rows_that_pad_the_vocabulary_is_refused(name):
    device = torch.device("cuda")
    model = megalith.parallelize(RunConfig.from_tree(TREE), Mesh.alone(), device)
    samples = np.random.default_rng(0).integers(0, 40, (2, 17))
    good = make_batch(samples, np.arange(2), BoundaryRules()).to(device)
    changed = good[name].clone()
    changed[1, 3] = 45
    bad = replace(good, **{name: changed})
    model.evaluate([good])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model._ids.check_batches(
            [bad], labels=name == "labels"
        )  # a second check might raise the first one's error
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    message = f"sample 1 of micro-batch 0 has token id 45 at position 3 of {name}, but the vocabulary has 40"
    with pytest.raises(DataError, match=message):
        model.evaluate([good])
    model.evaluate([good])
