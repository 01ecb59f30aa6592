"""Which kernel attention runs on, forward and backward, for every family's heads, and that it gives the formula."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megalith.config import ModelConfig
from megalith.config.presets import PRESETS
from megalith.data.batch import document_ends
from megalith.models.init import initialize
from megalith.models.inputs import TokenInputs
from megalith.models.transformer import Transformer
from megalith.ops.attention_blocks import block_backward, block_forward
from megalith.ops.attention_core import attention
from megalith.ops.attention_kernels import Block
from megalith.ops.documents import alibi_slopes, document_ids, ends_in_spans, same_document_mask

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
DOCUMENTS = [[100, SEQ, SEQ, SEQ], [1, 65, 66, SEQ]]  # where they end, in each sequence
ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
FUSED = ("cudnn", "flash", "fmha_cutlass")  # where nothing is masked
SKIPPING = ("flash_fwd", "flash_bwd")  # documents and windows in half precision: what is closed costs nothing
DENSE = ("fmha_cutlassF", "fmha_cutlassB")  # the memory-efficient kernel: every other mask
SLOW = ("gemm", "nvjet", "softmax", "cutlass_80")


def inputs(shape: tuple, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and the gradient of the result."""
    heads, groups, head_dim = shape
    random = torch.Generator("cuda").manual_seed(3)
    counts = (heads, groups, groups, heads)
    made = [torch.randn(BATCH, SEQ, n, head_dim, device="cuda", generator=random).to(dtype) for n in counts]
    return [*(x.requires_grad_() for x in made[:3]), made[3]]


def documents() -> Tensor:
    return torch.tensor(DOCUMENTS, dtype=torch.int32, device="cuda")


