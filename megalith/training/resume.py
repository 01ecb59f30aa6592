"""Resume a run: find its checkpoint, check that it fits, and restore the state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalith.bridge.adapters.adapter_folder import initialize_from_base, load_peft_adapters
from megalith.bridge.load import check_base, config_of, load_initial_weights
from megalith.bridge.model_differences import changed_settings
from megalith.bridge.quantize_base import load_coded_base
from megalith.checkpoint import (
    Checkpoint,
    DataRecord,
    list_steps,
    load_model,
    load_optimizer,
    open_checkpoint,
    state_shards,
)
from megalith.checkpoint.agree import collectively
from megalith.checkpoint.manifest import MANIFEST
from megalith.checkpoint.state import base_fingerprint, load_amaxes
from megalith.checkpoint.steps import next_save_number, save_order
from megalith.config import LoraConfig, ModelConfig, RunConfig
from megalith.config.base import Decides
from megalith.config.train import BatchSizeSchedule
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.optim.schedule import build_schedule
from megalith.remote import StorePath, is_inside, open_location
from megalith.training.build import vocabulary_rows
from megalith.training.run_snapshots import RunSnapshots
from megalith.training.run_state import Run


def load_run(run: Run, memory: RunSnapshots | None = None) -> Path | StorePath | None:
    """Fill a new run from the newest snapshot in `memory`, or from the checkpoint that `checkpoint.load` names.

    Without either, load `model.init_from` if set, otherwise keep the initial weights, and load adapters from
    `lora.load`.

    Returns:
        The folder of the loaded checkpoint. None if none was loaded, for example because a snapshot was restored.

    Raises:
        CheckpointError: on all ranks, if the checkpoint is damaged or does not fit.
    """
    config, world = run.config, run.mesh.world
    snapshot = memory and memory.newest()
    checkpoint = None if snapshot else _first_checkpoint(run)
    identities = collectively(world, lambda: {} if world.rank else run.data.files())[0]
    run.data_files = {prefix: DataRecord(**files) for prefix, files in identities.items()}
    frozen = config.lora.rank is not None  # checkpoints then contain only the adapters
    if config.model.init_from is not None and (frozen or (checkpoint is None and snapshot is None)):
        chunks, rows = run.model.chunks, vocabulary_rows(config)
        load_initial_weights(
            config.model.init_from,
            chunks,
            rows,
            config.train.seed,
            world,
            config.checkpoint.trust,
            without_linears=config.lora.has_quantized_base,
        )
        if frozen and not config.lora.begins_with_loftq:
            _finish_base(run, checkpoint)
    folder = _load_trained(run, memory, snapshot, checkpoint)
    if config.model.init_from is not None and config.lora.begins_with_loftq:
        _finish_base(run, checkpoint)
    return folder


def _finish_base(run: Run, checkpoint: Checkpoint | None) -> None:
    """Quantize the frozen weights if configured, record their fingerprint, and cast them to the compute dtype.

    With LoftQ, the quantized weights depend on the values of the adapters, which must be loaded or initialized before.
    """
    config, world = run.config, run.mesh.world
    if config.lora.has_quantized_base:
        load_coded_base(config, run.model.chunks, run.device, world, world.rank == 0)
    _remember_base(run, checkpoint)
    run.model.parameters.store_frozen(run.model.chunks[0].compute_dtype, world)


def _load_trained(
    run: Run, memory: RunSnapshots | None, snapshot: Any, checkpoint: Checkpoint | None
) -> Path | StorePath | None:
    """Restore the snapshot or the checkpoint, or initialize new adapters. Returns the checkpoint's folder."""
    config, world, frozen = run.config, run.mesh.world, run.config.lora.rank is not None
    if snapshot:
        memory.restore(snapshot)
        return None
    if checkpoint is None:
        if frozen and (config.lora.load is None or config.lora.decomposes_base):
            initialize_from_base(config, run.model.chunks, world, run.device)
        if config.lora.load is not None:
            load_peft_adapters(config.lora.load, config.model, run.model.chunks)
        return None
    restore(run, checkpoint, config.checkpoint.load_optim)
    run.notes += _notes_on_change(run, checkpoint)
    return checkpoint.folder


def _notes_on_change(run: Run, checkpoint: Checkpoint) -> list[str]:
    """Return notes on how the run differs from a continuation of the checkpoint's run."""
    if not run.consumed_samples:
        return []
    before = config_of(checkpoint)
    try:
        samples = [*_notes_on_samples(run, before, checkpoint)] or [
            *_notes_on_length(run, before, checkpoint)
        ]
        return [*samples, *_notes_on_updates(run, before, checkpoint)]
    except ConfigError as error:  # an impossible configuration: the manifest is damaged
        raise CheckpointError(str(error.within(checkpoint.folder / MANIFEST))) from None


