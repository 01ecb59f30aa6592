"""Time, memory and kernels of attention on a GPU by mask: `megalith bench attention [HEADS GROUPS HEAD_DIM SEQ]`.

The input is one sequence in bf16; forward and backward pass are timed. "ours" is the model's attention, compiled for
soft caps and ALiBi; "dense" is the same with a [seq, seq] mask, for which torch uses its memory-efficient kernel;
"torch" is scaled_dot_product_attention with enable_gqa and that mask, free to choose its kernel. Times are medians of
ten runs, as multiples of the causal kernel's time. Memory is the peak above the inputs. The printed limits of time and
memory apply to "ours".
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

from megalith.bench.timing import elapsed_ms
from megalith.ops.attention_core import attention
from megalith.ops.documents import document_ids, same_document_mask, window_mask

RUNS, WARM_UP = 10, 3
DOCUMENTS, WINDOW, MEMORY, SOFTCAP = 8, 512, 1.0, 50.0
TARGETS = {f"{DOCUMENTS} documents": 1.2, f"window {WINDOW}": 0.6}  # × the causal kernel's time


def dense(ends: Tensor | None, window: int | None, seq: int) -> Tensor | None:
    """Return the mask of documents and window, bool [1, 1, seq, seq], or None if there are neither."""
    mask = None if window is None else window_mask(seq, seq, window, torch.device("cuda"))
    if ends is not None:
        ids = document_ids(ends, seq)
        document_mask = same_document_mask(ids, ids, causal=True)
        mask = document_mask if mask is None else mask & document_mask
    return mask


def torch_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    out = scaled_dot_product_attention(*heads, mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2)


def measure(work: Callable[[], None]) -> tuple[float, float, list[str]]:
    """Return the milliseconds per call, the peak memory in gigabytes, and the names of the three slowest kernels."""
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = [elapsed_ms(work) for _ in range(RUNS)]
    memory = torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    longest = sorted(recorded.key_averages(), key=lambda event: -event.self_device_time_total)[:3]
    return statistics.median(times), memory / 1e9, [event.key[:60] for event in longest]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes = {"heads": 32, "groups": 8, "head_dim": 128, "seq": 8192}
    for name, size in sizes.items():
        parser.add_argument(name, type=int, nargs="?", default=size, help="default: %(default)s")
    args = parser.parse_args()
    heads, groups, head_dim, seq = (getattr(args, name) for name in sizes)
    counts = (heads, groups, groups)
    tensors = [
        torch.randn(1, seq, n, head_dim, device="cuda").to(torch.bfloat16).requires_grad_() for n in counts
    ]
    grad = torch.randn_like(tensors[0])
    lengths = torch.arange(1, DOCUMENTS + 1, device="cuda") * seq // DOCUMENTS
    eight = lengths.int()[None]
    ragged = torch.tensor(
        [[seq // 2, seq // 2 + 1, seq // 2 + 300, seq * 3 // 4, seq]], dtype=torch.int32, device="cuda"
    )
    many = (torch.arange(1, 65, device="cuda") * seq // 64).int()[None]
    causal, capped = None, {"softcap": SOFTCAP}
    for name, (ends, window, scores) in {
        "causal": (None, None, {}),
        f"{DOCUMENTS} documents": (eight, None, {}),
        "5 of many lengths": (ragged, None, {}),
        "64 documents": (many, None, {}),
        f"window {WINDOW}": (None, WINDOW, {}),
        "documents and window": (eight, WINDOW, {}),
        "soft-capped": (None, None, capped),
        "… documents": (eight, None, capped),
        "… window": (None, WINDOW, capped),
        "ALiBi": (None, None, {"alibi": heads}),
    }.items():
        mask = None if scores else dense(ends, window, seq)
        functions = {"ours": lambda *x: attention(*x, documents=ends, window=window, **scores)}  # noqa: B023
        if scores:
            torch.compiler.reset()
            functions["ours"] = torch.compile(functions["ours"], fullgraph=True)
        if mask is not None:
            functions["dense"] = lambda *x: attention(*x, mask=mask)  # noqa: B023
            functions["torch"] = lambda *x: torch_attention(*x, mask)  # noqa: B023
        for implementation, function in functions.items():

            def work(function=function) -> None:
                torch.autograd.grad(function(*tensors), tensors, grad)

            time, memory, kernels = measure(work)
            causal = causal or time
            line = f"{name:22} {implementation:6} {time:8.2f} ms {time / causal:6.2f} × {memory:7.2f} GB"
            if implementation == "ours" and name in TARGETS:
                passed = time <= TARGETS[name] * causal and memory <= MEMORY
                line += f"  target {TARGETS[name]} × and {MEMORY} GB {'met' if passed else 'MISSED'}"
            print(f"{line}  {'; '.join(kernels)}")


if __name__ == "__main__":
    main()
