"""Sources of chat data, by data path."""

from __future__ import annotations

from pathlib import Path

from megalith.data.blend import DataPath, parse_entries
from megalith.data.input_hints import dataset_hint
from megalith.data.inputs.hub_dataset import Source
from megalith.data.inputs.sources import expand_inputs
from megalith.errors import ConfigError, shorten
from megalith.remote import size_of


def chat_files(path: DataPath, notes: list[str] | None = None) -> list[Source]:
    """Return the sources of a data path, with folders and globs expanded. Raise ConfigError for weights and
    caps on epochs.

    `notes` receives a sentence about the files of each folder that are not read.
    """
    entries = parse_entries(path)
    if any(entry.weight is not None or entry.max_epochs is not None for entry in entries):
        raise ConfigError(
            f"data_path {path!r} has weights or max_epochs, which chat data does not support; list files only, and "
            "list a file twice to use its samples twice as often"
        )
    files: list[Source] = []
    for prefix in (entry.path for entry in entries):
        if hint := dataset_hint(prefix):
            raise ConfigError(hint)
        files += expand_inputs([prefix], notes)
    empty = [str(file) for file in files if isinstance(file, Path) and file.is_file() and not size_of(file)]
    if empty and notes is not None:
        notes.append(f"empty files ({len(empty):,} of {len(files):,}): {shorten(empty)}")
    return files
