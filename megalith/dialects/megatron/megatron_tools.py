"""Megatron-LM's tools preprocess_data.py and checkpoint/convert.py, with their options."""

from __future__ import annotations

import argparse

from megalith.dialects.megatron.derive.data_flags import TOKENIZERS
from megalith.errors import ConfigError, printable
from megalith.tables import counted

# Options that do not affect the output: distribution of the work, and logging.
SPREAD = ("--partitions", "--log-interval", "--workers-to-check", "--max-documents", "--rank", "--dataset-impl",
          "--make-vocab-size-divisible-by", "--tensor-model-parallel-size", "--vocab-extra-ids")  # fmt: skip
TIKTOKEN = {"--tiktoken-pattern": "v2", "--tiktoken-num-special-tokens": "1000"}  # the only supported values
SPREAD_SWITCHES = ("--keep-sequential-samples", "--find-optimal-num-workers", "--trust-remote-code")
NO_SPECIAL_TOKENS = "--tokenizer-hf-no-include-special-tokens"

HF_LOADERS = ("llama_mistral", "mixtral_hf")


class ToolOptions(argparse.ArgumentParser):
    """Argument parser that raises ConfigError."""

    def error(self, message: str) -> None:
        raise ConfigError(f"{self.prog}: {message}; `megalith --help` lists Megalith's own commands")


def run_preprocess_data(words: list[str]) -> int:
    """Write `PREFIX_KEY_document.bin` and `.idx` (`_sentence` with --split-sentences) as Megatron's tool does.

    Existing files are replaced. Raises ConfigError for unsupported options that affect the output.
    """
    options = _options().parse_args(words)
    if options.tokenizer_type not in TOKENIZERS:
        raise ConfigError(
            f"--tokenizer-type {options.tokenizer_type} is not supported; use one of {', '.join(TOKENIZERS)}"
        )
    if options.split_sentences and (options.keep_newlines or options.lang != "english"):
        raise ConfigError(
            "--split-sentences is not supported with --keep-newlines or languages other than english; remove one of "
            "them"
        )
    for flag, there in TIKTOKEN.items():
        if options.tokenizer_type == "TikTokenizer" and (value := getattr(options, _name(flag))) not in (
            None,
            there,
        ):
            raise ConfigError(
                f"{flag} {value} is not supported, because other values than {there} split text differently; use "
                f"{there}"
            )
    ignored = [flag for flag in (*SPREAD, *SPREAD_SWITCHES) if getattr(options, _name(flag))]
    if ignored:
        print(f"note: these options have no effect in Megalith: {' '.join(ignored)}")
    from megalith.data.preprocessing.preprocess import preprocess
    from megalith.data.tokenizers.open_tokenizer import build_tokenizer

    tokenizer = build_tokenizer(
        TOKENIZERS[options.tokenizer_type],
        options.tokenizer_model,
        vocab_file=options.vocab_file,
        merge_file=options.merge_file,
        vocab_size=options.vocab_size,
    )
    adds_special_tokens = (
        options.tokenizer_type == "HuggingFaceTokenizer"
        and not options.tokenizer_hf_no_include_special_tokens
    )
    if adds_special_tokens and (tokenizer.prefix or tokenizer.suffix):
        print(
            f"note: each text gets the tokenizer's special tokens, {tokenizer.prefix} before it and "
            f"{tokenizer.suffix} after it, as in Megatron; --tokenizer-hf-no-include-special-tokens leaves them out"
        )
    summary = preprocess(
        [options.input],
        options.output_prefix,
        tokenizer,
        options.json_keys,
        append_eod=options.append_eod,
        add_special_tokens=adds_special_tokens,
        split_sentences=options.split_sentences,
        workers=options.workers,
        overwrite=True,
    )
    for prefix, documents in zip(summary.prefixes, summary.documents):
        print(f"wrote {printable(prefix)}.bin and .idx: {counted(documents, 'document')}")
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
    for flag in ("--append-eod", "--split-sentences", "--keep-newlines", NO_SPECIAL_TOKENS, *SPREAD_SWITCHES):
        parser.add_argument(flag, action="store_true")
    for flag in (*SPREAD, *TIKTOKEN):
        parser.add_argument(flag, nargs="+" if flag == "--workers-to-check" else None)
    return parser


def run_convert_checkpoint(words: list[str]) -> int:
    """Convert a GPT like Megatron's tools/checkpoint/convert.py.

    `--loader` names the input format. Writes rank files.
    """
    parser = ToolOptions(prog="tools/checkpoint/convert.py", add_help=False)
    for flag in ("--model-type", "--loader", "--saver", "--load-dir", "--save-dir"):
        parser.add_argument(flag, required=True)
    for flag in ("--target-tensor-parallel-size", "--target-pipeline-parallel-size"):
        parser.add_argument(flag, type=int, default=1)
    parser.add_argument("--make-vocab-size-divisible-by", type=int, default=128)
    parser.add_argument("--target-transformer-impl", choices=("transformer_engine", "local"))
    parser.add_argument("--trust", action="store_true")
    options, more = parser.parse_known_args(words)
    if options.model_type != "GPT":
        raise ConfigError(f"--model-type is {options.model_type}, but only GPT is supported; use GPT")
    if more:
        print(f"note: {' '.join(more)} have no effect: the checkpoint determines them")
    from megalith.bridge.megatron.megatron_exporter import convert

    written = convert(
        options.load_dir,
        options.save_dir,
        "megatron",
        "hf" if options.loader in HF_LOADERS else "megatron",
        trust=options.trust,
        ckpt_format="torch",
        tp=options.target_tensor_parallel_size,
        pp=options.target_pipeline_parallel_size,
        transformer_impl=options.target_transformer_impl or "transformer_engine",
        make_vocab_size_divisible_by=options.make_vocab_size_divisible_by,
    )
    print(f"wrote {printable(written)}")
    return 0


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
