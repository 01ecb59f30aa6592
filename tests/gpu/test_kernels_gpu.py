"""Kernels of our own, on a GPU: against float64, against what torch has, and in compiled layers."""

import pytest
import torch
from torch.nn import functional as F

from megalith.config import ModelConfig, OptimConfig
from megalith.models.init import initialize
from megalith.models.transformer import Transformer
from megalith.ops import kernels as fused
from megalith.ops.activation import ACTIVATIONS, gated_activation, gelu_tanh, weighted_activation
from megalith.ops.dropout import Mask, column_keys, token_keys
from megalith.ops.fused_norm import add_norm, residual_add
from megalith.ops.rotary import rotate
from megalith.ops.split_qkv import split_qkv
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step, set_learning_rate
from megalith.optim.adam import MIN_KERNEL_NUMEL, AdamW

GPT = dict(num_layers=2, hidden_size=320, num_attention_heads=4, vocab_size=1000, max_position_embeddings=256,
           attention_dropout=0.0, hidden_dropout=0.0)  # fmt: skip
LLAMA = dict(GPT, num_query_groups=2, position_embedding_type="rope", swiglu=True, normalization="RMSNorm",
             add_bias_linear=False, untie_embeddings_and_output_weights=True)  # fmt: skip
FAMILIES = {
    "gpt": GPT,
    "dropout": dict(GPT, hidden_dropout=0.1),
    "llama": LLAMA,
    "zero centred": dict(LLAMA, layernorm_zero_centered_gamma=True),
    "groups": dict(GPT, num_query_groups=2),
}
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
TYPES = pytest.mark.parametrize("dtype", ROUNDING)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def check(found: list, exact: list, rounding: float) -> None:
    for place, (a, b) in enumerate(zip(found, exact, strict=True)):
        assert (a.double() - b).norm() <= rounding * b.norm(), place


@TYPES
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize(
    ("branch", "tokens", "width"),
    [("none", 1003, 1280), ("added", 1, 320), ("dropped", 1003, 1280), ("added", 40, 8192)],
)
def test_norm_beside_a_stream_has_the_gradients_of_both(dtype, centred, branch, tokens, width):
    torch.manual_seed(0)
    x, weight = random(tokens, width, dtype=dtype) + 1, random(width)
    y = None if branch == "none" else random(tokens, width, dtype=dtype)
    bias = random(width) if centred else None
    mask = None
    if branch == "dropped":
        keys = token_keys(3, torch.arange(1, device="cuda"), torch.arange(tokens, device="cuda"))[0]
        mask = Mask(0.1, keys, column_keys(width, "cuda"))
    inputs = [t for t in (x, y, weight, bias) if t is not None]
    for t in inputs:
        t.requires_grad_()
    outputs = torch.compile(add_norm, fullgraph=True)(x, y, mask, weight, bias, 1e-5, False)
    grads = random(2, tokens, width, dtype=dtype).unbind()
    found = torch.autograd.grad(outputs, inputs, grads)
    assert [t.dtype for t in found] == [t.dtype for t in inputs]

    wide = [t.detach().to(dtype).double().requires_grad_() for t in inputs]
    stream, affine = residual_add(wide[0], None if y is None else wide[1], mask), wide[1 + (y is not None) :]
    normed = (
        F.layer_norm(stream, (width,), *affine) if centred else F.rms_norm(stream, (width,), *affine, 1e-5)
    )
    exact = list(torch.autograd.grad((stream * 1, normed), wide, [g.double() for g in grads]))
    check([*outputs, *found], [stream, normed, *exact], 2 * ROUNDING[dtype])


@TYPES
@pytest.mark.parametrize(("tokens", "width"), [(1, 320), (1003, 5120)])
def test_gelu_gives_the_gradient_of_the_bias_that_was_added_to_its_input(dtype, tokens, width):
    torch.manual_seed(0)
    x, bias = random(tokens, width, dtype=dtype).requires_grad_(), random(width).requires_grad_()
    grad = random(tokens, width, dtype=dtype)
    y = torch.compile(gelu_tanh, fullgraph=True)(x, bias)
    found = torch.autograd.grad(y, (x, bias), grad)
    wide = x.detach().double().requires_grad_()
    expected = F.gelu(wide, approximate="tanh")
    (exact,) = torch.autograd.grad(expected, wide, grad.double())
    check([y, *found], [expected, exact, exact.sum(0)], ROUNDING[dtype])


