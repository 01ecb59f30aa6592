"""The matmuls of a linear: its wgrad, whole or in parts, and the gradient of its bias."""

import pytest
import torch
from torch.nn import functional as F

from megalith.ops import gemm as module
from megalith.ops.gemm import add_bias_gradient, linear, wgrad_in_parts, wgrad_parts


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_wgrad_is_the_same_however_the_tokens_are_cut(parts):
    torch.manual_seed(0)
    grad, x = torch.randn(64, 24), torch.randn(64, 16)
    torch.testing.assert_close(wgrad_in_parts(grad, x, parts), grad.T @ x)


def test_parts_of_low_precision_are_summed_in_fp32():
    torch.manual_seed(0)
    grad, x = (torch.randn(4096, 8).bfloat16() for _ in range(2))
    exact = grad.double().T @ x.double()
    error = (wgrad_in_parts(grad, x, 4).double() - exact).norm() / exact.norm()
    assert error < 4e-3  # a bf16 value is known to 2^-9


@pytest.mark.parametrize("bias", [True, False])
def test_a_cut_linear_has_the_gradients_of_a_plain_one(monkeypatch, bias):
    monkeypatch.setattr(module, "wgrad_parts", lambda x, shape: 4)
    torch.manual_seed(0)
    given = [torch.randn(2, 8, 6), torch.randn(10, 6), torch.randn(10) if bias else None]
    ours, plain = ([t if t is None else t.clone().requires_grad_() for t in given] for _ in range(2))
    y, expected = add_bias_gradient(linear(*ours), ours[2]), F.linear(*plain)
    torch.testing.assert_close(y, expected)
    (y**2).sum().backward()
    (expected**2).sum().backward()
    for a, b in zip(ours, plain):
        if a is not None:
            torch.testing.assert_close(a.grad, b.grad)


# What a device with 132 multiprocessors measures: rows and columns of the weight, and whether cutting pays.
@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((5120, 1280), 4),
        ((1280, 5120), 4),
        ((3840, 1280), 1),
        ((1280, 1280), 1),
        ((2560, 1280), 4),
        ((1280, 2560), 4),
        ((1920, 1280), 1),
        ((1280, 640), 1),
        ((28672, 4096), 1),
        ((4096, 14336), 1),
    ],
)
def test_products_are_cut_where_their_tiles_leave_a_gpu_idle(monkeypatch, shape, parts):
    monkeypatch.setattr(module, "_processors", lambda device: 132)
    x = _OnGpu((32, 1024, shape[1]))
    assert wgrad_parts(x, shape) == parts
    assert wgrad_parts(_OnGpu((4, 1024, shape[1])), shape) == 1  # few tokens: a launch costs as much


class _OnGpu:
    """What is asked of a bf16 tensor on a GPU."""

    is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda", 0)

    def __init__(self, shape):
        self.shape = torch.Size(shape)

    def numel(self):
        return self.shape.numel()
