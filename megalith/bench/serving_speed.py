"""Tokens per second of `megalith serve`, compared with the engine generating the same completions as one batch.

    megalith bench serve qwen2.5-1.5b --clients 32 256
    megalith bench serve tiny --clients 32 --rows 8 --new-tokens 32 --device cpu --stream

The server has random weights and a tokenizer of made-up tokens. The clients run in another process. Each sends its
requests one after the other; all completions have `--new-tokens` tokens. Prints a line of JSON per number of clients:
`ratio` is the server's tokens per second over the engine's, `first_token_ms` is the median time to a stream's first
token, and `http_us_per_token` and `engine_us_per_token` are the CPU times of the server's process and of the engine's
main thread; `batch_us_per_token` is the CPU time of the batch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Thread

import tokenizers
import torch

from megalith.bench.generation_speed import SHAPES, fill, report
from megalith.bench.timing import synchronize
from megalith.config import ModelConfig
from megalith.config.run import RunConfig
from megalith.data.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizers.tokenizer import TokenizerPaths
from megalith.generation.engine import Engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.requests import Sampling
from megalith.serve.http_process import HttpProcess, ServerSettings
from megalith.serve.openai_service import Access


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--clients", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--requests", type=int, default=2, help="requests per client")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, help="default: the number of clients")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    shape = dict(SHAPES[args.shape]) | ({"vocab_size": args.vocab} if args.vocab else {})
    config = RunConfig.from_tree({"model": shape}).model
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = synthetic_tokenizer(Path(folder), config.vocab_size)
        for clients in args.clients:
            result = measure(config, tokenizer, clients, args)
            report(result, shape=args.shape, clients=clients, stream=args.stream)


def synthetic_tokenizer(folder: Path, entries: int) -> HuggingFaceTokenizer:
    """Return a byte-level tokenizer with this number of entries. It encodes text to single bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: entries - 1]
    words = [*alphabet, *(f"Ġword{number}" for number in range(entries - 1 - len(alphabet))), "<end>"]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: n for n, word in enumerate(words)}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return HuggingFaceTokenizer.from_paths(TokenizerPaths(str(folder), None, None, None))


def measure(
    config: ModelConfig, tokenizer: HuggingFaceTokenizer, clients: int, args: argparse.Namespace
) -> dict:
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    sizes = dict(max_rows=args.rows or clients, max_tokens=args.prompt + args.new_tokens)
    engine = Engine(config, args.device, dtype, **sizes, prefix_reuse=False)
    fill(engine)
    count = clients * args.requests
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, config.vocab_size - 1, (count, args.prompt), generator=generator).tolist()
    warm = Sampling(forced_lengths=[min(9, args.new_tokens)] * count)
    engine.generate(prompts, warm)
    synchronize(args.device)
    tokens = count * args.new_tokens
    start, cpu = time.perf_counter(), time.thread_time()
    engine.generate(prompts, Sampling(forced_lengths=[args.new_tokens] * count))
    synchronize(args.device)
    batch, batch_cpu = tokens / (time.perf_counter() - start), time.thread_time() - cpu
    live = LiveEngine(engine, (tokenizer.eod,), tokenizer.vocab_size)
    live.warm_up()
    settings = ServerSettings("127.0.0.1", 0, "bench", tokenizer, Access(max_requests=count + 1))
    engine_seconds: list[float] = []
    with HttpProcess() as server:
        url = server.start(settings, live)

        def run() -> None:
            server.run(live)
            engine_seconds.append(time.thread_time())

        thread = Thread(target=run)
        thread.start()
        job = {"port": int(url.rpartition(":")[2]), "prompts": prompts, "clients": clients}
        job |= {"new_tokens": args.new_tokens, "stream": args.stream}
        before = processor_seconds(server.pid)
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "job.json"
                path.write_text(json.dumps(job), encoding="utf-8")
                program = "from megalith.bench.serving_speed import run_clients; run_clients({!r})"
                words = [sys.executable, "-c", program.format(str(path))]
                ended = subprocess.run(words, capture_output=True, text=True, check=True)
            http = processor_seconds(server.pid) - before
        finally:
            live.close()
            thread.join()
    seen = json.loads(ended.stdout)
    served = tokens / seen["seconds"]
    return dict(
        tokens_per_second=round(served),
        batch_tokens_per_second=round(batch),
        ratio=round(served / batch, 3),
        first_token_ms=seen["first_token_ms"],
        http_us_per_token=round(http / tokens * 1e6, 1),
        engine_us_per_token=round(engine_seconds[0] / tokens * 1e6, 1),
        batch_us_per_token=round(batch_cpu / tokens * 1e6, 1),
    )


def processor_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far, on Linux; NaN elsewhere."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) returns
    except OSError:
        return math.nan


def run_clients(path: str) -> None:
    """Run the clients of the job in a file, and print their results."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    print(json.dumps(asyncio.run(_run_clients(job))))


async def _run_clients(job: dict) -> dict:
    prompts, first_tokens = list(job["prompts"]), []
    body = {"max_tokens": job["new_tokens"], "ignore_eos": True, "stream": job["stream"]}

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", job["port"], limit=2**24)
        while prompts:
            content = json.dumps({"prompt": prompts.pop(), **body}).encode()
            start = time.perf_counter()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
            )
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if b" 200 " not in head[:20]:
                raise RuntimeError(head.decode())
            if not job["stream"]:
                await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
                continue
            size, is_first = -1, True
            while size:
                size = int(await reader.readuntil(b"\r\n"), 16)
                await reader.readexactly(size + 2)
                if is_first:
                    first_tokens.append(time.perf_counter() - start)
                    is_first = False
        writer.close()

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(job["clients"])))
    seconds = time.perf_counter() - start
    middle = round(statistics.median(first_tokens) * 1000, 1) if first_tokens else None
    return {"seconds": seconds, "first_token_ms": middle}


if __name__ == "__main__":
    main()
