"""Node order of a compiled ping-pong layer: one half of a micro-batch computes while the other communicates.

A layer traced for one half and then for the other (ping_pong.py) is a graph of two chains that share only weights and
what is before or after both. Inductor runs a graph's nodes in their order, so ordering the nodes is enough:

    half 0   matmul ─▶ reduce-scatter ············▶ wait, add, norm ─▶ all-gather ··············▶ wait, matmul
    half 1               wait ─▶ matmul, attention, matmul ─▶ reduce-scatter ···············▶ wait, add, norm …

Each half keeps its own order. `Merge` merges the two by simulating a device with one queue of kernels and one of
collectives. Nodes that no later collective depends on, such as wgrads, leave their chains: they fill the times at
which both halves would wait, and the rest come last.

The simulation uses sizes and the rates of one kind of device, so it decides the same on every rank, as collectives
require, and chooses only among valid orders.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from megalith.ops import block_attention  # noqa: F401 (it registers operators)

FLOPS = 600e12  # a second, of matmuls and of attention counted whole: an H200's
LINK = 180e9  # bytes a second that a rank sends by NCCL beside matmuls; by copy engines it is twice as much
LATENCY = 20e-6  # seconds that a collective takes at least
MARGIN = 0.5  # of its time, by which a collective may be late and still be hidden, where there are matmuls to fill in


def _attention_flops(first: int, over_keys: int, over_values: int) -> Callable[..., int]:
    """The FLOPs of a kernel with its query, key and value [batch, ·, seq, head_dim] from argument `first` on, and so
    many matmuls over the head dimension of keys and of values: each has a row for each query of each head, however few
    heads of keys and values there are. torch 2.11's own formulas refuse grouped heads."""

    def flops(*args, **_) -> int:
        query, key, value = args[first : first + 3]
        width = over_keys * key.shape[3] + over_values * value.shape[3]
        return 2 * query.shape[:3].numel() * key.shape[2] * width

    return flops


_aten, _ours = torch.ops.aten, torch.ops.megalith
_forward, _backward = _attention_flops(0, 1, 1), _attention_flops(1, 3, 2)
ATTENTION_FLOPS = {
    _aten._scaled_dot_product_cudnn_attention: _forward,
    _aten._scaled_dot_product_cudnn_attention_backward: _backward,
    _aten._scaled_dot_product_flash_attention: _forward,
    _aten._scaled_dot_product_flash_attention_backward: _backward,
    _aten._scaled_dot_product_efficient_attention: _forward,
    _aten._scaled_dot_product_efficient_attention_backward: _backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
    _ours.block_attention: _forward,
    _ours.block_attention_backward: _backward,
}


class Interleave(CustomGraphPass):
    """Puts the nodes of a graph of two halves in order; leaves any other graph as it is."""

    def __call__(self, graph: Graph) -> None:
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        chains = split(nodes)
        if chains is None:
            return
        output = graph.output_node()
        for node in Merge(nodes, chains).order:
            output.prepend(node)

    def uuid(self) -> bytes:
        """Lets torch keep what it has compiled: it depends on this file alone."""
        return get_hash_for_files((__file__,))


def split(nodes: list[Node]) -> list[list[Node]] | None:
    """The nodes of each half, and the rest, in order: what is made of both, and what no collective stands before or
    behind, such as the gradient of the last matrix.

    The first half of the collectives is one half's, the rest are the other's. None where they are not alike, or depend
    on each other: then the graph is not of two halves.
    """
    starts = [node for node in nodes if starts_collective(node)]
    count = len(starts) // 2
    if not count or [node.target for node in starts[:count]] != [node.target for node in starts[count:]]:
        return None
    owners = {node: {int(number >= count)} for number, node in enumerate(starts)}
    for node in nodes:  # what a half's collectives lead to is that half's
        owners[node] = owners.get(node, set()).union(*(owners.get(n, ()) for n in node.all_input_nodes))
    if any(len(owners[node]) > 1 for node in starts):
        return None
    for node in reversed(nodes):  # and so is what leads to them alone
        owners[node] = owners[node] or set().union(*(owners.get(user, ()) for user in node.users))
    halves = [[node for node in nodes if owners[node] == {half}] for half in (0, 1)]
    return [*halves, [node for node in nodes if len(owners[node]) != 1]]


