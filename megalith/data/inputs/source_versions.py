"""Versions of sources and tokenizers. They determine the cache keys of tokenized data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megalith.data.inputs.hub_dataset import HubDataset, Source
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.remote import StorePath

LISTED = 4  # objects of a folder from which on it is listed
Item = TypeVar("Item")
Version = tuple[str, int, int | str]  # name, bytes, and time of the last change in ns, or the store's version


def source_versions(sources: Sequence[Source]) -> list[Version]:
    """Return name, size and time of each file of the sources.

    Raises:
        ConfigError: a source is a stream, which has no files.
        DataError: a dataset of the hub cannot be loaded.
        OSError: a file cannot be read.
    """
    return [version for versions in versions_by_source(sources).values() for version in versions]


def versions_by_source(sources: Sequence[Source]) -> dict[Source, list[Version]]:
    """Return `source_versions` by source. Objects in a store are listed, with few requests."""
    parents = Counter(source.parent for source in sources if isinstance(source, StorePath))
    listed: dict[StorePath, tuple[int, str]] = {}
    for parent, count in parents.items():
        if count >= LISTED:
            listed |= parent.stats()
    return {
        source: [(str(source), *listed[source])] if source in listed else _versions(source)
        for source in sources
    }


def steady(source: Source, items: Iterator[Item]) -> Iterator[Item]:
    """Yield the items of a source. After the last one, raise DataError if the source's files have changed or been
    deleted.
    """
    before = current_versions([source])
    yield from items
    check_unchanged(source, before[source], current_versions([source])[source])


def current_versions(sources: Sequence[Source]) -> dict[Source, list[Version]]:
    """Return the version of each source's files; none for hub datasets. Raise DataError if a file is gone."""
    hub = [source for source in sources if isinstance(source, HubDataset)]
    try:
        files = versions_by_source([source for source in sources if not isinstance(source, HubDataset)])
    except OSError as error:
        name = error.filename or ", ".join(map(str, sources))
        raise DataError(f"cannot read {name}: {error.strerror or error}; check the path") from error
    return files | {source: [] for source in hub}


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
        return [(str(source), *source.stat())]
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
