"""Real text for benchmarks: Python's standard library, repeated to a given size, with a tokenizer trained on it."""

from __future__ import annotations

from pathlib import Path

from megalith.data.preprocessing.corpus import write_stdlib_corpus
from megalith.data.preprocessing.preprocess import preprocess
from megalith.data.tokenizers.open_tokenizer import Tokenizer, build_tokenizer
from megalith.data.tokenizers.train_tokenizer import train_tokenizer

VOCAB_SIZE = 32_000


def write_text(folder: Path, megabytes: int, vocab_size: int = VOCAB_SIZE) -> tuple[Path, int]:
    """Write a tokenizer, and the corpus repeated to about `megabytes`, at least once.

    Returns:
        The text file, and its size in bytes.
    """
    corpus = write_stdlib_corpus(folder / "corpus.jsonl")
    train_tokenizer([corpus.path], vocab_size, folder)
    copies = max(1, round(megabytes * 1e6 / corpus.bytes))
    content = corpus.path.read_bytes()
    text = folder / "text.jsonl"
    with open(text, "wb") as file:
        for _ in range(copies):
            file.write(content)
    return text, corpus.bytes * copies


def tokenizer_of(folder: Path) -> Tokenizer:
    """Open the tokenizer that `write_text` has written."""
    return build_tokenizer("HuggingFaceTokenizer", folder / "tokenizer.json")


def build_dataset(folder: Path, megabytes: int = 0, vocab_size: int = VOCAB_SIZE) -> tuple[str, int]:
    """Write an indexed dataset of `megabytes` of text; return its prefix and number of tokens, two bytes each."""
    text, _ = write_text(folder, megabytes, vocab_size)
    tokenizer = tokenizer_of(folder)
    summary = preprocess([text], folder / "text", tokenizer, append_eod=True, show_progress=False)
    return summary.prefixes[0], summary.tokens
