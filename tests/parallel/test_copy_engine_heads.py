"""Heads exchanged for tokens by copy engines, played through without them: where all goes, gradients, compiled code."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from copies_by_gloo import as_if_direct, by_group, fetch_all, fill, positions, share_by_formula
from default_cases import in_full

from megalith.comm.collectives import Axis
from megalith.config import ParallelConfig, RunConfig
from megalith.models.transformer import Transformer
from megalith.ops import kernels as fused
from megalith.ops.split_qkv import split_heads
from megalith.parallel.context.context_parallel import apply_context
from megalith.parallel.context.ulysses import heads_from_tokens, tokens_from_heads
from megalith.parallel.mesh import build_mesh
from megalith.parallel.overlap import copy_engine_heads as direct_heads

TINY = {"preset": "gpt2", "num_layers": 1}
# heads of each tensor, head_dim, batch, tokens of a rank
CASES = {
    "multi-head": ([8, 8, 8], 80, 2, 6),
    "grouped": ([8, 4, 4], 16, 3, 140),
    "one tensor": ([8], 80, 2, 70),
    "one sequence": ([8, 4, 4], 64, 1, 6),
    "odd sizes": ([4, 4, 4], 3, 2, 2),
}
DIRECTIONS = pytest.mark.parametrize("to_heads", [True, False], ids=["to heads", "to tokens"])
gpu = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def exchanged(arguments: list[list[torch.Tensor]], to_heads: bool, share) -> list[torch.Tensor]:
    """Every rank's result, from every rank's tensors."""
    size, shaped = len(arguments), direct_heads._heads if to_heads else direct_heads._tokens
    outs = [shaped(xs, size, "").fill_(float("nan")) for xs in arguments]
    slots = [
        fill(xs, out, rank, size, to_heads, share) for rank, (xs, out) in enumerate(zip(arguments, outs))
    ]
    for rank, (xs, out) in enumerate(zip(arguments, outs)):
        fetch_all(xs, slots, out, rank, to_heads)
    return outs


def problem(case: tuple, size: int, to_heads: bool, device: str) -> tuple[list, list]:
    """What every rank gives, as views with gaps, and what it is to have."""
    heads, head_dim, batch, seq = case
    whole = torch.randn(batch, size * seq, sum(heads), head_dim, device=device).bfloat16()
    tensors = whole.split(heads, 2)
    by_tokens = [[x[:, positions(rank, size, seq)] for x in tensors] for rank in range(size)]
    by_heads = [[x.chunk(size, 2)[rank] for x in tensors] for rank in range(size)]
    if to_heads:
        return [with_gaps(xs) for xs in by_tokens], [torch.cat(xs, 2) for xs in by_heads]
    return [with_gaps(xs) for xs in by_heads], [by_group(xs) for xs in by_tokens]


def with_gaps(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values as views of one tensor, every other head of it."""
    joined = torch.stack([torch.cat(xs, 2)] * 2, 3).flatten(2, 3)
    return [x[:, :, ::2] for x in joined.split([2 * x.shape[2] for x in xs], 2)]


@DIRECTIONS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_every_head_of_every_token_comes_to_its_place(case, size, to_heads, device):
    torch.manual_seed(0)
    arguments, expected = problem(case, size, to_heads, device)
    share = share_by_formula if device == "cpu" else fused.share_heads
    for measured, right in zip(exchanged(arguments, to_heads, share), expected, strict=True):
        assert torch.equal(measured, right)


def there_and_back(case: tuple, axis: Axis, backend: str | None) -> list[torch.Tensor]:
    """Of both exchanges one after the other, and the gradient of what they start from."""
    heads, head_dim, batch, seq, queries = case

    def function(qkv):
        query, *both = split_heads(qkv, heads[0] // heads[2], head_dim)
        query, key, value = heads_from_tokens(query[:, :queries], *both, axis)
        return tokens_from_heads(-query.transpose(1, 2).contiguous().transpose(1, 2), axis), -key, -value

    torch.manual_seed(axis.rank)
    qkv = torch.randint(-8, 9, (batch, seq, sum(heads) * head_dim)).float().requires_grad_()
    outputs = (torch.compile(function, fullgraph=True, backend=backend) if backend else function)(qkv)
    grads = [torch.randint(-8, 9, x.shape).float() for x in outputs]
    return [*(x.detach() for x in outputs), *torch.autograd.grad(outputs, qkv, grads)]


def unlike(size: int, case: tuple, backend: str | None) -> list[int]:
    """The results in which gloo's all-to-all and copy engines would differ at all."""
    axis = build_mesh(ParallelConfig(context_parallel_size=size), size, "cpu").cp
    plain = there_and_back(case, axis, backend)
    torch._dynamo.reset()
    with as_if_direct():
        other = there_and_back(case, axis, backend)
    return [i for i, pair in enumerate(zip(other, plain, strict=True)) if not torch.equal(*pair)]


@pytest.mark.parametrize(
    ("size", "heads", "queries", "backend"),
    [
        (4, [8, 8, 8], 6, None),
        in_full(4, [16, 8, 8], 6, None),
        (4, [8, 2, 2], 6, None),  # keys and values are repeated
        (4, [8, 8, 8], 4, None),  # of another sequence
        in_full(2, [8, 1, 1], 6, "aot_eager"),
        in_full(2, [8, 4, 4], 6, "aot_eager"),
    ],
)
def test_values_and_gradients_equal_those_of_an_all_to_all(pool, size, heads, queries, backend):
    assert pool.run(unlike, size, (heads, 16, 2, 6, queries), backend, size=size) == [[]] * size


@pytest.mark.parametrize("name", ["heads_from_tokens", "tokens_from_heads"])
def test_compiled_code_hands_over_views_as_they_are(monkeypatch, quick_compile, name):
    taken = []

    def begin(xs, out, size, group, to_heads):
        taken.append([(x.stride(), x.data_ptr() - xs[0].data_ptr()) for x in xs])
        return out.zero_()

    def function(x, w):
        xs = split_heads((x @ w).view(2, 8, -1), 1, 16)
        tokens = getattr(torch.ops.megalith_copy_engine, name)(list(xs), 2, "")
        return torch.ops._c10d_functional.wait_tensor(tokens)

    monkeypatch.setattr(direct_heads, "_begin", begin)
    x, w = torch.randn(16, 8), torch.randn(8, 4 * 3 * 16)
    for way in (function, torch.compile(function, fullgraph=True)):
        way(x, w)
    eager, compiled = taken
    assert compiled == eager == [((8 * 192, 192, 48, 1), 64 * number) for number in range(3)]


def axes_of_levels(kind: str, sizes: list[int] | None) -> list[tuple[int, bool]]:
    """Size and whether copy engines serve it: of the exchange of heads, and of the ring."""
    mesh = build_mesh(
        ParallelConfig(context_parallel_size=dist.get_world_size()), dist.get_world_size(), "cpu"
    )
    model = Transformer(RunConfig.from_tree({"model": TINY}).model, device=torch.device("meta"))
    apply_context(model, replace(mesh.cp, direct=True), kind, sizes)
    core = model.layers["0"].self_attention.core.sharded.keywords
    return [(axis.size, axis.direct) for axis in (core["inner"], core["outer"])]


def test_copy_engines_serve_the_exchange_of_heads_alone(pool):
    """Where there is a ring too, it goes across hosts."""
    for measured in pool.run(axes_of_levels, "a2a", None):
        assert measured == [(4, True), (1, False)]
    for measured in pool.run(axes_of_levels, "a2a+p2p", [2, 2]):
        assert measured == [(2, True), (2, False)]
