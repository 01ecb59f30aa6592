"""What several of Megatron's flags mean together: a function a subject, with what it decides for its docstring.

Each is called once for a command line, whether or not its flags were given, so that Megatron's defaults hold.
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
    from megalith.dialects.megatron.flag_kinds import Given

BETA_FAST, BETA_SLOW, MLA_ORIGINAL_LENGTH = 32.0, 1.0, 4096  # where no flag says them
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


def precision(given: Given) -> None:
    """train.precision: bf16, fp16, or fp32 without either."""
    if given["--bf16"] and given["--fp16"]:
        given.problems.append("--bf16 and --fp16 contradict each other; leave one out")
    for flag in ("--bf16", "--fp16"):
        if given[flag]:
            given.set("train.precision", flag.removeprefix("--"))


def masked_words(given: Given) -> None:
    """Of pretrain_bert and pretrain_t5 model.model_type, data.mask_prob and data.short_seq_prob, and what one of them
    reads: model.bert_binary_head and lm_head_activation, or the decoder's sizes; pretrain_gpt reads none of it."""
    program = given.program.removeprefix("pretrain-")
    others = [flag for flag, readers in OF_ENCODERS.items() if flag in given and program not in readers]
    if others:
        given.notes.append(f"{' '.join(others)} changes nothing: pretrain_{program}.py does not read it")
    if program == "gpt":
        return
    given.set("model.model_type", program)
    given.set("data.mask_prob", given["--mask-prob"])
    given.set("data.short_seq_prob", given["--short-seq-prob"])
    if program == "bert":
        given.set("model.bert_binary_head", not given["--bert-no-binary-head"])
        given.set("model.lm_head_activation", "gelu")  # whatever the MLP has
        return
    encoder = given["--num-layers"] or given["--encoder-num-layers"]
    if encoder is None:
        given.problems.append(
            "pretrain_t5.py needs --encoder-num-layers (or --num-layers), the encoder's; give it"
        )
        return
    given.set("model.num_layers", encoder + (given["--decoder-num-layers"] or encoder))
    given.set("model.encoder_num_layers", encoder)
    given.set("model.add_output_bias", True)
    if given["--decoder-seq-length"] is not None:
        given.set("data.decoder_seq_length", given["--decoder-seq-length"])
    given.set("data.vocab_extra_ids", given["--vocab-extra-ids"])
    if given["--position-embedding-type"] == "relative":
        given.set("model.relative_attention_num_buckets", given["--relative-attention-num-buckets"])
        given.set("model.relative_attention_max_distance", given["--relative-attention-max-distance"])


OF_ENCODERS = {
    "--bert-no-binary-head": ("bert",),
    "--mask-prob": ("bert", "t5"),
    "--short-seq-prob": ("bert", "t5"),
    "--decoder-num-layers": ("t5",),
    "--decoder-seq-length": ("t5",),
    "--vocab-extra-ids": ("t5",),
    "--relative-attention-num-buckets": ("t5",),
    "--relative-attention-max-distance": ("t5",),
}  # and which programs read them


def sink(given: Given) -> None:
    """model.softmax_type; any but vanilla without attention dropout, which is on in Megatron where its flag is left
    out."""
    if "--softmax-type" in given:
        given.set("model.softmax_type", given["--softmax-type"])
    if given["--softmax-type"] != "vanilla" and "--attention-dropout" not in given:
        given.set("model.attention_dropout", 0.0)
        given.notes.append(
            f"--softmax-type {given['--softmax-type']} has no attention dropout here: it is off, where without "
            "--attention-dropout Megatron's is 0.1; give --attention-dropout 0 to both for the same training"
        )


def heads(given: Given) -> None:
    """model.num_query_groups, which counts only with --group-query-attention."""
    if given["--multi-latent-attention"]:
        return
    if given["--group-query-attention"]:
        given.set("model.num_query_groups", given["--num-query-groups"])
    elif "--num-query-groups" in given and given["--num-query-groups"] != given["--num-attention-heads"]:
        given.notes.append(
            f"--num-query-groups {given['--num-query-groups']} has no effect without --group-query-attention, as in "
            "Megatron: every query head has its own keys and values; give that flag too if you mean grouped heads"
        )


