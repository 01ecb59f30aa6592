"""`megalith generate`: a trained model continues prompts."""

from __future__ import annotations

import argparse

from megalith.cli.parser import Arguments, leaf
from megalith.errors import LINES, ConfigError, DataError, printable


def add_generate_command(commands: argparse._SubParsersAction) -> None:
    parser = leaf(commands, "generate", "continue prompts with a trained model", run_generate)
    parser.add_argument("checkpoint", help="run folder or one of its step folders")
    parser.add_argument("--prompt", action="append", help="text to continue; several make a batch")
    parser.add_argument("--prompt-file", help="file with a prompt a line")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="most tokens to add")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="only the k likeliest tokens; 0: all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="only the likeliest tokens up to this probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random choices")
    parser.add_argument(
        "--tokenizer-type", help="overrides the checkpoint's tokenizer, with `preprocess`'s choices"
    )
    parser.add_argument("--tokenizer-model", help="its file or folder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def run_generate(args: Arguments) -> int:
    from pathlib import Path

    from megalith.generation.sampling import generate
    from megalith.hardware import pick_device
    from megalith.training.loading import load_with_tokenizer

    prompts = list(args.prompt or [])
    if args.prompt_file:
        try:
            prompts += Path(args.prompt_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the prompts cannot be read: {error}; give a text file in UTF-8") from None
    if not prompts:
        raise ConfigError(
            "there is no prompt; give --prompt TEXT, several times for a batch, or --prompt-file"
        )
    model, tokenizer = load_with_tokenizer(args.checkpoint, pick_device(args.device))
    if args.tokenizer_type:
        from megalith.data.tokenizers.open_tokenizer import build_tokenizer

        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
    if tokenizer is None:
        raise ConfigError(
            f"{args.checkpoint} carries no tokenizer; name the one that it was trained with by --tokenizer-type and "
            "--tokenizer-model"
        )
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size:,} entries and the model {model.config.vocab_size:,}; name the "
            "tokenizer that it was trained with"
        )
    texts = generate(
        model,
        [tokenizer.encode(prompt) for prompt in prompts],
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        eod=tokenizer.eod,
        vocab_size=tokenizer.vocab_size,
    )
    for number, ids in enumerate(texts):
        if number:
            print("-" * 80)
        print(printable(tokenizer.decode(ids), LINES))
    return 0