@TYPES
@pytest.mark.parametrize(("heads", "groups", "size"), [(16, 16, 80), (8, 2, 64), (3, 1, 20)])
@pytest.mark.parametrize("transposed", [True, False])
def test_qkv_gets_its_gradient_and_that_of_its_bias(dtype, heads, groups, size, transposed):
    torch.manual_seed(0)
    batch, seq, width = 3, 37, (heads + 2 * groups) * size
    qkv = random(batch, seq, width, dtype=dtype).requires_grad_()
    bias = random(width).requires_grad_()
    grads = [random(batch, seq, count, size, dtype=dtype) for count in (heads, groups, groups)]
    if transposed:  # as attention's kernels may give them
        grads = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in grads]
    parts = torch.compile(split_qkv, fullgraph=True)(qkv, bias, batch, heads // groups, size)
    found = torch.autograd.grad(parts, (qkv, bias), grads)
    (exact,) = torch.autograd.grad(split_qkv(qkv, None, batch, heads // groups, size), qkv, grads)
    assert torch.equal(found[0], exact)
    check(found[1:], [exact.double().sum((0, 1))], 1e-6)


@TYPES
@pytest.mark.parametrize(
    ("rows", "real", "held"),
    [(50304, 50257, 51200), (50304, 50257, 2**14), (65536, 65000, 51200), (100, 100, 2**10), (1026, 1025, 0),
     (101, 99, 0), (70000, 69999, 0)],
)  # fmt: skip
def test_loss_and_its_gradient_are_those_of_cross_entropy(monkeypatch, dtype, rows, real, held):
    monkeypatch.setattr(fused.loss_kernel, "HELD", held)
    torch.manual_seed(0)
    logits, weight = 3 * random(37, rows, dtype=dtype), torch.rand(37, device="cuda")
    labels = torch.randint(0, real, (37,), device="cuda")
    labels[:2] = torch.tensor([0, real - 1])
    wide = logits[:, :real].double().requires_grad_()
    exact = F.cross_entropy(wide, labels, reduction="none") * weight
    exact.sum().backward()
    losses = fused.softmax_loss_(logits, labels, weight, real)
    check([losses, logits[:, :real]], [exact, wide.grad], ROUNDING[dtype])
    assert not logits[:, real:].any()


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.0, 0.95), (0.9, 0.0)])
def test_large_parameters_are_stepped_as_torch_steps_them(betas):
    torch.manual_seed(0)
    start = random(MIN_KERNEL_NUMEL + 1003)
    ours, exact = start.clone().requires_grad_(), start.double().requires_grad_()
    settings = dict(lr=1e-2, betas=betas, eps=1e-8, weight_decay=0.1)
    optimizer, reference = AdamW([ours], fused=True, **settings), torch.optim.AdamW([exact], **settings)
    for moment in ("exp_avg", "exp_avg_sq"):
        optimizer.state[ours][moment] = torch.zeros_like(start)
    optimizer.state[ours]["step"] = torch.zeros((), device="cuda")
    optimizer.grad_scale = torch.tensor(4.0, device="cuda")
    for skipped in (0.0, 1.0, 0.0, 0.0):
        optimizer.found_inf = torch.tensor(skipped, device="cuda")
        ours.grad = random(len(start))
        optimizer.step()
        if not skipped:
            exact.grad = ours.grad.double() / 4
            reference.step()
    check([ours - start], [exact - start.double()], 1e-5)
    assert optimizer.state[ours]["step"] == 3


@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
@pytest.mark.parametrize(
    "dtypes", [("bf16", "bf16"), ("fp8", "fp8"), ("fp32", "fp8"), ("fp8", "bf16")], ids="-".join
)
def test_moments_in_fewer_bytes_are_those_of_a_cpu_and_no_step_waits(dtypes, optimizer):
    config = OptimConfig(lr=1e-2, optimizer=optimizer, exp_avg_dtype=dtypes[0], exp_avg_sq_dtype=dtypes[1])
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "a.weight": (640, 1024),
        "b.weight": (96, 14336),
        "c.weight": (33, 1376),
        "norm.weight": (1024,),
    }
    start = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    sides = []
    for device in ("cpu", "cuda"):
        parameters = {name: torch.nn.Parameter(value.clone().to(device)) for name, value in start.items()}
        optimizer = build_optimizer(parameters.items(), config)
        sides.append((parameters, optimizer, build_loss_scale("bf16", config, device)))
    for step in range(4):
        grads = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        for rows, factor in (slice(0, 8), 0.0), (slice(8, 24), 1e-14), (slice(24, 40), 1e-28):
            grads["a.weight"][rows] *= factor
        for (parameters, optimizer, scale), device in zip(sides, ("cpu", "cuda")):
            for name, parameter in parameters.items():
                parameter.grad = grads[name].clone().to(device)  # a fused step divides it in place
            waits = "error" if step else "default"  # the first one compiles
            torch.cuda.set_sync_debug_mode(waits if device == "cuda" else "default")
            try:
                set_learning_rate(optimizer, 1e-2 / (step + 1), 0.1)
                optimizer_step(optimizer, scale, clip_grad=1.0)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    (cpu, on_cpu, _), (gpu, on_gpu, _) = sides
    for name in shapes:
        check([gpu[name].cpu() - start[name]], [cpu[name].double() - start[name].double()], 1e-3)
    for name in ("a.weight", "b.weight", "c.weight"):
        for key in ("exp_avg", "exp_avg_sq"):
            one, other = on_cpu.state[cpu[name]][key], on_gpu.state[gpu[name]][key]
            if isinstance(one, torch.Tensor):
                check([other.cpu()], [one.double()], 1e-6)
                continue
            # What lies between two codes by no more than a rounding of fp32 takes the one or the other.
            assert (one.codes != other.codes.cpu()).float().mean() < 1e-3
            stored = [tensor.clone() for tensor in other.tensors]
            other.copy_(other.float())  # as a checkpoint does
            assert all(torch.equal(tensor, kept) for tensor, kept in zip(other.tensors, stored))