def positions(given: Given) -> None:
    """model.position_embedding_type, the rotary settings, and model.rope_scaling; with --multi-latent-attention, whose
    heads have rotary positions anyway, model.add_position_embedding for learned_absolute."""
    kind = "rope" if given["--use-rotary-position-embeddings"] else given["--position-embedding-type"]
    latent = given["--multi-latent-attention"]
    if latent and kind == "none":
        kind = "rope"  # its heads have a rotary part anyway
    if kind == "relative" and given.program == "pretrain-t5":
        given.set("model.position_embedding_type", kind)
        return
    if kind not in ("learned_absolute", "rope", "yarn"):
        given.problems.append(
            f"--position-embedding-type {kind} is refused: there are learned_absolute, rope and yarn"
        )
        return
    if kind == "learned_absolute" and latent:
        given.set("model.add_position_embedding", not given["--no-position-embedding"])
    elif kind == "learned_absolute":
        if given["--no-position-embedding"]:
            given.problems.append(
                "--no-position-embedding is refused without rotary positions: Megatron has removed it, and every model "
                "here has positions; give --position-embedding-type rope, or leave it out"
            )
        return
    given.set("model.position_embedding_type", "rope")
    given.set("model.rotary_base", given["--rotary-base"])
    if given["--rotary-percent"] != 1 and not (latent and given["--rope-type"] != "rope"):
        given.set("model.rotary_percent", given["--rotary-percent"])
    if given["--rotary-interleaved"]:
        given.set("model.rotary_interleaved", True)
    if (every := given["--no-rope-freq"]) is not None:
        given.set("model.no_rope_freq", _layers(given, "--no-rope-freq", every))
    if scaling := _rope_scaling(given, kind, latent):
        given.set("model.rope_scaling", scaling)


def _rope_scaling(given: Given, kind: str, latent: bool) -> dict[str, Any] | None:
    factor = given["--rotary-scaling-factor"]
    unread = [flag for flag in ("--use-rope-scaling", "--rotary-seq-len-interpolation-factor") if given[flag]]
    if latent and unread:
        given.notes.append(f"{' '.join(unread)} has no effect with --multi-latent-attention, as in Megatron")
    if kind == "yarn" or (latent and given["--rope-type"] != "rope"):
        return _yarn(given, factor, latent) if factor > 1 else None
    if latent:
        if given["--mscale-all-dim"] and factor > 1:
            given.problems.append(
                f"--mscale-all-dim {given['--mscale-all-dim']} is refused with --rope-type rope and "
                f"--rotary-scaling-factor {factor}: Megatron scales the attention scores but not the positions then, "
                "which no model here does; leave one of them out"
            )
        return None
    if given["--use-rope-scaling"]:
        return {"type": "llama3", "factor": given["--rope-scaling-factor"]}
    if (stretch := given["--rotary-seq-len-interpolation-factor"] or 1) > 1:
        return {"type": "linear", "factor": float(stretch)}
    return None


def _yarn(given: Given, factor: float, latent: bool) -> dict[str, Any] | None:
    original = given["--yarn-original-max-position-embeddings"] or (MLA_ORIGINAL_LENGTH if latent else None)
    if original is None:
        given.problems.append(
            f"--rotary-scaling-factor {factor} by yarn needs the length of the first training; give "
            "--yarn-original-max-position-embeddings"
        )
        return None
    scaling = {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": given["--yarn-beta-fast"] or BETA_FAST,
        "beta_slow": given["--yarn-beta-slow"] or BETA_SLOW,
        "truncate": not given["--no-yarn-correction-range-round-to-int"],
    }
    mscale, of_all = given["--mscale"], given["--mscale-all-dim"]
    if of_all and latent:
        return {**scaling, "mscale": mscale, "mscale_all_dim": of_all}
    if not of_all and mscale == 1.0:
        return scaling  # whose magnitude is the default
    magnitude = RopeScaling(factor=factor).magnitude
    return {**scaling, "attention_factor": magnitude(mscale) / (magnitude(of_all) if of_all else 1)}


