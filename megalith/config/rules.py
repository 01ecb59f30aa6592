"""The rules that no single field can check. Every one stands here; whoever refuses a run, refuses it by these."""

from __future__ import annotations

from megalith.config.batch import BatchSizeSchedule
from megalith.config.model import ModelConfig
from megalith.config.presets import PRESETS
from megalith.config.run import RunConfig
from megalith.errors import ConfigError


def check_model(model: ModelConfig) -> None:
    """Raises ConfigError unless a model of this shape can be built."""
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(model, name) is None:
            raise ConfigError(
                f"model.{name} is not set; set it, or choose a model.preset: {', '.join(PRESETS)}"
            )
    if model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set and there is no tokenizer to take it from; set either")
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size {model.hidden_size} is not divisible by model.num_attention_heads "
            f"{model.num_attention_heads}; change one, or set model.kv_channels (the size of a head)"
        )
    if model.num_attention_heads % model.query_groups:
        raise ConfigError(
            f"model.num_attention_heads {model.num_attention_heads} is not divisible by model.num_query_groups "
            f"{model.query_groups}: each key and value head serves as many query heads; choose a divisor, or 0"
        )
    if model.position_embedding_type == "rope" and model.head_dim % 2:
        raise ConfigError(
            f"rotary positions turn pairs of dimensions, but a head has {model.head_dim}; choose an even "
            "model.kv_channels"
        )
    if model.rope_scaling is not None and model.position_embedding_type != "rope":
        raise ConfigError(
            "model.rope_scaling needs model.position_embedding_type rope, which is "
            f"{model.position_embedding_type}; set it, or remove the scaling"
        )


def check_training(config: RunConfig, world_size: int = 1) -> None:
    """Raises ConfigError unless this run can be trained on `world_size` processes."""
    check_model(config.model)
    _check_available(config)
    _check_lengths(config)
    _check_data(config)
    _check_duration(config)
    BatchSizeSchedule.from_config(config.train, data_parallel_size=world_size)


# What this version does not do yet: the field, the one value that it takes, and the field's meaning in words.
_ONLY = [
    ("parallel.tensor_model_parallel_size", 1, "tensor parallelism"),
    ("parallel.sequence_parallel", False, "sequence parallelism"),
    ("parallel.pipeline_model_parallel_size", 1, "pipeline parallelism"),
    ("parallel.virtual_pipeline_model_parallel_size", None, "an interleaved pipeline"),
    ("parallel.context_parallel_size", 1, "context parallelism"),
    ("parallel.expert_model_parallel_size", 1, "expert parallelism"),
    ("parallel.expert_tensor_parallel_size", 1, "tensor parallelism inside experts"),
    ("model.num_experts", None, "a mixture of experts"),
    ("train.fp8_format", None, "FP8 training"),
    ("optim.optimizer_cpu_offload", False, "optimizer state in host memory"),
    ("checkpoint.async_save", False, "asynchronous saving"),
    ("checkpoint.export_hf", False, "a Hugging Face folder at the end"),
]


def _check_available(config: RunConfig) -> None:
    for path, only, meaning in _ONLY:
        section, name = path.split(".")
        value = getattr(getattr(config, section), name)
        if value != only:
            raise ConfigError(
                f"{path} is {value}, but this version does not have {meaning}; leave it at {only} or remove it"
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
