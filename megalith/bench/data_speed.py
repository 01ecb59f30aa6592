"""Tokenization while training: its speed, and the time that a GPU would wait for data.

    megalith bench data [--megabytes 12] [--seconds 20] [--tokens-per-second 10600] [--cores-per-gpu 8]

The text is the standard library corpus, repeated, in eight shards, with a tokenizer trained on it. Two measurements:
- the processor time per token of a stream's lane (read, parse, encode, cut into samples), compared with
  `encode_batch_fast` of the tokenizers library on the same texts in memory, in the same order, each on one core;
- a simulated consumer: it takes batches from the loader of a streamed run at the rate of a GPU (Llama-3-8B on an H100
  by default), scaled from the cores per GPU to the cores of this machine, and adds up the time that it waits.
Worker processes start before the first batch, which is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from statistics import median

from tokenizers import Tokenizer

from megalith.bench.corpus_text import tokenizer_of, write_text
from megalith.data.loader import Loader
from megalith.data.preprocessing.encoding import LIBRARY_THREADS
from megalith.data.streams.lane import Lane, StreamSettings
from megalith.data.streams.stream_shards import list_shards
from megalith.data.streams.text_stream import TextStream
from megalith.errors import DataError

SHARDS = 8
TURNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the simulation")
    parser.add_argument(
        "--tokens-per-second", type=float, default=10600.0, help="tokens per second that one GPU consumes"
    )
    parser.add_argument("--cores-per-gpu", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    os.environ[LIBRARY_THREADS] = "false"  # one core
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = _stream(folder, args.megabytes, args.seq_length)
        texts = [text for shard in settings.shards for text in _texts(shard.source)]
        library, lanes = [_library_speed(folder, texts)], []
        for _ in range(TURNS):
            lanes.append(_lane_speed(settings))
            library.append(_library_speed(folder, texts))
        ratios = [2 * lane / (before + after) for lane, before, after in zip(lanes, library, library[1:])]
        print(
            f"one core: encode_batch_fast {median(library) / 1e6:.3f} M tokens/s, a lane {median(lanes) / 1e6:.3f} M "
            f"tokens/s, ratio {median(ratios):.3f} (medians of {TURNS}, by processor time, to the mean of the runs "
            "before and after)",
            flush=True,
        )
        cores = len(os.sched_getaffinity(0))
        rate = args.tokens_per_second * cores / args.cores_per_gpu
        waited, spent, batches = _consume(settings, args.workers, rate, args.seconds)
        print(
            f"a consumer of {rate:,.0f} tokens/s ({args.tokens_per_second:,.0f} per GPU with {args.cores_per_gpu} "
            f"cores, here {cores}), {args.workers} workers: {batches:,} batches of {args.seq_length:,} tokens in "
            f"{spent:.1f} s, waited {100 * waited / spent:.3f} % of the time"
        )


def _stream(folder: Path, megabytes: int, seq_length: int) -> StreamSettings:
    """Write the text in shards and return the settings of their stream."""
    text, _ = write_text(folder, megabytes)
    lines = text.read_bytes().splitlines(keepends=True)
    (folder / "shards").mkdir()
    for shard in range(SHARDS):
        (folder / "shards" / f"{shard}.jsonl").write_bytes(b"".join(lines[shard::SHARDS]))
    entry = str(folder / "shards")
    return StreamSettings(
        entry=entry,
        shards=list_shards(entry),
        lanes=SHARDS,
        seq_length=seq_length,
        seed=1234,
        tokenizer=tokenizer_of(folder),
        repeat=True,
        shuffle_buffer=1000,
    )


def _texts(path: Path) -> list[str]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def _library_speed(folder: Path, texts: list[str]) -> float:
    """Return the tokens that the library encodes per second of processor time. It discards the encodings."""
    tokenizer, tokens = Tokenizer.from_file(str(folder / "tokenizer.json")), 0
    start = time.process_time()
    for first in range(0, len(texts), 1000):
        encodings = tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
        tokens += sum(map(len, encodings))
    return tokens / (time.process_time() - start)


def _lane_speed(settings: StreamSettings) -> float:
    """Return the tokens per second of CPU time of a lane that reads all shards once."""
    in_order = replace(settings, lanes=1, repeat=False, shuffle_buffer=1)  # the order of the library's texts
    lane, tokens, start = Lane(in_order, 0), 0, time.process_time()
    with suppress(DataError):  # at the end of the stream
        while True:
            tokens += len(lane.next_sample()) - 1
    return tokens / (time.process_time() - start)


def _consume(settings: StreamSettings, workers: int, rate: float, seconds: float) -> tuple[float, float, int]:
    """Take batches of one sample at `rate` tokens/s. Return the seconds waited, the total seconds, and the number of
    batches."""
    stream, waited, batches = TextStream(settings, workers), 0.0, 0
    with Loader(
        stream,
        lambda position: position,
        micro_batch_size=1,
        batch_sizes=itertools.repeat(1),
        vocab_size=settings.tokenizer.vocab_size,
        num_workers=min(1, workers),
    ) as loader:
        for _ in range(settings.lanes):  # opens all lanes
            next(loader)
        start = time.perf_counter()
        end = start + seconds
        while time.perf_counter() < end:
            before = time.perf_counter()
            next(loader)
            waited += time.perf_counter() - before
            batches += 1
            time.sleep(settings.seq_length / rate)  # the GPU's step
        return waited, time.perf_counter() - start, batches


if __name__ == "__main__":
    main()
