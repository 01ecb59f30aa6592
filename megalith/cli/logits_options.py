"""Options of `generate` and `rollout` that change the logits or end completions."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.cli.parser import Arguments
from megalith.errors import ConfigError

if TYPE_CHECKING:
    from megalith.data.tokenizers.tokenizer import Tokenizer
    from megalith.generation.requests import Sampling


def add_logits_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--min-p", type=float, default=0.0, help="drop tokens below this fraction of the highest probability")
    add(
        "--repetition-penalty", type=float, default=1.0, metavar="P",
        help="divide positive logits of tokens in the prompt or completion by P and multiply negative ones; 1: off",
    )  # fmt: skip
    add(
        "--presence-penalty", type=float, default=0.0, metavar="P",
        help="subtract P from the logits of tokens in the completion",
    )  # fmt: skip
    add(
        "--frequency-penalty", type=float, default=0.0, metavar="P",
        help="subtract P times a token's count in the completion from its logit",
    )  # fmt: skip
    add("--bad-word", action="append", metavar="TEXT", help="text that no completion contains; repeatable")
    add("--stop", action="append", metavar="TEXT", help="end a completion before this text; repeatable")


def add_json_schema_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json-schema", metavar="FILE",
        help="JSON Schema that completions follow; needs the extra grammar (llguidance)",
    )  # fmt: skip


def with_logits_options(sampling: Sampling, args: Arguments, tokenizer: Tokenizer) -> Sampling:
    """Return sampling settings with the options' values.

    Raises:
        ConfigError: if a value is out of range, or the schema cannot be read or is not supported.
    """
    from megalith.generation.logits_processing import LogitsProcessing, bad_word_ids
    from megalith.generation.stop_strings import StopStrings

    path, grammar = getattr(args, "json_schema", None), None
    if path is not None:
        from megalith.generation.grammar import GrammarCompiler, json_grammar

        grammar = GrammarCompiler(tokenizer).compile(json_grammar(_read_schema(path)))
    penalties = args.repetition_penalty, args.presence_penalty, args.frequency_penalty
    words = bad_word_ids(tokenizer, args.bad_word or ())
    processing = LogitsProcessing(*penalties, bad_words=words, grammar=grammar)
    stops = StopStrings(tokenizer, args.stop) if args.stop else None
    return replace(sampling, min_p=args.min_p, processing=processing, stop_strings=stops)


def _read_schema(path: str) -> dict:
    try:
        schema = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"--json-schema {path} cannot be read ({error}); pass a file with a JSON Schema"
        ) from None
    if not isinstance(schema, dict):
        raise ConfigError(
            f"--json-schema {path} contains a {type(schema).__name__}, but a JSON Schema is an object; pass "
            "another file"
        )
    return schema
