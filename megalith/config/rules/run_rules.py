"""The rules that no single field can check. Whoever refuses a run, refuses it by these.

Those of the model alone stand in model_rules.py.
"""

from __future__ import annotations

import math

from megalith.config.batch_size import BatchSizeSchedule
from megalith.config.lora import WHOLE
from megalith.config.model import ModelConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.rules.expert_rules import check_expert_parallel
from megalith.config.rules.fp8_rules import check_fp8
from megalith.config.rules.model_rules import check_model
from megalith.config.rules.overlap_notes import check_overlap
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def _check_recompute(model: ModelConfig, parallel: ParallelConfig) -> None:
    if parallel.recompute_method is not None and parallel.recompute_granularity != "full":
        raise ConfigError(
            f"parallel.recompute_method {parallel.recompute_method} chooses among whole layers, but "
            f"parallel.recompute_granularity is {parallel.recompute_granularity}; set it to full, or remove the method"
        )
    if parallel.distribute_saved_activations:
        _check_distributed_inputs(model, parallel)


def _check_distributed_inputs(model: ModelConfig, parallel: ParallelConfig) -> None:
    size, name = parallel.tensor_model_parallel_size, "parallel.distribute_saved_activations"
    if parallel.recompute_granularity != "full":
        raise ConfigError(
            f"{name} divides the inputs that full recomputation keeps, but parallel.recompute_granularity is "
            f"{parallel.recompute_granularity}; set it to full, or leave {name} out"
        )
    if size == 1 or parallel.sequence_parallel:
        raise ConfigError(
            f"{name} divides what tensor-parallel ranks hold alike, but parallel.tensor_model_parallel_size is {size} "
            f"and parallel.sequence_parallel {parallel.sequence_parallel}, under which they hold nothing alike; leave "
            "it out"
        )
    if parallel.cpu_offloading_num_layers:
        raise ConfigError(
            f"{name} and parallel.cpu_offloading_num_layers {parallel.cpu_offloading_num_layers} both take away the "
            "inputs that recomputation keeps; leave one out"
        )
    if model.hidden_size % size:
        raise ConfigError(
            f"{name} divides hidden states over parallel.tensor_model_parallel_size {size}, which does not divide "
            f"model.hidden_size {model.hidden_size}; leave it out"
        )


def _check_offload(config: RunConfig) -> None:
    layers, of = config.parallel.cpu_offloading_num_layers, config.model.num_layers
    if layers > of:
        raise ConfigError(
            f"parallel.cpu_offloading_num_layers {layers} is more than model.num_layers {of}; lower it: "
            "the last layers of a stage gain least, as their backward passes come first"
        )
    if layers and config.parallel.pipeline_schedule == "zero_bubble":
        raise ConfigError(
            f"parallel.cpu_offloading_num_layers is {layers}, but pipeline_schedule zero_bubble keeps the inputs of "
            "all matrices on the device for the weights' gradients; set it to 0, or choose another schedule"
        )


def offload_notes(config: RunConfig, device_type: str) -> list[str]:
    """What to tell of offloading where the device's memory is the host's."""
    if device_type != "cpu":
        return []
    notes = []
    if config.optim.optimizer_cpu_offload:
        notes.append(
            "optim.optimizer_cpu_offload changes nothing on a CPU: the state is in host memory anyway"
        )
    if config.parallel.cpu_offloading_num_layers:
        notes.append(
            "parallel.cpu_offloading_num_layers saves nothing on a CPU: activations are copied in its memory"
        )
    return notes


