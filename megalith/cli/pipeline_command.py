"""`megalith pipeline show`."""

from __future__ import annotations

import argparse

from megalith.cli.json_output import add_json_option, print_json
from megalith.errors import ConfigError


def add_pipeline_show(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw the timeline of a pipeline schedule, and print its bubble: "
        "the fraction of time in which ranks wait."
    )
    parser.add_argument("--stages", type=int, required=True, metavar="S", help="pipeline ranks")
    parser.add_argument(
        "--micro-batches", type=int, required=True, metavar="M", help="micro-batches per step"
    )
    parser.add_argument(
        "--virtual", type=int, default=1, metavar="V", help="chunks of layers per rank (default: 1)"
    )
    parser.add_argument(
        "--group",
        type=int,
        metavar="G",
        help="micro-batches that a rank runs through one chunk before the next chunk (default: number of stages)",
    )
    parser.add_argument(
        "--schedule",
        metavar="KIND",
        help="1f1b, interleaved or zero_bubble (default: interleaved if --virtual is above 1, else 1f1b)",
    )
    parser.add_argument(
        "--durations",
        default="1,1,1",
        metavar="F,I,W",
        help="durations of a chunk's forward, dgrad and wgrad (default: 1,1,1)",
    )
    parser.add_argument(
        "--p2p", type=float, default=0.0, metavar="P", help="duration of a transfer (default: 0)"
    )
    parser.add_argument("--png", metavar="FILE", help="also draw it as an image")
    parser.add_argument("--measured", metavar="RUN", help="also draw the step that this run measured")
    add_json_option(
        parser,
        "schedule, stages, micro_batches, virtual, group, bubble, total, warning, measured (bubble, total), png",
    )


def run_pipeline_show(args: argparse.Namespace) -> int:
    from megalith.parallel.pipeline.schedules import build_schedule
    from megalith.parallel.pipeline.simulate import few_micro_batches_warning, simulate
    from megalith.parallel.pipeline.timeline import read_timeline
    from megalith.report.pipeline_drawing import TEXT_LEGEND, draw_png, draw_text

    kind = args.schedule or ("interleaved" if args.virtual > 1 else "1f1b")
    schedule = build_schedule(kind, args.stages, args.micro_batches, args.virtual, args.group)
    timeline = simulate(schedule, _durations(args.durations, args.p2p))
    sizes = f"{args.stages} stages, {args.micro_batches} micro-batches"
    if args.virtual > 1:
        sizes += f", {args.virtual} chunks a rank" + (f", groups of {args.group}" if args.group else "")
    drawings = [(f"{kind}, {sizes}: bubble {timeline.bubble:.1%}", timeline)]
    if args.measured:
        measured = read_timeline(args.measured)
        drawings.append(
            (f"measured, {args.measured}: {measured.total:.1f} ms, bubble {measured.bubble:.1%}", measured)
        )
    warning = few_micro_batches_warning(schedule)
    if args.json:
        png = str(draw_png(args.png, drawings, "ms" if args.measured else "")) if args.png else None
        names = {"schedule": kind, "stages": args.stages, "micro_batches": args.micro_batches}
        names |= {"virtual": args.virtual, "group": args.group or args.stages}
        times = [{"bubble": drawn.bubble, "total": drawn.total} for _, drawn in drawings]
        measured = times[1] if args.measured else None
        print_json(names | times[0] | {"warning": warning, "measured": measured, "png": png})
        return 0
    for title, drawn in drawings:
        print(f"{title}\n{draw_text(drawn)}\n")
    print(TEXT_LEGEND)
    if warning:
        print(f"warning: {warning}")
    if args.png:
        print(f"wrote {draw_png(args.png, drawings, 'ms' if args.measured else '')}")
    return 0


def _durations(text: str, p2p: float):
    from megalith.parallel.pipeline.simulate import Durations

    try:
        values = [float(value) for value in text.split(",")]
    except ValueError:
        values = []
    if len(values) != 3 or not all(0 < value < float("inf") for value in values) or not p2p >= 0:
        raise ConfigError(
            f"--durations is {text!r} and --p2p {p2p}; --durations must be three comma-separated numbers "
            "above 0, such as 1,1,1, and --p2p at least 0"
        )
    return Durations(*values, p2p=p2p)
