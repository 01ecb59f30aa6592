"""Adapters of a run: loaded from PEFT's format, exported to it, or merged with their base.

A run with LoRA saves only its adapters. Their base is the model that `model.init_from` names.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from megalith.bridge.families import family_for, family_named, family_of
from megalith.bridge.families.sequence_classification import with_score
from megalith.bridge.family import Family, build_on_meta
from megalith.bridge.folder import read_config_json, read_json, resolve_folder
from megalith.bridge.importer import SEED, Change, check_absent, import_hf, new_run
from megalith.bridge.initial_factors import initialize_factors
from megalith.bridge.load import (
    check_base,
    config_of,
    is_foreign_weights,
    model_of,
    open_weights,
    with_init_from,
)
from megalith.bridge.megatron.megatron_importer import is_megatron_folder
from megalith.bridge.model_differences import changed_settings
from megalith.bridge.partial import new_folder
from megalith.bridge.peft.peft_modules import EMBEDDING, is_tied, resolve_saved_modules
from megalith.bridge.peft.peft_names import CONFIG_FILE, is_peft
from megalith.bridge.peft.peft_reader import PeftFolder
from megalith.bridge.peft.peft_writer import save_peft
from megalith.bridge.quantize_base import CodedBase, round_base, taken_from
from megalith.checkpoint import Checkpoint, RunRecord, StepWriter, open_existing
from megalith.checkpoint.averaged_checkpoint import with_average
from megalith.checkpoint.files import stored_bytes
from megalith.checkpoint.fingerprint import Sample, digest, sample
from megalith.checkpoint.rewrite import part_bytes
from megalith.checkpoint.state import MODEL, Model, base_fingerprint, checkpoint_shards
from megalith.comm.collectives import Axis
from megalith.config import LoraConfig, ModelConfig, RunConfig
from megalith.config.lora import model_sites
from megalith.errors import CheckpointError, ConfigError, shorten
from megalith.models.adapters import ADAPTER, adapters, add_adapters, is_initial_factor
from megalith.models.model_types import make_model
from megalith.models.score_model import SCORE
from megalith.models.transformer import Transformer
from megalith.models.vocabulary import VOCABULARY
from megalith.ops.weight_codes import decode
from megalith.parallel.gather import ALONE
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import open_location, remove_all

MAGNITUDE = f"{ADAPTER}lora_magnitude."
STORED_SETTINGS = (
    "rank",
    "alpha",
    "targets",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "modules_to_save",
)
"""Settings of `lora` that a PEFT folder determines."""


def with_saved_modules(config: RunConfig) -> RunConfig:
    """Return `config` with Megalith's names of the modules in `lora.modules_to_save`.

    Raises ConfigError for a module that the model lacks or that cannot be trained in full.
    """
    names, model = config.lora.modules_to_save, config.model
    if names is None:
        return config
    try:
        family = _family(model)
    except ConfigError:  # no family has such a model: only Megalith's names remain
        build_on_meta(model, config.lora)
        return config
    return config.with_settings({"lora.modules_to_save": resolve_saved_modules(names, family, model)})


def trains_tied_embedding(config: RunConfig) -> bool:
    """Return whether `lora.modules_to_save` names an embedding that is the output matrix too.

    The base's configuration is read from `model.init_from`.
    """
    if config.lora.modules_to_save is None:
        return False
    config = with_saved_modules(with_init_from(config))
    return is_tied(config.model) and EMBEDDING in (config.lora.modules_to_save or ())


def with_lora_load(config: RunConfig) -> RunConfig:
    """Return `config` with the settings of the adapters that `lora.load` names.

    Raises ConfigError if one of them is set to another value.
    """
    lora = config.lora
    if lora.load is None:
        return config
    folder = _open_peft(lora.load, config.model)
    folder.check_trained(lora.modules_to_save)
    stored = folder.lora
    for name in STORED_SETTINGS:
        value, stored_value, default = (getattr(each, name) for each in (lora, stored, LoraConfig()))
        same = (
            stored.parts(config.model) == lora.parts(config.model)
            if name == "targets"
            else value == stored_value
        )
        if value != default and not same:
            raise ConfigError(
                f"lora.{name} is {value}, but the adapters in {lora.load}, which lora.load names, have {stored_value}; "
                f"remove {name}"
            )
    return config.with_settings({f"lora.{name}": getattr(stored, name) for name in STORED_SETTINGS})


def load_peft_adapters(path: str, config: ModelConfig, model: Model) -> None:
    """Load this rank's shards of the adapters in a folder in PEFT's format."""
    folder = _open_peft(path, config)
    without_score = not folder.has_score
    _copy_shards(
        model, folder.read, lambda name: is_initial_factor(name) or (name == SCORE and without_score)
    )


def initialize_from_base(
    config: RunConfig,
    model: Model,
    world: Axis = ALONE,
    device: torch.device | str = "cpu",
) -> None:
    """Set this rank's shards of the adapter values that are computed from the base. Every rank of `world` calls it.

    These are the factors of PiSSA, OLoRA and LoftQ, and DoRA's magnitudes: the norms of the base's rows.
    """
    shards = {name: shard for name, shard in checkpoint_shards(model).items() if MAGNITUDE in name}
    if not shards and not config.lora.decomposes_base and not config.lora.begins_with_loftq:
        return
    full = dict(adapters(build_on_meta(config.model, config.lora)))
    read = _base_reader(config.model.init_from, config.checkpoint.trust, config.model, config.train.seed)
    if config.lora.decomposes_base:
        initialize_factors(model, config.lora, full, read, config.train.seed, world, device)

    if config.lora.begins_with_loftq:
        coded = CodedBase(config, device)

        def quantized(name: str, weight: Tensor, taken: Tensor | None) -> Tensor:
            codes = coded.codes(name, weight) if taken is None else coded.codes_without(name, weight, taken)
            return decode(coded.form, codes, torch.float32)

        seed = config.train.seed
        initialize_factors(model, config.lora, full, read, seed, world, device, quantized=quantized)

    if config.lora.has_quantized_base:
        read = CodedBase(config).full

    @lru_cache(maxsize=1)
    def lengths(linear: str) -> dict[str, Tensor]:
        return full[linear].row_lengths(read(f"{linear}.weight"))

    for name, shard in shards.items():
        linear, part = name.removesuffix(".weight").split(MAGNITUDE)
        shard.values.copy_(shard.slice_of(lengths(linear)[part]))


def _base_reader(path: str, trust: bool, model: ModelConfig, seed: int = SEED) -> Callable[[str], Tensor]:
    """Return a function that reads a tensor, by name, of the base model in `path`."""
    if not is_foreign_weights(path):
        return _reader(open_existing(path, show_progress=False))
    matched = open_weights(path, trust, model.vocab_size)
    groups = {group.name: group for group in matched.groups}

    def read(name: str) -> Tensor:
        group = groups[name]
        return matched.read(group, seed, (0,) * len(group.shape), group.shape)

    return read


def export_adapters(
    run: str | Path, out: str | Path, family: str | None = None, show_progress: bool = True
) -> Family:
    """Write the adapters of a run in PEFT's format.

    Args:
        run: a run, whose newest checkpoint is used, or one step of it.
        out: folder or URL; must not exist. On an error nothing is left there.
        family: architecture or model type; default: the base's, else the first that can express the model.
        show_progress: draw a progress bar.

    Returns:
        The family whose module names are used.

    Raises:
        CheckpointError: the run has no adapters, or `out` exists.
    """
    out = open_location(out)
    check_absent(out)
    checkpoint, config = _open_run(run, show_progress)
    if config.lora.begins_with_loftq and config.lora.keeps_initial_factors:
        raise CheckpointError(
            f"{checkpoint.folder} was trained with lora.loftq_iter {config.lora.loftq_iter} on a base that PEFT cannot "
            "make from the published weights; merge it (megalith lora merge)"
        )
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
    """Write the base with W + (alpha / rank) · B · A for each linear with adapters, as step 0 of a run.

    W is the weight that the run used: with lora.quantize_base, the dequantized base. Memory holds the adapters and one
    tensor of the base.

    Args:
        source: a run with adapters, a step of one, or a folder in PEFT's format.
        out: folder or URL of the new run; must not exist.
        base: weights that the adapters were trained on; default: those that `source` names.
        show_progress: draw a progress bar.

    Returns:
        The folder of the step.

    Raises:
        ConfigError, CheckpointError: adapters or base are missing or do not fit each other.
    """
    out = open_location(out)
    check_absent(out)
    base, model_with_adapters, adapter_run, config = _open_adapters(source, base, show_progress)
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
def load_adapter_pairs(
    source: str | Path, base: str | Path, model: ModelConfig, fingerprint: str | None
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return full A and B of each matrix with an adapter, to apply several adapters to one base.

    Args:
        source: a run with adapters, a step of one, or a folder in PEFT's format.
        base: weights of the base.
        model: configuration of the base.
        fingerprint: `fingerprint_of` the base.

    Raises:
        ConfigError, CheckpointError: `source` has no adapters, not those of this base, or more than LoRA.
    """
    adapted, config = _open_adapters_of(source, base, model, fingerprint)
    if config is not None and config.lora.has_quantized_base:
        raise ConfigError(
            f"{source} was trained on a base quantized to {config.lora.quantize_base}; merge it "
            "(megalith lora merge), or run megalith lora export and serve its output on the "
            "unquantized base"
        )
    if adapted.saved_names:
        raise ConfigError(
            f"{source} has modules that were trained in full ({shorten(sorted(adapted.saved_names))}), which replace "
            "those of the base; merge it (megalith lora merge), and serve the result"
        )
    pairs = {}
    for name, adapter in adapters(adapted):
        if adapter.rescales:
            raise ConfigError(
                f"{source} was trained with DoRA, whose magnitudes rescale the base weights; "
                "merge it (megalith lora merge), and serve the result"
            )
        pairs[name] = adapter.pair()
    return pairs