class Merge:
    """The simulated execution. `order` has every node once, after all of its inputs.

    Whenever a matmul ends, the half that does not have to wait continues; if neither has to, the one that comes to its
    next collective first. A collective begins as soon as its input is there, but not before earlier collectives of its
    half. So the all-gather of a column-parallel linear's backward pass, whose input was saved, begins long before its
    matmul.

    Without the nodes that no collective depends on, the chains come to their collectives earlier. The inputs of these
    nodes stay in memory until they run, within one layer. Those that fill no gap overlap the last collectives.
    """

    def __init__(self, nodes: list[Node], chains: list[list[Node]]):
        self.order: list[Node] = []
        self._left = dict.fromkeys(nodes)  # to be placed
        self._seconds = {node: seconds(node) for node in nodes}
        self._now = self._link_is_free = 0.0
        self._done: dict[Node, float] = {}  # when a collective that has begun will be over
        urgent = _leading_to_collectives(nodes)
        self._chains = [
            [node for node in chain if node in urgent and self._is_step(node)] for chain in chains
        ]
        self._fillers = {node: time for node, time in self._seconds.items() if time and node not in urgent}
        for chain in self._chains:
            self._begin_collectives(chain)
        current = 0
        while any(self._chains):
            current = self._next(current)
            step = self._chains[current][0]
            self._place(self._filler_before(step) or step)
            self._begin_collectives(self._chains[current])
        while self._fillers:
            self._place(min(self._fillers, key=self._stall))
        for node in nodes:
            self._place(node)

    def _is_step(self, node: Node) -> bool:
        return starts_collective(node) or self._takes_time(node)

    def _takes_time(self, node: Node) -> bool:
        return waits(node) or (self._seconds[node] > 0 and not starts_collective(node))

    def _next(self, current: int) -> int:
        """The chain to go on with; at the end, waits come last."""

        def key(number: int) -> tuple[float, float, bool, bool]:
            chain = self._chains[number]
            return self._stall(chain[0]), self._horizon(chain), waits(chain[0]), number != current

        return min((number for number, chain in enumerate(self._chains) if chain), key=key)

    def _stall(self, step: Node, margin: float = 0.0) -> float:
        """How long the device would be idle if it went on with this step, collectives being late by `margin`."""
        starts = [awaited(node) for node in (*self._missing(step), step) if waits(node)]
        over = [self._done.get(start, math.inf) + margin * self._seconds[start] for start in starts]
        stall = max(over, default=0.0) - self._now
        return stall if stall > LATENCY else 0.0

    def _filler_before(self, step: Node) -> Node | None:
        """What to compute while the device would wait for this step: the oldest that fits, or the shortest."""
        stall = self._stall(step, MARGIN)
        ready = [node for node in self._fillers if not self._stall(node, MARGIN)] if stall else []
        fitting = [node for node in ready if self._fillers[node] <= stall]
        return fitting[0] if fitting else min(ready, key=self._fillers.get, default=None)

    def _horizon(self, chain: list[Node]) -> float:
        """When this chain by itself would begin its next collective."""
        time = self._now
        for step in chain:
            if starts_collective(step):
                return time
            time = (
                max(time, self._done.get(awaited(step), 0.0)) if waits(step) else time + self._seconds[step]
            )
        return math.inf

    def _begin_collectives(self, chain: list[Node]) -> None:
        """Begins those of a half that come next, as long as nothing that takes time stands before them."""
        for start in [step for step in chain if starts_collective(step)]:
            if any(self._takes_time(node) for node in self._missing(start)):
                break
            self._place(start)
        chain[:] = [step for step in chain if step in self._left]

    def _missing(self, node: Node) -> list[Node]:
        """What has to be placed before `node` can be, in order."""
        found: dict[Node, None] = {}

        def visit(node: Node) -> None:
            for needed in node.all_input_nodes:
                if needed in self._left and needed not in found:
                    visit(needed)
                    found[needed] = None

        visit(node)
        return list(found)

    def _place(self, node: Node) -> None:
        if node not in self._left:
            return
        for each in [*self._missing(node), node]:
            del self._left[each]
            self.order.append(each)
            self._fillers.pop(each, None)
            if starts_collective(each):
                self._link_is_free = max(self._now, self._link_is_free) + self._seconds[each]
                self._done[each] = self._link_is_free
            elif waits(each):
                self._now = max(self._now, self._done[awaited(each)])
            else:
                self._now += self._seconds[each]


def _leading_to_collectives(nodes: list[Node]) -> set[Node]:
    """The collectives, and all that one of them depends on."""
    found: set[Node] = set()
    for node in reversed(nodes):
        if starts_collective(node) or not found.isdisjoint(node.users):
            found.add(node)
    return found


def starts_collective(node: Node) -> bool:
    return _is_functional_collective(node) and not waits(node)


def waits(node: Node) -> bool:
    return node.target is torch.ops._c10d_functional.wait_tensor.default


def awaited(wait: Node) -> Node:
    """The collective, of which the result that comes later is one of two where the other is there at once."""
    result = wait.args[0]
    return result.args[0] if result.target is operator.getitem else result


def _is_functional_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", None) in ("_c10d_functional", "megalith_copy_engine")


def seconds(node: Node) -> float:
    """How long a node keeps the device, or a collective the link. What only goes through memory counts for nothing: it
    runs as a part of some other kernel, or beside the matmuls hardly matters."""
    if starts_collective(node):
        return LATENCY + _bytes_sent(node) / LINK
    target = getattr(node.target, "overloadpacket", None)
    formula = ATTENTION_FLOPS.get(target) or flop_registry.get(target)
    if formula is None:
        return 0.0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return _known(formula(*args, **kwargs, out_val=node.meta["val"])) / FLOPS


def _known(size: int | torch.SymInt) -> int:
    """A size as it is in the pass that the graph is traced for: a comparison would tie the graph to it."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _bytes_sent(node: Node) -> int:
    """By a rank, of a few; an all-reduce over many sends up to twice as much."""
    before = _bytes(node.args[0])
    if node.target is torch.ops._c10d_functional.all_to_all_single.default:
        ranks = len(node.args[1])
        return before * (ranks - 1) // ranks
    if isinstance(node.args[0], list | tuple):  # heads for tokens (copy_engine_heads.py), among args[1] ranks
        return before * (node.args[1] - 1) // node.args[1]
    after = _bytes(node)
    if str(node.target) == "megalith_copy_engine.scatter.default":
        return after  # what the others send; the own part stays where it is
    return abs(before - after) or before


def _bytes(given: Node | Sequence[Node]) -> int:
    if isinstance(given, Node):
        return _known(given.meta["val"].numel()) * given.meta["val"].element_size()
    return sum(_bytes(node) for node in given)
