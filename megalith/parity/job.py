"""The job of a parity run: a training run that records gradients, metrics and the final state.

Each rank builds the Run of its configuration and drives its steps. The gradients of the first step are recorded before
the optimizer consumes them. In the middle of the run the model is evaluated and generates, which must not disturb the
following steps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from megalith.checkpoint.files import byte_view
from megalith.checkpoint.state import STATE_WITH_ROWS, model_shards, optimizer_shards
from megalith.comm.collectives import gather_json
from megalith.config import RunConfig
from megalith.data.batch import Batch
from megalith.generation.sampling import generate
from megalith.launch.launcher import this_process
from megalith.optim.moments import Moment
from megalith.parallel.gather import global_tensors
from megalith.parallel.shards import LocalShard
from megalith.planner.memory_choices import with_auto
from megalith.report.report import PendingStep
from megalith.training.build import build_run_mesh, prepare, vocabulary_rows
from megalith.training.process import detect_machine, prepare_process
from megalith.training.resume import load_run
from megalith.training.run_state import Run, Task

PROMPTS = [[5, 9, 2], [7, 1, 4, 4, 11]]
NEW_TOKENS = 3


@dataclass
class Outcome:
    """Result of the job. Tensors are global, by name, without vocabulary padding; only rank 0 has them."""

    gradients: dict[str, Tensor]  # first step, fp32, unscaled
    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    loss_scales: list[float]
    evaluation: float  # mean loss over the validation samples, after half of the steps
    generated: list[list[int]]
    """Tokens generated greedily after half of the steps; for an encoder, the most likely token at each position."""
    state: dict[str, Tensor]  # parameters and optimizer state at the end
    unequal_copies: list[str]  # replicated tensors that are not bitwise equal at the end


def start(config: RunConfig, task: Task | None = None) -> Run:
    """Return this rank's run, with initial weights or the weights in `checkpoint.load`."""
    process = this_process()
    config, tokenizer, _ = prepare(config, process.world_size)
    device = prepare_process(config, process.local_rank)
    # `auto` settings as for a full-size model.
    machine = replace(detect_machine(config, device), least_work=0.0)
    config, _ = with_auto(config, process.world_size, machine)
    mesh = build_run_mesh(config, process.world_size, device.type)
    run = Run(config, tokenizer, mesh, device, task)
    load_run(run)
    return run


def run_job(config: RunConfig, step_count: int | None = None, task: Task | None = None) -> Outcome:
    """Train to `train_iters`, or for `step_count` steps. Collective over all ranks of the process group."""
    run = start(config, task)
    steps: list[PendingStep] = []
    gradients: dict[str, Tensor] = {}

    def record_gradients(loss: Tensor, micro_batches: Sequence[Batch]) -> Tensor:
        if not steps:
            gradients.update(gradients_by_name(run))
        return loss

    end = run.total_steps if step_count is None else min(run.step + step_count, run.total_steps)
    middle = (run.step + end) // 2
    with run.data.train_loader(run.step, run.consumed_samples, run.device) as batches:
        while run.step < end:
            steps.append(run.train_step(batches, record_gradients))
            if run.step == middle:
                evaluation = run.mean_loss(run.data.valid)
                generated = _generate(run)
    return Outcome(
        gradients=gradients,
        losses=[step.loss.item() for step in steps],
        norms=[step.grad_norm.item() for step in steps],
        skipped=[bool(step.skipped) for step in steps],
        loss_scales=[step.loss_scale.item() for step in steps],
        evaluation=evaluation,
        generated=generated,
        state=state_by_name(run),
        unequal_copies=unequal_copies(run),
    )


def _generate(run: Run) -> list[list[int]]:
    """Return the model's greedy predictions.

    A decoder generates tokens. An encoder predicts the most likely token at each position. A reward model selects the
    position with the highest score.
    """
    if run.config.model.score_head:
        return [run.model(torch.tensor([prompt]))[0].argmax(0).tolist() for prompt in PROMPTS]
    if run.config.model.causal:
        return generate(run.model, PROMPTS, max_new_tokens=NEW_TOKENS, temperature=0)
    run.model.eval()
    return [run.model(torch.tensor([prompt])).argmax(-1)[0].tolist() for prompt in PROMPTS]


def gradients_by_name(run: Run) -> dict[str, Tensor]:
    """Return the attached gradients, unscaled, as global tensors on rank 0."""
    parameters = run.model.parameters
    shards = {
        name: replace(parameters.shards[name], values=plain.grad)
        for name, plain in parameters.named
        if plain.requires_grad
    }
    scale = run.loss_scale.scale.cpu()
    return {name: gradient / scale for name, gradient in _gather(run, shards).items()}


def state_by_name(run: Run) -> dict[str, Tensor]:
    """Return parameters and optimizer state as in a checkpoint, on rank 0."""
    return _gather(run, _state(run))


def unequal_copies(run: Run) -> list[str]:
    """Return the tensors of the state with replicated shards that differ bitwise. Every rank gets the same result."""
    world = run.mesh.world
    local = [
        [name, shard.offset, tuple(shard.values.shape), _digest(shard.values)]
        for name, shard in _state(run).items()
    ]
    digests: dict[tuple, set[str]] = {}
    for name, offset, shape, digest in chain.from_iterable(gather_json(local, world)):
        digests.setdefault((name, tuple(offset), tuple(shape)), set()).add(digest)
    return sorted({name for (name, _, _), values in digests.items() if len(values) > 1})


def _digest(values: Tensor) -> str:
    return hashlib.blake2b(byte_view(values.cpu()).numpy(), digest_size=8).hexdigest()


def _state(run: Run) -> dict[str, LocalShard]:
    state = optimizer_shards(run.optimizer, run.model.chunks)
    wide = {
        name: replace(b, values=b.values.float()) for name, b in state.items() if isinstance(b.values, Moment)
    }
    return model_shards(run.model.chunks) | state | wide


def _gather(run: Run, shards: Mapping[str, LocalShard]) -> dict[str, Tensor]:
    rows = vocabulary_rows(run.config)
    for name, count in list(rows.items()):
        rows |= {f"optim.{name}.{key}": count for key in STATE_WITH_ROWS}
    shards = {name: shard.first_rows(rows[name]) if name in rows else shard for name, shard in shards.items()}
    tensors = {}
    for name, tensor in global_tensors(shards, run.mesh.world).items():
        owned = sum(math.prod(part.shape) for part in tensor.parts)
        assert owned == math.prod(tensor.shape), f"{name}: ranks own {owned} elements of {tensor.shape}"
        tensors[name] = tensor.gather()
    return {} if run.mesh.world.rank else tensors
