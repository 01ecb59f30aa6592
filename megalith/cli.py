"""The command line: one short function a subcommand. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from megalith.errors import LINES, ConfigError, DataError, MegalithError, printable

Arguments = argparse.Namespace

EXIT_CODES = """exit codes:
  0 done   1 unexpected error   2 configuration   3 data   4 checkpoint   5 training   6 a rank stands still
  with a checkpoint: 20 exit_interval   21 exit_duration_in_mins   22 SIGTERM   23 SIGUSR1   24 SIGINT
  without one: 143 SIGTERM, 130 SIGINT, where a second one came"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. A MegalithError is told in a sentence, without a traceback."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["train"]:  # its options are the configuration's own
            return train(arguments[1:])
        parsed = build_parser().parse_args(arguments)
        return parsed.run(parsed)
    except MegalithError as error:
        from megalith.runtime.failure import report

        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1


TRAIN_USAGE = """usage: megalith train [run.yaml] [--nproc N] [--section.key value …]

Trains as the run file says, with the settings on the command line in place of the file's. torchrun works as well.

processes:
  --nproc N                  start N processes on this machine, one a GPU
  --nnodes N                 of N machines, each of which runs the same command; MIN:MAX for as many as there are
  --max-restarts N           start again after a failure, up to N times, from the newest whole checkpoint
  --rdzv-endpoint HOST:PORT  where they meet, on one of them (default with --nnodes: MASTER_ADDR:MASTER_PORT)
"""


def train(arguments: list[str]) -> int:
    """`megalith train [run.yaml] [--nproc N] [--section.key value …]`"""
    if {"-h", "--help"} & set(arguments):
        from megalith.config.describe import help_text

        print(TRAIN_USAGE)
        print(help_text())
        return 0
    from megalith.config import RunConfig
    from megalith.config.run import begins_override

    launcher, arguments = _launcher_options().parse_known_args(arguments)
    path = arguments[0] if arguments and not begins_override(arguments[0]) else None
    config = RunConfig.load(path, arguments[1 if path else 0 :])
    if launcher.nproc is not None:
        from megalith.runtime.launch import launch

        command = ["-m", "megalith.cli", "train", *arguments]
        return launch(
            launcher.nproc,
            command,
            nnodes=launcher.nnodes,
            max_restarts=launcher.max_restarts,
            rdzv_endpoint=launcher.rdzv_endpoint or (_meeting_place() if launcher.nnodes != "1" else None),
        )
    from megalith.runtime.stops import exit_code
    from megalith.trainer import train

    return exit_code(train(config).ended)


def _launcher_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("megalith train", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--rdzv-endpoint")
    return parser


def _meeting_place() -> str | None:
    """Where a scheduler says that the machines of a job meet, if it does."""
    address = os.environ.get("MASTER_ADDR")
    return f"{address}:{os.environ.get('MASTER_PORT', 29500)}" if address else None


def generate(args: Arguments) -> int:
    from pathlib import Path

    from megalith.generate import generate
    from megalith.hardware import pick_device
    from megalith.loading import load_with_tokenizer

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
        from megalith.data.tokenizer import build_tokenizer

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
    )
    for number, ids in enumerate(texts):
        if number:
            print("-" * 80)
        print(printable(tokenizer.decode(ids), LINES))
    return 0


def data_show(args: Arguments) -> int:
    from megalith.data.show import render_samples, show_samples

    data_path = args.data_path[0] if len(args.data_path) == 1 else args.data_path
    try:
        indices = [int(i) for i in args.index.split(",")]
    except ValueError:
        raise ConfigError(f"--index is {args.index!r}; give whole numbers with commas, like 0,5,9") from None
    if not 0 <= args.seed < 2**32:
        raise ConfigError(f"--seed is {args.seed}; give one from 0 to 2^32 - 1")
    samples = show_samples(
        data_path, args.seq_length, args.seed, args.num_samples, args.split, args.which, indices
    )
    if args.json:
        print(json.dumps(samples))
        return 0
    decode = None
    if args.tokenizer_type:
        from megalith.data.tokenizer import build_tokenizer

        decode = build_tokenizer(args.tokenizer_type, args.tokenizer_model).decode
    print(render_samples(samples, decode))
    return 0


def plot(args: Arguments) -> int:
    from pathlib import Path

    from megalith.runtime.plot import loss_points, plot_run
    from megalith.runtime.text_curve import text_curve

    if args.text:
        for run in args.run_dir:
            print(text_curve(loss_points(run)))
        return 0
    output = args.output or Path(args.run_dir[0]) / "loss.png"
    try:
        print(printable(plot_run(args.run_dir, output)))
    except OSError as error:
        raise DataError(f"{output} cannot be written: {error.strerror}; choose another --output") from None
    return 0


def config_schema(args: Arguments) -> int:
    from megalith.config.describe import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    return 0


