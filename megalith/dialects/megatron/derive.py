"""Settings that depend on several of Megatron's flags: one function per subject.

Each function runs once per command line, even without its flags, so that Megatron's defaults apply. Its docstring names
the settings and is shown by `megalith megatron flags`.
"""

from __future__ import annotations

import ast
import json
import math
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalith.config.base import Decides
from megalith.config.dense import RopeScaling
from megalith.config.model import ModelConfig
from megalith.launch.lock import LOCK_NAME

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags

BETA_FAST, BETA_SLOW, MLA_ORIGINAL_LENGTH = 32.0, 1.0, 4096  # defaults without flags
YARN_FLAGS = (
    "--yarn-original-max-position-embeddings",
    "--yarn-beta-fast",
    "--yarn-beta-slow",
    "--no-yarn-correction-range-round-to-int",
)
UNREAD_WITH_LATENTS = ("--use-rope-scaling", "--rotary-seq-len-interpolation-factor", *YARN_FLAGS)
TOKENIZERS = {
    "GPT2BPETokenizer": "GPT2BPETokenizer",
    "HuggingFaceTokenizer": "HuggingFaceTokenizer",
    "SentencePieceTokenizer": "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer": "SentencePieceTokenizer",
    "Llama2Tokenizer": "Llama2Tokenizer",
    "Llama3Tokenizer": "Llama3Tokenizer",
    "BertWordPieceLowerCase": "BertWordPieceLowerCase",
    "BertWordPieceCase": "BertWordPieceCase",
    "TikTokenizer": "TikTokenizer",
    "NullTokenizer": "NullTokenizer",
}
MOST_LAYERS = 10_000
RECOMPUTED = ("core_attn", "mlp", "layernorm")


def precision(flags: ParsedFlags) -> None:
    """Set train.precision: bf16, fp16, or fp32 without either flag."""
    if flags["--bf16"] and flags["--fp16"]:
        flags.problems.append("--bf16 and --fp16 contradict each other; leave one out")
    for flag in ("--bf16", "--fp16"):
        if flags[flag]:
            flags.set("train.precision", flag.removeprefix("--"))


def masked_words(flags: ParsedFlags) -> None:
    """Set the masking and the sizes of pretrain_bert and pretrain_t5. pretrain_gpt reads none of these flags.

    Both set model.model_type, data.mask_prob and data.short_seq_prob. pretrain_bert also sets model.bert_binary_head
    and model.lm_head_activation, and pretrain_t5 the decoder's sizes.
    """
    program = flags.program.removeprefix("pretrain-")
    others = [flag for flag, readers in ENCODER_FLAGS.items() if flag in flags and program not in readers]
    if others:
        flags.notes.append(f"{' '.join(others)} changes nothing: pretrain_{program}.py does not read it")
    if program == "gpt":
        return
    flags.set("model.model_type", program)
    flags.set("data.mask_prob", flags["--mask-prob"])
    flags.set("data.short_seq_prob", flags["--short-seq-prob"])
    if program == "bert":
        flags.set("model.bert_binary_head", not flags["--bert-no-binary-head"])
        flags.set("model.lm_head_activation", "gelu")  # whatever the MLP has
        return
    encoder = flags["--num-layers"] or flags["--encoder-num-layers"]
    if encoder is None:
        flags.problems.append(
            "pretrain_t5.py needs --encoder-num-layers (or --num-layers), the encoder's; give it"
        )
        return
    flags.set("model.num_layers", encoder + (flags["--decoder-num-layers"] or encoder))
    flags.set("model.encoder_num_layers", encoder)
    flags.set("model.add_output_bias", True)
    if flags["--decoder-seq-length"] is not None:
        flags.set("data.decoder_seq_length", flags["--decoder-seq-length"])
    flags.set("data.vocab_extra_ids", flags["--vocab-extra-ids"])
    if flags["--position-embedding-type"] == "relative":
        flags.set("model.relative_attention_num_buckets", flags["--relative-attention-num-buckets"])
        flags.set("model.relative_attention_max_distance", flags["--relative-attention-max-distance"])


ENCODER_FLAGS = {
    "--bert-no-binary-head": ("bert",),
    "--mask-prob": ("bert", "t5"),
    "--short-seq-prob": ("bert", "t5"),
    "--decoder-num-layers": ("t5",),
    "--decoder-seq-length": ("t5",),
    "--vocab-extra-ids": ("t5",),
    "--relative-attention-num-buckets": ("t5",),
    "--relative-attention-max-distance": ("t5",),
}  # and which programs read them


