"""Preprocessing speed compared with the tokenizers library's batch encoding.

    megalith bench preprocess [--megabytes 48] [--repeats 7] [--workers N]

The text is the standard library corpus, repeated, with a tokenizer trained on it. Three programs take turns, each in a
process of its own, with the same text, tokenizer and cores:
- the library's `encode_batch_fast` on texts in memory, with a thread per worker, discarding the encodings;
- `preprocess`: start the workers, read, parse, encode, and write the dataset;
- Megatron-LM's way: a pool of processes that encode one document at a time, in chunks of 25, and a single writer.
Loading the tokenizer is not counted. Ratios are medians over the turns, of wall-clock time, which needs an idle
machine, and of processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from megalith.bench.corpus_text import tokenizer_of, write_text
from megalith.data.indexed import IndexedWriter
from megalith.data.preprocessing.preprocess import preprocess


class Seconds(NamedTuple):
    clock: float
    processor: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", choices=ALONE, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        print(json.dumps(ALONE[args.only](args.folder, args.workers)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, size = write_text(folder, args.megabytes)
        tokens = preprocess([text], folder / "count", tokenizer_of(folder), show_progress=False).tokens
        clock, processor, one_at_a_time = [], [], []
        for turn in range(1, args.repeats + 1):
            library = run_alone("library", folder, args.workers)
            ours = run_alone("preprocess", folder, args.workers)
            clock.append(library.clock / ours.clock)
            processor.append(library.processor / ours.processor)
            megatron = run_alone("document", folder, args.workers)
            one_at_a_time.append(megatron.clock / ours.clock)
            print(
                f"turn {turn}: encode_batch_fast {rates(size, tokens, library)}; "
                f"preprocess {rates(size, tokens, ours)}; ratio {clock[-1]:.3f} ({processor[-1]:.3f}); "
                f"a document at a time {rates(size, tokens, megatron)}",
                flush=True,
            )
        print(
            f"{size / 1e6:.0f} MB of text, {tokens:,} tokens, {args.workers} cores: preprocess reaches "
            f"{statistics.median(clock):.3f} of the library's speed by the clock and "
            f"{statistics.median(processor):.3f} by processor time, and {statistics.median(one_at_a_time):.2f} × "
            f"that of a pool that encodes a document at a time (medians of {args.repeats})"
        )


def run_alone(program: str, folder: Path, workers: int) -> Seconds:
    """Run a program of ALONE in a new process, because the number of Rust threads must be set before the start."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-m", "megalith.bench.preprocessing_speed", "--only", program]
    command += ["--folder", str(folder), "--workers", str(workers)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return Seconds(*json.loads(output))


def library_seconds(folder: Path, workers: int) -> Seconds:
    """Measure the library's encoding in batches of 1,000 texts, without loading."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open(folder / "text.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    batches = [texts[i : i + 1000] for i in range(0, len(texts), 1000)]
    clock, processor = time.perf_counter(), time.process_time()
    for batch in batches:
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    return Seconds(time.perf_counter() - clock, time.process_time() - processor)


def preprocess_seconds(folder: Path, workers: int) -> Seconds:
    tokenizer = tokenizer_of(folder)
    before = processor_seconds()
    summary = preprocess(
        [folder / "text.jsonl"],
        folder / "out",
        tokenizer,
        append_eod=True,
        workers=workers,
        overwrite=True,
        show_progress=False,
    )
    return Seconds(summary.seconds, processor_seconds() - before)


def document_seconds(folder: Path, workers: int) -> Seconds:
    before, start = processor_seconds(), time.perf_counter()
    with (
        IndexedWriter(folder / "megatron", np.dtype(np.uint16), overwrite=True) as writer,
        multiprocessing.Pool(workers, start_worker, (folder,)) as pool,
        open(folder / "text.jsonl", encoding="utf-8") as file,
    ):
        for ids in pool.imap(encode_line, file, 25):
            writer.add_documents(np.array(ids, np.uint16), np.array([len(ids)]))
        pool.close()
        pool.join()
    return Seconds(time.perf_counter() - start, processor_seconds() - before)


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


ALONE = {"library": library_seconds, "preprocess": preprocess_seconds, "document": document_seconds}


def start_worker(folder: Path) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))


def encode_line(line: str) -> list[int]:
    return _tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids


_tokenizer: Tokenizer  # of a worker process


def rates(size: int, tokens: int, seconds: Seconds) -> str:
    return f"{size / seconds.clock / 1e6:.2f} MB/s, {tokens / seconds.clock / 1e6:.2f} M tokens/s"


if __name__ == "__main__":
    main()