def data_parallel_size(parallel: ParallelConfig, world_size: int) -> int:
    """What tensor, pipeline and context parallelism leave of the world: world / (tensor · pipeline · context).

    Raises ConfigError where that is not a whole number.
    """
    sizes = {
        "pipeline": parallel.pipeline_model_parallel_size,
        "context": parallel.context_parallel_size,
        "tensor": parallel.tensor_model_parallel_size,
    }
    product = math.prod(sizes.values())
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
    """Over how many ranks of data × context a parameter's optimizer state is sharded; 1 with no_shard.

    Raises ConfigError where num_distributed_optimizer_instances does not divide them.
    """
    ranks = data_parallel_size(parallel, world_size) * parallel.context_parallel_size
    copies, strategy = parallel.num_distributed_optimizer_instances, parallel.data_parallel_sharding_strategy
    if strategy == "no_shard":
        if copies > 1:
            raise ConfigError(
                f"parallel.num_distributed_optimizer_instances is {copies}, but data_parallel_sharding_strategy "
                "no_shard keeps a whole copy on every rank; leave it at 1, or choose optim, optim_grads or "
                "optim_grads_params"
            )
        return 1
    if parallel.pipeline_schedule == "zero_bubble" and strategy != "optim":
        raise ConfigError(
            f"parallel.data_parallel_sharding_strategy {strategy} reduces gradients after each micro-batch, but "
            "pipeline_schedule zero_bubble puts those of weights off; choose optim or no_shard, or another schedule"
        )
    if ranks % copies:
        raise ConfigError(
            f"parallel.num_distributed_optimizer_instances {copies} does not divide the {ranks} ranks of data "
            f"({ranks // parallel.context_parallel_size}) × context ({parallel.context_parallel_size}), over which "
            f"the state is sharded; choose among {_divisors(ranks)}"
        )
    return ranks // copies