def sink(flags: ParsedFlags) -> None:
    """Set model.softmax_type.

    Types other than vanilla have attention dropout 0 by default, while Megatron's default is 0.1.
    """
    if "--softmax-type" in flags:
        flags.set("model.softmax_type", flags["--softmax-type"])
    if flags["--softmax-type"] != "vanilla" and "--attention-dropout" not in flags:
        flags.set("model.attention_dropout", 0.0)
        flags.notes.append(
            f"--softmax-type {flags['--softmax-type']} has no attention dropout here: it is off, where without "
            "--attention-dropout Megatron's is 0.1; give --attention-dropout 0 to both for the same training"
        )


def heads(flags: ParsedFlags) -> None:
    """Set model.num_query_groups, if --group-query-attention is present."""
    if flags["--multi-latent-attention"]:
        return
    if flags["--group-query-attention"]:
        flags.set("model.num_query_groups", flags["--num-query-groups"])
    elif "--num-query-groups" in flags and flags["--num-query-groups"] != flags["--num-attention-heads"]:
        flags.notes.append(
            f"--num-query-groups {flags['--num-query-groups']} has no effect without --group-query-attention, as in "
            "Megatron: every query head has its own keys and values; give that flag too if you mean grouped heads"
        )


def positions(flags: ParsedFlags) -> None:
    """Set model.position_embedding_type, the rotary settings and model.rope_scaling.

    --multi-latent-attention always uses RoPE. With it, learned_absolute sets model.add_position_embedding.
    """
    kind = "rope" if flags["--use-rotary-position-embeddings"] else flags["--position-embedding-type"]
    latent = flags["--multi-latent-attention"]
    if latent and kind == "none":
        kind = "rope"  # latent attention always uses RoPE
    if kind == "relative" and flags.program == "pretrain-t5":
        flags.set("model.position_embedding_type", kind)
        return
    if kind == "none":
        flags.set("model.position_embedding_type", "none")
        return
    if kind not in ("learned_absolute", "rope", "yarn"):
        flags.problems.append(
            f"--position-embedding-type {kind} is refused: there are learned_absolute, rope, yarn and none"
        )
        return
    if kind == "learned_absolute" and latent:
        flags.set("model.add_position_embedding", not flags["--no-position-embedding"])
    elif kind == "learned_absolute":
        if flags["--no-position-embedding"]:
            flags.problems.append(
                "--no-position-embedding is refused without rotary positions: Megatron has removed it, and every model "
                "here has positions; give --position-embedding-type rope, or leave it out"
            )
        return
    flags.set("model.position_embedding_type", "rope")
    flags.set("model.rotary_base", flags["--rotary-base"])
    if flags["--rotary-percent"] != 1 and not (latent and flags["--rope-type"] != "rope"):
        flags.set("model.rotary_percent", flags["--rotary-percent"])
    if flags["--rotary-interleaved"]:
        flags.set("model.rotary_interleaved", True)
    if (frequency := flags["--no-rope-freq"]) is not None:
        flags.set("model.no_rope_freq", _layers(flags, "--no-rope-freq", frequency))
    if scaling := _rope_scaling(flags, kind, latent):
        flags.set("model.rope_scaling", scaling)


def _rope_scaling(flags: ParsedFlags, kind: str, latent: bool) -> dict[str, Any] | None:
    factor = flags["--rotary-scaling-factor"]
    unread = [flag for flag in UNREAD_WITH_LATENTS if flags[flag]]
    if latent and unread:
        flags.notes.append(f"{' '.join(unread)} has no effect with --multi-latent-attention, as in Megatron")
    if kind == "yarn" or (latent and flags["--rope-type"] != "rope"):
        return _yarn(flags, factor, latent) if factor > 1 else None
    if latent:
        if flags["--mscale-all-dim"] and factor > 1:
            flags.problems.append(
                f"--mscale-all-dim {flags['--mscale-all-dim']} is refused with --rope-type rope and "
                f"--rotary-scaling-factor {factor}: Megatron scales the attention scores but not the positions then, "
                "which no model here does; leave one of them out"
            )
        return None
    if flags["--use-rope-scaling"]:
        return {"type": "llama3", "factor": flags["--rope-scaling-factor"]}
    if (stretch := flags["--rotary-seq-len-interpolation-factor"] or 1) > 1:
        return {"type": "linear", "factor": float(stretch)}
    return None


def _yarn(flags: ParsedFlags, factor: float, latent: bool) -> dict[str, Any] | None:
    length, fast, slow, exact = (None if latent else flags[flag] for flag in YARN_FLAGS)
    original = length or (MLA_ORIGINAL_LENGTH if latent else None)
    if original is None:
        flags.problems.append(
            f"--rotary-scaling-factor {factor} with yarn needs the context length before the extension; give "
            "--yarn-original-max-position-embeddings"
        )
        return None
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": fast or BETA_FAST,
        "beta_slow": slow or BETA_SLOW,
        "truncate": not exact,
    }
    mscale, of_all = flags["--mscale"], flags["--mscale-all-dim"]
    if of_all and latent:
        return {**scaling, "mscale": mscale, "mscale_all_dim": of_all}
    if not of_all and mscale == 1.0:
        return scaling  # with the default magnitude
    magnitude = RopeScaling(factor=factor).magnitude
    return {**scaling, "attention_factor": magnitude(mscale) / (magnitude(of_all) if of_all else 1)}


