"""Builds tokenizers by kind, or from a folder written by `Tokenizer.save` (as in checkpoints).

The names of the kinds are Megatron's. Only Llama2Tokenizer and Llama3Tokenizer add a special token when they encode, at
the beginning of a text. The end-of-document token is added by preprocessing.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from megalith.data.tokenizers.tokenizer import SPEC_FILE, Tokenizer, TokenizerPaths, read_file, read_json
from megalith.errors import ConfigError, DataError, nearest_of

__all__ = ["TOKENIZER_TYPES", "Tokenizer", "build_tokenizer", "load_tokenizer"]

TOKENIZER_TYPES: dict[str, str] = {  # kind → module, imported on demand
    "HuggingFaceTokenizer": "megalith.data.tokenizers.huggingface",
    "SentencePieceTokenizer": "megalith.data.tokenizers.sentencepiece",
    "Llama2Tokenizer": "megalith.data.tokenizers.sentencepiece",
    "GPT2BPETokenizer": "megalith.data.tokenizers.huggingface",
    "BertWordPieceLowerCase": "megalith.data.tokenizers.huggingface",
    "BertWordPieceCase": "megalith.data.tokenizers.huggingface",
    "Llama3Tokenizer": "megalith.data.tokenizers.tiktoken",
    "TikTokenizer": "megalith.data.tokenizers.tiktoken",
    "ByteTokenizer": "megalith.data.tokenizers.plain",
    "NullTokenizer": "megalith.data.tokenizers.plain",
}


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | Path | None = None,
    *,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
    vocab_size: int | None = None,
    section: str = "",
) -> Tokenizer:
    """Return the tokenizer of kind `tokenizer_type`.

    Args:
        tokenizer_type: a key of TOKENIZER_TYPES.
        tokenizer_model: the files. HuggingFaceTokenizer: a tokenizer.json, a folder with one, or a hub name.
            SentencePieceTokenizer and Llama2Tokenizer: a .model file. TikTokenizer: a .tiktoken file or Megatron's
            JSON list. Llama3Tokenizer: Meta's tokenizer.model. GPT2BPETokenizer: the folder of vocab.json and
            merges.txt.
        vocab_file: GPT2BPETokenizer: vocab.json. BertWordPieceLowerCase and BertWordPieceCase: BERT's vocab.txt.
        merge_file: GPT2BPETokenizer: merges.txt.
        vocab_size: NullTokenizer (required), and TikTokenizer with the JSON list; other kinds ignore it.
        section: prefix of the arguments' names in errors, such as `data.`.

    Raises:
        ConfigError: for an unknown kind, or a missing argument or package.
        DataError: for a missing or damaged file.
    """
    vocab_file, merge_file, model = (
        None if path is None else str(path) for path in (vocab_file, merge_file, tokenizer_model)
    )
    paths = TokenizerPaths(model, vocab_file, merge_file, vocab_size)
    try:
        tokenizer = _tokenizer_class(tokenizer_type).from_paths(paths)
    except DataError as error:
        named = {"tokenizer_model": model, "vocab_file": vocab_file, "merge_file": merge_file}
        names = [name for name, path in named.items() if path is not None and path in str(error)]
        if not names:
            raise
        raise DataError(f"{section}{names[0]}: {error}") from error
    tokenizer.path = model or vocab_file or ""
    return tokenizer


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer saved by `Tokenizer.save(folder)`. Raise DataError if it is missing, damaged or changed."""
    folder = Path(folder)
    spec_path = folder / SPEC_FILE
    spec = read_json(read_file(spec_path, "tokenizer spec", folder), f"tokenizer spec {str(spec_path)!r}")
    try:
        kind = _tokenizer_class(spec["tokenizer_type"])
        vocab_size, fingerprint = spec["requested_vocab_size"], spec["fingerprint"]
        if vocab_size is not None and (type(vocab_size) is not int or not 0 < vocab_size < 2**31):
            raise TypeError(f"requested_vocab_size is {vocab_size!r}")
    except (TypeError, KeyError, ConfigError) as error:
        raise DataError(
            f"the tokenizer spec {str(spec_path)!r} is incomplete ({error}); save the tokenizer again"
        ) from error
    names = [*kind.required_files, *(name for name in kind.optional_files if (folder / name).exists())]
    tokenizer = kind({name: read_file(folder / name, "tokenizer file", folder) for name in names}, vocab_size)
    tokenizer.path = str(folder)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(
            f"the tokenizer in {str(folder)!r} has fingerprint {tokenizer.fingerprint[:12]}, but was saved "
            f"with {str(fingerprint)[:12]}: a file was changed or damaged since; restore it or save it again"
        )
    return tokenizer


def _tokenizer_class(name: str) -> type[Tokenizer]:
    if name not in TOKENIZER_TYPES:
        raise ConfigError(f"tokenizer_type {name!r} is unknown{nearest_of(name, TOKENIZER_TYPES)}")
    return getattr(importlib.import_module(TOKENIZER_TYPES[name]), name)
