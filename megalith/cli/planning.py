"""`megalith plan …` and `megalith pipeline show`. Importing this file is cheap."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from megalith.cli.parser import Arguments, Parser, option_strings
from megalith.errors import ConfigError, DataError
from megalith.io import write_file


def run_calibrate(args: Arguments) -> int:
    _check_bounds(args, "seconds")
    if args.nproc is not None:
        from megalith.launch.launcher import launch

        command = ["-m", "megalith", "plan", "calibrate", "--seconds", str(args.seconds)]
        return launch(args.nproc, [*command, *(["--output", args.output] if args.output else [])])
    from megalith.hardware import pick_device
    from megalith.launch.launcher import end_distributed, init_distributed, this_process
    from megalith.planner.calibrate import calibrate

    process = this_process()
    device = pick_device("auto", process.local_rank)
    init_distributed(device)
    table = calibrate(device, args.seconds, show_progress=process.is_first).to_json()
    if process.is_first:
        if args.output:
            try:
                write_file(Path(args.output), table)
            except OSError as error:
                print(table)
                raise ConfigError(
                    f"{args.output} cannot be written: {error.strerror}; the table is printed above"
                ) from None
        print(args.output or table)
    end_distributed()
    return 0


def _calibrate_options(parser: Parser) -> None:
    parser.description = "Measure this machine's rates for --device-json. Takes about three minutes."
    parser.add_argument(
        "--nproc", type=int, help="start N processes, one per GPU, and measure collectives too"
    )
    parser.add_argument("--output", help="JSON file (default: print the table)")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="approximate time for GEMMs and attention"
    )


def _job_options(parser: Parser) -> None:
    """Add the options for a job's model, size and devices."""
    parser.add_argument("job", help="a run file, or the name of a preset (`megalith config presets`)")
    parser.add_argument("--gpus", type=int, required=True, help="number of GPUs of the job")
    parser.add_argument(
        "--device", help="GPU name as in the driver, or H100, A100-40GB, B200, … (default: H200)"
    )
    parser.add_argument(
        "--device-json", help="rates measured by `megalith plan calibrate`, instead of --device"
    )
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs per node, connected by NVLink")
    parser.add_argument(
        "--memory-gb", type=float, metavar="GB", help="memory per GPU that the job may use (default: all)"
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        help="sequence length (default: the run file's; for presets, the model's, at most 8,192)",
    )
    parser.add_argument("--global-batch-size", type=int, help="sequences per step (default: the run file's)")
    parser.add_argument(
        "--tokens", type=float, help="number of training tokens; prints the days that they take"
    )
    parser.add_argument(
        "--price-per-gpu-hour",
        type=float,
        help=("price of a GPU for an hour; prints the cost, with --tokens"),
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of tables")
    parser.add_argument(
        "--png", metavar="FILE", help="draw memory by stage, the pipeline, and the best layouts"
    )


def _layout_options(parser: Parser) -> None:
    parser.description = (
        "List the layouts of a job that are valid and fit, fastest first. See also `plan show --help` (one layout), "
        "`plan goodput --help` (failures and saves) and `plan calibrate --help` (this machine's rates). "
        "`--section.key value` overrides settings, as for `train`."
    )
    _job_options(parser)
    parser.add_argument("--top", type=int, default=10, help="number of layouts to show")
    parser.add_argument(
        "--explain",
        action="store_true",
        help=("explain why the other layouts are slower, do not fit, or are invalid"),
    )
    parser.add_argument("--write", metavar="FILE", help="write the run file with the best layout")
    parser.add_argument(
        "--longest", action="store_true", help="find the longest sequence for which a layout fits"
    )


def run_layouts(args: Arguments) -> int:
    from megalith.planner.longest_sequence import longest_sequence
    from megalith.planner.plan_text import plan_json, plan_text
    from megalith.planner.search import plan

    _check_bounds(args, "top")
    config, rates = _job(args)
    _print_chosen_layout(args)
    if args.longest:
        answer = longest_sequence(
            config, args.gpus, rates, args.gpus_per_node, args.memory_gb, show_progress=True
        )
        if answer is None:
            raise ConfigError(
                f"even a sequence of 1,024 tokens does not fit on {args.gpus} {rates.device}; "
                "use more GPUs, or GPUs with more memory"
            )
    else:
        options = dict(rates=rates, gpus_per_node=args.gpus_per_node, memory_gb=args.memory_gb, top=args.top)
        answer = plan(config, args.gpus, show_progress=True, **options)
    # Draw and write first: a reader of the output that stops early ends the command.
    if answer.best and args.png:
        _draw(answer, args.png)
    if answer.best and args.write:
        _write(answer, args)
    if args.json:
        print(json.dumps(plan_json(answer, args.tokens, args.price_per_gpu_hour)))
    else:
        if args.longest:
            print(
                f"longest sequence: {answer.config.data.seq_length:,} tokens, accurate to an eighth or 1,024 tokens"
            )
        print(plan_text(answer, args.tokens, args.price_per_gpu_hour, args.explain))
    return 0 if answer.best else ConfigError.exit_code


def _print_chosen_layout(args: Arguments) -> None:
    """Print a note on settings of the command line that the search overrides."""
    from megalith.config.run import parse_overrides
    from megalith.planner.candidates import OFFLOADED, SEARCHED_DEFAULTS

    settings = [f"{section}.{name}" for section, name, _ in parse_overrides(args.settings)]
    chosen = [name for name in settings if name in (*SEARCHED_DEFAULTS, *OFFLOADED, "train.micro_batch_size")]
    if chosen:
        print(
            f"note: the plan ignores {', '.join(chosen)} and chooses its own values; "
            "`megalith plan show` evaluates one layout",
            file=sys.stderr,
        )


def run_show(args: Arguments) -> int:
    from megalith.planner.fit import fit_sentence
    from megalith.planner.plan_result import PlanResult
    from megalith.planner.plan_text import layout_cells, layout_details, layout_json
    from megalith.planner.search import planned, usable_bytes
    from megalith.tables import format_si, wrap_paragraph

    config, rates = _job(args)
    layout = planned(config, args.gpus, rates, args.gpus_per_node, args.memory_gb)
    usable = usable_bytes(rates, args.memory_gb)
    answer = PlanResult(config, args.gpus, args.gpus_per_node, rates, usable, [layout])
    if args.json:
        print(json.dumps(layout_json(layout, answer, args.tokens, args.price_per_gpu_hour)))
    else:
        ms, tokens, mfu, *_ = layout_cells(layout)
        print(wrap_paragraph(fit_sentence(args.gpus, rates.device, layout.bytes, answer.usable)))
        print(
            wrap_paragraph(
                f"{ms} ms per step, {tokens} tokens/s/GPU, MFU {mfu} (causal); rates: {rates.source}"
            )
        )
        if args.tokens:
            days = answer.days(layout, args.tokens)
            price = args.price_per_gpu_hour
            cost = f", {format_si(days * 24 * args.gpus * price)} at {price:g} a GPU hour" if price else ""
            print(f"{days:,.1f} days for {args.tokens:.3g} tokens{cost}")
        print(layout_details(layout))
    if args.png:
        _draw(answer, args.png)
    return 0


def _goodput_options(parser: Parser) -> None:
    from megalith.planner.goodput import FAILURES_PER_GPU_HOUR, Costs

    parser.description = "Compute the best save interval of a job, and its goodput with failures."
    parser.add_argument("job", help="a run file, or the name of a preset")
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs (default: 8 to 100,000)")
    parser.add_argument(
        "--failures-per-gpu-hour",
        type=float,
        default=FAILURES_PER_GPU_HOUR,
        help="failures per GPU and hour (default: Llama 3's rate, 419 failures on 16,384 GPUs in 54 days)",
    )
    parser.add_argument(
        "--stall", type=float, default=Costs.stall, help="seconds that training waits per save"
    )
    parser.add_argument(
        "--notice",
        type=float,
        default=Costs.notice,
        help="seconds from a failure to the start of new processes",
    )
    parser.add_argument(
        "--start", type=float, default=Costs.start, help="seconds from process start to the first step"
    )
    parser.add_argument("--disk", type=float, default=Costs.disk, help="read and write speed per rank, GB/s")
    parser.add_argument(
        "--store", type=float, default=Costs.store, help="total speed of the file system, GB/s"
    )
    parser.add_argument(
        "--memory-restart",
        type=float,
        default=Costs.memory_restart,
        help="seconds from a failure to the next step with checkpoint.memory_interval",
    )
    parser.add_argument(
        "--memory-stall",
        type=float,
        default=Costs.memory_stall,
        help="seconds that training waits per snapshot in memory",
    )
    parser.add_argument(
        "--memory-share",
        type=float,
        default=Costs.memory_share,
        help="fraction of failures that leave all machines running, 0 to 1",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a list of JSON objects, in seconds and bytes"
    )


def run_goodput(args: Arguments) -> int:
    from megalith.planner.goodput import SIZES, Costs, goodput
    from megalith.planner.plan_text import goodput_table

    _check_bounds(args, "gpus", "failures_per_gpu_hour", "disk", "store")
    _check_bounds(args, "stall", "notice", "start", "memory_restart", "memory_stall", minimum=0)
    if not 0 <= args.memory_share <= 1:
        raise ConfigError(f"--memory-share is {args.memory_share}, but must be a fraction from 0 to 1")
    config = _config(args, 8)
    memory = args.memory_restart, args.memory_stall, args.memory_share
    costs = Costs(args.stall, args.notice, args.start, args.disk, args.store, *memory)
    results = [goodput(config, gpus, costs, args.failures_per_gpu_hour) for gpus in args.gpus or SIZES]
    print(json.dumps([asdict(each) for each in results]) if args.json else goodput_table(results))
    return 0


def _check_bounds(args: Arguments, *names: str, minimum: float | None = None) -> None:
    """Raise ConfigError for an argument that is neither a finite number above 0 nor equal to `minimum`."""
    for name in names:
        values = getattr(args, name)
        for value in values if isinstance(values, list) else [values]:
            if value is None or (0 < value < float("inf") or value == minimum):
                continue
            bound = "above 0" if minimum is None else f"of {minimum} or more"
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, but must be a number {bound}")


def _job(args: Arguments):
    from megalith.planner.rates import rates_of

    _check_bounds(
        args,
        "gpus",
        "gpus_per_node",
        "memory_gb",
        "seq_length",
        "global_batch_size",
        "tokens",
        "price_per_gpu_hour",
    )
    if args.price_per_gpu_hour and not args.tokens:
        raise ConfigError(
            f"--price-per-gpu-hour is {args.price_per_gpu_hour:g}, but the cost also depends on --tokens; "
            "pass both"
        )
    rates = rates_of(args.device, args.device_json)
    return _config(args, args.gpus), rates


def _config(args: Arguments, gpus: int):
    from megalith.config import RunConfig
    from megalith.config.presets import PRESETS
    from megalith.config.rules.model_rules import check_model
    from megalith.config.run import nearest_file, parse_overrides
    from megalith.planner.planned_runs import preset_config, with_batch

    seq, batch = (getattr(args, name, None) for name in ("seq_length", "global_batch_size"))
    is_file = (
        Path(args.job).suffix in (".yaml", ".yml", ".json") or "/" in args.job or Path(args.job).exists()
    )
    if args.job not in PRESETS and not is_file and (near := nearest_file(args.job)):
        raise ConfigError(f"{args.job!r} is neither a preset nor a run file{near}")
    if args.job in PRESETS or not is_file:  # a preset's name may have a dot: qwen2.5-7b
        config = preset_config(args.job, gpus, seq, batch)
        settings = {f"{section}.{key}": value for section, key, value in parse_overrides(args.settings)}
        return config.with_settings(settings) if settings else config
    config = RunConfig.load(args.job, args.settings)
    if config.optim.lr is None:  # irrelevant for a plan
        config = config.with_settings({"optim.lr": 1e-4})
    if config.train.train_iters is None and config.train.train_samples is None:
        config = config.with_settings({"train.train_iters": 1})
    if config.model.init_from is not None:  # its weights have the model's shape
        from megalith.bridge.load import with_init_from

        config = with_init_from(config)
    if config.model.vocab_size is None or config.model.max_position_embeddings is None:
        from megalith.training.build import build_run_tokenizer, resolve_config

        try:
            tokenizer = build_run_tokenizer(config)
        except DataError as error:  # the tokenizer may exist on the cluster only
            if config.model.vocab_size is None:
                raise DataError(
                    f"{error}, or pass --model.vocab_size N to plan without a tokenizer"
                ) from None
            tokenizer = None
        config = resolve_config(config, tokenizer)
    check_model(config.model)
    return with_batch(config, seq, batch)


def _draw(answer, path: str) -> None:
    from megalith.report.plan_drawing import draw_plan

    try:
        print(f"wrote {draw_plan(answer, path)}", file=sys.stderr)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; choose another --png") from None


def _write(answer, args: Arguments) -> None:
    """Write the job's run file with the settings of the command line and the best layout."""
    import yaml

    from megalith.config import ParallelConfig, RunConfig
    from megalith.config.run import parse_overrides, read_yaml
    from megalith.planner.candidates import OFFLOADED, SEARCHED_DEFAULTS
    from megalith.planner.plan_result import changed

    best = answer.best[0]
    if Path(args.job).exists():
        tree = {section: values for section, values in read_yaml(args.job).items() if values}
    else:
        train = {"train_iters": 1, "precision": "bf16"}
        tree = {"model": {"preset": args.job}, "data": {"mock": True}, "optim": {"lr": 1e-4}, "train": train}
    for section, name, value in parse_overrides(args.settings):
        tree.setdefault(section, {})[name] = value
    # Drop aliases such as use_distributed_optimizer, which also describe layouts.
    parallel = tree.get("parallel", {}).items()
    tree["parallel"] = {name: value for name, value in parallel if name in ParallelConfig.model_fields}
    for section, _, name in (path.partition(".") for path in (*SEARCHED_DEFAULTS, *OFFLOADED)):
        tree.get(section, {}).pop(name, None)
    for section, values in changed(best).items():
        tree.setdefault(section, {}).update(values)
    data, train = answer.config.data, answer.config.train
    tree.setdefault("data", {})["seq_length"] = data.seq_length
    if (RunConfig.from_tree(tree).model.max_position_embeddings or data.seq_length) < data.seq_length:
        tree["model"]["max_position_embeddings"] = answer.config.model.max_position_embeddings
    tree.setdefault("train", {})["global_batch_size"] = train.global_batch_size
    text = f"# by `megalith plan` for {answer.gpus} {answer.rates.device}: {best.name}\n"
    try:
        write_file(Path(args.write), text + yaml.safe_dump(tree, sort_keys=False))
    except OSError as error:
        raise ConfigError(
            f"{args.write} cannot be written: {error.strerror}; choose another --write"
        ) from None
    print(f"wrote {args.write}", file=sys.stderr)


COMMANDS: dict[str, tuple[Callable[[Parser], None], Callable[[Arguments], int]]] = {
    "": (_layout_options, run_layouts),
    "show": (_job_options, run_show),
    "goodput": (_goodput_options, run_goodput),
    "calibrate": (_calibrate_options, run_calibrate),
}


def plan(words: list[str]) -> int:
    """Run `megalith plan RUN|PRESET …` or `megalith plan show|goodput|calibrate …`."""
    args = read_words(words)
    return args.run(args)


def read_words(words: list[str]) -> Arguments:
    """Parse the arguments of `plan …`. Raises ConfigError for unknown ones."""
    name = words[1] if len(words) > 1 and words[1] in COMMANDS else ""
    add_options, run = COMMANDS[name]
    parser = Parser(prog=f"megalith plan {name}".rstrip(), allow_abbrev=False)
    parser.set_defaults(run=run)
    add_options(parser)
    args, args.settings = parser.parse_known_args(words[2 if name else 1 :])
    if args.settings and (name == "calibrate" or "." not in args.settings[0]):
        parser.refuse(args.settings)
    return args


def read_options() -> list[str]:
    """Return the option names of `plan RUN|PRESET`, which `plan show` also accepts."""
    parser = Parser(prog="megalith plan")
    _layout_options(parser)
    return [option for option in option_strings(parser) if option.startswith("--")]
