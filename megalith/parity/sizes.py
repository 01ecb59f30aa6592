"""Sizes of a parity run. It keeps all features of a configuration in a model that a CPU trains in a second.

Every axis can shard it: 4 layers, heads for 4 ranks, a padded vocabulary, sequences for 4 context-parallel ranks. A
setting is reduced by its entry in SIZES, or else by the rule of its section.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from megalith.config import DataConfig, ModelConfig, RopeScaling, RunConfig, TrainConfig

ParitySize = Callable[[Any, Any], Any]
"""Function of a setting's value and its section that returns the value in the parity run."""

LAYERS, HEAD_DIM, SEQ_LENGTH, VOCAB_SIZE, BATCH = 4, 8, 32, 131, 8
MAX_HEADS = 16
MAMBA_HEADS = 8
VOCAB_MULTIPLE = 10
WINDOW = 11  # earlier tokens that a query attends to; less than SEQ_LENGTH
EXPERTS, EXPERT_GROUPS, GROUP_TOPK = 8, 4, 2
MAX_LR = 1e-3  # with a higher rate a tiny model's optimizer amplifies rounding


def KEEP(value: Any, _: Any) -> Any:
    return value


def _fixed(size: Any) -> ParitySize:
    return lambda value, section: size


def _if_set(size: int) -> ParitySize:
    return lambda value, section: value and size


def _at_most(bound: int) -> ParitySize:
    return lambda value, section: value and min(value, bound)


def _query_groups(_: Any, model: ModelConfig) -> int:
    """Return the number of KV heads, at most 2; 0 for MHA. `_heads` keeps the ratio of query heads to KV heads."""
    return 0 if model.num_attention_heads == model.query_groups else min(2, model.query_groups)


