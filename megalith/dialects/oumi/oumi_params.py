"""Oumi's parameters as Python dataclasses: MegatronParams, GrpoParams, TrainingConfig.

A field at its default counts as a key that is not set, unless a YAML file sets it. Defaults of one section therefore
never contradict values of another. The defaults equal the defaults in the key table (tested).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from megalith.dialects.oumi.oumi_file import read_configuration
from megalith.dialects.oumi.oumi_layout import LAYOUT, indivisible_world_size
from megalith.errors import ConfigError


class OumiSection:
    """A section of a configuration."""

    written: frozenset[str] = frozenset()
    """Fields that a YAML file set."""


@dataclass
class MegatronDDPConfig(OumiSection):
    """Section megatron.ddp_config of Oumi's configuration."""

    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    average_in_collective: bool = True


@dataclass
class MegatronOptimizerConfig(OumiSection):
    """Section megatron.optimizer_config of Oumi's configuration."""

    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 0.0
    overlap_cpu_optimizer_d2h_h2d: bool = False
    use_precision_aware_optimizer: bool = False


@dataclass
class MegatronTransformerConfig(OumiSection):
    """Section megatron.transformer_config of Oumi's configuration: activation recomputation."""

    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    recompute_modules: list[str] | None = None


@dataclass
class MegatronCheckpointConfig(OumiSection):
    """Section megatron.checkpoint_config of Oumi's configuration."""

    use_async_checkpoint: bool = False
    use_fully_parallel_strategy: bool = True
    async_persistent: bool = True


@dataclass
class MegatronSamplingConfig(OumiSection):
    """Section megatron.sampling_config of Oumi's configuration, with the defaults of Oumi's branch."""

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = -1
    max_tokens: int = 512
    repetition_penalty: float = 1.0


@dataclass
class MegatronGRPOConfig(OumiSection):
    """Section megatron.grpo_config of Oumi's configuration: the objective."""

    kl_beta: float = 0.001
    entropy_weight: float = 0.0
    clamp_eps_lower: float = 0.2
    clamp_eps_upper: float = 0.2
    normalize_advantages: bool = True
    reference_update_interval: int | None = None


@dataclass
class MegatronParams(OumiSection):
    """Section megatron of Oumi's configuration: layout, training and sampling."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    micro_batch_size: int = 1
    global_batch_size: int | None = None
    enable_sequence_packing: bool = False
    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    optimizer_config: MegatronOptimizerConfig = field(default_factory=MegatronOptimizerConfig)
    transformer_config: MegatronTransformerConfig = field(default_factory=MegatronTransformerConfig)
    checkpoint_config: MegatronCheckpointConfig = field(default_factory=MegatronCheckpointConfig)
    sampling_config: MegatronSamplingConfig = field(default_factory=MegatronSamplingConfig)
    grpo_config: MegatronGRPOConfig = field(default_factory=MegatronGRPOConfig)
    enable_weight_sync: bool = True
    weight_sync_method: str = "nccl"
    weight_sync_timeout: float | None = None
    inference_backend: str = "vllm"
    vllm_weight_sync_interval: int | None = None
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def model_parallel_sizes(self) -> dict[str, int]:
        """TP, PP and CP sizes by axis name."""
        return {axis: getattr(self, key) for axis, key in LAYOUT.items()}

    def get_data_parallel_size(self, world_size: int) -> int:
        """Return the number of replicas of the dense layers: world_size / (TP × PP × CP).

        Expert parallelism uses the ranks of the other axes and does not divide it. Raises ConfigError if the sizes do
        not divide world_size.
        """
        product = self._model_parallel_size(world_size)
        if world_size % product:
            raise ConfigError(indivisible_world_size(world_size, self.model_parallel_sizes))
        return world_size // product

    def _model_parallel_size(self, world_size: int) -> int:
        sizes = self.model_parallel_sizes
        if not all(isinstance(size, int) and size > 0 for size in (world_size, *sizes.values())):
            values = ", ".join(f"{axis} {size!r}" for axis, size in sizes.items())
            raise ConfigError(
                f"world_size is {world_size!r} and model parallel sizes are {values}; each must be a whole number "
                "above 0"
            )
        return math.prod(sizes.values())

    def validate_distributed_config(
        self,
        world_size: int,
        num_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int | None = None,
    ) -> None:
        """Check that the layout divides the world size, the layers and the heads.

        Raises:
            ConfigError: lists every problem.
        """
        problems = []
        if world_size % self._model_parallel_size(world_size):
            problems.append(indivisible_world_size(world_size, self.model_parallel_sizes))
        tp, pp = self.tensor_model_parallel_size, self.pipeline_model_parallel_size
        for name, heads in (
            ("num_attention_heads", num_attention_heads),
            ("num_key_value_heads", num_key_value_heads or num_attention_heads),
        ):
            if heads % tp and not (name == "num_key_value_heads" and tp % heads == 0):
                problems.append(f"{name} ({heads}) must be divisible by tensor_model_parallel_size ({tp})")
        total = self.virtual_pipeline_model_parallel_size
        if total is not None and (pp == 1 or total % pp):
            problems.append(
                f"virtual_pipeline_model_parallel_size ({total}), the stages of all ranks, must be divisible by "
                f"pipeline_model_parallel_size ({pp}), and that must be above 1"
            )
        stages = total or pp
        if num_layers % stages and (num_layers + 1) % stages and (num_layers + 2) % stages:
            problems.append(
                f"num_layers ({num_layers}), or with embedding and head counted {num_layers + 1} or {num_layers + 2}, "
                f"must be divisible by the pipeline's stages ({stages})"
            )
        etp = self.expert_tensor_parallel_size or tp
        experts = self.expert_model_parallel_size * etp * pp
        if self.expert_model_parallel_size > 1 and world_size % experts:
            problems.append(
                f"world_size ({world_size}) must be divisible by expert ({self.expert_model_parallel_size}) × expert "
                f"tensor ({etp}) × pipeline ({pp}) = {experts}"
            )
        if problems:
            raise ConfigError(*problems)


@dataclass
class GrpoParams(OumiSection):
    """Section grpo, or training.grpo, of Oumi's configuration: groups, sampling and clipping."""

    model_init_kwargs: dict[str, Any] = field(default_factory=dict)
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    num_generations: int | None = None
    temperature: float = 0.9
    remove_unused_columns: bool = False
    repetition_penalty: float = 1.0
    use_vllm: bool = False
    vllm_mode: str | None = None
    vllm_gpu_memory_utilization: float = 0.9
    epsilon: float = 0.2
    log_completions: bool = False
    rollout_function: str | None = None


