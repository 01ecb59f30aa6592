"""`megalith import-hf`, `export-hf`, `import-megatron`, `export-megatron`, `convert` and `lora`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalith.cli.json_output import add_json_option, print_json, print_written
from megalith.errors import ConfigError, printable

DTYPES = ("float32", "bfloat16", "float16")
FORMATS = ("torch_dist", "torch")
QUANTIZATIONS = ("fp8", "int8")  # as in bridge/quantized.py


def add_import_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a Hugging Face model as a checkpoint to train or generate from."
    parser.add_argument("source", metavar="HF_DIR", help="folder with config.json and weights, or a hub name")
    parser.add_argument("out", metavar="OUT", help="run folder to write")
    parser.add_argument(
        "--allow",
        action="store_true",
        help="initialize missing tensors, ignore extra ones, and accept dtypes that differ from config.json",
    )
    _add_verify(parser)
    add_json_option(parser, "path, certificate (null without --verify)")


def run_import(args: argparse.Namespace) -> int:
    from megalith.bridge.importer import import_hf

    step = import_hf(args.source, args.out, allow=args.allow)
    if not args.json:
        print(f"wrote {printable(step)}")
    certificate = _certify(args, step, args.source)
    if args.json:
        print_json({"path": str(step), "certificate": certificate})
    return 0


def _certify(
    args: argparse.Namespace, checkpoint: Path, folder: str | Path, averaged: bool = False
) -> str | None:
    """Compare `checkpoint` with the Hugging Face `folder` if `--verify` is set, and return the path of the certificate.

    Without `--json`, also print a summary.
    """
    if not args.verify:
        return None
    from megalith.bridge.verify import certificate_line, certify

    certificate = certify(checkpoint, folder, args.out, averaged)
    if not args.json:
        print(certificate_line(certificate))
    return str(certificate)


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a Megatron-LM checkpoint (torch_dist or mp_rank_XX) as a checkpoint of Megalith."
    )
    parser.add_argument(
        "source", metavar="MEGATRON_DIR", help="Megatron-LM's save folder, or one iter_NNNNNNN in it"
    )
    parser.add_argument("out", metavar="OUT", help="run folder to write")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read pickles that refer to Megatron's classes, without importing these",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="vocabulary size without padding (default: the checkpoint's)",
    )
    parser.add_argument(
        "--allow", action="store_true", help="initialize missing tensors and ignore extra ones"
    )
    add_json_option(parser, "path")


def run_megatron(args: argparse.Namespace) -> int:
    from megalith.bridge.megatron.megatron_importer import import_megatron

    step = import_megatron(
        args.source, args.out, trust=args.trust, vocab_size=args.vocab_size, allow=args.allow
    )
    print_written(args, step)
    return 0


def add_megatron_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint as one that Megatron core loads."
    parser.add_argument("checkpoint", metavar="CKPT", help="run folder or one of its step folders")
    parser.add_argument("out", metavar="MEGATRON_DIR", help="save folder to write")
    parser.add_argument("--format", choices=FORMATS, default="torch_dist", help="checkpoint format")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline ranks")
    parser.add_argument(
        "--optimizer", action="store_true", help="include the optimizer's state and the schedule (torch_dist)"
    )
    _add_written_arguments(parser)


def run_megatron_export(args: argparse.Namespace) -> int:
    from megalith.bridge.megatron.megatron_exporter import export_megatron

    options = dict(ckpt_format=args.format, tp=args.tp, pp=args.pp, with_optimizer=args.optimizer)
    print_written(args, export_megatron(args.checkpoint, args.out, **options, **_written(args)))
    return 0


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Convert weights between the formats of Hugging Face, Megatron-LM and Megalith; also "
        "python -m megalith.convert."
    )
    kinds = {"source": ("hf", "megatron", "megalith"), "target": ("hf", "megatron", "megalith")}
    for option, choices in kinds.items():
        parser.add_argument(f"--{option}", required=True, choices=choices)
    parser.add_argument("--input-path", required=True, metavar="PATH", help="folder to read, or a hub name")
    parser.add_argument("--output-path", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--target-tp", "--tensor-model-parallel-size", "--tp", type=int, default=1, metavar="N",
                        help="tensor-parallel ranks of a megatron target")  # fmt: skip
    parser.add_argument("--target-pp", "--pipeline-model-parallel-size", "--pp", type=int, default=1, metavar="N",
                        help="pipeline ranks of a megatron target")  # fmt: skip
    parser.add_argument(
        "--source-tp",
        type=int,
        metavar="N",
        help="expected tensor-parallel size of the source; an error if it differs",
    )
    parser.add_argument(
        "--source-pp", type=int, metavar="N", help="expected pipeline-parallel size of the source"
    )
    parser.add_argument(
        "--ckpt-format",
        choices=FORMATS,
        default="torch_dist",
        help="Megatron's checkpoint format of the target",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="read pickles that refer to Megatron's classes, without importing these",
    )
    _add_written_arguments(parser)


def run_convert(args: argparse.Namespace) -> int:
    from megalith.bridge.megatron.megatron_exporter import convert

    options = {}
    if args.target == "megatron":
        options = dict(ckpt_format=args.ckpt_format, tp=args.target_tp, pp=args.target_pp, **_written(args))
    sizes = args.source_tp, args.source_pp
    done = convert(args.input_path, args.output_path, args.target, args.source, sizes, args.trust, **options)
    print_written(args, done)
    return 0


def _add_written_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights (default: the run's precision)")
    parser.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        default="transformer_engine",
        help="--transformer-impl of the Megatron-LM job that will load the checkpoint",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="--make-vocab-size-divisible-by of that job: the vocabulary is padded to a multiple of N · TP",
    )
    add_json_option(parser, "path")


def _written(args: argparse.Namespace) -> dict[str, object]:
    return {
        name: getattr(args, name) for name in ("dtype", "transformer_impl", "make_vocab_size_divisible_by")
    }


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint as a folder that transformers loads."
    parser.add_argument("checkpoint", metavar="CKPT", help="run folder or one of its step folders")
    parser.add_argument("out", metavar="HF_DIR", help="folder to write")
    parser.add_argument("--family", metavar="NAME", help="architecture or model type (default: detected)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of the weights (default: as imported; the run's precision for weights that were not imported)",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATIONS,
        help="quantize the layers' matrices for inference: fp8 in blocks of 128 × 128, int8 by row",
    )
    parser.add_argument(
        "--multimodal",
        metavar="HF_DIR",
        help="copy the multimodal model in HF_DIR, and replace its language model by this one",
    )
    parser.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="maximum file size in 10⁹ bytes"
    )
    parser.add_argument(
        "--weights",
        choices=("averaged", "trained"),
        default="averaged",
        help="averaged: those of optim.ema_decay or schedule-free AdamW, if there are any (default); trained: those of "
        "the last step",
    )
    _add_verify(parser)
    add_json_option(parser, "path, architecture, notes, certificate (null without --verify)")


def run_export(args: argparse.Namespace) -> int:
    from megalith.bridge.exporter import export_hf

    if args.quantize and args.verify:
        raise ConfigError("--verify compares bits, but --quantize rounds the weights; remove one of the two")
    result = export_hf(
        args.checkpoint,
        args.out,
        family=args.family,
        dtype=args.dtype,
        quantize=args.quantize,
        shard_bytes=int(args.shard_gb * 1e9),
        averaged=args.weights == "averaged",
        multimodal=args.multimodal,
    )
    for note in result.notes:
        print(printable(note), file=sys.stderr)
    if not args.json:
        print(f"wrote {printable(result.path)} ({result.family.architecture})")
    certificate = _certify(args, result.checkpoint.folder, result.path, args.weights == "averaged")
    if args.json:
        names = {"path": str(result.path), "architecture": result.family.architecture}
        print_json(names | {"notes": list(result.notes), "certificate": certificate})
    return 0


def add_lora_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a run's adapters in PEFT's format."
    parser.add_argument("run_dir", metavar="RUN", help="folder of a run with lora.rank, or one of its steps")
    parser.add_argument("out", metavar="PEFT_DIR", help="folder to write")
    parser.add_argument("--family", metavar="NAME", help="architecture or model type (default: the base's)")
    add_json_option(parser, "path, architecture")


def run_lora_export(args: argparse.Namespace) -> int:
    from megalith.bridge.adapters.adapter_folder import export_adapters

    family = export_adapters(args.run_dir, args.out, args.family)
    print_written(args, args.out, f", for {family.architecture}", architecture=family.architecture)
    return 0


def add_lora_merge_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write base + adapters as a checkpoint, to train, to generate from or to export."
    parser.add_argument(
        "source", metavar="ADAPTERS", help="run with lora.rank, a step of one, or a PEFT folder"
    )
    parser.add_argument("out", metavar="OUT", help="run folder to write")
    parser.add_argument(
        "--base", help="run or Hugging Face folder of the base model (default: the one named in ADAPTERS)"
    )
    add_json_option(parser, "path")


def run_lora_merge(args: argparse.Namespace) -> int:
    from megalith.bridge.adapters.merge_adapters import merge

    print_written(args, merge(args.source, args.out, args.base))
    return 0


def _add_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--verify",
        action="store_true",
        help="compare every tensor and a batch's logits, and write a certificate next to the output",
    )
