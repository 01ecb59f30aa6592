"""Ids outside the vocabulary raise before they train: in a loop of one's own, a model of one's own and sentences."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import megalith
from megalith.config import RunConfig
from megalith.data.batch import BoundaryRules, make_batch
from megalith.data.indexed import IndexedDataset, IndexedWriter
from megalith.data.masked_lm import MaskedLMDataset, Masking, WordPieces
from megalith.data.token_ids import TokenIds, _first_outside
from megalith.errors import DataError
from megalith.parallel.mesh import Mesh

VOCAB, SEQ = 40, 8
TREE = {
    "model": {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": VOCAB,
              "make_vocab_size_divisible_by": 64, "position_embedding_type": "rope"},
    "data": {"seq_length": SEQ, "mock": True},
    "train": {"global_batch_size": 2, "train_iters": 2},
    "runtime": {"device": "cpu", "compile": False},
}  # fmt: skip


class Tied(megalith.Model):
    """A linear layer between an embedding and itself."""

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.tokens = megalith.VocabParallelEmbedding(VOCAB, 16, mesh.tp)
        self.layers = nn.ModuleList([nn.Linear(16, 16)])

    def forward(self, batch, head):
        return head(self.layers[0](self.tokens(batch.input_ids)), self.tokens)


def batch_with(name: str = "input_ids", token: int = 5):
    """Two samples, with `token` in the second one at position 3 of `name`."""
    samples = np.random.default_rng(0).integers(0, VOCAB, (2, SEQ + 1))
    batch = make_batch(samples, np.arange(2), BoundaryRules())
    changed = batch[name].clone()
    changed[1, 3] = token
    return replace(batch, **{name: changed})


@pytest.fixture(scope="module")
def models():
    device = torch.device("cpu")
    ours = megalith.parallelize(RunConfig.from_tree(TREE), Mesh.alone(), device)
    return {"ours": ours, "own": megalith.parallelize(megalith.ModelSpec(Tied), Mesh.alone(), device)}


@pytest.mark.parametrize("token", [VOCAB, 63, 64, 10**9, -1, -100])
@pytest.mark.parametrize("kind", ["ours", "own"])
def test_a_loop_of_ones_own_raises_naming_sample_position_id_and_vocabulary(models, kind, token):
    """40 to 63 are the rows that pad the vocabulary."""
    model, named = (
        models[kind],
        f"token id {token} at position 3 of {{}}, but the vocabulary has {VOCAB} entries",
    )
    good, bad = batch_with(), batch_with("input_ids", token)
    for call in (model.backward, model.evaluate, model.all_logprobs):
        with pytest.raises(DataError, match="sample 1 of micro-batch 1 has " + named.format("input_ids")):
            call([good, bad])
        with pytest.raises(DataError, match="sample 1 of .*" + named.format("labels")):
            call([good, batch_with("labels", token)])
    with pytest.raises(DataError, match="sample 1 of the batch has " + named.format("input_ids")):
        model(bad.input_ids)
    assert model.backward([good]).isfinite()


def test_labels_that_do_not_count_may_be_anything(models):
    for kind, model in models.items():
        batch = batch_with("labels", 5)
        batch.loss_mask[1, 3] = 0.0
        wanted = model.backward([batch])
        batch.labels[1, 3] = VOCAB + 1
        assert torch.equal(model.backward([batch]), wanted), kind


def test_what_a_device_finds_is_raised_by_a_later_call_once_it_is_known():
    """As on a GPU, whose copy to the host is known by an event."""

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    ids, event = TokenIds(VOCAB, "remedy"), Event()
    bad = batch_with("input_ids", VOCAB).input_ids
    found = _first_outside(bad, VOCAB, None)
    assert found.tolist() == [SEQ + 3, VOCAB]
    assert _first_outside(bad, VOCAB, bad != VOCAB)[0] == -1
    ids._pending.append((found, event, lambda at, token: DataError(f"{at} {token}")))
    ids.check(batch_with().input_ids, "input_ids", "the batch")
    event.done = True
    with pytest.raises(DataError, match=f"{SEQ + 3} {VOCAB}"):
        ids.check(batch_with().input_ids, "input_ids", "the batch")
    ids.raise_pending()


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_sentences_with_an_id_outside_the_vocabulary_are_refused(tmp_path, token):
    with IndexedWriter(tmp_path / "bad", np.int32) as writer:
        for _ in range(4):
            writer.add_document(np.array([7, 8, 9, token, 11, 12]), [3, 3])
    words = WordPieces(1, 2, 3, 0, VOCAB, np.ones(VOCAB, dtype=bool))
    dataset = MaskedLMDataset(IndexedDataset(str(tmp_path / "bad")), 0, 4, 16, 4, 1, words, Masking())
    message = rf"sample 0 of .*bad has token id {token} at position \d+, but the vocabulary has {VOCAB}"
    with pytest.raises(DataError, match=message):
        [dataset[i] for i in range(4)]
