"""The command line of pipelines: `megalith pipeline show`. Importing this file is cheap."""

from __future__ import annotations

import argparse

from megalith.errors import ConfigError


def add_pipeline_show(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw a pipeline schedule's timeline and state its bubble, the share of time in which ranks wait."
    )
    parser.add_argument("--stages", type=int, required=True, metavar="S", help="pipeline ranks")
    parser.add_argument("--micro-batches", type=int, required=True, metavar="M", help="micro-batches a step")
    parser.add_argument(
        "--virtual", type=int, default=1, metavar="V", help="chunks of layers on each rank (default: 1)"
    )
    parser.add_argument(
        "--group",
        type=int,
        metavar="G",
        help="micro-batches through a chunk at a time (default: as many as stages)",
    )
    parser.add_argument(
        "--schedule",
        metavar="KIND",
        help="1f1b, interleaved or zero_bubble (default: interleaved where --virtual is above 1, else 1f1b)",
    )
    parser.add_argument(
        "--durations",
        default="1,1,1",
        metavar="F,I,W",
        help="what a chunk's forward, input's backward and weights' backward take (default: 1,1,1)",
    )
    parser.add_argument(
        "--p2p", type=float, default=0.0, metavar="P", help="what a transfer takes (default: 0)"
    )
    parser.add_argument("--png", metavar="FILE", help="also draw it as an image")
    parser.add_argument("--measured", metavar="RUN", help="also draw the step that this run has measured")
    parser.set_defaults(run=run_pipeline_show)


def run_pipeline_show(args: argparse.Namespace) -> int:
    from megalith.parallel.pipeline.drawing import TEXT_LEGEND, draw_png, draw_text
    from megalith.parallel.pipeline.schedules import build_schedule
    from megalith.parallel.pipeline.simulate import few_micro_batches_warning, simulate
    from megalith.parallel.pipeline.timeline import read_timeline

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
    for title, drawn in drawings:
        print(f"{title}\n{draw_text(drawn)}\n")
    print(TEXT_LEGEND)
    if warning := few_micro_batches_warning(schedule):
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
            f"--durations is {text!r} and --p2p {p2p}; give three durations above 0 with commas, like 1,1,1, and a "
            "transfer of 0 or more"
        )
    return Durations(*values, p2p=p2p)
