"""Attention: the plain path is the fused one, dropout is keyed by place, and a document mask stops attention."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from default_cases import by_default, in_full
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from megalith.data.batch import document_ends
from megalith.ops import attention_blocks, attention_kernels
from megalith.ops import attention_core as chosen
from megalith.ops.attention_core import Visibility, _flex, _on_gpu, attention, plain_attention, supports_heads
from megalith.ops.cached_attention import cached_attention, continued_attention, visible_positions
from megalith.ops.documents import (
    chunk_ends,
    cumulative_lengths,
    document_ids,
    ends_in_spans,
    same_document_mask,
)
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


def formula(query, key, value, allowed, kept=None, p=0.0, softcap=None, scale=HEAD_DIM**-0.5, bias=0.0):
    """Softmax attention written out in float64; allowed and kept bool [batch or 1, heads or 1, queries, keys]."""
    shared = query.shape[2] // key.shape[2]
    query, key, value = (x.double().transpose(1, 2) for x in (query, key, value))
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.mT * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    probabilities = (scores + bias).masked_fill(~allowed, -torch.inf).softmax(-1)
    if kept is not None:
        probabilities = probabilities * kept / (1 - p)
    return (probabilities @ value).transpose(1, 2)


CAUSAL = torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).tril()
DOCUMENTS = torch.tensor([[9, SEQ, SEQ], [1, 21, SEQ]], dtype=torch.int32)  # where they end
NUMBERS = torch.tensor([[0] * 9 + [1] * 15, [0] * 1 + [1] * 20 + [2] * 3])
INSIDE = CAUSAL & (NUMBERS[:, :, None] == NUMBERS[:, None])[:, None]


@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_and_plain_path_are_the_formula_in_value_and_gradient(groups, masked):
    mask = INSIDE if masked else None
    inputs, other = qkv(groups), qkv(groups)
    fused = attention(*inputs, causal=True, documents=DOCUMENTS if masked else None)
    swapped = [x.transpose(1, 2) for x in other]
    plain = plain_attention(*swapped, mask is None, mask, None, HEAD_DIM**-0.5, 0.0, None, 0).transpose(1, 2)
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
    rows = dropout_rows() if dropout else None
    out = attention(
        *inputs,
        documents=DOCUMENTS if masked else None,
        window=window,
        softcap=softcap,
        scale=scale,
        dropout=dropout,
        dropout_rows=rows,
    )
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    allowed = (INSIDE if masked else CAUSAL) & (distance < (window or SEQ))
    kept = attention_keep_mask(rows, HEADS, torch.arange(SEQ), dropout) if dropout else None
    expected = formula(*other, allowed, kept, dropout, softcap, scale or HEAD_DIM**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(weight)
    expected.backward(weight.double())
    for a, b in zip(inputs, other):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


def published_slopes(heads):
    """As the paper's code has them: a geometric sequence, and every second one of the next longer sequence."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (k + 1) / heads) for k in range(heads)]
    power = 2 ** (heads.bit_length() - 1)
    return published_slopes(power) + published_slopes(2 * power)[::2][: heads - power]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("heads", by_default([4, 6, 12, 14], 14))
