"""`megalith chat`: talk to a trained model in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from megalith.cli.generation import TokenPrinter, checkpoint_tokenizer
from megalith.cli.json_output import add_json_option, print_json
from megalith.cli.parser import Arguments
from megalith.cli.sampling_options import add_model_arguments, add_sampling_options, add_tokenizer_options
from megalith.errors import LINES, ConfigError, printable


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--message", action="append", metavar="TEXT",
        help="user message; repeat it for further turns. Default: lines of standard input")  # fmt: skip
    add("--system", metavar="TEXT", help="system message")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="maximum number of tokens of a turn")
    add_sampling_options(parser, temperature=0.7)
    add("--seed", type=int, default=0, help="sampling seed")
    add_tokenizer_options(parser)
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_json_option(parser, "messages (the conversation)")


def run_chat(args: Arguments) -> int:
    from megalith.generation.requests import Sampling
    from megalith.hardware import pick_device
    from megalith.serve.chat_session import ChatSession
    from megalith.training.loading import load_with_adapter

    device = pick_device(args.device, 0)
    model, tokenizer = load_with_adapter(args.checkpoint, args.adapter, device, show_progress=True)
    if model.config.encoder_layers:
        raise ConfigError(
            f"{args.checkpoint} is an encoder-decoder, which cannot chat; use `megalith generate` to continue texts"
        )
    tokenizer = checkpoint_tokenizer(args, tokenizer, model.config.vocab_size)
    sampling = Sampling(args.max_new_tokens, args.temperature, args.top_k, args.top_p, seed=args.seed)
    chat = ChatSession(model, tokenizer, sampling, args.system)
    for message in _messages(args):
        if args.json:
            chat.say(message)
            continue
        chat.say(message, TokenPrinter(tokenizer, [], prints=True))
        print()
    if args.json:
        print_json({"messages": chat.messages})
    return 0


def _messages(args: Arguments) -> Iterator[str]:
    """Yield each --message, after printing it, or without this option the lines of standard input."""
    if args.message:
        for message in args.message:
            if not args.json:
                print(f"> {printable(message, LINES)}", flush=True)
            yield message
        return
    is_terminal = sys.stdin.isatty() and not args.json
    if is_terminal:
        print("Type a message. End with Ctrl-D.", file=sys.stderr)
    while True:
        if is_terminal:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
