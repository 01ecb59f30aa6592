"""The command line: one short function a subcommand. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import megalith
from megalith.errors import LINES, ConfigError, DataError, MegalithError, did_you_mean, printable
from megalith.launch.parent import end_with_launcher
from megalith.report.streams import lasting_streams

Arguments = argparse.Namespace

EXIT_CODES = """exit codes:
  0 done   1 unexpected error   2 configuration   3 data   4 checkpoint   5 training   6 a rank hangs
  stopped, with a checkpoint unless checkpoint.save_when_stopped says otherwise:
           20 exit_interval   21 exit_duration_in_mins   22 SIGTERM   23 SIGUSR1   24 SIGINT   25 SIGHUP
  without one: 143 SIGTERM, 130 SIGINT, where a second one came; 137 SIGKILL, as where host memory runs out"""


class Parser(argparse.ArgumentParser):
    """A command or a group of commands. A mistake is a ConfigError like any other; a group alone shows its help."""

    commands: Any = None
    """Of a group: argparse's action that has them."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.set_defaults(parser=self, takes_settings=False)

    def add_subparsers(self, **options: Any) -> Any:
        self.commands = super().add_subparsers(**options)
        return self.commands

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """As argparse has it, with the default at the end of the help."""
        default, text = options.get("default"), options.get("help") or ""
        if default not in (None, argparse.SUPPRESS) and "(default" not in text:
            options["help"] = f"{text} (default: %(default)s)".lstrip()
        return super().add_argument(*names, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.commands is not None:
            if not args:
                self.print_help()
                self.exit()
            known = self.commands.choices
            if args[0] not in known and not args[0].startswith("-"):
                hint = did_you_mean(args[0], known) or f"; `{self.prog} --help` lists them all"
                raise ConfigError(f"there is no command `{self.prog} {args[0]}`{hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` says what it takes")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Refuses words that are no arguments of this command, with the nearest that is one."""
        known = set(re.findall(r"--[a-z][-a-z0-9]*", self.format_help()))
        hint = did_you_mean(words[0].partition("=")[0], known) or f"; `{self.prog} --help` says what it takes"
        raise ConfigError(f"`{self.prog}` takes no {' '.join(words)!r}{hint}")


class ShowVersion(argparse.Action):
    """Prints the versions that a report of a fault should name."""

    def __call__(self, parser: argparse.ArgumentParser, *ignored: Any) -> None:
        from importlib.metadata import version

        python = sys.version.partition(" ")[0]
        print(f"megalith {megalith.__version__}, torch {version('torch')}, Python {python}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand. A MegalithError is printed as its sentence, without a traceback."""
    end_with_launcher()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    own = {
        **dict.fromkeys(("train", "sft", "grpo"), train),
        **dict.fromkeys((*MEGATRON_PROGRAMS, "megatron"), megatron),
    }  # they read their own options
    if not arguments or arguments[0] not in own:
        return _told(lambda: _run_subcommand(arguments))
    with lasting_streams():
        return _told(lambda: own[arguments[0]](arguments))


def _run_subcommand(arguments: list[str]) -> int:
    parsed, more = build_parser().parse_known_args(arguments)
    if parsed.takes_settings:
        parsed.settings = more
    elif more:
        parsed.parser.refuse(more)
    return parsed.run(parsed)


def _told(run: Callable[[], int]) -> int:
    """The exit code of `run`, whose errors are printed."""
    try:
        return run()
    except MegalithError as error:
        from megalith.launch.failure import report

        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return 1


TRAIN_USAGE = """usage: megalith train|sft|grpo [run.yaml] [--nproc N] [--section.key value …]

`sft` fine-tunes on conversations: it is `train` with sft.enabled.
Trains as the run file says, with the settings on the command line in place of the file's. torchrun works as well.
`grpo` trains on rollouts (rl.rollouts) by GRPO and its kin.

processes:
  --nproc N                  start N processes on this machine, one a GPU
  --nnodes N                 of N machines, each of which runs the same command; MIN:MAX for as many as there are
  --max-restarts N           start again after a failure, up to N times, from the newest whole checkpoint
  --rdzv-endpoint HOST:PORT  rendezvous, on one of them (default with --nnodes: MASTER_ADDR:MASTER_PORT)
  --rdzv-id ID               the job's name there, the same on each (default: made of the command)
"""


MEGATRON_PROGRAMS = ("pretrain-gpt", "pretrain-bert", "pretrain-t5")


def megatron(words: list[str]) -> int:
    """`megalith pretrain-gpt FLAGS`, `megalith megatron run|install|flags …`"""
    from megalith.dialects.megatron import door

    if words[0] == "megatron":
        words = words[1:]
        if not words or words[0] in ("-h", "--help"):
            print(door.__doc__)
            return 0
    return door.run_command(words)


def train(arguments: list[str]) -> int:
    """`megalith train|sft|grpo [run.yaml] [--nproc N] [--section.key value …]`"""
    program, *arguments = arguments
    if program == "sft":  # `train` on conversations
        program, arguments = "train", [*arguments, "--sft.enabled"]
    if {"-h", "--help"} & set(arguments):
        from megalith.config.describe import help_text

        print(TRAIN_USAGE)
        print(help_text())
        return 0
    _say_that_it_starts(program, arguments)
    from megalith.config import RunConfig
    from megalith.config.run import begins_override

    launcher, arguments = _launcher_options().parse_known_args(arguments)
    path = arguments[0] if arguments and not begins_override(arguments[0]) else None
    config = RunConfig.load(path, arguments[1 if path else 0 :])
    if launcher.nproc is not None:
        from megalith.launch.launcher import launch
        from megalith.training.precheck import check_job

        one_machine = launcher.nnodes == "1"
        command, check_data = ["-m", "megalith.cli", program, *arguments], None
        if program == "grpo":
            from megalith.rl.grpo import open_rollouts as check_data
            from megalith.rl.grpo import require_rollouts

            require_rollouts(config)
        return launch(
            launcher.nproc,
            command,
            nnodes=launcher.nnodes,
            max_restarts=launcher.max_restarts,
            rdzv_endpoint=launcher.rdzv_endpoint or (None if one_machine else _meeting_place()),
            rdzv_id=launcher.rdzv_id,
            check=lambda world_sizes: check_job(config, world_sizes, launcher.nproc, one_machine, check_data),
        )
    from megalith.launch.stops import exit_code
    from megalith.training.trainer import train

    if program == "grpo":
        from megalith.rl.grpo import train_grpo as train
    return exit_code(train(config).ended)


def _say_that_it_starts(program: str, arguments: list[str]) -> None:
    """A line on the first rank's screen: what is imported next takes seconds."""
    rank, ranks = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if rank == "0":
        who = f"rank 0 of {ranks}" if ranks != "1" else " ".join([program, *arguments[:1]])
        with contextlib.suppress(OSError):  # a screen that is gone is no reason not to train
            print(f"megalith {megalith.__version__}: {who}, loading PyTorch", flush=True)


def _launcher_options() -> Parser:
    parser = Parser("megalith train", add_help=False, allow_abbrev=False)
    parser.add_argument("--nproc", type=int)
    parser.add_argument("--nnodes", default="1")
    parser.add_argument("--max-restarts", type=int, default=0)
    parser.add_argument("--rdzv-endpoint")
    parser.add_argument("--rdzv-id")
    return parser


def _meeting_place() -> str | None:
    """Where a scheduler says that the machines of a job meet, if it does."""
    address = os.environ.get("MASTER_ADDR")
    return f"{address}:{os.environ.get('MASTER_PORT', 29500)}" if address else None


def generate(args: Arguments) -> int:
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


def evaluate(args: Arguments) -> int:
    from megalith.bridge.load import config_of
    from megalith.checkpoint.open import open_existing
    from megalith.config import RunConfig
    from megalith.config.run import parse_overrides

    checkpoint = open_existing(args.checkpoint, None)
    tree = config_of(checkpoint).to_tree() | {"parallel": {}}
    for section, key, value in parse_overrides(args.settings):
        tree.setdefault(section, {})[key] = value
    tree["train"] |= {"skip_train": True, "rampup_batch_size": None, "step_batch_size_schedule": None}
    tree["checkpoint"] = {"load": args.checkpoint, "load_optim": False}
    config = RunConfig.from_tree(tree)
    if args.nproc is not None:
        from megalith.launch.launcher import launch
        from megalith.training.precheck import check_job

        json_too = ["--json"] if args.json else []
        return launch(
            args.nproc,
            ["-m", "megalith.cli", "evaluate", args.checkpoint, *json_too, *args.settings],
            check=lambda world_sizes: check_job(config, world_sizes, args.nproc, True),
        )
    from megalith.launch.stops import exit_code
    from megalith.report.metrics import finite, perplexity
    from megalith.training.trainer import train

    result = train(config)
    if args.json and os.environ.get("RANK", "0") == "0":
        losses = {"validation": result.validation_loss, "test": result.test_loss}
        known = {name: loss for name, loss in losses.items() if loss is not None}
        figures = {f"{name}_loss": finite(loss) for name, loss in known.items()}
        figures |= {f"{name}_perplexity": finite(perplexity(loss)) for name, loss in known.items()}
        print(json.dumps({"step": result.step, **figures}))
    return exit_code(result.ended)


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
        from megalith.data.tokenizers.open_tokenizer import build_tokenizer

        decode = build_tokenizer(args.tokenizer_type, args.tokenizer_model).decode
    print(render_samples(samples, decode))
    return 0


def plot(args: Arguments) -> int:
    from pathlib import Path

    from megalith.report.plot import loss_points, plot_run, text_curve

    if args.text:
        for run in args.run_dir:
            print(*([run] if len(args.run_dir) > 1 else []), text_curve(loss_points(run)), sep="\n")
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

    rows = [PRESET_COLUMNS, *(_preset_row(name) for name in PRESETS)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for name, *cells in rows:
        print(name.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:])), sep="  ")
    return 0


