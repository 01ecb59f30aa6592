"""Rules of parallel.dynamic_context_parallel: the errors name unsupported settings."""

from __future__ import annotations

from collections.abc import Iterator

from megalith.config.model import ModelConfig
from megalith.config.run import RunConfig
from megalith.errors import ConfigError

Setting = tuple[str, object, str]
"""A setting's name, its value, and the reason why it is not supported."""


def context_degrees(ranks: int, smallest: int = 1) -> list[int]:
    """Return the possible dynamic context parallel sizes: powers of two that divide `ranks` and are at least
    `smallest`.
    """
    powers = (1 << exponent for exponent in range(ranks.bit_length()))
    return [power for power in powers if power >= smallest and ranks % power == 0]


def check_dynamic_context(config: RunConfig, ranks: int) -> None:
    """Raise ConfigError if the run cannot choose the context parallel size of each sequence.

    Args:
        config: the run.
        ranks: number of data × context ranks.
    """
    parallel = config.parallel
    if not parallel.dynamic_context_parallel:
        return
    for name, value, reason in (*_of_model(config.model), *_of_run(config)):
        raise ConfigError(
            f"{name} is {value}, which parallel.dynamic_context_parallel does not support: {reason}; change {name}, "
            "or set parallel.dynamic_context_parallel to false"
        )
    smallest = parallel.min_dynamic_context_parallel_size
    degrees = context_degrees(ranks, smallest)
    if smallest not in degrees:
        raise ConfigError(
            f"parallel.min_dynamic_context_parallel_size {smallest} is not a power of two that divides the {ranks} "
            f"data × context ranks; choose among {context_degrees(ranks)}"
        )
    if parallel.context_parallel_size not in context_degrees(ranks):
        raise ConfigError(
            f"parallel.context_parallel_size {parallel.context_parallel_size} is not a power of two, and "
            "parallel.dynamic_context_parallel divides the ranks into groups of powers of two; choose among "
            f"{context_degrees(ranks)}"
        )
    largest, tokens, length = degrees[-1], config.tokens_per_pass, config.data.seq_length
    if largest * tokens < length:
        raise ConfigError(
            f"a sequence can use at most {largest} data × context ranks, which hold {largest} × {tokens} tokens, fewer "
            f"than data.seq_length {length}; set parallel.max_seqlen_per_dp_cp_rank (now {tokens}) to at least "
            f"{-(-length // largest)}"
        )
    heads = config.model.num_attention_heads // parallel.tensor_model_parallel_size
    if parallel.cp_comm_type == "a2a" and heads % largest:
        raise ConfigError(
            f"parallel.cp_comm_type a2a exchanges heads among up to {largest} ranks, but a tensor-parallel rank has "
            f"{heads} heads, which {largest} does not divide; set parallel.cp_comm_type to p2p, which shards no heads"
        )


_OTHER_TOKENS = (
    "the balance of experts depends on a micro-batch's tokens, which differ from those of a static layout"
)
_UNEVEN = "ranks have different numbers of tokens in a pass"
_STATIC = "this is implemented only for sequences that all have the same context parallel size"
_DROPOUT = "dropout is keyed by the position in the row, which changes"


def _of_model(model: ModelConfig) -> Iterator[Setting]:
    if model.model_type != "gpt":
        yield "model.model_type", model.model_type, "only decoders are supported"
    if model.score_head:
        yield "model.score_head", True, "only language models are supported"
    if model.num_experts is not None:
        yield from _of_experts(model)
    if mixers := model.recurrent_mixers:
        yield "a layer's mixer", sorted(mixers)[0], _STATIC
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(model, name):
            yield f"model.{name}", getattr(model, name), _DROPOUT
    if model.rope_scaling is not None and model.rope_scaling.type == "longrope":
        yield (
            "model.rope_scaling.type",
            "longrope",
            "the angles of longrope depend on the length of the row, which changes",
        )


def _of_experts(model: ModelConfig) -> Iterator[Setting]:
    balances = {
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff and model.moe_router_load_balancing_type != "none",
        "moe_z_loss_coeff": model.moe_z_loss_coeff,
        "moe_router_load_balancing_type": model.moe_router_load_balancing_type == "sinkhorn",
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor is not None,
    }
    for name in (name for name, is_set in balances.items() if is_set):
        yield f"model.{name}", getattr(model, name), _OTHER_TOKENS


def _of_run(config: RunConfig) -> Iterator[Setting]:
    parallel, train = config.parallel, config.train
    if not config.sft.enabled or config.distill.teacher_or_logits is not None:
        enabled = "distill.teacher" if config.distill.teacher_or_logits is not None else "sft.enabled"
        yield enabled, enabled != "sft.enabled", "only the samples of `megalith sft` are scheduled"
    if parallel.expert_tensor_parallel_size > 1:
        yield "parallel.expert_tensor_parallel_size", parallel.expert_tensor_parallel_size, _STATIC
    if parallel.expert_model_parallel_size > 1:
        if parallel.moe_token_dispatcher_type != "alltoall":
            yield "parallel.moe_token_dispatcher_type", parallel.moe_token_dispatcher_type, _UNEVEN
        if parallel.moe_static_dispatch is True:
            yield "parallel.moe_static_dispatch", True, _UNEVEN
    if parallel.cp_comm_type == "a2a+p2p":
        yield "parallel.cp_comm_type", "a2a+p2p", "groups of each size exchange keys and values on one level"
    if parallel.overlaps:
        yield "parallel.tp_comm_overlap", True, "a pass has one row, which cannot be halved"
    if "cp" in parallel.copy_engine_axes:
        yield "parallel.symmetric_memory_groups", "cp", "groups of each size have no symmetric memory"
    if config.lora.dropout and (config.lora.rank is not None or config.lora.load is not None):
        yield "lora.dropout", config.lora.dropout, _DROPOUT
    if train.fp8_format is not None:
        yield "train.fp8_format", train.fp8_format, "FP8 scales depend on the tokens of a pass"
    if train.batch_invariant:
        yield "train.batch_invariant", True, "passes have several samples"
    if not train.calculate_per_token_loss:
        yield "train.calculate_per_token_loss", False, "the mean over a micro-batch depends on its samples"
    if config.optim.qk_clip:
        yield "optim.qk_clip", True, _STATIC
    if config.log.log_max_attention_logit:
        yield "log.log_max_attention_logit", True, _STATIC
    if config.log.log_gradient_noise_interval:
        yield (
            "log.log_gradient_noise_interval",
            config.log.log_gradient_noise_interval,
            "the noise is measured on the first micro-batches, which have no fixed number of samples",
        )
    if config.data.balance_batches:
        yield "data.balance_batches", True, "passes are balanced already"
