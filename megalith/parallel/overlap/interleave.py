"""Orders the nodes of a compiled ping-pong layer so that one half computes while the other communicates.

A layer traced for one half and then for the other (ping_pong.py) is a graph of two chains that share only weights and
the nodes before or after both. Inductor runs a graph's nodes in their order, so ordering the nodes is enough:

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
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from megalith.compat import torch_operators as operators
from megalith.compat.torch_inductor import GraphPass, hash_files
from megalith.ops import block_attention  # noqa: F401 (it registers operators)

FLOPS = 600e12  # per second, of matmuls and of attention (counted without a mask), on an H200
LINK = 180e9  # bytes per second that a rank sends by NCCL during matmuls; copy engines are twice as fast
LATENCY = 20e-6  # minimum seconds of a collective
MARGIN = (
    0.5  # fraction of its time by which a collective may be late and still be hidden, if matmuls can fill in
)


def _attention_flops(first: int, over_keys: int, over_values: int) -> Callable[..., int]:
    """Return a FLOP formula for an attention kernel. torch 2.11's own formulas reject grouped query attention.

    Args:
        first: index of the query argument, followed by key and value: [batch, heads, seq, head_dim] each.
        over_keys: number of matmuls over the head dimension of keys.
        over_values: number of matmuls over the head dimension of values.
    """

    def flops(*args, **_) -> int:
        query, key, value = args[first : first + 3]
        width = over_keys * key.shape[3] + over_values * value.shape[3]
        return 2 * query.shape[:3].numel() * key.shape[2] * width

    return flops


_ours = torch.ops.megalith
_forward, _backward = _attention_flops(0, 1, 1), _attention_flops(1, 3, 2)
ATTENTION_FLOPS = {
    operators.cudnn_attention: _forward,
    operators.cudnn_attention_backward: _backward,
    operators.flash_attention: _forward,
    operators.flash_attention_backward: _backward,
    operators.efficient_attention: _forward,
    operators.efficient_attention_backward: _backward,
    operators.cpu_attention: _forward,
    operators.cpu_attention_backward: _backward,
    _ours.block_attention: _forward,
    _ours.block_attention_backward: _backward,
}


class Interleave(GraphPass):
    """A graph pass that orders the nodes of graphs with two halves. It does not change other graphs."""

    def __call__(self, graph: Graph) -> None:
        nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        chains = split(nodes)
        if chains is None:
            return
        output = graph.output_node()
        for node in Merge(nodes, chains).order:
            output.prepend(node)

    def uuid(self) -> bytes:
        """Return the cache key of the graph pass, which depends only on this file."""
        return hash_files((__file__,))


def split(nodes: list[Node]) -> list[list[Node]] | None:
    """Split the nodes into those of each half and the rest, each in order.

    The rest are nodes that depend on both halves, and nodes without a path from or to a collective, such as the
    gradient of the last weight. In the order of the graph, the first half of the collectives belongs to one half of
    the micro-batch and the second half to the other.

    Returns:
        The three lists. None if the collectives of the halves differ or depend on each other: then the graph does not
        consist of two halves.
    """
    starts = [node for node in nodes if starts_collective(node)]
    count = len(starts) // 2
    if not count or [node.target for node in starts[:count]] != [node.target for node in starts[count:]]:
        return None
    owners = {node: {int(number >= count)} for number, node in enumerate(starts)}
    for node in nodes:  # nodes that depend on a half's collectives belong to that half
        owners[node] = owners.get(node, set()).union(*(owners.get(n, ()) for n in node.all_input_nodes))
    if any(len(owners[node]) > 1 for node in starts):
        return None
    for node in reversed(nodes):  # and so do nodes that lead only to them
        owners[node] = owners[node] or set().union(*(owners.get(user, ()) for user in node.users))
    halves = [[node for node in nodes if owners[node] == {half}] for half in (0, 1)]
    return [*halves, [node for node in nodes if len(owners[node]) != 1]]


class Merge:
    """The simulated execution. `order` has every node once, after all of its inputs.

    Whenever a matmul ends, the half that does not have to wait continues. If neither has to wait, the half continues
    that would reach its next collective first. A collective starts once its input exists and earlier collectives of its
    half have started. So the all-gather in the backward pass of a column-parallel linear, whose input was saved, starts
    long before its matmul.

    Nodes that no collective depends on are taken out of their chains, so that the chains reach their collectives
    earlier. Their inputs stay in memory until they run, within one layer. Such nodes that fill no gap overlap the
    last collectives.
    """

    def __init__(self, nodes: list[Node], chains: list[list[Node]]):
        self.order: list[Node] = []
        self._unplaced = dict.fromkeys(nodes)
        self._seconds = {node: seconds(node) for node in nodes}
        self._now = self._link_is_free = 0.0
        self._done: dict[Node, float] = {}  # end times of started collectives
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
        """Return the chain to continue: the one with the shortest wait and, among equal waits, the one that starts its
        next collective first.
        """

        def key(number: int) -> tuple[float, float, bool, bool]:
            chain = self._chains[number]
            return self._stall(chain[0]), self._horizon(chain), waits(chain[0]), number != current

        return min((number for number, chain in enumerate(self._chains) if chain), key=key)

    def _stall(self, step: Node, margin: float = 0.0) -> float:
        """Return the seconds for which the device would be idle before this step if collectives took longer by the
        fraction `margin`.
        """
        starts = [awaited(node) for node in (*self._missing(step), step) if waits(node)]
        ends = [self._done.get(start, math.inf) + margin * self._seconds[start] for start in starts]
        stall = max(ends, default=0.0) - self._now
        return stall if stall > LATENCY else 0.0

    def _filler_before(self, step: Node) -> Node | None:
        """Return a node that no collective depends on, to run while the device would wait for this step.

        Choose the first node in graph order that fits into the wait, otherwise the shortest. None if there is no wait
        or no ready node.
        """
        stall = self._stall(step, MARGIN)
        ready = [node for node in self._fillers if not self._stall(node, MARGIN)] if stall else []
        fitting = [node for node in ready if self._fillers[node] <= stall]
        return fitting[0] if fitting else min(ready, key=self._fillers.get, default=None)

    def _horizon(self, chain: list[Node]) -> float:
        """Return the time at which this chain, if it ran without others, would start its next collective."""
        time = self._now
        for step in chain:
            if starts_collective(step):
                return time
            time = (
                max(time, self._done.get(awaited(step), 0.0)) if waits(step) else time + self._seconds[step]
            )
        return math.inf

    def _begin_collectives(self, chain: list[Node]) -> None:
        """Begin a half's next collectives, up to its next node that takes time."""
        for start in [step for step in chain if starts_collective(step)]:
            if any(self._takes_time(node) for node in self._missing(start)):
                break
            self._place(start)
        chain[:] = [step for step in chain if step in self._unplaced]

    def _missing(self, node: Node) -> list[Node]:
        """Return the nodes that `node` depends on and that have no place in the order yet, in graph order."""
        missing: dict[Node, None] = {}

        def visit(node: Node) -> None:
            for needed in node.all_input_nodes:
                if needed in self._unplaced and needed not in missing:
                    visit(needed)
                    missing[needed] = None

        visit(node)
        return list(missing)

    def _place(self, node: Node) -> None:
        if node not in self._unplaced:
            return
        for each in [*self._missing(node), node]:
            del self._unplaced[each]
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
    """Return the collectives, and all nodes that one of them depends on."""
    leading: set[Node] = set()
    for node in reversed(nodes):
        if starts_collective(node) or not leading.isdisjoint(node.users):
            leading.add(node)
    return leading


