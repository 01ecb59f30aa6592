"""Matmuls by groups of rows: every path gives the loop's values and gradients, empty groups included."""

import pytest
import torch

from megalith.ops import grouped_gemm
from megalith.ops.grouped_gemm import GroupedGemm, RowGroups, add_bias, grouped_linear, prepare_weight


def values_and_gradients(function, x, weight):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = function(x, weight)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    return y.detach(), x.grad, weight.grad


def one_by_one(sizes):
    return lambda x, weight: torch.cat([rows @ w.T for rows, w in zip(x.split(sizes), weight)])


@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (0, 0, 9, 0), (2, 2, 2, 2), (0, 0, 0, 0)])
@pytest.mark.parametrize("known", [True, False])
def test_fp32_equals_matmuls_one_by_one(sizes, known):
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((sum(sizes), 6), (4, 10, 6)))
    groups = RowGroups(torch.tensor(sizes), sizes if known else None)

    def ours(x, w):
        return grouped_linear(x, prepare_weight(w, w.detach()), groups, GroupedGemm())

    found = values_and_gradients(ours, x, weight)
    for ours, expected in zip(found, values_and_gradients(one_by_one(sizes), x, weight)):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (2, 2, 2, 2)])
def test_what_is_cast_of_a_weight_is_not_kept_for_the_backward_pass(sizes):
    x, weight = torch.randn(sum(sizes), 6).bfloat16().requires_grad_(), torch.randn(4, 10, 6).requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        cast = prepare_weight(weight, weight.detach().bfloat16())
        y = grouped_linear(x, cast, RowGroups(torch.tensor(sizes), sizes), GroupedGemm())
    assert [tensor.data_ptr() for tensor in kept if tensor.dim() == 3] == [weight.data_ptr()]
    y.sum().backward()
    expected = one_by_one(sizes)(torch.ones(len(y), 10), weight.detach().bfloat16().float().mT)
    torch.testing.assert_close(x.grad.float(), expected, rtol=1e-2, atol=1e-2)


def test_torchs_grouped_gemm_in_bf16_equals_matmuls_one_by_one_and_empty_groups_get_zeros(monkeypatch):
    monkeypatch.setattr(grouped_gemm, "has_kernel", lambda rows, width: True)
    sizes = (3, 0, 12, 1)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((16, 16), (4, 24, 16)))

    def by_kernel(x, w):
        return grouped_linear(x, prepare_weight(w, w.detach()), RowGroups(torch.tensor(sizes)), GroupedGemm())

    found = values_and_gradients(by_kernel, x, weight)
    for ours, expected in zip(found, values_and_gradients(one_by_one(sizes), x, weight)):
        torch.testing.assert_close(ours, expected, rtol=1e-2, atol=1e-2)
    assert not found[2][1].any()


@pytest.mark.parametrize("sizes", [(3, 0, 5, 1), (0, 0, 9, 0), (2, 2, 2, 2), (0, 0, 0, 0)])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("weighted, first", [(False, 0), (True, 0), (True, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_biases_and_their_gradients_equal_those_added_group_by_group(
    monkeypatch, sizes, known, weighted, first, dtype
):
    if dtype == torch.bfloat16:  # torch's grouped GEMM is there on a CPU too
        monkeypatch.setattr(grouped_gemm, "has_kernel", lambda *sizes: True)
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(sizes), 24), (4, 24 - 2 * first), (sum(sizes), 1))
    y, bias, factors = (torch.randn(*shape, generator=generator).to(dtype).float() for shape in shapes)
    groups = RowGroups(torch.tensor(sizes), sizes if known else None)

    def group_by_group(y, bias, factors):
        rows = [part.expand(size, -1) for part, size in zip(bias, sizes)]
        rows = torch.cat(rows) * (factors if weighted else 1)
        return y + torch.nn.functional.pad(rows, (first, first))

    def ours(y, bias, factors):
        prepared_bias = prepare_weight(bias, bias.detach().to(dtype))
        return add_bias(y.to(dtype), prepared_bias, groups, factors if weighted else None, first)

    found = []
    for function in (ours, group_by_group):
        leaves = [leaf.clone().requires_grad_() for leaf in (y, bias, factors)]
        total = function(*leaves)
        total.backward(torch.linspace(-1, 1, total.numel()).view_as(total).to(dtype))
        found.append([total.detach().float(), *(leaf.grad for leaf in leaves)])
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    for mine, expected in zip(*found):
        assert (mine is None) == (expected is None)
        if mine is not None:
            assert mine.dtype == torch.float32
            torch.testing.assert_close(mine, expected, rtol=bound, atol=bound)
