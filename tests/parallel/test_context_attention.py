"""Attention over a sequence that is cut over ranks equals one process's: result and gradients, every way of talking."""

import functools

import pytest
import torch
from default_cases import by_default

from megalith.config import ParallelConfig
from megalith.ops.attention_core import attention
from megalith.ops.dropout import token_keys
from megalith.parallel.context.context_parallel import context_core, unshard
from megalith.parallel.context.zigzag import KeyBlock, ShardMasks, spans
from megalith.parallel.mesh import build_mesh

BATCH, SEQ = 2, 24

# ways of talking: (ranks, cp_comm_type, hierarchical sizes)
WAYS = {
    "p2p of 2": (2, "p2p", None),
    "p2p of 4": (4, "p2p", None),
    "all_gather of 2": (2, "all_gather", None),
    "all_gather of 4": (4, "all_gather", None),
    "a2a of 2": (2, "a2a", None),
    "a2a of 4": (4, "a2a", None),
    "a2a of 2, p2p of 2": (4, "a2a+p2p", [2, 2]),
    "a2a of 4, p2p of 1": (4, "a2a+p2p", [4, 1]),
    "a2a of 1, p2p of 4": (4, "a2a+p2p", [1, 4]),
}

# (heads, groups, head_dim, documents, dropout, how scores are bounded)
SHAPES = {
    "multi-head": (4, 4, 8, False, 0.0),
    "grouped": (8, 4, 8, False, 0.0),
    "fewer groups than ranks": (4, 2, 8, False, 0.0),
    "groups that ranks do not divide": (12, 6, 8, False, 0.0),
    "one group, head dim 80": (4, 1, 80, False, 0.0),
    "documents": (4, 2, 8, True, 0.0),
    "dropout": (4, 2, 8, False, 0.3),
    "documents and dropout": (4, 4, 8, True, 0.3),
    "window": (4, 2, 8, False, 0.0, {"window": 5, "scale": 0.3}),
    "window and documents": (4, 2, 8, True, 0.0, {"window": 7}),
    "window, documents, dropout": (4, 4, 8, True, 0.3, {"window": 7}),
    "soft-capped": (4, 2, 8, False, 0.0, {"softcap": 0.9}),
    "ALiBi": (4, 2, 8, False, 0.0, {"alibi": 12}),
    "ALiBi of all heads, documents, dropout": (6, 6, 8, True, 0.3, {"alibi": 11}),
    "ALiBi and window": (4, 4, 8, False, 0.0, {"alibi": 12, "window": 5}),
    "sinks": (4, 2, 8, False, 0.0, {"sink": torch.linspace(-1.0, 2.0, 4)}),
    "every token": (4, 2, 8, False, 0.0, {"causal": False}),
    "every token, documents, dropout": (4, 4, 8, True, 0.3, {"causal": False}),
    "all of them": (8, 4, 8, True, 0.3, {"window": 9, "softcap": 0.9, "scale": 0.3}),
}


def whole_problem(heads: int, groups: int, head_dim: int, documents: bool, dropout: float, *_: dict):
    """Query, key, value and the weights of the result, over the whole sequence; documents' ends and rows of dropout."""
    random = torch.Generator().manual_seed(3)
    counts = (heads, groups, groups, heads)
    tensors = [torch.randn(BATCH, SEQ, count, head_dim, generator=random) for count in counts]
    ends = None
    if documents:  # long and short ones, and ends inside chunks, at their edges and alone in a chunk
        ends = torch.tensor([[3, 9, 10, 18, SEQ, SEQ], [12] + [SEQ] * 5], dtype=torch.int32)
    rows = token_keys(7, torch.arange(BATCH), torch.arange(SEQ)) if dropout else None
    return tensors, ends, rows


