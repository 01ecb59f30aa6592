"""Inductor's settings for compiled layers: kernels, what is kept on disk, the order of ping-pong micro-batches.

The order of ping-pong micro-batches in a compiled layer lets one compute while the other communicates.

A layer that is traced for one half of a micro-batch and then for the other (ping_pong.py) is a graph of two chains that
share only weights, and what is before or after both. Inductor runs a graph's nodes in their order, so ordering the
nodes is enough:

    half 0   matmul ─▶ reduce-scatter ············▶ wait, add, norm ─▶ all-gather ··············▶ wait, matmul
    half 1               wait ─▶ matmul, attention, matmul ─▶ reduce-scatter ···············▶ wait, add, norm …

Each half keeps its own order. The two are merged by simulating a device with one queue of kernels and one of
collectives: whenever a matmul ends, the half continues that does not have to wait, and of two such halves the one that
comes to its next collective first. A collective begins as soon as its input is there, though not before earlier ones of
its half: so the all-gather of a column-parallel linear's backward pass, whose input was saved, begins long before its
matmul.

What no later collective depends on, such as wgrads, can wait: these matmuls leave their chains, which come to their
collectives the earlier, and fill the times at which both halves would wait; the rest come last, and overlap the last
collectives. Their inputs stay in memory until then, within one layer.

The simulation uses sizes, and the rates of one kind of device: it decides the same on every rank, as collectives
demand, and chooses only among valid orders.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._inductor import config, ir
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from megalith.ops import attention_blocks  # noqa: F401 (it registers operators)

FLOPS = 600e12  # a second, of matmuls and of attention counted whole: an H200's
LINK = 180e9  # bytes a second that a rank sends by NCCL beside matmuls; by copy engines it is twice as much
LATENCY = 20e-6  # seconds that a collective takes at least
WIDEST_ROW = 8192  # elements that a program holds in registers
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
    starts = [node for node in nodes if begins_collective(node)]
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
    """The simulation. `order` has every node once, each behind all that it takes."""

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
        return begins_collective(node) or self._takes_time(node)

    def _takes_time(self, node: Node) -> bool:
        return waits(node) or (self._seconds[node] > 0 and not begins_collective(node))

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
            if begins_collective(step):
                return time
            time = (
                max(time, self._done.get(awaited(step), 0.0)) if waits(step) else time + self._seconds[step]
            )
        return math.inf

    def _begin_collectives(self, chain: list[Node]) -> None:
        """Begins those of a half that come next, as long as nothing that takes time stands before them."""
        for start in [step for step in chain if begins_collective(step)]:
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
            if begins_collective(each):
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
        if begins_collective(node) or not found.isdisjoint(node.users):
            found.add(node)
    return found


def begins_collective(node: Node) -> bool:
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
    if begins_collective(node):
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


def keep_activations(share: float) -> None:
    """`share`: of what layers compiled from here on would keep for the backward pass what they may, 0 to 1."""
    torch._functorch.config.activation_memory_budget = share


def prepare_compiler() -> None:
    """Once for the process, before a layer is compiled for GPUs."""
    V.set_choices_handler(_Choices())
    flop_registry.update(ATTENTION_FLOPS)  # by which torch weighs what to compute again
    cache_whole_layers()


def cache_whole_layers() -> None:
    """Lets torch keep on disk what it makes of a layer's two passes, so that a later start need not trace them anew.

    It keeps none with an autograd function or a choice of attention kernels inside, as it cannot know in general what
    these depend on. Ours depend on their code alone: what is traced is in the key, and of operators of our own, which
    torch does not look into, the files are put there.
    """
    key = torch.__version__ + operators_hash()
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    choices = ("_sdpa_kernel", "_backend_from_string")  # what `with sdpa_kernel(...)` is traced to
    config.unsafe_marked_cacheable_functions = {f"torch.nn.attention.{function}": key for function in choices}


def operators_hash() -> str:
    """Of the files that define operators, this one too, which chooses among kernels."""
    package = Path(__file__).parents[2]
    files = sorted(file for name in ("comm", "ops", "parallel") for file in package.glob(f"{name}/**/*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Choices(InductorChoices):
    @staticmethod
    def should_use_persistent_reduction(features: SIMDKernelFeatures, cooperative_reduction: bool) -> bool:
        """A norm reads its row once: Inductor by itself does so up to 1,024 elements, and reads longer rows twice.

        On an H200 the forward norms of a layer of width 1,280 take 0.18 ms and not 0.35. The choice must not be made
        by timing at the start, as Inductor's multi-kernels make it: a run that goes on would round in another way.
        """
        along_rows = features.get_reduction_hint() is ReductionHint.INNER
        if along_rows and V.graph.sizevars.statically_known_leq(features.reduction_numel, WIDEST_ROW):
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    @staticmethod
    def can_fuse_horizontal(
        scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int
    ) -> bool:
        """The halves of a micro-batch share weights, for which Inductor would put the norms of both into one kernel:
        it would wait for the collectives of both, and neither would overlap the other's matmuls."""
        if isinstance(config.post_grad_custom_post_pass, Interleave) and _awaited(
            scheduler, node1
        ) != _awaited(scheduler, node2):
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)


def _awaited(scheduler: Scheduler, node: BaseSchedulerNode) -> set[str]:
    """The waits for collectives that stand before a kernel."""
    return {name for name in node.ancestors if isinstance(scheduler.name_to_node[name].node, ir._WaitKernel)}