@pytest.mark.parametrize("documents, window", [(None, None), (DOCUMENTS, None), (None, 7)])
def test_alibi_biases_scores_by_distance_with_the_slopes_of_all_heads(heads, documents, window):
    first = heads - HEADS  # these are the last of them
    inputs, other = qkv(groups=2), qkv(groups=2)
    out = attention(*inputs, documents=documents, window=window, alibi=heads, first_head=first)
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    slopes = torch.tensor(published_slopes(heads)[first:], dtype=torch.float64)
    allowed = (CAUSAL if documents is None else INSIDE) & (distance < (window or SEQ))
    expected = formula(*other, allowed, bias=-slopes[:, None, None] * distance)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(weight)
    expected.backward(weight.double())
    for a, b in zip(inputs, other):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    for queries in (1, 3):  # with a cache: the last tokens
        mask = None if queries == 1 else CAUSAL[:, :, -queries:]
        if documents is None:
            own = inputs[0][:, -queries:]
            last = attention(
                own, *inputs[1:], causal=False, mask=mask, window=window, alibi=heads, first_head=first
            )
            torch.testing.assert_close(last, out[:, -queries:])
    swapped = [x.detach().transpose(1, 2) for x in inputs]
    made = _flex(*swapped, Visibility(True, None, documents, window), None, HEAD_DIM**-0.5, slopes.float())
    torch.testing.assert_close(made.transpose(1, 2), out.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("groups", [1, HEADS])
@pytest.mark.parametrize("seen", ["causal", "window", "documents", "mask"])
def test_a_sink_is_one_more_column_of_scores_in_value_and_gradient(groups, seen):
    near = torch.arange(SEQ) > torch.arange(SEQ)[:, None] - 6
    allowed = {"causal": CAUSAL, "window": CAUSAL & near}.get(seen, INSIDE)
    how = {"window": {"window": 6}, "documents": {"documents": DOCUMENTS}, "mask": {"mask": INSIDE}}.get(
        seen, {}
    )
    leaves = [*qkv(groups), torch.randn(HEADS, generator=torch.Generator().manual_seed(3)).requires_grad_()]
    *given, sink = leaves
    nothing = sink.double()[:, None, None].expand(BATCH, HEADS, SEQ, 1)
    query, key, value = (x.double().transpose(1, 2) for x in given)
    key, value = (x.repeat_interleave(HEADS // groups, 1) for x in (key, value))
    scores = (query @ key.mT * HEAD_DIM**-0.5).masked_fill(~allowed, -torch.inf)
    expected = (torch.cat([scores, nothing], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2)
    found = attention(*given, **how, sink=sink)
    assert (found - expected).abs().max() < 1e-6
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    for ours, theirs in zip(
        *(torch.autograd.grad((out * weights).sum(), leaves) for out in (found, expected))
    ):
        assert (ours - theirs).abs().max() < 5e-6 * theirs.abs().max()


@pytest.mark.parametrize("queries", [1, 3, 12])
def test_the_window_of_the_last_tokens_is_that_of_the_whole_sequence(queries):
    query, key, value = qkv(groups=2)
    whole = attention(query, key, value, window=5)
    distance = torch.arange(SEQ)[-queries:, None] - torch.arange(SEQ)
    mask = (distance >= 0)[None, None] if queries > 1 else None  # as the model makes it for a cache
    last = attention(query[:, -queries:], key, value, causal=queries > 1, mask=mask, window=5)
    torch.testing.assert_close(last, whole[:, -queries:])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "documents, window", [in_full(None, None), (DOCUMENTS, None), in_full(None, 7), in_full(DOCUMENTS, 7)]
)
def test_the_kernel_made_of_the_capped_formula_is_the_plain_path(documents, window):
    inputs = [x.detach().transpose(1, 2) for x in qkv(groups=2)]
    for seen in (
        Visibility(True, documents=documents, window=window),
        Visibility(False, documents=documents),
        Visibility(False, INSIDE, window=window),
    ):
        plain = plain_attention(*inputs, *seen.dense(*inputs[:2]), 0.8, 0.3, 0.0, None, 0)
        torch.testing.assert_close(_flex(*inputs, seen, 0.8, 0.3), plain)


ENDS = torch.tensor([[130, 400, 400], [1, 128, 400]], dtype=torch.int32)


@pytest.mark.parametrize(
    "queries, keys, seen",
    [
        (400, 400, Visibility(True)),
        (400, 400, Visibility(True, window=150)),
        (300, 500, Visibility(True, window=140)),
        (512, 512, Visibility(True, window=1)),
        (400, 400, Visibility(True, documents=ENDS)),
        (400, 400, Visibility(False, documents=ENDS)),
        (400, 400, Visibility(True, documents=ENDS, window=150)),
    ],
)
def test_that_kernel_is_given_the_blocks_in_which_the_mask_has_something(monkeypatch, queries, keys, seen):
    given = []
    monkeypatch.setattr(chosen, "flex_attention", lambda *x, **_: given.append(x[4]))
    query, key = torch.empty(2, 1, queries, 8), torch.empty(2, 1, keys, 8)
    _flex(query, key, key, seen, 0.8, 0.3)
    causal, mask = seen.dense(query, key)
    mask = CAUSAL.new_ones(queries, keys).tril(keys - queries)[None, None] if causal else mask
    sides = pad(mask, (0, -keys % 128, 0, -queries % 128)).unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    exact = sides.transpose(3, 4).flatten(4).sum(-1)  # [batch, 1, row blocks, column blocks]
    whole = listed(given[0].full_kv_num_blocks, given[0].full_kv_indices)
    assert torch.equal(whole, exact == 128 * 128)
    assert torch.equal(listed(given[0].kv_num_blocks, given[0].kv_indices), (exact > 0) & ~whole)


def listed(numbers, columns):
    """The columns of each row as bool [batch, 1, rows, columns]."""
    named = torch.arange(columns.shape[-1]) < numbers[..., None]
    return torch.zeros_like(named).scatter(-1, columns.long(), named)


@pytest.mark.parametrize("masked", [False, True])
def test_dropout_drops_the_probabilities_that_their_place_says(masked):
    p, inputs = 0.3, qkv(groups=2)
    out = attention(*inputs, documents=DOCUMENTS if masked else None, dropout=p, dropout_rows=dropout_rows())
    kept = attention_keep_mask(dropout_rows(), HEADS, torch.arange(SEQ), p)
    expected = formula(*inputs, INSIDE if masked else CAUSAL, kept, p)
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


@pytest.mark.parametrize("causal", [False, True])
def test_cumulative_lengths_and_numbers_of_random_documents_mean_the_mask_of_a_token_by_token_walk(causal):
    """So does what a rank of context parallelism has of them, which need not be a piece of the sequence."""
    random = np.random.default_rng(1)
    for _ in range(40):
        seq = int(random.integers(2, 40))
        begins = random.random((int(random.integers(1, 4)), seq)) < random.choice([0.05, 0.3, 0.9])
        begins[:, 0] = random.random() < 0.5  # which says nothing
        ends = document_ends(begins)
        if ends is None:
            assert not begins[:, 1:].any()
            continue
        assert ends.shape[1] >= 8 and ends.shape[1].bit_count() == 1 and (ends[:, -1] == seq).all()
        walked, places = np.zeros(begins.shape, int), np.arange(seq)
        for at in range(1, seq):
            walked[:, at] = walked[:, at - 1] + begins[:, at]
        allowed = (walked[:, :, None] == walked[:, None]) & (~causal | (places[:, None] >= places))
        numbers = document_ids(ends, seq)
        assert (numbers.numpy() == walked).all()
        assert (same_document_mask(numbers, numbers, causal)[:, 0].numpy() == allowed).all()
        lengths = cumulative_lengths(ends, seq)
        assert lengths.dtype == torch.int32 and lengths[0] == 0 and lengths[-1] == begins.size
        found = np.zeros((begins.size, begins.size), bool)
        for first, last in itertools.pairwise(lengths.tolist()):
            found[first:last, first:last] = np.tri(last - first) if causal else True
        for row in range(len(begins)):
            own = slice(row * seq, (row + 1) * seq)
            assert (found[own, own] == allowed[row]).all() and found[own].sum() == allowed[row].sum()
        early, late = sorted(random.integers(0, seq + 1, 2))
        spans = [range(early // 2, early), range(late, seq)]
        here = [place for span in spans for place in span]
        part = ends_in_spans(ends, spans)
        assert (document_ids(part, len(here)).numpy() == walked[:, here]).all()


def flash_of(query, key, value, lengths, own_lengths, longest, own_longest, causal, left, right):
    """What flash does with cumulative lengths, token by token: the result, and its log-sum-exp as flash gives it."""
    shared = query.shape[1] // key.shape[1]
    allowed = torch.zeros(len(query), len(key), dtype=torch.bool)
    for (a, b), (c, d) in zip(itertools.pairwise(lengths), itertools.pairwise(own_lengths), strict=True):
        assert b - a <= longest and d - c <= own_longest
        behind = torch.arange(c, d) - (torch.arange(a, b) + (d - c) - (b - a) - a + c)[:, None]
        before = (behind <= 0) | (not causal)
        allowed[a:b, c:d] = before & ((behind >= -left) | (left < 0)) & ((behind <= right) | (right < 0))
    key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)  # [heads, queries]
    probabilities = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    return probabilities, torch.where(lse.isinf(), torch.inf, lse), key, value


@pytest.mark.parametrize("where", ["documents", "window", "documents and window", "across", "ahead"])
def test_flash_gets_documents_and_windows_as_it_takes_them(monkeypatch, where):
    """Its operator alone replaced: tokens in rows, cumulative lengths, a window to the left; no mask."""

    def prepared(query, key, value, lengths, own_lengths, longest, own_longest, causal, scale, left, right):
        assert causal == (right == 0) if left >= 0 else right == -1
        if lengths is None:
            batch = query.shape[0]
            lengths, own_lengths = (torch.arange(batch + 1) * x.shape[1] for x in (query, key))
            query, key, value = (x.flatten(0, 1) for x in (query, key, value))
        else:
            assert lengths.dtype == own_lengths.dtype == torch.int32 and query.dim() == 3
        both = lengths.tolist(), own_lengths.tolist()
        return flash_of(query * scale, key, value, *both, longest, own_longest, causal, left, right)

    def settings(window_size_left=-1, window_size_right=-1, *, scale):
        return scale, window_size_left, window_size_right

    def forward(query, key, value, *lengths, **given):
        *lengths, dropout, causal, debug = lengths
        assert not dropout and not debug
        probabilities, lse, _, value = prepared(query, key, value, *lengths, causal, *settings(**given))
        out = torch.einsum("hqk,khd->qhd", probabilities, value).view(query.shape)
        return out, lse if query.dim() == 3 else by_row(lse, len(query)), torch.zeros(2), None, None

    def backward(grad, query, key, value, out, lse, *lengths, **given):
        *lengths, _, causal, _, _ = lengths
        shape, of_keys = query.shape, key.shape
        if lengths[0] is None:
            lse = lse.transpose(0, 1).flatten(1)
        probabilities, _, keys, values = prepared(query, key, value, *lengths, causal, *settings(**given))
        scale = given["scale"]
        grad, out, query = (x.reshape(-1, *x.shape[-2:]) for x in (grad, out, query))
        scores = torch.einsum("qhd,khd->hqk", query * scale, keys)
        probabilities = torch.where(probabilities > 0, (scores - lse[..., None]).exp(), 0.0)
        d_probabilities = torch.einsum("qhd,khd->hqk", grad, values)
        d_scores = probabilities * (d_probabilities - (grad * out).sum(-1).T[..., None]) * scale
        d_query = torch.einsum("hqk,khd->qhd", d_scores, keys).view(shape)
        groups = of_keys[-2]
        d_key, d_value = (
            torch.einsum("hqk,qhd->khd", a, b).unflatten(1, (groups, -1)).sum(2).view(of_keys)
            for a, b in ((d_scores, query), (probabilities, grad))
        )
        return d_query, d_key, d_value

    def by_row(lse, batch):
        return lse.unflatten(1, (batch, -1)).transpose(0, 1).contiguous()

    operators = SimpleNamespace(varlen_flash_attention=forward, varlen_flash_attention_backward=backward)
    monkeypatch.setattr(attention_kernels, "operators", operators)
    flash = attention_kernels.KERNELS["flash"]
    monkeypatch.setattr(attention_blocks, "_chosen", lambda query, key, value, block: (flash, block))
    inputs = qkv(groups=2)
    if where in ("across", "ahead"):  # some queries over other keys, as a block of a ring has them
        rows, keys = range(12, SEQ), range(3, 15)
        parts = inputs[0][:, 12:], inputs[1][:, 3:15], inputs[2][:, 3:15]
        seen = dict(documents=tuple(ends_in_spans(DOCUMENTS, [x]) for x in (rows, keys)))
        seen = seen if where == "across" else dict(window=12, ahead=SEQ - 15)
        block = attention_kernels.Block(**seen, scale=0.25)
        heads = [x.transpose(1, 2).detach().requires_grad_() for x in parts]
        out, lse, _ = attention_blocks.block_forward(*heads, block)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        found = attention_blocks.block_backward(grad, *heads, out, lse, torch.zeros(2).long(), block)
        monkeypatch.undo()
        expected, expected_lse, _ = attention_blocks.block_forward(*heads, block)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
        assert lse.isinf().any() == (where == "across") and (lse.isinf() == (lse == -torch.inf)).all()
        exact = attention_blocks.block_backward(
            grad, *heads, expected, lse, torch.zeros(2, dtype=torch.int64), block
        )
    else:
        found = value_and_gradients(lambda *x: on_gpu(*x, WHERE[where]), inputs)
        allowed = allowed_by(WHERE[where])
        exact = value_and_gradients(lambda *x: formula(*x, allowed).float(), inputs)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# What a GPU is asked for, on a CPU: its operator takes the kernels that are here.
WHERE = {
    "documents": Visibility(True, documents=DOCUMENTS),
    "window": Visibility(True, window=7),
    "documents and window": Visibility(True, documents=DOCUMENTS, window=7),
    "mask": Visibility(False, INSIDE),
    "nothing": Visibility(True),
}


def on_gpu(query, key, value, seen):
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    return _on_gpu(*heads, seen, query.shape[3] ** -0.5, 0.0).transpose(1, 2)


def allowed_by(seen):
    distance = torch.arange(SEQ)[:, None] - torch.arange(SEQ)
    inside = CAUSAL if seen.mask is None and seen.documents is None else INSIDE
    return inside & (distance < (seen.window or SEQ))


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
    found = value_and_gradients(lambda *x: on_gpu(*x, WHERE[where]), inputs)
    allowed = allowed_by(WHERE[where])
    exact = value_and_gradients(lambda *x: formula(*x, allowed, scale=head_dim**-0.5).float(), inputs)
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("where", by_default(WHERE, "documents and window", "mask"))
def test_compiled_and_recomputed_the_gpus_choice_is_the_same(monkeypatch, where):
    monkeypatch.setattr(chosen, "_widest_grouped_head", torch.compiler.assume_constant_result(lambda: 0))
    inputs = qkv(groups=2, dtype=torch.bfloat16)

    def layer(*x):
        return checkpoint(on_gpu, *x, WHERE[where], use_reentrant=False)

    expected = value_and_gradients(lambda *x: on_gpu(*x, WHERE[where]), inputs)
    torch._dynamo.reset()
    found = value_and_gradients(torch.compile(layer, fullgraph=True, backend="aot_eager"), inputs)
    torch._dynamo.reset()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("where", by_default(WHERE, "documents and window", "mask"))
def test_the_operator_keeps_the_rules_of_torchs_operators(where):
    inputs = [x.transpose(1, 2) for x in qkv(groups=2)]
    causal, mask, documents, window = WHERE[where]
    arguments = (*inputs, mask, documents, causal, window, 0.25)
    torch.library.opcheck(torch.ops.megalith.block_attention, arguments)


@pytest.mark.parametrize("where", ["documents", "window", "documents and window", "mask"])
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

    operators = SimpleNamespace(efficient_attention=forward, efficient_attention_backward=backward)
    monkeypatch.setattr(attention_kernels, "operators", operators)
    chosen_kernel = attention_blocks._chosen

    def efficient(*given):
        return attention_kernels.KERNELS["efficient"], chosen_kernel(*given)[1]

    monkeypatch.setattr(attention_blocks, "_chosen", efficient)
    monkeypatch.setattr(chosen, "_widest_grouped_head", lambda: 256)
    inputs = qkv(groups=2)
    found = value_and_gradients(lambda *x: on_gpu(*x, WHERE[where]), inputs)
    exact = value_and_gradients(lambda *x: formula(*x, allowed_by(WHERE[where])).float(), inputs)
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
    assert supports_heads(query, key) == taken


@pytest.mark.parametrize(("heads", "groups", "first"), [(6, 6, 0), (6, 2, 0), (4, 2, 4)])
def test_a_token_decoded_with_a_cache_has_the_alibi_bias_of_its_position(heads, groups, first):
    """Against the attention of the whole sequence; `first`: the rank's first head of 12."""
    random, length, room = torch.Generator().manual_seed(0), 9, 13
    query = torch.randn(1, length, heads, 8, generator=random)
    key, value = (torch.randn(1, length, groups, 8, generator=random) for _ in range(2))
    how = dict(scale=0.3, alibi=12, first_head=first)
    expected = attention(query, key, value, **how)[:, -1:]
    cache = torch.full((2, 1, room, groups, 8), torch.nan)
    cache[:, :, : length - 1] = torch.stack([key, value])[:, :, :-1]
    cache[:, :, length:] = 0
    new, position = (x[:, -1:] for x in (query, key, value)), torch.tensor([length - 1])
    found = cached_attention(
        *new, cache, position, visible_positions(position, length), window=None, softcap=None, **how
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_attention_within_chunks_is_that_of_a_mask_in_training_and_in_decoding():
    """Chunks are counted from the start of each document; in generation a row is one document."""
    random, length, size = torch.Generator().manual_seed(0), 14, 4
    query = torch.randn(1, length, 4, 8, generator=random)
    key, value = (torch.randn(1, length, 2, 8, generator=random) for _ in range(2))
    positions = torch.arange(length)
    for starts in ([0], [0, 6]):
        document = sum((positions >= start).long() for start in starts)
        chunk = torch.stack([(positions - start) // size for start in starts])[document - 1, positions]
        pair = document * 100 + chunk
        mask = ((pair[:, None] == pair) & (positions <= positions[:, None]))[None, None]
        ends = chunk_ends(torch.tensor([[*starts[1:], length]], dtype=torch.int32), size, length)
        expected = attention(query, key, value, mask=mask)
        found = attention(query, key, value, documents=ends)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected = attention(query, key, value, documents=chunk_ends(ends[:, -1:], size, length))
    plain = dict(window=None, softcap=None, scale=None, chunk=size)
    seen = positions[None, 5:]
    torch.testing.assert_close(
        continued_attention(query[:, 5:], key, value, seen, **plain), expected[:, 5:], rtol=1e-5, atol=1e-6
    )
    for last in (3, 4, 13):
        cache = torch.stack([key, value])
        new, position = (x[:, last : last + 1] for x in (query, key, value)), torch.tensor([last])
        found = cached_attention(*new, cache, position, visible_positions(position, last + 1), **plain)
        torch.testing.assert_close(found, expected[:, last : last + 1], rtol=1e-5, atol=1e-6)
