"""Megalith trains large transformers on any number of devices.

config = megalith.RunConfig.load("run.yaml", ["--train.train_iters", "100"])
result = megalith.train(config)
model = megalith.load(result.checkpoint)
logits = model(input_ids)  # int64 [batch, seq] -> [batch, seq, vocab]

docs/own_model.md describes the parts for custom training loops, losses, models and optimizers.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
_MODULES = {
    "RunConfig": "megalith.config",
    "train": "megalith.training.training_job",
    "grpo": "megalith.rl.grpo:train_grpo",
    "load": "megalith.training.loading",
    "plan": "megalith.planner.search",
    # custom training loops
    "init_mesh": "megalith.training.custom_loop",
    "parallelize": "megalith.training.custom_loop",
    "Optimizer": "megalith.training.custom_loop",
    "save_checkpoint": "megalith.training.custom_loop",
    "load_checkpoint": "megalith.training.custom_loop",
    "ParallelModel": "megalith.parallel.parallel_model",
    "Mesh": "megalith.parallel.mesh",
    "Loader": "megalith.data.loader",
    "MockDataset": "megalith.data.mock_datasets",
    "Batch": "megalith.data.batch",
    "ModelConfig": "megalith.config",
    "OptimConfig": "megalith.config",
    "ParallelConfig": "megalith.config",
    # custom losses, models and optimizers
    "Loss": "megalith.models.loss",
    "CrossEntropy": "megalith.models.loss",
    "Model": "megalith.models.own_model",
    "ModelSpec": "megalith.parallel.model_spec",
    "Head": "megalith.parallel.model_spec",
    "ColumnParallelLinear": "megalith.parallel.tensor.building_blocks",
    "RowParallelLinear": "megalith.parallel.tensor.building_blocks",
    "VocabParallelEmbedding": "megalith.parallel.tensor.building_blocks",
    "register_optimizer": "megalith.optim.optimizer",
    "register_dataset": "megalith.data.own_dataset",
    "DatasetRequest": "megalith.data.own_dataset",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import an exported name on first use, so that the command line and the configuration start without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'megalith' has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _MODULES[name].partition(":")
    value = getattr(import_module(module), attribute or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the exported names as well, for tab completion."""
    return sorted({*globals(), *_MODULES})
