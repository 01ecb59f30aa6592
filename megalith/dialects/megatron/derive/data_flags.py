"""Settings of the tokenizer and the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags


TOKENIZERS = {
    "GPT2BPETokenizer": "GPT2BPETokenizer",
    "HuggingFaceTokenizer": "HuggingFaceTokenizer",
    "SentencePieceTokenizer": "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "Llama2Tokenizer",
    "Llama3Tokenizer": "Llama3Tokenizer",
    "BertWordPieceLowerCase": "BertWordPieceLowerCase",
    "BertWordPieceCase": "BertWordPieceCase",
    "TikTokenizer": "TikTokenizer",
    "NullTokenizer": "NullTokenizer",
}


def tokenizer(flags: ParsedFlags) -> None:
    """Set data.tokenizer_type.

    The default is GPT2BPETokenizer with --vocab-file and --merge-file. For pretrain_bert and pretrain_t5 it is
    BertWordPieceLowerCase with --vocab-file.
    """
    kind = flags["--tokenizer-type"]
    if kind is None and flags.program != "pretrain-gpt" and "--vocab-file" in flags:
        kind = "BertWordPieceLowerCase"
    if kind is None and "--vocab-file" in flags and "--merge-file" in flags:
        kind = "GPT2BPETokenizer"
    if kind is None:
        return
    if kind not in TOKENIZERS:
        flags.problems.append(f"--tokenizer-type {kind} is not supported; use one of {', '.join(TOKENIZERS)}")
        return
    flags.set("data.tokenizer_type", TOKENIZERS[kind])


def lengths(flags: ParsedFlags) -> None:
    """Set data.seq_length and model.num_layers, also from the encoder's flags.

    A hybrid pattern determines the number of layers.
    """
    is_hybrid = any(flags[f"--hybrid-{name}-pattern"] is not None for name in ("layer", "override"))
    for flag, older, path in (
        ("--seq-length", "--encoder-seq-length", "data.seq_length"),
        ("--num-layers", "--encoder-num-layers", "model.num_layers"),
    ):
        values = {flags[name] for name in (flag, older)} - {None}
        if len(values) > 1:
            flags.problems.append(
                f"{flag} {flags[flag]} and {older} {flags[older]} contradict each other; keep one of them"
            )
        if path == "model.num_layers" and (is_hybrid or flags.program == "pretrain-t5"):
            continue
        for value in values:
            flags.set(path, value)


def datasets(flags: ParsedFlags) -> None:
    """Set data.data_path and data.split, or the data paths of each split, from flags or from a file."""
    joint = [
        flag for flag in ("--data-path", "--data-args-path", "--per-split-data-args-path") if flags[flag]
    ]
    split_flags = [
        flag for flag in ("--train-data-path", "--valid-data-path", "--test-data-path") if flags[flag]
    ]
    if len(joint) > 1 or (joint and split_flags) or (flags["--mock-data"] and (joint or split_flags)):
        names = [*joint, *split_flags, *(["--mock-data"] if flags["--mock-data"] else [])]
        flags.problems.append(
            f"{' and '.join(names)} contradict each other, because each of them names training data; keep one of them"
        )
        return
    if flags["--data-path"]:
        _set_data(flags, "data_path", flags["--data-path"])
    elif flags["--data-args-path"]:
        _set_data(flags, "data_path", _text(flags, "--data-args-path").split())
    elif flags["--per-split-data-args-path"]:
        try:
            parts = json.loads(_text(flags, "--per-split-data-args-path") or "{}")
            for part, key in (
                ("train", "train_data_path"),
                ("valid", "valid_data_path"),
                ("test", "test_data_path"),
            ):
                if words := parts.get(part):
                    words = words.split() if isinstance(words, str) else [str(word) for word in words]
                    _set_data(flags, key, words)
        except (ValueError, AttributeError, TypeError):
            flags.problems.append(
                f"--per-split-data-args-path {flags['--per-split-data-args-path']} is not a JSON object with "
                "lists or strings under train, valid and test; correct the file"
            )
    for flag in split_flags:
        _set_data(flags, flag.removeprefix("--").replace("-", "_"), flags[flag])
    if "data_path" in flags.tree.get("data", {}):
        flags.set("data.split", flags["--split"] or "969,30,1")


def attention_mask(flags: ParsedFlags) -> None:
    """Set data.reset_attention_mask, unless --no-create-attention-mask-in-dataloader leaves Megatron without a mask."""
    if not flags["--reset-attention-mask"]:
        return
    if flags["--no-create-attention-mask-in-dataloader"]:
        flags.notes.append(
            "--reset-attention-mask has no effect with --no-create-attention-mask-in-dataloader, as in Megatron: "
            "attention crosses the ends of documents; remove the latter to keep attention within documents"
        )
        return
    flags.set("data.reset_attention_mask", True)
    flags.notes.append(
        "--reset-attention-mask keeps attention within documents; Megatron's Transformer Engine and fused softmax "
        "ignore its mask, so Megatron's losses may differ"
    )


def _set_data(flags: ParsedFlags, name: str, words: list[str]) -> None:
    if any(word.split() != [word] for word in words):  # in a string, spaces separate paths
        flags.set(f"data.{name}", words)
    else:
        flags.set(f"data.{name}", " ".join(words))


def _text(flags: ParsedFlags, flag: str) -> str:
    try:
        return Path(flags[flag]).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        flags.problems.append(f"{flag} {flags[flag]} cannot be read: {error}; correct the path")
        return ""