def _changed(before: RunConfig, config: RunConfig, what: Decides) -> list[str]:
    """Return the changed settings of category `what`, with the values before and now.

    Settings without effect in the run are omitted.
    """
    changes = []
    for section in RunConfig.model_fields:
        was, now = getattr(before, section), getattr(config, section)
        unread = was.unread(before).keys() & now.unread(config).keys()
        for name in was.fields_deciding(what):
            values = getattr(was, name), getattr(now, name)
            if values[0] != values[1] and name not in unread:
                changes.append(_was_and_is(f"{section}.{name}", *values))
    return changes


def _was_and_is(name: str, was: Any, now: Any) -> str:
    return f"{name} was {was!r} and is {now!r}"


def _notes_on_samples(run: Run, before: RunConfig, checkpoint: Checkpoint) -> Iterator[str]:
    """Warn if the next samples differ from those that the checkpoint's run would have used."""
    others = _changed(before, run.config, Decides.SAMPLES)
    for prefix, was in checkpoint.manifest.data.items():
        now = run.data_files.get(prefix, was)
        recorded = [(name, a, b) for (name, a), (_, b) in zip(was, now) if a != ""]
        others += [_was_and_is(f"{name} of {prefix}", a, b) for name, a, b in recorded if a != b]
    if others:
        yield (
            f"samples may differ from those that the run of {checkpoint.folder} would have read: {'; '.join(others)}; "
            f"training continues after the first {run.consumed_samples:,} samples of the current settings. To restart "
            f"the data, start a new run with model.init_from={checkpoint.folder}"
        )


def _notes_on_updates(run: Run, before: RunConfig, checkpoint: Checkpoint) -> Iterator[str]:
    """Warn if the same samples update the weights differently."""
    others, position = _changed(before, run.config, Decides.UPDATES), run.schedule_position
    was, now = (build_schedule(c.optim, c.train).learning_rate(*position) for c in (before, run.config))
    if was != now:
        others.append(f"the learning rate of the next step would have been {was:.4g} and is now {now:.4g}")
    if others:
        yield f"training continues differently from the run of {checkpoint.folder}: {'; '.join(others)}"


def _notes_on_length(run: Run, before: RunConfig, checkpoint: Checkpoint) -> Iterator[str]:
    """Warn if the samples are the same but a different run length changes their order."""
    sizes = BatchSizeSchedule.from_config(before.train, data_parallel_size=1)
    was = sizes.samples_for_iterations(sizes.iterations(before.train))
    now = run.batch_sizes.samples_for_iterations(run.total_steps)
    if was != now and not run.data.preserves_order(was):
        yield (
            f"the run is {now:,} samples long, but that of {checkpoint.folder} was {was:,}. The "
            "order of samples depends on the length, so some samples are repeated and others "
            "skipped. To stop early and resume exactly, set the full length and stop with "
            "train.exit_interval or train.exit_duration_in_mins"
        )


def _remember_base(run: Run, checkpoint: Checkpoint | None) -> None:
    """Store the fingerprint of the adapters' base weights. Raises CheckpointError if it differs from the one in
    `checkpoint`.
    """
    run.base = base_fingerprint(run.model.chunks, vocabulary_rows(run.config), run.mesh.world)

    def check() -> None:
        if checkpoint is not None and run.mesh.world.rank == 0:
            check_base(checkpoint, run.base, run.config.model.init_from)

    collectively(run.mesh.world, check)


def _first_checkpoint(run: Run) -> Checkpoint | None:
    settings = run.config.checkpoint
    if settings.load is None:
        return None
    return check_resumable(
        _open(run, open_location(settings.load), settings.load_optim), run.config, run.tokenizer
    )


def check_resumable(
    checkpoint: Checkpoint | None, config: RunConfig, tokenizer: Tokenizer | None
) -> Checkpoint | None:
    """Open the checkpoint in `checkpoint.load` and check that the run can resume from it.

    Raises CheckpointError otherwise.
    """
    load, output = open_location(config.checkpoint.load), open_location(config.run_folder)
    if checkpoint is None:
        if not is_inside(load, output):
            raise CheckpointError(
                f"there is no checkpoint in {load} (checkpoint.load); correct the path, or leave checkpoint.load out "
                f"(only the run's own output folder {output} may be empty, at the first start)"
            )
        return None
    _check_tokenizer(checkpoint, tokenizer)
    check_same_model(checkpoint.folder, config_of(checkpoint), config)
    return checkpoint