def config_reference(args: Arguments) -> int:
    from megalith.config.describe import reference_page

    print(reference_page(), end="")
    return 0


def config_presets(args: Arguments) -> int:
    from megalith.config.presets import PRESETS

    for name, fields in PRESETS.items():
        print(f"{name:14}", *(f"{key}={value}" for key, value in fields.items()))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand with its options; `train` is listed here and parsed by itself."""
    from megalith.bridge import commands as bridge
    from megalith.checkpoint.commands import add_checkpoint_commands
    from megalith.data import commands as prepare
    from megalith.parallel.commands import add_pipeline_show
    from megalith.parity.commands import add_parity_arguments

    parser = argparse.ArgumentParser(
        prog="megalith",
        description="Trains large transformers on any number of devices.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("train", help="train as a run file says; `megalith train --help` lists every setting")
    prepare.add_corpus_arguments(
        _leaf(
            commands, "corpus", "write Python's standard library as JSONL, a first corpus", prepare.run_corpus
        )
    )
    tokenizer = _group(commands, "tokenizer", "make a tokenizer")
    prepare.add_tokenizer_train_arguments(
        _leaf(tokenizer, "train", "train a byte-pair encoding of one's own", prepare.run_tokenizer_train)
    )
    prepare.add_preprocess_arguments(
        _leaf(commands, "preprocess", "tokenize JSONL into an indexed dataset", prepare.run_preprocess)
    )

    bridge.add_import_arguments(
        _leaf(commands, "import-hf", "write a Hugging Face model as a checkpoint", bridge.run_import)
    )
    bridge.add_megatron_arguments(
        _leaf(
            commands,
            "import-megatron",
            "write a checkpoint of Megatron-LM as one of ours",
            bridge.run_megatron,
        )
    )
    bridge.add_export_arguments(
        _leaf(commands, "export-hf", "write a checkpoint as a Hugging Face model", bridge.run_export)
    )

    lora = _group(commands, "lora", "adapters: write them for PEFT, merge them")
    bridge.add_lora_export_arguments(
        _leaf(lora, "export", "write a run's adapters in PEFT's format", bridge.run_lora_export)
    )
    bridge.add_lora_merge_arguments(
        _leaf(lora, "merge", "write base + adapters as a checkpoint", bridge.run_lora_merge)
    )

    pipeline = _group(commands, "pipeline", "look at pipeline schedules")
    add_pipeline_show(pipeline.add_parser("show", help="draw the timeline of a schedule, with its bubble"))

    add_parity_arguments(
        commands.add_parser("parity", help="compare a small run in many layouts with one process")
    )

    data = _group(commands, "data", "look at data")
    _add_data_show(_leaf(data, "show", "print samples as training would read them", data_show))

    _add_generate(_leaf(commands, "generate", "continue prompts with a trained model", generate))

    add_checkpoint_commands(_group(commands, "checkpoint", "look at checkpoints, and rewrite them"))

    plotter = _leaf(commands, "plot", "draw the curves of one or several runs", plot)
    plotter.add_argument("run_dir", nargs="+", help="output folders of runs")
    plotter.add_argument("--output", help="PNG file (default: loss.png in the first run's folder)")
    plotter.add_argument("--text", action="store_true", help="draw the loss in the terminal instead")

    config = _group(commands, "config", "describe the configuration")
    _leaf(config, "schema", "print the JSON Schema of run files, for editors", config_schema)
    _leaf(config, "reference", "print the reference page of all settings", config_reference)
    _leaf(config, "presets", "list the published model shapes", config_presets)
    return parser


def _add_data_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_path", nargs="+", help="dataset prefix, or a blend: 0.7 a 0.3 b")
    parser.add_argument("--seq-length", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument(
        "--num-samples", type=int, required=True, help="samples that the run asks of the split"
    )
    parser.add_argument("--split", default="99,1,0")
    parser.add_argument("--which", choices=("train", "valid", "test"), default="train")
    parser.add_argument("--index", default="0", help="samples to print, like 0,5,9")
    parser.add_argument("--json", action="store_true", help='print [{"index": i, "tokens": [...]}]')
    parser.add_argument("--tokenizer-type", help="also print the text")
    parser.add_argument("--tokenizer-model")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="run folder or one of its step folders")
    parser.add_argument("--prompt", action="append", help="text to continue; several make a batch")
    parser.add_argument("--prompt-file", help="file with a prompt a line")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: always the likeliest token")
    parser.add_argument("--top-k", type=int, default=0, help="only the k likeliest tokens; 0: all")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="only the likeliest tokens up to this probability"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tokenizer-type", help="a tokenizer in place of the checkpoint's own, as `preprocess` has it"
    )
    parser.add_argument("--tokenizer-model", help="its file or folder")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")


def _group(commands, name: str, help: str):
    return commands.add_parser(name, help=help).add_subparsers(required=True, metavar="command")


def _leaf(commands, name: str, help: str, run: Callable[[Arguments], int]) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help)
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
