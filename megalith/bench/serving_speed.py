"""Tokens per second of `megalith serve`, compared with the engine generating the same completions as one batch.

    megalith bench serve qwen2.5-1.5b --clients 32 256
    megalith bench serve tiny --clients 32 --rows 8 --new-tokens 32 --device cpu --stream
    megalith bench serve llama3.2-1b --clients 256 --step-ms 2.9

The server has random weights and a tokenizer of made-up tokens. The clients run in another process. Each sends a short
request that is not measured, then its requests one after the other; all completions have `--new-tokens` tokens. Prints
a line of JSON per number of clients:

- `ratio`: the server's tokens per second over the batch's. `direct_ratio`: the same for requests that are given to the
  live engine directly, all at once.
- `first_token_ms`: the median time to a stream's first token.
- `steps`, `batch_steps`: the number of decode steps. The server needs more if rows wait for requests.
- `http_us_per_token`: CPU time of the server's process. `engine_us_per_token`, `batch_us_per_token`: CPU time of the
  engine's main thread, without the time that it waits for a GPU. `gpu_wait` is the time of these waits as a fraction of
  the total; if it is near 0, the host limits the speed.

With `--step-ms`, a GPU is simulated: a decode step takes this time, a prompt `--prefill-us` per token, and the host's
work is real. This needs no GPU.
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
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
import torch

from megalith.bench.generation_speed import SHAPES, fill, report
from megalith.bench.simulated_engine import SimulatedEngine
from megalith.bench.timing import synchronize
from megalith.config import ModelConfig
from megalith.config.run import RunConfig
from megalith.data.tokenizers.huggingface import HuggingFaceTokenizer
from megalith.data.tokenizers.tokenizer import TokenizerPaths
from megalith.generation.engine import Engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.requests import Sampling, make_sequences
from megalith.generation.running_batch import RunningBatch
from megalith.serve.http_process import HttpProcess, ServerSettings
from megalith.serve.openai_service import Access

JOB, WARM, BEGIN = "job.json", "warm", "begin"  # files in the clients' folder
POLL = 0.01  # seconds between looks for a file


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
    parser.add_argument(
        "--window", type=int, help="decode steps per launch; default: the engine's, 8 on a GPU"
    )
    parser.add_argument("--vocab", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="simulate a GPU with this time per step")
    parser.add_argument("--prefill-us", type=float, default=5.0, metavar="US", help="per token of a prompt")
    args = parser.parse_args()
    if args.step_ms is not None:
        args.device = "cpu"
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


@dataclass(frozen=True)
class _Usage:
    """Time and decode steps that an engine has used: between two moments, or since it was created."""

    seconds: float
    cpu: float  # seconds of the engine's main thread
    waits: float  # seconds that it waited for a GPU
    steps: int

    @classmethod
    def now(cls, engine: Engine | SimulatedEngine) -> _Usage:
        """Return the wall time, the main thread's CPU time, the engine's waiting time and its number of decode steps,
        all up to now. Any thread may call this method. The CPU time is NaN on macOS.
        """
        cpu = math.nan
        if hasattr(time, "pthread_getcpuclockid"):
            cpu = time.clock_gettime(time.pthread_getcpuclockid(threading.main_thread().ident))
        return cls(time.perf_counter(), cpu, engine.wait_seconds, engine.decode_steps)

    def since(self, before: _Usage) -> _Usage:
        return _Usage(
            self.seconds - before.seconds,
            self.cpu - before.cpu,
            self.waits - before.waits,
            self.steps - before.steps,
        )

    def microseconds(self, tokens: int, spins: bool) -> float:
        """Return the CPU time per token without waits. With `spins`, a waiting thread uses CPU time."""
        return round((self.cpu - spins * self.waits) / tokens * 1e6, 1)


def measure(
    config: ModelConfig, tokenizer: HuggingFaceTokenizer, clients: int, args: argparse.Namespace
) -> dict:
    engine = _engine(config, args.rows or clients, args)
    engine.window = args.window or engine.window
    count = clients * args.requests
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, config.vocab_size - 1, (count, args.prompt), generator=generator).tolist()
    tokens, spins = count * args.new_tokens, args.device.startswith("cuda")
    _generate(engine, prompts, min(9, args.new_tokens))
    batch = _used(engine, lambda: _generate(engine, prompts, args.new_tokens), args.device)
    live = LiveEngine(engine, (tokenizer.eod,), tokenizer.vocab_size)
    live.warm_up()
    direct = _used(engine, lambda: _run_directly(engine, prompts, args.new_tokens), args.device)
    settings = ServerSettings("127.0.0.1", 0, "bench", tokenizer, Access(max_requests=count + 1))
    with HttpProcess() as server:
        url = server.start(settings, live)
        job = {"port": int(url.rpartition(":")[2]), "prompts": prompts, "clients": clients}
        job |= {"new_tokens": args.new_tokens, "stream": args.stream}
        meter = _Clients(job, live, server.pid)
        meter.start()
        try:
            server.run(live)  # in the main thread, as `megalith serve` does
        finally:
            live.close()
            meter.join()
    served, seconds = meter.usage, meter.result["seconds"]
    return dict(
        tokens_per_second=round(tokens / seconds),
        batch_tokens_per_second=round(tokens / batch.seconds),
        ratio=round(batch.seconds / seconds, 3),
        direct_ratio=round(batch.seconds / direct.seconds, 3),
        first_token_ms=meter.result["first_token_ms"],
        steps=served.steps,
        batch_steps=batch.steps,
        gpu_wait=round(served.waits / served.seconds, 3),
        http_us_per_token=round(meter.http_seconds / tokens * 1e6, 1),
        engine_us_per_token=served.microseconds(tokens, spins),
        direct_us_per_token=direct.microseconds(tokens, spins),
        batch_us_per_token=batch.microseconds(tokens, spins),
    )


def _engine(config: ModelConfig, rows: int, args: argparse.Namespace) -> Engine | SimulatedEngine:
    sizes = dict(max_rows=rows, max_tokens=args.prompt + args.new_tokens)
    if args.step_ms is not None:
        seconds = dict(step_seconds=args.step_ms / 1e3, prefill_seconds=args.prefill_us / 1e6)
        return SimulatedEngine(config, **sizes, **seconds)
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    engine = Engine(config, args.device, dtype, **sizes, prefix_reuse=False)
    fill(engine)
    return engine


def _generate(engine: Engine | SimulatedEngine, prompts: list[list[int]], new_tokens: int) -> None:
    """Generate completions of all prompts as one batch, as Engine.generate does."""
    sampling = Sampling(forced_lengths=[new_tokens] * len(prompts))
    batch = RunningBatch(engine, sampling)
    batch.add(make_sequences(prompts, sampling, 1, engine.config, engine.max_tokens))
    while batch.is_busy:
        batch.step()


def _run_directly(engine: Engine | SimulatedEngine, prompts: list[list[int]], new_tokens: int) -> None:
    """Run requests for completions of all prompts by a live engine, without a server."""
    live, ended = LiveEngine(engine), []

    def on_tokens(ids: list[int], logprobs: list[float], reason: str | None) -> None:
        ended.append(reason)
        if len(ended) == len(prompts):
            live.close()

    for prompt in prompts:
        request = LiveRequest(prompt, new_tokens, ignores_stop=True, reports_once=True)
        live.submit([request], [on_tokens])
    live.run()


def _used(engine: Engine | SimulatedEngine, run: Callable[[], None], device: str) -> _Usage:
    synchronize(device)
    before = _Usage.now(engine)
    run()
    synchronize(device)
    return _Usage.now(engine).since(before)


class _Clients(threading.Thread):
    """Thread that runs the process of the clients, measures it, and closes the engine."""

    def __init__(self, job: dict, live: LiveEngine, pid: int):
        """Take the clients' job, the engine of the server, and the process id of the server."""
        super().__init__()
        self._job, self._live, self._pid = job, live, pid
        self.result: dict = {}
        self.usage: _Usage | None = None
        self.http_seconds = math.nan

    def run(self) -> None:
        program = "from megalith.bench.serving_speed import run_clients; run_clients({!r})"
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / JOB
                path.write_text(json.dumps(self._job), encoding="utf-8")
                words = [sys.executable, "-c", program.format(str(path))]
                pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                with subprocess.Popen(words, **pipes) as process:
                    while not path.with_name(WARM).exists() and process.poll() is None:
                        time.sleep(POLL)
                    before, http = _Usage.now(self._live.engine), processor_seconds(self._pid)
                    path.with_name(BEGIN).touch()
                    output, errors = process.communicate()
                if process.returncode:
                    raise RuntimeError(errors)
                self.result = json.loads(output)
            self.usage = _Usage.now(self._live.engine).since(before)
            self.http_seconds = processor_seconds(self._pid) - http
        finally:
            self._live.close()


