"""`megalith plan calibrate`: measures the rates of this machine's device in about three minutes.

Each point is repeated until its time is much longer than its launch, and the median is taken. The data are random: a
GEMM on zeros is faster than in training. With several processes, collectives are measured over all ranks and over the
first two. Without a GPU, small shapes are measured, which only tests that the command works.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalith.compat.torch_operators import scaled_mm
from megalith.hardware import GIGA, TERA, launch_microseconds, local_device_info
from megalith.planner.rates import WIRING, Rates, Wiring
from megalith.planner.topology import NVLINK, PCIE
from megalith.progress import Progress

Bench = Callable[[], object]

# [m, k, n]: GEMMs of layers of several widths (forward, dgrad and wgrad), with few and many tokens.
GEMMS = [
    (8192, 8192, 8192), (32768, 1280, 3840), (32768, 1280, 5120), (32768, 5120, 1280), (32768, 1280, 50304),
    (5120, 32768, 1280), (3840, 32768, 1280), (8192, 4096, 28672), (8192, 14336, 4096), (8192, 4096, 6144),
    (28672, 8192, 4096), (4096, 8192, 14336), (2048, 4096, 28672), (2048, 14336, 4096), (4096, 2048, 4096),
    (8192, 2048, 1536), (8192, 768, 2048), (8192, 8192, 7168), (8192, 8192, 1280), (8192, 3584, 8192),
    (8192, 16384, 13312), (8192, 6656, 16384), (8192, 16384, 2304), (16384, 4096, 4096), (1024, 4096, 4096),
]  # fmt: skip
# Sequences, heads, tokens, head dim.
ATTENTION = [
    (32, 16, 1024, 80), (32, 20, 1024, 64), (16, 16, 1024, 128), (4, 32, 2048, 128), (2, 32, 4096, 128),
    (1, 32, 8192, 128), (1, 8, 8192, 128), (1, 8, 32768, 128), (4, 32, 4096, 64),
]  # fmt: skip
MEGABYTES = (0.25, 2, 16, 84, 256)  # sent per rank
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
CPU_SHRINK = 32  # factor by which each dimension is smaller on a CPU


def calibrate(device: torch.device, seconds: float = 120.0, show_progress: bool = False) -> Rates:
    """Measure this device's rates. Collective over all processes of the job; rank 0's rates are returned.

    Args:
        device: this process's device.
        seconds: approximate duration of the measurement.
        show_progress: draw a progress bar.
    """
    with Progress("calibrate", None, "points", show=show_progress) as progress:
        return _measured(_Bench(device, seconds / (4 * len(GEMMS) + 4 * len(ATTENTION) + 50), progress))


def _measured(bench: _Bench) -> Rates:
    device, kind = bench.device, local_device_info(bench.device)
    matmuls = {"bf16": [[*shape, bench.gemm(*shape)] for shape in bench.small(GEMMS)]}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        matmuls["fp8"] = [[*shape, bench.fp8_gemm(*shape)] for shape in GEMMS]
    attention = [[*shape, *bench.attention(*shape)] for shape in bench.small(ATTENTION)]
    down, adam = bench.host_link(), bench.host_adam()
    return Rates(
        device=kind.name,
        source=f"measured on {kind.name} with torch {torch.__version__}, {date.today()}",
        matmuls=matmuls,
        attention=attention,
        memory=bench.copy(),
        collectives=list(bench.collectives()),
        launch=launch_microseconds(bench.device),
        host_link=down,
        host_adam=adam,
        wiring=_wiring(kind.name, kind.memory_bytes, device),
    )


def _wiring(name: str, memory: int | None, device: torch.device) -> Wiring:
    memory_gb = (memory or 16 * GIGA) / GIGA
    if name in WIRING:
        wiring = WIRING[name]
        return Wiring(memory_gb, wiring.inside, wiring.outside, wiring.link, wiring.processors)
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    )
    return Wiring(memory_gb, 32, 12.5, PCIE, processors)


class _Bench:
    """Measures the rate of each point in about `seconds` seconds."""

    def __init__(self, device: torch.device, seconds: float, progress: Progress):
        self.device, self.seconds, self.progress = device, seconds, progress
        self.cuda = device.type == "cuda"
        torch.manual_seed(1)

    def small(self, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        if self.cuda:
            return shapes
        return [tuple(max(size // CPU_SHRINK, 8) for size in shape) for shape in shapes[:4]]

    def time(self, run: Bench) -> float:
        """Return the median time of one call of `run`, in seconds."""
        run()
        self._wait()
        first = self._seconds_per_run(run, 1)
        count = max(1, min(int(self.seconds / 5 / max(first, 1e-7)), 200))
        median = statistics.median(self._seconds_per_run(run, count) for _ in range(5))
        self.progress.add()
        return median

    def _seconds_per_run(self, run: Bench, count: int) -> float:
        if self.cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3 / count
        began = time.perf_counter()
        for _ in range(count):
            run()
        return (time.perf_counter() - began) / count

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=torch.bfloat16)

    def gemm(self, m: int, k: int, n: int) -> float:
        """Return the TFLOP/s of the product of an [m, k] input and an [n, k] weight."""
        x, weight = self.random(m, k), self.random(n, k)
        return 2 * m * k * n / self.time(lambda: F.linear(x, weight)) / TERA

    def fp8_gemm(self, m: int, k: int, n: int) -> float:
        x, weight = (self.random(*shape).to(torch.float8_e4m3fn) for shape in ((m, k), (n, k)))
        one = torch.ones((), device=self.device)

        def run() -> torch.Tensor:
            return scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        return 2 * m * k * n / self.time(run) / TERA

    def attention(self, sequences: int, heads: int, seq: int, head_dim: int) -> tuple[float, float]:
        """Return the TFLOP/s of causal attention, forward and backward."""
        shape = (sequences, seq, heads, head_dim)
        q, k, v = (self.random(*shape).transpose(1, 2).requires_grad_() for _ in range(3))
        flops = 2 * sequences * heads * seq**2 * head_dim  # causal
        with sdpa_kernel(BACKENDS, set_priority=True) if self.cuda else nullcontext():
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            gradient = torch.randn_like(out)
            with torch.no_grad():
                forward = self.time(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
            backward = self.time(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
        return flops / forward / TERA, 2.5 * flops / backward / TERA

    def copy(self) -> float:
        """Return the GB/s of a copy on the device, counting bytes read plus bytes written."""
        x = self.random(2**28 if self.cuda else 2**20)
        y = torch.empty_like(x)
        return 2 * x.nbytes / self.time(lambda: y.copy_(x)) / GIGA

    def host_link(self) -> float:
        if not self.cuda:
            return 10.0
        x = torch.empty(2**26, dtype=torch.uint8, pin_memory=True)
        y = torch.empty_like(x, device=self.device)
        return x.nbytes / self.time(lambda: y.copy_(x, non_blocking=True)) / GIGA

    def host_adam(self) -> float:
        """Return 10^9 parameters per second of the fused CPU optimizer, with this process's threads."""
        parameter = torch.zeros(2**24 if self.cuda else 2**18, requires_grad=True)
        parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        optimizer.step()
        began = time.perf_counter()
        for _ in range(3):
            optimizer.step()
        return 3 * parameter.numel() / (time.perf_counter() - began) / GIGA

    def collectives(self) -> Iterator[list[Any]]:
        """Yield [kind, link, ranks, MB sent, ms]. Collective over all ranks; ranks outside a group wait."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        sizes = sorted({2, world} - ({1} if world > 1 else {1, 2}))
        link = (
            NVLINK
            if self.cuda and torch.cuda.can_device_access_peer(0, 1 % torch.cuda.device_count())
            else PCIE
        )
        for size in sizes:
            group = dist.new_group(range(size))
            if dist.get_rank() < size:
                for megabytes in MEGABYTES if self.cuda else MEGABYTES[:1]:
                    for kind, run in self._runs(group, size, int(megabytes * 1e6)):
                        # Not `time`: every rank has to make the same number of calls.
                        run()
                        self._wait()
                        dist.barrier(group)
                        count = max(3, min(50, int(2e3 / (megabytes + 10))))
                        taken = statistics.median(self._seconds_per_run(run, count) for _ in range(3))
                        self.progress.add()
                        yield [kind, link, size, megabytes, 1e3 * taken]
            dist.barrier()
        if self.cuda and torch.cuda.device_count() > 1 and world > 1:
            yield from self._copies(link)
            dist.barrier()

    def _runs(self, group: dist.ProcessGroup, size: int, sent: int) -> Iterator[tuple[str, Bench]]:
        """Yield collectives in which each rank sends about `sent` bytes."""
        part = max(sent // 2 // (size - 1), 1)  # bf16
        shard, full = self.random(part), self.random(size * part)
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13's name
        scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        yield "all_gather", lambda: gather(full, shard, group=group)
        yield "all_to_all", lambda: dist.all_to_all_single(torch.empty_like(full), full, group=group)
        if self.cuda:
            yield "reduce_scatter", lambda: scatter(shard, full, group=group)

    def _copies(self, link: str) -> Iterator[list[Any]]:
        """Yield copies from the next GPU by the copy engine, on rank 0 only."""
        if dist.get_rank():
            return
        other = torch.device("cuda", (self.device.index + 1) % torch.cuda.device_count())
        for megabytes in MEGABYTES:
            remote = torch.randn(int(megabytes * 5e5), device=other, dtype=torch.float32).to(torch.bfloat16)
            local = torch.empty_like(remote, device=self.device)
            taken = self.time(lambda target=local, source=remote: target.copy_(source))
            yield ["copy", link, 2, megabytes, 1e3 * taken]
