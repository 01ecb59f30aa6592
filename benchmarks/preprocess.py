"""Preprocessing speed against the tokenizers library's own batch encoding: same text, tokenizer and cores.

    python -m benchmarks.preprocess [--megabytes 48] [--repeats 7] [--workers N]

The text is the standard library corpus, repeated; the tokenizer is trained on it. The bar is the library's
`encode_batch_fast` on texts already in memory, with as many threads as there are workers, its encodings
thrown away. Against it stands the whole of `preprocess`: starting the workers, reading, parsing, encoding,
and writing the dataset. The two run in turn, and each ratio is the median over the turns: of the time on the
clock, which needs an idle machine, and of the processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.text import tokenizer_of, write_text
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
    parser.add_argument("--library-only", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.library_only:
        print(json.dumps(library_seconds(args.library_only)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, size = write_text(folder, args.megabytes)
        tokens = preprocess([text], folder / "count", tokenizer_of(folder), show_progress=False).tokens
        clock, processor = [], []
        for turn in range(1, args.repeats + 1):
            library = run_library(folder, args.workers)
            ours = run_preprocess(folder, args.workers)
            clock.append(library.clock / ours.clock)
            processor.append(library.processor / ours.processor)
            print(
                f"turn {turn}: encode_batch_fast {rates(size, tokens, library)}; "
                f"preprocess {rates(size, tokens, ours)}; ratio {clock[-1]:.3f} ({processor[-1]:.3f})",
                flush=True,
            )
        print(
            f"{size / 1e6:.0f} MB of text, {tokens:,} tokens, {args.workers} cores: preprocess reaches "
            f"{statistics.median(clock):.3f} of the library's speed by the clock and "
            f"{statistics.median(processor):.3f} by processor time (medians of {args.repeats})"
        )


def run_library(folder: Path, threads: int) -> Seconds:
    """`library_seconds` in a process of its own, whose Rust threads are set before it starts."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-m", "benchmarks.preprocess", "--library-only", str(folder)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return Seconds(*json.loads(output))


def library_seconds(folder: Path) -> Seconds:
    """What the library takes to encode the texts, loading not counted, in batches of 1,000 texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open(folder / "text.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    batches = [texts[i : i + 1000] for i in range(0, len(texts), 1000)]
    clock, processor = time.perf_counter(), time.process_time()
    for batch in batches:
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    return Seconds(time.perf_counter() - clock, time.process_time() - processor)


def run_preprocess(folder: Path, workers: int) -> Seconds:
    before = os.times()
    summary = preprocess(
        [folder / "text.jsonl"],
        folder / "out",
        tokenizer_of(folder),
        append_eod=True,
        workers=workers,
        overwrite=True,
        show_progress=False,
    )
    processor = sum(after - start for after, start in zip(os.times()[:4], before[:4]))  # and the children's
    return Seconds(summary.seconds, processor)


def rates(size: int, tokens: int, seconds: Seconds) -> str:
    return f"{size / seconds.clock / 1e6:.2f} MB/s, {tokens / seconds.clock / 1e6:.2f} M tokens/s"


if __name__ == "__main__":
    main()