def check_tensor(model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> None:
    """Raises ConfigError unless the model's matrices, and with sequence_parallel its tokens, can be cut by TP."""
    size = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and size == 1:
        raise ConfigError(
            "parallel.sequence_parallel splits the tokens over the tensor-parallel ranks, but "
            "parallel.tensor_model_parallel_size is 1; raise it, or leave sequence_parallel out"
        )
    for name, value in (
        ("num_attention_heads", model.num_attention_heads),
        ("ffn_hidden_size", model.ffn_size),
    ):
        if value % size:
            raise ConfigError(
                f"model.{name} {value} is not divisible by parallel.tensor_model_parallel_size {size}; each rank "
                f"takes as many; choose a tensor size among {_divisors(value)}"
            )
    if model.query_groups % size and size % model.query_groups:
        raise ConfigError(
            f"model.num_query_groups {model.query_groups} and parallel.tensor_model_parallel_size {size}: one has to "
            "divide the other, so that a rank has whole key and value heads or shares one; change either"
        )
    if model.qk_layernorm_full_width and model.query_groups % size:
        raise ConfigError(
            f"model.qk_layernorm_full_width goes over all {model.query_groups} key heads, which "
            f"parallel.tensor_model_parallel_size {size} does not divide; choose a tensor size among "
            f"{_divisors(model.query_groups)}"
        )
    rows = -(-model.padded_vocab_size // size)
    if rows * (size - 1) >= model.padded_vocab_size:
        raise ConfigError(
            f"a padded vocabulary of {model.padded_vocab_size} rows leaves nothing to the last of "
            f"{size} tensor-parallel ranks at {rows} rows each; raise model.make_vocab_size_divisible_by"
        )
    tokens = seq_length // parallel.context_parallel_size
    if parallel.sequence_parallel and tokens % size:
        raise ConfigError(
            f"parallel.sequence_parallel cuts the {tokens} tokens of a sequence (data.seq_length {seq_length} / "
            f"context_parallel_size {parallel.context_parallel_size}) over tensor_model_parallel_size {size} ranks, "
            "which does not divide them; change one, or leave sequence_parallel out"
        )


def check_context(model: ModelConfig, parallel: ParallelConfig, seq_length: int) -> None:
    """Raises ConfigError unless sequences, and where heads are exchanged the heads, can be cut over CP."""
    size, kind = parallel.context_parallel_size, parallel.cp_comm_type
    sizes = parallel.hierarchical_context_parallel_sizes
    if sizes is not None and kind != "a2a+p2p":
        raise ConfigError(
            f"parallel.hierarchical_context_parallel_sizes is {sizes}, but parallel.cp_comm_type {kind} has one level; "
            "set it to a2a+p2p, or leave the sizes out"
        )
    if size == 1:
        return
    if seq_length % (2 * size):
        lower = max(s for s in range(1, size) if s == 1 or seq_length % (2 * s) == 0)
        shorter, longer = seq_length // (2 * size) * 2 * size, -(-seq_length // (2 * size)) * 2 * size
        lengths = f"{shorter} or {longer}" if shorter else str(longer)
        raise ConfigError(
            f"data.seq_length {seq_length} cannot be cut into 2 · parallel.context_parallel_size = {2 * size} equal "
            "chunks, an early and a late one for each rank; choose a length of "
            f"{lengths}, or a context size of {lower}"
        )
    if kind == "a2a+p2p" and (sizes is None or math.prod(sizes) != size):
        inner = max(s for s in range(1, size + 1) if size % s == 0 and (s == 1 or s * s <= size))
        raise ConfigError(
            f"parallel.cp_comm_type a2a+p2p needs parallel.hierarchical_context_parallel_sizes, the sizes of its a2a "
            f"and p2p, whose product is context_parallel_size {size}, but they are {sizes}; for example "
            f"[{inner}, {size // inner}]"
        )
    heads = model.num_attention_heads // parallel.tensor_model_parallel_size
    exchange = {"a2a": size, "a2a+p2p": sizes[0] if sizes else 1}.get(kind, 1)
    if heads % exchange:
        raise ConfigError(
            f"parallel.cp_comm_type {kind} exchanges heads among {exchange} ranks, which do not divide the {heads} of "
            f"a tensor-parallel rank (model.num_attention_heads {model.num_attention_heads} / "
            f"tensor_model_parallel_size {parallel.tensor_model_parallel_size}); choose among {_divisors(heads)}, or "
            "cp_comm_type p2p, which cuts no heads"
        )


def _divisors(value: int) -> str:
    return ", ".join(str(d) for d in range(1, min(value, 64) + 1) if value % d == 0)


def check_training(config: RunConfig, world_size: int = 1) -> None:
    """Raises ConfigError unless this run can be trained on `world_size` processes."""
    check_model(config.model)
    check_fp8(config)
    data_parallel = data_parallel_size(config.parallel, world_size)
    shard_size(config.parallel, world_size)
    check_tensor(config.model, config.parallel, config.data.seq_length)
    check_context(config.model, config.parallel, config.data.seq_length)
    check_expert_parallel(config.model, config.parallel, world_size)
    _check_adapters(config)
    _check_recompute(config.model, config.parallel)
    _check_offload(config)
    check_overlap(config)
    _check_saving(config)
    _check_lengths(config)
    _check_data(config)
    _check_duration(config)
    BatchSizeSchedule.from_config(config.train, data_parallel_size=data_parallel)


def check_base(config: RunConfig) -> None:
    """Raises ConfigError for adapters that would be trained on frozen random weights."""
    lora = config.lora
    if config.model.init_from is None and (lora.rank is not None or lora.load is not None):
        given = f"lora.rank is {lora.rank}" if lora.load is None else f"lora.load is {lora.load}"
        raise ConfigError(
            f"{given}, but model.init_from is not set: adapters would be trained on random weights, which stay as they "
            "are; set it to the weights that they are for, a Hugging Face folder or name, or a run folder"
        )


def _check_adapters(config: RunConfig) -> None:
    lora, model = config.lora, config.model
    if lora.rank is None:
        for name, field in type(lora).model_fields.items():
            if getattr(lora, name) != field.default:
                raise ConfigError(
                    f"lora.{name} is {getattr(lora, name)}, but lora.rank is not set, so there are no adapters; set "
                    f"the rank, or remove {name}"
                )
        return
    parts = lora.parts(model)
    if model.num_experts is not None and parts.keys() & {"linear_fc1", "linear_fc2"}:
        raise ConfigError(
            f"lora.targets {', '.join(lora.targets)} names the MLP, but model.num_experts is {model.num_experts} and "
            "experts have no adapters; name linear_qkv and linear_proj alone"
        )
    if model.multi_latent_attention and "linear_qkv" in parts:
        raise ConfigError(
            f"lora.targets {', '.join(lora.targets)} names linear_qkv, but model.multi_latent_attention has other "
            "matrices in its place, which have no adapters; name linear_proj, linear_fc1 and linear_fc2 alone"
        )
    if model.moe_router_enable_expert_bias:
        raise ConfigError(
            f"lora.rank {lora.rank} freezes the model, but model.moe_router_enable_expert_bias moves the experts' "
            "biases; turn it off"
        )
    if config.checkpoint.export_hf:
        raise ConfigError(
            f"checkpoint.export_hf writes a whole model, but with lora.rank {lora.rank} a run holds adapters alone; "
            "turn it off, and merge or export them afterwards: megalith lora"
        )
    size = config.parallel.tensor_model_parallel_size
    if parts.get("linear_qkv") == (WHOLE,) and model.query_groups % size:
        raise ConfigError(
            f"lora.targets {', '.join(lora.targets)} has one adapter for all rows of linear_qkv, but "
            f"parallel.tensor_model_parallel_size {size} does not divide model.num_query_groups {model.query_groups}; "
            "name linear_qkv, which has one each for queries, keys and values, or choose a tensor size among "
            f"{_divisors(model.query_groups)}"
        )


def _check_saving(config: RunConfig) -> None:
    checkpoint = config.checkpoint
    if checkpoint.export_hf and not checkpoint.save_at_end:
        raise ConfigError(
            "checkpoint.export_hf exports the checkpoint of the run's end, but checkpoint.save_at_end is false; "
            "set it to true, or turn export_hf off"
        )


def _check_lengths(config: RunConfig) -> None:
    seq_length, longest = config.data.seq_length, config.model.max_position_embeddings
    if longest is not None and seq_length > longest:
        raise ConfigError(
            f"data.seq_length {seq_length} is longer than model.max_position_embeddings {longest}; shorten the "
            "sequences, or raise the model's limit"
        )


def _check_data(config: RunConfig) -> None:
    data = config.data
    parts = {name: getattr(data, name) for name in ("train_data_path", "valid_data_path", "test_data_path")}
    given = [name for name, path in parts.items() if path is not None]
    sources = [bool(data.mock), data.data_path is not None, bool(given)]
    if sum(sources) > 1:
        raise ConfigError(
            f"data.mock is {data.mock}, data.data_path is {data.data_path!r} and {', '.join(given) or 'no part'} "
            "has a path of its own; give exactly one of mock, data_path, or paths for each part"
        )
    if not any(sources):
        raise ConfigError(
            "there is nothing to train on; set data.data_path to the prefix that `megalith preprocess` wrote, or "
            "data.mock to true"
        )
    if given and data.train_data_path is None:
        raise ConfigError(f"{', '.join(given)} is set but data.train_data_path is not; set it too")


def _check_duration(config: RunConfig) -> None:
    train = config.train
    if (train.train_iters is None) == (train.train_samples is None):
        raise ConfigError(
            f"train.train_iters is {train.train_iters} and train.train_samples is {train.train_samples}; set "
            "exactly one: the run's length in steps or in sequences"
        )
    if config.optim.lr is None:
        raise ConfigError("optim.lr is not set; training needs the highest learning rate, for example 3e-4")
    if config.log.profile and config.log.profile_step_end <= config.log.profile_step_start:
        raise ConfigError(
            f"log.profile_step_end {config.log.profile_step_end} must come after log.profile_step_start "
            f"{config.log.profile_step_start}"
        )