def inside() -> Tensor:
    numbers = document_ids(documents(), SEQ)
    return same_document_mask(numbers, numbers, causal=True)


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    has_documents: bool,
    window: int | None,
    slopes: Tensor | None = None,
) -> Tensor:
    places = torch.arange(SEQ, device="cuda")
    distance = places[:, None] - places
    allowed = (distance >= 0) & (distance < (window or SEQ))
    if has_documents:
        allowed = allowed & inside()
    shared = query.shape[2] // key.shape[2]
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.mT * query.shape[3] ** -0.5
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value).transpose(1, 2)


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
        ends = documents() if has_documents else None

        def run(query, key, value, ends=ends, window=window):
            return attention(query, key, value, documents=ends, window=window)

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
            asked = DENSE if dtype == torch.float32 else SKIPPING
            assert all(any(part in name for name in names) for part in asked), said
    assert not [w for w in recwarn if "without a fused kernel" in str(w.message)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_a_given_mask_takes_the_memory_efficient_kernel(dtype):
    tensors = inputs((8, 2, 64), dtype)
    exact_inputs = [x.detach().double().requires_grad_() for x in tensors]
    found = with_gradients(lambda *x: attention(*x, mask=inside()), tensors)
    for a, b in zip(found, with_gradients(lambda *x: formula(*x, True, None), exact_inputs), strict=True):
        assert (a.double() - b).norm() <= ROUNDING[dtype] * b.norm()
    names = kernels(lambda: with_gradients(lambda *x: attention(*x, mask=inside()), tensors))
    assert all(any(part in name for name in names) for part in DENSE), "\n".join(names)


@pytest.mark.parametrize("has_documents, window", [(True, None), (False, 512), (True, 512)])
def test_documents_and_windows_take_the_memory_of_their_results(has_documents, window):
    """32 heads of 8 groups over 8,192 tokens, eight documents: torch's slowest kernel takes 35 GB for a mask."""
    shape, seq = (32, 8, 128), 8192
    counts = (shape[0], shape[1], shape[1])
    tensors = [torch.randn(1, seq, n, shape[2], device="cuda").bfloat16().requires_grad_() for n in counts]
    ends = torch.arange(1024, seq + 1, 1024, dtype=torch.int32, device="cuda")[None]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention(*tensors, documents=ends if has_documents else None, window=window)
    kept = torch.cuda.memory_allocated() - before
    out.backward(torch.ones_like(out))
    taken = torch.cuda.max_memory_allocated() - before
    assert kept < 1.1 * (out.nbytes + 4 * out.numel() // shape[2])  # the result and its log-sum-exp
    assert taken <= 1e9, taken


def assert_flash_is_the_mask(block: Block, masked: Block, query, key, value, grad) -> Tensor:
    """Forward and backward; the log-sum-exp."""
    random = torch.zeros(2, dtype=torch.int64, device="cuda")
    results = []
    for one, width in ((block, query.dtype), (masked, torch.float32)):
        q, k, v, g = (x.to(width) for x in (query, key, value, grad))
        out, lse, _ = block_forward(q, k, v, one)
        gradients = block_backward(g, q, k, v, out, lse, random, one)
        results.append((out, lse, *gradients))
    assert torch.equal(results[0][1].isinf(), results[1][1].isinf())
    for name, a, b in zip(("out", "lse", "query", "key", "value"), *results, strict=True):
        a, b = (x.double().nan_to_num(neginf=0.0) for x in (a, b))
        assert (a - b).norm() <= ROUNDING[query.dtype] * b.norm(), name
    names = kernels(lambda: block_backward(grad, query, key, value, *results[0][:2], random, block))
    assert any("flash_bwd" in name for name in names), "\n".join(names)
    return results[0][1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize("causal", [False, True])
def test_documents_across_two_pieces_of_a_sequence_are_those_of_the_mask(causal, dtype):
    """A ring's block: the queries' documents end elsewhere than the keys', and some queries see no key at all."""
    tensors = [x.detach().transpose(1, 2) for x in inputs((16, 4, 128), dtype)]
    places = (range(200), range(200)) if causal else (range(120, SEQ), range(40, 100))
    query, key, value = (
        x[:, :, span.start : span.stop] for x, span in zip(tensors[:3], (*places, places[1]), strict=True)
    )
    grad = tensors[3][:, :, places[0].start : places[0].stop]
    ends = tuple(ends_in_spans(documents(), [span]) for span in places)
    block = Block(causal, documents=ends, scale=128**-0.5)
    numbers = [document_ids(e, len(span)) for e, span in zip(ends, places, strict=True)]
    masked = Block(mask=same_document_mask(*numbers, causal), scale=128**-0.5)
    lse = assert_flash_is_the_mask(block, masked, query, key, value, grad)
    assert causal or (lse == -torch.inf).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
@pytest.mark.parametrize(
    ("ahead", "queries"), [(0, 100), (1, 101), (70, 160), (100, 100), (199, 100), (150, 60)]
)
def test_a_window_between_two_chunks_is_that_of_the_mask(ahead, queries, dtype):
    """A ring's block: the last query stands so many places behind the last key."""
    query, key, value, grad = (x.detach().transpose(1, 2) for x in inputs((16, 4, 128), dtype))
    key, value = key[:, :, :100], value[:, :, :100]
    query, grad, window = query[:, :, :queries], grad[:, :, :queries], 200
    places = torch.arange(100 + ahead, device="cuda")
    distance = places[-queries:, None] - places[:100]
    mask = ((distance >= 0) & (distance < window))[None, None]
    block = Block(window=window, ahead=ahead, scale=128**-0.5)
    assert_flash_is_the_mask(block, Block(mask=mask, scale=128**-0.5), query, key, value, grad)


def test_flash_gets_no_window_of_more_queries_than_keys_that_all_stand_behind_these():
    """It cuts how far they stand ahead to the number of keys, and then the first queries do not see the last keys."""
    query, key, value, _ = (x.detach().transpose(1, 2) for x in inputs((16, 4, 128), torch.bfloat16))
    query, key, value = query[:, :, :160], key[:, :, :100], value[:, :, :100]
    found = kernels(lambda: block_forward(query, key, value, Block(window=200, ahead=199)))
    assert not any("flash_fwd" in name for name in found), "\n".join(found)
    distance = torch.arange(139, 299, device="cuda")[:, None] - torch.arange(100, device="cuda")
    masked = Block(mask=(distance < 200)[None, None])
    out, expected = (
        block_forward(query, key, value, block)[0] for block in (Block(window=200, ahead=199), masked)
    )
    assert torch.equal(out, expected)


@pytest.mark.parametrize("where", WHERE)
def test_compiled_attention_takes_the_same_kernels(where):
    has_documents, window = WHERE[where]
    tensors = inputs((8, 2, 64), torch.bfloat16)
    ends = documents() if has_documents else None

    def run(query, key, value):
        return attention(query, key, value, documents=ends, window=window)

    compiled = torch.compile(run, fullgraph=True)
    for a, b in zip(with_gradients(compiled, tensors), with_gradients(run, tensors), strict=True):
        assert (a - b).float().norm() <= 1e-3 * b.float().norm()
    names = kernels(lambda: with_gradients(compiled, tensors))
    assert not slow(names), "\n".join(names)
    if where != "nothing":
        assert all(any(part in name for name in names) for part in SKIPPING), "\n".join(names)


def test_a_compiled_layer_takes_batches_of_any_documents_in_one_graph():
    shape = dict(
        num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=8, num_query_groups=2
    )
    more = dict(vocab_size=512, max_position_embeddings=SEQ, hidden_dropout=0.0, attention_dropout=0.0)
    config = ModelConfig(**{**PRESETS["tiny-llama"], **shape, **more})
    model = Transformer(config, compute_dtype=torch.bfloat16, device="cuda").train()
    initialize(model, config, seed=1)
    torch._dynamo.reset()
    for layer in model.layers.values():
        layer.compile(fullgraph=True)
    random = np.random.default_rng(2)
    ids = torch.randint(0, 512, (BATCH, SEQ), device="cuda")
    counts = torch._dynamo.utils.counters["stats"]
    first = None  # the layers' graph, and those of what stands before and behind them
    for share in (0.01, 0.02, 0.1, 0.5, 0.9):  # of tokens at which a document begins: from 8 to 512 documents
        ends = document_ends(random.random((BATCH, SEQ)) < share)
        loss = model(ids, labels=ids, token_inputs=TokenInputs(document_ends=ends.cuda()))
        loss.backward()
        assert loss.isfinite()
        first = first or counts["unique_graphs"]
        assert counts["unique_graphs"] == first, share


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("shape", [(16, 16, 64), (6, 2, 128)], ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_compiled_alibi_takes_a_kernel_of_its_formula(dtype, shape, where, recwarn):
    has_documents, window = WHERE[where]
    tensors = inputs(shape, dtype)
    ends = documents() if has_documents else None
    heads = 2 * shape[0]  # of which these are the second half

    def run(query, key, value):
        return attention(query, key, value, documents=ends, window=window, alibi=heads, first_head=shape[0])

    slopes = alibi_slopes(heads, shape[0], shape[0], torch.device("cuda")).double()
    exact_inputs = [x.detach().double().requires_grad_() for x in tensors]
    exact = with_gradients(lambda *x: formula(*x, has_documents, window, slopes), exact_inputs)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    for name, a, b in zip(
        ("out", "query", "key", "value"), with_gradients(compiled, tensors), exact, strict=True
    ):
        assert (a.double() - b).norm() <= max(ROUNDING[dtype], 2e-3) * b.norm(), name  # fp32: by TF32
    names = kernels(lambda: with_gradients(compiled, tensors))
    assert not slow(names), "\n".join(names)
    assert not [w for w in recwarn if "without a fused kernel" in str(w.message)]


@pytest.mark.parametrize("where", ["documents", "both"])
def test_dropout_with_a_mask_and_grouped_heads_takes_the_fused_kernel(where):
    _, window = WHERE[where]
    tensors = inputs((8, 2, 64), torch.bfloat16)
    rows = torch.zeros(BATCH, SEQ, dtype=torch.int32, device="cuda")

    def run(*x):
        return attention(*x, documents=documents(), window=window, dropout=0.1, dropout_rows=rows)

    names = kernels(lambda: with_gradients(run, tensors))
    assert any("fmha_cutlassF" in name for name in names) and any("fmha_cutlassB" in name for name in names)


def test_attention_without_a_fused_kernel_says_so():
    query, key, value, _ = inputs((8, 2, 64), torch.bfloat16)
    with pytest.warns(UserWarning, match="without a fused kernel.* softcap 50.5"):
        attention(query, key, value, softcap=50.5)


@pytest.mark.parametrize("dtype", ROUNDING, ids=["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("padded", ["", "by a mask", "by ends"])
@pytest.mark.parametrize("compiled", [False, True])
def test_cross_attention_over_a_sequence_of_another_length_gives_the_formula(dtype, padded, compiled):
    heads, groups, size, keys = 16, 4, 64, 200
    query, key, value, grad = inputs((heads, groups, size), dtype)
    key, value = (x.detach()[:, :keys].clone().requires_grad_() for x in (key, value))
    ends = torch.tensor([[150], [keys]], device=query.device)
    seen = (torch.arange(keys, device=query.device) < ends)[:, None, None]  # [batch, 1, 1, keys]
    mask = seen.expand(-1, -1, SEQ, -1) if padded == "by a mask" else None
    pair = torch.tensor(
        [[[SEQ, SEQ]] * 2, [[150, keys], [keys, keys]]], dtype=torch.int32, device=query.device
    )
    documents = pair if padded == "by ends" else None

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, causal=False, mask=mask, documents=documents)

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
