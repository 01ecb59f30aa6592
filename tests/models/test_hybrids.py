"""Mixers with a state: gradients equal transformers', and packed documents equal documents by themselves."""

from itertools import pairwise

import pytest
import torch
from models.reference import VOCAB, reference_and_ours, saved_tensors

from megalith.bridge.families import family_of
from megalith.bridge.transfer import to_theirs
from megalith.models.inputs import TokenInputs

HYBRIDS = (
    "bamba, biases, limits, one group",
    "falcon-h1",
    "nemotron-h",
    "lfm2, biases",
    "qwen3.5",
    "kimi-linear",
    "olmo-hybrid",
    "olmo-hybrid, RoPE, shared keys, larger epsilon",
)


@pytest.mark.parametrize("name", HYBRIDS)
def test_gradients_equal_those_of_transformers(name: str) -> None:
    reference, model = reference_and_ours(name)
    ids = torch.randint(0, VOCAB, (2, 72), generator=torch.Generator().manual_seed(5))
    reference(ids, labels=ids).loss.backward()
    (model(ids[:, :-1].contiguous(), labels=ids[:, 1:].contiguous()) / (2 * 71)).backward()
    with torch.no_grad():
        for parameter in reference.parameters():  # a file of gradients, under the names of the file
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    expected = saved_tensors(reference)
    compared = 0
    family = family_of(reference.config.to_dict(), name)
    family = family.stored_as({name: value.shape for name, value in expected.items()})
    for group in family.groups(model.config):
        if group.name.endswith("expert_bias"):
            continue
        gradient = model.get_parameter(group.name).grad[: group.shape[0]]
        dtypes = dict.fromkeys(group.sources, torch.float32)
        for theirs, value in to_theirs(group, gradient, dtypes):
            error = (value - expected[theirs]).norm() / expected[theirs].norm().clamp(min=1e-12)
            assert error <= 1e-5, (theirs, error)
            compared += 1
    assert compared == sum("e_score_correction_bias" not in name for name in expected)


@pytest.mark.parametrize("name", HYBRIDS)
def test_packed_documents_equal_documents_by_themselves(name: str) -> None:
    _, model = reference_and_ours(name)
    ids = torch.randint(0, VOCAB, (1, 80), generator=torch.Generator().manual_seed(6))
    bounds = (0, 3, 67, 80)
    ends = torch.tensor([bounds[1:]], dtype=torch.int32)
    positions = torch.cat([torch.arange(last - first) for first, last in pairwise(bounds)])[None]
    with torch.no_grad():
        packed = model(ids, token_inputs=TokenInputs(position_ids=positions, document_ends=ends))
        alone = [model(ids[:, first:last]) for first, last in pairwise(bounds)]
    expected = torch.cat(alone, dim=1)
    assert (packed - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", HYBRIDS)
@torch.no_grad()
def test_a_mask_keeps_padding_out_of_states(name: str) -> None:
    model, count, length = reference_and_ours(name)[1].eval(), 5, 40
    ids = torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(5))
    padded = torch.cat([ids[:, :count] * 0 + 3, ids], 1)
    mask = (torch.arange(count + length) >= count).expand(2, -1)
    positions = (torch.arange(count + length) - count).clamp(min=0).expand(2, -1)
    inputs = TokenInputs(padding_mask=mask, position_ids=positions)
    torch.testing.assert_close(
        model(padded, token_inputs=inputs)[:, count:], model(ids), rtol=1e-5, atol=1e-5
    )
