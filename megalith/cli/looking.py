"""`megalith config …`, `data show` and `plot`: what settings there are, what data and runs look like."""

from __future__ import annotations

import argparse
import json

from megalith.cli.parser import Arguments, group, leaf
from megalith.errors import ConfigError, DataError, printable


def add_commands(commands: argparse._SubParsersAction) -> None:
    _add_data_show(group(commands, "data", "look at data"))
    plotter = leaf(commands, "plot", "draw the curves of one or several runs", plot)
    plotter.add_argument("run_dir", nargs="+", help="output folders of runs")
    plotter.add_argument("--output", help="PNG file (default: loss.png in the first run's folder)")
    plotter.add_argument("--text", action="store_true", help="draw the loss in the terminal instead")
    config = group(commands, "config", "describe the configuration")
    leaf(config, "schema", "print the JSON Schema of run files, for editors", config_schema)
    leaf(config, "reference", "print the reference page of all settings", config_reference)
    leaf(config, "presets", "list the published model shapes", config_presets)


def _add_data_show(data: argparse._SubParsersAction) -> None:
    parser = leaf(data, "show", "print samples as training would read them", data_show)
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


def data_show(args: Arguments) -> int:
    from megalith.data.blend import render_samples, show_samples

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
