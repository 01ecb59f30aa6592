"""Opens adapters of a run or of a folder in PEFT's format, together with the base that they were trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megalith.bridge.families import family_for, family_of
from megalith.bridge.families.sequence_classification import with_score
from megalith.bridge.family import Family
from megalith.bridge.folder import read_config_json, read_json, resolve_folder
from megalith.bridge.importer import SEED
from megalith.bridge.initial_factors import initialize_factors
from megalith.bridge.load import (
    check_base,
    config_of,
    is_foreign_weights,
    model_of,
    open_weights,
)
from megalith.bridge.megatron.megatron_importer import is_megatron_folder
from megalith.bridge.model_differences import changed_settings
from megalith.bridge.peft.peft_names import CONFIG_FILE, is_peft
from megalith.bridge.peft.peft_reader import PeftFolder
from megalith.checkpoint import Checkpoint, open_existing
from megalith.checkpoint.averaged_checkpoint import with_average
from megalith.checkpoint.state import Model, base_fingerprint, checkpoint_shards
from megalith.config import ModelConfig, RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.adapter import Adapter
from megalith.models.adapters import adapters, add_adapters, is_initial_factor
from megalith.models.model_types import make_model
from megalith.models.token_rows import TokenRows
from megalith.models.transformer import Transformer
from megalith.models.vocabulary import VOCABULARY
from megalith.parallel.gather import ALONE


def base_reader(path: str, trust: bool, model: ModelConfig, seed: int = SEED) -> Callable[[str], Tensor]:
    """Return a function that reads a tensor of the base model in `path` by name."""
    if not is_foreign_weights(path):
        return tensor_reader(open_existing(path, show_progress=False))
    matched = open_weights(path, trust, model.vocab_size)
    groups = {group.name: group for group in matched.groups}

    def read(name: str) -> Tensor:
        group = groups[name]
        return matched.read(group, seed, (0,) * len(group.shape), group.shape)

    return read


def low_rank_adapters(model: Transformer) -> dict[str, Adapter]:
    """Return the adapters of a model by the name of their module, without trained rows of tokens."""
    return {name: adapter for name, adapter in adapters(model) if not isinstance(adapter, TokenRows)}


def saved_values(model: Transformer) -> dict[str, Tensor]:
    """Return the values of the modules in `lora.modules_to_save` of an unsharded model, without vocabulary padding."""
    state, rows = model.state_dict(), dict.fromkeys(VOCABULARY, model.config.vocab_size)
    return {name: state[name][: rows.get(name)] for name in sorted(model.saved_names)}


def fingerprint_of(model: Transformer) -> str:
    """Return the fingerprint of an unsharded base model, as runs with adapters store it."""
    return base_fingerprint(model, dict.fromkeys(VOCABULARY, model.config.vocab_size))


def open_adapters_of(
    source: str | Path, base: str | Path, model: ModelConfig, fingerprint: str | None
) -> tuple[Transformer, RunConfig | None]:
    """Return a model on the meta device with the adapters loaded, and the adapters' run.

    Raises ConfigError if the adapters have another base, or belong to a reward model.
    """
    _, adapted, adapter_run, config = open_adapters(source, str(base), show_progress=False)
    if config is not None:
        if others := changed_settings(config.model, model):
            name, was, now = others[0]
            raise ConfigError(
                f"{source} has adapters of a model with {name} {was!r}, but {base} has {now!r}; use adapters "
                "that were trained on this base"
            )
        check_base(adapter_run, fingerprint, str(base))
    if adapted.config.score_head:
        raise ConfigError(
            f"{source} is a reward model, which cannot generate text; use adapters of a language model"
        )
    return adapted, config


def open_adapters(
    source: str | Path, base: str | None, show_progress: bool
) -> tuple[str, Transformer, Checkpoint | None, RunConfig | None]:
    """Return the adapters' base, a model on the meta device with the adapters loaded, and the adapters' checkpoint and
    run."""
    checkpoint = config = None
    if is_peft(source):
        base = base or read_json(Path(source) / CONFIG_FILE).get("base_model_name_or_path")
        model = model_of(_check_base_name(base, source))
        folder = PeftFolder(source, adapter_family(model, base), model)
        lora, read = folder.lora, folder.read
    else:
        checkpoint, config = open_adapter_run(source, show_progress)
        base, model, lora, read = (
            base or config.model.init_from,
            config.model,
            config.lora,
            tensor_reader(checkpoint),
        )
    if model.score_head and not model_of(_check_base_name(base, source)).score_head:
        raise ConfigError(
            f"{source} is a reward model, but its base {base} has no score head, so the two cannot be merged; write "
            "the adapters with megalith lora export, and merge them with PEFT's merge_and_unload"
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
    copy_shards(model_with_adapters, read, lambda name: from_peft and is_initial_factor(name))
    if from_peft and lora.decomposes_base:
        full = low_rank_adapters(model_with_adapters)
        read = base_reader(_check_base_name(base, source), False, model)
        initialize_factors(model_with_adapters, lora, full, read, SEED, ALONE, "cpu", trained=False)
    return _check_base_name(base, source), model_with_adapters, checkpoint, config


def _check_base_name(base: str | None, source: str | Path) -> str:
    if not isinstance(base, str):
        raise ConfigError(
            f"{source} does not say which base its adapters were trained on; pass the base with --base"
        )
    if is_megatron_folder(base):
        raise ConfigError(
            f"{base} is a checkpoint of Megatron-LM; convert it with megalith import-megatron, and pass the "
            "converted folder"
        )
    return base


@torch.no_grad()
def copy_shards(
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


def open_adapter_run(run: str | Path, show_progress: bool) -> tuple[Checkpoint, RunConfig]:
    checkpoint, _ = with_average(open_existing(run, show_progress=show_progress))
    config = config_of(checkpoint)
    if config.lora.rank is None:
        raise CheckpointError(
            f"{checkpoint.folder} is from a run without adapters; pass the folder of a run with lora.rank"
        )
    return checkpoint, config


def tensor_reader(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    return lambda name: checkpoint.read("model", name)


def open_peft(path: str, model: ModelConfig) -> PeftFolder:
    return PeftFolder(path, adapter_family(model), model)


def adapter_family(model: ModelConfig, base: str | None = None) -> Family:
    """Return the family of a base in Hugging Face's format, else the first that can express the model."""
    base = base or model.init_from
    if base is not None and is_foreign_weights(base) and not is_megatron_folder(base):
        folder = resolve_folder(base)
        family = family_of(read_config_json(folder), str(folder))
        return with_score(family) if model.score_head else family
    return family_for(model)