@TYPES
@pytest.mark.parametrize(
    ("rows", "end", "width"), [(1003, None, 1408), (1003, 500, 768), (40, 0, 100), (0, None, 768)]
)
def test_experts_gated_rows_have_their_gradients_whatever_stands_behind(dtype, rows, end, width):
    torch.manual_seed(0)
    x, weights, grad = random(rows, 2 * width, dtype=dtype), random(rows, 1), random(rows, width, dtype=dtype)
    last = None if end is None else torch.tensor([end], dtype=torch.int32, device="cuda")
    found, exact = [], []
    for results, wide in (found, False), (exact, True):
        leaves = [(part.double() if wide else part.clone()).requires_grad_() for part in (x, weights)]
        if end is not None and not wide:
            leaves[0].data[end:] = float("nan")
        y = weighted_activation(*leaves, ACTIVATIONS["silu"], True, not wide, end=None if wide else last)
        results += [y, *torch.autograd.grad(y, leaves, grad.double() if wide else grad)]
    assert [part.dtype for part in found] == [dtype, dtype, torch.float32]
    check([part[:end].detach() for part in found], [part[:end].detach() for part in exact], ROUNDING[dtype])


@TYPES
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "size", "pairs"), [(32, 64, 32), (3, 128, 64), (20, 80, 8), (1, 64, 32)])
def test_rotations_have_the_bits_of_the_ordinary_operators(
    monkeypatch, dtype, interleaved, heads, size, pairs
):
    torch.manual_seed(0)
    angles = random(2, 77, 1, pairs)
    x = random(2, 77, heads, 3, size, dtype=dtype)[:, :, :, 1].requires_grad_()
    grad = random(2, 77, heads, size, dtype=dtype)
    results = []
    for available in (True, False):
        monkeypatch.setattr(fused, "AVAILABLE", available)
        out = rotate(x, angles.cos(), angles.sin(), interleaved)
        results.append((out, *torch.autograd.grad(out, x, grad)))
    assert all(map(torch.equal, *results))


@TYPES
def test_a_gated_activation_outside_of_compiled_layers_is_that_of_fp64(dtype):
    torch.manual_seed(0)
    x, grad = random(3, 333, 2 * 1360, dtype=dtype).requires_grad_(), random(3, 333, 1360, dtype=dtype)
    out = gated_activation(ACTIVATIONS["silu"], x)
    wide = x.detach().double().requires_grad_()
    exact = gated_activation(ACTIVATIONS["silu"], wide)
    found = [out, *torch.autograd.grad(out, x, grad)]
    check(found, [exact, *torch.autograd.grad(exact, wide, grad.double())], ROUNDING[dtype])


def test_kernels_repeat_themselves_to_the_bit():
    torch.manual_seed(0)
    x, grad, stream = (random(5000, 1280, dtype=torch.bfloat16) for _ in range(3))
    stats, weight = random(2, 5000), random(1280)
    heads = [t.view(5, 1000, 16, 80) for t in (x, grad, stream)]
    ops = torch.ops.megalith
    first, second = (
        [
            *ops.norm_backward(grad, x, stats, stream, weight, None, None, 0.0, True),
            *ops.gelu_backward(grad, x),
            *ops.join_qkv(*heads),
        ]
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def gradients(fields: dict, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    config = ModelConfig(**fields)
    model = Transformer(config, compute_dtype=dtype, seed=3, device="cuda").train()
    initialize(model, config, seed=1)
    ids = torch.randint(0, 1000, (4, 256), generator=torch.Generator().manual_seed(0)).cuda()
    for layer in model.layers.values():
        layer.compile(fullgraph=True)
    (model(ids, labels=ids.roll(-1, 1)) / ids.numel() * 2.0**14).backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks, size", [(2, 4097), (8, 2048 * 3)])
def test_what_ranks_have_sent_is_added_up_in_fp32(ranks, size):
    sent = torch.randn(ranks, size, device="cuda").bfloat16()
    found, expected = torch.empty(size, device="cuda"), sent[0].float()
    for part in sent[1:]:
        expected += part
    fused.sum_rows(sent, found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_have_the_same_gradients_with_and_without(monkeypatch, family, dtype):
    ours = gradients(FAMILIES[family], dtype)
    torch._dynamo.reset()
    monkeypatch.setattr(fused, "AVAILABLE", False)
    plain = gradients(FAMILIES[family], dtype)
    everything = torch.cat([g.flatten() for g in plain.values()]).norm()
    for name, gradient in plain.items():
        bound = 1e-5 if dtype == torch.float32 else 2e-2
        assert (ours[name] - gradient).norm() <= bound * max(gradient.norm(), 1e-2 * everything), name
