"""Attention: the plain path is the fused one, dropout is keyed by place, and a document mask stops attention."""

import pytest
import torch

from megalith.ops.attention import _plain, attention, document_mask
from megalith.ops.dropout import DropoutKeys, attention_keep_mask, token_keys

BATCH, SEQ, HEADS, HEAD_DIM = 2, 24, 4, 16


def qkv(groups=HEADS, dtype=torch.float32, seq=SEQ):
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS,), (groups,), (groups,))
    return tuple(
        torch.randn(BATCH, seq, *heads, HEAD_DIM, generator=generator).to(dtype).requires_grad_()
        for heads in shapes
    )


def dropout_rows(samples=(0, 1), positions=range(SEQ)):
    keys = token_keys(5, torch.tensor(samples), torch.tensor([*positions]))
    return DropoutKeys(queries=keys, stream=keys, layer=torch.tensor(1, dtype=torch.int32)).query_rows()


def formula(query, key, value, allowed, kept=None, p=0.0):
    """Softmax attention written out in float64; allowed and kept bool [batch or 1, heads or 1, queries, keys]."""
    shared = query.shape[2] // key.shape[2]
    query, key, value = (x.detach().double().transpose(1, 2) for x in (query, key, value))
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.mT / HEAD_DIM**0.5
    probabilities = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    if kept is not None:
        probabilities = probabilities * kept / (1 - p)
    return (probabilities @ value).transpose(1, 2)


CAUSAL = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).tril()
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 15, [0] * 1 + [1] * 20 + [2] * 3])


@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_and_plain_path_are_the_formula_in_value_and_gradient(groups, masked):
    mask = document_mask(DOCUMENTS) if masked else None
    inputs, other = qkv(groups), qkv(groups)
    fused = attention(*inputs, causal=True, mask=mask)
    swapped = [x.transpose(1, 2) for x in other]
    plain = _plain(*swapped, mask is None, mask, 0.0, dropout_rows(), 0).transpose(1, 2)
    expected = formula(*inputs, mask if masked else CAUSAL)
    torch.testing.assert_close(fused.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain.double(), expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(fused.shape, generator=torch.Generator().manual_seed(1))
    fused.backward(weight)
    plain.backward(weight)
    for a, b in zip(inputs, other):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_dropout_drops_the_probabilities_that_their_place_says(masked):
    p, inputs = 0.3, qkv(groups=2)
    mask = document_mask(DOCUMENTS) if masked else None
    out = attention(*inputs, mask=mask, dropout=p, dropout_rows=dropout_rows())
    kept = attention_keep_mask(dropout_rows(), HEADS, torch.arange(SEQ), p)
    expected = formula(*inputs, mask if masked else CAUSAL, kept, p)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_dropout_of_a_part_of_the_batch_or_of_the_sequence_is_that_of_the_whole():
    inputs = qkv(groups=2)
    whole = attention(*inputs, dropout=0.3, dropout_rows=dropout_rows())
    second = attention(*(x[1:] for x in inputs), dropout=0.3, dropout_rows=dropout_rows(samples=(1,)))
    prefix = attention(*(x[:, :10] for x in inputs), dropout=0.3, dropout_rows=dropout_rows()[:, :10])
    torch.testing.assert_close(second, whole[1:])
    torch.testing.assert_close(prefix, whole[:, :10])


def test_dropout_of_some_heads_is_that_of_all():
    inputs = qkv()
    whole = attention(*inputs, dropout=0.3, dropout_rows=dropout_rows())
    some = (x[:, :, 2:] for x in inputs)
    part = attention(*some, dropout=0.3, dropout_rows=dropout_rows(), first_head=2)
    torch.testing.assert_close(part, whole[:, :, 2:])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_half_precision_is_near_the_formula_and_keeps_its_dtype(dropout):
    inputs = qkv(groups=2, dtype=torch.bfloat16)
    kept = attention_keep_mask(dropout_rows(), HEADS, torch.arange(SEQ), dropout)
    out = attention(*inputs, dropout=dropout, dropout_rows=dropout_rows())
    assert out.dtype == torch.bfloat16
    expected = formula(*inputs, CAUSAL, kept, dropout)
    assert (out.double() - expected).norm() < 0.01 * expected.norm()


def test_document_mask_is_causal_within_a_document_and_closed_between_two():
    mask = document_mask(DOCUMENTS)
    assert mask.shape == (2, 1, SEQ, SEQ)
    for row, documents in enumerate(DOCUMENTS.tolist()):
        for query in range(SEQ):
            for key in range(SEQ):
                allowed = key <= query and documents[key] == documents[query]
                assert mask[row, 0, query, key] == allowed
