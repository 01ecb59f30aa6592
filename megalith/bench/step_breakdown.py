"""Breakdown of a step's time on a GPU: `python -m megalith.bench.step_breakdown OUTPUT/profile/trace.json`.

Reads the trace that `log.profile` writes and divides its first step, from the first kernel to the last kernel of the
optimizer. Each moment counts for the compute kernel that runs then; otherwise for the collective in progress (exposed);
otherwise as idle. The parts therefore add up to the step.

A kernel is classified by its name, or by the host operators that launched it; autograd functions keep their names in
the backward pass. A kernel of a compiled graph that its name does not identify is counted with the graph's identifiable
kernels: projections and norms with the attention, a softmax with its router.
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

# Patterns of the names of kernels, or of operators around their launch. The first match counts.
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
# Patterns of the kernel names of a graph, for its kernels that match nothing above.
GRAPHS = (
    (ATTENTION, r"_fprop_|_bprop_|fmha|flash"),
    (ROUTER, r"gemm_f32f32_f32|sgemm"),
    (SHARED, r"(?s)(silu|gelu).*(nvjet|gemm)|(nvjet|gemm).*(silu|gelu)"),
    (EXPERTS, r"silu|gelu|relu"),
)
GRAPH = "## Call CompiledFxGraph"


@dataclass
class Kernel:
    """A kernel with its times in µs and the names of the operators around its launch, outermost first."""

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
    """Return a table of the step's kernel categories, largest first, in ms and percent; "" without kernels."""
    parts = step_parts(kernels_of(trace), trace)
    total = sum(parts.values())
    rows = sorted(parts.items(), key=lambda item: -item[1])
    return "\n".join(f"{time / 1e3:9.2f} ms {time / total:6.1%}  {name}" for name, time in rows)


def kernels_of(trace: list[Event]) -> list[Kernel]:
    """Return all kernels, including copies, sorted by start."""
    around = dict(_launches(trace))
    kernels = []
    for event in trace:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event:
            launched, names = around.get(event["args"]["correlation"], (event["ts"], ()))
            kernels.append(Kernel(event["name"], event["ts"], event["ts"] + event["dur"], names, launched))
    return sorted(kernels, key=lambda kernel: kernel.start)


def step_parts(kernels: list[Kernel], trace: list[Event]) -> dict[str, float]:
    """Return the microseconds of each kernel category in the first step."""
    steps = [e["ts"] for e in trace if e.get("cat") == "user_annotation" and e["name"].startswith("step ")]
    kernels = [kernel for kernel in kernels if kernel.launched >= min(steps, default=0.0)]
    stepping = [kernel.end for kernel in kernels if _matches(KINDS[:1], kernel)]
    end = max(stepping, default=max((kernel.end for kernel in kernels), default=0.0))
    graphs: dict[str, set[str]] = defaultdict(set)
    for kernel in kernels:
        if kernel.graph:
            graphs[kernel.graph].add(kernel.name)
    graph_kinds = {graph: _first(GRAPHS, ["\n".join(sorted(names))]) for graph, names in graphs.items()}
    computing, communicating = [], []
    for kernel in kernels:
        if kernel.end > end:
            continue
        if kind := _first(COLLECTIVES, [kernel.name]):
            communicating.append((kernel.start, kernel.end, kind))
        else:
            kind = _matches(KINDS, kernel) or graph_kinds.get(kernel.graph) or OTHER
            computing.append((kernel.start, kernel.end, kind))
    parts: dict[str, float] = defaultdict(float)
    for begin, until, kind in _split_time(computing, communicating):
        parts[kind] += until - begin
    return dict(parts)


def _matches(kinds: Iterable[tuple[str, str]], kernel: Kernel) -> str | None:
    return _first(kinds, [kernel.name, *kernel.around])


def _first(kinds: Iterable[tuple[str, str]], names: list[str]) -> str | None:
    return next((kind for kind, pattern in kinds if any(re.search(pattern, n) for n in names)), None)


def _split_time(
    computing: list[tuple[float, float, str]], communicating: list[tuple[float, float, str]]
) -> Iterator[tuple[float, float, str]]:
    """Yield consecutive spans (start, end, kind). Both lists must be sorted by start.

    Time in which a compute kernel runs gets the kernel's kind. The rest gets the kind of the communication kernel that
    runs then, or IDLE.
    """
    now = min((span[0] for span in computing + communicating), default=0.0)
    for start, end, kind in [*computing, (float("inf"), float("inf"), IDLE)]:
        for begin, until, other in communicating:  # exposed before this kernel
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
    """Yield the correlation id of each launch, its time on the host, and the operators around it."""
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
