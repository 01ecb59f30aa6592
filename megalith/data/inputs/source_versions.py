"""Versions of sources and tokenizers. They determine the cache keys of tokenized data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalith.data.inputs.hub_dataset import HubDataset, Source
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.remote import StorePath

Version = tuple[str, int, int | str]  # name, bytes, and time of the last change in ns, or the store's version


def source_versions(sources: Sequence[Source]) -> list[Version]:
    """Return name, size and time of each file of the sources.

    Raises:
        ConfigError: a source is a stream, which has no files.
        DataError: a dataset of the hub cannot be loaded.
        OSError: a file cannot be read.
    """
    return [version for source in sources for version in _versions(source)]


def add_tokenizer(digest: Any, tokenizer: Tokenizer) -> None:
    """Update a hashlib digest with a tokenizer's fingerprint and the contents of its files."""
    digest.update(tokenizer.fingerprint.encode())
    for name, content in sorted(tokenizer.files.items()):
        digest.update(repr((name, len(content))).encode() + content)


def _versions(source: Source) -> list[Version]:
    if isinstance(source, StorePath):
        return [(str(source), source.size(), source.version())]
    if isinstance(source, HubDataset):
        if source.arguments["streaming"]:
            raise ConfigError(
                f"{source} is a stream, which has no end and no files; preprocess it (megalith preprocess), set "
                "streaming=false, or read it with your own dataset (data.dataset)"
            )
        paths = [Path(file["filename"]) for file in source.load().cache_files]
    else:
        paths = sorted(source.rglob("*")) if source.is_dir() else [source]
    return [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
