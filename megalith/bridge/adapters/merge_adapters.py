"""Adapters merged with their base, into a new run or into a loaded model."""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megalith.bridge.adapters.open_adapters import (
    fingerprint_of,
    open_adapters,
    open_adapters_of,
    saved_values,
)
from megalith.bridge.importer import Change, check_absent, import_hf, new_run
from megalith.bridge.load import check_base, is_foreign_weights
from megalith.bridge.quantize_base import CodedBase, round_base, taken_from
from megalith.checkpoint import Checkpoint, RunRecord, StepWriter, open_existing
from megalith.checkpoint.files import stored_bytes
from megalith.checkpoint.fingerprint import Sample, digest, sample
from megalith.errors import CheckpointError
from megalith.models.adapters import adapters
from megalith.models.score_model import SCORE
from megalith.models.token_rows import TokenRows
from megalith.models.transformer import Transformer
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import open_location, remove_all


def merge(source: str | Path, out: str | Path, base: str | None = None, show_progress: bool = True) -> Path:
    """Write the base with W + (alpha / rank) · B · A for each linear with adapters, as step 0 of a run.

    W is the weight that the run used: with lora.quantize_base, the dequantized base. Memory holds the adapters and one
    tensor of the base.

    Args:
        source: a run with adapters, a step of one, or a folder in PEFT's format.
        out: folder or URL of the new run; must not exist.
        base: weights that the adapters were trained on; default: the weights that `source` names.
        show_progress: draw a progress bar.

    Returns:
        The folder of the step.

    Raises:
        ConfigError, CheckpointError: adapters or base are missing or do not fit each other.
    """
    out = open_location(out)
    check_absent(out)
    base, model_with_adapters, adapter_run, config = open_adapters(source, base, show_progress)
    coded = None
    if config is not None and config.lora.has_quantized_base:
        taken = taken_from(config, dict(model_with_adapters.named_parameters()).__getitem__)
        coded = CodedBase(config.with_settings({"model.init_from": base}), taken=taken)
    changes = {f"{name}.weight": adapter for name, adapter in adapters(model_with_adapters)}
    saved = saved_values(model_with_adapters)
    samples: Sample = {}

    @lru_cache(maxsize=1)
    @torch.no_grad()
    def delta(name: str) -> Tensor:
        return changes[name].delta()

    @lru_cache(maxsize=1)
    @torch.no_grad()
    def rounded(name: str) -> Tensor:
        return coded.full(name)

    def change(name: str, shard: LocalShard) -> Tensor:
        if name == SCORE:
            return shard.slice_of(model_with_adapters.score.weight.detach())
        samples.setdefault(name, {}).update(sample(shard))
        if name in saved:
            return shard.slice_of(saved[name])
        values = shard.values
        if coded is not None and name in coded.names:
            values = shard.slice_of(rounded(name)).to(values.dtype)
        if name not in changes:
            return values
        if isinstance(changes[name], TokenRows):
            with torch.no_grad():
                return changes[name].put_into(values, shard.offset[0])
        values = values + shard.slice_of(delta(name))
        if not changes[name].rescales:
            return values
        with torch.no_grad():  # DoRA; a shard has whole rows
            return values * changes[name].factors_of(values.norm(dim=1), shard.offset[0])[:, None]

    if is_foreign_weights(base):
        merged = import_hf(base, out, show_progress=show_progress, change=change)
    else:
        merged = _rewrite(open_existing(base, show_progress=show_progress), out, change, show_progress)
    if adapter_run is not None:
        try:
            check_base(adapter_run, digest(samples), base)
        except CheckpointError:
            remove_all(out)
            raise
    return merged


@torch.no_grad()
def merge_into(model: Transformer, source: str | Path, base: str | Path) -> None:
    """Add the adapters of a run or a PEFT folder to the weights of a loaded model, in place.

    Args:
        model: the base, unsharded.
        source: a run with adapters, a step of one, or a folder in PEFT's format.
        base: weights that the model was loaded from.

    Raises:
        ConfigError, CheckpointError: `source` has no adapters, or adapters of another base.
    """
    adapted, config = open_adapters_of(source, base, model.config, fingerprint_of(model))
    if config is not None and config.lora.has_quantized_base:
        taken = taken_from(config, dict(adapted.named_parameters()).__getitem__)
        round_base(config.with_settings({"model.init_from": str(base)}), model, taken)
    for name, adapter in adapters(adapted):
        weight = model.get_submodule(name).weight
        weight.copy_(adapter.to(weight.device).merged(weight))
    state = model.state_dict()
    for name, values in saved_values(adapted).items():
        state[name][: len(values)].copy_(values)


def _rewrite(checkpoint: Checkpoint, out: Path, change: Change, show_progress: bool) -> Path:
    manifest, tokenizer = checkpoint.manifest, checkpoint.tokenizer_folder
    record = RunRecord(step=0, consumed_samples=0, config=manifest.config, tokenizer=manifest.tokenizer)

    def copy_tokenizer(folder: Path) -> None:
        shutil.copytree(tokenizer, folder, dirs_exist_ok=True)

    write = copy_tokenizer if tokenizer is not None else None
    table = checkpoint.table("model")
    with (
        new_run(out) as checkpoints,
        Progress("merge", sum(map(stored_bytes, table.values())), show=show_progress) as progress,
        StepWriter(checkpoints, record, write_tokenizer=write) as writer,
    ):
        for name, stored in table.items():
            shape = tuple(stored.shape)
            shard = LocalShard(checkpoint.read("model", name), (0,) * len(shape), shape, owned=True)
            writer.add("model", name, change(name, shard))
            progress.add(stored_bytes(stored))
    return writer.folder
