"""`megalith corpus`, `tokenizer train`, `preprocess` and `data stats|plan|show`. Importing this file is cheap."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict

from megalith.cli.json_output import add_json_option, print_json
from megalith.cli.parser import Arguments
from megalith.errors import LINES, ConfigError, printable
from megalith.tables import counted


def add_corpus_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the Python standard library's source text as JSON Lines: a corpus to start with."
    )
    parser.add_argument("--output", required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    add_json_option(parser, "path, documents, bytes")


def run_corpus(args: argparse.Namespace) -> int:
    from megalith.data.preprocessing.corpus import write_stdlib_corpus

    summary = write_stdlib_corpus(args.output, overwrite=args.overwrite)
    if args.json:
        print_json(asdict(summary))
        return 0
    print(
        f"wrote {counted(summary.documents, 'document')}, {summary.bytes / 1e6:.1f} MB of text, to "
        f"{printable(summary.path)}"
    )
    return 0


def add_tokenizer_train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Train a byte-level byte-pair tokenizer (GPT-2's kind) and write a tokenizer.json."
    _add_input_arguments(parser)
    parser.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="vocabulary size, including the 256 bytes and <|endoftext|>",
    )
    parser.add_argument(
        "--output", required=True, metavar="PATH", help="a .json file, or a folder that gets tokenizer.json"
    )
    parser.add_argument(
        "--min-frequency",
        type=int,
        default=2,
        metavar="N",
        help="merge only pairs that occur N times (default 2)",
    )
    add_json_option(parser, "path, vocab_size, documents, bytes, seconds, notes")


def run_tokenizer_train(args: argparse.Namespace) -> int:
    from megalith.data.tokenizers.train_tokenizer import train_tokenizer

    start = time.monotonic()
    summary = train_tokenizer(
        args.input,
        args.vocab_size,
        args.output,
        args.json_keys,
        min_frequency=args.min_frequency,
        overwrite=args.overwrite,
        max_line_bytes=args.max_line_bytes,
        text_documents=args.text_documents,
    )
    if args.json:
        print_json(asdict(summary) | {"seconds": time.monotonic() - start})
        return 0
    print(
        f"trained {summary.vocab_size:,} entries on {counted(summary.documents, 'document')} ("
        f"{summary.bytes / 1e6:.1f} MB) in {time.monotonic() - start:.1f} s; wrote {printable(summary.path)}"
    )
    for note in summary.notes:
        print(f"note: {printable(note)}")
    if summary.vocab_size < args.vocab_size:
        print(
            f"fewer than the requested {args.vocab_size:,}: no other pair occurs at least {args.min_frequency} times; "
            "use more text for a larger vocabulary"
        )
    return 0


def add_preprocess_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Encode text into Megatron's indexed datasets, PREFIX_KEY_document.bin and .idx."
    parser.add_argument(
        "--dataset",
        metavar="NAME[:SPLIT]",
        help="Hugging Face dataset or .parquet file, in place of --input; its text is written to PREFIX.jsonl",
    )
    _add_input_arguments(parser, or_else="--dataset")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="prefix of the output files: a path or URL"
    )
    parser.add_argument(
        "--tokenizer-type",
        required=True,
        metavar="TYPE",
        help="HuggingFaceTokenizer, SentencePieceTokenizer, GPT2BPETokenizer, TikTokenizer, Llama2Tokenizer, "
        "Llama3Tokenizer, BertWordPieceLowerCase, BertWordPieceCase, ByteTokenizer or NullTokenizer",
    )
    parser.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="tokenizer.json or its folder, .model, .tiktoken, vocab.txt, or a name in the hub cache",
    )
    parser.add_argument(
        "--vocab-file", metavar="FILE", help="GPT2BPETokenizer: vocab.json; BertWordPiece…: vocab.txt"
    )
    parser.add_argument("--merge-file", metavar="FILE", help="GPT2BPETokenizer: merges.txt")
    parser.add_argument(
        "--vocab-size", type=int, metavar="N", help="NullTokenizer: vocabulary size; all ids must be below it"
    )
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument(
        "--add-special-tokens",
        action="store_true",
        help="add the special tokens of the tokenizer's files, such as BOS, around each sequence",
    )
    parser.add_argument(
        "--split-sentences",
        action="store_true",
        help="make each sentence a sequence; the files are named PREFIX_KEY_sentence",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="number of encoding workers (default: one per core; 0: encode in the main thread)",
    )
    parser.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="an unusable line stops the run (default), or is skipped and counted",
    )
    add_json_option(
        parser,
        "prefixes, documents (per prefix), sequences, tokens, bytes, seconds, empty, skipped, bad_lines, notes",
    )


def run_preprocess(args: argparse.Namespace) -> int:
    if (args.dataset is None) == (args.input is None):
        raise ConfigError("preprocess needs either --input FILE or --dataset NAME[:SPLIT]")
    if args.dataset is not None:
        from megalith.data.preprocessing.corpus import write_dataset

        text = f"{args.output_prefix}.jsonl"
        args.input = [write_dataset(args.dataset, text, args.json_keys, overwrite=args.overwrite)]
    from megalith.data.preprocessing.preprocess import preprocess
    from megalith.data.tokenizers.open_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(
        args.tokenizer_type,
        args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
    )
    summary = preprocess(
        args.input,
        args.output_prefix,
        tokenizer,
        args.json_keys,
        append_eod=args.append_eod,
        add_special_tokens=args.add_special_tokens,
        split_sentences=args.split_sentences,
        workers=args.workers,
        on_error=args.on_error,
        overwrite=args.overwrite,
        max_line_bytes=args.max_line_bytes,
        text_documents=args.text_documents,
    )
    if args.json:
        names = "prefixes", "documents", "sequences", "tokens", "bytes", "seconds", "empty", "skipped"
        lists = {"bad_lines": list(map(str, summary.bad_lines)), "notes": list(summary.notes)}
        print_json({name: getattr(summary, name) for name in names} | lists)
        return 0
    for bad in summary.bad_lines:
        print(f"skipped {printable(bad)}")
    if summary.skipped > len(summary.bad_lines):
        print(f"skipped {summary.skipped - len(summary.bad_lines):,} more unusable lines")
    for note in summary.notes:
        print(f"note: {printable(note)}")
    if summary.skipped or summary.empty:
        print(f"skipped {summary.skipped:,} unusable lines and {summary.empty:,} empty documents")
    print(f"{summary.progress_text()} | {summary.seconds:.1f} s")
    for prefix in summary.prefixes:
        print(f"wrote {printable(prefix)}.bin and .idx")
    return 0


def _add_input_arguments(parser: argparse.ArgumentParser, or_else: str | None = None) -> None:
    """Add --input and its options. `or_else` is an option that may be given instead of --input."""
    parser.add_argument(
        "--input",
        nargs="+",
        required=or_else is None,
        metavar="FILE",
        help=".jsonl, .txt (also .gz, .zst), .parquet or .arrow files, folders, quoted globs, URLs, hf://NAME?split=train",
    )
    parser.add_argument(
        "--text-documents",
        choices=("file", "block"),
        default="file",
        help="documents of a .txt file: the file (default), or the blocks of lines between blank lines",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys or columns that hold the text (default: text)",
    )
    parser.add_argument(
        "--max-line-bytes",
        type=int,
        default=32 << 20,
        metavar="N",
        help="maximum size of a line or document in bytes; a longer one is an error (default: 32 MiB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace outputs that exist")


def add_data_show_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data_path", nargs="*", help="dataset prefix, or a blend: 0.7 a 0.3 b")
    _add_config_argument(parser)
    parser.add_argument(
        "--step",
        type=int,
        help="with --config: the step to print, from 1 (default: the next one after the newest checkpoint)",
    )
    parser.add_argument("--seq-length", type=int, help="sequence length; a sample has one token more")
    parser.add_argument("--seed", type=int, default=1234, help="train.seed of the run to imitate")
    parser.add_argument("--num-samples", type=int, help="samples that the run reads from the split")
    parser.add_argument("--split", default="99,1,0", help="data.split of that run")
    parser.add_argument(
        "--which", choices=("train", "valid", "test"), default="train", help="part of the split to read"
    )
    parser.add_argument("--index", help="samples of the dataset to print, like 0,5,9 (default: 0)")
    parser.add_argument(
        "--position",
        help="samples to print by position in the run's reading order, like 0,1,2; also with --config",
    )
    parser.add_argument(
        "--dataloader-type",
        choices=("cyclic", "single"),
        default="cyclic",
        help="data.dataloader_type of that run, for --position",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help='print [{"index": i, "tokens": [...]}], and "position" with --position',
    )
    parser.add_argument("--tokenizer-type", help="tokenizer, to print the text too")
    parser.add_argument("--tokenizer-model", help="file or folder of the tokenizer")


def run_data_show(args: Arguments) -> int:
    from megalith.data.blend import parse_data_path
    from megalith.data.show import render_samples, show_samples

    if args.config is not None:
        return _show_run(args)
    if not args.data_path or args.seq_length is None or args.num_samples is None:
        raise ConfigError(
            "data show needs a dataset prefix with --seq-length and --num-samples, or --config RUN.yaml"
        )
    data_path = args.data_path[0] if len(args.data_path) == 1 else args.data_path
    positions = _whole_numbers("--position", args.position)
    indices = _whole_numbers("--index", args.index or (None if positions else "0"))
    if not 0 <= args.seed < 2**32:
        raise ConfigError(f"--seed is {args.seed}, but must be from 0 to 2^32 - 1")
    tokenizer = None
    if args.tokenizer_type:
        from megalith.data.dataset_tokenizer import check_tokenizer
        from megalith.data.tokenizers.open_tokenizer import build_tokenizer

        tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model)
        check_tokenizer(parse_data_path(data_path)[0], tokenizer)
    samples = show_samples(
        data_path,
        args.seq_length,
        args.seed,
        args.num_samples,
        args.split,
        args.which,
        indices,
        positions,
        args.dataloader_type,
    )
    if args.json:
        print(json.dumps(samples))
        return 0
    print(render_samples(samples, tokenizer and tokenizer.decode))
    return 0


def _show_run(args: Arguments) -> int:
    from megalith.config import RunConfig
    from megalith.data.show import render_samples
    from megalith.training.run_data import RunData

    positions = _whole_numbers("--position", args.position)
    if args.data_path or args.index or (positions and args.step is not None):
        raise ConfigError(
            "data show --config RUN.yaml prints the samples of a step or of positions in the run; use --step or "
            "--position, without a data path"
        )
    run = RunData(RunConfig.load(args.config), from_checkpoint=args.step is None)
    if positions:
        samples = run.samples_at(positions)
        text = run.tokenizer and run.tokenizer.decode
        print(json.dumps(samples) if args.json else render_samples(samples, text))
        return 0
    if args.step is not None:
        run.advance_to(args.step - 1)
    samples = run.samples_of_next_step()
    if args.json:
        print(json.dumps({"step": run.step + 1, "samples": samples}))
        return 0
    print(f"step {run.step + 1}, {counted(len(samples), 'sample')}\n")
    print(render_samples(samples, run.tokenizer and run.tokenizer.decode))
    return 0


def add_data_stats_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print lengths, packing, truncation and the tokens of each source, with histograms."
    parser.add_argument("data_path", nargs="*", help="dataset prefixes")
    _add_config_argument(parser)
    parser.add_argument(
        "--seq-length", type=int, help="sequence length, to count the documents that are split across samples"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_data_stats(args: Arguments) -> int:
    from megalith.training.run_data_text import run_statistics_text

    if (args.config is None) == (not args.data_path):
        raise ConfigError("data stats needs either dataset prefixes or --config RUN.yaml")
    if args.seq_length is not None and args.seq_length < 1:
        raise ConfigError(f"--seq-length is {args.seq_length}, but must be at least 1")
    if args.config is not None:
        from megalith.config import RunConfig
        from megalith.training.run_data import RunData

        statistics = RunData(RunConfig.load(args.config)).statistics()
    else:
        from megalith.data.indexed import IndexedDataset
        from megalith.training.run_data import document_statistics

        datasets = {
            path: document_statistics(IndexedDataset(path).document_lengths(), args.seq_length)
            for path in args.data_path
        }
        statistics = {"data": {"sources": datasets}}
    print(json.dumps(statistics) if args.json else run_statistics_text(statistics))
    return 0


def add_data_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the samples, tokens and epochs of each training source over the run."
    parser.add_argument("run_file", metavar="RUN.yaml", help="the run file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_data_plan(args: Arguments) -> int:
    from megalith.config import RunConfig
    from megalith.data.source_plan import plan_text
    from megalith.training.run_data import RunData

    plan = RunData(RunConfig.load(args.run_file)).plan()
    print(json.dumps(plan) if args.json else printable(plan_text(plan, plan["steps"]), LINES))
    return 0


def _add_config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="RUN.yaml", help="in place of a dataset: the data of a run file")


def _whole_numbers(flag: str, text: str | None) -> list[int]:
    try:
        return [int(i) for i in text.split(",")] if text else []
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; write comma-separated whole numbers, such as 0,5,9") from None
