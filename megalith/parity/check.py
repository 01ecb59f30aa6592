"""A configuration made small, and the same job of it in one layout after the other, each against one process.

The small one keeps every feature; every size that costs time is cut down. A laptop's CPU trains it in a second, and
each axis has something to cut: 4 layers, heads for 4 ranks, a vocabulary that is padded, sequences for 4 context ranks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalith.config import ModelConfig, RunConfig
from megalith.errors import ConfigError, nearest_of
from megalith.launch.pool import Pool, RankFailed
from megalith.parity.differences import Errors, compare
from megalith.parity.job import run_job
from megalith.parity.layouts import LAYOUTS, ParityLayout
from megalith.training.trainer import prepare

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


@dataclass(frozen=True)
class Result:
    """One layout's."""

    name: str
    layout: ParityLayout
    seconds: float
    errors: Errors | None  # None: the job failed
    failure: str = ""

    @property
    def equal(self) -> bool:
        return self.errors is not None and self.errors.within()


def in_layout(config: RunConfig, layout: ParityLayout) -> RunConfig:
    """`config` spread as `layout` says."""
    tree = config.to_tree()
    tree["parallel"] |= layout.parallel
    return RunConfig.from_tree(tree)


def choose(
    config: RunConfig, names: Sequence[str], most_processes: int
) -> tuple[dict[str, ParityLayout], dict[str, str]]:
    """The layouts with these names, or all that `config` can take with so many processes; why not the others.

    Raises ConfigError for a named layout that there is not or that cannot be, and where none can.
    """
    if names:
        chosen = {name: _named(name, most_processes) for name in names}
        for layout in chosen.values():
            prepare(in_layout(config, layout), layout.processes)
        return chosen, {}
    chosen, refused = {}, {}
    for name, layout in LAYOUTS.items():
        if layout.processes > most_processes or (layout.has_experts and config.model.num_experts is None):
            continue
        try:
            prepare(in_layout(config, layout), layout.processes)
            chosen[name] = layout
        except ConfigError as error:
            refused[name] = str(error)
    if not chosen:
        raise ConfigError(
            "the configuration can take no layout: " + "; ".join(dict.fromkeys(refused.values()))
        )
    return chosen, refused


def check(
    config: RunConfig, layouts: Mapping[str, ParityLayout], device_type: str = "cpu"
) -> Iterator[Result]:
    """Runs the job of `config` in one process, then in each layout; gives each result when it is there."""
    one = run_job(config)
    pool = Pool(max(layout.processes for layout in layouts.values()), device_type=device_type)
    try:
        for name, layout in layouts.items():
            began, errors, failure = time.monotonic(), None, ""
            try:
                outcomes = pool.run(run_job, in_layout(config, layout), size=layout.processes)
                errors = compare(outcomes, one)
            except RankFailed as error:
                failure = str(error).strip().splitlines()[-1]
            yield Result(name, layout, time.monotonic() - began, errors, failure)
    finally:
        pool.close()


def _named(name: str, most_processes: int) -> ParityLayout:
    if name not in LAYOUTS:
        raise ConfigError(f"there is no layout {name!r}{nearest_of(name, LAYOUTS)}")
    layout = LAYOUTS[name]
    if layout.processes > most_processes:
        raise ConfigError(
            f"layout {name} takes {layout.processes} processes, but --nproc-max is {most_processes}; raise it to "
            f"{layout.processes}, or name a smaller layout"
        )
    return layout


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
