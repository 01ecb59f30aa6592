"""The command line of checkpoints: `megalith checkpoint …`. Importing this file is cheap."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.errors import CheckpointError, ConfigError, printable

if TYPE_CHECKING:
    from megalith.checkpoint.read import Checkpoint
    from megalith.remote import StorePath

PARTS = ("model", "optimizer")
GIVEN = "run folder, its checkpoints folder, or one step folder, here or by URL"


def add_checkpoint_commands(commands: Any) -> None:
    """Adds the subcommands to `commands`, the result of `add_subparsers`."""
    listing = commands.add_parser("list", help="list a run's steps")
    listing.add_argument("path", help=GIVEN)
    listing.set_defaults(run=run_list)

    verify = commands.add_parser(
        "verify", help="check every file of every step; exit code 4 when one is damaged"
    )
    verify.add_argument("path", help=GIVEN)
    verify.set_defaults(run=run_verify)

    digests = commands.add_parser(
        "hash", help="print a digest of each global tensor, the same in every layout"
    )
    digests.add_argument("path", help=f"{GIVEN}; of several steps the newest")
    _add_part(digests, "all that there are")
    digests.set_defaults(run=run_hash)

    diff = commands.add_parser("diff", help="list the tensors that differ; exit code 1 when there are any")
    diff.add_argument("a", help=f"{GIVEN}; of several steps the newest")
    diff.add_argument("b", help="another")
    _add_part(diff, "all that there are")
    diff.set_defaults(run=run_diff)

    reshard = commands.add_parser("reshard", help="rewrite a step in another number of files")
    reshard.add_argument("path", help=f"{GIVEN}; of several steps the newest")
    reshard.add_argument("output", help="folder that gets checkpoints/step_NNNNNNNN")
    reshard.add_argument(
        "--files", type=int, required=True, metavar="N", help="files a part: one for each rank that will read"
    )
    reshard.set_defaults(run=run_reshard)

    merge = commands.add_parser("merge", help="put a step's tensors together in one file")
    merge.add_argument("path", help=f"{GIVEN}; of several steps the newest")
    merge.add_argument("output", help="file to write: .safetensors, or .bin or .pt for torch.load")
    _add_part(merge, "model", default="model")
    merge.add_argument(
        "--hf", action="store_true", help="the weights by Hugging Face's names, with config.json beside them"
    )
    merge.set_defaults(run=run_merge)


def _add_part(parser: argparse.ArgumentParser, meaning: str, default: str | None = None) -> None:
    parser.add_argument("--part", choices=PARTS, default=default, help=f"which tensors (default: {meaning})")


def run_list(args: argparse.Namespace) -> int:
    from megalith.checkpoint.manifest import MANIFEST, read_manifest
    from megalith.remote import modified

    rows = [("step", "samples", "saved", "size", "files", "parts")]
    for folder in _steps(args.path):
        try:
            manifest = read_manifest(folder)
        except CheckpointError as error:
            rows.append((folder.name, "-", "-", "-", "-", f"unreadable: {error}"))
            continue
        when = modified(folder / MANIFEST)
        size = sum(record.bytes for record in manifest.files.values())
        rows.append(
            (
                folder.name,
                str(manifest.consumed_samples),
                when.strftime("%Y-%m-%d %H:%M:%S"),
                _size(size),
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
        problems = step_problems(folder)
        damaged += bool(problems)
        print(f"{folder.name} {'DAMAGED' if problems else 'whole'}", flush=True)
        for problem in problems:
            print(f"  {problem}")
    return CheckpointError.exit_code if damaged else 0


def run_hash(args: argparse.Namespace) -> int:
    from megalith.checkpoint.fingerprint import tensor_digests, total_digest

    digests = []
    checkpoint = _open(args.path, args.part)
    for part in _parts(checkpoint, args.part):
        for name, digest in tensor_digests(checkpoint, part):
            digests.append((name, digest))
            print(f"{digest}  {printable(name)}", flush=True)
    print(f"{total_digest(digests)}  all {len(digests)} tensors of {printable(checkpoint.folder.name)}")
    return 0


def run_diff(args: argparse.Namespace) -> int:
    from megalith.checkpoint.fingerprint import differences

    a, b = _open(args.a, args.part), _open(args.b, args.part)
    found = same = 0
    for part in dict.fromkeys((*_parts(a, args.part), *_parts(b, args.part))):
        names = a.manifest.tensors.get(part, {}).keys() | b.manifest.tensors.get(part, {}).keys()
        different = 0
        for difference in differences(a, b, part):
            different += 1
            print(f"{printable(difference.name)}: {difference.what}", flush=True)
        found, same = found + different, same + len(names) - different
    print(f"{found} tensors differ, {same} are the same to the bit")
    return 1 if found else 0


def run_reshard(args: argparse.Namespace) -> int:
    from megalith.checkpoint.rewrite import reshard
    from megalith.remote import place

    if args.files < 1:
        raise ConfigError(f"--files is {args.files}; it counts from 1")
    step = reshard(_open(args.path, None), place(args.output), args.files)
    print(f"wrote {printable(step)}")
    return 0


def run_merge(args: argparse.Namespace) -> int:
    from megalith.checkpoint.rewrite import merge

    state = Path(args.path) / "megalith"  # in a folder of Accelerate's save_state
    path = state if state.is_dir() else args.path
    if args.hf:
        from megalith.bridge.exporter import merge_hf

        merge_hf(path, Path(args.output))
    else:
        merge(_open(path, args.part), args.part, Path(args.output))
    print(f"wrote {printable(args.output)}")
    return 0


def _open(path: str, part: str | None) -> Checkpoint:
    """The newest whole step, with the files of `part` checked; of all its parts with None."""
    from megalith.checkpoint.open import open_existing

    return open_existing(path, None if part is None else (part,))


def _parts(checkpoint: Checkpoint, part: str | None) -> list[str]:
    return list(checkpoint.manifest.tensors) if part is None else [part]


def _steps(path: str) -> list[Path | StorePath]:
    """The step folders under a path, in order. Raises CheckpointError when there are none."""
    from megalith.checkpoint.manifest import not_answering
    from megalith.checkpoint.steps import CHECKPOINTS, STEP, list_steps
    from megalith.remote import place

    folder = place(path)
    try:
        if STEP.fullmatch(folder.name) and folder.is_dir():
            return [folder]
        folder = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
        steps = list(list_steps(folder).values()) if folder.is_dir() else []
    except OSError as error:
        raise not_answering(folder, error) from error
    if not steps:
        raise CheckpointError(f"there is no step in {folder}; give a {GIVEN}")
    return steps


def _size(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"
