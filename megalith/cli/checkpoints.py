"""`megalith checkpoint …`: list, verify, compare and rewrite checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.json_output import add_json_option, print_json, print_written
from megalith.errors import CheckpointError, ConfigError, printable
from megalith.progress import Progress
from megalith.remote import StorePath, modified, open_location

if TYPE_CHECKING:
    from megalith.checkpoint.read import Checkpoint

PARTS = ("model", "optimizer")
PATH_HELP = "run folder, its checkpoints folder, or one step folder; a path or URL"
NEWEST_HELP = f"{PATH_HELP}; the newest of several steps"


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help=PATH_HELP)
    add_json_option(
        parser,
        "step, path, samples, saved, bytes, files, parts; of an unreadable step: step, path, error",
        "list",
    )


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help=PATH_HELP)
    add_json_option(parser, "step, path, problems", "list")


def _add_newest_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help=NEWEST_HELP)


def add_hash_arguments(parser: argparse.ArgumentParser) -> None:
    _add_newest_path(parser)
    _add_part(parser, "all parts")
    add_json_option(parser, "path, digest, tensors (part, name and digest of each)")


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help=NEWEST_HELP)
    parser.add_argument("b", help="the other checkpoint")
    _add_part(parser, "all parts")
    add_json_option(parser, "equal (number), different (part, name and description of each)")


def add_reshard_arguments(parser: argparse.ArgumentParser) -> None:
    _add_newest_path(parser)
    parser.add_argument(
        "output", help="output folder; the step is written to checkpoints/step_NNNNNNNN in it"
    )
    parser.add_argument(
        "--files",
        type=int,
        required=True,
        metavar="N",
        help="number of files for the weights, and for the optimizer state",
    )
    add_json_option(parser, "path")


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    _add_newest_path(parser)
    parser.add_argument("output", help="file to write: .safetensors, or .bin or .pt for torch.load")
    _add_part(parser, "model", default="model")
    parser.add_argument(
        "--hf",
        action="store_true",
        help="write weights under Hugging Face's names, with config.json in the folder",
    )
    add_json_option(parser, "path")


def add_average_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", nargs="+", metavar="PATH", help=NEWEST_HELP)
    parser.add_argument(
        "--out",
        required=True,
        metavar="DIR",
        help="output folder; the step is written to checkpoints/step_NNNNNNNN in it",
    )
    add_json_option(parser, "path, checkpoints (number)")


def _add_part(parser: argparse.ArgumentParser, meaning: str, default: str | None = None) -> None:
    parser.add_argument(
        "--part", choices=PARTS, default=default, help=f"part of the checkpoint (default: {meaning})"
    )


def run_list(args: argparse.Namespace) -> int:
    from megalith.checkpoint.manifest import MANIFEST, read_manifest

    steps: list[dict[str, Any]] = []
    for folder in _steps(args.path):
        step = {"step": _step_number(folder), "path": str(folder)}
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            steps.append(step | {"error": str(error)})
            continue
        step |= {
            "samples": manifest.consumed_samples,
            "saved": modified(folder / MANIFEST).strftime("%Y-%m-%d %H:%M:%S"),
            "bytes": sum(record.bytes for record in manifest.files.values()),
            "files": len(manifest.files),
            "parts": list(manifest.tensors),
        }
        steps.append(step)
    if args.json:
        print_json(steps)
        return 0
    rows = [("step", "samples", "saved", "size", "files", "parts"), *map(_list_row, steps)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(text.rjust(width) for text, width in zip(row, widths)), row[5]]))
    return 0


def _step_number(folder: Path | StorePath) -> int:
    return int("".join(filter(str.isdecimal, folder.name)))


def _list_row(step: dict[str, Any]) -> tuple[str, ...]:
    name = Path(step["path"]).name
    if "error" in step:
        return name, "-", "-", "-", "-", f"unreadable: {step['error']}"
    size, parts = _size(step["bytes"]), " ".join(step["parts"])
    return name, str(step["samples"]), step["saved"], size, str(step["files"]), parts


def run_verify(args: argparse.Namespace) -> int:
    from megalith.checkpoint.open import step_problems

    damaged, steps = 0, []
    for folder in _steps(args.path):
        problems = step_problems(folder, show_progress=True)
        damaged += bool(problems)
        steps.append(
            {"step": _step_number(folder), "path": str(folder), "problems": list(map(str, problems))}
        )
        if args.json:
            continue
        print(f"{folder.name} {'DAMAGED' if problems else 'intact'}", flush=True)
        for problem in problems:
            print(f"  {problem}")
    if args.json:
        print_json(steps)
    return CheckpointError.exit_code if damaged else 0


def run_hash(args: argparse.Namespace) -> int:
    from megalith.checkpoint.fingerprint import tensor_digests, total_digest
    from megalith.checkpoint.rewrite import part_bytes

    digests, tensors, checkpoint = [], [], _open(args.path, args.part)
    with Progress("hash", part_bytes(checkpoint, args.part)) as progress:
        for part in _parts(checkpoint, args.part):
            for name, digest in tensor_digests(checkpoint, part, progress):
                digests.append((name, digest))
                tensors.append({"part": part, "name": name, "digest": digest})
                if not args.json:
                    print(f"{digest}  {printable(name)}", flush=True)
    if args.json:
        total = {"path": str(checkpoint.folder), "digest": total_digest(digests)}
        print_json(total | {"tensors": tensors})
        return 0
    print(f"{total_digest(digests)}  all {len(digests)} tensors of {printable(checkpoint.folder.name)}")
    return 0


def run_diff(args: argparse.Namespace) -> int:
    from megalith.checkpoint.fingerprint import differences
    from megalith.checkpoint.rewrite import part_bytes

    a, b = _open(args.a, args.part), _open(args.b, args.part)
    same, different = 0, []
    with Progress("diff", part_bytes(a, args.part)) as progress:
        for part in dict.fromkeys((*_parts(a, args.part), *_parts(b, args.part))):
            names = a.manifest.tensors.get(part, {}).keys() | b.manifest.tensors.get(part, {}).keys()
            same += len(names)
            for difference in differences(a, b, part, progress):
                same -= 1
                text = {"name": difference.name, "description": difference.description}
                different.append({"part": part, **text})
                if not args.json:
                    print(f"{printable(difference.name)}: {difference.description}", flush=True)
    if args.json:
        print_json({"equal": same, "different": different})
    else:
        print(f"{len(different)} tensors differ, {same} are bitwise equal")
    return 1 if different else 0


def run_reshard(args: argparse.Namespace) -> int:
    from megalith.checkpoint.rewrite import reshard

    if args.files < 1:
        raise ConfigError(f"--files is {args.files}, but must be at least 1")
    step = reshard(_open(args.path, None), open_location(args.output), args.files)
    print_written(args, step)
    return 0


def run_average(args: argparse.Namespace) -> int:
    from megalith.checkpoint.averaged_checkpoint import average
    from megalith.remote import open_location

    if len(args.checkpoints) < 2:
        raise ConfigError("checkpoint average needs at least two checkpoints; pass the steps to average")
    step = average([_open(path, "model") for path in args.checkpoints], open_location(args.out))
    count = len(args.checkpoints)
    print_written(args, step, f", the mean of {count} checkpoints", checkpoints=count)
    return 0


def run_merge(args: argparse.Namespace) -> int:
    from megalith.checkpoint.rewrite import merge

    part = "model" if args.hf else args.part
    opened = _open_accelerates(Path(args.path), part) or _open(args.path, part)
    if args.hf:
        from megalith.bridge.exporter import merge_hf

        merge_hf(opened, Path(args.output))
    else:
        merge(opened, part, Path(args.output))
    print_written(args, args.output)
    return 0


def _open_accelerates(folder: Path, part: str) -> Checkpoint | None:
    """Open the checkpoint in a folder written by Accelerate's save_state, including its legacy_bin format; None for
    other folders.
    """
    if (folder / "megalith").is_dir():
        return _open(str(folder / "megalith"), part)
    if not any(folder.glob("pytorch_model_tp_*.bin")):
        return None
    from megalith.checkpoint.shard_files import open_shard_files

    return open_shard_files(folder, (part,))


def _open(path: str, part: str | None) -> Checkpoint:
    """Open the newest complete step and verify the files of `part`. None means all parts."""
    from megalith.checkpoint.open import open_existing

    return open_existing(path, None if part is None else (part,), show_progress=True)


def _parts(checkpoint: Checkpoint, part: str | None) -> list[str]:
    return list(checkpoint.manifest.tensors) if part is None else [part]


def _steps(path: str) -> list[Path | StorePath]:
    """Return the step folders under a path in order. Raises CheckpointError if there are none."""
    from megalith.checkpoint.manifest import fetch_error
    from megalith.checkpoint.steps import CHECKPOINTS, STEP, list_steps

    folder = open_location(path)
    try:
        if STEP.fullmatch(folder.name) and folder.is_dir():
            return [folder]
        folder = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
        steps = list(list_steps(folder).values()) if folder.is_dir() else []
    except OSError as error:
        raise fetch_error(folder, error) from error
    if not steps:
        raise CheckpointError(f"there is no step in {folder}; pass a {PATH_HELP}")
    return steps


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"