def _heads(_: Any, model: ModelConfig) -> int:
    return min((_query_groups(0, model) or 4) * (model.num_attention_heads // model.query_groups), MAX_HEADS)


def _hidden_size(_: Any, model: ModelConfig) -> int:
    return _heads(None, model) * HEAD_DIM


def _ffn_size(value: int | None, model: ModelConfig) -> int | None:
    """Return an MLP width in the model's proportion to the hidden size, as a multiple of 8."""
    return value and 8 * math.ceil(_hidden_size(None, model) * value / model.hidden_size / 8)


def _mup_base_width(value: int | None, model: ModelConfig) -> int | None:
    """Return a width of µP's base model, at least 1, that keeps its ratio to the model's width."""
    return value and max(1, round(_hidden_size(None, model) * value / model.hidden_size))


def _mup_base_depth(value: int | None, model: ModelConfig) -> int | None:
    return value and max(1, round(LAYERS * value / model.num_layers))


def _layer_pattern(value: int | list[int] | None, _: ModelConfig) -> int | list[int] | None:
    """Return a layer frequency, or a list for the first 4 layers."""
    return (value * LAYERS)[:LAYERS] if isinstance(value, list) else value and min(value, LAYERS)


def _linear_key_heads(_: Any, model: ModelConfig) -> int:
    return min(model.linear_num_key_heads, 4)


def _linear_value_heads(_: Any, model: ModelConfig) -> int:
    """Return the number of value heads, at most 16, in the model's ratio of value heads to key heads."""
    ratio = model.linear_num_value_heads // model.linear_num_key_heads
    return min(_linear_key_heads(None, model) * ratio, MAX_HEADS)


def _branches(pattern: str | None, _: ModelConfig) -> str | None:
    """Return a pattern for the reduced number of layers that keeps layers of every kind, in order."""
    if pattern is None:
        return None
    kept = sorted(sorted(range(len(pattern)), key=lambda at: pattern[:at].count(pattern[at]))[:LAYERS])
    return "".join(pattern[at] for at in kept)


def _rope_scaling(value: RopeScaling | None, model: ModelConfig) -> RopeScaling | None:
    """Return LongRoPE with factors for the remaining rotary pairs and an original length below the sequence length."""
    if value is None or value.type != "longrope":
        return value
    pairs = int(HEAD_DIM * model.rotary_percent) // 2
    factors = {name: getattr(value, name)[:pairs] for name in ("short_factor", "long_factor")}
    return value.model_copy(update={"original_max_position_embeddings": SEQ_LENGTH // 2, **factors})


def _router_topk(value: int, model: ModelConfig) -> int:
    if model.moe_router_group_topk:
        return 2 * min(model.moe_router_group_topk, GROUP_TOPK)
    return min(value, EXPERTS // 2)


def _expert_layers(value: int | list[int], _: ModelConfig) -> int | list[int]:
    """Return the layers with experts. A dense first layer stays dense."""
    return [value[0], *[1] * (LAYERS - 1)] if isinstance(value, list) else value


def _tokenizer(_: Any, data: DataConfig) -> str | None:
    """Return a tokenizer type with an end-of-document token if the data settings need that token; otherwise None."""
    needs_eod = data.reset_position_ids or data.reset_attention_mask or data.eod_mask_loss
    return "NullTokenizer" if needs_eod else None


def _micro_batch_size(_: Any, train: TrainConfig) -> int:
    """Return 1 if the batch size grows during the run, because 4 replicas share the smallest batch; otherwise 2."""
    return 1 if train.rampup_batch_size or train.step_batch_size_schedule else 2


# Rule for the settings of a section without an entry in SIZES. None: they have their default.
SECTION_RULES: dict[str, ParitySize | None] = {
    "model": KEEP, "parallel": None, "data": None, "optim": None, "lora": KEEP, "sft": None, "dpo": None,
    "kto": None, "reward": None,
    "distill": None, "rl": None, "train": None, "checkpoint": None, "log": None, "runtime": None,
}  # fmt: skip

# fmt: off
SIZES: dict[str, ParitySize | None] = {  # None: the default
    "model.preset":                              None,
    "model.init_from":                           None,
    "model.score_head":                          None,
    "model.num_layers":                          _fixed(LAYERS),
    "model.encoder_num_layers":                  _at_most(LAYERS - 1),
    "model.hidden_size":                         _hidden_size,
    "model.ffn_hidden_size":                     _ffn_size,
    "model.mup_base_hidden_size":                _mup_base_width,
    "model.mup_base_num_layers":                 _mup_base_depth,
    "model.num_attention_heads":                 _heads,
    "model.num_query_groups":                    _query_groups,
    "model.kv_channels":                         _if_set(HEAD_DIM),
    "model.vocab_size":                          _fixed(VOCAB_SIZE),
    "model.make_vocab_size_divisible_by":        _at_most(VOCAB_MULTIPLE),
    "model.max_position_embeddings":             _fixed(SEQ_LENGTH),
    "model.no_rope_freq":                        _layer_pattern,
    "model.rope_scaling":                        _rope_scaling,
    "model.window_size":                         lambda value, _: value and [min(tokens, WINDOW) for tokens in value],
    "model.window_attn_skip_freq":               _layer_pattern,
    "model.attention_chunk_size":                _if_set(WINDOW),
    "model.query_scaling_length":                _at_most(WINDOW),
    "model.q_lora_rank":                         _if_set(10),
    "model.kv_lora_rank":                        _fixed(12),
    "model.qk_head_dim":                         _fixed(6),
    "model.qk_pos_emb_head_dim":                 _fixed(4),
    "model.v_head_dim":                          _fixed(HEAD_DIM),
    "model.linear_attention_freq":               _layer_pattern,
    "model.linear_key_head_dim":                 _fixed(HEAD_DIM),
    "model.linear_value_head_dim":               _fixed(HEAD_DIM),
    "model.linear_num_key_heads":                _linear_key_heads,
    "model.linear_num_value_heads":              _linear_value_heads,
    "model.hybrid_layer_pattern":                _branches,
    "model.mamba_state_dim":                     _fixed(HEAD_DIM),
    "model.mamba_head_dim":                      _fixed(HEAD_DIM),
    "model.mamba_num_heads":                     _fixed(MAMBA_HEADS),
    "model.mamba_num_groups":                    lambda value, _: min(value, MAMBA_HEADS // 2),
    "model.num_experts":                         _at_most(EXPERTS),
    "model.moe_layer_freq":                      _expert_layers,
    "model.moe_ffn_hidden_size":                 _if_set(3 * HEAD_DIM),
    "model.moe_shared_expert_intermediate_size": _if_set(2 * HEAD_DIM),
    "model.moe_router_topk":                     _router_topk,
    "model.moe_router_num_groups":               _if_set(EXPERT_GROUPS),
    "model.moe_router_group_topk":               _at_most(GROUP_TOPK),
    "model.moe_grouped_gemm":                    None,
    "model.moe_permute_fusion":                  None,

    "parallel.save_gathered_inputs":             KEEP,
    "parallel.recompute_granularity":            KEEP,
    "parallel.recompute_method":                 KEEP,
    "parallel.recompute_num_layers":             KEEP,
    "parallel.recompute_saves_attention":        KEEP,
    "parallel.recompute_modules":                KEEP,

    "data.mock":                                 _fixed(True),
    "data.seq_length":                           _fixed(SEQ_LENGTH),
    "data.decoder_seq_length":                   _if_set(SEQ_LENGTH // 2),
    "data.tokenizer_type":                       _tokenizer,
    "data.dataloader_type":                      KEEP,
    "data.reset_position_ids":                   KEEP,
    "data.reset_attention_mask":                 KEEP,
    "data.eod_mask_loss":                        KEEP,
    "data.num_workers":                          _fixed(0),

    "optim.optimizer":                           KEEP,
    "optim.param_groups":                        KEEP,
    "optim.lr":                                  lambda value, _: min(value or MAX_LR, MAX_LR),
    "optim.lr_decay_style":                      _fixed("constant"),
    "optim.weight_decay":                        KEEP,
    "optim.adam_beta1":                          KEEP,
    "optim.adam_beta2":                          KEEP,
    "optim.adam_eps":                            KEEP,
    "optim.exp_avg_dtype":                       KEEP,
    "optim.exp_avg_sq_dtype":                    KEEP,
    "optim.sgd_momentum":                        KEEP,
    "optim.lion_beta1":                          KEEP,
    "optim.lion_beta2":                          KEEP,
    "optim.ademamix_beta3":                      KEEP,
    "optim.ademamix_alpha":                      KEEP,
    "optim.ademamix_warmup_iters":               KEEP,
    "optim.adafactor_beta2_decay":               KEEP,
    "optim.adafactor_clip_threshold":            KEEP,
    "optim.muon_momentum":                       KEEP,
    "optim.muon_momentum_warmup_iters":          KEEP,
    "optim.muon_momentum_start":                 KEEP,
    "optim.muon_nesterov":                       KEEP,
    "optim.muon_num_ns_steps":                   KEEP,
    "optim.muon_scale_mode":                     KEEP,
    "optim.muon_coefficient_type":               KEEP,
    "optim.muon_split_qkv":                      KEEP,
    "optim.muon_split_gate_up":                  KEEP,
    "optim.muon_split_heads":                    KEEP,
    "optim.muon_moment2_method":                 KEEP,
    "optim.muon_beta2":                          KEEP,
    "optim.muon_state_dtype":                    KEEP,
    "optim.soap_shampoo_beta":                   KEEP,
    "optim.soap_precondition_frequency":         KEEP,
    "optim.soap_max_precond_dim":                KEEP,
    "optim.soap_use_kl_shampoo":                 KEEP,
    "optim.muon_scalar_optimizer":               KEEP,
    "optim.muon_extra_scale_factor":             KEEP,
    "optim.ema_decay":                           KEEP,
    "optim.clip_grad":                           KEEP,
    "optim.qk_clip":                             KEEP,
    "optim.qk_clip_threshold":                   KEEP,
    "optim.qk_clip_alpha":                       KEEP,

    "lora.load":                                 None,
    "lora.layers_to_transform":                  None,

    "train.micro_batch_size":                    _micro_batch_size,
    "train.global_batch_size":                   _fixed(BATCH),
    "train.rampup_batch_size":                   lambda value, _: value and [BATCH // 2, BATCH // 2, 2 * BATCH],
    "train.step_batch_size_schedule":            lambda value, _: value and [(0, BATCH // 2), (2 * BATCH, BATCH)],
    "train.calculate_per_token_loss":            KEEP,
    "train.seed":                                KEEP,
    "train.eval_iters":                          _fixed(1),

    "runtime.compile":                           _fixed(False),
}
# fmt: on


def shrink(config: RunConfig, steps: int, device: str = "cpu") -> RunConfig:
    """Return the parity run of a configuration: fp32, mock data, one process.

    On a GPU attention has no dropout, because fused kernels draw it differently in each layout.

    Args:
        config: the configuration; `config.model` has the shape of the full-size model.
        steps: optimizer steps.
        device: cpu or cuda.
    """
    tree = {name: _shrink_section(config, name) for name in RunConfig.model_fields}
    tree["train"]["train_iters"] = steps
    tree["runtime"]["device"] = device
    if device != "cpu":
        tree["model"]["attention_dropout"] = 0.0
    return RunConfig.from_tree(tree)


def _shrink_section(config: RunConfig, name: str) -> dict[str, Any]:
    """Return the settings of a section for the parity run. Settings that the run does not use have their defaults."""
    section = getattr(config, name)
    unread = section.unread(config)
    sizes = {field: SIZES.get(f"{name}.{field}", SECTION_RULES[name]) for field in type(section).model_fields}
    return {
        field: size(getattr(section, field), section)
        for field, size in sizes.items()
        if size is not None and field not in unread
    }
