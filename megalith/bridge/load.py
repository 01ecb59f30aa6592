"""Loading of Hugging Face, Megatron and Megalith weights into a model in any layout, and of their configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from megalith.bridge.family import MOST_LAYERS, build_on_meta
from megalith.bridge.folder import is_model_folder, path_exists, resolve_folder
from megalith.bridge.importer import open_hf_folder
from megalith.bridge.match import Match
from megalith.bridge.megatron.megatron_importer import is_megatron_folder, open_megatron
from megalith.bridge.model_differences import differences
from megalith.bridge.origin import tokenizer_of
from megalith.bridge.quantized import is_linear
from megalith.checkpoint import Checkpoint, open_checkpoint
from megalith.checkpoint.manifest import MANIFEST
from megalith.checkpoint.state import MODEL, Model, base_shards, checkpoint_shards, load_base
from megalith.checkpoint.steps import CHECKPOINTS, list_steps
from megalith.comm.collectives import Axis
from megalith.config import ModelConfig, RunConfig
from megalith.config.base import Decides
from megalith.config.rules.model_rules import check_model
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError, MegalithError, shorten
from megalith.models.score_model import SCORE, ScoreModel
from megalith.models.vocabulary import VOCABULARY
from megalith.parallel.gather import ALONE
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import StorePath, open_location

HEADS = ("output_layer.weight", "vocabulary.bias")  # of a language model, which a reward model does not have


@torch.no_grad()
def load_source(
    matched: Match,
    model: Model,
    seed: int,
    show_progress: bool = False,
    names: Collection[str] | None = None,
) -> None:
    """Load matched tensors into a model or a rank's chunks of it, except adapters. Each rank reads only its shards.

    Vocabulary padding becomes zero. Missing tensors are initialized with `seed`. With `names`, only those are loaded.
    """
    groups = {group.name: group for group in matched.groups}
    shards = _without_new_head(base_shards(model), groups)
    shards = {name: shard for name, shard in shards.items() if names is None or name in names}
    total = sum(shard.values.nbytes for shard in shards.values())
    with Progress("load", total, show=show_progress) as progress:
        for name, shard in shards.items():
            group = groups[name]
            rows = shard.first_rows(group.shape[0]) if group.shape else shard
            if rows.values.numel():
                rows.values.copy_(matched.read(group, seed, rows.offset, tuple(rows.values.shape)))
            if len(rows.values) < len(shard.values):
                shard.values[len(rows.values) :].zero_()
            progress.add(shard.values.nbytes)


def load_initial_weights(
    path: str,
    model: Model,
    rows: dict[str, int],
    seed: int,
    world: Axis,
    trust: bool = False,
    without_linears: bool = False,
    names: Collection[str] | None = None,
) -> None:
    """Load the weights in `model.init_from`, which may have any format, into this rank's chunks. Collective over
    `world`.

    `rows` is `build.vocabulary_rows`' result. With `without_linears`, the model's linears are not loaded, because
    quantize_base.py loads them. With `names`, only these parameters and buffers are loaded.
    """
    if is_foreign_weights(path):
        load_source(open_weights(path, trust, rows[VOCABULARY[0]]), model, seed, world.rank == 0, names)
    else:
        stored = _checkpoint(path, ()).manifest.tensors.get(MODEL, {})
        shards = _without_new_head(base_shards(model), stored)
        shards = {"model": {name: x for name, x in shards.items() if names is None or name in names}}
        checkpoint = _checkpoint(path, ("model",), world, shards)
        has_score = any(
            isinstance(each, ScoreModel) for each in (model if isinstance(model, Sequence) else [model])
        )
        unused = [*HEADS] if has_score else []
        unused += [name for name in stored if without_linears and is_linear(name)]
        unused += [] if names is None else [name for name in stored if name not in names]
        load_base(checkpoint, shards["model"], rows, world, world.rank == 0, unused)


def stored_dtypes(config: RunConfig) -> dict[str, torch.dtype]:
    """Return, by parameter name, a dtype that represents every value in the Hugging Face folder of `model.init_from`.

    Parameters for which none is known are left out. Other formats give none: Megalith's checkpoints have fp32 weights,
    and files of Megatron would be read twice.
    """
    path = config.model.init_from
    if (
        path is None
        or not is_foreign_weights(path)
        or (path_exists(open_location(path)) and not is_model_folder(path))
    ):
        return {}
    matched = open_weights(path, config.checkpoint.trust)
    dtypes = {group.name: matched.dtype(group) for group in matched.groups}
    return {name: dtype for name, dtype in dtypes.items() if dtype is not None}


def _without_new_head(shards: Mapping[str, LocalShard], stored: Collection[str]) -> dict[str, LocalShard]:
    """Return the shards without the score head if `stored` is a language model. The head then keeps its initial
    values.
    """
    return {name: shard for name, shard in shards.items() if name != SCORE or name in stored}


def config_of(checkpoint: Checkpoint) -> RunConfig:
    """Return the configuration of a checkpoint's run.

    Raises CheckpointError if its model does not have the tensors that the manifest lists. The manifest may be hostile,
    so this is checked before memory is allocated for a model.
    """
    config = _stored_config(checkpoint)
    model, table = config.model, checkpoint.manifest.tensors.get(MODEL, {})
    # Adapters may be in a few layers only.
    if model.num_layers > (len(table) if config.lora.rank is None else MOST_LAYERS):
        raise CheckpointError(
            f"{checkpoint.folder / MANIFEST} has {model.num_layers:,} layers, but lists {len(table)} tensors; use "
            "another step"
        )
    try:
        built = build_on_meta(model, config.lora)
    except ConfigError as error:
        raise CheckpointError(str(error.within(checkpoint.folder / MANIFEST))) from None
    rows = dict.fromkeys(VOCABULARY, model.vocab_size)
    expected = {
        name: [rows.get(name, shard.shape[0]), *shard.shape[1:]] if shard.shape else []
        for name, shard in checkpoint_shards(built).items()
    }
    different = [
        f"{name} (listed {table[name].shape if name in table else 'nowhere'}, needed {shape})"
        for name, shape in expected.items()
        if name not in table or table[name].shape != shape
    ]
    if different:
        raise CheckpointError(
            f"the tensors listed in {checkpoint.folder / MANIFEST} do not match its model config: "
            f"{shorten(different)}; load another checkpoint step"
        )
    return config


def _stored_config(checkpoint: Checkpoint) -> RunConfig:
    try:
        config = RunConfig.from_tree(checkpoint.manifest.config)
        check_model(config.model)
    except ConfigError as error:
        raise CheckpointError(*str(error.within(checkpoint.folder / MANIFEST)).split("\n")) from None
    return config


def check_base(checkpoint: Checkpoint, fingerprint: str, path: str) -> None:
    """Raise CheckpointError unless the adapters in `checkpoint` were trained on weights with this fingerprint.

    `path` is the location of these weights, for the error. Older checkpoints without a fingerprint pass.
    """
    if checkpoint.manifest.base not in (None, fingerprint):
        raise CheckpointError(
            f"the adapters in {checkpoint.folder} were not trained on the weights that are now in {path}, "
            "which have since been trained further or replaced; use the original weights, such as "
            "RUN/checkpoints/step_NNNNNNNN (in model.init_from to train, --base to merge: megalith lora "
            "merge), or train new adapters"
        )


def is_foreign_weights(path: str | Path) -> bool:
    """Return True if weights are a Hugging Face folder or hub name or a Megatron folder, not a Megalith run."""
    return is_foreign_folder(path) or not path_exists(open_location(path))


def is_foreign_folder(path: str | Path) -> bool:
    """Return True if a folder is Hugging Face's or Megatron's. A folder with steps of a Megalith run is neither."""
    folder = open_location(path)
    if not (is_model_folder(path) or (isinstance(folder, Path) and is_megatron_folder(folder))):
        return False
    return not ((folder / CHECKPOINTS).is_dir() and list_steps(folder / CHECKPOINTS))


def open_weights(
    path: str | Path, trust: bool = False, vocab_size: int | None = None, allow: bool = False
) -> Match:
    """Open Hugging Face or Megatron weights. For the arguments, see `import_hf` and `import_megatron`."""
    if (
        not isinstance(open_location(path), StorePath)
        and is_megatron_folder(path)
        and not is_model_folder(path)
    ):
        return open_megatron(path, trust, vocab_size, allow)
    return open_hf_folder(path, allow)


def with_foreign_load(config: RunConfig) -> RunConfig:
    """Return `config` with `checkpoint.load` moved to `model.init_from` if it names Hugging Face or Megatron
    weights."""
    load = config.checkpoint.load
    if load is None or not is_foreign_folder(load):
        return config
    if config.model.init_from is not None:
        raise ConfigError(
            f"checkpoint.load names {load}, which is not a Megalith run, and model.init_from names "
            f"{config.model.init_from}, but both give initial weights; remove one of the two settings"
        )
    return config.with_settings({"model.init_from": load, "checkpoint.load": None})


def with_init_from(config: RunConfig) -> RunConfig:
    """Return `config` with the model's settings taken from the weights that `model.init_from` names.

    Raises ConfigError for a setting that contradicts them.
    """
    path = config.model.init_from
    if path is None:
        return config
    stored = model_of(path, config.checkpoint.trust, config.model.vocab_size)
    explicit = {name: getattr(config.model, name) for name in config.model.model_fields_set}
    explicit_values = {name: value for name, value in explicit.items() if value is not None}
    model = ModelConfig.model_validate({**stored.model_dump(), "preset": None, **explicit_values})
    may_differ = ModelConfig.fields_deciding(Decides.REACH)
    may_differ += ["score_head"] if model.score_head else []  # a reward model starts from a language model
    may_differ += ["max_position_embeddings"] if stored.position_embedding_type != "learned_absolute" else []
    if others := differences(model, stored, ignore=may_differ):
        raise ConfigError(
            f"section model has {'; '.join(others)} as the weights in {path} (model.init_from); remove settings "
            "that the weights determine"
        )
    return config.model_copy(update={"model": model})


def model_of(path: str, trust: bool = False, vocab_size: int | None = None) -> ModelConfig:
    """Return the model configuration of weights in any format. Raises ConfigError for adapters."""
    if is_foreign_weights(path):
        return open_weights(path, trust, vocab_size).groups[0].model
    config = config_of(_checkpoint(path, ()))
    if config.lora.rank is not None:
        raise ConfigError(
            f"{path}, which model.init_from names, contains only adapters; merge them with their "
            "base first: megalith lora merge"
        )
    return config.model


def tokenizer_notes(model: ModelConfig, tokenizer: Tokenizer | None) -> list[str]:
    """Return notes if the run's tokenizer differs from the one stored with `model.init_from`."""
    path = model.init_from
    if path is None or tokenizer is None or is_megatron_folder(path):  # Megatron folders have no tokenizer
        return []
    try:
        original = (
            tokenizer_of(resolve_folder(path))
            if is_foreign_weights(path)
            else _checkpoint(path, ()).manifest.tokenizer
        )
    except MegalithError as error:
        return [
            f"the tokenizer of {path}, which model.init_from names, cannot be compared with the run's: {error}"
        ]
    if original is None or original.fingerprint == tokenizer.fingerprint:
        return []
    return [
        f"the run's tokenizer ({tokenizer.tokenizer_type}, {tokenizer.vocab_size} entries, "
        f"fingerprint {tokenizer.fingerprint[:12]}) is not that of the weights in {path}, which "
        f"model.init_from names ({original.vocab_size}, {original.fingerprint[:12]}): the model "
        "has to relearn ids that now mean other tokens; to keep its tokenizer, set "
        "data.tokenizer_type and data.tokenizer_model to it"
    ]


def tokenizer_folder(path: str) -> Path | None:
    """Return the folder that contains tokenizer.json for the weights in `model.init_from`, or None if there is none."""
    if is_megatron_folder(path):
        return None
    folder = resolve_folder(path) if is_foreign_weights(path) else _checkpoint(path, ()).tokenizer_folder
    return folder if folder is not None and (folder / "tokenizer.json").is_file() else None


def _checkpoint(
    path: str,
    what: tuple[str, ...],
    world: Axis = ALONE,
    shards: Mapping[str, Mapping[str, LocalShard]] | None = None,
) -> Checkpoint:
    checkpoint = open_checkpoint(path, what, world=world, shards=shards, show_progress=world.rank == 0)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no checkpoint in {path}, which model.init_from names; correct the path"
        )
    return checkpoint