def activation(given: Given) -> None:
    """model.swiglu, model.activation and model.gated_linear_unit: without a flag GELU, by its tanh approximation where
    Megatron fuses it with a bias."""
    chosen = [flag for flag in ("--swiglu", "--squared-relu", "--quick-geglu") if given[flag]]
    if len(chosen) > 1:
        given.problems.append(f"{' and '.join(chosen)} contradict each other; leave one")
    if "--swiglu" in chosen:
        given.set("model.swiglu", True)
    elif "--squared-relu" in chosen:
        given.set("model.activation", "squared_relu")
    elif "--quick-geglu" in chosen:
        given.set("model.activation", "quick_gelu")
        given.set("model.gated_linear_unit", True)
    elif not given["--openai-gelu"] and (given["--no-bias-gelu-fusion"] or given["--disable-bias-linear"]):
        given.set("model.activation", "gelu")


def latent_attention(given: Given) -> None:
    """model.multi_latent_attention, and model.latent_layernorm with --qk-layernorm; without it model.qk_layernorm, or
    model.qk_l2_norm, which goes before it in Megatron."""
    if given["--qk-l2-norm"]:
        given.set("model.qk_l2_norm", True)
    if not given["--multi-latent-attention"]:
        if given["--qk-layernorm"] and not given["--qk-l2-norm"]:
            given.set("model.qk_layernorm", True)
        return
    given.set("model.multi_latent_attention", True)
    given.tree["model"].pop("kv_channels", None)  # which Megatron does not read then
    if not given["--qk-layernorm"]:
        given.set("model.latent_layernorm", False)


def linear_attention(given: Given) -> None:
    """model.experimental_attention_variant and what it needs; Megatron reads no flag of it alone."""
    variant, every = given["--experimental-attention-variant"], given["--linear-attention-freq"]
    if variant is None:
        return
    if variant not in ("gdn", "gated_delta_net"):
        given.problems.append(
            f"--experimental-attention-variant {variant} is refused: gated_delta_net is the only one here; choose it, "
            "or leave it out"
        )
        return
    if every is None:
        given.problems.append(
            f"--experimental-attention-variant {variant} is refused without --linear-attention-freq, which says in "
            "which layers it stands; give it, as 4 or ([1]*3+[0]*1)*12"
        )
        return
    given.set("model.experimental_attention_variant", "gated_delta_net")
    given.set("model.linear_attention_freq", _layers(given, "--linear-attention-freq", every))
    for name in ("conv-kernel-dim", "key-head-dim", "value-head-dim", "num-key-heads", "num-value-heads"):
        given.set(f"model.linear_{name.replace('-', '_')}", given[f"--linear-{name}"])


def window(given: Given) -> None:
    """model.window_size and model.window_attn_skip_freq."""
    if given["--window-size"] is None:
        return
    sizes = re.findall(r"-?\d+", given["--window-size"])
    if len(sizes) != 2:
        given.problems.append(
            f"--window-size is {given['--window-size']!r}: two numbers are needed, like 4095,0"
        )
        return
    given.set("model.window_size", [int(size) for size in sizes])
    if (every := given["--window-attn-skip-freq"]) is not None:
        given.set("model.window_attn_skip_freq", _layers(given, "--window-attn-skip-freq", every))


def _layers(given: Given, flag: str, text: Any) -> int | list[int] | None:
    """A number, or a Python expression of lists of numbers with `*` and `+`, as `([0]*3+[1]*58)`."""

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
        given.problems.append(
            f"{flag} is {text!r}: a number is needed, or lists of numbers with * and +, like ([0]*3+[1]*58)"
        )
        return None


def vocabulary(given: Given) -> None:
    """model.vocab_size, of a NullTokenizer with its end of document, and model.make_vocab_size_divisible_by, which
    counts for each tensor-parallel rank."""
    kind, size = given["--tokenizer-type"], given["--vocab-size"]
    if kind == "NullTokenizer":
        if size is None:
            given.problems.append("--tokenizer-type NullTokenizer needs --vocab-size; give it")
        else:
            given.set("model.vocab_size", size + 1)
    elif size is not None and (kind in (None, "TikTokenizer")):
        given.set("model.vocab_size", size)
    elif size is not None:
        given.notes.append(
            f"--vocab-size {size} has no effect: the vocabulary is the {kind}'s, as in Megatron"
        )
    multiple = given["--make-vocab-size-divisible-by"] * max(given["--tensor-model-parallel-size"], 1)
    if given["--no-pad-vocab-size"] or given["--disable-pad-vocab-size"]:
        multiple = 1
    if given["--padded-vocab-size"] is not None:
        multiple = given["--padded-vocab-size"]
    given.set("model.make_vocab_size_divisible_by", multiple)


