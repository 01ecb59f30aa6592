"""Ids outside the vocabulary raise where plain PyTorch raises, in a prepared model and in the Trainer."""

import pytest
from accelerate_job import VOCAB, model_of, one_step, samples
from test_accelerate_trainer import arguments, reset

from megalith.accelerate import MegalithTrainer
from megalith.errors import DataError


@pytest.mark.parametrize("token", [VOCAB, 120, 150, -5])
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_an_id_or_a_label_outside_the_vocabulary_raises(kind, token):
    """96 to 127 are the rows that pad the vocabulary."""
    accelerator, model, _, batch = one_step(kind)
    names = [name for name in ("input_ids", "labels", "decoder_input_ids") if name in batch]
    for name in names:
        changed = {**batch, name: batch[name].clone()}
        changed[name][1, 3] = token
        message = f"sample 1 of the batch has token id {token} at position 3 of {name}, but the vocabulary has {VOCAB}"
        with pytest.raises(DataError, match=message):
            model(**changed)
        plain = model_of(kind)
        with pytest.raises((IndexError, RuntimeError)):
            plain(**changed)
    accelerator.backward(model(**batch).loss)


def test_the_first_label_of_a_sample_is_no_target_and_may_be_anything():
    _, model, _, batch = one_step("llama")
    batch["labels"][:, 0] = 150
    assert model(**batch).loss.item() == pytest.approx(model_of("llama")(**batch).loss.item(), rel=1e-5)


def test_the_trainer_raises(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    reset()
    data = samples(24)
    data[5]["input_ids"][2] = VOCAB + 1
    trainer = MegalithTrainer(model_of("llama"), arguments(tmp_path), train_dataset=data)
    with pytest.raises(DataError, match=f"token id {VOCAB + 1} at position 2 of input_ids"):
        trainer.train()
