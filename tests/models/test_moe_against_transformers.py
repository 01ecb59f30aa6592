"""Logits equal transformers' on the same random weights, for every family with experts."""

import pytest
import torch
from models.moe_reference import CASES, reference_and_ours
from models.reference import VOCAB

SEQ = 48


@pytest.mark.parametrize("name", CASES)
def test_logits_and_loss_equal_those_of_transformers(name: str) -> None:
    reference, model = reference_and_ours(name)
    ids = torch.randint(0, VOCAB, (2, SEQ))
    expected = reference(ids, labels=ids)
    logits = model(ids)
    assert (logits - expected.logits).abs().max() <= 1e-5 * expected.logits.abs().max()
    loss = model(ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous()) / (2 * (SEQ - 1))
    assert torch.allclose(loss, expected.loss, rtol=1e-5)
