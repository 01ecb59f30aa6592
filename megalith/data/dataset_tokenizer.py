"""The tokenizer that made an indexed dataset, recorded in `PREFIX.tokenizer.json` and compared with the tokenizer of a
run.

Token ids do not show which of two tokenizers of the same size made them. Datasets written by Megatron-LM have no record
and are not checked. Neither are datasets made with NullTokenizer, which has no text.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from megalith.config.data import DataConfig
from megalith.data.inputs.hub_dataset import SCHEME
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError
from megalith.remote import StorePath, open_location, size_of
from megalith.small_files import read_bounded, read_small_file

ENDING = ".tokenizer.json"
MAX_BYTES = 1 << 16
NO_TEXT = "NullTokenizer"
EOD_SETTINGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
SAMPLE = (
    "The quick brown fox jumps over the lazy dog. It's 1234567 miles, isn't it?",
    "def mean(values: list[float]) -> float:\n    return sum(values) / max(1, len(values))  # 0.5\n",
    "Größere Straßen, déjà vu, niño, øre, łódź: naïve façade",
    "Быстрая лиса прыгает. 敏捷的狐狸跳过懒狗。素早い茶色の狐。 الثعلب السريع तेज़ लोमड़ी 🦊",
    '<p class="x">A\tB</p> {"key": [1, 2.5e-3, null]} \\frac{a}{b} https://example.com/?q=1',
)
"""Text whose ids are recorded."""


@dataclass(frozen=True)
class DatasetTokenizer:
    """Content of the record of a dataset's tokenizer."""

    tokenizer_type: str
    tokenizer_model: str
    """Path or name as it was given; "" if there was none."""
    vocab_size: int
    fingerprint: str
    sample_sha256: str
    """Hash of the ids of SAMPLE."""
    vocabulary_sha256: str
    """Hash of the vocabulary's entries, by id, except special tokens; "" if the tokenizer cannot spell its entries."""
    end_of_document: int | None
    """Id at the end of each document; None: documents have none."""
    bin_bytes: int = 0
    """Size of the `.bin`. If the files have other sizes, the record is ignored."""
    idx_bytes: int = 0

    def __str__(self) -> str:
        return (
            f"{self.tokenizer_type} {self.tokenizer_model}".rstrip()
            + f" ({self.vocab_size:,} entries, fingerprint {self.fingerprint[:12]})"
        )

    def of_files(self, bin_bytes: int, idx_bytes: int) -> DatasetTokenizer:
        """Return the record of a dataset with files of these sizes."""
        return replace(self, bin_bytes=bin_bytes, idx_bytes=idx_bytes)

    def to_json(self) -> bytes:
        """Return the content of the record's file."""
        return json.dumps(asdict(self), indent=2).encode() + b"\n"

    def gives_same_ids(self, other: DatasetTokenizer) -> bool:
        """Return True if two tokenizers give the same ids to text, as far as the records show.

        Differences in special tokens, which occur in no text, or in the kind of file do not count.
        """
        if self.fingerprint == other.fingerprint:
            return True
        same_entries = self.vocabulary_sha256 == other.vocabulary_sha256
        return self.sample_sha256 == other.sample_sha256 and (
            same_entries or self.tokenizer_type != other.tokenizer_type
        )


def describe_tokenizer(tokenizer: Tokenizer, end_of_document: int | None = None) -> DatasetTokenizer:
    """Return the record of a tokenizer, without files."""
    return DatasetTokenizer(
        tokenizer.tokenizer_type,
        tokenizer.path,
        tokenizer.vocab_size,
        tokenizer.fingerprint,
        _hash_sample(tokenizer),
        _hash_vocabulary(tokenizer),
        end_of_document,
    )


def record_path(prefix: str | Path) -> Path | StorePath:
    """Return the path or URL of the record of a dataset."""
    return open_location(f"{prefix}{ENDING}")


