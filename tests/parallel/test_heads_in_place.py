"""Exchanges of heads read and write what the products and attention beside them give and take, without a copy."""

from torch.fx import Node
from traced_layers import QKV_ROWS, layer_graphs

import megalith.parallel.overlap.copy_engine_heads  # noqa: F401 (it registers operators)
from megalith.comm.collectives import Axis
from megalith.models.linear import Linear
from megalith.parallel.overlap.interleave import begins_collective

VIEWS = "view", "permute", "split_with_sizes", "getitem", "wait_tensor"


def beside(node: Node, step: str) -> set[str]:
    """What a node takes ("all_input_nodes") or what takes it ("users"), through views."""
    found = set()
    for other in getattr(node, step):
        name = getattr(other.target, "__name__", "").partition(".")[0]
        if name in VIEWS:
            found |= beside(other, step)
        elif other.op == "call_function":
            found.add(name)
    return found


def test_nothing_stands_between_exchanges_and_products_or_attention(monkeypatch):
    """Of a layer of GPT-2-large; the second result of tokens_from_heads_summed is the gradient of the bias."""
    monkeypatch.setattr(Axis, "goes_direct", lambda axis, x: True)
    monkeypatch.setattr(Linear, "fuses_bias", lambda linear, x: len(linear.weight) == QKV_ROWS)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    expected = [
        {"heads_from_tokens": ({"addmm"}, {attention}), "tokens_from_heads": ({attention}, {"addmm"})},
        {
            "heads_from_tokens": ({"mm"}, {f"{attention}_backward"}),
            "tokens_from_heads_summed": ({f"{attention}_backward"}, {"mm", "cat"}),
        },
    ]
    for graph, neighbours in zip(layer_graphs(context_parallel_size=2, cp_comm_type="a2a"), expected):
        exchanges = [node for node in graph.nodes if begins_collective(node)]
        assert len(exchanges) == 4
        for node in exchanges:
            name = node.target.__name__.partition(".")[0]
            assert (beside(node, "all_input_nodes"), beside(node, "users")) == neighbours[name]
