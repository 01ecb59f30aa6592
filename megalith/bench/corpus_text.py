"""Real text for benchmarks: Python's standard library, repeated or cut to a given size, and a tokenizer of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megalith.data.preprocessing.corpus import write_stdlib_corpus
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import Tokenizer, build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer

VOCAB_SIZE = 32_000
HELD_OUT_EVERY = 20  # of the files of TextBytes


def write_text(folder: Path, megabytes: int, vocab_size: int = VOCAB_SIZE) -> tuple[Path, int]:
    """Write a tokenizer and the corpus, repeated or cut to about `megabytes`; 0 writes the corpus once.

    Returns:
        The text file, and its size in bytes.
    """
    corpus = write_stdlib_corpus(folder / "corpus.jsonl")
    size, copies = corpus.bytes, max(1, round(megabytes * 1e6 / corpus.bytes))
    if 0 < megabytes * 1e6 < corpus.bytes:
        size = keep_first_documents(corpus.path, int(megabytes * 1e6))
    train_tokenizer([corpus.path], vocab_size, folder)
    content = corpus.path.read_bytes()
    text = folder / "text.jsonl"
    with open(text, "wb") as file:
        for _ in range(copies):
            file.write(content)
    return text, size * copies


def keep_first_documents(file: Path, size: int) -> int:
    """Cut JSON Lines after the document that completes `size` bytes of text. Returns the size."""
    kept, total = [], 0
    with open(file, encoding="utf-8") as lines:
        while total < size:
            kept.append(next(lines))
            total += len(json.loads(kept[-1])["text"].encode())
    file.write_text("".join(kept), encoding="utf-8")
    return total


def tokenizer_of(folder: Path) -> Tokenizer:
    """Open the tokenizer that `write_text` has written."""
    return build_tokenizer("HuggingFaceTokenizer", folder / "tokenizer.json")


def build_dataset(folder: Path, megabytes: int = 0, vocab_size: int = VOCAB_SIZE) -> tuple[str, int]:
    """Write an indexed dataset of `megabytes` of text. Returns its prefix and number of tokens, two bytes each."""
    text, _ = write_text(folder, megabytes, vocab_size)
    tokenizer = tokenizer_of(folder)
    summary = preprocess([text], folder / "text", tokenizer, append_eod=True, show_progress=False)
    return summary.prefixes[0], summary.tokens


def python_files() -> Iterator[Path]:
    """Yield the Python files of the standard library, then those of its subpackages, then those of installed
    packages."""
    library = Path(os.__file__).parent
    yield from sorted(library.glob("*.py"))
    installed = {"site-packages", "dist-packages"}
    yield from (file for file in sorted(library.glob("*/**/*.py")) if not installed.intersection(file.parts))
    yield from sorted(Path(torch.__file__).parents[1].glob("**/*.py"))


class TextBytes:
    """Samples of the bytes of Python modules, int64 [seq_length + 1], which need no tokenizer and no file."""

    def __init__(
        self,
        seq_length: int,
        num_samples: int,
        seed: int,
        megabytes: float = 1.0,
        held_out: bool | None = None,
    ):
        """Read the first `megabytes` of `python_files`.

        Args:
            seq_length: tokens per sample, without the last label.
            num_samples: number of samples, each at a random position.
            seed: seed of the positions.
            megabytes: size of the text.
            held_out: True reads only every twentieth file, False only the other files. None reads all files.
        """
        self.seq_length, self.num_samples, self.seed = seq_length, num_samples, seed
        text, size = bytearray(), int(megabytes * 1e6)
        for number, file in enumerate(python_files()):
            if len(text) >= size:
                break
            if held_out is None or held_out == (number % HELD_OUT_EVERY == 0):
                text += file.read_bytes()
        self.text = np.frombuffer(bytes(text[:size]), dtype=np.uint8)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> np.ndarray:
        first = np.random.default_rng([self.seed, i]).integers(len(self.text) - self.seq_length)
        return self.text[first : first + self.seq_length + 1].astype(np.int64)
