"""Logits equal transformers' on the same random weights, and parameter counts, for every feature of each family."""

import pytest
import torch
from models.reference import CASES, VOCAB, reference_and_ours

from megalith.planner.counts import count_parameters

SEQ = 48


@pytest.mark.parametrize("name", CASES)
def test_logits_and_loss_equal_those_of_transformers(name: str) -> None:
    reference, model = reference_and_ours(name)
    ids = torch.randint(0, VOCAB, (2, SEQ))
    expected = reference(ids, labels=ids)
    logits = model(ids)
    assert logits.shape == (2, SEQ, VOCAB)
    assert (logits - expected.logits).abs().max() <= 1e-5 * expected.logits.abs().max()
    loss = model(ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous()) / (2 * (SEQ - 1))
    assert torch.allclose(loss, expected.loss, rtol=1e-5)
    trained = {
        n: p
        for n, p in reference.named_parameters()
        if not n.endswith(("expert_bias", "e_score_correction_bias"))
    }  # a buffer here
    count = count_parameters(model.config, padded_vocab=False).total
    assert count == sum(parameter.numel() for parameter in trained.values())
