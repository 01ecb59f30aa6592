"""Where the time of a GPU's step goes: `python -m megalith.bench.step_breakdown OUTPUT/profile/trace.json`.

Reads the trace that `log.profile` writes and shares out its first step, from its first kernel to the optimizer's
last. A moment belongs to the kernel that computes then. Where none does, it belongs to the collective under way
(exposed), and where there is none either, it is idle. So the shares add up to the step.

A kernel is known by its own name, or by the operators on the host that launched it: autograd's functions carry their
names into the backward pass. Kernels of a compiled graph that say nothing themselves are counted where the telling ones
of the same graph are: projections and norms with the attention, a softmax with its router.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Event = dict[str, Any]

EXCHANGE, GATHERED = "exchange of rows, exposed", "gradients and weights between ranks, exposed"
ATTENTION, SHARED, EXPERTS = "attention with its projections", "MLPs and shared expert", "experts"
DISPATCH, ROUTER, OTHER, IDLE = "dispatch: rows sorted, taken, summed", "router", "other", "idle"

# Of a kernel or an operator around its launch; the first that matches counts.
COLLECTIVES = ((EXCHANGE, r"SendRecv"), (GATHERED, r"^nccl"))
KINDS = (
    ("optimizer and norm of the gradient", r"^_adamw|Optimizer\.step|lpnorm|LpNorm|_foreach_norm"),
    ("head and loss", r"_LinearCrossEntropy|_softmax_loss"),
    ("copies of sharded data parallelism", r"^FSDP::|^fsdp::"),
    ("gradients added up", r"AccumulateGrad"),
    (EXPERTS, r"^_GroupedLinear|^_Prepare|^_WeightedSwiglu|autograd::engine::evaluate_function: _Prepare"),
    (DISPATCH, r"^_(TakeRows|SumRows|Spread|GatheredRows|Pack|Unpack|BeginAllToAll|EndAllToAll)|radix_sort"),
    (DISPATCH, r"_c10d_functional::all_to_all"),
    (DISPATCH, r"^triton.*(index_sum|floor_divide|index_select|arange|repeat_interleave|stack_view)"),
    (ATTENTION, r"_fprop_|_bprop_|fmha|flash|fusion::compute_dot"),
)
# Of any kernel of a graph, for those of it that match nothing above.
GRAPHS = (
    (ATTENTION, r"_fprop_|_bprop_|fmha|flash"),
    (ROUTER, r"gemm_f32f32_f32|sgemm"),
    (SHARED, r"(?s)(silu|gelu).*(nvjet|gemm)|(nvjet|gemm).*(silu|gelu)"),
    (EXPERTS, r"silu|gelu|relu"),
)
GRAPH = "## Call CompiledFxGraph"


@dataclass
class Kernel:
    """A kernel, its times in µs, and the names of the operators around its launch, the outermost first."""

    name: str
    start: float
    end: float
    around: tuple[str, ...]
    launched: float

    @property
    def graph(self) -> str | None:
        return next((name for name in self.around if name.startswith(GRAPH)), None)


def main() -> None:
    for path in sys.argv[1:]:
        print(table(read_trace(Path(path))))


def read_trace(path: Path) -> list[Event]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return json.loads(text)["traceEvents"]


def table(trace: list[Event]) -> str:
    """A line for each part of the step, the largest first, in ms and as a share; "" where there is no kernel."""
    parts = step_parts(kernels_of(trace), trace)
    total = sum(parts.values())
    rows = sorted(parts.items(), key=lambda item: -item[1])
    return "\n".join(f"{time / 1e3:9.2f} ms {time / total:6.1%}  {name}" for name, time in rows)


def kernels_of(trace: list[Event]) -> list[Kernel]:
    """All kernels, copies included, by their start."""
    around = dict(_launches(trace))
    kernels = []
    for event in trace:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event:
            launched, names = around.get(event["args"]["correlation"], (event["ts"], ()))
            kernels.append(Kernel(event["name"], event["ts"], event["ts"] + event["dur"], names, launched))
    return sorted(kernels, key=lambda kernel: kernel.start)


def step_parts(kernels: list[Kernel], trace: list[Event]) -> dict[str, float]:
    """The time of each part of the first step, µs."""
    steps = [e["ts"] for e in trace if e.get("cat") == "user_annotation" and e["name"].startswith("step ")]
    kernels = [kernel for kernel in kernels if kernel.launched >= min(steps, default=0.0)]
    stepping = [kernel.end for kernel in kernels if _matches(KINDS[:1], kernel)]
    end = max(stepping, default=max((kernel.end for kernel in kernels), default=0.0))
    graphs: dict[str, set[str]] = defaultdict(set)
    for kernel in kernels:
        if kernel.graph:
            graphs[kernel.graph].add(kernel.name)
    told = {graph: _first(GRAPHS, ["\n".join(sorted(names))]) for graph, names in graphs.items()}
    computing, travelling = [], []
    for kernel in kernels:
        if kernel.end > end:
            continue
        if kind := _first(COLLECTIVES, [kernel.name]):
            travelling.append((kernel.start, kernel.end, kind))
        else:
            kind = _matches(KINDS, kernel) or told.get(kernel.graph) or OTHER
            computing.append((kernel.start, kernel.end, kind))
    parts: dict[str, float] = defaultdict(float)
    for begin, until, kind in _shared_out(computing, travelling):
        parts[kind] += until - begin
    return dict(parts)


def _matches(kinds: Iterable[tuple[str, str]], kernel: Kernel) -> str | None:
    return _first(kinds, [kernel.name, *kernel.around])


def _first(kinds: Iterable[tuple[str, str]], names: list[str]) -> str | None:
    return next((kind for kind, pattern in kinds if any(re.search(pattern, n) for n in names)), None)


def _shared_out(
    computing: list[tuple[float, float, str]], travelling: list[tuple[float, float, str]]
) -> Iterator[tuple[float, float, str]]:
    """Consecutive spans of time, each of one kind; both lists are sorted by start."""
    now = min((span[0] for span in computing + travelling), default=0.0)
    for start, end, kind in [*computing, (float("inf"), float("inf"), IDLE)]:
        for begin, until, other in travelling:  # what is exposed before this kernel
            if until > now and begin < start:
                if begin > now:
                    yield now, begin, IDLE
                    now = begin
                yield now, min(until, start), other
                now = min(until, start)
        if start == float("inf"):
            return
        if start > now:
            yield now, start, IDLE
        if end > now:
            yield max(now, start), end, kind
            now = end


def _launches(trace: list[Event]) -> Iterator[tuple[int, tuple[float, tuple[str, ...]]]]:
    """For each launch its correlation, its time on the host, and the operators around it."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    for event in trace:
        if event.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            threads[event["tid"]].append(event)
    for events in threads.values():
        events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
        stack: list[tuple[float, str]] = []
        for event in events:
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            if event["cat"] in ("cpu_op", "user_annotation"):
                stack.append((event["ts"] + event.get("dur", 0.0), event["name"]))
            elif "correlation" in event["args"]:
                yield event["args"]["correlation"], (event["ts"], tuple(name for _, name in stack))


if __name__ == "__main__":
    main()
