"""Tokens per second of the generation engine, compared with transformers' `generate` on a model of the same shape.

    megalith bench generate qwen2.5-1.5b --batch 64 256 512 --room 640 2176 --peer hf
    megalith bench generate tiny --batch 8 --new-tokens 64 --device cpu --peer hf --vocab 32000

Random weights never emit an end token, so lengths are forced: every completion has `--new-tokens` tokens, or with
`--spread` lengths are spread evenly from a quarter of that to all of it. Prints a line of JSON per measurement:
`tokens/s` is over the whole call including prompts, `step_ms` is the time of a decode step. `--trace FILE` writes a
profile of some steps.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

from megalith.bench.timing import synchronize
from megalith.config import ModelConfig
from megalith.config.run import RunConfig
from megalith.generation.engine import Engine
from megalith.generation.requests import Sampling, make_sequences
from megalith.generation.sync import engine_for, sync
from megalith.models.init import initial_value
from megalith.models.transformer import Transformer

SHAPES = {
    "qwen2.5-1.5b": dict(preset="qwen2.5-1.5b"),
    "qwen2.5-7b": dict(preset="qwen2.5-7b"),
    "llama3.2-1b": dict(preset="llama3.2-1b"),
    "tiny": dict(
        num_layers=4, hidden_size=128, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=352, vocab_size=62,
        position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False,
        max_position_embeddings=4096, hidden_dropout=0.0, attention_dropout=0.0,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--batch", type=int, nargs="+", default=[64])
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument(
        "--generations", type=int, default=1, help="completions per prompt; --batch counts completions"
    )
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1, help="number of batches; free rows are refilled")
    parser.add_argument(
        "--spread", action="store_true", help="draw lengths from a quarter of --new-tokens to --new-tokens"
    )
    parser.add_argument("--room", type=int, nargs="*", help="tokens per row (default: prompt + new tokens)")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--peer", choices=["hf"])
    parser.add_argument(
        "--peer-tokens", type=int, default=64, help="new tokens for the peer; fewer, because it is slow"
    )
    parser.add_argument("--trace")
    parser.add_argument(
        "--sync",
        action="store_true",
        help="only measure the transfer of fp32 weights to an engine on the same device",
    )
    args = parser.parse_args()
    shape = dict(SHAPES[args.shape]) | ({"vocab_size": args.vocab} if args.vocab else {})
    config = RunConfig.from_tree({"model": shape}).model
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    if args.sync:
        report(sync_speed(config, dtype, args), shape=args.shape, who="megalith")
        return
    for batch in args.batch:
        for room in args.room or [args.prompt + args.new_tokens]:
            report(
                ours(config, dtype, batch, room, args),
                shape=args.shape,
                batch=batch,
                room=room,
                who="megalith",
            )
        if args.peer:
            report(peer(config, dtype, batch, args), shape=args.shape, batch=batch, who="transformers")


def report(result: dict, **labels) -> None:
    print(json.dumps(labels | result), flush=True)


def ours(config: ModelConfig, dtype: torch.dtype, batch: int, room: int, args: argparse.Namespace) -> dict:
    on_gpu = args.device.startswith("cuda")
    options = dict(compile=False if args.no_compile else None, graphs=False if args.no_graphs else None)
    options |= dict(prefix_reuse=False)  # the measured call has the prompts of the warm-up
    engine = Engine(config, args.device, dtype, max_rows=batch, max_tokens=room, **options)
    fill(engine)
    count = batch * args.rounds
    lengths = [args.new_tokens] * count
    if args.spread:
        lengths = [args.new_tokens * (count + 3 * i) // (4 * count) for i in range(count)]
        lengths = [lengths[i * 7919 % count] for i in range(count)]
    prompts = torch.randint(0, config.vocab_size, (count // args.generations, args.prompt)).tolist()
    start = time.perf_counter()
    warm = Sampling(forced_lengths=[min(9, args.new_tokens)] * count, top_p=args.top_p)
    engine.generate(prompts, warm, num_generations=args.generations)
    first = time.perf_counter() - start
    synchronize(args.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    done = engine.generate(
        prompts, Sampling(forced_lengths=lengths, top_p=args.top_p), num_generations=args.generations
    )
    synchronize(args.device)
    seconds = time.perf_counter() - start
    tokens = sum(len(each.ids) for each in done)
    assert tokens == sum(lengths)
    result = dict(
        tokens_per_second=round(tokens / seconds), seconds=round(seconds, 2), first_call_s=round(first, 1)
    )
    result["step_ms"] = round(step_time(engine, steps=100 if on_gpu else 4), 3)
    result["prefill_s"] = round(prefill_time(engine, prompts, args.generations), 3)
    if on_gpu:
        result["gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    result |= {f"{name}_gb": round(size / 1e9, 2) for name, size in engine.memory().items()}
    if args.trace:
        trace(engine, args.trace)
    return result


def sync_speed(config: ModelConfig, dtype: torch.dtype, args: argparse.Namespace) -> dict:
    model = Transformer(config, device="meta")
    model.to_empty(device=args.device)
    for parameter in model.parameters():
        parameter.data.zero_()
    engine = engine_for(model, max_rows=1, max_tokens=2, dtype=dtype)
    reports = [sync(engine, model) for _ in range(4)]
    return dict(
        gb=round(reports[0].bytes / 1e9, 2), gb_per_second=[round(r.gb_per_second, 1) for r in reports]
    )


@torch.no_grad()
def step_time(engine: Engine, steps: int) -> float:
    """Return the milliseconds per decode step with every row half full, which is the average during a call."""
    sampling = fill_rows_half(engine)
    steps = min(steps, engine.max_tokens // 2)
    synchronize(engine.device)
    start = time.perf_counter()
    for _ in range(steps):
        run_step(engine, sampling)
    synchronize(engine.device)
    return 1e3 * (time.perf_counter() - start) / steps


def fill_rows_half(engine: Engine) -> Sampling:
    """Fill every row to half of its maximum length. Returns the sampling settings of the next steps."""
    sampling = Sampling(forced_lengths=[1])
    engine.reset_state(sampling)
    engine._state[1], engine._state[3], engine._state[5] = engine.max_tokens // 2, engine.max_tokens, 1
    return sampling


def run_step(engine: Engine, sampling: Sampling) -> None:
    if engine._graphed:
        engine._graph(sampling).replay()
    else:
        engine._decode_step(sampling, engine.max_rows, engine.max_tokens)


@torch.no_grad()
def prefill_time(engine: Engine, prompts: list[list[int]], generations: int) -> float:
    """Return the seconds of the prefill of one batch."""
    sampling = Sampling(max_new_tokens=1)
    sequences = make_sequences(prompts, sampling, generations, engine.config, engine.max_tokens)
    synchronize(engine.device)
    start = time.perf_counter()
    engine.prefill(list(enumerate(sequences[: engine.max_rows])))
    synchronize(engine.device)
    return time.perf_counter() - start


@torch.no_grad()
def trace(engine: Engine, path: str) -> None:
    """Write a profile of up to ten steps without CUDA graphs, and print the table of the slowest kernels."""
    from torch.profiler import ProfilerActivity, profile

    sampling = fill_rows_half(engine)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if engine.device.type == "cuda" else [])
    with profile(activities=activities) as seen:
        for _ in range(min(10, engine.max_tokens // 2)):
            run_step(engine, sampling)
        synchronize(engine.device)
    by = "self_cuda_time_total" if engine.device.type == "cuda" else "self_cpu_time_total"
    print(seen.key_averages().table(sort_by=by, row_limit=30), flush=True)
    seen.export_chrome_trace(path)


def fill(engine: Engine) -> None:
    """Fill the engine with random weights of the initial distribution."""
    for name, shard in engine.shards.items():
        if shard.values.ndim > 1:
            shard.values.normal_(0, engine.config.init_method_std)
        else:
            shard.values.copy_(initial_value(name, torch.Size(shard.shape), engine.config, 1))


def peer(config: ModelConfig, dtype: torch.dtype, batch: int, args: argparse.Namespace) -> dict:
    """Measure transformers' `generate` with sampling, with its default cache and kernels."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    kind = Qwen2Config if config.qkv_bias else LlamaConfig
    hf = kind(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.ffn_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.query_groups,
        max_position_embeddings=config.max_position_embeddings,
        tie_word_embeddings=not config.untie_embeddings_and_output_weights,
    )
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(hf, dtype=dtype).eval()
        ids = torch.randint(0, config.vocab_size, (batch, args.prompt))
    count = args.peer_tokens
    options = dict(do_sample=True, top_k=0, pad_token_id=0, attention_mask=torch.ones_like(ids))
    for tokens in (4, count):
        synchronize(args.device)
        start = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        synchronize(args.device)
        seconds = time.perf_counter() - start
    return dict(tokens_per_second=round(batch * count / seconds), seconds=round(seconds, 2), new_tokens=count)


if __name__ == "__main__":
    main()
