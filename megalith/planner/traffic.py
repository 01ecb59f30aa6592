"""Bytes that a device sends per step over each axis of the mesh, by the formulas of docs/parallelism.

All numbers are for the device that sends the most. A ring all-gather or reduce-scatter over n ranks sends (n − 1)/n of
the full tensor, an all-reduce twice that. Small transfers are not counted: the loss, and gradients summed over tensor-
parallel ranks and tied embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megalith.config import ParallelConfig, RunConfig
from megalith.config.hybrid import DELTA_RULES
from megalith.config.rules.expert_rules import is_static
from megalith.config.rules.parallel_rules import data_parallel_size, shard_size
from megalith.parallel.pipeline.stages import Stage
from megalith.planner.counts import MetaModel, layers_of
from megalith.planner.flops import token_fraction
from megalith.planner.memory import COMPUTE_BYTES, GRADIENT_BYTES

FP32 = 4


@dataclass(frozen=True)
class Transfer:
    """Communication over one axis."""

    axis: str
    size: int
    bytes: int
    """Maximum bytes sent per device and step."""
    what: str
    """Description of the communication."""


def transfers(
    config: RunConfig,
    meta: MetaModel,
    world_size: int,
    stages: Sequence[Sequence[Stage]],
    micro_batches: int,
) -> list[Transfer]:
    """Return the communication of the axes with more than one rank.

    Args:
        config: the run.
        meta: the model, counted on a rank.
        world_size: number of processes.
        stages: the chunks of each pipeline rank.
        micro_batches: number of micro-batches per step.
    """
    parallel = config.parallel
    data_context = data_parallel_size(parallel, world_size) * parallel.context_parallel_size
    result = []
    if (size := parallel.tensor_model_parallel_size) > 1:
        sent = max(tensor_bytes(config, chunks) for chunks in stages) * micro_batches
        result.append(Transfer("tensor", size, sent, _tensor_parallel_text(parallel)))
    if (size := parallel.context_parallel_size) > 1:
        stage_layers = [[number for chunk in chunks for number in chunk.layers] for chunks in stages]
        sent = micro_batches * max(
            sum(context_bytes(config, number) for number in layers) for layers in stage_layers
        )
        result.append(Transfer("context", size, sent, CONTEXT_WORDS[parallel.resolved_cp_comm_type]))
    if (size := parallel.pipeline_model_parallel_size) > 1:
        most = max(_neighbours(chunks, last=size * len(chunks) - 1, ranks=size) for chunks in stages)
        sent = most * micro_batches * hidden_bytes(config)
        result.append(
            Transfer("pipeline", size, sent, "hidden states to the next stage, their gradients back")
        )
    if data_context > 1:
        sent = max(data_bytes(config, meta, world_size, chunks, micro_batches) for chunks in stages)
        words = DATA_WORDS[parallel.data_parallel_sharding_strategy]
        result.append(Transfer("data × context", data_context, sent, words))
    if (size := parallel.expert_model_parallel_size) > 1:
        layers = max(_layers_with_experts(config, chunks) for chunks in stages)
        sent = layers * micro_batches * expert_bytes(config)
        result.append(Transfer("expert", size, sent, EXPERT_WORDS[parallel.moe_token_dispatcher_type]))
    return result


def expert_bytes(config: RunConfig) -> int:
    """Return the bytes that a rank sends per MoE layer and micro-batch, forward and backward, if experts are balanced.

    With alltoall this is an upper bound: it counts a row for each expert of a token, but experts of a token on one rank
    share a row.
    """
    model, parallel = config.model, config.parallel
    size = parallel.expert_model_parallel_size
    # A tensor-parallel rank has its share of the tokens. Expert tensor parallelism gathers those of its ranks.
    tokens = _tokens(config) * parallel.expert_tensor_parallel_size // parallel.tensor_model_parallel_size
    by_all_to_all = parallel.moe_token_dispatcher_type == "alltoall" and not is_static(model, parallel)
    rows = tokens * (model.moe_router_topk if by_all_to_all else size)
    row = model.hidden_size * COMPUTE_BYTES[config.train.precision] + FP32  # and its routing weight
    return 4 * rows * row * (size - 1) // size


def _layers_with_experts(config: RunConfig, chunks: Sequence[Stage]) -> int:
    return sum(layer in config.model.expert_layers for chunk in chunks for layer in chunk.layers)


def tensor_bytes(config: RunConfig, chunks: Sequence[Stage]) -> int:
    """Return the bytes that a rank sends per micro-batch for tensor parallelism."""
    size = config.parallel.tensor_model_parallel_size
    hidden = _tokens(config) * config.model.hidden_size * COMPUTE_BYTES[config.train.precision]
    part = hidden * (size - 1) / size
    cut = config.parallel.sequence_parallel
    layers = sum(_exchanges(config, number) for chunk in chunks for number in chunk.layers)
    ends = sum(chunk.embedding + chunk.head for chunk in chunks)
    return int(part * (layers * (10 if cut else 8) + ends * 2))


def _exchanges(config: RunConfig, number: int) -> float:
    """Return the communication of a layer, relative to a layer with self-attention and an MLP over all tokens.

    A T5 decoder layer adds cross-attention. Half of the communication of cross-attention gathers the encoder's tokens.
    """
    share = token_fraction(config, number)
    return 1.25 * share + 0.25 if 0 < config.model.encoder_layers <= number else share


def context_bytes(config: RunConfig, number: int) -> int:
    """Return the bytes that a rank sends per micro-batch for context parallelism in layer `number`, forward and
    backward.

    In cross-attention, queries come from the decoder's tokens, and keys and values from the encoder's tokens.
    """
    states = _state_bytes(config, number)
    return states + (_attention_bytes(config, number) if config.model.has_attention(number) else 0)


def _state_bytes(config: RunConfig, number: int) -> int:
    """Return the bytes of state that a recurrent mixer exchanges: two chunks per rank, in fp32."""
    model, parallel = config.model, config.parallel
    mixer, size = model.recurrent_mixer(number), parallel.context_parallel_size
    each = 0
    if mixer in DELTA_RULES:
        key = model.linear_key_head_dim
        each = model.linear_num_value_heads * key * (model.linear_value_head_dim + key)
    elif mixer == "mamba2":
        each = model.mamba_heads * model.mamba_state_dim * model.mamba_head_dim
    rows = config.rows_per_micro_batch
    return 2 * (size - 1) * 2 * rows * each * FP32 // parallel.tensor_model_parallel_size


def _attention_bytes(config: RunConfig, number: int) -> int:
    model, parallel = config.model, config.parallel
    size, kind = parallel.context_parallel_size, parallel.resolved_cp_comm_type
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    groups = max(model.query_groups // parallel.tensor_model_parallel_size, 1)
    width = COMPUTE_BYTES[config.train.precision]
    head = _tokens(config) * model.head_dim
    exchange, ring = {"a2a": (size, 1), "a2a+p2p": parallel.hierarchical_context_parallel_sizes}.get(
        kind, (1, size)
    )
    groups = math.lcm(groups, exchange) if exchange > 1 else groups
    share, crosses = token_fraction(config, number), 0 < model.encoder_layers <= number
    queries, keys = share * (1 + crosses), share + crosses  # queries with outputs, keys with values
    sent = 2 * head * (heads * queries + groups * keys)
    exchanged = int(2 * (exchange - 1) * sent * width) // exchange  # forward and backward
    return exchanged + (ring - 1) * 2 * head * groups * (2 * width + FP32)


def hidden_bytes(config: RunConfig) -> int:
    """Return the bytes of hidden states that a rank sends to the next stage per micro-batch."""
    cut = config.parallel.tensor_model_parallel_size if config.parallel.sequence_parallel else 1
    hidden = _tokens(config) * config.model.hidden_size * COMPUTE_BYTES[config.train.precision] // cut
    if config.model.encoder_layers:  # both streams
        hidden += int(hidden * token_fraction(config, config.model.num_layers - 1))
    return hidden


def data_bytes(
    config: RunConfig, meta: MetaModel, world_size: int, chunks: Sequence[Stage], micro_batches: int
) -> int:
    """Return the bytes that a rank sends per step for data parallelism: gradients, and parameters if sharded."""
    parallel = config.parallel
    ranks = data_parallel_size(parallel, world_size) * parallel.context_parallel_size
    shards = shard_size(parallel, world_size)
    copies = ranks // shards
    parts = meta.in_layers(layers_of(config.model, chunks))
    adapters = parts["adapters"]
    layers = parts.total() - adapters - parts["experts"]
    ends = meta.outside(chunks).total()
    strategy, width = parallel.data_parallel_sharding_strategy, COMPUTE_BYTES[config.train.precision]
    each = strategy in ("optim_grads", "optim_grads_params")
    of_layers = width if each and parallel.uses_fp32_reduce_scatter else GRADIENT_BYTES
    reduced = of_layers * (adapters or layers) + GRADIENT_BYTES * (meta.saved(chunks) if adapters else ends)
    gathers, passes = micro_batches if strategy == "optim_grads_params" else 1, 1.0
    if strategy == "optim_grads_params":
        kept = sum(min(parallel.unsharded_layers, len(chunk.layers)) for chunk in chunks)
        freed = 1 - kept / max(sum(len(chunk.layers) for chunk in chunks), 1)
        passes = 2 * freed + (1 - freed) / micro_batches
    gathered = passes * width * (layers + adapters) + FP32 * ends
    reductions = micro_batches if each else 1
    within = (shards - 1) / shards * (gathers * gathered + reductions * reduced)
    over_copies = 2 * (copies - 1) / copies * reduced / shards
    return int(within + over_copies)


def _neighbours(chunks: Sequence[Stage], last: int, ranks: int) -> int:
    """Return the number of stages to which a rank's chunks send per micro-batch, forward and backward.

    `last` is the index of the last stage.
    """
    positions = [chunk.chunk * ranks + chunk.rank for chunk in chunks]
    return sum((number < last) + (number > 0) for number in positions)


def _tokens(config: RunConfig) -> int:
    return config.tokens_per_pass


def _tensor_parallel_text(parallel: ParallelConfig) -> str:
    if parallel.overlaps:
        return "each layer's collectives, overlapped by ping-pong micro-batches"
    if parallel.sequence_parallel:
        return "a layer: 4 all-gathers and reduce-scatters forward, 6 backward, 4 of them overlapped"
    return "a layer: 2 all-reduces forward, 2 backward, the latter overlapped with matmuls"


CONTEXT_WORDS = {
    "p2p": "keys and values around a ring, their gradients back, overlapped",
    "all_gather": "keys and values gathered, their gradients reduced",
    "a2a": "all-to-alls of heads for tokens, before and after attention",
    "a2a+p2p": "all-to-alls among adjacent ranks, keys and values around a ring of groups",
}
EXPERT_WORDS = {
    "alltoall": "each token's rows to its experts and back, their gradients the other way",
    "allgather": "tokens all-gathered, outputs reduce-scattered, and gradients",
}
DATA_WORDS = {
    "no_shard": "gradients all-reduced once per step, after the last backward pass",
    "optim": "parameters gathered and gradients reduced, once per step",
    "optim_grads": "parameters gathered once per step, gradients reduced for each micro-batch",
    "optim_grads_params": "parameters gathered twice, gradients reduced, for each micro-batch",
}
