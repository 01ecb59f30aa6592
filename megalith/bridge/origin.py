"""What of a Hugging Face folder is not weights: config.json, generation_config.json and the tokenizer's files.

An import keeps them in the checkpoint's `tokenizer` folder, with the types that tensors had where they differ; so an
export gives back the folder that came in. A model trained here has its tokenizer there alone, and the rest is written
for it.
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
    TOKENIZER_FILES,
    SourceFolder,
    read_config_json,
    read_folder_file,
    read_json,
)
from megalith.data.tokenizers.huggingface import PIECES
from megalith.data.tokenizers.open_tokenizer import Tokenizer, build_tokenizer, load_tokenizer
from megalith.data.tokenizers.tokenizer import SPEC_FILE
from megalith.errors import CheckpointError

DTYPES_FILE = "hugging_face_dtypes.json"


@dataclass(frozen=True)
class Origin:
    """The small files that an export starts from."""

    config: dict[str, Any] | None = None
    """config.json; None: to be written anew."""

    generation: dict[str, Any] | None = None
    """generation_config.json."""

    files: list[Path] = field(default_factory=list)
    """The tokenizer's files."""

    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Types of the tensors of theirs that were not of the model's own."""


def read_origin(folder: Path | None) -> Origin:
    """What is there of the small files in a Hugging Face folder, or in a checkpoint's tokenizer folder."""
    if folder is None:
        return Origin()

    def optional(name: str) -> dict[str, Any] | None:
        return read_json(folder / name) if (folder / name).exists() else None

    dtypes = optional(DTYPES_FILE) or {}
    if strange := [name for name in dtypes.values() if not isinstance(name, str) or name not in DTYPE_NAMES]:
        raise CheckpointError(
            f"{folder / DTYPES_FILE} has the type {strange[0]!r}; known here are {', '.join(DTYPE_NAMES)}"
        )
    return Origin(
        config=read_config_json(folder) if (folder / CONFIG).exists() else None,
        generation=optional(GENERATION),
        files=[folder / name for name in TOKENIZER_FILES if (folder / name).exists()],
        dtypes={name: DTYPE_NAMES[dtype] for name, dtype in dtypes.items()},
    )


def save_origin(
    source: SourceFolder, tokenizer: Tokenizer | None, dtypes: Mapping[str, torch.dtype], folder: Path
) -> None:
    """Fills a checkpoint's tokenizer folder. Raises OSError."""
    if tokenizer is not None:
        tokenizer.save(folder)
    for name in (CONFIG, GENERATION, *TOKENIZER_FILES):
        if (source.path / name).exists() and not (folder / name).exists():
            (folder / name).write_bytes(read_folder_file(source.path / name))
    if dtypes:
        names = {dtype: name for name, dtype in DTYPE_NAMES.items()}
        (folder / DTYPES_FILE).write_text(
            json.dumps({name: names[dtype] for name, dtype in dtypes.items()}, indent=2)
        )


def tokenizer_of(folder: Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None where it has none that is known here."""
    for name, kind, path in (
        ("tokenizer.json", "HuggingFaceTokenizer", folder),
        ("tokenizer.model", "SentencePieceTokenizer", folder / "tokenizer.model"),
        ("merges.txt", "GPT2BPETokenizer", folder),
    ):
        if (folder / name).exists():
            read_folder_file(folder / name)  # refuses a link that leads out of the folder
            return build_tokenizer(kind, path)
    if (folder / PIECES).exists():
        read_folder_file(folder / PIECES)
        settings = folder / "tokenizer_config.json"
        lower = read_json(settings).get("do_lower_case", True) if settings.exists() else True
        return build_tokenizer(f"BertWordPiece{'LowerCase' if lower else 'Case'}", vocab_file=folder / PIECES)
    return None


def check_vocabulary(source: SourceFolder, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raises CheckpointError for a tokenizer with ids that the embedding has no row for."""
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise CheckpointError(
            f"the tokenizer in {source.path} has {tokenizer.vocab_size} entries, but the embedding has {vocab_size} "
            "rows; resize the embedding, or remove the tokenizer's files if they belong to another model"
        )


def saved_tokenizer(folder: Path | None) -> Tokenizer | None:
    """The tokenizer in a checkpoint's tokenizer folder, which may hold an origin without one."""
    return load_tokenizer(folder) if folder is not None and (folder / SPEC_FILE).exists() else None