@functools.cache
def by_one_process(name: str) -> list[torch.Tensor]:
    """Result and gradients of query, key and value: [batch, seq, ·, head_dim] each."""
    shape = SHAPES[name]
    (query, key, value, weights), ends, rows = whole_problem(*shape)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    scores = shape[5] if len(shape) > 5 else {}
    out = attention(
        *inputs, documents=ends, dropout=shape[4], dropout_rows=rows, first_head=5, **scores
    ).sin()
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def by_ranks(way: tuple, names: list[str], backend: str | None = None) -> list[list[torch.Tensor]]:
    """The same for each shape, gathered to the whole sequence; compiled if a `backend` is given."""
    size, cp_comm_type, sizes = way
    axis = build_mesh(ParallelConfig(context_parallel_size=size), size, "cpu").cp
    core = context_core(axis, cp_comm_type, sizes)
    positions = torch.cat([torch.tensor(span) for span in spans(axis.rank, size, SEQ // size)])
    answers = []
    for shape in map(SHAPES.get, names):
        (query, key, value, weights), ends, rows = whole_problem(*shape)
        inputs = [x[:, positions].requires_grad_() for x in (query, key, value)]
        rows = None if rows is None else rows[:, positions]

        scores = shape[5] if len(shape) > 5 else {}

        def attend(query, key, value, ends, rows, dropout=shape[4], scores=scores):
            arguments = dict(documents=ends, dropout=dropout, dropout_rows=rows, first_head=5, **scores)
            return core(query * 1.0, key * 1.0, value * 1.0, **arguments).sin()

        if backend is not None:
            torch._dynamo.reset()
            attend = torch.compile(attend, fullgraph=True, backend=backend)
        out = attend(*inputs, ends, rows)
        (out * weights[:, positions]).sum().backward()
        answers.append([unshard(x, axis) for x in (out.detach(), *(x.grad for x in inputs))])
    return answers


def assert_same(answers: list[list[torch.Tensor]], names: list[str]) -> None:
    for name, answer in zip(names, answers, strict=True):
        for kind, ours, theirs in zip(("result", "query", "key", "value"), answer, by_one_process(name)):
            error = (ours - theirs).norm() / theirs.norm()
            assert error < 2e-6, f"{kind} of {name}: relative error {error:.1e}"


@pytest.mark.parametrize(
    "way", by_default(WAYS, "p2p of 2", "all_gather of 2", "a2a of 2", "a2a of 2, p2p of 2")
)
def test_result_and_gradients_equal_one_process(pool, way):
    size, cp_comm_type, sizes = WAYS[way]
    by_heads = {"a2a": size, "a2a+p2p": (sizes or [1])[0]}.get(cp_comm_type, 1)
    names = [name for name, shape in SHAPES.items() if shape[0] % by_heads == 0]
    for answers in pool.run(by_ranks, WAYS[way], names, size=size):
        assert_same(answers, names)


@pytest.mark.parametrize("documents", [None, torch.tensor([[100, 1024]], dtype=torch.int32)])
def test_under_a_window_a_ring_makes_no_mask_and_computes_no_more_than_chunks_and_windows(documents):
    size, seq, window = 4, 256, 40
    for rank in range(size):
        local = KeyBlock(torch.empty(2, 1, seq, 1, 8), spans(rank, size, seq), causal=True)
        masks = ShardMasks(documents, None, window, None, None, None, 0.0, 0, 1, local)
        computed = 0
        for source in range(size):
            shard = KeyBlock(local.pair, spans(source, size, seq))
            for queries, keys, block in masks.parts(shard):
                assert block.mask is None and block.window == window
                computed += (queries.stop - queries.start) * (keys.stop - keys.start)
        assert (
            computed <= 2 * (seq // 2) ** 2 + 2 * (window - 1) ** 2
        )  # of its two chunks and of those before them


# By default test_context_model.py traces whole layers with "a2a of 2".
@pytest.mark.parametrize(
    "way", by_default(["p2p of 2", "all_gather of 2", "a2a of 2", "a2a of 2, p2p of 2"], "all_gather of 2")
)
def test_traced_in_one_graph_equals_one_process(pool, way):
    names = ["all of them"]  # the next test compiles a ring with grouped heads
    for answers in pool.run(by_ranks, WAYS[way], names, "aot_eager", size=WAYS[way][0]):
        assert_same(answers, names)


@pytest.mark.full
def test_compiled_code_finds_the_ring_laid_out_as_it_was_told(pool):
    names = ["grouped"]
    for answers in pool.run(by_ranks, WAYS["p2p of 2"], names, "inductor", size=2):
        assert_same(answers, names)
