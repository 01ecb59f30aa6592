"""Building blocks for custom training loops: the components of `megalith.train`, usable separately.

     mesh, device = init_mesh(config.parallel)                # under torchrun or `megalith.launch`
     model = parallelize(config, mesh, device)                # or a ModelSpec instead of config
     optimizer = Optimizer(model, config.optim)
     loss = model.backward(micro_batches)
     result = optimizer.step()

examples/train_loop.py is a complete loop.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.manifest import RunRecord
from megalith.checkpoint.open import open_checkpoint
from megalith.checkpoint.saver import save_checkpoint as save_step
from megalith.checkpoint.state import amax_shards, load_amaxes, load_model, load_optimizer
from megalith.comm.collectives import gather_json
from megalith.config import OptimConfig, ParallelConfig, RunConfig, require_run_config
from megalith.config.rules.optim_rules import check_qk_clip
from megalith.errors import CheckpointError
from megalith.hardware import pick_device
from megalith.launch.launcher import init_distributed, this_process
from megalith.optim.averages import averaged_weights, update_ema
from megalith.optim.loss_scale import build_loss_scale
from megalith.optim.optimizer import build_optimizer, set_learning_rate
from megalith.optim.step import StepResult, optimizer_step, sum_of_squares
from megalith.parallel.data.gradient_norm import GradientSquares, OrderFreeGradientSquares
from megalith.parallel.data.layer_norms import LayerNorms
from megalith.parallel.mesh import Mesh, build_mesh
from megalith.parallel.model_spec import ModelSpec
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.pipeline.tied_parameters import counted_elsewhere, shared_parameters
from megalith.remote import StorePath
from megalith.training.build import build_model, resolve_config, vocabulary_rows


def init_mesh(
    parallel: ParallelConfig | None = None, device: str = "auto", *, has_experts: bool = False
) -> tuple[Mesh, torch.device]:
    """Join the other processes of the job, if any, and build the device mesh. Collective over all processes, once.

    Only the first process keeps its standard output.

    Args:
        parallel: sizes of the parallel axes.
        device: device type or name; "auto" prefers a GPU.
        has_experts: the model to be parallelized has experts.

    Returns:
        The mesh and this process's device.

    Raises:
        ConfigError: the sizes do not divide the number of processes.
    """
    process = this_process()
    local_device = pick_device(device, process.local_rank)
    init_distributed(local_device)
    parallel = parallel or ParallelConfig()
    mesh = build_mesh(parallel, process.world_size, local_device.type, has_experts=has_experts)
    return mesh, local_device


def parallelize(
    spec: RunConfig | ModelSpec, mesh: Mesh, device: torch.device, parallel: ParallelConfig | None = None
) -> ParallelModel:
    """Build this rank's shard of a model with its initial weights. Collective over all ranks.

    Args:
        spec: a run's configuration, whose `model` section describes the model, or a custom ModelSpec.
        mesh: mesh from `init_mesh`.
        device: device from `init_mesh`.
        parallel: the settings that the mesh was built with. Default: the settings in the configuration, or none.

    Raises:
        ConfigError: the model does not support the layout.
    """
    if isinstance(spec, RunConfig):
        return build_model(resolve_config(spec, None), mesh, device)
    if not isinstance(spec, ModelSpec):
        require_run_config(spec, "megalith.parallelize (without a ModelSpec)")
    return ParallelModel(spec, parallel or ParallelConfig(), mesh, device)


class Optimizer:
    """The configured optimizer for this rank's shards. It clips gradients and skips steps with non-finite gradients."""

    def __init__(self, model: ParallelModel, config: OptimConfig, precision: str = "fp32"):
        """Build the optimizer. With `precision` fp16, the loss scale is dynamic."""
        mesh, chunks = model.mesh, model.chunks
        self.model, self.config = model, config
        check_qk_clip(config, model.attention_logits is not None)
        trained = [name for name, parameter in model.parameters.named if parameter.requires_grad]
        all_names = {name for names in gather_json(trained, mesh.world) for name in names}
        self.optimizer = build_optimizer(
            model.parameters.named,
            config,
            shared_parameters(chunks, mesh),
            model.placements(),
            precision,
            all_names,
            None if model.config is None else model.config.mup_ratios,
        )
        self.loss_scale = build_loss_scale(precision, config, model.device)
        squares = OrderFreeGradientSquares if model.spec.runs_row_by_row else GradientSquares
        self.gradient_squares = squares(
            model.parameters, mesh.world, sum_of_squares, counted_elsewhere(chunks, mesh), model.device
        )

    def step(
        self, lr: float | None = None, weight_decay: float | None = None, decoupled_lr: float | None = None
    ) -> StepResult:
        """Clip and apply the gradients left by `model.backward(…, loss_scale=self.loss_scale.scale)`, then clear them.

        A step with a non-finite gradient changes nothing.

        Args:
            lr: learning rate. Default, as for the other two arguments: the value in the configuration.
            weight_decay: weight decay of matrices.
            decoupled_lr: learning rate of the word embedding and the output layer.
        """
        config = self.config
        set_learning_rate(
            self.optimizer,
            config.lr if lr is None else lr,
            config.weight_decay if weight_decay is None else weight_decay,
            config.decoupled_lr if decoupled_lr is None else decoupled_lr,
        )
        result = optimizer_step(self.optimizer, self.loss_scale, config.clip_grad, self._total_squares)
        result = replace(result, max_attention_logit=self.model.clip_attention(config, result.skipped))
        if config.ema_decay is not None:
            update_ema(self.optimizer, config.ema_decay, result.skipped)
        self.model.end_step(result.skipped)
        self.model.parameters.clear_gradients()
        return result

    def layer_norms(self) -> LayerNorms:
        """Return the gradient and update norms per layer (`log.log_norms_interval`). Collective over all ranks."""
        model = self.model
        elsewhere = counted_elsewhere(model.chunks, model.mesh)
        return LayerNorms(model.parameters, model.mesh.world, sum_of_squares, elsewhere, model.device)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Return a context manager in which the model has the averaged weights of `optim.ema_decay` or of
        schedule-free AdamW.

        Without an average, or before the first step, the weights are unchanged.
        """
        return averaged_weights(self.optimizer, self.config)

    def _total_squares(self, parameters: list[Tensor]) -> Tensor:
        squares, amaxes = self.gradient_squares(parameters), self.model.amaxes
        return squares if amaxes is None else squares + amaxes.overflow()


def save_checkpoint(
    folder: str | Path, optimizer: Optimizer, step: int, consumed_samples: int = 0
) -> Path | StorePath:
    """Save model and optimizer in folder/step_NNNNNNNN. Collective over all ranks.

    Tensors are stored unsharded, so that any layout can load them.

    Args:
        folder: folder of the steps.
        optimizer: holds the model and its state.
        step: number of the step.
        consumed_samples: stored in the record.

    Returns:
        The step's folder, once it is complete.

    Raises:
        CheckpointError: the files cannot be written.
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
    """Load model and optimizer, bitwise. Collective over all ranks.

    Args:
        folder: a step folder, or a folder of steps; then the newest complete one is loaded.
        optimizer: its state and its model are filled.

    Returns:
        The record, with `step` and `consumed_samples`.

    Raises:
        CheckpointError: there is no checkpoint, or it belongs to another model or optimizer.
    """
    model = optimizer.model
    run, world = getattr(model.spec, "run", None), model.mesh.world
    rows = {} if run is None else vocabulary_rows(run)
    checkpoint = open_checkpoint(folder, world=world)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}; pass the folder that was passed to save_checkpoint"
        )
    load_model(checkpoint, model.chunks, rows, world)
    load_optimizer(checkpoint, optimizer.optimizer, rows, model.chunks, world)
    load_amaxes(checkpoint, model.amaxes, world)
    optimizer.loss_scale.load_state(checkpoint.manifest.loss_scale)
    return checkpoint.manifest
