"""Options of `generate`, `serve` and `rollout` for speculative decoding."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megalith.cli.parser import Arguments

if TYPE_CHECKING:
    from megalith.data.tokenizers.open_tokenizer import Tokenizer
    from megalith.generation.speculation import Speculation


def add_speculation_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--speculative-method", default="none", choices=("none", "ngram", "draft_model", "mtp"),
        help="verify several draft tokens per step, copied from earlier text (ngram) or sampled from a smaller model "
        "or from the model's own MTP layers; the completions stay the same",
    )  # fmt: skip
    add("--num-speculative-tokens", type=int, default=4, metavar="N", help="drafts per step")
    add("--prompt-lookup-max", type=int, default=4, metavar="N", help="ngram: maximum n-gram length")
    add("--prompt-lookup-min", type=int, default=1, metavar="N", help="ngram: minimum n-gram length")
    add("--draft-model", metavar="FOLDER", help="draft_model: a run or Hugging Face folder, same tokenizer")


def speculation_of(args: Arguments, tokenizer: Tokenizer | None) -> Speculation | None:
    """Return the speculative decoding that the options select, or None if they select none."""
    from megalith.training.open_speculation import open_speculation

    return open_speculation(
        args.speculative_method,
        args.num_speculative_tokens,
        args.prompt_lookup_max,
        args.prompt_lookup_min,
        args.draft_model,
        tokenizer,
    )
