"""The configuration of a run: one tree of sections, free of torch. See `RunConfig`."""

from megalith.config.data import DataConfig
from megalith.config.fine_tuning import ChatConfig, SftConfig
from megalith.config.lora import LoraConfig
from megalith.config.model import ModelConfig
from megalith.config.optim import OptimConfig
from megalith.config.output import CheckpointConfig, LogConfig, RuntimeConfig
from megalith.config.parallel import ParallelConfig
from megalith.config.preferences import DpoConfig
from megalith.config.rl import RlConfig
from megalith.config.rope_scaling import RopeScaling
from megalith.config.run import RunConfig, require_run_config
from megalith.config.train import TrainConfig

__all__ = [
    "ChatConfig",
    "CheckpointConfig",
    "DataConfig",
    "DpoConfig",
    "LogConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RlConfig",
    "RopeScaling",
    "RunConfig",
    "RuntimeConfig",
    "SftConfig",
    "TrainConfig",
    "require_run_config",
]
