"""Validation of the parallel layout: sizes that must divide, and settings that exclude each other."""

from __future__ import annotations

import math

from megalith.config.hybrid import DELTA_RULES
from megalith.config.model import ModelConfig
from megalith.config.output import RuntimeConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.rules.expert_rules import check_expert_parallel, divisors
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_parallel(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError unless the layout is valid for `world_size` processes.

    pipeline/pipeline_rules.py checks the assignment of layers to stages and the pipeline schedule.
    """
    model, parallel = config.model, config.parallel
    parallel.check_requirements("parallel", config)
    data_parallel_size(parallel, world_size)
    shard_size(parallel, world_size)
    check_tensor(model, parallel, config.data.seq_length)
    if model.encoder_layers:
        _check_decoder_tokens(config)
    check_context(model, parallel, config.data.seq_length)
    check_expert_parallel(model, parallel, world_size)
    _check_distributed_inputs(model, parallel)
    _check_offload(model, parallel)
    _check_saved_attention(model, parallel)
    _check_zero_bubble(parallel, config.runtime)
    check_overlap(config)


def _check_decoder_tokens(config: RunConfig) -> None:
    parallel, length = config.parallel, config.data.decoder_length
    size, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    _check_chunks("decoder_seq_length", length, context)
    if parallel.sequence_parallel and length // context % size:
        raise ConfigError(
            f"parallel.sequence_parallel shards the {length // context} tokens of the decoder's sequence "
            f"(data.decoder_seq_length {length} / context_parallel_size {context}) over tensor_model_parallel_size "
            f"{size} ranks, but {size} does not divide the tokens; set data.decoder_seq_length to a multiple"
        )


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """Return world / (tensor · pipeline · context). Raises ConfigError if that is not a whole number."""
    pipeline, context = parallel.pipeline_model_parallel_size, parallel.context_parallel_size
    sizes = {"pipeline": pipeline, "context": context, "tensor": parallel.tensor_model_parallel_size}
    product = pipeline * context * sizes["tensor"]
    if world_size % product == 0:
        return world_size // product
    ways_out = [
        f"lower {name}{'_model' if name != 'context' else ''}_parallel_size to {lower}, or "
        for name, size in sizes.items()
        for lower in range(size - 1, 0, -1)
        if world_size % (product // size * lower) == 0
    ]
    raise ConfigError(
        f"world size {world_size} is not divisible by tensor ({sizes['tensor']}) × pipeline ({sizes['pipeline']}) × "
        f"context ({sizes['context']}) = {product}; {ways_out[0] if ways_out else ''}start "
        f"{-(-world_size // product) * product} processes"
    )


def shard_size(parallel: ParallelConfig, world_size: int) -> int:
    """Return the number of data × context ranks that optimizer state is sharded over; 1 with no_shard.

    Raises ConfigError if num_distributed_optimizer_instances does not divide them.
    """
    ranks = data_parallel_size(parallel, world_size) * parallel.context_parallel_size
    copies, strategy = parallel.num_distributed_optimizer_instances, parallel.data_parallel_sharding_strategy
    if strategy == "no_shard":
        return 1
    if parallel.pipeline_schedule == "zero_bubble" and strategy != "optim":
        raise ConfigError(
            f"parallel.data_parallel_sharding_strategy {strategy} reduces gradients after each micro-batch, but "
            "pipeline_schedule zero_bubble defers wgrads; choose optim or no_shard, or another schedule"
        )
    if ranks % copies:
        raise ConfigError(
            f"parallel.num_distributed_optimizer_instances {copies} does not divide the {ranks} ranks over which the "
            f"optimizer state is sharded, data ({ranks // parallel.context_parallel_size}) × context "
            f"({parallel.context_parallel_size}); choose among {divisors(ranks)}"
        )
    return ranks // copies


def check_tensor(model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> None:
    """Raise ConfigError unless TP can shard the model's matrices, and with sequence_parallel its tokens."""
    size = parallel.tensor_model_parallel_size
    attends = bool(model.attention_layers)
    sizes = {"num_attention_heads": model.num_attention_heads} if attends else {}
    if any(map(model.has_mlp, range(model.num_layers))):
        sizes["ffn_hidden_size"] = model.ffn_size
    if "short_conv" in model.recurrent_mixers:
        sizes["hidden_size"] = model.hidden_size
    if "mamba2" in model.recurrent_mixers:
        sizes["mamba_num_heads"] = model.mamba_heads
    if set(DELTA_RULES) & set(model.recurrent_mixers):
        sizes["linear_num_key_heads"] = model.linear_num_key_heads
    for name, value in sizes.items():
        if value % size:
            raise ConfigError(
                f"model.{name} {value} is not divisible by parallel.tensor_model_parallel_size "
                f"{size}, but every rank must have the same number; choose a tensor size among "
                f"{divisors(value)}"
            )
    groups = model.mamba_num_groups
    if "mamba2" in model.recurrent_mixers and groups % size and size % groups:
        raise ConfigError(
            f"model.mamba_num_groups {groups} and parallel.tensor_model_parallel_size {size}: one must divide the "
            "other, so that each rank has whole groups or a part of one; change one of the two"
        )
    if attends and model.query_groups % size and size % model.query_groups:
        raise ConfigError(
            f"model.num_query_groups {model.query_groups} and parallel.tensor_model_parallel_size {size}: one must "
            "divide the other, so that each rank has whole key and value heads or shares one; change one of the two"
        )
    if model.attention_output_gate and model.query_groups % size:
        raise ConfigError(
            f"model.attention_output_gate requires complete groups of query heads on each rank, but "
            f"parallel.tensor_model_parallel_size {size} does not divide the {model.query_groups} groups; choose a "
            f"tensor size among {divisors(model.query_groups)}"
        )
    for name, does in (("full_width", "goes over"), ("per_head", "has weights for")):
        if getattr(model, f"qk_layernorm_{name}") and model.query_groups % size:
            raise ConfigError(
                f"model.qk_layernorm_{name} {does} all {model.query_groups} key heads, which "
                f"parallel.tensor_model_parallel_size {size} does not divide; choose a tensor size among "
                f"{divisors(model.query_groups)}"
            )
    rows = -(-model.padded_vocab_size // size)
    if rows * (size - 1) >= model.padded_vocab_size:
        raise ConfigError(
            f"the padded vocabulary has {model.padded_vocab_size} rows, so at {rows} rows per rank none are left for "
            f"the last of {size} tensor-parallel ranks; raise model.make_vocab_size_divisible_by"
        )
    tokens = seq_length // parallel.context_parallel_size
    if parallel.sequence_parallel and tokens % size:
        raise ConfigError(
            f"parallel.sequence_parallel shards the {tokens} tokens of a sequence (data.seq_length {seq_length} / "
            f"context_parallel_size {parallel.context_parallel_size}) over tensor_model_parallel_size {size} ranks, "
            f"but {size} does not divide the tokens; change one of these sizes, or leave parallel.sequence_parallel "
            "out"
        )


def check_context(model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> None:
    """Raise ConfigError unless CP can shard the sequences, and with all-to-all the heads."""
    size, kind = parallel.context_parallel_size, parallel.resolved_cp_comm_type
    sizes = parallel.hierarchical_context_parallel_sizes
    if size == 1:
        return
    if model.encoder_layers and parallel.cp_comm_type == "auto":
        kind = "a2a"
    if model.encoder_layers and kind != "a2a":
        raise ConfigError(
            f"parallel.cp_comm_type {kind} supports only sequences that attend to themselves, but with "
            f"model.model_type {model.model_type} the decoder also attends to the encoder; set parallel.cp_comm_type "
            "to a2a, or leave it out"
        )
    if model.model_type == "bert" and model.window_size is not None and kind != "a2a":
        raise ConfigError(
            f"parallel.cp_comm_type is {kind}, but windows on both sides of a token (model.window_size "
            f"{model.window_size}) are supported only with a2a; set it to a2a"
        )
    _check_chunks("seq_length", seq_length, size)
    chunk, taps = seq_length // (2 * size), model.linear_conv_kernel_dim
    if model.linear_attention_layers and chunk < taps - 1:
        raise ConfigError(
            f"parallel.context_parallel_size {size} gives each rank chunks of {chunk} tokens, but a convolution "
            f"reads {taps - 1} earlier tokens (model.linear_conv_kernel_dim {taps}); lower "
            f"parallel.context_parallel_size, or raise data.seq_length {seq_length}"
        )
    if kind == "a2a+p2p" and (sizes is None or math.prod(sizes) != size):
        inner = max(s for s in range(1, size + 1) if size % s == 0 and (s == 1 or s * s <= size))
        raise ConfigError(
            "parallel.cp_comm_type a2a+p2p needs parallel.hierarchical_context_parallel_sizes, the sizes of its a2a "
            f"and p2p groups, with the product context_parallel_size {size}, but the setting is {sizes}; set it, for "
            f"example to [{inner}, {size // inner}]"
        )
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    exchange = {"a2a": size, "a2a+p2p": sizes[0] if sizes else 1}.get(kind, 1)
    if heads % exchange and model.attention_layers:
        raise ConfigError(
            f"parallel.cp_comm_type {kind} exchanges heads among {exchange} ranks, but {exchange} does not divide "
            f"the {heads} heads of a tensor-parallel rank (model.num_attention_heads {model.num_attention_heads} / "
            f"tensor_model_parallel_size {parallel.tensor_model_parallel_size}); choose among "
            f"{divisors(heads)}{'' if model.encoder_layers else ', or cp_comm_type p2p, which shards no heads'}"
        )


def _check_chunks(name: str, length: int, size: int) -> None:
    if length % (2 * size) and size > 1:
        lower = max(s for s in range(1, size) if s == 1 or length % (2 * s) == 0)
        shorter, longer = length // (2 * size) * 2 * size, -(-length // (2 * size)) * 2 * size
        lengths = f"{shorter} or {longer}" if shorter else str(longer)
        raise ConfigError(
            f"data.{name} {length} cannot be split into 2 · parallel.context_parallel_size = {2 * size} equal "
            f"chunks, an early and a late one for each rank; choose a length of {lengths}, or a context size of "
            f"{lower}"
        )


def _check_distributed_inputs(model: ModelConfig, parallel: ParallelConfig) -> None:
    size, name = parallel.tensor_model_parallel_size, "parallel.distribute_saved_activations"
    if not parallel.distribute_saved_activations:
        return
    if size == 1 or parallel.sequence_parallel:
        raise ConfigError(
            f"{name} shards activations that tensor-parallel ranks replicate, but with "
            f"parallel.tensor_model_parallel_size {size} and parallel.sequence_parallel {parallel.sequence_parallel} "
            f"none are replicated; leave {name} out"
        )
    if parallel.cpu_offloading_num_layers:
        raise ConfigError(
            f"{name} and parallel.cpu_offloading_num_layers {parallel.cpu_offloading_num_layers} both apply to the "
            "inputs that recomputation saves; leave one of the two settings out"
        )
    if model.hidden_size % size:
        raise ConfigError(
            f"{name} shards hidden states over parallel.tensor_model_parallel_size {size} ranks, but {size} does not "
            f"divide model.hidden_size {model.hidden_size}; leave {name} out"
        )


def _check_offload(model: ModelConfig, parallel: ParallelConfig) -> None:
    layers, of = parallel.cpu_offloading_num_layers, model.num_layers
    if layers > of:
        raise ConfigError(
            f"parallel.cpu_offloading_num_layers {layers} is more than model.num_layers {of}; lower "
            "parallel.cpu_offloading_num_layers"
        )
    if layers and parallel.pipeline_schedule == "zero_bubble":
        raise ConfigError(
            f"parallel.cpu_offloading_num_layers is {layers}, but pipeline_schedule zero_bubble keeps the inputs of "
            "all matrices on the device for wgrad; set cpu_offloading_num_layers to 0, or choose another schedule"
        )


def _check_saved_attention(model: ModelConfig, parallel: ParallelConfig) -> None:
    if parallel.shards_sequences and parallel.cp_comm_type == "auto":
        # Checked again when `auto` has been resolved.
        parallel = parallel.model_copy(update={"cp_comm_type": "a2a"})
    check_saved_attention(model, parallel)


def check_saved_attention(model: ModelConfig, parallel: ParallelConfig) -> None:
    """Raise ConfigError if full recomputation cannot save attention's output as configured."""
    saves = parallel.recompute_granularity == "full" and parallel.saves_attention
    if saves and (obstacle := saved_attention_obstacle(model, parallel)):
        raise ConfigError(
            "parallel.recompute_saves_attention saves a fused kernel's output, but no such kernel is used with "
            f"{obstacle}; leave parallel.recompute_saves_attention out"
        )


def saved_attention_obstacle(model: ModelConfig, parallel: ParallelConfig) -> str:
    """Return the setting that prevents full recomputation from saving attention's output; empty if there is none."""
    if model.attention_dropout:
        return f"model.attention_dropout {model.attention_dropout}"
    if model.attn_logit_softcapping is not None:
        return f"model.attn_logit_softcapping {model.attn_logit_softcapping}"
    if model.position_embedding_type in ("alibi", "relative"):
        return f"model.position_embedding_type {model.position_embedding_type}"
    if parallel.shards_sequences and parallel.resolved_cp_comm_type != "a2a":
        return f"parallel.cp_comm_type {parallel.resolved_cp_comm_type}"
    if parallel.cpu_offloading_num_layers:
        return f"parallel.cpu_offloading_num_layers {parallel.cpu_offloading_num_layers}"
    return ""


def _check_zero_bubble(parallel: ParallelConfig, runtime: RuntimeConfig) -> None:
    if parallel.pipeline_schedule != "zero_bubble" or parallel.pipeline_model_parallel_size == 1:
        return
    recomputed = parallel.recompute_granularity == "full" or (
        parallel.recompute_granularity == "selective" and "mlp" in parallel.recompute_modules
    )
    if recomputed:
        raise ConfigError(
            f"recompute_granularity {parallel.recompute_granularity} drops the inputs of linear layers, which "
            "pipeline_schedule zero_bubble keeps for wgrad; recompute core_attn or layernorm only, "
            "or use pipeline_schedule 1f1b"
        )
    if runtime.compile is True:
        raise ConfigError(
            "runtime.compile is true, but compiled layers compute dgrad and wgrad together, which pipeline_schedule "
            "zero_bubble runs separately; set runtime.compile to false, or pipeline_schedule to 1f1b"
        )


def check_overlap(config: RunConfig) -> None:
    """Raise ConfigError if micro-batches cannot be halved for tp_comm_overlap, or there is no communication to hide."""
    parallel, size = config.parallel, config.train.micro_batch_size
    if not parallel.overlaps:
        return
    chosen_later = parallel.cp_comm_type == "auto"  # and then judged again
    exchanges = parallel.context_parallel_size > 1 and (
        "a2a" in parallel.resolved_cp_comm_type or chosen_later
    )
    if parallel.tensor_model_parallel_size == 1 and not exchanges:
        raise ConfigError(
            "parallel.tp_comm_overlap hides the collectives of tensor parallelism and of cp_comm_type a2a, but "
            f"tensor_model_parallel_size 1 and context_parallel_size {parallel.context_parallel_size} with "
            f"cp_comm_type {parallel.resolved_cp_comm_type} have none of these; leave parallel.tp_comm_overlap out, "
            "or set parallel.cp_comm_type to a2a"
        )
    if size % 2:
        raise ConfigError(
            f"parallel.tp_comm_overlap runs a micro-batch as two halves, but train.micro_batch_size is {size}; make "
            "train.micro_batch_size even, or leave parallel.tp_comm_overlap out"
        )
    if config.model.num_experts is not None:
        raise ConfigError(
            "parallel.tp_comm_overlap does not support models with experts, but model.num_experts is "
            f"{config.model.num_experts}; leave parallel.tp_comm_overlap out"
        )
    if parallel.pipeline_schedule == "zero_bubble":
        raise ConfigError(
            "parallel.tp_comm_overlap orders the work inside compiled layers, but pipeline_schedule zero_bubble splits "
            "backward passes and compiles no layers; choose another schedule, or leave tp_comm_overlap out"
        )
