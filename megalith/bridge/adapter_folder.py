"""What becomes of adapters: a run begins from PEFT's, writes them in PEFT's form, or is merged with its base.

A run with adapters holds these alone; its base is what `model.init_from` names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megalith.bridge.families import family_for, family_named, family_of
from megalith.bridge.family import Family
from megalith.bridge.folder import read_config_json, read_json, resolve_folder
from megalith.bridge.importer import Change, check_absent, import_hf, new_run
from megalith.bridge.load import check_base, config_of, is_foreign_weights, model_of
from megalith.bridge.megatron.megatron_importer import is_megatron_folder
from megalith.bridge.partial import new_folder
from megalith.bridge.peft import CONFIG_FILE, PeftFolder, is_peft, save_peft
from megalith.checkpoint import Checkpoint, RunRecord, StepWriter, open_existing
from megalith.checkpoint.files import stored_bytes
from megalith.checkpoint.fingerprint import Sample, digest, sample
from megalith.checkpoint.rewrite import part_bytes
from megalith.checkpoint.state import MODEL, Model, checkpoint_shards
from megalith.config import LoraConfig, ModelConfig, RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.adapters import adapters, add_adapters
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import open_location, remove_all


def with_lora_load(config: RunConfig) -> RunConfig:
    """`config` with rank, alpha and targets of the adapters that `lora.load` names, if it names any.

    Raises ConfigError for one of them that is set to something else.
    """
    given = config.lora
    if given.load is None:
        return config
    found = _open_peft(given.load, config.model).lora
    for name in ("rank", "alpha", "targets"):
        asked, theirs, default = (getattr(lora, name) for lora in (given, found, LoraConfig()))
        same = (
            found.parts(config.model) == given.parts(config.model) if name == "targets" else asked == theirs
        )
        if asked != default and not same:
            raise ConfigError(
                f"lora.{name} is {asked}, but the adapters in {given.load}, which lora.load names, have {theirs}; "
                f"leave {name} out"
            )
    return config.with_settings(
        {f"lora.{name}": getattr(found, name) for name in ("rank", "alpha", "targets")}
    )


def load_peft_adapters(path: str, config: ModelConfig, model: Model) -> None:
    """Fills this rank's adapters with those in `path`, in PEFT's form, each rank its shards."""
    _fill(model, _open_peft(path, config).read)


def export_adapters(
    run: str | Path, out: str | Path, family: str | None = None, show_progress: bool = True
) -> Family:
    """Writes the adapters of a run's newest checkpoint, or of one step, in PEFT's format; returns their family.

    `family` is an architecture or model type; by default that of the base, else the first that can say the model.
    Raises CheckpointError when there are none or something is at `out`; nothing is left there on an error.
    """
    out = open_location(out)
    check_absent(out)
    checkpoint, config = _open_run(run, show_progress)
    chosen = family_named(family, "--family") if family else _family(config.model)
    total = part_bytes(checkpoint, MODEL)
    with new_folder(out) as folder, Progress("export", total, show=show_progress) as progress:

        def read(name: str) -> Tensor:
            values = checkpoint.read(MODEL, name)
            progress.add(values.nbytes)
            return values

        save_peft(folder, chosen, config.model, config.lora, read, config.model.init_from)
    return chosen


def merge(source: str | Path, out: str | Path, base: str | None = None, show_progress: bool = True) -> Path:
    """Writes W + (alpha / rank) · B · A for each linear with adapters, and the rest of their base as it is.

    It becomes step 0 of a run at `out`; returns the step's folder. `source` is a run with adapters, a step of one, or
    a folder in PEFT's format; `base` what they belong to, by default what they name. In memory are the adapters and
    one tensor of the base. Raises ConfigError or CheckpointError where one of the two is not to be had or does not fit.
    """
    out = open_location(out)
    check_absent(out)
    base, adapted, trained_on = _adapted(source, base, show_progress)
    changes = {f"{name}.weight": adapter for name, adapter in adapters(adapted)}
    samples: Sample = {}

    @lru_cache(maxsize=1)
    @torch.no_grad()
    def delta(name: str) -> Tensor:
        return changes[name].delta()

    def change(name: str, shard: LocalShard) -> Tensor:
        samples.setdefault(name, {}).update(sample(shard))
        return shard.values + shard.slice_of(delta(name)) if name in changes else shard.values

    if is_foreign_weights(base):
        merged = import_hf(base, out, show_progress=show_progress, change=change)
    else:
        merged = _rewrite(open_existing(base, show_progress=show_progress), out, change, show_progress)
    if trained_on is not None:
        try:
            check_base(trained_on, digest(samples), base)
        except CheckpointError:
            remove_all(out)
            raise
    return merged


def _adapted(
    source: str | Path, base: str | None, show_progress: bool
) -> tuple[str, Transformer, Checkpoint | None]:
    """What the adapters belong to, a model that has their values, and of its own weights none; their checkpoint."""
    checkpoint = None
    if is_peft(source):
        base = base or read_json(Path(source) / CONFIG_FILE).get("base_model_name_or_path")
        model = model_of(_known(base, source))
        folder = PeftFolder(source, _family(model, base), model)
        lora, read = folder.lora, folder.read
    else:
        checkpoint, config = _open_run(source, show_progress)
        base, model, lora, read = (
            base or config.model.init_from,
            config.model,
            config.lora,
            _reader(checkpoint),
        )
    adapted = make_model(model, device="meta")
    add_adapters(adapted, lora)
    for _, adapter in adapters(adapted):
        adapter.to_empty(device="cpu")
    _fill(adapted, read)
    return _known(base, source), adapted, checkpoint


def _known(base: str | None, source: str | Path) -> str:
    if not isinstance(base, str):
        raise ConfigError(f"{source} does not say what its adapters belong to; name it with --base")
    if is_megatron_folder(base):
        raise ConfigError(
            f"{base} is a checkpoint of Megatron-LM; write it as a run first, megalith import-megatron, and name that"
        )
    return base


@torch.no_grad()
def _fill(model: Model, read: Callable[[str], Tensor]) -> None:
    for name, shard in checkpoint_shards(model).items():
        shard.values.copy_(shard.slice_of(read(name)))


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


def _open_run(run: str | Path, show_progress: bool) -> tuple[Checkpoint, RunConfig]:
    checkpoint = open_existing(run, show_progress=show_progress)
    config = config_of(checkpoint)
    if config.lora.rank is None:
        raise CheckpointError(f"{checkpoint.folder} is of a run without adapters; give one with lora.rank")
    return checkpoint, config


def _reader(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    return lambda name: checkpoint.read("model", name)


def _open_peft(path: str, model: ModelConfig) -> PeftFolder:
    return PeftFolder(path, _family(model), model)


def _family(model: ModelConfig, base: str | None = None) -> Family:
    """The family of a base in Hugging Face's form, else the first that can say the model."""
    base = base or model.init_from
    if base is not None and is_foreign_weights(base) and not is_megatron_folder(base):
        folder = resolve_folder(base)
        return family_of(read_config_json(folder), str(folder))
    return family_for(model)
