"""Cache of tokenized chat data.

Later runs with the same files and template load token arrays instead of tokenizing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megalith.config.base import Decides
from megalith.config.fine_tuning import ChatConfig
from megalith.data.chat.samples import Samples, _Texts, read_samples
from megalith.data.inputs.hub_dataset import Source
from megalith.data.inputs.source_versions import add_tokenizer, source_versions
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.io import make_subfolder, open_file, write_file
from megalith.small_files import read_small_file

FORMAT = 4  # of the cache
ARRAYS = {
    "tokens": np.int32,
    "learned": np.bool_,
    "starts": np.int64,
    "letters": np.uint8,
    "ends": np.int64,
    "values": np.float32,  # empty without values
}


def cached_samples(
    folder: Path,
    files: Sequence[Source],
    tokenizer: Tokenizer | None,
    chat: ChatConfig,
    max_tokens: int,
    vocab_size: int,
    may_write: bool = True,
) -> Samples:
    """Return the result of `read_samples`, cached.

    One process per machine tokenizes; the others wait and memory-map the cache.

    The cache key covers the files' names, sizes and times, the tokenizer, the template and the settings. Without a
    cache (data from an object store, or a `folder` that cannot be written), each process tokenizes by itself.
    """
    arguments = (files, tokenizer, chat, max_tokens, vocab_size)
    if not all(isinstance(file, Path) for file in files):
        return read_samples(*arguments)
    path = folder / f"chat-{_key(*arguments)}"
    if not may_write:
        return _load_cached(path, vocab_size) or read_samples(*arguments)
    try:
        make_subfolder(folder)
        lock = open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError:
        return read_samples(*arguments)
    with open(lock):
        with contextlib.suppress(OSError):  # a file system may have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (cached := _load_cached(path, vocab_size)) is not None:
            return cached
        samples = read_samples(*arguments, show_progress=True)
        with contextlib.suppress(OSError):  # or no space
            _write_cache(samples, path)
        return _load_cached(path, vocab_size) or samples


def _key(
    files: Sequence[Path], tokenizer: Tokenizer | None, chat: ChatConfig, max_tokens: int, vocab_size: int
) -> str:
    names = source_versions(files)
    settings = chat.model_dump_json(include=set(chat.fields_deciding(Decides.SAMPLES)) - {"packing"})
    digest = hashlib.sha256(repr((FORMAT, names, chat.name, settings, max_tokens, vocab_size)).encode())
    if tokenizer is not None:
        add_tokenizer(digest, tokenizer)
    return digest.hexdigest()[:32]


def _write_cache(samples: Samples, path: Path) -> None:
    """Write a folder atomically. Raises OSError."""
    sources = [source.encode() for source in samples.sources]
    letters = np.frombuffer(b"".join(sources), dtype=np.uint8)
    ends = np.cumsum([len(source) for source in sources], dtype=np.int64)
    values = np.empty(0, np.float32) if samples.values is None else samples.values
    arrays = (samples.tokens, samples.learned, samples.starts, letters, ends, values)
    info = {"counts": samples.counts, "first_bad": samples.first_bad, "each": samples.sequences_per_sample}
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, array in zip(ARRAYS, arrays, strict=True):
            with open(partial / f"{name}.npy", "xb") as file:
                np.save(file, array, allow_pickle=False)
        write_file(partial / "about.json", json.dumps(info))
        if path.exists():  # an unreadable cache
            shutil.rmtree(path)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _load_cached(path: Path, vocab_size: int) -> Samples | None:
    """Memory-map samples written by `_write_cache`. Returns None if they are missing or damaged."""
    try:
        info = json.loads(read_small_file(path / "about.json", path))
        arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        tokens, learned, starts, letters, ends, values = arrays.values()
        sequences_per_sample, first_bad = int(info["each"]), str(info["first_bad"])
        counts = Counter({description: int(count) for description, count in info["counts"].items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, EOFError):
        return None
    is_valid = (
        all(
            array.dtype == dtype and array.ndim == 1 for array, dtype in zip(arrays.values(), ARRAYS.values())
        )
        and len(tokens) == len(learned) > 0
        and len(starts) == len(ends) * sequences_per_sample + 1
        and (starts[0], starts[-1]) == (0, len(tokens))
        and (np.diff(starts) > 0).all()
        and 0 <= tokens.min() <= tokens.max() < vocab_size
        and len(values) in (0, len(tokens))
    )
    if not is_valid:
        return None
    texts, values = _Texts(letters, ends), values if len(values) else None
    return Samples(tokens, learned, starts, texts, counts, first_bad, sequences_per_sample, values)