@torch.no_grad()
def merge_into(model: Transformer, source: str | Path, base: str | Path) -> None:
    """Add the adapters of a run or a PEFT folder to the weights of a loaded model, in place.

    Args:
        model: the base, unsharded.
        source: a run with adapters, a step of one, or a folder in PEFT's format.
        base: weights that the model was loaded from.

    Raises:
        ConfigError, CheckpointError: `source` has no adapters, or not those of this base.
    """
    adapted, config = _open_adapters_of(source, base, model.config, fingerprint_of(model))
    if config is not None and config.lora.has_quantized_base:
        taken = taken_from(config, dict(adapted.named_parameters()).__getitem__)
        round_base(config.with_settings({"model.init_from": str(base)}), model, taken)
    for name, adapter in adapters(adapted):
        weight = model.get_submodule(name).weight
        weight.copy_(adapter.to(weight.device).merged(weight))
    state = model.state_dict()
    for name, values in saved_values(adapted).items():
        state[name][: len(values)].copy_(values)


def saved_values(model: Transformer) -> dict[str, Tensor]:
    """Return the values of the modules in `lora.modules_to_save` of an unsharded model, without vocabulary padding."""
    state, rows = model.state_dict(), dict.fromkeys(VOCABULARY, model.config.vocab_size)
    return {name: state[name][: rows.get(name)] for name in sorted(model.saved_names)}


