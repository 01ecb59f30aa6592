"""Statistics of a stream from a sample of its documents, because its length is unknown."""

from __future__ import annotations

from typing import Any

import numpy as np

from megalith.data.inputs.blocks import MAX_DOCUMENT_BYTES
from megalith.data.inputs.row_tables import source_size
from megalith.data.length_statistics import cut_fraction, length_statistics
from megalith.data.streams.lane import StreamSettings
from megalith.data.streams.stream_shards import Shard, ShardReader
from megalith.errors import DataError

DOCUMENTS = 1000  # of a sample
SHARDS = 8  # that a sample is divided over, if they have enough documents
MAX_SHARDS = 64
BATCH = 32  # documents per call of the tokenizer


def stream_statistics(settings: StreamSettings) -> dict[str, Any]:
    """Read about 1,000 documents, from the beginnings of shards over the whole stream, and return their statistics.

    Returns:
        `shards`, `lanes`, and `bytes` of all shards (None for a dataset of the hub); of the sample: `sampled_shards`,
        `documents` (see `length_statistics`), `empty` and `unusable` documents, `first_unusable` (a sentence, or None),
        `cut_documents` and `longer_documents`; and `estimated_documents` and `estimated_tokens` of the whole stream, in
        proportion to the bytes, or None if those are unknown.

    Raises:
        DataError: a shard cannot be read.
    """
    sample = _Sample(settings)
    order = np.random.default_rng(settings.seed).permutation(len(settings.shards))
    quota = -(-DOCUMENTS // min(SHARDS, len(order)))
    for at in order[:MAX_SHARDS]:
        sample.read(settings.shards[at], quota)
        if len(sample.lengths) >= DOCUMENTS:
            break
    lengths = np.array(sample.lengths, dtype=np.int64)
    sizes = [sum(size for _, size, _ in shard.versions) for shard in settings.shards]
    total = sum(sizes) if all(shard.versions for shard in settings.shards) else None
    scale = None if total is None or not sample.bytes else total / sample.bytes
    return {
        "shards": len(settings.shards),
        "lanes": settings.lanes,
        "bytes": total,
        "sampled_shards": sample.shards,
        "documents": length_statistics(lengths),
        "empty": sample.empty,
        "unusable": sample.unusable,
        "first_unusable": sample.first_unusable,
        "cut_documents": cut_fraction(lengths, settings.seq_length),
        "longer_documents": int((lengths > settings.seq_length).sum()),
        "estimated_documents": None if scale is None else round(len(lengths) * scale),
        "estimated_tokens": None if scale is None else round(int(lengths.sum()) * scale),
    }


def estimated_epochs(statistics: dict[str, Any], tokens: int) -> float | None:
    """Estimate the number of epochs over a stream that provide `tokens` tokens. None if its statistics are unknown."""
    return tokens / statistics["estimated_tokens"] if statistics["estimated_tokens"] else None


class _Sample:
    """Lengths of documents, and the bytes of the shards that hold them."""

    def __init__(self, settings: StreamSettings):
        self._settings = settings
        self._reader = ShardReader(settings.text_key, settings.text_documents)
        self.lengths: list[int] = []
        self.bytes = 0.0
        self.shards = self.empty = self.unusable = 0
        self.first_unusable: str | None = None

    def read(self, shard: Shard, count: int) -> None:
        """Read blocks of a shard until they have `count` documents."""
        documents, share = 0, 1.0
        size = source_size(shard.source) if shard.versions else 0
        for _, block in self._reader.blocks(shard, 0):
            records, bad = block.parse([self._settings.text_key], MAX_DOCUMENT_BYTES)
            for line in bad:
                self._add_unusable(str(line))
            texts = [record.texts[0] for record in records]
            for first in range(0, len(texts), BATCH):
                self._add(shard, texts[first : first + BATCH])
            documents += len(records)
            if documents >= count:
                share = min(1.0, block.position / size) if size else 1.0
                break
        self.shards += 1
        self.bytes += share * sum(size for _, size, _ in shard.versions)

    def _add(self, shard: Shard, texts: list[str]) -> None:
        try:
            encoded = self._settings.tokenizer.encode_batch(texts)
        except DataError as error:
            if len(texts) == 1:
                self._add_unusable(f"{shard} has a document that is unusable: {error}")
                return
            for text in texts:
                self._add(shard, [text])
            return
        eod = int(self._settings.append_eod)
        self.lengths += [len(ids) + eod for ids in encoded if len(ids)]
        self.empty += sum(not len(ids) for ids in encoded)

    def _add_unusable(self, sentence: str) -> None:
        self.unusable += 1
        self.first_unusable = self.first_unusable or sentence