def tokenizer(given: Given) -> None:
    """data.tokenizer_type; without it GPT2BPETokenizer where --vocab-file and --merge-file are given, of pretrain_bert
    and pretrain_t5 BertWordPieceLowerCase where --vocab-file is."""
    kind = given["--tokenizer-type"]
    if kind is None and given.program != "pretrain-gpt" and "--vocab-file" in given:
        kind = "BertWordPieceLowerCase"
    if kind is None and "--vocab-file" in given and "--merge-file" in given:
        kind = "GPT2BPETokenizer"
    if kind is None:
        return
    if kind not in TOKENIZERS:
        given.problems.append(f"--tokenizer-type {kind} is refused: there are {', '.join(TOKENIZERS)}")
        return
    given.set("data.tokenizer_type", TOKENIZERS[kind])


def lengths(given: Given) -> None:
    """data.seq_length and model.num_layers, also under an encoder's flags."""
    for flag, older, path in (
        ("--seq-length", "--encoder-seq-length", "data.seq_length"),
        ("--num-layers", "--encoder-num-layers", "model.num_layers"),
    ):
        values = {given[name] for name in (flag, older)} - {None}
        if len(values) > 1:
            given.problems.append(
                f"{flag} {given[flag]} and {older} {given[older]} contradict each other; leave one"
            )
        for value in values if path != "model.num_layers" or given.program != "pretrain-t5" else ():
            given.set(path, value)


