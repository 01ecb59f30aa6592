"""Versions of sources and tokenizers. They determine the cache keys of tokenized data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megalith.data.inputs.hub_dataset import HubDataset, Source
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.remote import StorePath

Item = TypeVar("Item")
Version = tuple[str, int, int | str]  # name, bytes, and time of the last change in ns, or the store's version


def source_versions(sources: Sequence[Source]) -> list[Version]:
    """Return name, size and time of each file of the sources.

    Raises:
        ConfigError: a source is a stream, which has no files.
        DataError: a dataset of the hub cannot be loaded.
        OSError: a file cannot be read.
    """
    return [version for source in sources for version in _versions(source)]


def steady(source: Source, items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items read from a source. Raise DataError at their end if its files have changed or are gone."""
    before = current_versions(source)
    yield from items
    check_unchanged(source, before, current_versions(source))


def current_versions(source: Source) -> list[Version]:
    """Return the versions of a source's files; none for a dataset of the hub. Raise DataError if a file is gone."""
    try:
        return [] if isinstance(source, HubDataset) else source_versions([source])
    except OSError as error:
        raise DataError(f"cannot read {source}: {error.strerror or error}; check the path") from error


def check_unchanged(name: Any, before: Sequence[Version], now: Sequence[Version]) -> None:
    """Raise DataError if two versions of a source differ."""
    if before != now:
        raise DataError(
            f"{name} changed while the run read it: {_described(before)} before, {_described(now)} now; restore it, or "
            "start again"
        )


def _described(versions: Sequence[Version]) -> str:
    return (
        f"{sum(size for _, size, _ in versions):,} bytes (version {versions[0][2] if versions else 'none'})"
    )


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