def restore(run: Run, checkpoint: Checkpoint, with_optimizer: bool = True) -> None:
    """Restore the run's state from `checkpoint`. Collective over all ranks."""
    record, rows, world = checkpoint.manifest, vocabulary_rows(run.config), run.mesh.world
    is_first = world.rank == 0
    load_model(checkpoint, run.model.chunks, rows, world, is_first)
    if with_optimizer:
        load_optimizer(checkpoint, run.optimizer, rows, run.model.chunks, world, is_first)
    load_amaxes(checkpoint, run.model.amaxes, world)
    run.task.load_parts(run, checkpoint, with_optimizer)
    run.restore_record(record)
    run.task.load_state(run, checkpoint.task_files)
    run.abandoned = _abandoned(run, checkpoint)


def _abandoned(run: Run, checkpoint: Checkpoint) -> list[list[int]]:
    """Return ranges [first, end) of save numbers that a continuation of `checkpoint` must ignore.

    These are the saves in the run's folder that the checkpoint's run had abandoned, and the saves made after the
    checkpoint.
    """
    folder = run.saves
    if not is_inside(checkpoint.folder, folder):
        return []
    after = checkpoint.manifest.save_number + 1
    end = collectively(run.mesh.world, lambda: None if run.mesh.world.rank else next_save_number(folder))[0]
    return checkpoint.manifest.abandoned + ([[after, end]] if after < end else [])


def open_newest_before(run: Run, last_step: int) -> Checkpoint | None:
    """Open the newest complete checkpoint of the run's history saved at or before step `last_step`. None if there is
    none.

    Collective; every rank gets the same one. Damaged checkpoints are logged and skipped.
    """
    folder = run.saves

    def is_past(step: Path | StorePath) -> bool:
        number = save_order(step, unreadable=0)[1]
        return not any(first <= number < end for first, end in run.abandoned)

    def candidates() -> list[str] | None:
        if run.mesh.world.rank or not folder.is_dir():
            return None
        steps = list_steps(folder)
        past = [at for at in steps if at <= last_step and is_past(steps[at])]
        return [str(steps[at]) for at in sorted(past, reverse=True)]

    for path in collectively(run.mesh.world, candidates)[0] or []:
        try:
            return _open(run, open_location(path), with_optimizer=True)
        except CheckpointError as error:
            run.log(str(error))
    return None


def _open(run: Run, path: Path | StorePath, with_optimizer: bool) -> Checkpoint | None:
    parts = ("model", "optimizer") if with_optimizer else ("model",)
    shards = state_shards(run.model.chunks, run.optimizer, vocabulary_rows(run.config))
    world = run.mesh.world
    return open_checkpoint(path, parts, world=world, shards=shards, show_progress=world.rank == 0)


def _check_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> None:
    """Raise CheckpointError if the weights were trained with another tokenizer."""
    trained = checkpoint.manifest.tokenizer
    if tokenizer and trained and trained.fingerprint != tokenizer.fingerprint:
        raise CheckpointError(
            f"{checkpoint.folder} was trained with another tokenizer ({trained.vocab_size} entries, fingerprint "
            f"{trained.fingerprint[:12]}) than this run's ({tokenizer.vocab_size}, {tokenizer.fingerprint[:12]}); use "
            f"the one in {checkpoint.tokenizer_folder}"
        )


def check_same_model(folder: Path, trained: RunConfig, config: RunConfig) -> None:
    """Raise CheckpointError if a model with `config` computes another function than the one whose weights are in
    `folder`.

    `trained` is the configuration that the weights were trained with. The function can differ even if all shapes match.
    """
    for name in LoraConfig.fields_deciding(Decides.FUNCTION):
        before, now = getattr(trained.lora, name), getattr(config.lora, name)
        if before != now:
            raise CheckpointError(
                f"{folder} was saved with lora.{name} {before}, but this run has {now}, so its "
                f"adapters would not match; set lora.{name} as before, or merge the adapters "
                "first: megalith lora merge"
            )
    learned = config.model.learns_positions
    others = changed_settings(
        trained.model, config.model, ignore=() if learned else ("max_position_embeddings",)
    )
    if others:
        raise CheckpointError(
            f"{folder} contains another model: "
            f"{'; '.join(_was_and_is(f'model.{name}', was, now) for name, was, now in others)}, so its weights "
            "would not match; restore the model settings"
            + f", or start a new run with model.init_from={folder}"
            * all(name in ModelConfig.fields_deciding(Decides.REACH) for name, _, _ in others)
        )
