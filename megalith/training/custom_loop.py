"""What a training loop of one's own is made of: the same pieces as `megalith.train`, without its run.

    mesh, device = init_mesh(config.parallel)                # under torchrun, or `megalith.launch`
    model = parallelize(config, mesh, device)                # or a ModelSpec in the place of config
    optimizer = Optimizer(model, config.optim)
    loss = model.backward(micro_batches)
    result = optimizer.step()

examples/train_loop.py is such a loop.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.manifest import RunRecord
from megalith.checkpoint.open import open_checkpoint
from megalith.checkpoint.saver import save_checkpoint as save_step
from megalith.checkpoint.state import amax_shards, load_amaxes, load_model, load_optimizer
from megalith.config import OptimConfig, ParallelConfig, RunConfig, require_run_config
from megalith.errors import CheckpointError
from megalith.hardware import pick_device
from megalith.launch.launcher import init_distributed, this_process
from megalith.optim.loss_scale import build_loss_scale
from megalith.optim.optimizer import build_optimizer, set_learning_rate
from megalith.optim.step import StepResult, optimizer_step, sum_of_squares
from megalith.parallel.data.gradient_norm import GradientSquares
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.model_spec import ModelSpec
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.pipeline.tied_parameters import copies, shared_parameters
from megalith.remote import StorePath
from megalith.training.build import build_model, resolve_config, vocabulary_rows


def init_mesh(
    parallel: ParallelConfig | None = None, device: str = "auto", *, has_experts: bool = False
) -> tuple[Mesh, torch.device]:
    """Joins the job's other processes, if it has any; this process's axes and device.

    Every process calls it once. Of many processes only the first keeps its standard output. `has_experts`: of the model
    that is to be parallelized. Raises ConfigError where the sizes do not divide the number of processes.
    """
    process = this_process()
    own = pick_device(device, process.local_rank)
    init_distributed(own)
    parallel = parallel or ParallelConfig()
    return build_mesh(parallel, process.world_size, own.type, has_experts=has_experts), own


def parallelize(
    spec: RunConfig | ModelSpec, mesh: Mesh, device: torch.device, parallel: ParallelConfig | None = None
) -> ParallelModel:
    """This rank's part of the model that a configuration's `model` describes, or a spec of one's own, with its initial
    weights. Every rank calls it.

    `parallel` is what the mesh was made with; None: the configuration's, or no setting. Raises ConfigError for a layout
    that the model cannot be in.
    """
    if isinstance(spec, RunConfig):
        return build_model(resolve_config(spec, None), mesh, device)
    if not isinstance(spec, ModelSpec):
        require_run_config(spec, "megalith.parallelize (without a ModelSpec)")
    return ParallelModel(spec, parallel or ParallelConfig(), mesh, device)


class Optimizer:
    """The optimizer that `config` names, over this rank's shards, with the clipped, checked step of a run."""

    def __init__(self, model: ParallelModel, config: OptimConfig, precision: str = "fp32"):
        """`precision` is the compute type's: fp16 has a dynamic loss scale."""
        mesh, chunks = model.mesh, model.chunks
        self.model, self.config = model, config
        self.optimizer = build_optimizer(
            model.parameters.named, config, shared_parameters(chunks, mesh), model.placements(), precision
        )
        self.loss_scale = build_loss_scale(precision, config, model.device)
        self.gradient_squares = GradientSquares(
            model.parameters, mesh.world, sum_of_squares, copies(chunks, mesh), model.device
        )

    def step(
        self, lr: float | None = None, weight_decay: float | None = None, decoupled_lr: float | None = None
    ) -> StepResult:
        """Clips and applies the gradients that `model.backward(…, loss_scale=self.loss_scale.scale)` has left, and
        clears them; a step whose gradient is not finite changes nothing. None: what the configuration says."""
        asked, config = (lr, weight_decay, decoupled_lr), self.config
        given = (config.lr, config.weight_decay, config.decoupled_lr)
        set_learning_rate(self.optimizer, *(b if a is None else a for a, b in zip(asked, given)))
        result = optimizer_step(self.optimizer, self.loss_scale, config.clip_grad, self._total_squares)
        self.model.end_step(result.skipped)
        self.model.parameters.clear_gradients()
        return result

    def _total_squares(self, parameters: list[Tensor]) -> Tensor:
        squares, amaxes = self.gradient_squares(parameters), self.model.amaxes
        return squares if amaxes is None else squares + amaxes.overflow()


def save_checkpoint(
    folder: str | Path, optimizer: Optimizer, step: int, consumed_samples: int = 0
) -> Path | StorePath:
    """Saves model and optimizer into folder/step_NNNNNNNN, which it returns when it is whole. Every rank calls it.

    Tensors are global, so that any layout loads them. Raises CheckpointError where they cannot be written.
    """
    model = optimizer.model
    run = getattr(model.spec, "run", None)
    record = RunRecord(
        step=step,
        consumed_samples=consumed_samples,
        config={} if run is None else run.to_tree(),
        loss_scale=optimizer.loss_scale.state(),
    )
    rows = {} if run is None else vocabulary_rows(run)
    return save_step(
        folder,
        record,
        model.chunks,
        optimizer.optimizer,
        amax_shards(model.amaxes, model.mesh.world),
        world=model.mesh.world,
        unpadded_rows=rows,
    )


def load_checkpoint(folder: str | Path, optimizer: Optimizer) -> RunRecord:
    """Fills model and optimizer, bitwise, from the newest whole step in `folder`, or from the step that it is; its
    record has `step` and `consumed_samples`. Every rank calls it.

    Raises CheckpointError where there is none, or one of another model or optimizer.
    """
    model = optimizer.model
    run, world = getattr(model.spec, "run", None), model.mesh.world
    rows = {} if run is None else vocabulary_rows(run)
    checkpoint = open_checkpoint(folder, world=world)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}; give the folder that save_checkpoint was given"
        )
    load_model(checkpoint, model.chunks, rows, world)
    load_optimizer(checkpoint, optimizer.optimizer, rows, model.chunks, world)
    load_amaxes(checkpoint, model.amaxes, world)
    optimizer.loss_scale.load_state(checkpoint.manifest.loss_scale)
    return checkpoint.manifest