@dataclass
class TrainingConfig(OumiSection):
    """A training configuration. All sections except `megatron` and `grpo` are dicts of Oumi's keys."""

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    peft: dict[str, Any] = field(default_factory=dict)
    fsdp: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    megatron: MegatronParams = field(default_factory=MegatronParams)
    grpo: GrpoParams = field(default_factory=GrpoParams)

    @classmethod
    def from_yaml(cls, path: str | Path, arguments: Sequence[str] = ()) -> TrainingConfig:
        """Read a file, with overrides such as `--training.max_steps=2`. Raises ConfigError."""
        tree = read_configuration(path, arguments)
        names = {field.name for field in fields(cls)}
        if unknown := [name for name in tree if name not in names]:
            raise ConfigError(f"{path} has the section {unknown[0]!r}; sections: {', '.join(sorted(names))}")
        sections = {name: value or {} for name, value in tree.items()}
        for name, section_type in (("megatron", MegatronParams), ("grpo", GrpoParams)):
            if name in sections:
                sections[name] = _build_section(section_type, sections[name], name)
        config = cls(**sections)
        config.written = frozenset(sections)
        return config

    def to_tree(self) -> dict[str, Any]:
        """Return the sections, with the fields that differ from their defaults or were set in the file."""
        return tree_of(self)


MEGATRON_SECTIONS = {  # nested sections of MegatronParams
    "ddp_config": MegatronDDPConfig,
    "optimizer_config": MegatronOptimizerConfig,
    "transformer_config": MegatronTransformerConfig,
    "checkpoint_config": MegatronCheckpointConfig,
    "sampling_config": MegatronSamplingConfig,
    "grpo_config": MegatronGRPOConfig,
}


def _build_section(section_type: type, values: Any, path: str) -> Any:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path} is {values!r:.60}; it must be a mapping of keys to values")
    names = {field.name for field in fields(section_type)}
    if unknown := [name for name in values if name not in names]:
        raise ConfigError(f"there is no key {path}.{unknown[0]}; keys: {', '.join(sorted(names))}")
    arguments = {
        name: _build_section(MEGATRON_SECTIONS[name], value or {}, f"{path}.{name}")
        if name in MEGATRON_SECTIONS
        else value
        for name, value in values.items()
    }
    section = section_type(**arguments)
    section.written = frozenset(arguments)
    return section


def tree_of(config: Any) -> dict[str, Any]:
    """Return the sections of a configuration as dicts, without fields at their defaults.

    Args:
        config: a dict of sections, or Megalith's or Oumi's TrainingConfig.
    """
    if isinstance(config, Mapping):
        return {name: _plain(value) for name, value in config.items()}
    if not is_dataclass(config):
        raise ConfigError(
            f"config is a {type(config).__name__}; use a TrainingConfig, or a dict of its sections"
        )
    tree = {}
    for spec in fields(config):
        value = getattr(config, spec.name)
        default = spec.default_factory() if spec.default_factory is not MISSING else spec.default
        if value != default or spec.name in getattr(config, "written", ()):
            tree[spec.name] = _plain(value)
    return {name: value for name, value in tree.items() if value not in ({}, None)}


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tree_of(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, Path) else value
