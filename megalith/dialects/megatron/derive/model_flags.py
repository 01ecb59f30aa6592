"""Settings of the model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megalith.dialects.megatron.derive.layer_lists import layer_list

if TYPE_CHECKING:
    from megalith.dialects.megatron.flag_kinds import ParsedFlags


def masked_words(flags: ParsedFlags) -> None:
    """Set the masking and the sizes of pretrain_bert and pretrain_t5. pretrain_gpt ignores these flags.

    Both set model.model_type, data.mask_prob and data.short_seq_prob. pretrain_bert also sets model.bert_binary_head
    and model.lm_head_activation, and pretrain_t5 the decoder's sizes.
    """
    program = flags.program.removeprefix("pretrain-")
    others = [flag for flag, readers in ENCODER_FLAGS.items() if flag in flags and program not in readers]
    if others:
        flags.notes.append(
            f"{' '.join(others)} {'have' if others[1:] else 'has'} no effect: pretrain_{program}.py does not read "
            f"{'them' if others[1:] else 'it'}"
        )
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
            "pretrain_t5.py needs --encoder-num-layers (or --num-layers), the number of encoder layers; add the flag"
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
            f"--softmax-type {flags['--softmax-type']} turns attention dropout off in Megalith, but Megatron's "
            "default is 0.1; set --attention-dropout 0 in both for the same training"
        )


def heads(flags: ParsedFlags) -> None:
    """Set model.num_query_groups, if --group-query-attention is present."""
    if flags["--multi-latent-attention"]:
        return
    if flags["--group-query-attention"]:
        flags.set("model.num_query_groups", flags["--num-query-groups"])
    elif "--num-query-groups" in flags and flags["--num-query-groups"] != flags["--num-attention-heads"]:
        flags.notes.append(
            f"--num-query-groups {flags['--num-query-groups']} has no effect without "
            "--group-query-attention, as in Megatron: every query head has its own keys and "
            "values; add that flag to group the heads"
        )


def activation(flags: ParsedFlags) -> None:
    """Set model.swiglu, model.activation and model.gated_linear_unit.

    The default is GELU, with the tanh approximation if Megatron fuses it with a bias or if Transformer Engine computes
    it.
    """
    chosen = [flag for flag in ("--swiglu", "--squared-relu", "--quick-geglu") if flags[flag]]
    if len(chosen) > 1:
        flags.problems.append(f"{' and '.join(chosen)} contradict each other; keep one of them")
    if "--swiglu" in chosen:
        flags.set("model.swiglu", True)
    elif "--squared-relu" in chosen:
        flags.set("model.activation", "squared_relu")
    elif "--quick-geglu" in chosen:
        flags.set("model.activation", "quick_gelu")
        flags.set("model.gated_linear_unit", True)
    elif not _is_gelu_by_tanh(flags):
        flags.set("model.activation", "gelu")


def _is_gelu_by_tanh(flags: ParsedFlags) -> bool:
    """Return True if Megatron's GELU is the tanh approximation: fused with a bias, or Transformer Engine's.

    Megatron does not use the op fuser for models with experts.
    """
    fuses_ops = flags["--use-transformer-engine-op-fuser"] and flags["--num-experts"] is None
    uses_engine = flags["--transformer-impl"] != "local"
    is_fused = not flags["--no-bias-gelu-fusion"] and not flags["--disable-bias-linear"]
    return is_fused or (uses_engine and (flags["--use-te-activation-func"] or fuses_ops))


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
            f"--experimental-attention-variant {variant} is not supported, only gated_delta_net is; use "
            "gated_delta_net, or remove the flag"
        )
        return
    if frequency is None:
        flags.problems.append(
            f"--experimental-attention-variant {variant} needs --linear-attention-freq, which selects its layers; "
            "give --linear-attention-freq, for example as 4 or ([1]*3+[0]*1)*12"
        )
        return
    flags.set("model.experimental_attention_variant", "gated_delta_net")
    flags.set("model.linear_attention_freq", layer_list(flags, "--linear-attention-freq", frequency))
    for name in ("conv-kernel-dim", "key-head-dim", "value-head-dim", "num-key-heads", "num-value-heads"):
        flags.set(f"model.linear_{name.replace('-', '_')}", flags[f"--linear-{name}"])


def window(flags: ParsedFlags) -> None:
    """Set model.window_size and model.window_attn_skip_freq."""
    if flags["--window-size"] is None:
        return
    sizes = re.findall(r"-?\d+", flags["--window-size"])
    if len(sizes) != 2:
        flags.problems.append(
            f"--window-size is {flags['--window-size']!r}: it needs two numbers, like 4095,0"
        )
        return
    flags.set("model.window_size", [int(size) for size in sizes])
    if (frequency := flags["--window-attn-skip-freq"]) is not None:
        flags.set("model.window_attn_skip_freq", layer_list(flags, "--window-attn-skip-freq", frequency))


def vocabulary(flags: ParsedFlags) -> None:
    """Set model.vocab_size and model.make_vocab_size_divisible_by.

    The size is one larger for a NullTokenizer, whose end of document is an extra token. The divisor is multiplied by
    the tensor-parallel size, because Megatron applies it per rank.
    """
    kind, size = flags["--tokenizer-type"], flags["--vocab-size"]
    if kind == "NullTokenizer":
        if size is None:
            flags.problems.append("--tokenizer-type NullTokenizer needs --vocab-size; add --vocab-size")
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
        flags.set("model.moe_layer_freq", layer_list(flags, "--moe-layer-freq", flags["--moe-layer-freq"]))
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
            f"{' '.join(map(str, weights))} is not supported; choose a single one of aux_loss, seq_aux_loss, "
            "sinkhorn and none, which do not depend on the layout"
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
    """Set model.use_mup, its base sizes and attention scale, and model.embedding_multiplier for --mup-embedding-mult.

    --mup-output-mult sets model.logits_scaling so that logits are multiplied by the flag's value; 1, its default, means
    1 / (width ratio), as in Megatron. With --multi-latent-attention, the attention scale is unchanged, as in Megatron.
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
        flags.problems.append(
            f"--mup-output-mult is {factor}, but logits need a positive factor; set --mup-output-mult above 0"
        )
    elif factor != 1.0:
        flags.set("model.logits_scaling", (base or hidden) / (hidden * factor))
