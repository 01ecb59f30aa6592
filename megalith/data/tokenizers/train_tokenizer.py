"""Trains a byte-level byte-pair encoding like GPT-2's, which encodes every text without loss.

Text is split into words (GPT-2's pattern: a word includes the space before it) and words into bytes. The most
frequent adjacent pairs are merged, one pair at a time, until the vocabulary is full. [Sennrich et al. 2016,
arXiv:1508.07909; Radford et al. 2019]
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

from megalith.config.data import TextDocuments
from megalith.data.inputs.jsonl import MAX_LINE_BYTES
from megalith.data.inputs.sources import expand_inputs, read_texts
from megalith.errors import ConfigError, DataError
from megalith.io import atomic_file
from megalith.progress import REDRAW_INTERVAL, Progress

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 256 + 1  # the bytes and the end of text


@dataclass(frozen=True)
class TrainingSummary:
    """The trained tokenizer. `vocab_size` is smaller than requested if the text has too few repetitions; `bytes` are
    UTF-8."""

    path: Path
    vocab_size: int
    documents: int
    bytes: int
    notes: list[str] = field(default_factory=list)
    """Notes, one sentence each, about files that were not read."""


def train_tokenizer(
    inputs: Sequence[str | Path],
    vocab_size: int,
    output: str | Path,
    json_keys: Sequence[str] = ("text",),
    *,
    min_frequency: int = 2,
    overwrite: bool = False,
    max_line_bytes: int = MAX_LINE_BYTES,
    text_documents: TextDocuments = "file",
    show_progress: bool = True,
) -> TrainingSummary:
    """Train a tokenizer on text and write a tokenizer.json. The same input gives the same bytes.

    Args:
        inputs: files, folders, globs and URLs (inputs/sources.py).
        vocab_size: number of entries.
        output: a .json file, or a folder for tokenizer.json. With that name, tokenizer_config.json is written next to
            it, so that transformers loads the folder.
        json_keys: keys of the texts.
        min_frequency: minimum number of occurrences of a merged pair.
        overwrite: replace an existing output.
        max_line_bytes: maximum length of a line or document.
        text_documents: the documents of a .txt file.
        show_progress: show a progress bar.

    Raises:
        ConfigError: if the vocabulary is too small for all bytes.
        DataError: for unusable input, no text, or an existing output.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size {vocab_size} cannot hold the 256 bytes and {END_OF_TEXT}; "
            f"choose at least {MIN_VOCAB_SIZE}"
        )
    path = Path(output) if str(output).endswith(".json") else Path(output) / "tokenizer.json"
    if path.exists() and not overwrite:
        raise DataError(
            f"{path} already exists; remove it, choose another output, or set overwrite (--overwrite)"
        )

    notes: list[str] = []
    paths, counts = expand_inputs(inputs, notes), {"documents": 0, "bytes": 0}

    def texts() -> Iterator[str]:
        for path in paths:
            for text in read_texts(path, json_keys, max_line_bytes, text_documents):
                counts["documents"] += 1
                counts["bytes"] += len(text.encode("utf-8"))
                yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with Progress("tokenizer", None, show=show_progress) as progress, ThreadPoolExecutor(1) as thread:
        training = thread.submit(tokenizer.train_from_iterator, texts(), trainer)
        while wait([training], REDRAW_INTERVAL).not_done:
            progress.update(counts["bytes"], f"{counts['bytes'] / 1e6:.1f} MB of text read")
        training.result()
    if counts["bytes"] == 0:
        raise DataError(
            f"no text was found under {', '.join(json_keys)} in {', '.join(map(str, paths))}; "
            "check the files and keys"
        )
    with atomic_file(path) as file:
        file.write(tokenizer.to_str(pretty=True).encode("utf-8"))
    if path.name == "tokenizer.json":
        with atomic_file(path.with_name("tokenizer_config.json")) as file:
            file.write(_TOKENIZER_CONFIG)
    return TrainingSummary(path, tokenizer.get_vocab_size(), **counts, notes=notes)


_TOKENIZER_CONFIG = json.dumps(
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    },
    indent=2,
).encode()
