"""The wgrad in parts and the compiled GELU, on a GPU, against fp64 or what torch has."""

import torch
from torch.nn import functional as F

from megalith.ops.activation import gelu_tanh
from megalith.ops.gemm import add_bias_gradient, linear, wgrad_parts


def biased_linear(x, weight, bias):
    return add_bias_gradient(linear(x, weight, bias), bias)


def test_compiled_linear_with_a_cut_product_is_as_exact_as_a_plain_one():
    torch.manual_seed(0)
    given = [
        torch.randn(32768, 1280, device="cuda", dtype=torch.bfloat16),
        torch.randn(5120, 1280, device="cuda", dtype=torch.bfloat16) * 0.02,
        torch.randn(5120, device="cuda", dtype=torch.bfloat16),
    ]
    grad = torch.randn(32768, 5120, device="cuda", dtype=torch.bfloat16)
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert wgrad_parts(given[0], (5120, 1280)) == 4
    results = []
    for function in (torch.compile(biased_linear, fullgraph=True), F.linear):
        inputs = [t.clone().requires_grad_() for t in given]
        output = function(*inputs)
        output.backward(grad)
        results.append([output, *(t.grad for t in inputs)])
    for ours, plain in zip(*results):
        assert (ours - plain).norm() <= 1e-2 * plain.norm()
    exact = grad[:, :64].double().T @ given[0].double()
    errors = [(found[2][:64].double() - exact).norm() / exact.norm() for found in results]
    # Here the sum of the rounded parts is rounded once more, √2 times one rounding; into fp32 parameters it is not.
    assert errors[0] <= 1.5 * errors[1] < 4e-3


def test_compiled_gelu_is_torchs():
    x = torch.linspace(-12, 12, 100_001, device="cuda", dtype=torch.float64).requires_grad_()
    expected = F.gelu(x, approximate="tanh")
    expected.sum().backward()
    y = x.detach().float().requires_grad_()
    found = torch.compile(gelu_tanh, fullgraph=True)(y)
    found.sum().backward()
    assert (found - expected).abs().max() < 1e-6
    assert (y.grad - x.grad).abs().max() < 1e-5
