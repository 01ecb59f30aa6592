"""Batch-invariant recurrences: right by the ordinary ones, and the same bits for a token in every batch, row and
prefix."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalith.generation.exact_cache import ExactDecode, ExactPrefill
from megalith.generation.static_cache import LayerState
from megalith.ops import delta_rule, state_space
from megalith.ops.batch_invariant import recurrences
from megalith.ops.batch_invariant.recurrences import (
    batched_matmul,
    chunk_slots,
    convolution,
    running_sums,
    solve_unit_lower,
    with_gradient_of,
)
from megalith.ops.causal_conv import causal_conv
from megalith.ops.chunks import CHUNK

BATCH, SEQ = 4, 151
ENDS = [(1, 70, SEQ), (64, 100, SEQ), (3, 9, 67, SEQ), (SEQ,)]


def delta_inputs(*channels: int) -> list[Tensor]:
    query, key = torch.randn(2, BATCH, SEQ, 2, 20)
    decay = -torch.rand(BATCH, SEQ, 4, *channels)
    return [query, key, torch.randn(BATCH, SEQ, 4, 12), decay, torch.rand(BATCH, SEQ, 4)]


def mamba_inputs() -> list[Tensor]:
    step = torch.rand(BATCH, SEQ, 4)
    b, c = torch.randn(2, BATCH, SEQ, 2, 5)
    return [torch.randn(BATCH, SEQ, 4, 7), step, -2 * step, b, c, torch.randn(4)]


RULES = {
    "delta rule": (delta_inputs, delta_rule.gated_delta_rule, recurrences.delta_rule_of_documents),
    "by channel": (
        partial(delta_inputs, 20),
        delta_rule.gated_delta_rule,
        recurrences.delta_rule_of_documents,
    ),
    "state space": (mamba_inputs, state_space.state_space, recurrences.state_space_of_documents),
}


def documents() -> Tensor:
    tokens = torch.arange(SEQ)
    return torch.stack([torch.searchsorted(torch.tensor(row), tokens, right=True) for row in ENDS])


def part(inputs: list[Tensor], row: slice, tokens: slice) -> list[Tensor]:
    return [x[row, tokens] if x.dim() > 1 else x for x in inputs]


@pytest.mark.parametrize("name", RULES)
def test_values_and_gradients_are_those_of_the_ordinary_recurrence(name):
    make, ordinary, exact = RULES[name]
    inputs = [x.requires_grad_() for x in make()]
    for numbers in (None, documents()):
        expected, out = ordinary(*inputs, numbers), with_gradient_of(ordinary, exact, *inputs, numbers)
        assert (out - expected).abs().max() <= 2e-6 * expected.abs().max()
        weights = torch.randn_like(out)
        both = [torch.autograd.grad((y * weights).sum(), inputs) for y in (out, expected)]
        for ours, theirs in zip(*both, strict=True):
            assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("name", RULES)
def test_a_token_has_the_same_bits_alone_packed_and_before_any_continuation(name):
    make, _, exact = RULES[name]
    inputs = make()
    packed = exact(*inputs, documents())
    for row, ends in enumerate(ENDS):
        for first, last in pairwise((0, *ends)):
            for end in {last, first + 1, min(last, first + 5), min(last, first + 65)}:
                alone = exact(*part(inputs, slice(row, row + 1), slice(first, end)), None)
                assert torch.equal(alone[0], packed[row, first:end]), (row, first, end)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("lengths", [(3, 63, 64, 70), (1, 127, 128, 65)])
def test_decoding_continues_prompts_with_the_bits_of_whole_sequences(name, lengths):
    make, _, exact = RULES[name]
    inputs = make()
    whole = exact(*inputs, None)
    tokens = [x for x in inputs if x.dim() > 1]
    constants = inputs[len(tokens) :]
    heads, size = whole.shape[2:]
    state_size = inputs[3].shape[-1] if name == "state space" else 20
    states = LayerState(
        torch.zeros(BATCH, 3, 1),
        torch.zeros(BATCH, heads, state_size, size),
        torch.zeros(BATCH, CHUNK, sum(x[0, 0].numel() for x in tokens)),
    )
    rows, counts = torch.arange(BATCH), torch.tensor(lengths)
    longest = max(lengths)
    method = "state_space" if name == "state space" else "delta_rule"
    prefill = ExactPrefill(None, [], rows, rows, counts, states)
    out = getattr(prefill, method)(*(x[:, :longest] for x in tokens), *constants)
    for row, length in enumerate(lengths):
        assert torch.equal(out[row, :length], whole[row, :length])
    for ahead in range(20):
        at = counts + ahead
        newest = [x[rows, at][:, None] for x in tokens]
        out = getattr(ExactDecode(None, [], [(at, None)], states), method)(*newest, *constants)
        assert torch.equal(out[:, 0], whole[rows, at]), ahead


def test_products_sums_and_systems_are_right_and_do_not_depend_on_the_batch():
    x, y = torch.randn(3, 5, CHUNK, 20), torch.randn(3, 1, 20, 12)
    products = batched_matmul(x, y)
    assert (products - x @ y).abs().max() <= 1e-5
    assert torch.equal(batched_matmul(x[2, 3:4], y[2]), products[2, 3:4])
    for dim, size in ((1, 5), (2, CHUNK), (3, 20)):
        sums = running_sums(x, dim)
        assert (sums - x.cumsum(dim)).abs().max() <= 1e-5
        first = x.narrow(dim, 0, size // 2)
        assert torch.equal(running_sums(first, dim), sums.narrow(dim, 0, size // 2))
    system, right = torch.randn(3, 2, CHUNK, CHUNK) / 8, torch.randn(3, 2, CHUNK, 20)
    solution = solve_unit_lower(system, right)
    unit = torch.eye(CHUNK, dtype=torch.float64) + system.double().tril(-1)
    expected = torch.linalg.solve(unit, right.double())
    assert (solution - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(solve_unit_lower(system[1:2], right[1:2])[0], solution[1])


def test_documents_begin_at_chunks():
    numbers = torch.tensor([[0] * 3 + [1] * 65 + [2] * 2, [5] * 70])
    slots, by_slot = chunk_slots(numbers)
    assert slots[0].tolist() == [0, 1, 2, *range(64, 129), 192, 193]
    assert slots[1].tolist() == list(range(70))
    assert by_slot[:, ::64].tolist() == [[0, 1, 1, 2], [5, 5, -1, -1]]


def test_a_convolution_is_right_and_has_the_same_bits_packed_and_alone():
    x, taps, bias = torch.randn(BATCH, SEQ, 6), torch.randn(6, 1, 4), torch.randn(6)
    packed = convolution(x, taps, documents(), bias)
    assert (packed - causal_conv(x, taps, documents(), bias)).abs().max() <= 1e-5
    for row, ends in enumerate(ENDS):
        for first, last in pairwise((0, *ends)):
            alone = convolution(x[row : row + 1, first:last], taps, None, bias)
            assert torch.equal(alone[0], packed[row, first:last])
