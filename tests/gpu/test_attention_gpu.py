"""Which kernel attention runs on, forward and backward, for every family's heads, and that it gives the formula."""

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megalith.ops.attention_core import attention, document_mask

BATCH, SEQ, WINDOW = 2, 320, 100  # SEQ % 128 == 64 is where cuDNN's masked kernel gives NaN
FAMILIES = {  # heads, groups, head_dim
    "gpt2": (20, 20, 64),
    "gpt2 of 16 heads": (16, 16, 80),
    "llama3": (32, 8, 128),
    "mistral": (32, 8, 128),
    "mixtral": (48, 8, 128),
    "qwen2": (14, 2, 64),
    "qwen3": (16, 8, 128),
    "qwen3 moe": (32, 4, 128),
    "gemma2": (8, 4, 256),
    "gemma3": (4, 1, 256),
    "phi3": (40, 10, 128),
    "phi3 mini": (32, 32, 96),
    "olmo2": (40, 8, 128),
    "deepseek": (16, 16, 192),
    "of no kernel's size": (8, 2, 20),
}
SHAPES = sorted(set(FAMILIES.values()))
WHERE = {
    "nothing": (False, None),
    "documents": (True, None),
    "window": (False, WINDOW),
    "both": (True, WINDOW),
}
ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
FUSED = (
    "cudnn",
    "flash",
    "fmha_cutlass",
)  # where nothing is masked; elsewhere the last, the memory-efficient one
SLOW = ("gemm", "nvjet", "softmax", "cutlass_80")