def starts_collective(node: Node) -> bool:
    return _is_functional_collective(node) and not waits(node)


def waits(node: Node) -> bool:
    return node.target is operators.functional_collectives.wait_tensor.default


def awaited(wait: Node) -> Node:
    """Return the collective of a wait. Its result may be one of two outputs."""
    result = wait.args[0]
    return result.args[0] if result.target is operator.getitem else result


def _is_functional_collective(node: Node) -> bool:
    return getattr(node.target, "namespace", None) in ("_c10d_functional", "megalith_copy_engine")


def seconds(node: Node) -> float:
    """Return the duration of a node on the device, or of a collective on the link.

    Memory-bound nodes count as 0: they are fused into other kernels, or are short compared with matmuls.
    """
    if starts_collective(node):
        return LATENCY + _bytes_sent(node) / LINK
    target = getattr(node.target, "overloadpacket", None)
    formula = ATTENTION_FLOPS.get(target) or flop_registry.get(target)
    if formula is None:
        return 0.0
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return _size_hint(formula(*args, **kwargs, out_val=node.meta["val"])) / FLOPS


def _size_hint(size: int | torch.SymInt) -> int:
    """Return the size seen in tracing as a number. Comparing a symbolic size would specialize the graph to it."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def _bytes_sent(node: Node) -> int:
    """Return the number of bytes that a rank sends in this collective.

    An all-reduce counts its input once, as in a group of two ranks; with many ranks it sends up to twice as much.
    """
    before = _bytes(node.args[0])
    if node.target is operators.functional_collectives.all_to_all_single.default:
        ranks = len(node.args[1])
        return before * (ranks - 1) // ranks
    if isinstance(node.args[0], list | tuple):  # exchange of heads (copy_engine_heads.py) over args[1] ranks
        return before * (node.args[1] - 1) // node.args[1]
    after = _bytes(node)
    if str(node.target) == "megalith_copy_engine.scatter.default":
        return after  # the local part is not sent
    return abs(before - after) or before


def _bytes(nodes: Node | Sequence[Node]) -> int:
    if isinstance(nodes, Node):
        return _size_hint(nodes.meta["val"].numel()) * nodes.meta["val"].element_size()
    return sum(_bytes(node) for node in nodes)
