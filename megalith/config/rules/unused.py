"""Settings that have a value of their own but change nothing in this run, since they belong to another that is off.

They are no mistake: one file may serve many runs. But whoever sets `recompute_modules` and forgets
`recompute_granularity` should not have to find that out from the memory that is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalith.config.run import RunConfig


@dataclass(frozen=True)
class Dependents:
    needs: str  # what makes a run read them, in words
    is_so: Callable[[RunConfig], bool]
    section: str
    names: tuple[str, ...]


# fmt: off
DEPENDENTS = [
    Dependents("parallel.recompute_granularity selective", lambda c: c.parallel.recompute_granularity == "selective",
               "parallel", ("recompute_modules",)),
    Dependents("parallel.recompute_granularity full", lambda c: c.parallel.recompute_granularity == "full",
               "parallel", ("recompute_num_layers",)),
    Dependents("parallel.context_parallel_size above 1", lambda c: c.parallel.context_parallel_size > 1,
               "parallel", ("cp_comm_type",)),
    Dependents("model.num_experts", lambda c: c.model.num_experts is not None,
               "parallel", ("moe_token_dispatcher_type",)),
    Dependents("model.num_experts", lambda c: c.model.num_experts is not None,
               "model", ("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size",
                         "moe_shared_expert_gate", "moe_shared_expert_overlap", "moe_router_topk",
                         "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
                         "moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias",
                         "moe_router_bias_update_rate", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
                         "moe_z_loss_coeff", "moe_expert_capacity_factor", "moe_token_drop_policy",
                         "moe_pad_expert_input_to_capacity", "moe_router_force_load_balancing", "moe_grouped_gemm",
                         "moe_permute_fusion")),
    Dependents("model.position_embedding_type rope", lambda c: c.model.position_embedding_type == "rope",
               "model", ("rotary_base", "rotary_base_local", "rotary_percent", "rope_scaling")),
    Dependents("model.multi_latent_attention true", lambda c: c.model.multi_latent_attention,
               "model", ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")),
    Dependents("model.mtp_num_layers", lambda c: c.model.mtp_num_layers is not None,
               "model", ("mtp_loss_scaling_factor",)),
    Dependents("optim.optimizer adamw or adam", lambda c: c.optim.optimizer != "sgd",
               "optim", ("adam_beta1", "adam_beta2", "adam_eps")),
    Dependents("optim.optimizer sgd", lambda c: c.optim.optimizer == "sgd",
               "optim", ("sgd_momentum",)),
    Dependents("optim.lr_decay_style WSD", lambda c: c.optim.lr_decay_style == "WSD",
               "optim", ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples")),
    Dependents("optim.optimizer_cpu_offload true", lambda c: c.optim.optimizer_cpu_offload,
               "optim", ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d")),
    Dependents("train.precision fp16", lambda c: c.train.precision == "fp16",
               "optim", ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")),
    Dependents("train.fp8_format", lambda c: c.train.fp8_format is not None,
               "train", ("fp8_recipe", "fp8_wgrad", "first_last_layers_bf16")),
    Dependents("train.fp8_recipe delayed", lambda c: c.train.fp8_format is not None and c.train.fp8_recipe == "delayed",
               "train", ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin")),
    Dependents("train.first_last_layers_bf16", lambda c: c.train.first_last_layers_bf16,
               "train", ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")),
    Dependents("checkpoint.keep_last", lambda c: c.checkpoint.keep_last is not None,
               "checkpoint", ("keep_every",)),
    Dependents("log.wandb true", lambda c: c.log.wandb,
               "log", ("wandb_project", "wandb_name")),
    Dependents("log.profile true", lambda c: c.log.profile,
               "log", ("profile_step_start", "profile_step_end")),
    Dependents("runtime.loss_spike_threshold", lambda c: c.runtime.loss_spike_threshold is not None,
               "runtime", ("loss_spike_window",)),
    Dependents("runtime.enable_straggler_detection true", lambda c: c.runtime.enable_straggler_detection,
               "runtime", ("straggler_interval", "straggler_threshold")),
]
# fmt: on


def idle_notes(config: RunConfig) -> list[str]:
    """A sentence for each setting whose value is not the default, and which this run does not read."""
    notes = []
    for group in _off(config):
        values = getattr(config, group.section)
        for name in group.names:
            value = getattr(values, name)
            if value != type(values).model_fields[name].default:
                notes.append(f"{group.section}.{name} {value} changes nothing: it takes {group.needs}")
    return notes


def unread_settings(config: RunConfig, section: str) -> set[str]:
    """The settings of `section` that this run does not read, whatever their values."""
    return {name for group in _off(config) if group.section == section for name in group.names}


def _off(config: RunConfig) -> list[Dependents]:
    return [group for group in DEPENDENTS if not group.is_so(config)]
