"""Replace Accelerate's classes with Megalith's, for scripts that run `from accelerate import Accelerator`."""

from __future__ import annotations

import importlib
import sys

import accelerate

from megalith.dialects.accelerate import (
    accelerator,
    dummies,
    plugin,
    process_state,
    replica_loader,
    script_engine,
    script_optimizer,
    train_steps,
)

OURS = {
    "Accelerator": accelerator.Accelerator,
    "MegatronLMPlugin": plugin.MegatronLMPlugin,
    "MegatronEngine": script_engine.MegatronEngine,
    "MegatronLMDummyDataLoader": dummies.MegatronLMDummyDataLoader,
    "MegatronLMDummyScheduler": dummies.MegatronLMDummyScheduler,
    "MegatronLMOptimizerWrapper": script_optimizer.MegatronLMOptimizerWrapper,
    "MegatronLMSchedulerWrapper": script_optimizer.MegatronLMSchedulerWrapper,
    "AbstractTrainStep": train_steps.AbstractTrainStep,
    "GPTTrainStep": train_steps.GPTTrainStep,
    "BertTrainStep": train_steps.BertTrainStep,
    "T5TrainStep": train_steps.T5TrainStep,
    "skip_first_batches": replica_loader.skip_first_batches,
    "avg_losses_across_data_parallel_group": process_state.avg_losses_across_data_parallel_group,
    "gather_across_data_parallel_groups": process_state.gather_across_data_parallel_groups,
}
HOMES = ("accelerate", "accelerate.accelerator", "accelerate.data_loader", "accelerate.utils",
         "accelerate.utils.dataclasses", "accelerate.utils.megatron_lm")  # fmt: skip
IMPORTERS = ("transformers.trainer",)  # modules that import these names themselves


def patch() -> None:
    """Replace Accelerate's classes in this process. Call it before other modules import them by name.

    A script without a MegatronLMPlugin runs as before. Idempotent.
    """
    for module in [importlib.import_module(home) for home in HOMES] + [
        sys.modules[name] for name in IMPORTERS if name in sys.modules
    ]:
        for name, ours in OURS.items():
            if hasattr(module, name):
                setattr(module, name, ours)
    assert accelerate.Accelerator is accelerator.Accelerator