def read_record(prefix: str | Path) -> DatasetTokenizer | None:
    """Return the tokenizer record of a dataset. None if there is none or it was written for files of other sizes.

    Raises:
        DataError: the record is damaged.
    """
    path = record_path(prefix)
    try:
        content = (
            read_bounded(path, MAX_BYTES) if isinstance(path, Path) else read_small_file(path, path.parent)
        )
        sizes = [size_of(open_location(f"{prefix}{ending}")) for ending in (".bin", ".idx")]
    except OSError:  # without a record, or without a dataset, which whoever opens it names
        return None
    try:
        record = TypeAdapter(DatasetTokenizer).validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise DataError(
            f"{path}, the record of the dataset's tokenizer, is damaged ({first['msg']}, at "
            f"{'.'.join(map(str, first['loc'])) or 'its start'}); remove it to use the dataset without comparing "
            "tokenizers, or preprocess again"
        ) from error
    return record if [record.bin_bytes, record.idx_bytes] == sizes else None


def check_tokenizer(prefixes: Sequence[str], tokenizer: Tokenizer, data: DataConfig | None = None) -> None:
    """Compare a tokenizer with the tokenizers that made datasets.

    Args:
        prefixes: prefixes of the datasets. Other entries, such as text files, are skipped.
        tokenizer: the run's tokenizer.
        data: the run's settings; None means the tokenizer only decodes.

    Raises:
        ConfigError: a dataset was made by a tokenizer that gives other ids to text, or its documents end with another
            token than the run's `eod` and a setting depends on that token.
        DataError: a record is damaged.
    """
    if tokenizer.tokenizer_type == NO_TEXT:
        return
    current: DatasetTokenizer | None = None
    for prefix in prefixes:
        made = None if prefix.startswith(SCHEME) or glob.has_magic(prefix) else read_record(prefix)
        if made is None or made.tokenizer_type == NO_TEXT:
            continue
        current = current or describe_tokenizer(tokenizer)
        if not made.gives_same_ids(current):
            raise ConfigError(
                f"{prefix} was made with {made}, but the tokenizer is {current}, which gives other ids to the same "
                "text; set data.tokenizer_type and data.tokenizer_model to the tokenizer that made it, or preprocess "
                "the text again"
            )
        if made.end_of_document in (None, tokenizer.eod) or data is None:
            continue
        if setting := next((name for name in EOD_SETTINGS if getattr(data, name)), None):
            raise ConfigError(
                f"the documents of {prefix} end with the token {made.end_of_document}, but the end of document of the "
                f"run's tokenizer is {tokenizer.eod}, which data.{setting} looks for; use the tokenizer that "
                f"made the dataset ({made}), or preprocess the text again"
            )


def merged_record(prefixes: Sequence[str | Path]) -> DatasetTokenizer | None:
    """Return the tokenizer record of merged datasets. None if one of the datasets has no record.

    Raises:
        DataError: two of them were made with different tokenizers.
    """
    records = [read_record(prefix) for prefix in prefixes]
    first = records[0]
    for prefix, record in zip(prefixes, records):
        if first is not None and record is not None and not first.gives_same_ids(record):
            raise DataError(
                f"{prefixes[0]} was made with {first} and {prefix} with {record}; only datasets of the same tokenizer "
                "can be merged"
            )
    return None if None in records else first


def _hash_sample(tokenizer: Tokenizer) -> str:
    """Return the hash of the ids of SAMPLE without the special tokens that some kinds add before a text."""
    ids, prefix = [], tokenizer.prefix
    for text in SAMPLE:
        try:
            encoded = [int(i) for i in tokenizer.encode(text)]
        except DataError:  # the tokenizer refuses it
            encoded = []
        ids.append(encoded[len(prefix) :] if encoded[: len(prefix)] == prefix else encoded)
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def _hash_vocabulary(tokenizer: Tokenizer) -> str:
    try:
        pieces = tokenizer.pieces()
    except ConfigError:
        return ""
    special = tokenizer.special_ids
    entries = [(i, piece) for i, piece in enumerate(pieces) if i not in special and piece]
    return hashlib.sha256(repr(entries).encode("utf-8", "surrogatepass")).hexdigest()
