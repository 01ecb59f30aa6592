"""Attention: the plain path is the fused one, dropout is keyed by place, and a document mask stops attention."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megalith.ops import attention_blocks
from megalith.ops import attention_core as chosen
from megalith.ops.attention_core import _flex, _on_gpu, _plain, attention, document_mask, takes_heads
from megalith.ops.dropout import DropoutKeys, attention_keep_mask, token_keys

BATCH, SEQ, HEADS, HEAD_DIM = 2, 24, 4, 16


def qkv(groups=HEADS, dtype=torch.float32, seq=SEQ, head_dim=HEAD_DIM):
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS,), (groups,), (groups,))
    return tuple(
        torch.randn(BATCH, seq, *heads, head_dim, generator=generator).to(dtype).requires_grad_()
        for heads in shapes
    )


def dropout_rows(samples=(0, 1), positions=range(SEQ)):
    keys = token_keys(5, torch.tensor(samples), torch.tensor([*positions]))
    return DropoutKeys(
        queries=keys, stream=keys, columns=keys, layer=torch.tensor(1, dtype=torch.int32)
    ).query_rows()


def formula(query, key, value, allowed, kept=None, p=0.0, softcap=None, scale=HEAD_DIM**-0.5):
    """Softmax attention written out in float64; allowed and kept bool [batch or 1, heads or 1, queries, keys]."""
    shared = query.shape[2] // key.shape[2]
    query, key, value = (x.double().transpose(1, 2) for x in (query, key, value))
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
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
    plain = _plain(*swapped, mask is None, mask, None, HEAD_DIM**-0.5, 0.0, None, 0).transpose(1, 2)
    expected = formula(*inputs, mask if masked else CAUSAL)
    torch.testing.assert_close(fused.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain.double(), expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(fused.shape, generator=torch.Generator().manual_seed(1))
    fused.backward(weight)
    plain.backward(weight)
    for a, b in zip(inputs, other):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "window, softcap, scale", [(7, None, 0.3), (None, 0.8, None), (7, 0.8, 0.3), (99, None, 0.3)]
)
def test_window_softcap_and_scale_are_the_formula_in_value_and_gradient(
    window, softcap, scale, dropout, masked
):
    inputs, other = qkv(groups=2), qkv(groups=2)
    documents = document_mask(DOCUMENTS) if masked else None
    rows = dropout_rows() if dropout else None
    out = attention(
        *inputs,
        mask=documents,
        window=window,
        softcap=softcap,
        scale=scale,
        dropout=dropout,
        dropout_rows=rows,
    )
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    allowed = (documents if masked else CAUSAL) & (distance < (window or SEQ))
    kept = attention_keep_mask(rows, HEADS, torch.arange(SEQ), dropout) if dropout else None
    expected = formula(*other, allowed, kept, dropout, softcap, scale or HEAD_DIM**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(weight)
    expected.backward(weight.double())
    for a, b in zip(inputs, other):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 3, 12])
def test_the_window_of_the_last_tokens_is_that_of_the_whole_sequence(queries):
    query, key, value = qkv(groups=2)
    whole = attention(query, key, value, window=5)
    distance = torch.arange(SEQ)[-queries:, None] - torch.arange(SEQ)
    mask = (distance >= 0)[None, None] if queries > 1 else None  # as the model makes it for a cache
    last = attention(query[:, -queries:], key, value, causal=queries > 1, mask=mask, window=5)
    torch.testing.assert_close(last, whole[:, -queries:])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("masked", [False, True])
def test_the_kernel_made_of_the_capped_formula_is_the_plain_path(masked):
    inputs = [x.detach().transpose(1, 2) for x in qkv(groups=2)]
    mask = document_mask(DOCUMENTS) if masked else None
    arguments = (not masked, mask, 0.8, 0.3)
    torch.testing.assert_close(_flex(*inputs, *arguments), _plain(*inputs, *arguments, 0.0, None, 0))


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


# What a GPU is asked for, on a CPU: its operator takes the kernels that are here.
WHERE = {
    "documents": dict(mask=document_mask(DOCUMENTS), window=None),
    "window": dict(mask=None, window=7),
    "documents and window": dict(mask=document_mask(DOCUMENTS), window=7),
    "nothing": dict(mask=None, window=None),
}


def on_gpu(query, key, value, mask, window):
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    causal = mask is None and window is None
    return _on_gpu(*heads, causal, mask, window, query.shape[3] ** -0.5, 0.0).transpose(1, 2)


def allowed_by(mask, window):
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    return (CAUSAL if mask is None else mask) & (distance < (window or SEQ))


def value_and_gradients(function, inputs):
    out = function(*inputs)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, inputs, weight)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("groups, head_dim", [(1, 16), (2, 16), (2, 20), (HEADS, 16)])
@pytest.mark.parametrize("widest", [0, 256])  # heads that a device's causal kernels take in groups
def test_masks_and_windows_with_grouped_heads_are_the_formula(monkeypatch, where, groups, head_dim, widest):
    monkeypatch.setattr(chosen, "_widest_grouped_head", lambda: widest)
    inputs = qkv(groups, head_dim=head_dim)
    found = value_and_gradients(lambda *x: on_gpu(*x, **WHERE[where]), inputs)
    allowed = allowed_by(**WHERE[where])
    exact = value_and_gradients(lambda *x: formula(*x, allowed, scale=head_dim**-0.5).float(), inputs)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", WHERE)
def test_compiled_and_recomputed_the_gpus_choice_is_the_same(monkeypatch, where):
    monkeypatch.setattr(chosen, "_widest_grouped_head", torch.compiler.assume_constant_result(lambda: 0))
    inputs = qkv(groups=2, dtype=torch.bfloat16)

    def layer(*x):
        return checkpoint(on_gpu, *x, **WHERE[where], use_reentrant=False)

    expected = value_and_gradients(lambda *x: on_gpu(*x, **WHERE[where]), inputs)
    torch._dynamo.reset()
    found = value_and_gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), inputs)
    torch._dynamo.reset()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_the_operator_keeps_the_rules_of_torchs_operators():
    inputs = [x.transpose(1, 2) for x in qkv(groups=2)]
    for where in WHERE.values():
        torch.library.opcheck(
            torch.ops.megalith.block_attention, (*inputs, where["mask"], False, where["window"], 0.25)
        )


@pytest.mark.parametrize("where", ["documents", "window", "documents and window"])
def test_the_masked_kernel_gets_a_head_of_keys_for_each_of_queries_and_rows_of_16(monkeypatch, where):
    """torch's operator asks for both, and looks at neither."""

    def scores(query, key, value, bias, scale):
        assert query.shape[:2] == key.shape[:2] == value.shape[:2] == bias.shape[:2]
        assert bias.stride(-2) % 16 == 0 and bias.stride(-1) == 1 and bias.dtype == query.dtype
        return query @ key.mT * scale + bias

    def forward(query, key, value, bias, wants_lse, dropout, causal, scale):
        assert wants_lse and not dropout and not causal
        found = scores(query, key, value, bias, scale)
        return found.softmax(-1) @ value, found.logsumexp(-1)

    def backward(grad, query, key, value, bias, out, lse, *_, scale):
        assert lse.shape[-1] % 32 == 0
        probabilities = scores(query, key, value, bias, scale).softmax(-1)
        d_scores = probabilities * (grad @ value.mT - (grad * out).sum(-1, keepdim=True)) * scale
        return d_scores @ key, d_scores.mT @ query, probabilities.mT @ grad, None

    name = "_scaled_dot_product_efficient_attention"
    aten = SimpleNamespace(**{name: forward, f"{name}_backward": backward})
    monkeypatch.setattr(attention_blocks, "_aten", aten)
    monkeypatch.setattr(attention_blocks, "_kernel_for", lambda *_: attention_blocks.KERNELS["efficient"])
    monkeypatch.setattr(chosen, "_widest_grouped_head", lambda: 256)
    inputs = qkv(groups=2)
    found = value_and_gradients(lambda *x: on_gpu(*x, **WHERE[where]), inputs)
    exact = value_and_gradients(lambda *x: formula(*x, allowed_by(**WHERE[where])).float(), inputs)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "heads, groups, head_dim, dtype, widest, taken",
    [
        (8, 2, 128, torch.bfloat16, 256, True),
        (8, 2, 256, torch.float16, 192, False),
        (8, 2, 64, torch.float32, 256, False),  # where torch has its slowest kernel alone
        (8, 2, 64, torch.float16, 0, False),
        (8, 8, 64, torch.float32, 0, True),
    ],
)
def test_torchs_causal_kernels_take_grouped_heads_that_are_short_and_narrow(
    monkeypatch, heads, groups, head_dim, dtype, widest, taken
):
    monkeypatch.setattr(chosen, "_widest_grouped_head", lambda: widest)
    query, key = (torch.empty(1, count, 32, head_dim, dtype=dtype) for count in (heads, groups))
    assert takes_heads(query, key) == taken
