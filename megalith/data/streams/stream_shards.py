"""Shards of a stream of text, and reading of their blocks from a position, with retries over the network."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megalith.config.data import TextDocuments
from megalith.data.inputs.blocks import DocumentBlock
from megalith.data.inputs.hub_dataset import HubDataset, Source
from megalith.data.inputs.row_tables import read_dataset_blocks
from megalith.data.inputs.source_versions import Version, check_unchanged, current_versions
from megalith.data.inputs.sources import expand_inputs, read_document_blocks
from megalith.errors import DataError
from megalith.remote import StorePath

RETRIES = 5  # with pauses of 1, 2, 4, 8 and 16 seconds


@dataclass(frozen=True)
class Shard:
    """A file of a stream, or shard `number` of the `count` shards of a dataset of the hub."""

    source: Source
    number: int = 0
    count: int = 1
    versions: tuple[Version, ...] = ()
    """Versions of the files when the run started; none for a dataset of the hub."""

    def __str__(self) -> str:
        return str(self.source) if self.count == 1 else f"{self.source} (shard {self.number} of {self.count})"

    @property
    def is_remote(self) -> bool:
        return isinstance(self.source, StorePath | HubDataset)

    def identity(self) -> list[Any]:
        """Return the name, the size and the stamp as JSON values. Size and stamp are None for a dataset of the hub.

        The stamp is the last modification time (ns) of local files, and the store's version of an object. A resumed
        run needs the same name and size, and the same version of an object.
        """
        if not self.versions:
            return [str(self), None, None]
        stamps = [stamp for _, _, stamp in self.versions]
        return [
            str(self),
            sum(size for _, size, _ in self.versions),
            stamps[0] if len(stamps) == 1 else max(stamps),
        ]


def list_shards(entry: str, notes: list[str] | None = None) -> list[Shard]:
    """Return the shards of a data path entry: its files, or the shards of a streamed hub dataset.

    `notes` receives a sentence about the files of a folder that are not read.

    Raises:
        DataError: a file is missing, or the hub cannot be reached.
    """
    shards: list[Shard] = []
    sources = expand_inputs([entry], notes)
    versions = current_versions(sources)
    for source in sources:
        count = 1
        if isinstance(source, HubDataset):
            dataset = source.load()  # before the first step, so that a wrong name is not retried
            count = dataset.num_shards if source.arguments["streaming"] else 1
        files = tuple(versions[source])
        shards += [Shard(source, number, count, files) for number in range(count)]
    return shards


class ShardReader:
    """Reads the blocks of shards, and checks that their files are unchanged since the start of the run.

    Args:
        text_key: key or column of the text.
        text_documents: documents of a .txt file.
        pause: function that sleeps for a number of seconds, called between retries.
    """

    def __init__(
        self, text_key: str, text_documents: TextDocuments, pause: Callable[[float], None] = time.sleep
    ):
        self._keys, self._text_documents, self._pause = [text_key], text_documents, pause
        self._hub: dict[HubDataset, Any] = {}

    def blocks(self, shard: Shard, first: int) -> Iterator[tuple[int, DocumentBlock]]:
        """Yield the blocks of a shard, starting at number `first`, each with its number.

        An error of the network is retried from the block that failed.

        Raises:
            DataError: the shard cannot be read, or has changed since the run started.
        """
        at, failures = first, 0
        while True:
            try:
                self._check_version(shard)
                for block in itertools.islice(self._open(shard), at, None):
                    yield at, block
                    at, failures = at + 1, 0
                self._check_version(shard)
                return
            except DataError as error:
                self._hub.pop(shard.source, None)
                if not shard.is_remote or not _may_pass(error, shard):
                    raise
                if failures == RETRIES:
                    raise DataError(
                        f"{error} ({RETRIES} retries failed, in block {at} of {shard}); resume the run later"
                    ) from error
                self._pause(2.0**failures)
                failures += 1

    def _open(self, shard: Shard) -> Iterator[DocumentBlock]:
        source = shard.source
        if not (isinstance(source, HubDataset) and source.arguments["streaming"]):
            return read_document_blocks(source, self._keys, self._text_documents)
        if source not in self._hub:
            self._hub[source] = source.load()
        dataset = self._hub[source]
        if dataset.num_shards != shard.count:
            raise DataError(
                f"{source} had {shard.count} shards and now has {dataset.num_shards}; pin a revision "
                "(?revision=COMMIT), or start a new run"
            )
        return read_dataset_blocks(
            shard, dataset.shard(num_shards=shard.count, index=shard.number), self._keys
        )

    def _check_version(self, shard: Shard) -> None:
        if shard.versions:
            now = current_versions([shard.source])[shard.source]
            check_unchanged(shard, list(shard.versions), now)


def _may_pass(error: DataError, shard: Shard) -> bool:
    """Return True for network errors that a retry may avoid."""
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError):
        return False
    return isinstance(cause, OSError) or (cause is not None and isinstance(shard.source, HubDataset))
