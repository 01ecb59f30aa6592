"""Layers whose gradients come from kernels of our own, with formulas in the kernels' place, against plain layers.

What is shown: every gradient finds its way, those of the biases that GELU or attention's input takes over among
them. The kernels themselves are tested on a GPU.
"""

from collections.abc import Callable

import pytest
import torch
from default_cases import by_default
from torch import Tensor

from megalith.config import ModelConfig, ParallelConfig
from megalith.models.init import initialize
from megalith.models.transformer import Transformer
from megalith.ops import kernels as fused
from megalith.ops.dropout import counter_dropout
from megalith.parallel.memory.recompute import apply_recompute

pytestmark = pytest.mark.skipif(
    fused.AVAILABLE, reason="Triton is here, and with it the operators themselves"
)

GPT = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=100, max_position_embeddings=16,
           attention_dropout=0.0, hidden_dropout=0.0)  # fmt: skip
LLAMA = dict(GPT, num_query_groups=2, position_embedding_type="rope", swiglu=True, normalization="RMSNorm",
             add_bias_linear=False, untie_embeddings_and_output_weights=True)  # fmt: skip
RECOMPUTED = ["layernorm", "mlp", "core_attn"]
BACKWARD = ["gelu_backward", "norm_backward", "join_qkv", "norm_backward"]
CASES = {  # model, recomputed modules, operators of a layer's forward and backward pass
    "gpt": (GPT, [], ["norm_forward", "norm_forward", *BACKWARD]),
    "groups, dropout": (dict(GPT, num_query_groups=2, hidden_dropout=0.1), [], None),
    "no biases, zero centred": (
        dict(LLAMA, layernorm_zero_centered_gamma=True),
        [],
        ["norm_forward", "norm_forward", "norm_backward", "norm_backward"],
    ),
    "sandwich": (dict(GPT, norm_placement="sandwich"), [], None),
    "norms behind": (dict(GPT, norm_placement="post"), [], ["gelu_backward", "join_qkv"]),
    "recomputed": (GPT, RECOMPUTED, ["norm_forward"] * 4 + BACKWARD),
    "recomputed, no biases": (LLAMA, ["layernorm", "mlp_act"], ["norm_forward"] * 4 + ["norm_backward"] * 2),
}


def norm_forward(x, y, weight, bias, rows, columns, probability: float, epsilon: float, rounded: bool):
    if y is not None:
        x = x + (y if rows is None else counter_dropout(y, probability, rows, columns))
    mean = x.mean(1) if bias is not None else None
    centred = x if mean is None else x - mean[:, None]
    scale = (centred.square().mean(1) + epsilon).rsqrt()
    normed = centred * scale[:, None] * weight + (0 if bias is None else bias)
    stream = x.new_empty(0) if y is None else x
    return stream, normed, torch.stack([scale] if mean is None else [scale, mean])


def norm_backward(grad, x, stats, stream_grad, weight, rows, columns, probability, rounded):
    value = (x - (stats[1][:, None] if len(stats) == 2 else 0)) * stats[0][:, None]
    dy = grad * weight
    dx = dy - value * (dy * value).mean(1, keepdim=True)
    if len(stats) == 2:
        dx = dx - dy.mean(1, keepdim=True)
    dx = dx * stats[0][:, None] + stream_grad
    dropped = dx if rows is None else counter_dropout(dx, probability, rows, columns)
    sums = [grad * value, grad][: len(stats)]
    return dx, x.new_empty(0) if rows is None else dropped, torch.stack(sums).sum(1)


def gelu_backward(grad, x):
    grad = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
    return grad, grad.sum(0)


def join_qkv(query, key, value):
    parts = [t.unflatten(2, (key.shape[2], -1)) for t in (query, key, value)]
    joined = torch.cat(parts, 3).flatten(0, 1).flatten(1)
    return joined, joined.sum(0)


SCHEMAS = {
    norm_forward: "(Tensor x, Tensor? y, Tensor weight, Tensor? bias, Tensor? rows, Tensor? columns, "
    "float probability, float epsilon, bool rounded) -> (Tensor, Tensor, Tensor)",
    norm_backward: "(Tensor grad, Tensor x, Tensor stats, Tensor? stream_grad, Tensor weight, Tensor? rows, "
    "Tensor? columns, float probability, bool rounded) -> (Tensor, Tensor, Tensor)",
    gelu_backward: "(Tensor grad, Tensor x) -> (Tensor, Tensor)",
    join_qkv: "(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)",
}
calls: list[str] = []


def counted(function: Callable) -> Callable:
    def call(*args):
        if type(args[0]) is Tensor:  # and not a shape that the compiler tries
            calls.append(function.__name__)
        return function(*args)

    return call


@pytest.fixture
def formulas(monkeypatch):
    library = torch.library.Library("megalith", "FRAGMENT")
    for function, schema in SCHEMAS.items():
        library.define(function.__name__ + schema)
        library.impl(function.__name__, counted(function), "CompositeExplicitAutograd")
    monkeypatch.setattr(fused, "MIN_WIDTH", 1)
    yield
    library._destroy()
    torch._dynamo.reset()


def gradients(fields: dict, recomputed: list[str], compiled: bool) -> dict[str, Tensor]:
    config = ModelConfig(**fields)
    model = Transformer(config, seed=3).train()
    initialize(model, config, seed=1)
    if recomputed:
        parallel = ParallelConfig(recompute_granularity="selective", recompute_modules=recomputed)
        apply_recompute(model, parallel, compiled=compiled)
    for layer in model.layers.values() if compiled else ():
        layer.compile(fullgraph=True, backend="aot_eager")
    ids = torch.arange(48).view(3, 16) * 7 % 100
    model(ids, labels=ids.roll(-1, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("case", by_default(CASES, "recomputed, no biases"))
def test_layers_with_kernels_have_the_gradients_of_plain_ones(formulas, monkeypatch, case):
    fields, recomputed, operators = CASES[case]
    expected = gradients(fields, [], compiled=False)
    monkeypatch.setattr(
        fused, "fuses_backward", lambda x: torch.compiler.is_compiling() and torch.is_grad_enabled()
    )
    calls.clear()
    found = gradients(fields, recomputed, compiled=True)
    if operators is not None:
        assert sorted(calls) == sorted(operators * 2)  # once for each of two layers
    everything = torch.cat([gradient.flatten() for gradient in expected.values()]).norm()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * max(gradient.norm(), 1e-2 * everything), name