def activation(flags: ParsedFlags) -> None:
    """Set model.swiglu, model.activation and model.gated_linear_unit.

    The default is GELU, with the tanh approximation if Megatron fuses it with a bias.
    """
    chosen = [flag for flag in ("--swiglu", "--squared-relu", "--quick-geglu") if flags[flag]]
    if len(chosen) > 1:
        flags.problems.append(f"{' and '.join(chosen)} contradict each other; leave one")
    if "--swiglu" in chosen:
        flags.set("model.swiglu", True)
    elif "--squared-relu" in chosen:
        flags.set("model.activation", "squared_relu")
    elif "--quick-geglu" in chosen:
        flags.set("model.activation", "quick_gelu")
        flags.set("model.gated_linear_unit", True)
    elif not flags["--openai-gelu"] and (flags["--no-bias-gelu-fusion"] or flags["--disable-bias-linear"]):
        flags.set("model.activation", "gelu")


def latent_attention(flags: ParsedFlags) -> None:
    """Set model.multi_latent_attention, and with it model.latent_layernorm for --qk-layernorm.

    Without latent attention, set model.qk_layernorm, or model.qk_l2_norm, which has priority as in Megatron.
    """
    if flags["--qk-l2-norm"]:
        flags.set("model.qk_l2_norm", True)
    if not flags["--multi-latent-attention"]:
        if flags["--qk-layernorm"] and not flags["--qk-l2-norm"]:
            flags.set("model.qk_layernorm", True)
        return
    flags.set("model.multi_latent_attention", True)
    flags.tree["model"].pop("kv_channels", None)  # Megatron does not read it then
    if not flags["--qk-layernorm"]:
        flags.set("model.latent_layernorm", False)


def linear_attention(flags: ParsedFlags) -> None:
    """Set model.experimental_attention_variant and the settings it needs.

    Without a variant, its other flags are ignored, as in Megatron.
    """
    variant, frequency = flags["--experimental-attention-variant"], flags["--linear-attention-freq"]
    if variant is None:
        return
    if variant not in ("gdn", "gated_delta_net"):
        flags.problems.append(
            f"--experimental-attention-variant {variant} is refused: only gated_delta_net is supported; choose it, "
            "or remove the flag"
        )
        return
    if frequency is None:
        flags.problems.append(
            f"--experimental-attention-variant {variant} is refused without --linear-attention-freq, which selects its "
            "layers; give it, as 4 or ([1]*3+[0]*1)*12"
        )
        return
    flags.set("model.experimental_attention_variant", "gated_delta_net")
    flags.set("model.linear_attention_freq", _layers(flags, "--linear-attention-freq", frequency))
    for name in ("conv-kernel-dim", "key-head-dim", "value-head-dim", "num-key-heads", "num-value-heads"):
        flags.set(f"model.linear_{name.replace('-', '_')}", flags[f"--linear-{name}"])


def window(flags: ParsedFlags) -> None:
    """Set model.window_size and model.window_attn_skip_freq."""
    if flags["--window-size"] is None:
        return
    sizes = re.findall(r"-?\d+", flags["--window-size"])
    if len(sizes) != 2:
        flags.problems.append(
            f"--window-size is {flags['--window-size']!r}: two numbers are needed, like 4095,0"
        )
        return
    flags.set("model.window_size", [int(size) for size in sizes])
    if (frequency := flags["--window-attn-skip-freq"]) is not None:
        flags.set("model.window_attn_skip_freq", _layers(flags, "--window-attn-skip-freq", frequency))


def _layers(flags: ParsedFlags, flag: str, text: Any) -> int | list[int] | None:
    """Parse a number, or lists of numbers with `*` and `+` such as `([0]*3+[1]*58)`."""

    def value(node: ast.expr) -> int | list[int]:
        match node:
            case ast.Constant(value=int(number)) if type(number) is int and abs(number) < MOST_LAYERS:
                return number
            case ast.List(elts=elements):
                return [value(element) for element in elements]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                factors = value(left), value(right)
                if math.prod(len(x) if isinstance(x, list) else abs(x) for x in factors) < MOST_LAYERS:
                    return factors[0] * factors[1]
        raise ValueError(ast.unparse(node))

    try:
        return value(ast.parse(str(text).strip(), mode="eval").body)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        flags.problems.append(
            f"{flag} is {text!r}: a number is needed, or lists of numbers with * and +, like ([0]*3+[1]*58)"
        )
        return None


