"""Attention's time, memory and kernels on a GPU, by mask: `python -m benchmarks.attention [heads groups head_dim seq]`.

One sequence in bf16, forward and backward. "torch" is scaled_dot_product_attention with enable_gqa and a mask, left to
choose its kernel; "ours" what the model calls. Times are medians of ten runs, memory the peak above the inputs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from megalith.ops.attention_core import attention, document_mask, window_mask

DOCUMENTS, WINDOW, RUNS = 4, 1024, 10


def torchs(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    if window is not None:
        inside = window_mask(query.shape[1], key.shape[1], window, query.device)
        mask = inside if mask is None else mask & inside
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    out = scaled_dot_product_attention(*heads, mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2)


def ours(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, window: int | None) -> Tensor:
    return attention(query, key, value, mask=mask, window=window)


def measured(work: Callable[[], None]) -> tuple[float, float, list[str]]:
    """Milliseconds, gigabytes, and the kernels that take longest."""
    work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(RUNS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    taken = torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    longest = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)[:3]
    return statistics.median(times), taken / 1e9, [event.key[:60] for event in longest]


def main(heads: int = 32, groups: int = 8, head_dim: int = 128, seq: int = 8192) -> None:
    counts = (heads, groups, groups)
    tensors = [
        torch.randn(1, seq, n, head_dim, device="cuda").to(torch.bfloat16).requires_grad_() for n in counts
    ]
    grad = torch.randn_like(tensors[0])
    mask = document_mask(torch.arange(seq, device="cuda")[None] * DOCUMENTS // seq)
    for name, where in {
        "causal": (None, None),
        f"{DOCUMENTS} documents": (mask, None),
        f"window {WINDOW}": (None, WINDOW),
        "documents and window": (mask, WINDOW),
    }.items():
        for function in (torchs, ours):

            def work(function=function, where=where) -> None:
                torch.autograd.grad(function(*tensors, *where), tensors, grad)

            time, memory, kernels = measured(work)
            print(f"{name:22} {function.__name__:7} {time:8.2f} ms {memory:7.2f} GB  {'; '.join(kernels)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
