"""The command line of checkpoints and of conversion. What the commands need is imported when they run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.cli.parser import group, leaf
from megalith.errors import CheckpointError, ConfigError, printable
from megalith.progress import Progress

if TYPE_CHECKING:
    from megalith.checkpoint.read import Checkpoint
    from megalith.remote import StorePath


DTYPES = ("float32", "bfloat16", "float16")
FORMATS = ("torch_dist", "torch")
FORMS = ("fp8", "int8")  # of bridge/quantized.py


def add_conversion_commands(commands: argparse._SubParsersAction) -> None:
    for name, text, add_arguments, run in (
        ("import-hf", "write a Hugging Face model as a checkpoint", add_import_arguments, run_import),
        ("import-megatron", "write a checkpoint of Megatron-LM as one of ours", add_megatron_arguments, run_megatron),
        ("export-hf", "write a checkpoint as a Hugging Face model", add_export_arguments, run_export),
        ("export-megatron", "write a checkpoint as one that Megatron-LM loads",
         add_megatron_export_arguments, run_megatron_export),
        ("convert", "convert between Hugging Face, Megatron-LM and ours", add_convert_arguments, run_convert),
    ):  # fmt: skip
        add_arguments(leaf(commands, name, text, run))
    lora = group(commands, "lora", "adapters: write them for PEFT, merge them")
    add_lora_export_arguments(
        leaf(lora, "export", "write a run's adapters in PEFT's format", run_lora_export)
    )
    add_lora_merge_arguments(leaf(lora, "merge", "write base + adapters as a checkpoint", run_lora_merge))


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a Hugging Face model as a checkpoint to train or generate from."
    parser.add_argument("source", metavar="HF_DIR", help="folder with config.json and weights, or a hub name")
    parser.add_argument("out", metavar="OUT", help="run folder to write")
    parser.add_argument(
        "--allow", action="store_true", help="take a folder with missing, extra or differently typed tensors"
    )
    _add_verify(parser)


def run_import(args: argparse.Namespace) -> int:
    from megalith.bridge.importer import import_hf

    step = import_hf(args.source, args.out, allow=args.allow)
    print(f"wrote {printable(step)}")
    if args.verify:
        from megalith.bridge.verify import certificate_line, certify

        print(certificate_line(certify(step, args.source, args.out)))
    return 0


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint of Megatron-LM (torch_dist or mp_rank_XX) as one of ours."
    parser.add_argument("source", metavar="MEGATRON_DIR", help="its save folder, or one iteration's")
    parser.add_argument("out", metavar="OUT", help="run folder to write")
    parser.add_argument(
        "--trust", action="store_true", help="read pickles that name Megatron's classes, without these"
    )
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="entries without padding (default: its arguments')"
    )
    parser.add_argument("--allow", action="store_true", help="take one with missing or extra tensors")


def run_megatron(args: argparse.Namespace) -> int:
    from megalith.bridge.megatron.megatron_importer import import_megatron

    step = import_megatron(
        args.source, args.out, trust=args.trust, vocab_size=args.vocab_size, allow=args.allow
    )
    print(f"wrote {printable(step)}")
    return 0


def add_megatron_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint as one that Megatron core loads."
    parser.add_argument("checkpoint", metavar="CKPT", help="run folder or one of its step folders")
    parser.add_argument("out", metavar="MEGATRON_DIR", help="save folder to write")
    parser.add_argument("--format", choices=FORMATS, default="torch_dist", help="its form")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline ranks")
    parser.add_argument(
        "--optimizer", action="store_true", help="with the optimizer's state and the schedule (torch_dist)"
    )
    _add_written_arguments(parser)


def run_megatron_export(args: argparse.Namespace) -> int:
    from megalith.bridge.megatron.megatron_exporter import export_megatron

    options = dict(ckpt_format=args.format, tp=args.tp, pp=args.pp, with_optimizer=args.optimizer)
    print(f"wrote {printable(export_megatron(args.checkpoint, args.out, **options, **_written(args)))}")
    return 0


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Convert weights between Hugging Face's form, Megatron's and ours; also python -m megalith.convert."
    )
    kinds = {"source": ("hf", "megatron", "megalith"), "target": ("hf", "megatron", "megalith")}
    for side, choices in kinds.items():
        parser.add_argument(f"--{side}", required=True, choices=choices)
    parser.add_argument("--input-path", required=True, metavar="PATH", help="folder to read, or a hub name")
    parser.add_argument("--output-path", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--target-tp", "--tensor-model-parallel-size", "--tp", type=int, default=1, metavar="N",
                        help="tensor-parallel ranks of the target, where it is megatron")  # fmt: skip
    parser.add_argument("--target-pp", "--pipeline-model-parallel-size", "--pp", type=int, default=1, metavar="N",
                        help="pipeline ranks of the target, where it is megatron")  # fmt: skip
    parser.add_argument(
        "--source-tp", type=int, metavar="N", help="of the source; compared with what it says"
    )
    parser.add_argument(
        "--source-pp", type=int, metavar="N", help="of the source; compared with what it says"
    )
    parser.add_argument("--ckpt-format", choices=FORMATS, default="torch_dist", help="the target's form")
    parser.add_argument(
        "--trust", action="store_true", help="read pickles that name Megatron's classes, without these"
    )
    _add_written_arguments(parser)


def run_convert(args: argparse.Namespace) -> int:
    from megalith.bridge.megatron.megatron_exporter import convert

    options = {}
    if args.target == "megatron":
        options = dict(ckpt_format=args.ckpt_format, tp=args.target_tp, pp=args.target_pp, **_written(args))
    sizes = args.source_tp, args.source_pp
    done = convert(args.input_path, args.output_path, args.target, args.source, sizes, args.trust, **options)
    print(f"wrote {printable(done)}")
    return 0


def _add_written_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: the run's precision)")
    parser.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="that of the job which is to load it",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="that job's: its vocabulary is padded to a multiple of N · tensor-parallel ranks",
    )


def _written(args: argparse.Namespace) -> dict[str, object]:
    return {
        name: getattr(args, name) for name in ("dtype", "transformer_impl", "make_vocab_size_divisible_by")
    }


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint as a folder that transformers loads."
    parser.add_argument("checkpoint", metavar="CKPT", help="run folder or one of its step folders")
    parser.add_argument("out", metavar="HF_DIR", help="folder to write")
    parser.add_argument("--family", metavar="NAME", help="architecture or model type (default: what fits)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of the weights (default: the run's precision)",
    )
    parser.add_argument(
        "--quantize",
        choices=FORMS,
        help="the layers' matrices in a byte each, for inference: fp8 in blocks of 128 × 128, int8 by rows",
    )
    parser.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="largest file, in 10⁹ bytes"
    )
    _add_verify(parser)


def run_export(args: argparse.Namespace) -> int:
    from megalith.bridge.exporter import export_hf

    if args.quantize and args.verify:
        raise ConfigError("--verify compares bits, and --quantize rounds them; leave one out")
    result = export_hf(
        args.checkpoint,
        args.out,
        family=args.family,
        dtype=args.dtype,
        quantize=args.quantize,
        shard_bytes=int(args.shard_gb * 1e9),
    )
    for note in result.notes:
        print(printable(note), file=sys.stderr)
    print(f"wrote {printable(result.path)} ({result.family.architecture})")
    if args.verify:
        from megalith.bridge.verify import certificate_line, certify

        print(certificate_line(certify(result.checkpoint.folder, result.path, args.out)))
    return 0


def add_lora_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a run's adapters in PEFT's format."
    parser.add_argument("run_dir", metavar="RUN", help="folder of a run with lora.rank, or one of its steps")
    parser.add_argument("out", metavar="PEFT_DIR", help="folder to write")
    parser.add_argument("--family", metavar="NAME", help="architecture or model type (default: the base's)")


def run_lora_export(args: argparse.Namespace) -> int:
    from megalith.bridge.adapter_folder import export_adapters

    family = export_adapters(args.run_dir, args.out, args.family)
    print(f"wrote {printable(args.out)}, for {family.architecture}")
    return 0


def add_lora_merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write base + adapters as a checkpoint, to train, to generate from or to export."
    parser.add_argument(
        "source", metavar="ADAPTERS", help="run with lora.rank, a step of one, or a PEFT folder"
    )
    parser.add_argument("out", metavar="OUT", help="run folder to write")
    parser.add_argument(
        "--base", help="run or Hugging Face folder of the base (default: what ADAPTERS names)"
    )


def run_lora_merge(args: argparse.Namespace) -> int:
    from megalith.bridge.adapter_folder import merge

    print(f"wrote {printable(merge(args.source, args.out, args.base))}")
    return 0


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every tensor and a batch's logits, and write a certificate beside the output",
    )


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
    found = same = 0
    with Progress("diff", part_bytes(a, args.part)) as progress:
        for part in dict.fromkeys((*_parts(a, args.part), *_parts(b, args.part))):
            names = a.manifest.tensors.get(part, {}).keys() | b.manifest.tensors.get(part, {}).keys()
            different = 0
            for difference in differences(a, b, part, progress):
                different += 1
                print(f"{printable(difference.name)}: {difference.description}", flush=True)
            found, same = found + different, same + len(names) - different
    print(f"{found} tensors differ, {same} are the same to the bit")
    return 1 if found else 0


def run_reshard(args: argparse.Namespace) -> int:
    from megalith.checkpoint.rewrite import reshard
    from megalith.remote import open_location

    if args.files < 1:
        raise ConfigError(f"--files is {args.files}; it counts from 1")
    step = reshard(_open(args.path, None), open_location(args.output), args.files)
    print(f"wrote {printable(step)}")
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
    """Of a folder of Accelerate's save_state our checkpoint in it, or what legacy_bin has written; None of another."""
    if (folder / "megalith").is_dir():
        return _open(str(folder / "megalith"), part)
    if not any(folder.glob("pytorch_model_tp_*.bin")):
        return None
    from megalith.checkpoint.shard_files import open_shard_files

    return open_shard_files(folder, (part,))


def _open(path: str, part: str | None) -> Checkpoint:
    """The newest whole step, with the files of `part` checked; of all its parts with None."""
    from megalith.checkpoint.open import open_existing

    return open_existing(path, None if part is None else (part,), show_progress=True)


def _parts(checkpoint: Checkpoint, part: str | None) -> list[str]:
    return list(checkpoint.manifest.tensors) if part is None else [part]


def _steps(path: str) -> list[Path | StorePath]:
    """The step folders under a path, in order. Raises CheckpointError when there are none."""
    from megalith.checkpoint.manifest import fetch_error
    from megalith.checkpoint.steps import CHECKPOINTS, STEP, list_steps
    from megalith.remote import open_location

    folder = open_location(path)
    try:
        if STEP.fullmatch(folder.name) and folder.is_dir():
            return [folder]
        folder = folder / CHECKPOINTS if (folder / CHECKPOINTS).is_dir() else folder
        steps = list(list_steps(folder).values()) if folder.is_dir() else []
    except OSError as error:
        raise fetch_error(folder, error) from error
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