def vocabulary(flags: ParsedFlags) -> None:
    """Set model.vocab_size and model.make_vocab_size_divisible_by.

    The size is one larger for a NullTokenizer, whose end of document is an extra token. The divisor is multiplied by
    the tensor-parallel size, because Megatron applies it per rank.
    """
    kind, size = flags["--tokenizer-type"], flags["--vocab-size"]
    if kind == "NullTokenizer":
        if size is None:
            flags.problems.append("--tokenizer-type NullTokenizer needs --vocab-size; give it")
        else:
            flags.set("model.vocab_size", size + 1)
    elif size is not None and (kind in (None, "TikTokenizer")):
        flags.set("model.vocab_size", size)
    elif size is not None:
        flags.notes.append(
            f"--vocab-size {size} has no effect: the vocabulary is the {kind}'s, as in Megatron"
        )
    multiple = flags["--make-vocab-size-divisible-by"] * max(flags["--tensor-model-parallel-size"], 1)
    if flags["--no-pad-vocab-size"] or flags["--disable-pad-vocab-size"]:
        multiple = 1
    if flags["--padded-vocab-size"] is not None:
        multiple = flags["--padded-vocab-size"]
    flags.set("model.make_vocab_size_divisible_by", multiple)


def tokenizer(flags: ParsedFlags) -> None:
    """Set data.tokenizer_type.

    The default is GPT2BPETokenizer with --vocab-file and --merge-file. For pretrain_bert and pretrain_t5 it is
    BertWordPieceLowerCase with --vocab-file.
    """
    kind = flags["--tokenizer-type"]
    if kind is None and flags.program != "pretrain-gpt" and "--vocab-file" in flags:
        kind = "BertWordPieceLowerCase"
    if kind is None and "--vocab-file" in flags and "--merge-file" in flags:
        kind = "GPT2BPETokenizer"
    if kind is None:
        return
    if kind not in TOKENIZERS:
        flags.problems.append(f"--tokenizer-type {kind} is refused: there are {', '.join(TOKENIZERS)}")
        return
    flags.set("data.tokenizer_type", TOKENIZERS[kind])


def lengths(flags: ParsedFlags) -> None:
    """Set data.seq_length and model.num_layers, also from the encoder's flags. A hybrid pattern determines the number
    of layers itself."""
    is_hybrid = any(flags[f"--hybrid-{name}-pattern"] is not None for name in ("layer", "override"))
    for flag, older, path in (
        ("--seq-length", "--encoder-seq-length", "data.seq_length"),
        ("--num-layers", "--encoder-num-layers", "model.num_layers"),
    ):
        values = {flags[name] for name in (flag, older)} - {None}
        if len(values) > 1:
            flags.problems.append(
                f"{flag} {flags[flag]} and {older} {flags[older]} contradict each other; leave one"
            )
        if path == "model.num_layers" and (is_hybrid or flags.program == "pretrain-t5"):
            continue
        for value in values:
            flags.set(path, value)


