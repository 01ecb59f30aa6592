"""Tokenizes text in the data paths of pre-training into the run's cache before the first step.

Each entry of a data path becomes one indexed dataset, with the files that `preprocess --input ENTRY` would write. So
samples, their order and the position in checkpoints are the same as with preprocessed data. The cache is reused while
names, sizes and times of the inputs, the tokenizer and the settings are the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megalith.config.data import DataConfig
from megalith.data.blend import DataPath, parse_data_path
from megalith.data.idx_format import file_pair
from megalith.data.input_hints import CONVERSATIONS, TEXT, record_kind
from megalith.data.inputs.compression import content_suffix
from megalith.data.inputs.hub_dataset import SCHEME, HubDataset, Source
from megalith.data.inputs.source_versions import Version, add_tokenizer, source_versions
from megalith.data.inputs.sources import ENDINGS, expand_inputs, read_records
from megalith.data.preprocessing.preprocess import (
    NoTokensError,
    PreprocessSummary,
    UnusableLineError,
    preprocess,
)
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, DataError, shorten
from megalith.io import make_subfolder, open_file, replace_file
from megalith.remote import open_location
from megalith.small_files import read_small_file
from megalith.tables import counted

FORMAT = 1  # of the cache
PREFIX = "text-"  # of its files
SMALL = 1 << 20  # bytes that are tokenized without worker processes
PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def is_text(entry: str) -> bool:
    """Return True if a data path entry is text: a file with a text extension, a folder, a glob or a `hf://` URL.

    The prefix of an indexed dataset is not text.
    """
    if entry.startswith(SCHEME):
        return True
    try:
        if file_pair(entry)[1].exists():
            return False
        path = open_location(entry)
        return glob.has_magic(entry) or content_suffix(path) in ENDINGS or path.is_dir()
    except OSError:  # a store that does not answer is named when the files are opened
        return False


def text_entries(data: DataConfig) -> list[str]:
    """Return the entries of all data paths that are text."""
    paths = (getattr(data, name) for name in PATHS)
    entries = (entry for path in paths if path is not None for entry in parse_data_path(path)[0])
    return [entry for entry in dict.fromkeys(entries) if is_text(entry)]


def is_streamed(data: DataConfig, entry: str, is_training: bool) -> bool:
    """Return True if an entry of a data path is text that is tokenized while training."""
    is_stream = entry.startswith(SCHEME) and HubDataset(entry).arguments["streaming"]
    return is_stream or (data.streaming and is_training and is_text(entry))


def streamed_entries(data: DataConfig) -> list[str]:
    """Return the entries of the training data that are tokenized while training."""
    paths = [path for path in (data.data_path, data.train_data_path) if path is not None]
    return [entry for path in paths for entry in parse_data_path(path)[0] if is_streamed(data, entry, True)]


def check_text(data: DataConfig, tokenizer: Tokenizer | None) -> list[list[Source]]:
    """Return the sources of each text entry.

    Raises:
        ConfigError: there is text, but no tokenizer; or settings that do not apply to streams.
        DataError: an input is missing, or its records are for another command.
    """
    entries = text_entries(data)
    if entries and tokenizer is None:
        raise ConfigError(
            f"data.data_path has text ({shorten(entries)}), but data.tokenizer_type is not set; set a tokenizer"
        )
    if (streams := streamed_entries(data)) and (data.packing != "concat" or data.fim_data):
        name = "data.fim_data" if data.fim_data else f"data.packing {data.packing}"
        raise ConfigError(
            f"{name} does not apply to streams, but {streams[0]} is a stream; leave {name} out, or set "
            "data.streaming to false to tokenize before the first step"
        )
    sources = [expand_inputs([entry]) for entry in entries]
    for first, *_ in sources:
        if isinstance(first, Path) and first.is_file():
            _check_kind(first, data)
    return sources


def with_tokenized_text(
    data: DataConfig,
    splits_sentences: bool,
    tokenizer: Tokenizer | None,
    folder: Path,
    may_write: bool = True,
    show_progress: bool = False,
) -> tuple[DataConfig, list[str]]:
    """Tokenize the text of the data paths into the cache, except for streams.

    The first process of a machine tokenizes, the others wait.

    Args:
        data: the run's data settings.
        splits_sentences: make each sentence a sequence, without end-of-document tokens (BERT and T5).
        tokenizer: the run's tokenizer.
        folder: cache for tokenized text.
        may_write: tokenize text that is not in the cache; if false, such text raises an error.
        show_progress: show a progress bar.

    Returns:
        `data` with the prefixes of the indexed datasets in place of the text, and notes for the log.

    Raises:
        ConfigError, DataError: the text cannot be read, or the cache cannot be written.
    """
    if not text_entries(data):
        return data, []
    check_text(data, tokenizer)
    paths = {name: getattr(data, name) for name in PATHS if getattr(data, name) is not None}
    by_path = {name: _tokenized_entries(data, name, path) for name, path in paths.items()}
    cache = _TextCache(data, splits_sentences, tokenizer, folder, may_write, show_progress)
    prefixes, notes = {}, []
    for entry in dict.fromkeys(entry for entries in by_path.values() for entry in entries):
        prefixes[entry], about = cache.open(entry)
        notes += about
    replaced = {
        name: _replaced(path, {entry: prefixes[entry] for entry in by_path[name]})
        for name, path in paths.items()
    }
    return data.model_copy(update=replaced), notes


def cached_name(prefix: str) -> str:
    """Return a dataset's prefix. For tokenized text, omit the cache folder, which may differ in a resumed run."""
    name = Path(prefix).name
    return name if name.startswith(PREFIX) and Path(prefix).parent.name == "cache" else prefix


