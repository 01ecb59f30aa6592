"""Batch-invariant operators: right by ordinary ones, and the same bits for a row whatever else is computed with it."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from megalith.errors import ConfigError
from megalith.ops.activation import ACTIVATIONS, gated_activation
from megalith.ops.attention_core import attention as ordinary_attention
from megalith.ops.batch_invariant import norms
from megalith.ops.batch_invariant.elementwise import (
    activation_by_whole_vectors,
    by_whole_vectors,
    sum_by_pairs,
)
from megalith.ops.batch_invariant.invariant_attention import (
    attend,
    attention,
    cached_attention,
    first_keys,
)
from megalith.ops.batch_invariant.matmul import (
    TILE,
    BatchInvariantGroupedGemm,
    BatchInvariantGroupedRowGemm,
    local_parts,
    matmul,
    sum_of_parts,
)
from megalith.ops.batch_invariant.token_logprobs import statistics, token_logprobs
from megalith.ops.cached_attention import visible_positions
from megalith.ops.documents import padding_attention_mask, same_document_mask
from megalith.ops.grouped_gemm import RowGroups

BATCH, SEQ, HEADS, GROUPS, SIZE = 3, 70, 6, 2, 24


@pytest.mark.parametrize(
    ("inner", "out"), [(5, 40), (16, 33), (38, 10), (48, 96), (72, 300), (250, 1000), (1024, 64)]
)
def test_a_row_of_a_matmul_has_the_same_bits_at_every_position_and_in_every_batch(inner, out):
    x, weight = torch.randn(3 * TILE + 5, inner), torch.randn(out, inner)
    every = matmul(x, weight)
    assert (every - x @ weight.T).abs().max() <= 1e-5 * inner**0.5
    for rows in (1, 2, 3, 7, TILE, TILE + 1):
        assert torch.equal(matmul(x[:rows], weight), every[:rows])
    for position in range(TILE):  # the first row, among others
        assert torch.equal(matmul(x.roll(position, 0)[: TILE + 3], weight)[position], every[0])
    for first in range(1, 9):  # whole tiles that begin anywhere in memory
        assert torch.equal(matmul(x[first : first + TILE], weight), every[first : first + TILE])


@pytest.mark.parametrize(("inner", "out"), [(16, 32), (88, 40), (250, 1000), (1024, 96)])
def test_a_column_of_a_matmul_has_the_same_bits_in_every_shard_of_the_weight(inner, out):
    x, weight = torch.randn(TILE + 5, inner), torch.randn(out, inner)
    for ranks in (2, 4, 8):
        assert torch.equal(
            torch.cat([matmul(x, shard) for shard in weight.chunk(ranks)], 1), matmul(x, weight)
        )


@pytest.mark.parametrize(("inner", "parts"), [(40, 8), (88, 8), (1024, 8), (36, 4), (25, 1)])
def test_sums_of_parts_are_the_matmul_and_ranks_add_subtrees_of_them(inner, parts):
    x, weight = torch.randn(TILE + 5, inner), torch.randn(24, inner)
    assert local_parts(inner, 1) == parts
    every = sum_of_parts(x, weight, parts, torch.float32)
    assert (every - x @ weight.T).abs().max() <= 1e-5 * inner**0.5
    assert torch.equal(sum_of_parts(x[3:4], weight, parts, torch.float32), every[3:4])
    for first in range(1, 6):
        tile = slice(first, first + TILE)
        assert torch.equal(sum_of_parts(x[tile], weight, parts, torch.float32), every[tile])
    for ranks in (2, 4, 8):
        if parts % ranks == 0:
            assert local_parts(inner // ranks, ranks) == parts // ranks
            shards = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1))
            sums = [sum_of_parts(*shard, parts // ranks, torch.float32) for shard in shards]
            assert torch.equal(sum_by_pairs(torch.stack(sums)), every)


def test_a_shard_that_does_not_divide_into_parts_is_one():
    assert local_parts(10, 3) == local_parts(5, 2) == local_parts(64, 16) == 1
    assert torch.equal(sum_by_pairs(torch.tensor([1.0, 2, 4, 8, 16])), torch.tensor(31.0))


def test_the_rows_of_an_expert_do_not_depend_on_the_other_experts():
    x, weight, gemm = torch.randn(60, 40), torch.randn(4, 56, 40), BatchInvariantGroupedGemm(False)
    y = gemm.forward(x, weight, RowGroups(torch.tensor([25, 0, 30, 5]), (25, 0, 30, 5)))
    assert torch.equal(y[25:55], matmul(x[25:55], weight[2]))
    alone = RowGroups(torch.tensor([0, 0, 2, 0]), (0, 0, 2, 0), padded=True)
    assert torch.equal(gemm.forward(x[40:50], weight, alone)[:2], y[40:42])


def test_ranks_that_shard_experts_add_subtrees_of_their_sums():
    x, weight = torch.randn(60, 40), torch.randn(3, 24, 40)
    groups = RowGroups(torch.tensor([25, 0, 35]), (25, 0, 35))
    every = BatchInvariantGroupedRowGemm(40).forward(x, weight, groups)
    assert (every[25:] - x[25:] @ weight[2].T).abs().max() <= 1e-4
    for ranks in (2, 4, 8):
        gemm = BatchInvariantGroupedRowGemm(40 // ranks, ranks, lambda y, dtype: y)
        sums = [gemm.forward(*shard, groups) for shard in zip(x.chunk(ranks, 1), weight.chunk(ranks, 2))]
        assert torch.equal(sum_by_pairs(torch.stack(sums)), every)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_does_not_depend_on_the_number_of_elements(name):
    x = torch.randn(31, 90)
    gated = activation_by_whole_vectors(lambda x: ACTIVATIONS[name](x))
    y = gated(x)
    assert torch.allclose(y, ACTIVATIONS[name](x), rtol=1e-6, atol=1e-7)
    for row in range(31):
        assert torch.equal(gated(x[row : row + 1]), y[row : row + 1])


def test_whole_vectors_cover_what_threads_and_ends_of_tensors_compute_otherwise():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # which split this tensor in its middle
        x = torch.randn(7).repeat(6001)
        for function in (F.silu, torch.sigmoid, torch.exp):
            y = by_whole_vectors(function, x).view(-1, 7)
            assert torch.equal(y, y[:1].expand_as(y))
    finally:
        torch.set_num_threads(threads)


def test_elements_with_gaps_between_them_are_computed_as_without():
    x = torch.randn(6400)
    for function in (F.silu, torch.sigmoid, torch.exp):
        assert torch.equal(by_whole_vectors(function, x[::2]), by_whole_vectors(function, x)[::2])


def test_a_gated_activation_keeps_its_bias_clamp_and_offset():
    x, bias = torch.randn(5, 60), torch.zeros(60, requires_grad=True)
    plain = partial(gated_activation, ACTIVATIONS["silu"], clamp=1.5, offset=1.0)
    y = activation_by_whole_vectors(plain)(x, bias)
    assert torch.allclose(y, plain(x, bias), rtol=1e-6, atol=1e-7)
    y.sum().backward()
    assert bias.grad.abs().sum() > 0


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("width", "zero_centred"), [(24, True), (250, False)])
def test_a_norm_is_the_ordinary_one_and_does_not_depend_on_other_rows(width, centred, zero_centred):
    x, weight = torch.randn(20, width, requires_grad=True), torch.randn(width)
    bias = torch.randn(width) if centred else None
    y = norms.norm(x, weight, bias, 1e-5, zero_centred)
    factor = weight + zero_centred
    expected = (
        F.layer_norm(x, (width,), factor, bias, 1e-5) if centred else F.rms_norm(x, (width,), factor, 1e-5)
    )
    assert torch.allclose(y, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(norms.norm(x[7:8], weight, bias, 1e-5, zero_centred), y[7:8])
    grad = torch.randn(20, width)
    ours, theirs = (torch.autograd.grad(each, x, grad)[0] for each in (y, expected))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


EVERY = torch.ones(1, dtype=torch.bool)


def test_log_probabilities_are_those_of_the_softmax_for_any_number_of_rows():
    logits, ids = 3 * torch.randn(40, 1003), torch.randint(0, 1000, (40,))
    log_p = (logits[:, :1000] / 0.7).log_softmax(-1)
    log_sum, logit, entropy = statistics(logits[:, :1000], ids[:, None], EVERY, 0.7, True)
    assert torch.allclose(logit[:, 0] - log_sum, log_p.gather(1, ids[:, None])[:, 0], atol=1e-5)
    assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), atol=1e-5)
    every = token_logprobs(logits.clone(), ids, 0.7, 1000)
    by_row = torch.full((40, 1), 0.7)
    assert torch.equal(token_logprobs(logits.clone(), ids, by_row, 1000), every)
    assert torch.equal(token_logprobs(logits[9:10].clone(), ids[9:10], 0.7, 1000), every[9:10])


def heads(requires_grad: bool = False) -> list[torch.Tensor]:
    sizes = (HEADS, GROUPS, GROUPS)
    return [torch.randn(BATCH, SEQ, n, SIZE, requires_grad=requires_grad) for n in sizes]


DOCUMENTS = torch.tensor([[70, 70, 70, 70], [1, 33, 64, 70], [40, 70, 70, 70]], dtype=torch.int32)
MASK = same_document_mask(*2 * [torch.arange(SEQ)[None].expand(BATCH, -1) >= 40], causal=True)
PADDING = torch.arange(SEQ) < torch.tensor([[0], [9], [33]])


@pytest.mark.parametrize("window", [None, 2, 37])
@pytest.mark.parametrize(
    "seen",
    [{}, {"documents": DOCUMENTS}, {"mask": MASK}, {"mask": padding_attention_mask(PADDING)}],
    ids=["rows", "documents", "padding after", "padding before"],
)
def test_attention_and_its_gradients_are_the_ordinary_ones(seen, window):
    inputs, grad = heads(requires_grad=True), torch.randn(BATCH, SEQ, HEADS, SIZE)
    both = []
    for core in (attention, ordinary_attention):
        out = core(*inputs, window=window, scale=0.3, causal=True, **seen)
        both.append((out, *torch.autograd.grad(out, inputs, grad)))
    for ours, theirs in zip(*both):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize("window", [None, 37])
def test_attention_has_the_same_bits_in_prefill_decode_packed_and_padded_rows(window):
    query, key, value = heads()
    whole = attention(query, key, value, window=window)
    for length in (1, 2, 31, 33, 64):  # a shorter prefill, of one row
        part = (x[1:2, :length] for x in (query, key, value))
        assert torch.equal(attention(*part, window=window), whole[1:2, :length])
    # packed: documents of other lengths in one row, then the same as rows of their own
    packed = attention(query, key, value, documents=DOCUMENTS, window=window)
    for row, first, last in ((1, 1, 33), (1, 33, 64), (2, 40, 70)):
        alone = attention(*(x[row : row + 1, first:last] for x in (query, key, value)), window=window)
        assert torch.equal(packed[row : row + 1, first:last], alone)
    padded = attention(query, key, value, mask=MASK, window=window)
    assert torch.equal(padded[:, :40], whole[:, :40])
    # decode: rows at different positions, in caches that are filled further
    cache = torch.stack([key, value]).clone()
    positions = torch.tensor([0, 69, 33])
    each = torch.arange(BATCH)
    new = (x[each, positions][:, None] for x in (query, key, value))
    visible = visible_positions(positions, SEQ)
    decoded = cached_attention(*new, cache, positions, visible, window=window, scale=None)
    assert torch.equal(decoded[:, 0], whole[each, positions])


@pytest.mark.parametrize("window", [None, 20])
def test_some_queries_of_packed_rows_have_the_same_bits_as_all(window):
    query, key, value = heads()
    packed = attention(query, key, value, documents=DOCUMENTS, window=window)
    for index in (torch.cat([torch.arange(17), torch.arange(53, 70)]), torch.arange(17, 53)):
        starts = first_keys(SEQ, None, DOCUMENTS)[:, index]
        positions = index.expand(BATCH, -1)
        some, _ = attend(query[:, index], key, value, positions, starts, window, SIZE**-0.5)
        assert torch.equal(some, packed[:, index])


def test_attention_refuses_masks_and_arguments_that_it_does_not_have():
    query, key, value = heads()
    mask = MASK.clone()
    mask[:, :, 50, 45] = False
    with pytest.raises(ConfigError, match="supports only document masks and padding"):
        attention(query, key, value, mask=mask)
    with pytest.raises(ConfigError, match="batch-invariant attention does not support softcap"):
        attention(query, key, value, softcap=20.0)