def fingerprint_of(model: Transformer) -> str:
    """Return the fingerprint of an unsharded base model, as runs with adapters store it."""
    return base_fingerprint(model, dict.fromkeys(VOCABULARY, model.config.vocab_size))


def _open_adapters_of(
    source: str | Path, base: str | Path, model: ModelConfig, fingerprint: str | None
) -> tuple[Transformer, RunConfig | None]:
    """Return a model on the meta device with the adapters loaded, and their run, if they are those of this base."""
    _, adapted, adapter_run, config = _open_adapters(source, str(base), show_progress=False)
    if config is not None:
        if others := changed_settings(config.model, model):
            name, was, now = others[0]
            raise ConfigError(
                f"{source} has adapters of a model with {name} {was!r}, but {base} has {now!r}; give adapters of the "
                "same base"
            )
        check_base(adapter_run, fingerprint, str(base))
    if adapted.config.score_head:
        raise ConfigError(
            f"{source} is a reward model, which cannot generate text; give adapters of a language model"
        )
    return adapted, config


def slot_ranks(model: ModelConfig, rank: int) -> dict[str, int]:
    """Return the total rank of a matrix's adapters if each of its parts has one of rank `rank`, by matrix name."""
    lora = LoraConfig(rank=rank, targets=[*model_sites(model)])
    return {name: sum(adapter.ranks.values()) for name, adapter in adapters(build_on_meta(model, lora))}


