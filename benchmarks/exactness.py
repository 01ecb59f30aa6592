"""Times of batch-invariant operators and of PyTorch's: `python -m benchmarks.exactness --device cuda`.

Measures the forward pass of a linear layer, of attention and of recurrences in a prefill and in a decode step, of
RMSNorm and of the softmax statistics of the output matrix, with the sizes of Llama-3.2-1B by default. Prints the
medians in milliseconds, and whether a row has the same bits alone and among others. `megalith bench WORKLOAD --set
train.batch_invariant=true` measures whole steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from megalith.generation.exact_cache import ExactDecode
from megalith.generation.static_cache import LayerState
from megalith.ops import attention_core, cached_attention, delta_rule, fused_norm, state_space
from megalith.ops.batch_invariant import invariant_attention, norms, recurrences
from megalith.ops.batch_invariant.matmul import PARTS, matmul, sum_of_parts
from megalith.ops.batch_invariant.token_logprobs import statistics as batch_invariant_statistics
from megalith.ops.chunks import CHUNK
from megalith.ops.vocab_softmax import ORDINARY

Case = tuple[str, Callable[[int], Tensor], Callable[[int], Tensor], int]
"""Name, the ordinary and the batch-invariant operator of the first n rows, and the number of all rows."""


def cases(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the operators with their inputs."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    heads, groups, size, rows = args.heads, args.groups, args.head_dim, args.rows
    hidden = heads * size
    x, weight, gain = random(args.tokens, hidden), random(4 * hidden, hidden), random(hidden).float()
    for tokens in (args.tokens, args.rows):
        yield (
            f"linear, {tokens} tokens",
            lambda n: F.linear(x[:n], weight),
            lambda n: matmul(x[:n], weight),
            tokens,
        )
    wide, narrowing = random(args.tokens, 4 * hidden), random(hidden, 4 * hidden)
    for tokens in (args.tokens, args.rows):
        yield (
            f"row-parallel linear, {tokens} tokens",
            lambda n: F.linear(wide[:n], narrowing),
            lambda n: sum_of_parts(wide[:n], narrowing, PARTS, dtype),
            tokens,
        )
    yield (
        "RMSNorm",
        lambda n: fused_norm.norm(x[:n], gain, None, 1e-5, False),
        lambda n: norms.norm(x[:n], gain, None, 1e-5, False),
        args.tokens,
    )
    query, key, value = (random(rows, args.context, n, size) for n in (heads, groups, groups))
    yield (
        "attention, prefill",
        lambda n: attention_core.attention(query[:n], key[:n], value[:n]),
        lambda n: invariant_attention.attention(query[:n], key[:n], value[:n]),
        rows,
    )
    positions = torch.randint(args.context, (rows,), device=device)
    cache = torch.stack([key, value])
    how = dict(window=None, softcap=None, scale=None)

    def decode(function: Callable[..., Tensor], n: int) -> Tensor:
        new = (each[:n, :1] for each in (query, key, value))
        seen = cached_attention.visible_positions(positions[:n], args.context)
        return function(*new, cache[:, :n], positions[:n], seen, **how)

    yield (
        "attention, decode",
        lambda n: decode(cached_attention.cached_attention, n),
        lambda n: decode(invariant_attention.cached_attention, n),
        rows,
    )
    logits, targets = (
        random(args.rows, args.vocab),
        torch.zeros(args.rows, 1, dtype=torch.int64, device=device),
    )
    yield (
        "softmax statistics",
        lambda n: ORDINARY.statistics(logits[:n], targets[:n], targets[:n] == 0, 1.0, False)[0],
        lambda n: batch_invariant_statistics(logits[:n], targets[:n], targets[:n] == 0, 1.0, False)[0],
        args.rows,
    )


def recurrence_cases(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    """Yield the recurrences of Qwen3-Next and of Mamba-2 with their inputs."""
    rows, heads, size = args.rows, args.heads, args.state_dim

    def random(heads: int, size: int, of_dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(rows, args.context, heads, size, device=device, dtype=of_dtype)

    step = random(heads, 1, torch.float32)[..., 0].sigmoid()
    delta = [random(heads // 2, size), random(heads // 2, size), random(heads, size), -step, step.to(dtype)]
    mamba = [random(heads, args.head_dim), step, -step, random(1, size), random(1, size)]
    skip = [torch.ones(heads, device=device)]
    kinds = (
        ("gated delta rule", delta_rule, delta, [], size, recurrences.delta_rule_of_documents),
        ("state space model", state_space, mamba, skip, args.head_dim, recurrences.state_space_of_documents),
    )
    for name, module, inputs, constants, width, exact in kinds:
        yield (
            f"{name}, prefill",
            lambda n, inputs=inputs, constants=constants, module=module: module.with_last_state(
                *(x[:n] for x in inputs), *constants
            )[0],
            lambda n, inputs=inputs, constants=constants, exact=exact: exact(
                *(x[:n] for x in inputs), *constants, None
            ),
            rows,
        )
        state = torch.zeros(rows, heads, size, width, device=device)
        chunk = torch.zeros(rows, CHUNK, sum(x[0, 0].numel() for x in inputs), device=device)
        position = torch.full((rows,), CHUNK // 2, device=device)

        def decode(
            n: int, inputs=inputs, constants=constants, name=name, state=state, chunk=chunk, position=position
        ) -> Tensor:
            layer = LayerState(state[:n, :0], state[:n], chunk[:n])
            cache = ExactDecode(None, [], [(position[:n], None)], layer)
            method = cache.delta_rule if "delta" in name else cache.state_space
            return method(*(x[:n, :1] for x in inputs), *constants)

        yield (
            f"{name}, decode",
            lambda n, inputs=inputs, constants=constants, module=module, state=state: module.next_token(
                state[:n], *(x[:n, :1] for x in inputs), *constants
            )[0],
            decode,
            rows,
        )


def milliseconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of a call, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of a training pass")
    parser.add_argument("--rows", type=int, default=64, help="sequences of a decode step and of a prefill")
    parser.add_argument("--context", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--state-dim", type=int, default=128, help="of recurrences")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--operators", default="", help="measure the operators whose name contains this")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), {"fp32": torch.float32, "bf16": torch.bfloat16}[args.precision]
    print(
        "| operator | PyTorch, ms | batch invariant, ms | ratio | same bits alone, PyTorch | batch invariant |"
    )
    print("|---|---:|---:|---:|---|---|")
    for name, ordinary, invariant, count in chain(
        cases(args, device, dtype), recurrence_cases(args, device, dtype)
    ):
        if args.operators not in name:
            continue
        times = [milliseconds(lambda f=f, n=count: f(n), device, args.repeats) for f in (ordinary, invariant)]
        same = ["yes" if torch.equal(f(1)[:1], f(count)[:1]) else "no" for f in (ordinary, invariant)]
        print(
            f"| {name} | {times[0]:.3f} | {times[1]:.3f} | {times[1] / times[0]:.2f} | {same[0]} | {same[1]} |"
        )


if __name__ == "__main__":
    main()
