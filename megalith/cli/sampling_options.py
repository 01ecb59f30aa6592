"""Options shared by the commands that sample: the model, the sampling distribution and the tokenizer."""

from __future__ import annotations

import argparse


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and its adapters."""
    parser.add_argument("checkpoint", help="run folder or one of its step folders, or a Hugging Face folder")
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="adapters to merge: a PEFT folder, or a run with lora.rank"
    )


def add_sampling_options(parser: argparse.ArgumentParser, temperature: float = 1.0) -> None:
    """Add temperature, top-k and top-p. `temperature` is the default."""
    add = parser.add_argument
    add("--temperature", type=float, default=temperature, help="sampling temperature; 0: greedy")
    add("--top-k", type=int, default=0, help="sample from the k most likely tokens; 0: all")
    add(
        "--top-p", type=float, default=1.0,
        help="sample from the most likely tokens up to this total probability",
    )  # fmt: skip


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the tokenizer that replaces the checkpoint's."""
    add = parser.add_argument
    add("--tokenizer-type", help="replace the checkpoint's tokenizer; choices as in `preprocess`")
    add("--tokenizer-model", help="file or folder of that tokenizer")
