"""The order that two halves of a micro-batch get in a compiled layer: what runs while a collective is under way."""

import functools

import pytest
import torch
from default_cases import in_full
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry
from traced_layers import BATCH, LLAMA, SEQ, layer_graphs

import megalith.parallel.overlap.copy_engine_heads  # noqa: F401 (it registers operators)
from megalith.comm.collectives import Axis
from megalith.parallel.overlap import interleave
from megalith.parallel.overlap.interleave import Interleave, awaited, seconds, starts_collective, waits

collectives, aten = torch.ops._c10d_functional, torch.ops.aten
TOKENS, HIDDEN, FFN, RANKS = 32768, 1280, 2560, 2


class Tracer:
    """Builds a graph of shapes alone."""

    def __init__(self):
        self.graph = Graph()

    def input(self, name: str, *shape: int) -> Node:
        return self._with_shape(self.graph.placeholder(name), shape)

    def call(self, target, *args, name: str, shape: tuple[int, ...]) -> Node:
        return self._with_shape(self.graph.create_node("call_function", target, args, name=name), shape)

    def product(self, a: Node, b: Node, name: str) -> Node:
        shape = (a.meta["val"].shape[0], b.meta["val"].shape[1])
        return self.call(aten.mm.default, a, b, name=name, shape=shape)

    def add(self, a: Node, b: Node, name: str) -> Node:
        return self.call(aten.add.Tensor, a, b, name=name, shape=a.meta["val"].shape)

    def gather(self, x: Node, name: str) -> Node:
        tokens, width = x.meta["val"].shape
        op, shape = collectives.all_gather_into_tensor.default, (tokens * RANKS, width)
        begun = self.call(op, x, RANKS, "tp", name=f"{name}_gather", shape=shape)
        return self.wait(begun, f"{name}_gathered")

    def scatter(self, x: Node, name: str) -> Node:
        tokens, width = x.meta["val"].shape
        op, shape = collectives.reduce_scatter_tensor.default, (tokens // RANKS, width)
        begun = self.call(op, x, "sum", RANKS, "tp", name=f"{name}_scatter", shape=shape)
        return self.wait(begun, f"{name}_scattered")

    def wait(self, begun: Node, name: str) -> Node:
        return self.call(collectives.wait_tensor.default, begun, name=name, shape=begun.meta["val"].shape)

    @staticmethod
    def _with_shape(node: Node, shape) -> Node:
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return node


def forward_graph(modules: int = 3) -> Graph:
    """Two halves one after the other through pairs of matrices, with sequence parallelism."""
    t = Tracer()
    halves = [t.input(f"x{half}", TOKENS // RANKS, HIDDEN) for half in (0, 1)]
    master = [(t.input(f"a{m}", HIDDEN, FFN), t.input(f"b{m}", FFN, HIDDEN)) for m in range(modules)]
    weights = [
        [t.call(aten.clone.default, w, name=f"cast_{w.name}", shape=w.meta["val"].shape) for w in pair]
        for pair in master
    ]
    results = []
    for half, x in enumerate(halves):
        for number, (a, b) in enumerate(weights):
            name = f"half{half}_{number}"
            inner = t.product(t.gather(x, name), a, f"{name}_in")
            inner = t.add(inner, inner, f"{name}_act")
            x = t.add(x, t.scatter(t.product(inner, b, f"{name}_out"), name), f"{name}_stream")
        results.append(x)
    t.graph.output(tuple(results))
    return t.graph


def backward_graph() -> Graph:
    """Of a column-parallel linear behind another: the kept share gathered again, the weight's gradient last."""
    t = Tracer()
    grads = [t.input(f"grad{half}", TOKENS, FFN) for half in (0, 1)]
    kept = [[t.input(f"kept{half}_{m}", TOKENS // RANKS, HIDDEN) for m in (0, 1)] for half in (0, 1)]
    weight, up = t.input("weight", FFN, HIDDEN), t.input("up", HIDDEN, FFN)
    sums = [[], []]
    for half, grad in enumerate(grads):
        for number in (0, 1):
            name = f"half{half}_{number}"
            again = t.gather(kept[half][number], name)
            x = t.scatter(t.product(grad, weight, f"{name}_dgrad"), name)
            turned = t.call(aten.t.default, again, name=f"{name}_turned", shape=(HIDDEN, TOKENS))
            sums[number].append(t.product(turned, grad, f"{name}_wgrad"))
            grad = t.product(t.gather(x, f"{name}_next"), up, f"{name}_up")
        sums[0].append(grad)
    total = [t.add(*sums[number][:2], f"sum{number}") for number in (0, 1)]
    t.graph.output((*total, *sums[0][2:]))
    return t.graph


def ordered(graph: Graph) -> list[Node]:
    Interleave()(graph)
    graph.lint()
    return list(graph.nodes)


def exposed(nodes: list[Node]) -> float:
    """The seconds that a device would stand waiting, and those of all collectives."""
    now = link = stood = 0.0
    over = {}
    for node in nodes:
        if starts_collective(node):
            over[node] = link = max(now, link) + seconds(node)
        elif waits(node):
            stood += max(0.0, over[awaited(node)] - now)
            now = max(now, over[awaited(node)])
        elif node.op == "call_function":
            now += seconds(node)
    return stood


@pytest.mark.parametrize("make", [forward_graph, backward_graph])
def test_every_node_stands_once_behind_what_it_takes(make):
    before = [node.name for node in make().nodes]
    nodes = ordered(make())
    positions = {node: place for place, node in enumerate(nodes)}
    assert sorted(node.name for node in nodes) == sorted(before)
    assert all(positions[needed] < positions[node] for node in nodes for needed in node.all_input_nodes)


def test_collectives_of_a_half_keep_their_order():
    graph = backward_graph()
    before = [node.name for node in graph.nodes if starts_collective(node)]
    after = [node.name for node in ordered(graph) if starts_collective(node)]
    for half in ("half0", "half1"):
        assert [n for n in before if n.startswith(half)] == [n for n in after if n.startswith(half)]


def test_an_exchange_of_heads_takes_as_long_as_that_of_one_tensor_of_all():
    t = Tracer()
    parts = [t.input(f"x{i}", TOKENS, HIDDEN // 4) for i in range(4)]
    whole = t.input("x", TOKENS, HIDDEN)
    heads = torch.ops.megalith_copy_engine.heads_from_tokens.default
    one = t.call(heads, parts, RANKS, "cp", name="of_four", shape=(TOKENS * RANKS, HIDDEN // RANKS))
    other = t.call(
        collectives.all_to_all_single.default, whole, [TOKENS // RANKS] * RANKS, [TOKENS // RANKS] * RANKS, "cp",
        name="of_one", shape=(TOKENS, HIDDEN),
    )  # fmt: skip
    assert starts_collective(one)
    assert seconds(one) == seconds(other)


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_direct_scatter_takes_as_long_as_a_reduce_scatter(ranks):
    t, direct = Tracer(), torch.ops.megalith_copy_engine.scatter.default
    x, part = t.input("x", TOKENS, HIDDEN), (TOKENS // ranks, HIDDEN)
    one = t.call(direct, x, ranks, "tp", name="one", shape=(ranks - 1, *part))
    other = t.call(collectives.reduce_scatter_tensor.default, x, "sum", ranks, "tp", name="other", shape=part)
    assert seconds(one) == seconds(other) > interleave.LATENCY


def test_only_the_first_and_the_last_collective_are_exposed():
    graph = forward_graph()
    one = next(seconds(node) for node in graph.nodes if starts_collective(node))
    assert exposed(list(graph.nodes)) == pytest.approx(12 * one)
    assert exposed(ordered(graph)) == pytest.approx(2 * one, rel=0.25)


def test_a_gather_again_begins_before_the_work_that_hides_it():
    graph = backward_graph()
    alone = exposed(list(graph.nodes))
    names = [node.name for node in ordered(graph)]
    assert names.index("half0_1_gather") < names.index("half0_0_up")
    assert exposed(list(graph.nodes)) < 0.4 * alone


def test_weight_gradients_fill_waits_and_come_last_where_there_are_none(monkeypatch):
    def positions() -> tuple[list[int], int]:
        nodes = ordered(backward_graph())
        gradients = [place for place, node in enumerate(nodes) if node.name.endswith("wgrad")]
        return gradients, max(place for place, node in enumerate(nodes) if starts_collective(node))

    gradients, last = positions()
    assert max(gradients) < last
    monkeypatch.setattr(interleave, "seconds", lambda node: 0.0 if starts_collective(node) else seconds(node))
    gradients, last = positions()
    assert min(gradients) > last


def sdpa_flop_count(query, key, value):
    """What torch 2.11's formula refuses."""
    assert query.shape[1] == key.shape[1] == value.shape[1], "query/key/value shapes are incompatible"


@pytest.fixture(autouse=True)
def formulas_of_torch_2_11(monkeypatch):
    for kernel in [kernel for kernel in flop_registry if "scaled_dot_product" in str(kernel)]:
        first = 1 if "backward" in str(kernel) else 0
        refusing = lambda *args, first=first, **_: sdpa_flop_count(*args[first : first + 3])  # noqa: E731
        monkeypatch.setitem(flop_registry, kernel, refusing)


@pytest.mark.parametrize("name", ["cudnn_attention", "flash_attention", "efficient_attention"])
def test_attention_takes_as_long_with_grouped_heads_and_as_long_as_its_matmuls(name):
    t, batch, heads, seq, head_dim = Tracer(), 2, 8, 1024, 64
    query = t.input("query", batch, heads, seq, head_dim)
    forward, backward = (
        getattr(aten, f"_scaled_dot_product_{name}{end}").default for end in ("", "_backward")
    )
    for groups in (1, 2, heads):
        key, value = (t.input(f"{x}{groups}", batch, groups, seq, head_dim) for x in ("key", "value"))
        shape, matmul = query.meta["val"].shape, 2 * batch * heads * seq * seq * head_dim
        there = t.call(forward, query, key, value, name=f"there{groups}", shape=shape)
        back = t.call(backward, query, query, key, value, name=f"back{groups}", shape=shape)
        assert seconds(there) * interleave.FLOPS == pytest.approx(2 * matmul)
        assert seconds(back) * interleave.FLOPS == pytest.approx(5 * matmul)  # scores are computed again


TP2_SP = dict(tensor_model_parallel_size=2, sequence_parallel=True)
CP2_A2A = dict(context_parallel_size=2, cp_comm_type="a2a")


@functools.cache
def graphs_of_exchanged_heads() -> list[Graph]:
    """Of GPT-2-large, traced once; what orders them takes copies."""
    return layer_graphs(**CP2_A2A)


def copied(graph: Graph) -> Graph:
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


@pytest.mark.parametrize(
    "parallel",
    [in_full(way) for way in (TP2_SP, CP2_A2A)],
    ids=["tp2-sp", "cp2-a2a"],
)
def test_halves_with_grouped_heads_hide_most_of_what_they_say(parallel):
    for graph in layer_graphs(LLAMA, **parallel):
        alone = exposed(list(graph.nodes))
        assert exposed(ordered(graph)) < 0.4 * alone


@pytest.mark.full
@pytest.mark.parametrize("parallel", [TP2_SP, CP2_A2A], ids=["tp2-sp", "cp2-a2a"])
def test_a_layer_of_gpt2_large_exposes_only_what_it_has_nothing_to_hide_behind(parallel, monkeypatch):
    """With SP the first collective of a pass, which all else waits for, and the last of a forward pass. The exchange of
    heads takes longer than the work beside it in the forward pass, and is hidden in the backward pass."""
    graphs = graphs_of_exchanged_heads() if parallel is CP2_A2A else layer_graphs(**parallel)
    forward, backward = map(copied, graphs)
    alone = [exposed(list(graph.nodes)) for graph in (forward, backward)]
    orders = [ordered(graph) for graph in (forward, backward)]
    first = next(seconds(node) for node in orders[1] if starts_collective(node))
    assert alone[0] > 1e-3 and alone[1] > 1e-3
    if parallel is TP2_SP:
        assert exposed(orders[0]) == pytest.approx(2 * first, rel=0.05)
        gather = torch.ops._c10d_functional.all_gather_into_tensor.default
        # Of gradients alone, two a half: what the forward pass has gathered is not gathered again.
        assert [node.target for node in orders[1]].count(gather) == 4
    else:
        assert exposed(orders[0]) < 0.4 * alone[0]
    for slower in (1.0, 1.4):  # than the order was made for
        monkeypatch.setattr(interleave, "LINK", 180e9 / slower)
        first = next(seconds(node) for node in orders[1] if starts_collective(node))
        assert exposed(orders[1]) == pytest.approx(first if parallel is TP2_SP else 0.0, abs=1e-6)


@pytest.mark.full
def test_sums_of_tensor_parallelism_by_copy_engines_expose_the_last_of_the_forward_pass(monkeypatch):
    """An all-reduce is a scatter and a gather of what it sums up to, each of which the other half can hide."""
    monkeypatch.setattr(Axis, "uses_copy_engine", lambda axis, x: True)
    forward, backward = (ordered(graph) for graph in layer_graphs(tensor_model_parallel_size=2))
    for nodes in (forward, backward):
        kinds = [str(node.target) for node in nodes if starts_collective(node)]
        assert (
            kinds == ["megalith_copy_engine.scatter.default", "megalith_copy_engine.all_gather.default"] * 4
        )
    last = [seconds(node) for node in forward if starts_collective(node)][-2:]
    assert exposed(forward) == pytest.approx(sum(last), rel=0.05)
    assert exposed(backward) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.full
def test_context_parallelism_halves_attention_and_its_matrices_alone():
    rows = []
    for node in graphs_of_exchanged_heads()[0].nodes:
        if node.target is aten.addmm.default:
            rows.append(node.meta["val"].shape[0])
    tokens = BATCH * SEQ // 2
    assert sorted(rows) == [tokens // 2] * 4 + [tokens] * 2


@pytest.mark.full
def test_halves_of_attention_are_joined_as_results_of_products():
    """Which Inductor lets write to their places in what is joined, in both passes."""
    for graph in graphs_of_exchanged_heads():
        joins = [node for node in graph.nodes if node.target is aten.cat.default]
        (join,) = [node for node in joins if node.meta["val"].shape == (BATCH * SEQ // 2, HIDDEN)]
        assert {part.target for part in join.all_input_nodes} <= {aten.mm.default, aten.addmm.default}


def test_graphs_that_are_not_of_two_halves_stay_as_they_are():
    t = Tracer()
    x, weight = t.input("x", TOKENS, HIDDEN), t.input("w", HIDDEN, HIDDEN)
    y = t.scatter(t.product(t.gather(x, "a"), weight, "p"), "a")
    chained = t.scatter(t.product(t.gather(y, "b"), weight, "q"), "b")
    t.graph.output(chained)
    names = [node.name for node in t.graph.nodes]
    assert [node.name for node in ordered(t.graph)] == names
