"""Checkpoints of a script's model and optimizer, inside the folders of Accelerate's save_state and load_state."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megalith.checkpoint import RunRecord, load_model, load_optimizer, open_checkpoint
from megalith.checkpoint.saver import Saver
from megalith.checkpoint.shard_files import open_shard_files, save_shard_files
from megalith.checkpoint.state import amax_shards, load_amaxes
from megalith.errors import CheckpointError
from megalith.parallel.data.data_parallel import reshard_parameters
from megalith.training.build import vocabulary_rows

if TYPE_CHECKING:
    from megalith.checkpoint.manifest import Manifest
    from megalith.dialects.accelerate.script_engine import MegatronEngine

STATE = "megalith"  # folder of Megalith's checkpoint inside save_state's folder
GROUPS = "optimizer_groups.json"


def save_engine(engine: MegatronEngine, output_dir: str | Path) -> None:
    """Save model and optimizer for any layout. Collective."""
    reshard_parameters(engine.model.chunks)
    folder, world, rows = Path(output_dir) / STATE, engine.mesh.world, vocabulary_rows(engine.run)
    saves_optimizer = engine.optimizer is not None and not engine.plugin.no_save_optim
    record = RunRecord(
        step=engine.iteration,
        consumed_samples=engine.consumed_samples,
        config=engine.run.to_tree(),
        loss_scale=engine.optimizer.loss_scale.state() if saves_optimizer else {},
    )
    saver = Saver(folder, world, unpadded_rows=rows, keep_last=1)
    inner = engine.optimizer.inner if saves_optimizer else None
    saver.save(record, engine.model.chunks, inner, amax_shards(engine.model.amaxes, world))
    if saver.last.error is not None:
        raise saver.last.error
    if world.rank == 0:
        engine.config.save_pretrained(output_dir)
        if saves_optimizer:
            engine.optimizer.save_groups(Path(output_dir) / GROUPS)
    if engine.plugin.legacy_bin:
        save_shard_files(Path(output_dir), record, engine.model, inner, rows)


def load_engine(engine: MegatronEngine, input_dir: str | Path) -> Manifest:
    """Load model and optimizer that `save_engine` saved in any layout, and return the manifest. Collective."""
    folder, world, rows = Path(input_dir) / STATE, engine.mesh.world, vocabulary_rows(engine.run)
    loads_optimizer = engine.optimizer is not None and not engine.plugin.no_load_optim
    parts = ("model", "optimizer") if loads_optimizer else ("model",)
    checkpoint = open_checkpoint(folder, parts, world=world) or open_shard_files(input_dir, parts, world)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {folder}; pass load_state a folder written by save_state"
        )
    reshard_parameters(engine.model.chunks)
    load_model(checkpoint, engine.model.chunks, rows, world)
    if loads_optimizer:
        load_optimizer(checkpoint, engine.optimizer.inner, rows, engine.model.chunks, world)
        load_amaxes(checkpoint, engine.model.amaxes, world)
        engine.optimizer.loss_scale.load_state(checkpoint.manifest.loss_scale)
        engine.optimizer.load_groups(Path(input_dir) / GROUPS)
        engine.optimizer.zero_grad()
    return checkpoint.manifest
