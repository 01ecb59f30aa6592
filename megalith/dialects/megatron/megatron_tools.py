"""Megatron-LM's tools by their own options: preprocess_data.py, checkpoint/convert.py, and megatron.bridge.convert."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from megalith.dialects.megatron.derive import TOKENIZERS
from megalith.errors import ConfigError, printable

# Options that change nothing that is written: how work is spread, and what is logged.
SPREAD = ("--partitions", "--log-interval", "--workers-to-check", "--max-documents", "--rank", "--dataset-impl",
          "--make-vocab-size-divisible-by", "--tensor-model-parallel-size", "--vocab-extra-ids", "--tiktoken-pattern",
          "--tiktoken-num-special-tokens")  # fmt: skip
SPREAD_SWITCHES = ("--keep-sequential-samples", "--find-optimal-num-workers", "--trust-remote-code")


SIZES = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "tp", "pp", "ep", "etp")
HF_LOADERS = ("llama_mistral", "mixtral_hf")


class ToolOptions(argparse.ArgumentParser):
    """A mistake is a ConfigError like any other."""

    def error(self, message: str) -> None:
        raise ConfigError(f"{self.prog}: {message}; `megalith --help` lists our own commands")


def run_preprocess_data(words: list[str]) -> int:
    """Writes `PREFIX_KEY_document.bin` and `.idx` (`_sentence` with --split-sentences) as Megatron's tool does, also in
    the place of files that are there. Raises ConfigError for options that would change what is written."""
    options = _options().parse_args(words)
    if options.tokenizer_type not in TOKENIZERS:
        raise ConfigError(
            f"--tokenizer-type {options.tokenizer_type} is refused: there are {', '.join(TOKENIZERS)}"
        )
    if options.split_sentences and (options.keep_newlines or options.lang != "english"):
        raise ConfigError(
            "--split-sentences is refused with --keep-newlines and other languages than english: leave them out"
        )
    idle = [flag for flag in (*SPREAD, *SPREAD_SWITCHES) if getattr(options, _name(flag))]
    if idle:
        print(f"note: these options have no effect here: {' '.join(idle)}")
    from megalith.data.preprocessing.preprocess import preprocess
    from megalith.data.tokenizers.open_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(
        TOKENIZERS[options.tokenizer_type],
        options.tokenizer_model,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        vocab_size=options.vocab_size,
    )
    summary = preprocess(
        [options.input],
        options.output_prefix,
        tokenizer,
        options.json_keys,
        append_eod=options.append_eod,
        split_sentences=options.split_sentences,
        workers=options.workers,
        overwrite=True,
    )
    for prefix, documents in zip(summary.prefixes, summary.documents):
        print(f"wrote {printable(prefix)}.bin and .idx: {documents:,} documents")
    return 0


def _options() -> ToolOptions:
    parser = ToolOptions(prog="preprocess_data.py", add_help=False)
    for flag in ("--input", "--output-prefix", "--tokenizer-type"):
        parser.add_argument(flag, required=True)
    for flag in ("--tokenizer-model", "--vocab-file", "--merge-file"):
        parser.add_argument(flag)
    parser.add_argument("--json-keys", nargs="+", default=["text"])
    parser.add_argument("--lang", default="english")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--workers", type=int)
    for flag in ("--append-eod", "--split-sentences", "--keep-newlines", *SPREAD_SWITCHES):
        parser.add_argument(flag, action="store_true")
    for flag in SPREAD:
        parser.add_argument(flag, nargs="+" if flag == "--workers-to-check" else None)
    return parser


def run_convert(words: list[str]) -> int:
    """`python -m megatron.bridge.convert`: between Hugging Face's format and Megatron's, or ours in its place.

    What it writes as `megatron` is a run folder of ours, which any layout loads: sizes change nothing, as a note says.
    """
    parser = ToolOptions(prog="megatron.bridge.convert", add_help=False)
    for flag in ("--source", "--target"):
        parser.add_argument(flag, required=True, choices=("hf", "megatron"))
    for flag in ("--input-path", "--output-path"):
        parser.add_argument(flag, required=True)
    for size in (*SIZES, *(f"{side}-{name}" for side in ("source", "target") for name in SIZES)):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--trust", action="store_true")
    given = parser.parse_args(words)
    sizes = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(given).items()
        if name.endswith(("tp", "pp", "ep", "size")) and value is not None
    ]
    if sizes:
        print(
            f"note: {' '.join(sizes)} have no effect: a checkpoint is of no layout, and any layout loads it"
        )
    return _convert(given.source, given.target, given.input_path, given.output_path, given.trust)


def run_convert_checkpoint(words: list[str]) -> int:
    """Megatron's tools/checkpoint/convert.py, of a GPT: `--loader` says what is read, a run of ours is written."""
    parser = ToolOptions(prog="tools/checkpoint/convert.py", add_help=False)
    for flag in ("--model-type", "--loader", "--saver", "--load-dir", "--save-dir"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--trust", action="store_true")
    given, more = parser.parse_known_args(words)
    if given.model_type != "GPT":
        raise ConfigError(f"--model-type is {given.model_type}; there is GPT")
    if more:
        print(
            f"note: {' '.join(more)} have no effect: what is written is of no layout, and any layout loads it"
        )
    source = "hf" if given.loader in HF_LOADERS else "megatron"
    return _convert(source, "megatron", given.load_dir, given.save_dir, given.trust)


def _convert(source: str, target: str, path: str, output: str, trust: bool) -> int:
    from megalith.bridge.exporter import export_hf
    from megalith.bridge.importer import import_hf
    from megalith.bridge.megatron.megatron_importer import import_megatron

    is_ours = (Path(path) / "checkpoints").is_dir() or (Path(path) / "manifest.json").is_file()
    match source, target:
        case "hf", "megatron":
            written = import_hf(path, output)
        case "megatron", "hf" if is_ours:
            written = export_hf(path, output).path
        case "megatron", "hf":
            with tempfile.TemporaryDirectory(dir=Path(output).absolute().parent) as between:
                import_megatron(path, f"{between}/run", trust=trust)
                written = export_hf(f"{between}/run", output).path
        case "megatron", "megatron" if not is_ours:
            written = import_megatron(path, output, trust=trust)
        case "megatron", "megatron":
            from megalith.checkpoint.open import open_existing
            from megalith.checkpoint.rewrite import reshard

            written = reshard(open_existing(path, None), Path(output), 1)
        case _:
            raise ConfigError(
                "--source hf with --target hf converts nothing; choose megatron for one of them"
            )
    print(f"wrote {printable(written)}")
    return 0


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