PRESET_COLUMNS = ("preset", "parameters", "active", "layers", "hidden", "heads", "KV", "MLP", "experts",
                  "vocabulary", "positions")  # fmt: skip


def _preset_row(name: str) -> tuple[str, ...]:
    from megalith.config import RunConfig
    from megalith.planner.counts import count_parameters
    from megalith.report.console import si

    model = RunConfig.from_tree({"model": {"preset": name}}).model
    given = {
        "vocab_size": model.vocab_size or 0,
        "max_position_embeddings": model.max_position_embeddings or 0,
    }
    counts = count_parameters(model.model_copy(update=given), padded_vocab=False)
    experts = f"{model.num_experts} × {model.expert_size}, {model.moe_router_topk} a token"
    sizes = (
        model.num_layers,
        model.hidden_size,
        model.num_attention_heads,
        model.query_groups,
        model.ffn_size,
    )
    return (
        name,
        si(counts.total) + ("" if model.vocab_size else " + vocabulary"),
        si(counts.active) if counts.idle else "",
        *map(str, sizes),
        experts if model.num_experts else "",
        f"{model.vocab_size:,}" if model.vocab_size else "tokenizer's",
        f"{model.max_position_embeddings:,}" if model.max_position_embeddings else "seq_length",
    )


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand with its options; `train` is listed here and parsed by itself."""
    from megalith.cli import conversion as bridge
    from megalith.cli import datasets as prepare
    from megalith.cli.checkpoints import add_checkpoint_commands
    from megalith.cli.parity_runs import add_parity_arguments
    from megalith.cli.pipelines import add_pipeline_show

    parser = Parser(
        prog="megalith",
        description="Trains large transformers on any number of devices.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version")
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("train", help="train as a run file says; `megalith train --help` lists every setting")
    commands.add_parser("sft", help="fine-tune on conversations as a run file says; takes what `train` takes")
    commands.add_parser("grpo", help="train on rollouts by GRPO, as a run file says")
    commands.add_parser("pretrain-gpt", help="train by Megatron-LM's flags")
    for program in MEGATRON_PROGRAMS[1:]:
        commands.add_parser(program, help="Megatron-LM's program of this name: says that it is not there yet")
    commands.add_parser(
        "megatron", help="run Megatron-LM's scripts, install its programs' names, list its flags"
    )
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

    bridge.add_megatron_export_arguments(
        _leaf(
            commands,
            "export-megatron",
            "write a checkpoint as one that Megatron-LM loads",
            bridge.run_megatron_export,
        )
    )
    bridge.add_convert_arguments(
        _leaf(commands, "convert", "convert between Hugging Face, Megatron-LM and ours", bridge.run_convert)
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
    _add_evaluate(_leaf(commands, "evaluate", "the loss and perplexity of a checkpoint", evaluate))

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
    parser.add_argument("--seq-length", type=int, required=True, help="tokens of a sample, less one")
    parser.add_argument("--seed", type=int, default=1234, help="the run's train.seed")
    parser.add_argument(
        "--num-samples", type=int, required=True, help="samples that the run asks of the split"
    )
    parser.add_argument("--split", default="99,1,0", help="the run's data.split")
    parser.add_argument("--which", choices=("train", "valid", "test"), default="train", help="the part of it")
    parser.add_argument("--index", default="0", help="samples to print, like 0,5,9")
    parser.add_argument("--json", action="store_true", help='print [{"index": i, "tokens": [...]}]')
    parser.add_argument("--tokenizer-type", help="also print the text")
    parser.add_argument("--tokenizer-model", help="its file or folder")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "The mean loss and perplexity of a checkpoint on the validation and the test data of its run, in one process "
        "or any layout: `--section.key value` changes its settings, as to `train`. Nothing is written."
    )
    parser.add_argument("checkpoint", help="a run's folder, or one of its steps")
    parser.add_argument("--nproc", type=int, help="start so many processes; torchrun works as well")
    parser.add_argument("--json", action="store_true", help="also print an object with the figures")
    parser.set_defaults(takes_settings=True)


def _add_generate(parser: argparse.ArgumentParser) -> None:
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


def _group(commands, name: str, help: str):
    return commands.add_parser(name, help=help).add_subparsers(required=True, metavar="command")


def _leaf(commands, name: str, help: str, run: Callable[[Arguments], int]) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help)
    parser.set_defaults(run=run)
    return parser
