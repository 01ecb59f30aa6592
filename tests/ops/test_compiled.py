"""Kernels of their own: how often one is compiled."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from megalith.compat.dynamo import mark_constant
from megalith.ops import compiled, permute
from megalith.ops.compiled import as_one_kernel
from megalith.ops.permute import Permutation, sum_rows, take_rows


@pytest.fixture
def counter():
    """Counts what is compiled, here as it would be on a GPU, and runs it as it is."""
    counter, compile = CompileCounter(), torch.compile
    torch._dynamo.reset()
    compiled._compiled.cache_clear()
    with (
        mock.patch.object(compiled, "_on_gpu", return_value=True),
        mock.patch.object(torch, "compile", lambda f, **options: compile(f, backend=counter, **options)),
    ):
        yield counter
    compiled._compiled.cache_clear()


def scaled(x: Tensor, factors: Tensor) -> Tensor:
    return x * factors


def test_rows_that_vary_are_compiled_once(counter):
    for rows in (6, 3, 17, 4):
        x, factors = torch.randn(rows, 8, requires_grad=True), torch.randn(rows, 1)
        assert torch.equal(as_one_kernel(scaled, x, factors, rows_vary=True), x * factors)
    assert counter.frame_count == 1
    as_one_kernel(scaled, torch.randn(5, 4), torch.randn(5, 1), rows_vary=True)
    assert counter.frame_count > 1  # rows of another length


def test_sums_of_rows_are_compiled_once_for_forward_and_backward_passes(counter):
    torch.manual_seed(0)
    for tokens in (4, 5, 9):
        pair = torch.randperm(tokens * 2)
        order = Permutation(pair // 2, pair.argsort().view(tokens, 2))
        x = torch.randn(tokens, 8, requires_grad=True)
        y = sum_rows(take_rows(x, order, True), order, True)
        y.sum().backward()
        assert torch.equal(y, 2 * x) and torch.equal(x.grad, torch.full_like(x, 2))
    assert counter.frame_count == 1


def copied(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sizes, before, has = permute.count_destinations(groups, 5)
    return sizes[:4], *permute.replicate_tokens(sizes[:4], before[:, :4], has[:, :4])


def test_copies_compiled_are_those_of_eager(counter):
    groups = torch.randint(0, 5, (12, 3), generator=torch.Generator().manual_seed(0))
    sizes, token, row = copied(groups)
    found = as_one_kernel(copied, groups, sizes_vary=True)
    rows = sizes.sum()
    assert torch.equal(found[0], sizes) and torch.equal(found[2], row)
    assert rows and torch.equal(found[1][:rows], token[:rows])
    assert counter.frame_count == 1


def test_a_constant_is_marked_as_torch_marks_one():
    ours, theirs = mark_constant(lambda: 1), torch.compiler.assume_constant_result(lambda: 1)
    assert vars(ours) == vars(theirs) != {}
