"""A product in bf16 with an fp32 result against one of matrices cast to fp32."""

import pytest
import torch

from megalith.ops.gemm import float32_matmul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients_are_those_in_fp32(dtype):
    generator = torch.Generator().manual_seed(0)
    x, weight, grad = (torch.randn(*shape, generator=generator) for shape in ((40, 24), (8, 24), (40, 8)))
    x, weight = (t.to(dtype).requires_grad_() for t in (x, weight))
    y = float32_matmul(x, weight)
    found = [y.detach(), *torch.autograd.grad(y, (x, weight), grad)]
    wide = [t.detach().float() for t in (x, weight)]
    expected = [wide[0] @ wide[1].T, grad @ wide[1], grad.T @ wide[0]]
    assert found[0].dtype == torch.float32 and torch.equal(found[0], expected[0])
    for ours, theirs in zip(found[1:], expected[1:]):
        assert ours.dtype == dtype
        # as far from the gradient in fp32 as that is when it is rounded
        error = (ours.float() - theirs).norm() / theirs.norm()
        assert error <= 1.05 * (theirs.to(dtype).float() - theirs).norm() / theirs.norm() + 1e-6
