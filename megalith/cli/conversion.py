"""The command line of conversion. What the commands need is imported when they run."""

from __future__ import annotations

import argparse
import sys

from megalith.errors import printable


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
        from megalith.bridge.verify import certify

        print(f"verified: {printable(certify(step, args.source, args.out))}")
    return 0


def add_megatron_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint of Megatron-LM (torch_dist or mp_rank_XX) as one of ours."
    parser.add_argument("source", metavar="MEGATRON_DIR", help="its save folder, or one iteration's")
    parser.add_argument("out", metavar="OUT", help="run folder to write")
    parser.add_argument(
        "--trust", action="store_true", help="read its pickles, by a list of what is allowed in them"
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


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write a checkpoint as a folder that transformers loads."
    parser.add_argument("checkpoint", metavar="CKPT", help="run folder or one of its step folders")
    parser.add_argument("out", metavar="HF_DIR", help="folder to write")
    parser.add_argument("--family", metavar="NAME", help="architecture or model type (default: what fits)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="type of the weights (default: the run's precision)",
    )
    parser.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="GB", help="largest file, in 10⁹ bytes"
    )
    _add_verify(parser)


def run_export(args: argparse.Namespace) -> int:
    from megalith.bridge.exporter import export_hf

    result = export_hf(
        args.checkpoint, args.out, family=args.family, dtype=args.dtype, shard_bytes=int(args.shard_gb * 1e9)
    )
    for note in result.notes:
        print(printable(note), file=sys.stderr)
    print(f"wrote {printable(result.path)} ({result.family.architecture})")
    if args.verify:
        from megalith.bridge.verify import certify

        print(f"verified: {printable(certify(result.checkpoint.folder, result.path, args.out))}")
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