def source_name(prefix: str) -> str:
    """Return the data path's entry for a dataset in the cache, or the prefix of any other dataset."""
    return _about(prefix, "entry") or prefix


def content_identity(prefix: str) -> dict[str, str]:
    """Return the SHA-256 of a cached dataset's tokens, to detect changes. Empty for other datasets."""
    digest = _about(prefix, "tokens_sha256")
    return {} if digest is None else {"samples_sha256": digest}


def _about(prefix: str, name: str) -> str | None:
    """Return the cache's description of a dataset. None if the dataset is not in the cache."""
    if cached_name(prefix) == prefix:
        return None
    about = Path(prefix).with_name(f"{Path(prefix).name.split('_')[0]}.json")
    try:
        return str(json.loads(read_small_file(about, about.parent))[name])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class _TextCache:
    def __init__(
        self,
        data: DataConfig,
        splits_sentences: bool,
        tokenizer: Tokenizer,
        folder: Path,
        may_write: bool,
        show_progress: bool,
    ):
        self._data, self._tokenizer, self._folder = data, tokenizer, folder
        self._splits_sentences, self._may_write, self._show_progress = (
            splits_sentences,
            may_write,
            show_progress,
        )

    def open(self, entry: str) -> tuple[str, list[str]]:
        """Return the prefix of the tokenized entry, and notes on it. Tokenizes the entry first if it is not in the
        cache.
        """
        unread: list[str] = []
        sources = expand_inputs([entry], unread)
        try:
            versions = source_versions(sources)
        except OSError as error:
            raise DataError(f"cannot read {entry}: {error}; check the path") from error
        level = "sentence" if self._splits_sentences else "document"
        start = self._folder / f"{PREFIX}{self._key(entry)}"
        prefix, about = f"{start}_{self._data.text_key}_{level}", Path(f"{start}.json")
        if not self._may_write:
            notes = _read_about(about, versions, prefix)
            if notes is None:
                raise DataError(
                    f"{entry} has not been tokenized into {self._folder}, and with train.skip_train nothing "
                    "is written; train first, or preprocess the data"
                )
            return prefix, notes
        try:
            make_subfolder(self._folder)
            lock = open_file(self._folder / "lock", os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise DataError(
                f"cannot tokenize {entry} into {self._folder}: {error}; preprocess it to another folder"
            ) from error
        with open(lock):
            with contextlib.suppress(OSError):  # a file system may have no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            notes = _read_about(about, versions, prefix)
            if notes is None:
                notes = self._notes(entry, self._tokenize(entry, sources, start, versions)) + unread
                with open(f"{prefix}.bin", "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                content = {"entry": entry, "versions": versions, "notes": notes, "tokens_sha256": digest}
                replace_file(about, json.dumps(content))
        return prefix, notes

    def _key(self, entry: str) -> str:
        """Return a key that changes with the entry, the tokenizer and the settings, but not with the text."""
        data = self._data
        settings = (data.text_key, data.text_documents, data.append_eod, data.skip_bad_documents)
        digest = hashlib.sha256(repr((FORMAT, entry, settings, self._splits_sentences)).encode())
        add_tokenizer(digest, self._tokenizer)
        return digest.hexdigest()[:16]

    def _tokenize(
        self, entry: str, sources: Sequence[Source], start: Path, versions: Sequence[Version]
    ) -> PreprocessSummary:
        data = self._data
        try:
            return self._preprocess(sources, start, versions)
        except UnusableLineError as error:
            raise DataError(
                f"{error.line}; {error.line.way_out('data.text_key')}correct or remove it, or set "
                "data.skip_bad_documents to skip and count such documents"
            ) from None
        except NoTokensError as error:
            raise DataError(
                f"{entry} has no document with a token under the key {data.text_key!r} ({error.counts}); check the "
                "file, or set data.text_key"
            ) from None

    def _preprocess(
        self, sources: Sequence[Source], start: Path, versions: Sequence[Version]
    ) -> PreprocessSummary:
        data = self._data
        return preprocess(
            sources,
            start,
            self._tokenizer,
            [data.text_key],
            append_eod=data.append_eod and not self._splits_sentences,
            split_sentences=self._splits_sentences,
            workers=0 if sum(size for _, size, _ in versions) < SMALL else None,
            on_error="skip" if data.skip_bad_documents else "stop",
            overwrite=True,
            text_documents=data.text_documents,
            show_progress=self._show_progress,
        )

    def _notes(self, entry: str, summary: PreprocessSummary) -> list[str]:
        omitted = f", {summary.empty:,} empty ones omitted" if summary.empty else ""
        notes = [
            f"{entry}: {counted(summary.documents[0], 'document')}, {counted(summary.tokens, 'token')}{omitted}"
        ]
        if summary.skipped:
            notes.append(
                f"{entry}: {counted(summary.skipped, 'unusable document')} skipped (data.skip_bad_documents); the "
                f"first one: {summary.bad_lines[0]}"
            )
        return notes + summary.notes


def _read_about(path: Path, versions: Sequence[Version], prefix: str) -> list[str] | None:
    """Return the description of a cached dataset. None if the dataset is missing, damaged or made from other text."""
    try:
        about = json.loads(read_small_file(path, path.parent))
        is_same = [tuple(version) for version in about["versions"]] == list(versions)
        notes = [str(note) for note in about["notes"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return notes if is_same and all(file.is_file() for file in file_pair(prefix)) else None


def _tokenized_entries(data: DataConfig, name: str, path: DataPath) -> list[str]:
    """Return the entries of a data path that are tokenized before the first step."""
    is_training = name in ("data_path", "train_data_path")
    entries = parse_data_path(path)[0]
    return [entry for entry in entries if is_text(entry) and not is_streamed(data, entry, is_training)]


def _replaced(path: DataPath, prefixes: dict[str, str]) -> DataPath:
    if not isinstance(path, str) and any(isinstance(part, Mapping) for part in path):
        return [{**part, "path": prefixes.get(part["path"], part["path"])} for part in path]
    names, weights = parse_data_path(path)
    names = [prefixes.get(name, name) for name in names]
    return names if weights is None else [part for pair in zip(weights, names) for part in pair]


def _check_kind(path: Path, data: DataConfig) -> None:
    """Raise DataError if the first record of a file is for a command other than `train`."""
    try:
        record = next((record for _, record in read_records(path)), {})
    except DataError:  # tokenization reports it, or skips it
        return
    kind = record_kind(record)
    if data.text_key not in record and kind and kind != TEXT:
        enable = "sft.enabled for them, or " if kind == CONVERSATIONS else ""
        raise DataError(
            f"{path} has {kind}; set {enable}data.text_key to train on the text under one of its keys"
        )
