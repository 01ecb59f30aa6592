"""What torch keeps of compiled code from one start to the next."""

from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from megalith.ops.attention_core import _CAUSAL
from megalith.ops.gemm import linear
from megalith.parallel.overlap import inductor


def layer(x: Tensor, weight: Tensor) -> Tensor:  # [tokens, width] -> [1, 1, tokens, width]
    """What a GPU's layer has that torch does not keep of itself: an autograd function, and a choice of kernels."""
    y = linear(x, weight)[None, None]
    with sdpa_kernel(_CAUSAL, set_priority=True):
        return scaled_dot_product_attention(y, y, y, is_causal=True)


@pytest.mark.full
def test_a_second_start_traces_no_layer_anew_and_gives_the_same_gradients(quick_compile):
    inductor.cache_whole_layers()
    x, weight = torch.randn(8, 8), torch.randn(8, 8)

    def start() -> tuple[Tensor, dict[str, int]]:
        """The weight's gradient, and what became of the graph."""
        torch._dynamo.reset()
        counters.clear()
        leaf = weight.clone().requires_grad_()
        torch.compile(layer, fullgraph=True)(x, leaf).square().sum().backward()
        return leaf.grad, dict(counters["aot_autograd"])

    with fresh_cache():
        first, made = start()
        again, results = start()
        with mock.patch.object(inductor, "operators_hash", lambda: "other code"):
            inductor.cache_whole_layers()
        _, changed = start()
    torch._dynamo.reset()
    inductor.cache_whole_layers()
    assert made["autograd_cache_saved"] == 1
    assert results["autograd_cache_hit"] == 1 and "autograd_cache_bypass" not in results
    assert changed["autograd_cache_miss"] == 1, changed
    assert torch.equal(again, first)
    leaf = weight.clone().requires_grad_()
    layer(x, leaf).square().sum().backward()
    torch.testing.assert_close(first, leaf.grad)


def refuse(*_, **__):
    raise AssertionError("query/key/value shapes are incompatible")


def test_torch_weighs_recomputation_of_grouped_heads_which_2_11_refuses():
    """It counts FLOPs for that, where runtime.activation_memory_budget is below 1."""
    names = [kernel for kernel in flop_registry if "scaled_dot_product" in str(kernel)]
    keep = torch._functorch.config.patch(activation_memory_budget=1.0)
    query, key = torch.zeros(2, 8, 64, 16), torch.zeros(2, 2, 64, 16)
    with mock.patch.dict(flop_registry, dict.fromkeys(names, refuse)), keep:
        inductor.prepare_compiler()
        with FlopCounterMode(display=False) as counter:
            scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    assert counter.get_total_flops() == 2 * 2 * query.numel() * 64