def processor_seconds(pid: int) -> float:
    """Return the CPU time that a process has used so far, on Linux; NaN elsewhere."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # the clock that clock_getcpuclockid(3) returns
    except OSError:
        return math.nan


def run_clients(path: str) -> None:
    """Run the clients of the job in a file, and print their results.

    They create the file WARM when they are warm, and wait for the file BEGIN.
    """
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    print(json.dumps(asyncio.run(_run_clients(job, Path(path)))))


async def _run_clients(job: dict, path: Path) -> dict:
    prompts, first_tokens = list(job["prompts"]), []
    warm, may_begin = [0], asyncio.Event()

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", job["port"], limit=2**24)
        await _complete(reader, writer, prompts[0], 2, job["stream"])
        warm[0] += 1
        await may_begin.wait()
        while prompts:
            start = time.perf_counter()
            first = await _complete(reader, writer, prompts.pop(), job["new_tokens"], job["stream"])
            if first is not None:
                first_tokens.append(first - start)
        writer.close()

    tasks = [asyncio.ensure_future(client()) for _ in range(job["clients"])]
    while warm[0] < len(tasks) and not any(task.done() for task in tasks):
        await asyncio.sleep(POLL)
    path.with_name(WARM).touch()
    while not path.with_name(BEGIN).exists():
        await asyncio.sleep(POLL)
    start = time.perf_counter()
    may_begin.set()
    await asyncio.gather(*tasks)
    seconds = time.perf_counter() - start
    middle = round(statistics.median(first_tokens) * 1000, 1) if first_tokens else None
    return {"seconds": seconds, "first_token_ms": middle}


async def _complete(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    prompt: list[int],
    new_tokens: int,
    stream: bool,
) -> float | None:
    """Send a request and read the response. Returns the time of a stream's first chunk."""
    body = {"prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, "stream": stream}
    content = json.dumps(body).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(content), content)
    )
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200 " not in head[:20]:
        raise RuntimeError(head.decode())
    if not stream:
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        return None
    size, first = -1, None
    while size:
        size = int(await reader.readuntil(b"\r\n"), 16)
        await reader.readexactly(size + 2)
        first = first or time.perf_counter()
    return first


if __name__ == "__main__":
    main()
