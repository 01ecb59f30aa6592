"""Runs of live GRPO that the tests do on one process and on the ranks of the pool."""

import torch
import torch.distributed as dist

from megalith.config import RunConfig
from megalith.parallel.mesh import build_mesh
from megalith.rl.grpo import PolicyTask
from megalith.training.build import prepare
from megalith.training.resume import load_run
from megalith.training.run_state import Run


def agent_outcomes(configs: list[RunConfig]) -> list[dict]:
    """Losses and gradient norms of each run."""
    return [_outcome(config) for config in configs]


def _outcome(config: RunConfig) -> dict:
    size = dist.get_world_size() if dist.is_initialized() else 1
    config, tokenizer, _ = prepare(config, size)
    mesh = build_mesh(config.parallel, size, "cpu")
    task = PolicyTask()
    run = Run(config, tokenizer, mesh, torch.device("cpu"), task)
    load_run(run)
    outcome: dict = {"losses": [], "norms": []}
    try:
        with run.data.train_loader(0, 0, run.device) as batches:
            for _ in range(run.total_steps):
                step = run.train_step(batches)
                outcome["losses"].append(step.loss.item())
                outcome["norms"].append(step.grad_norm.item())
    finally:
        task.close()
    return outcome