def batch(flags: ParsedFlags) -> None:
    """Set train.global_batch_size, by default one micro-batch per model replica, or a batch size schedule.

    The schedule sets train.step_batch_size_schedule, whose thresholds are tokens in the flag and samples in the
    setting, and optim.schedule_unit to samples. --rampup-batch-size is ignored, as by core 0.20.
    """
    size = flags["--global-batch-size"]
    if flags["--step-batch-size-schedule"] is not None:
        steps = _batch_steps(flags, flags["--step-batch-size-schedule"])
        if steps and size not in (None, steps[-1][1]):
            flags.problems.append(
                f"--global-batch-size {size} and --step-batch-size-schedule, which ends with {steps[-1][1]}, "
                "contradict each other; leave the first out"
            )
        flags.set("train.step_batch_size_schedule", steps)
        size = steps[-1][1] if steps else 1
        if steps and flags["--train-samples"] is None:
            _schedules_by_samples(flags, size)
    if size is None and flags["--micro-batch-size"] is not None:
        devices = math.prod(flags[f"--{name}-size"] for name in ("tensor-model-parallel", "pipeline-model-parallel",
                                                                 "context-parallel"))  # fmt: skip
        size = flags["--micro-batch-size"] * max((flags.world_size or devices) // devices, 1)
        flags.notes.append(f"the global batch size is {size} by default: one micro-batch per model replica")
    if size is not None:
        flags.set("train.global_batch_size", size)
    if (ramp := flags["--rampup-batch-size"]) is not None:
        flags.notes.append(
            f"--rampup-batch-size {' '.join(map(str, ramp))} is ignored, as by core 0.20, which replaced it by "
            "--step-batch-size-schedule: every step has the full batch. For the ramp of earlier versions set "
            f"train.rampup_batch_size: {ramp} in a run file (--emit)"
        )


def _schedules_by_samples(flags: ParsedFlags, size: int) -> None:
    flags.set("optim.schedule_unit", "samples")
    flags.notes.append(
        "with --step-batch-size-schedule, learning rate and weight decay depend on samples, as in Megatron; lengths in "
        f"iterations count {size} samples each, the schedule's last batch. Core 0.20 counts --micro-batch-size × model "
        "replicas: for equal rates give --train-samples, --lr-decay-samples and --lr-warmup-samples"
    )


def _batch_steps(flags: ParsedFlags, text: str) -> list[list[int]]:
    """Parse pairs of tokens and batch sizes such as `0:768 250B:1536`; return [samples, size] each."""
    length = flags["--seq-length"] or flags["--encoder-seq-length"] or 1
    try:
        pairs = [step.split(":") for step in text.replace(",", " ").split()]
        steps = sorted([_count(tokens) // length, _count(size)] for tokens, size in pairs)
    except (ValueError, OverflowError):
        steps = []
    if not steps or steps[0][0] != 0:
        flags.problems.append(
            f"--step-batch-size-schedule is {text!r}: TOKENS:SIZE pairs are needed, the first from 0, like "
            "'0:768 250B:1536'"
        )
        return []
    return steps


def _count(text: str) -> int:
    """Return the number in a text such as `250B` (250,000,000,000), as in Megatron-LM."""
    text = text.strip().upper()
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:], 1)
    return int(float(text if factor == 1 else text[:-1]) * factor)


def datasets(flags: ParsedFlags) -> None:
    """Set data.data_path and data.split, or the data paths of each split, from flags or from a file."""
    joint = [
        flag for flag in ("--data-path", "--data-args-path", "--per-split-data-args-path") if flags[flag]
    ]
    split_flags = [
        flag for flag in ("--train-data-path", "--valid-data-path", "--test-data-path") if flags[flag]
    ]
    if len(joint) > 1 or (joint and split_flags) or (flags["--mock-data"] and (joint or split_flags)):
        names = [*joint, *split_flags, *(["--mock-data"] if flags["--mock-data"] else [])]
        flags.problems.append(
            f"{' and '.join(names)} contradict each other: each names training data; keep one"
        )
        return
    if flags["--data-path"]:
        _set_data(flags, "data_path", flags["--data-path"])
    elif flags["--data-args-path"]:
        _set_data(flags, "data_path", shlex.split(_text(flags, "--data-args-path")))
    elif flags["--per-split-data-args-path"]:
        try:
            parts = json.loads(_text(flags, "--per-split-data-args-path") or "{}")
            for part, key in (
                ("train", "train_data_path"),
                ("valid", "valid_data_path"),
                ("test", "test_data_path"),
            ):
                if parts.get(part):
                    _set_data(flags, key, [str(word) for word in parts[part]])
        except (ValueError, AttributeError, TypeError):
            flags.problems.append(
                f"--per-split-data-args-path {flags['--per-split-data-args-path']} is not a JSON object with lists "
                "under train, valid and test; correct the file"
            )
    for flag in split_flags:
        _set_data(flags, flag.removeprefix("--").replace("-", "_"), flags[flag])
    if "data_path" in flags.tree.get("data", {}):
        flags.set("data.split", flags["--split"] or "969,30,1")


def _set_data(flags: ParsedFlags, name: str, words: list[str]) -> None:
    flags.set(f"data.{name}", words[0] if len(words) == 1 else " ".join(words))


def _text(flags: ParsedFlags, flag: str) -> str:
    try:
        return Path(flags[flag]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        flags.problems.append(f"{flag} {flags[flag]} cannot be read: {error}; correct the path")
        return ""


def evaluation(flags: ParsedFlags) -> None:
    """Set train.eval_interval and train.eval_iters.

    `--eval-iters -1` becomes 0. Without --eval-interval, eval_iters is 0 unless --skip-train is given.
    """
    interval = flags["--eval-interval"]
    if interval:
        flags.set("train.eval_interval", interval)
    iters = flags["--eval-iters"] if interval or flags["--skip-train"] else 0
    flags.set("train.eval_iters", 0 if iters == -1 else iters)


def saving(flags: ParsedFlags) -> None:
    """Set train.output_dir from --save, and the intervals and events of saving checkpoints there.

    Checkpoints are written with latest_checkpointed_iteration.txt. Without --save nothing is saved. Signals trigger a
    save only with --exit-signal-handler.
    """
    folder = flags["--save"]
    flags.set("train.output_dir", folder or _free_folder("output"))
    if folder is None:
        flags.set("checkpoint.save_at_end", False)
        flags.tree["checkpoint"].pop("save_interval", None)
        flags.notes.append(
            f"without --save no checkpoint is written; metrics and logs go to {flags.tree['train']['output_dir']}"
        )
    else:
        flags.set("checkpoint.megatron_tracker", True)
    if folder is None:
        flags.set("checkpoint.save_when_stopped", "never")
    elif not flags["--exit-signal-handler"]:
        flags.set("checkpoint.save_when_stopped", "at_exits")
    if flags["--save-retain-interval"] is not None:
        flags.set("checkpoint.keep_last", 1)
        flags.set("checkpoint.keep_every", flags["--save-retain-interval"])


def _free_folder(name: str) -> str:
    """Return the first of name, name-2, name-3, … without metrics of another run."""
    number = 1
    while (Path(folder := name if number == 1 else f"{name}-{number}") / "metrics.jsonl").exists():
        number += 1
    return folder


def loading(flags: ParsedFlags) -> None:
    """Set checkpoint.load, or model.init_from with --finetune or --pretrained-checkpoint.

    model.init_from loads only weights, at step 0. A folder without a checkpoint is ignored, or refused with
    --exit-on-missing-checkpoint.
    """
    load, step = flags["--load"], flags["--ckpt-step"]
    if load is not None and step is not None and not is_empty(Path(load)):
        load = _at_step(load, step)
    if load is None and flags["--exit-on-missing-checkpoint"]:
        flags.problems.append("--exit-on-missing-checkpoint needs --load; give it, or leave it out")
    exact = flags["--exit-on-missing-checkpoint"] or load != flags["--load"]
    if load is not None and is_empty(Path(load)) and not exact:
        if flags["--save"] is None or Path(load).resolve() != Path(flags["--save"]).resolve():
            flags.notes.append(f"--load {load} has no checkpoint: training starts at step 0, as in Megatron")
            load = None
        elif flags["--finetune"]:
            load = None
    if flags["--finetune"] and load is not None:
        flags.set("model.init_from", load)
    elif load is not None:
        flags.set("checkpoint.load", load)
    if flags["--pretrained-checkpoint"] and not (flags["--finetune"] and load):
        flags.set("model.init_from", flags["--pretrained-checkpoint"])
    if load is None or is_empty(Path(load)):
        return
    if flags["--use-checkpoint-args"]:
        _take_stored(flags, load, "model", ModelConfig.fields_deciding(Decides.FUNCTION))
        if flags["--seq-length"] is flags["--encoder-seq-length"] is None:
            _take_stored(flags, load, "data", ("seq_length",))
            if "seq_length" not in flags.tree.get("data", {}):
                flags.problems.append(
                    f"--seq-length is missing, and --load {load} is not a Megalith run, whose length "
                    "--use-checkpoint-args would use; give it"
                )
    if flags["--use-checkpoint-opt_param-scheduler"] or flags["--use-checkpoint-opt-param-scheduler"]:
        _take_stored(flags, load, "optim", SCHEDULE_OF_CHECKPOINT)


SCHEDULE_OF_CHECKPOINT = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples",
    "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
    "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
)  # fmt: skip


def is_empty(folder: Path) -> bool:
    """Return whether a folder is missing, empty, or a Megalith run without a checkpoint."""
    if not folder.is_dir():
        return True
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir():
        return not any((folder / "checkpoints").glob("step_*"))
    return all(entry.name == LOCK_NAME for entry in folder.iterdir())


def _at_step(load: str, step: int) -> str:
    """Return the folder of one step of a Megalith or Megatron run."""
    ours = Path(load, "checkpoints").is_dir()
    return f"{load}/checkpoints/step_{step:08d}" if ours else f"{load}/iter_{step:07d}"


def _take_stored(flags: ParsedFlags, load: str, section: str, names: Collection[str]) -> None:
    """Set `names` in `section` to the values of the run in `load`. For foreign weights, remove them instead."""
    from megalith.bridge.load import is_foreign_folder  # imports torch
    from megalith.checkpoint.open import open_checkpoint
    from megalith.errors import MegalithError

    try:
        if is_foreign_folder(load):  # the model is read from it, the schedule is not
            explicit = flags.tree.get(section, {})
            flags.tree[section] = {name: value for name, value in explicit.items() if name not in names}
            return
        checkpoint = open_checkpoint(load, ())
    except MegalithError as error:
        flags.problems.extend(str(error).split("\n"))
        return
    stored: Mapping[str, Any] = checkpoint.manifest.config.get(section, {}) if checkpoint else {}
    flags.tree.setdefault(section, {}).update(
        {name: value for name, value in stored.items() if name in names}
    )


def sharding(flags: ParsedFlags) -> None:
    """Set parallel.data_parallel_sharding_strategy, to optim with --use-distributed-optimizer."""
    if flags["--use-torch-fsdp2"]:
        flags.set("parallel.data_parallel_sharding_strategy", "optim_grads_params")
    elif flags["--use-megatron-fsdp"]:
        flags.set("parallel.data_parallel_sharding_strategy", flags["--data-parallel-sharding-strategy"])
    elif flags["--use-distributed-optimizer"]:
        flags.set("parallel.data_parallel_sharding_strategy", "optim")


def sequence_parallel(flags: ParsedFlags) -> None:
    """Set parallel.sequence_parallel, unless --tensor-model-parallel-size is 1."""
    if not flags["--sequence-parallel"]:
        return
    if flags["--tensor-model-parallel-size"] > 1:
        flags.set("parallel.sequence_parallel", True)
    else:
        flags.notes.append(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1, as in Megatron"
        )


def experts(flags: ParsedFlags) -> None:
    """Set the model's expert settings: layers, load balancing, router bias and expert tensor parallelism.

    These are model.moe_layer_freq, model.moe_router_load_balancing_type, model.moe_aux_loss_coeff,
    model.add_router_bias (true if linear layers have biases) and parallel.expert_tensor_parallel_size (default: the
    tensor-parallel size).
    """
    if flags["--num-experts"] is None:
        return
    size = flags["--expert-tensor-parallel-size"] or flags["--tensor-model-parallel-size"]
    flags.set("parallel.expert_tensor_parallel_size", size)
    if not flags["--disable-bias-linear"]:
        flags.set("model.add_router_bias", True)
    if "--moe-layer-freq" in flags:
        flags.set("model.moe_layer_freq", _layers(flags, "--moe-layer-freq", flags["--moe-layer-freq"]))
    balancing, weight = flags["--moe-router-load-balancing-type"], flags["--moe-aux-loss-coeff"]
    kinds = balancing if isinstance(balancing, list) else [balancing]
    weights = weight if isinstance(weight, list) else [weight]
    if not any(weights) and all(kind.endswith("aux_loss") for kind in kinds):
        kinds, weights = (
            kinds[:1] if kinds[0] != "global_aux_loss" else ["none"],
            weights[:1],
        )  # losses of no weight
    if len(kinds) > 1 or len(weights) > 1 or kinds[0] in ("global_aux_loss", "quantile_balancing"):
        flags.problems.append(
            f"--moe-router-load-balancing-type {' '.join(kinds)} with --moe-aux-loss-coeff "
            f"{' '.join(map(str, weights))} is refused: only one of aux_loss, seq_aux_loss, sinkhorn and none is "
            "supported, which do not depend on the layout; choose one"
        )
        return
    if kinds[0] == "sinkhorn":  # Megatron then ignores the flags for these
        topk = flags["--moe-router-topk"]
        flags.set("model.moe_router_score_function", "sigmoid" if topk == 1 else "softmax")
        flags.set("model.moe_router_pre_softmax", topk > 1)
        flags.tree["model"].pop("moe_router_topk_scaling_factor", None)
    flags.set("model.moe_router_load_balancing_type", kinds[0])
    flags.set("model.moe_aux_loss_coeff", weights[0])


def mup(flags: ParsedFlags) -> None:
    """Set model.use_mup, its base sizes and attention scale; model.embedding_multiplier for --mup-embedding-mult.

    --mup-output-mult sets model.logits_scaling; 1 stands for 1 / width ratio, as in Megatron. With
    --multi-latent-attention, Megatron does not change the attention scale.
    """
    if not flags["--use-mup"]:
        return
    flags.set("model.use_mup", True)
    base, hidden = flags["--mup-base-hidden-size"], flags["--hidden-size"]
    if base is not None:
        flags.set("model.mup_base_hidden_size", base)
    if flags["--multi-latent-attention"]:
        flags.set("model.mup_attn_scale_power", 0.5)
    else:
        flags.set("model.mup_attn_scale_power", flags["--mup-attn-scale-power"])
        if flags["--mup-base-head-dim"] is not None:
            flags.set("model.mup_base_head_dim", flags["--mup-base-head-dim"])
    if flags["--mup-embedding-mult"] != 1.0:
        flags.set("model.embedding_multiplier", flags["--mup-embedding-mult"])
    factor = flags["--mup-output-mult"]
    if factor <= 0:
        flags.problems.append(f"--mup-output-mult is {factor}, but logits need a positive factor; give one")
    elif factor != 1.0:
        flags.set("model.logits_scaling", (base or hidden) / (hidden * factor))


def emerging_optimizer(flags: ParsedFlags) -> None:
    """Set what --optimizer muon, adaptive_muon and soap mean in Megatron, beyond their own flags. Reject the rest.

    Muon orthogonalizes gate and up as one matrix, and always whole matrices, whatever the layout, as with
    --muon-tp-mode duplicated and distributed. SOAP is that of emerging-optimizers, with KL-Shampoo and no limit on its
    bases; it ignores --adam-eps.
    """
    optimizer = flags["--optimizer"]
    if optimizer == "soap":
        flags.set("optim.soap_use_kl_shampoo", True)
        flags.set("optim.soap_max_precond_dim", None)
        if flags["--adam-eps"] != 1e-8:
            flags.problems.append(
                f"--adam-eps {flags['--adam-eps']:g} is refused with --optimizer soap: Megatron uses 1e-8 for the "
                "matrices of layers; leave it out"
            )
    if optimizer not in ("muon", "dist_muon", "adaptive_muon"):
        return
    if flags["--muon-tp-mode"] == "blockwise":
        flags.problems.append(
            "--muon-tp-mode blockwise is refused: matrices are never split; choose duplicated or distributed"
        )
    flags.set("optim.muon_split_gate_up", False)
    if optimizer == "adaptive_muon":
        flags.set("optim.muon_moment2_method", "adamuon")


def moments(flags: ParsedFlags) -> None:
    """Set optim.exp_avg_dtype and optim.exp_avg_sq_dtype, with --use-precision-aware-optimizer and --optimizer adam.

    bf16 uses stochastic rounding. fp8 has a scale per block and a dynamic exponent. Weights and gradients stay in fp32;
    --main-params-dtype and --main-grads-dtype do not change this.
    """
    for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        value = flags[flag]
        if value == "fp32":
            continue
        if not flags["--use-precision-aware-optimizer"]:
            flags.problems.append(
                f"{flag} {value} needs --use-precision-aware-optimizer; give it, or leave {flag} out"
            )
        elif value == "fp16":
            flags.problems.append(f"{flag} fp16 is refused: choose bf16, which has the same size, or fp8")
        else:
            flags.set(f"optim.{flag[2:].replace('-', '_')}", value)


def recompute(flags: ParsedFlags) -> None:
    """Set parallel.recompute_granularity, recompute_method, recompute_num_layers and recompute_modules.

    --recompute-activations means the granularity selective.
    """
    granularity = "selective" if flags["--recompute-activations"] else flags["--recompute-granularity"]
    if granularity is None:
        return
    flags.set("parallel.recompute_granularity", granularity)
    if granularity == "full":
        for flag in ("--recompute-method", "--recompute-num-layers"):
            if flags[flag] is not None:
                flags.set(f"parallel.{flag.removeprefix('--').replace('-', '_')}", flags[flag])
        return
    requested = flags["--recompute-modules"] or ["core_attn"]
    supported = [module for module in requested if module in RECOMPUTED]
    if unsupported := [module for module in requested if module not in RECOMPUTED]:
        flags.notes.append(
            f"--recompute-modules {' '.join(unsupported)}: not recomputed, which costs memory but changes nothing "
            f"else; supported: {', '.join(RECOMPUTED)}"
        )
    if supported:
        flags.set("parallel.recompute_modules", supported)
    else:
        del flags.tree["parallel"]["recompute_granularity"]


def stages(flags: ParsedFlags) -> None:
    """Set parallel.pipeline_model_parallel_layout. MTP layers (m) must be on the last stage, with the head."""
    layout = flags["--pipeline-model-parallel-layout"]
    if layout is None:
        return
    *others, last = layout.split("|")
    if any("m" in stage for stage in others):
        flags.problems.append(
            f"--pipeline-model-parallel-layout {layout} is refused: MTP layers (m) must be in the last stage, with the "
            "head; put them there"
        )
        return
    flags.set(
        "parallel.pipeline_model_parallel_layout", "|".join([*others, re.sub(r"m(\*\d+)?,?", "", last)])
    )


def context(flags: ParsedFlags) -> None:
    """Set parallel.cp_comm_type, to the first value for all layers."""
    kinds = flags["--cp-comm-type"]
    if "--cp-comm-type" in flags:
        flags.set("parallel.cp_comm_type", kinds[0])
    if len(set(kinds)) > 1:
        flags.notes.append(
            f"--cp-comm-type {' '.join(kinds)}: every layer uses the first; they differ only in speed"
        )


def trackers(flags: ParsedFlags) -> None:
    """Set log.tensorboard, log.tensorboard_dir, log.wandb, log.wandb_project, log.wandb_name and log.tracker_names."""
    if flags["--tensorboard-dir"] or flags["--wandb-project"]:
        flags.set("log.tracker_names", "megatron")
    if flags["--tensorboard-dir"]:
        flags.set("log.tensorboard", True)
        flags.set("log.tensorboard_dir", flags["--tensorboard-dir"])
    if flags["--wandb-project"]:
        flags.set("log.wandb", True)
        flags.set("log.wandb_project", flags["--wandb-project"])
        flags.set("log.wandb_name", flags["--wandb-exp-name"])
        if not flags["--wandb-exp-name"]:
            flags.problems.append("--wandb-project needs --wandb-exp-name, the run's name; give it")


def per_token_loss(flags: ParsedFlags) -> None:
    """Set train.calculate_per_token_loss.

    Without it every micro-batch has the same weight, even if --eod-mask-loss or an encoder's masking leaves
    micro-batches different numbers of valid tokens.
    """
    if flags["--eod-mask-loss"] or flags.program != "pretrain-gpt":
        flags.set("train.calculate_per_token_loss", flags["--calculate-per-token-loss"])