def _open_adapters(
    source: str | Path, base: str | None, show_progress: bool
) -> tuple[str, Transformer, Checkpoint | None, RunConfig | None]:
    """Return the adapters' base, a model on the meta device with the adapters loaded, and the adapters' checkpoint and
    run."""
    checkpoint = config = None
    if is_peft(source):
        base = base or read_json(Path(source) / CONFIG_FILE).get("base_model_name_or_path")
        model = model_of(_check_base_name(base, source))
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
    if model.score_head and not model_of(_check_base_name(base, source)).score_head:
        raise ConfigError(
            f"{source} is a reward model, but its base {base} has no score head, so they cannot "
            "be merged; write the adapters with megalith lora export, and merge them with PEFT's "
            "merge_and_unload"
        )
    model_with_adapters = make_model(model, device="meta")
    add_adapters(model_with_adapters, lora)
    for _, adapter in adapters(model_with_adapters):
        adapter.to_empty(device="cpu")
    if model.score_head:
        model_with_adapters.score.to_empty(device="cpu")
    for path in {name.rpartition(".")[0] for name in model_with_adapters.saved_names}:
        model_with_adapters.get_submodule(path).to_empty(device="cpu", recurse=False)
    from_peft = checkpoint is None
    _copy_shards(model_with_adapters, read, lambda name: from_peft and is_initial_factor(name))
    if from_peft and lora.decomposes_base:
        full = dict(adapters(model_with_adapters))
        read = _base_reader(_check_base_name(base, source), False, model)
        initialize_factors(model_with_adapters, lora, full, read, SEED, ALONE, "cpu", trained=False)
    return _check_base_name(base, source), model_with_adapters, checkpoint, config


def _check_base_name(base: str | None, source: str | Path) -> str:
    if not isinstance(base, str):
        raise ConfigError(f"{source} does not name the base of its adapters; give it with --base")
    if is_megatron_folder(base):
        raise ConfigError(
            f"{base} is a checkpoint of Megatron-LM; convert it with megalith import-megatron, and give the result"
        )
    return base


@torch.no_grad()
def _copy_shards(
    model: Model, read: Callable[[str], Tensor], is_excluded: Callable[[str], bool] = lambda name: False
) -> None:
    for name, shard in checkpoint_shards(model).items():
        if is_excluded(name):
            continue
        values = read(name)
        if name in VOCABULARY:  # without the rows of the padded vocabulary
            shard.values.zero_()
            shard = shard.first_rows(len(values))
        shard.values.copy_(shard.slice_of(values))


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
    checkpoint, _ = with_average(open_existing(run, show_progress=show_progress))
    config = config_of(checkpoint)
    if config.lora.rank is None:
        raise CheckpointError(
            f"{checkpoint.folder} is from a run without adapters; give one from a run with lora.rank"
        )
    return checkpoint, config


def _reader(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    return lambda name: checkpoint.read("model", name)


def _open_peft(path: str, model: ModelConfig) -> PeftFolder:
    return PeftFolder(path, _family(model), model)


def _family(model: ModelConfig, base: str | None = None) -> Family:
    """Return the family of a base in Hugging Face's format, else the first that can express the model."""
    base = base or model.init_from
    if base is not None and is_foreign_weights(base) and not is_megatron_folder(base):
        folder = resolve_folder(base)
        family = family_of(read_config_json(folder), str(folder))
        return with_score(family) if model.score_head else family
    return family_for(model)
