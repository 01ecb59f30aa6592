"""Files of a Hugging Face folder besides the weights: config.json, generation_config.json and the tokenizer's files.

An import stores them in the checkpoint's `tokenizer` folder, with the dtypes of tensors that differ from the model's,
so that an export restores the imported folder. For a model trained from scratch that folder has only the tokenizer, and
an export writes the other files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megalith.bridge.folder import (
    CONFIG,
    DTYPE_NAMES,
    GENERATION,
    SourceFolder,
    name_in_folder,
    read_config_json,
    read_folder_file,
    read_json,
    tokenizer_files,
)
from megalith.data.tokenizers.huggingface import PIECES
from megalith.data.tokenizers.open_tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from megalith.data.tokenizers.tokenizer import SPEC_FILE
from megalith.errors import CheckpointError

DTYPES_FILE = "hugging_face_dtypes.json"


@dataclass(frozen=True)
class Origin:
    """The files that an export starts from."""

    config: dict[str, Any] | None = None
    """Contents of config.json; None if the export has to write one."""

    generation: dict[str, Any] | None = None
    """Contents of generation_config.json."""

    files: list[Path] = field(default_factory=list)
    """Files of the tokenizer."""

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of the Hugging Face tensors that differ from the model's dtype."""


def read_origin(folder: Path | None) -> Origin:
    """Read the small files of a Hugging Face folder or of a checkpoint's tokenizer folder. All of them are optional."""
    if folder is None:
        return Origin()

    def optional(name: str) -> dict[str, Any] | None:
        return read_json(folder / name) if (folder / name).exists() else None

    dtypes = optional(DTYPES_FILE) or {}
    if unknown := [name for name in dtypes.values() if not isinstance(name, str) or name not in DTYPE_NAMES]:
        raise CheckpointError(
            f"{folder / DTYPES_FILE} has the dtype {unknown[0]!r}; supported: {', '.join(DTYPE_NAMES)}"
        )
    return Origin(
        config=read_config_json(folder) if (folder / CONFIG).exists() else None,
        generation=optional(GENERATION),
        files=tokenizer_files(folder),
        dtypes={name: DTYPE_NAMES[dtype] for name, dtype in dtypes.items()},
    )


def save_origin(
    source: SourceFolder, tokenizer: Tokenizer | None, dtypes: Mapping[str, torch.dtype], folder: Path
) -> None:
    """Write the files of a Hugging Face folder to a checkpoint's tokenizer folder. Raises OSError."""
    if tokenizer is not None:
        tokenizer.save(folder)
    others = [source.path / name for name in (CONFIG, GENERATION) if (source.path / name).exists()]
    for file in [*others, *tokenizer_files(source.path)]:
        target = folder / name_in_folder(file)
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(read_folder_file(file))
    if dtypes:
        names = {dtype: name for name, dtype in DTYPE_NAMES.items()}
        (folder / DTYPES_FILE).write_text(
            json.dumps({name: names[dtype] for name, dtype in dtypes.items()}, indent=2)
        )


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a Hugging Face folder, or None if it has no supported tokenizer."""
    for name, kind, path in (
        ("tokenizer.json", "HuggingFaceTokenizer", folder),
        ("tokenizer.model", "SentencePieceTokenizer", folder / "tokenizer.model"),
        ("merges.txt", "GPT2BPETokenizer", folder),
    ):
        if (folder / name).exists():
            read_folder_file(folder / name)  # rejects a link out of the folder
            return build_tokenizer(kind, path)
    if (folder / PIECES).exists():
        read_folder_file(folder / PIECES)
        settings = folder / "tokenizer_config.json"
        lower = read_json(settings).get("do_lower_case", True) if settings.exists() else True
        return build_tokenizer(f"BertWordPiece{'LowerCase' if lower else 'Case'}", vocab_file=folder / PIECES)
    return None


def check_vocabulary(source: SourceFolder, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raise CheckpointError if the tokenizer has more entries than the embedding has rows."""
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer in {source.path} has {tokenizer.vocab_size} entries, but the embedding has {vocab_size} "
            "rows; resize the embedding, or remove the tokenizer's files if they belong to another model"
        )


def saved_tokenizer(folder: Path | None) -> Tokenizer | None:
    """Return the tokenizer in a checkpoint's tokenizer folder, or None if it has none."""
    return load_tokenizer(folder) if folder is not None and (folder / SPEC_FILE).exists() else None
