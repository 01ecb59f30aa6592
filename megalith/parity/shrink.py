"""A configuration made small: every feature kept, every size that costs time cut down.

A laptop's CPU trains the result in a second, and each axis has something to cut: 4 layers, heads for 4 ranks, a
vocabulary that is padded, sequences for 4 context ranks.
"""

from __future__ import annotations

import math
from typing import Any

from megalith.config import ModelConfig, RunConfig

WINDOW = 11  # tokens before a query's own
LAYERS, HEAD_DIM, SEQUENCE, VOCABULARY, PADDED_TO, BATCH = 4, 8, 32, 131, 10, 8
MOST_HEADS = 16
EXPERTS, EXPERT_GROUPS = 8, 4
OF_THE_WHOLE = (
    "preset",
    "init_from",
    "moe_grouped_gemm",
    "moe_permute_fusion",
)  # of the model: left at their default
HIGHEST_RATE = 1e-3  # above it a tiny model's optimizer makes much of the last bit

# What stays as it is beside the model. Everything else is set below, or left at its default.
KEPT = {
    "data": ("dataloader_type", "reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    "optim": (
        "optimizer",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "sgd_momentum",
        "clip_grad",
    ),
    "parallel": ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    "lora": ("rank", "alpha", "dropout", "targets"),
    "train": ("seed",),
}


def shrink(config: RunConfig, steps: int, device: str = "cpu") -> RunConfig:
    """The small run of `steps` steps in fp32, on made-up data and one process; `config.model` has its shape.

    On a GPU attention has no dropout, the one thing that a fused kernel makes different in every layout.
    """
    tree: dict[str, dict[str, Any]] = {
        section: getattr(config, section).model_dump(include=set(names)) for section, names in KEPT.items()
    }
    tree["model"] = config.model.model_dump(exclude=set(OF_THE_WHOLE))
    documents = any(tree["data"][name] for name in KEPT["data"][1:])
    for part in (_sizes, _window, _scaling, _latents, _experts):
        tree["model"] |= part(config.model)
    if device != "cpu":
        tree["model"]["attention_dropout"] = 0.0
    tree["data"] |= {
        "mock": True,
        "seq_length": SEQUENCE,
        "num_workers": 0,
        "tokenizer_type": "NullTokenizer" if documents else None,  # for its end of document
    }
    tree["optim"] |= {
        "lr": min(config.optim.lr or HIGHEST_RATE, HIGHEST_RATE),
        "lr_decay_style": "constant",
    }
    ramp = config.train.rampup_batch_size and [BATCH // 2, BATCH // 2, 2 * BATCH]
    tree["train"] |= {
        "train_iters": steps,
        "micro_batch_size": 1 if ramp else 2,  # 4 data-parallel ranks share the smallest batch
        "global_batch_size": BATCH,
        "rampup_batch_size": ramp,
        "eval_iters": 1,
    }
    tree["runtime"] = {"device": device, "compile": False}
    return RunConfig.from_tree(tree)


def _sizes(model: ModelConfig) -> dict[str, int | None]:
    """As many query heads to a key and value head as before (at most 16 in all), and widths in proportion."""
    ratio = model.num_attention_heads // model.query_groups
    groups = 4 if ratio == 1 else min(2, model.query_groups)
    heads = min(groups * ratio, MOST_HEADS)
    hidden = heads * HEAD_DIM
    ffn = model.ffn_hidden_size and 8 * math.ceil(hidden * model.ffn_hidden_size / model.hidden_size / 8)
    return {
        "num_layers": LAYERS,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": 0 if ratio == 1 else groups,
        "kv_channels": model.kv_channels and HEAD_DIM,
        "vocab_size": VOCABULARY,
        "make_vocab_size_divisible_by": min(model.make_vocab_size_divisible_by, PADDED_TO),
        "max_position_embeddings": SEQUENCE,
    }


def _window(model: ModelConfig) -> dict[str, Any]:
    """A window that the short sequences are longer than, in the layers of the same places, or of the first 4."""
    skip = model.window_attn_skip_freq
    return {
        "window_size": model.window_size and [min(model.window_size[0], WINDOW), 0],
        "window_attn_skip_freq": (skip * LAYERS)[:LAYERS]
        if isinstance(skip, list)
        else skip and min(skip, LAYERS),
    }


def _scaling(model: ModelConfig) -> dict[str, Any]:
    """LongRoPE's factors for the pairs that are left, and an original length that the sequences are longer than."""
    scaling = model.rope_scaling
    if scaling is None or scaling.type != "longrope":
        return {}
    pairs = int(HEAD_DIM * model.rotary_percent) // 2
    shorter = {name: getattr(scaling, name)[:pairs] for name in ("short_factor", "long_factor")}
    return {
        "rope_scaling": {**scaling.model_dump(), **shorter, "original_max_position_embeddings": SEQUENCE // 2}
    }


def _latents(model: ModelConfig) -> dict[str, Any]:
    """Latent attention with heads of about the usual size."""
    if not model.multi_latent_attention:
        return {}
    sizes = {"kv_lora_rank": 12, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": HEAD_DIM}
    return sizes | {"q_lora_rank": model.q_lora_rank and 10}


def _experts(model: ModelConfig) -> dict[str, Any]:
    """At most 8 experts, in at most 4 groups, of a width in proportion; a dense first layer stays one."""
    if model.num_experts is None:
        return {}
    groups = model.moe_router_num_groups and EXPERT_GROUPS
    best = groups and min(model.moe_router_group_topk, EXPERT_GROUPS // 2)
    frequency = model.moe_layer_freq
    return {
        "num_experts": min(model.num_experts, EXPERTS),
        "moe_router_topk": best * 2 if best else min(model.moe_router_topk, EXPERTS // 2),
        "moe_router_num_groups": groups,
        "moe_router_group_topk": best,
        "moe_layer_freq": [frequency[0], *[1] * (LAYERS - 1)] if isinstance(frequency, list) else frequency,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size and 3 * HEAD_DIM,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size and 2 * HEAD_DIM,
    }