def inputs(shape: tuple, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the result."""
    heads, groups, head_dim = shape
    random = torch.Generator("cuda").manual_seed(3)
    counts = (heads, groups, groups, heads)
    made = [torch.randn(BATCH, SEQ, n, head_dim, device="cuda", generator=random).to(dtype) for n in counts]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def documents() -> Tensor:
    return (torch.arange(SEQ, device="cuda") >= torch.tensor([[100], [SEQ]], device="cuda")).int()


def formula(query: Tensor, key: Tensor, value: Tensor, has_documents: bool, window: int | None) -> Tensor:
    places = torch.arange(SEQ, device="cuda")
    distance = places[:, None] - places
    allowed = (distance >= 0) & (distance < (window or SEQ))
    if has_documents:
        allowed = allowed & document_mask(documents())
    shared = query.shape[2] // key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = (query @ key.mT * query.shape[3] ** -0.5).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(1, 2)


def with_gradients(function, tensors: list[Tensor]) -> list[Tensor]:
    out = function(*tensors[:3])
    return [out.detach(), *torch.autograd.grad(out, tensors[:3], tensors[3].to(out.dtype))]


def kernels(work) -> list[str]:
    work()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    return [event.key for event in recorded.key_averages()]


def slow(names: list[str]) -> list[str]:
    """The kernels that torch's slowest way is made of."""
    others = [name for name in names if "fmha" not in name and "cudnn" not in name]
    return [name for name in others if any(part in name for part in SLOW)]


@pytest.mark.parametrize("dtype", ROUNDING, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_every_familys_heads_take_a_fused_kernel_both_ways_and_give_the_formula(shape, dtype, recwarn):
    tensors = inputs(shape, dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in tensors]
    for where, (has_documents, window) in WHERE.items():
        mask = document_mask(documents()) if has_documents else None

        def run(query, key, value, mask=mask, window=window):
            return attention(query, key, value, mask=mask, window=window)

        found = with_gradients(run, tensors)
        exact = with_gradients(lambda *x: formula(*x, has_documents, window), exact_inputs)  # noqa: B023
        for name, a, b in zip(("out", "query", "key", "value"), found, exact, strict=True):
            assert (a.double() - b).norm() <= ROUNDING[dtype] * b.norm(), (where, name)
        names = kernels(lambda: with_gradients(run, tensors))
        said = f"{where}: " + "\n".join(names)
        assert not slow(names), said
        if where == "nothing":
            assert any(fused in name for name in names for fused in FUSED), said
        else:
            assert any("fmha_cutlassF" in name for name in names), said
            assert any("fmha_cutlassB" in name for name in names), said
    assert not [w for w in recwarn if "without a fused kernel" in str(w.message)]


@pytest.mark.parametrize("has_documents, window", [(True, None), (False, 1000), (True, 1000)])
def test_masks_with_grouped_heads_take_the_memory_of_a_mask_and_not_of_scores(has_documents, window):
    """32 heads of 8 groups over 8,192 tokens: torch's slowest kernel took 35 GB for it."""
    shape, seq = (32, 8, 128), 8192
    counts = (shape[0], shape[1], shape[1])
    tensors = [torch.randn(1, seq, n, shape[2], device="cuda").bfloat16().requires_grad_() for n in counts]
    mask = document_mask(torch.arange(seq, device="cuda")[None] // 3000) if has_documents else None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(*tensors, mask=mask, window=window)
    kept = torch.cuda.memory_allocated() - before
    out.backward(torch.ones_like(out))
    taken = torch.cuda.max_memory_allocated() - before
    assert kept < 1.1 * (out.nbytes + 4 * out.numel() // shape[2])  # the result and its log-sum-exp
    assert taken < 1.5e9, taken


@pytest.mark.parametrize("where", WHERE)
def test_compiled_attention_takes_the_same_kernels(where):
    has_documents, window = WHERE[where]
    tensors = inputs((8, 2, 64), torch.bfloat16)
    mask = document_mask(documents()) if has_documents else None

    def run(query, key, value):
        return attention(query, key, value, mask=mask, window=window)

    compiled = torch.compile(run, fullgraph=True)
    for a, b in zip(with_gradients(compiled, tensors), with_gradients(run, tensors), strict=True):
        assert (a - b).float().norm() <= 1e-3 * b.float().norm()
    names = kernels(lambda: with_gradients(compiled, tensors))
    assert not slow(names), "\n".join(names)


@pytest.mark.parametrize("where", ["documents", "both"])
def test_dropout_with_a_mask_and_grouped_heads_takes_the_fused_kernel(where):
    _, window = WHERE[where]
    tensors = inputs((8, 2, 64), torch.bfloat16)
    rows = torch.zeros(BATCH, SEQ, dtype=torch.int32, device="cuda")

    def run(*x):
        mask = document_mask(documents())
        return attention(*x, mask=mask, window=window, dropout=0.1, dropout_rows=rows)

    names = kernels(lambda: with_gradients(run, tensors))
    assert any("fmha_cutlassF" in name for name in names) and any("fmha_cutlassB" in name for name in names)


def test_attention_without_a_fused_kernel_says_so():
    query, key, value, _ = inputs((8, 2, 64), torch.bfloat16)
    with pytest.warns(UserWarning, match="without a fused kernel.* softcap 50.5"):
        attention(query, key, value, softcap=50.5)


@pytest.mark.parametrize("dtype", ROUNDING, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_cross_attention_over_a_sequence_of_another_length_gives_the_formula(dtype, padded, compiled):
    heads, groups, size, keys = 16, 4, 64, 200
    query, key, value, grad = inputs((heads, groups, size), dtype)
    key, value = (x.detach()[:, :keys].clone().requires_grad_() for x in (key, value))
    ends = torch.tensor([[150], [keys]], device=query.device)
    seen = (torch.arange(keys, device=query.device) < ends)[:, None, None]  # [batch, 1, 1, keys]
    mask = seen.expand(-1, -1, SEQ, -1) if padded else None

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, causal=False, mask=mask)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (x.float().transpose(1, 2) for x in (query, key, value))
        key, value = (x.repeat_interleave(heads // groups, 1) for x in (key, value))
        scores = query @ key.mT * size**-0.5
        if padded:
            scores = scores.masked_fill(~seen, -torch.inf)
        return (scores.softmax(-1) @ value).transpose(1, 2)

    run = torch.compile(ours, fullgraph=True) if compiled else ours
    tensors = [query, key, value, grad]
    for found, expected in zip(with_gradients(run, tensors), with_gradients(plain, tensors), strict=True):
        assert (found.float() - expected.float()).norm() <= ROUNDING[dtype] * expected.float().norm()
    assert not slow(kernels(lambda: with_gradients(run, tensors)))
