"""Rules of mixtures of experts that no single field can check. run_rules.py calls them."""

from __future__ import annotations

import math

from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.errors import ConfigError
from megalith.tables import counted


def check_experts(model: ModelConfig) -> None:
    """Raise ConfigError unless the layers with experts can be built. Required sizes are set."""
    experts, topk = model.num_experts, model.moe_router_topk
    if experts is None:
        return
    if topk > experts:
        raise ConfigError(
            f"model.moe_router_topk {topk} is more than model.num_experts {experts}, but a "
            "token cannot use an expert twice; lower model.moe_router_topk"
        )
    _check_layers(model)
    _check_groups(model)
    _check_sinkhorn(model)
    _check_sparsemixer(model)


def _check_layers(model: ModelConfig) -> None:
    frequency = model.moe_layer_freq
    if isinstance(frequency, list) and (len(frequency) != model.num_layers or not any(frequency)):
        raise ConfigError(
            f"model.moe_layer_freq has {len(frequency)} entries, {sum(frequency)} of them 1, and model.num_layers is "
            f"{model.num_layers}; list one entry per layer, 1 (experts) or 0 (an MLP), with at least one 1"
        )


def _check_groups(model: ModelConfig) -> None:
    groups, best, topk = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if groups is None and best is None:
        return
    if groups is None or best is None or best > groups or model.num_experts % groups:
        raise ConfigError(
            f"model.moe_router_num_groups is {groups} and model.moe_router_group_topk {best} with "
            f"{model.num_experts} experts; the number of groups must divide the number of experts, and "
            "moe_router_group_topk must not exceed the number of groups: set both settings, or neither"
        )
    size = model.num_experts // groups
    if best * size < topk:
        raise ConfigError(
            f"model.moe_router_group_topk {best} × {size} experts per group = {best * size}, fewer than "
            f"model.moe_router_topk {topk}; raise moe_router_group_topk, or lower moe_router_num_groups"
        )
    if model.moe_router_score_function == "sigmoid" and topk % best:
        raise ConfigError(
            f"model.moe_router_topk {topk} is not divisible by model.moe_router_group_topk {best}, but a group's "
            "score is the sum of its best topk / group_topk scores; set model.moe_router_group_topk to a divisor of "
            f"{topk}"
        )


def _check_sinkhorn(model: ModelConfig) -> None:
    if model.moe_router_load_balancing_type != "sinkhorn":
        return
    others = ("moe_aux_loss_coeff", "moe_router_num_groups", "moe_router_enable_expert_bias",
              "moe_router_force_load_balancing")  # fmt: skip
    for name in others:
        if value := getattr(model, name):
            raise ConfigError(
                f"model.moe_router_load_balancing_type is sinkhorn and model.{name} is {value}, but sinkhorn "
                "already balances the experts without it; leave one of the two out"
            )


def _check_sparsemixer(model: ModelConfig) -> None:
    if model.moe_router_score_function != "sparsemixer":
        return
    for name in ("moe_router_pre_softmax", "moe_router_num_groups", "moe_router_enable_expert_bias"):
        if value := getattr(model, name):
            raise ConfigError(
                f"model.moe_router_score_function is sparsemixer and model.{name} is {value}, but SparseMixer chooses "
                "the experts with the highest logits and weights them by its own formula; leave one of them out"
            )


def check_expert_parallel(model: ModelConfig, parallel: ParallelConfig, world_size: int) -> None:
    """Raise ConfigError unless the experts can be distributed over the ranks as configured."""
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    if model.num_experts is None:
        return
    expert_data_parallel_size(parallel, world_size)
    if model.num_experts % ep:
        raise ConfigError(
            f"model.num_experts {model.num_experts} is not divisible by "
            f"parallel.expert_model_parallel_size {ep}, but every rank must hold the same number; "
            f"choose among {divisors(model.num_experts)}"
        )
    if model.expert_size % etp:
        raise ConfigError(
            f"model.moe_ffn_hidden_size {model.expert_size} is not divisible by parallel.expert_tensor_parallel_size "
            f"{etp}; choose among {divisors(model.expert_size)}"
        )
    if ep > 1 and parallel.moe_token_dispatcher_type == "alltoall" and model.hidden_size % 2:
        raise ConfigError(
            f"model.hidden_size {model.hidden_size} is odd, but tokens are dispatched together "
            "with 4 bytes of metadata, which must be aligned to 4 bytes; choose an even size, or "
            "set parallel.moe_token_dispatcher_type to allgather"
        )
    shared, tp = model.moe_shared_expert_intermediate_size, parallel.tensor_model_parallel_size
    if shared and shared % tp:
        raise ConfigError(
            f"model.moe_shared_expert_intermediate_size {shared} is not divisible by "
            f"parallel.tensor_model_parallel_size {tp}; choose a tensor size among {divisors(shared)}"
        )


def ranks_of_a_token(model: ModelConfig, size: int) -> float:
    """Return the expected number of EP ranks that hold experts of a token, for random routing."""
    elsewhere = math.comb(model.num_experts - model.num_experts // size, model.moe_router_topk)
    return size * (1 - elsewhere / math.comb(model.num_experts, model.moe_router_topk))


def rows_of_a_token(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Return the number of expert rows that a rank allocates per local token.

    The number assumes balanced experts, except under static dispatch, which allocates for the worst case over all
    ranks.
    """
    size = parallel.expert_model_parallel_size
    if not is_static(model, parallel):
        return model.moe_router_topk
    return size * min(model.moe_router_topk, model.num_experts // size)


def is_static(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Return True if static dispatch is on."""
    spread = parallel.moe_static_dispatch is True and parallel.expert_model_parallel_size > 1
    return spread and not model.moe_pad_expert_input_to_capacity


def has_grouped_kernel(model: ModelConfig, parallel: ParallelConfig, precision: str) -> bool:
    """Return True if the experts use the grouped GEMM kernel, which reads row counts on the device."""
    width = model.expert_size // parallel.expert_tensor_parallel_size
    return precision == "bf16" and model.moe_grouped_gemm and model.hidden_size % 8 == width % 8 == 0


def expert_data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Return the replicas of the experts: ranks of a pipeline stage / (EP · ETP). Raises ConfigError if not whole."""
    ep, etp = parallel.expert_model_parallel_size, parallel.expert_tensor_parallel_size
    ranks = world_size // parallel.pipeline_model_parallel_size
    if ranks % (ep * etp):
        raise ConfigError(
            f"a pipeline stage has {counted(ranks, 'rank')} (data × context × tensor), which is not divisible by "
            f"expert ({ep}) × expert tensor ({etp}) = {ep * etp}; choose parallel.expert_model_parallel_size among "
            f"{divisors(ranks // math.gcd(ranks, etp))}, or another number of processes"
        )
    return ranks // (ep * etp)


def expert_shard_size(parallel: ParallelConfig, world_size: int) -> int:
    """Return the number of ranks over which an expert's optimizer state is sharded."""
    if parallel.data_parallel_sharding_strategy == "no_shard":
        return 1
    copies = expert_data_parallel_size(parallel, world_size)
    return copies // math.gcd(copies, parallel.num_distributed_optimizer_instances)


def divisors(value: int) -> str:
    """Return the divisors up to 64, for error messages."""
    return ", ".join(str(d) for d in range(1, min(value, 64) + 1) if value % d == 0)
