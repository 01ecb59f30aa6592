"""`megalith checkpoint …`: list, verify, compare and rewrite checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megalith.errors import CheckpointError, ConfigError, printable
from megalith.progress import Progress
from megalith.remote import StorePath, modified, open_location

if TYPE_CHECKING:
    from megalith.checkpoint.read import Checkpoint

PARTS = ("model", "optimizer")
PATH_HELP = "run folder, its checkpoints folder, or one step folder; a path or URL"
NEWEST_HELP = f"{PATH_HELP}; the newest of several steps"


def add_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help=PATH_HELP)


def _add_newest_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", help=NEWEST_HELP)


def add_hash_arguments(parser: argparse.ArgumentParser) -> None:
    _add_newest_path(parser)
    _add_part(parser, "all parts")


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", help=NEWEST_HELP)
    parser.add_argument("b", help="the other checkpoint")
    _add_part(parser, "all parts")


def add_reshard_arguments(parser: argparse.ArgumentParser) -> None:
    _add_newest_path(parser)
    parser.add_argument("output", help="folder that gets checkpoints/step_NNNNNNNN")
    parser.add_argument(
        "--files", type=int, required=True, metavar="N", help="files per part: one per rank that will read"
    )


def add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    _add_newest_path(parser)
    parser.add_argument("output", help="file to write: .safetensors, or .bin or .pt for torch.load")
    _add_part(parser, "model", default="model")
    parser.add_argument(
        "--hf",
        action="store_true",
        help="write weights under Hugging Face's names, with config.json in the folder",
    )


def add_average_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoints", nargs="+", metavar="PATH", help=NEWEST_HELP)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder that gets checkpoints/step_NNNNNNNN"
    )


def _add_part(parser: argparse.ArgumentParser, meaning: str, default: str | None = None) -> None:
    parser.add_argument("--part", choices=PARTS, default=default, help=f"which tensors (default: {meaning})")


def run_list(args: argparse.Namespace) -> int:
    from megalith.checkpoint.manifest import MANIFEST, read_manifest

    rows = [("step", "samples", "saved", "size", "files", "parts")]
    for folder in _steps(args.path):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            rows.append((folder.name, "-", "-", "-", "-", f"unreadable: {error}"))
            continue
        rows.append(
            (
                folder.name,
                str(manifest.consumed_samples),
                modified(folder / MANIFEST).strftime("%Y-%m-%d %H:%M:%S"),
                _size(sum(record.bytes for record in manifest.files.values())),
                str(len(manifest.files)),
                " ".join(manifest.tensors),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(text.rjust(width) for text, width in zip(row, widths)), row[5]]))
    return 0


def run_verify(args: argparse.Namespace) -> int:
    from megalith.checkpoint.open import step_problems

    damaged = 0
    for folder in _steps(args.path):
        problems = step_problems(folder, show_progress=True)
        damaged += bool(problems)
        print(f"{folder.name} {'DAMAGED' if problems else 'whole'}", flush=True)
        for problem in problems:
            print(f"  {problem}")
    return CheckpointError.exit_code if damaged else 0


def run_hash(args: argparse.Namespace) -> int:
    from megalith.checkpoint.fingerprint import tensor_digests, total_digest
    from megalith.checkpoint.rewrite import part_bytes

    digests, checkpoint = [], _open(args.path, args.part)
    with Progress("hash", part_bytes(checkpoint, args.part)) as progress:
        for part in _parts(checkpoint, args.part):
            for name, digest in tensor_digests(checkpoint, part, progress):
                digests.append((name, digest))
                print(f"{digest}  {printable(name)}", flush=True)
    print(f"{total_digest(digests)}  all {len(digests)} tensors of {printable(checkpoint.folder.name)}")
    return 0


def run_diff(args: argparse.Namespace) -> int:
    from megalith.checkpoint.fingerprint import differences
    from megalith.checkpoint.rewrite import part_bytes

    a, b = _open(args.a, args.part), _open(args.b, args.part)
    different_total = same = 0
    with Progress("diff", part_bytes(a, args.part)) as progress:
        for part in dict.fromkeys((*_parts(a, args.part), *_parts(b, args.part))):
            names = a.manifest.tensors.get(part, {}).keys() | b.manifest.tensors.get(part, {}).keys()
            different = 0
            for difference in differences(a, b, part, progress):
                different += 1
                print(f"{printable(difference.name)}: {difference.description}", flush=True)
            different_total, same = different_total + different, same + len(names) - different
    print(f"{different_total} tensors differ, {same} are the same to the bit")
    return 1 if different_total else 0


def run_reshard(args: argparse.Namespace) -> int:
    from megalith.checkpoint.rewrite import reshard

    if args.files < 1:
        raise ConfigError(f"--files is {args.files}; it counts from 1")
    step = reshard(_open(args.path, None), open_location(args.output), args.files)
    print(f"wrote {printable(step)}")
    return 0


def run_average(args: argparse.Namespace) -> int:
    from megalith.checkpoint.averaged_checkpoint import average
    from megalith.remote import open_location

    if len(args.checkpoints) < 2:
        raise ConfigError("checkpoint average needs at least two checkpoints; name the steps to average")
    step = average([_open(path, "model") for path in args.checkpoints], open_location(args.out))
    print(f"wrote {printable(step)}, the mean of {len(args.checkpoints)} checkpoints")
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
    print(f"wrote {printable(args.output)}")
    return 0


def _open_accelerates(folder: Path, part: str) -> Checkpoint | None:
    """Open the checkpoint in a folder of Accelerate's save_state, also of its legacy_bin format; None for others."""
    if (folder / "megalith").is_dir():
        return _open(str(folder / "megalith"), part)
    if not any(folder.glob("pytorch_model_tp_*.bin")):
        return None
    from megalith.checkpoint.shard_files import open_shard_files

    return open_shard_files(folder, (part,))


def _open(path: str, part: str | None) -> Checkpoint:
    """Open the newest complete step, and verify the files of `part`, or of all parts if None."""
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
        raise CheckpointError(f"there is no step in {folder}; give a {PATH_HELP}")
    return steps


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"
