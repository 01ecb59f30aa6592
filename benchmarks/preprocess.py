"""Preprocessing speed against the tokenizers library's own batch encoding: same text, tokenizer and cores.

    python -m benchmarks.preprocess [--megabytes 96] [--repeats 5] [--workers N]

The text is the standard library corpus, repeated; the tokenizer is trained on it. The bar is the library's
`encode_batch_fast` on texts already in memory, with as many threads as there are workers, its encodings
thrown away. Against it stands the whole of `preprocess`: starting the workers, reading, parsing, encoding,
and writing the dataset. The two run in turn, and the ratio is the median over the turns.
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

from megalith.data.corpus import write_stdlib_corpus
from megalith.data.preprocess import preprocess
from megalith.data.tokenizer import build_tokenizer
from megalith.data.tokenizer_training import train_tokenizer

VOCAB_SIZE = 32_000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--library-only", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.library_only:
        print(library_seconds(args.library_only))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size, tokens = build_text(folder, args.megabytes)
        ratios = []
        for turn in range(1, args.repeats + 1):
            library = run_library(folder, args.workers)
            ours = run_preprocess(folder, args.workers)
            ratios.append(library / ours)
            print(
                f"turn {turn}: encode_batch_fast {rates(size, tokens, library)}; "
                f"preprocess {rates(size, tokens, ours)}; ratio {ratios[-1]:.3f}",
                flush=True,
            )
        print(
            f"{size / 1e6:.0f} MB of text, {tokens:,} tokens, {args.workers} cores: preprocess reaches "
            f"{statistics.median(ratios):.3f} of the library's speed (median of {args.repeats})"
        )


def build_text(folder: Path, megabytes: int) -> tuple[int, int]:
    """Write the corpus, its repetition and a tokenizer; the text's bytes and tokens."""
    corpus = write_stdlib_corpus(folder / "corpus.jsonl")
    train_tokenizer([corpus.path], VOCAB_SIZE, folder)
    copies = max(1, round(megabytes * 1e6 / corpus.bytes))
    content = corpus.path.read_bytes()
    with open(folder / "text.jsonl", "wb") as file:
        for _ in range(copies):
            file.write(content)
    summary = preprocess([corpus.path], folder / "count", build(folder), show_progress=False)
    return corpus.bytes * copies, summary.tokens * copies


def build(folder: Path):
    return build_tokenizer("HuggingFaceTokenizer", folder / "tokenizer.json")


def run_library(folder: Path, threads: int) -> float:
    """`library_seconds` in a process of its own, whose Rust threads are set before it starts."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    command = [sys.executable, "-m", "benchmarks.preprocess", "--library-only", str(folder)]
    return float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def library_seconds(folder: Path) -> float:
    """Seconds that the library takes to encode the texts, loading not counted, in batches of 1,000 texts."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open(folder / "text.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    batches = [texts[i : i + 1000] for i in range(0, len(texts), 1000)]
    start = time.perf_counter()
    for batch in batches:
        tokenizer.encode_batch_fast(batch, add_special_tokens=False)
    return time.perf_counter() - start


def run_preprocess(folder: Path, workers: int) -> float:
    summary = preprocess(
        [folder / "text.jsonl"],
        folder / "out",
        build(folder),
        append_eod=True,
        workers=workers,
        overwrite=True,
        show_progress=False,
    )
    return summary.seconds


def rates(size: int, tokens: int, seconds: float) -> str:
    return f"{size / seconds / 1e6:.2f} MB/s, {tokens / seconds / 1e6:.2f} M tokens/s"


if __name__ == "__main__":
    main()