def batch(given: Given) -> None:
    """train.global_batch_size: without it one micro-batch on each model replica; or the last of
    train.step_batch_size_schedule, whose thresholds are tokens in the flag and samples here, with
    optim.schedule_unit samples; --rampup-batch-size is ignored, as by core 0.20."""
    size = given["--global-batch-size"]
    if given["--step-batch-size-schedule"] is not None:
        steps = _batch_steps(given, given["--step-batch-size-schedule"])
        if steps and size not in (None, steps[-1][1]):
            given.problems.append(
                f"--global-batch-size {size} and --step-batch-size-schedule, which ends with {steps[-1][1]}, "
                "contradict each other; leave the first out"
            )
        given.set("train.step_batch_size_schedule", steps)
        size = steps[-1][1] if steps else 1
        if steps and given["--train-samples"] is None:
            _schedules_by_samples(given, size)
    if size is None and given["--micro-batch-size"] is not None:
        devices = math.prod(given[f"--{name}-size"] for name in ("tensor-model-parallel", "pipeline-model-parallel",
                                                                 "context-parallel"))  # fmt: skip
        size = given["--micro-batch-size"] * max((given.world_size or devices) // devices, 1)
        given.notes.append(f"without --global-batch-size it is {size}: a micro-batch on each model replica")
    if size is not None:
        given.set("train.global_batch_size", size)
    if (ramp := given["--rampup-batch-size"]) is not None:
        given.notes.append(
            f"--rampup-batch-size {' '.join(map(str, ramp))} is ignored, as by core 0.20, which replaced it by "
            "--step-batch-size-schedule: every step has the whole batch. For the ramp of earlier versions set "
            f"train.rampup_batch_size: {ramp} in a run file (--emit)"
        )


def _schedules_by_samples(given: Given, size: int) -> None:
    given.set("optim.schedule_unit", "samples")
    given.notes.append(
        "with --step-batch-size-schedule learning rate and weight decay move on by samples, as in Megatron; lengths in "
        f"iterations count {size} samples each, the schedule's last batch. Core 0.20 counts --micro-batch-size × model "
        "replicas: give --train-samples, --lr-decay-samples and --lr-warmup-samples where the rates must be equal"
    )


def _batch_steps(given: Given, text: str) -> list[list[int]]:
    """`0:768 250B:1536`, tokens and sizes → [samples, size] each."""
    length = given["--seq-length"] or given["--encoder-seq-length"] or 1
    try:
        pairs = [step.split(":") for step in text.replace(",", " ").split()]
        steps = sorted([_count(tokens) // length, _count(size)] for tokens, size in pairs)
    except (ValueError, OverflowError):
        steps = []
    if not steps or steps[0][0] != 0:
        given.problems.append(
            f"--step-batch-size-schedule is {text!r}: TOKENS:SIZE pairs are needed, the first from 0, like "
            "'0:768 250B:1536'"
        )
        return []
    return steps


def _count(text: str) -> int:
    """`250B` → 250,000,000,000, as Megatron-LM reads it."""
    text = text.strip().upper()
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:], 1)
    return int(float(text if factor == 1 else text[:-1]) * factor)


def datasets(given: Given) -> None:
    """data.data_path and data.split, or what files name in their place."""
    found = [
        flag for flag in ("--data-path", "--data-args-path", "--per-split-data-args-path") if given[flag]
    ]
    own = [flag for flag in ("--train-data-path", "--valid-data-path", "--test-data-path") if given[flag]]
    if len(found) > 1 or (found and own) or (given["--mock-data"] and (found or own)):
        names = [*found, *own, *(["--mock-data"] if given["--mock-data"] else [])]
        given.problems.append(
            f"{' and '.join(names)} contradict each other: each says what to train on; leave one"
        )
        return
    if given["--data-path"]:
        _set_data(given, "data_path", given["--data-path"])
    elif given["--data-args-path"]:
        _set_data(given, "data_path", shlex.split(_text(given, "--data-args-path")))
    elif given["--per-split-data-args-path"]:
        try:
            parts = json.loads(_text(given, "--per-split-data-args-path") or "{}")
            for part, key in (
                ("train", "train_data_path"),
                ("valid", "valid_data_path"),
                ("test", "test_data_path"),
            ):
                if parts.get(part):
                    _set_data(given, key, [str(word) for word in parts[part]])
        except (ValueError, AttributeError, TypeError):
            given.problems.append(
                f"--per-split-data-args-path {given['--per-split-data-args-path']} is no JSON object with lists under "
                "train, valid and test; correct the file"
            )
    for flag in own:
        _set_data(given, flag.removeprefix("--").replace("-", "_"), given[flag])
    if "data_path" in given.tree.get("data", {}):
        given.set("data.split", given["--split"] or "969,30,1")


def _set_data(given: Given, name: str, words: list[str]) -> None:
    given.set(f"data.{name}", words[0] if len(words) == 1 else " ".join(words))


def _text(given: Given, flag: str) -> str:
    try:
        return Path(given[flag]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        given.problems.append(f"{flag} {given[flag]} cannot be read: {error}; correct the path")
        return ""


def evaluation(given: Given) -> None:
    """train.eval_interval and train.eval_iters, of which -1 are none; without --eval-interval there is no evaluation,
    but with --skip-train."""
    interval = given["--eval-interval"]
    if interval:
        given.set("train.eval_interval", interval)
    iters = given["--eval-iters"] if interval or given["--skip-train"] else 0
    given.set("train.eval_iters", 0 if iters == -1 else iters)


def saving(given: Given) -> None:
    """train.output_dir, which is the folder of --save, and what is saved there, with latest_checkpointed_iteration.txt:
    without --save nothing; at a signal only with --exit-signal-handler."""
    folder = given["--save"]
    given.set("train.output_dir", folder or _free_folder("output"))
    if folder is None:
        given.set("checkpoint.save_at_end", False)
        given.tree["checkpoint"].pop("save_interval", None)
        given.notes.append(
            f"without --save no checkpoint is written; figures and logs go to {given.tree['train']['output_dir']}"
        )
    else:
        given.set("checkpoint.megatron_tracker", True)
    if folder is None:
        given.set("checkpoint.save_when_stopped", "never")
    elif not given["--exit-signal-handler"]:
        given.set("checkpoint.save_when_stopped", "at_exits")
    if given["--save-retain-interval"] is not None:
        given.set("checkpoint.keep_last", 1)
        given.set("checkpoint.keep_every", given["--save-retain-interval"])


def _free_folder(name: str) -> str:
    """The first of name, name-2, name-3, … without another run's figures, which rank 0 writes after all ranks met."""
    number = 1
    while (Path(folder := name if number == 1 else f"{name}-{number}") / "metrics.jsonl").exists():
        number += 1
    return folder


def loading(given: Given) -> None:
    """checkpoint.load; with --finetune, and of --pretrained-checkpoint, model.init_from: the weights alone, at step 0.
    A folder without a checkpoint is passed over, but with --exit-on-missing-checkpoint refused."""
    load, step = given["--load"], given["--ckpt-step"]
    if load is not None and step is not None and not is_empty(Path(load)):
        load = _at_step(load, step)
    if load is None and given["--exit-on-missing-checkpoint"]:
        given.problems.append("--exit-on-missing-checkpoint needs --load; give it, or leave it out")
    exact = given["--exit-on-missing-checkpoint"] or load != given["--load"]
    if load is not None and is_empty(Path(load)) and not exact:
        if given["--save"] is None or Path(load).resolve() != Path(given["--save"]).resolve():
            given.notes.append(
                f"--load {load} holds no checkpoint: training begins at step 0, as in Megatron"
            )
            load = None
        elif given["--finetune"]:
            load = None
    if given["--finetune"] and load is not None:
        given.set("model.init_from", load)
    elif load is not None:
        given.set("checkpoint.load", load)
    if given["--pretrained-checkpoint"] and not (given["--finetune"] and load):
        given.set("model.init_from", given["--pretrained-checkpoint"])
    if load is None or is_empty(Path(load)):
        return
    if given["--use-checkpoint-args"]:
        _take_stored(given, load, "model", ModelConfig.deciding(Decides.FUNCTION))
        if given["--seq-length"] is given["--encoder-seq-length"] is None:
            _take_stored(given, load, "data", ("seq_length",))
            if "seq_length" not in given.tree.get("data", {}):
                given.problems.append(
                    f"--seq-length is missing, and --load {load} is no run of ours, whose length --use-checkpoint-args "
                    "would take; give it"
                )
    if given["--use-checkpoint-opt_param-scheduler"] or given["--use-checkpoint-opt-param-scheduler"]:
        _take_stored(given, load, "optim", SCHEDULE_OF_CHECKPOINT)


SCHEDULE_OF_CHECKPOINT = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters", "lr_warmup_samples",
    "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples",
    "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
)  # fmt: skip


def is_empty(folder: Path) -> bool:
    """Whether a folder is absent or holds nothing yet, or a run of ours without a checkpoint."""
    if not folder.is_dir():
        return True
    if (folder / "metrics.jsonl").exists() or (folder / "checkpoints").is_dir():
        return not any((folder / "checkpoints").glob("step_*"))
    return all(entry.name == LOCK_NAME for entry in folder.iterdir())


def _at_step(load: str, step: int) -> str:
    """The folder of one step: of a run of ours, or of Megatron's."""
    ours = Path(load, "checkpoints").is_dir()
    return f"{load}/checkpoints/step_{step:08d}" if ours else f"{load}/iter_{step:07d}"


def _take_stored(given: Given, load: str, section: str, names: Collection[str]) -> None:
    """Puts what the checkpoint's run had in place of what the flags say."""
    from megalith.bridge.load import is_foreign  # torch: only where it is asked for
    from megalith.checkpoint.open import open_checkpoint
    from megalith.errors import MegalithError

    try:
        if is_foreign(load):  # its model is taken where nothing is said of it; of its schedule nothing is
            own = given.tree.get(section, {})
            given.tree[section] = {name: value for name, value in own.items() if name not in names}
            return
        checkpoint = open_checkpoint(load, ())
    except MegalithError as error:
        given.problems.extend(str(error).split("\n"))
        return
    stored: Mapping[str, Any] = checkpoint.manifest.config.get(section, {}) if checkpoint else {}
    given.tree.setdefault(section, {}).update(
        {name: value for name, value in stored.items() if name in names}
    )


def sharding(given: Given) -> None:
    """parallel.data_parallel_sharding_strategy: optim with --use-distributed-optimizer."""
    if given["--use-torch-fsdp2"]:
        given.set("parallel.data_parallel_sharding_strategy", "optim_grads_params")
    elif given["--use-megatron-fsdp"]:
        given.set("parallel.data_parallel_sharding_strategy", given["--data-parallel-sharding-strategy"])
    elif given["--use-distributed-optimizer"]:
        given.set("parallel.data_parallel_sharding_strategy", "optim")


def sequence_parallel(given: Given) -> None:
    """parallel.sequence_parallel, which takes a --tensor-model-parallel-size above 1."""
    if not given["--sequence-parallel"]:
        return
    if given["--tensor-model-parallel-size"] > 1:
        given.set("parallel.sequence_parallel", True)
    else:
        given.notes.append(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1, as in Megatron"
        )


def experts(given: Given) -> None:
    """model.moe_layer_freq, model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, model.add_router_bias,
    which goes with the linears' biases, and parallel.expert_tensor_parallel_size, which is that of the other layers if
    not given."""
    if given["--num-experts"] is None:
        return
    size = given["--expert-tensor-parallel-size"] or given["--tensor-model-parallel-size"]
    given.set("parallel.expert_tensor_parallel_size", size)
    if not given["--disable-bias-linear"]:
        given.set("model.add_router_bias", True)
    if "--moe-layer-freq" in given:
        given.set("model.moe_layer_freq", _layers(given, "--moe-layer-freq", given["--moe-layer-freq"]))
    balancing, weight = given["--moe-router-load-balancing-type"], given["--moe-aux-loss-coeff"]
    kinds = balancing if isinstance(balancing, list) else [balancing]
    weights = weight if isinstance(weight, list) else [weight]
    if not any(weights) and all(kind.endswith("aux_loss") for kind in kinds):
        kinds, weights = (
            kinds[:1] if kinds[0] != "global_aux_loss" else ["none"],
            weights[:1],
        )  # losses of no weight
    if len(kinds) > 1 or len(weights) > 1 or kinds[0] in ("global_aux_loss", "quantile_balancing"):
        given.problems.append(
            f"--moe-router-load-balancing-type {' '.join(kinds)} with --moe-aux-loss-coeff "
            f"{' '.join(map(str, weights))} is refused: there is one at a time of aux_loss, seq_aux_loss, sinkhorn and "
            "none, which depend on no layout; choose one"
        )
        return
    if kinds[0] == "sinkhorn":  # there the weights are these, whatever the flags say
        topk = given["--moe-router-topk"]
        given.set("model.moe_router_score_function", "sigmoid" if topk == 1 else "softmax")
        given.set("model.moe_router_pre_softmax", topk > 1)
        given.tree["model"].pop("moe_router_topk_scaling_factor", None)
    given.set("model.moe_router_load_balancing_type", kinds[0])
    given.set("model.moe_aux_loss_coeff", weights[0])


def muon(given: Given) -> None:
    """How --optimizer muon makes matrices orthogonal: each whole in any layout; query, key, value, gate and up each by
    itself; by the coefficients of Jordan et al. 2024; AdamW for what is no matrix of a layer."""
    if given["--optimizer"] not in ("muon", "dist_muon"):
        return
    for flag, value, way_out in (
        ("--muon-no-split-qkv", True, "query, key and value are always split here; leave it out"),
        ("--muon-scalar-optimizer", "lion", "there is adam; choose it"),
        ("--muon-tp-mode", "blockwise", "a matrix is always whole here; choose duplicated or distributed"),
    ):
        if given[flag] == value:
            given.problems.append(f"{flag if value is True else f'{flag} {value}'} is refused: {way_out}")
    given.notes.append(
        f"--optimizer muon: Newton-Schulz has the coefficients of Jordan et al. 2024, not those of "
        f"--muon-coefficient-type {given['--muon-coefficient-type']}, and the gate and up of a gated MLP are two "
        "matrices here: runs are alike, not the same"
    )


def moments(given: Given) -> None:
    """optim.exp_avg_dtype and exp_avg_sq_dtype, with --use-precision-aware-optimizer and --optimizer adam: bf16 is
    rounded at random here, and fp8 has a scale a block and a dynamic exponent. Weights and gradients stay in fp32,
    which --main-params-dtype and --main-grads-dtype cannot change."""
    for flag in ("--exp-avg-dtype", "--exp-avg-sq-dtype"):
        value = given[flag]
        if value == "fp32":
            continue
        if not given["--use-precision-aware-optimizer"]:
            given.problems.append(
                f"{flag} {value} needs --use-precision-aware-optimizer; give it, or leave {flag} out"
            )
        elif value == "fp16":
            given.problems.append(
                f"{flag} fp16 is refused: there are bf16, as large, and fp8; choose one of them"
            )
        else:
            given.set(f"optim.{flag[2:].replace('-', '_')}", value)


def recompute(given: Given) -> None:
    """parallel.recompute_granularity, recompute_method, recompute_num_layers and recompute_modules;
    --recompute-activations is selective."""
    granularity = "selective" if given["--recompute-activations"] else given["--recompute-granularity"]
    if granularity is None:
        return
    given.set("parallel.recompute_granularity", granularity)
    if granularity == "full":
        for flag in ("--recompute-method", "--recompute-num-layers"):
            if given[flag] is not None:
                given.set(f"parallel.{flag.removeprefix('--').replace('-', '_')}", given[flag])
        return
    asked = given["--recompute-modules"] or ["core_attn"]
    known = [module for module in asked if module in RECOMPUTED]
    if left_out := [module for module in asked if module not in RECOMPUTED]:
        given.notes.append(
            f"--recompute-modules {' '.join(left_out)}: not recomputed, which takes memory and changes nothing else; "
            f"there are {', '.join(RECOMPUTED)}"
        )
    if known:
        given.set("parallel.recompute_modules", known)
    else:
        del given.tree["parallel"]["recompute_granularity"]


def stages(given: Given) -> None:
    """parallel.pipeline_model_parallel_layout; layers of multi-token prediction, m, always stand beside the head."""
    layout = given["--pipeline-model-parallel-layout"]
    if layout is None:
        return
    *others, last = layout.split("|")
    if any("m" in stage for stage in others):
        given.problems.append(
            f"--pipeline-model-parallel-layout {layout} is refused: the layers of multi-token prediction (m) stand in "
            "the last stage, beside the head; put them there"
        )
        return
    given.set(
        "parallel.pipeline_model_parallel_layout", "|".join([*others, re.sub(r"m(\*\d+)?,?", "", last)])
    )


def context(given: Given) -> None:
    """parallel.cp_comm_type: one for all layers."""
    kinds = given["--cp-comm-type"]
    if "--cp-comm-type" in given:
        given.set("parallel.cp_comm_type", kinds[0])
    if len(set(kinds)) > 1:
        given.notes.append(
            f"--cp-comm-type {' '.join(kinds)}: every layer has the first; they differ in speed alone"
        )


def trackers(given: Given) -> None:
    """log.tensorboard and log.tensorboard_dir; log.wandb, log.wandb_project and log.wandb_name; log.tracker_names."""
    if given["--tensorboard-dir"] or given["--wandb-project"]:
        given.set("log.tracker_names", "megatron")
    if given["--tensorboard-dir"]:
        given.set("log.tensorboard", True)
        given.set("log.tensorboard_dir", given["--tensorboard-dir"])
    if given["--wandb-project"]:
        given.set("log.wandb", True)
        given.set("log.wandb_project", given["--wandb-project"])
        given.set("log.wandb_name", given["--wandb-exp-name"])
        if not given["--wandb-exp-name"]:
            given.problems.append("--wandb-project needs --wandb-exp-name, the run's name; give it")


def per_token_loss(given: Given) -> None:
    """train.calculate_per_token_loss: without it every micro-batch counts the same, which makes a difference where
    --eod-mask-loss, or an encoder's masking, leaves them different numbers of valid tokens."""
    if given["--eod-mask-loss"] or given.program != "pretrain-gpt":
        given.set("train.calculate_per_token_loss", given["--calculate-per-token-loss"])
