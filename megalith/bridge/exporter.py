"""`megalith export-hf`: convert a checkpoint to a folder that transformers loads, one tensor at a time."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from megalith.bridge.families import FAMILIES, family_for, family_named, family_of
from megalith.bridge.family import Family, Group
from megalith.bridge.folder import (
    CONFIG,
    DTYPE_NAMES,
    GENERATION,
    is_model_folder,
    read_folder_file,
)
from megalith.bridge.folder_writer import SHARD_BYTES, FolderWriter
from megalith.bridge.importer import PRECISIONS
from megalith.bridge.load import config_of
from megalith.bridge.model_differences import conversion_notes, differences
from megalith.bridge.origin import Origin, read_origin, saved_tokenizer
from megalith.bridge.quantized import (
    SUFFIX,
    Form,
    notes_on_blocks,
    quantization_config,
    quantized_names,
    with_scales,
)
from megalith.bridge.quantized import quantize as quantized
from megalith.bridge.settings import Tree
from megalith.bridge.transfer import Scratch, to_theirs
from megalith.bridge.wrapper import WrapperFolder
from megalith.checkpoint import Checkpoint, open_existing
from megalith.checkpoint.averaged_checkpoint import with_average
from megalith.config import ModelConfig, TrainConfig
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import StorePath, open_location

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Export:
    """Result of an export."""

    path: Path | StorePath
    family: Family
    checkpoint: Checkpoint
    groups: list[Group]
    dtypes: dict[str, torch.dtype]
    """Dtype of each Hugging Face tensor."""
    notes: list[str]
    """Messages for the user."""


def export_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    family: str | None = None,
    dtype: str | None = None,
    quantize: Form | None = None,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = False,
    show_progress: bool = True,
    averaged: bool = True,
    multimodal: str | Path | None = None,
) -> Export:
    """Write a checkpoint as a Hugging Face folder.

    Args:
        checkpoint: a run, whose newest checkpoint is used, or one step of it.
        out: folder or URL to write.
        family: architecture or model type; default: the family that the model was imported from, else the first that
            can express it.
        dtype: float32, bfloat16 or float16; default: each tensor's dtype in the imported model, and the run's compute
            dtype for tensors that were not imported.
        quantize: fp8 or int8 for the layers' matrices (quantized.py).
        shard_bytes: maximum size of a file.
        replace: replace an existing folder, after the new one is complete.
        show_progress: draw a progress bar.
        averaged: export the averaged weights of the optimizer state, if there are any, instead of the trained ones.
        multimodal: folder of the multimodal model that the language model was imported from; the export is that model
            with this language model. Not with `family` or `quantize`.

    Raises:
        ConfigError: no family can express the model.
        CheckpointError: the checkpoint is damaged or `out` cannot be written. Nothing is left at `out`.
    """
    opened = open_existing(checkpoint, show_progress=show_progress)
    config = config_of(opened)
    if config.lora.rank is not None:
        raise ConfigError(
            f"{opened.folder} holds only adapters; write them with megalith lora export, or merge them with their "
            "base first: megalith lora merge"
        )
    opened, has_average = with_average(opened) if averaged else (opened, False)
    origin = _origin(opened, config.model)
    if multimodal is not None and (family or quantize):
        raise ConfigError("--multimodal writes the whole original model; remove --family and --quantize")
    wrapper = None if multimodal is None else WrapperFolder(multimodal)
    if wrapper is not None:
        origin = dataclasses.replace(origin, config=wrapper.language_config)
        family = family_of(wrapper.language_config, str(wrapper.path)).architecture
    chosen, notes = export_family(config.model, origin, family)
    if has_average:
        notes.append("these are the averaged weights; to write those of the last step, add --weights trained")
    notes += conversion_notes(config.model)
    groups = (chosen if wrapper is None else chosen.stored_as(wrapper.shapes)).groups(config.model)
    dtypes = _dtypes(groups, config.train, origin, dtype)
    tokenizer = saved_tokenizer(opened.tokenizer_folder)
    tensors = {name: (dtypes[name], shape) for group in groups for name, shape in group.sources.items()}
    copies = {copy: name for copy, name in chosen.copies(config.model).items() if name in tensors}
    tensors |= {copy: tensors[name] for copy, name in copies.items()}
    constants = chosen.stored_constants(config.model)
    constant_dtypes = {
        name: DTYPE_NAMES[dtype] if dtype else origin.dtypes.get(name, export_dtype(config.train))
        for name in constants
    }
    tensors |= {name: (kind, ()) for name, kind in constant_dtypes.items()}
    tables = chosen.stored_tables(config.model) if chosen.writes_tables else {}
    table_dtype = DTYPE_NAMES[dtype] if dtype else export_dtype(config.train)
    for name, table in tables.items():
        tables[name] = table.to(table_dtype if dtype else origin.dtypes.get(name, table_dtype))
    tensors |= {name: (table.dtype, tuple(table.shape)) for name, table in tables.items()}
    codes = quantized_names(groups, quantize, chosen.not_in_fp8) if quantize else set()
    notes += notes_on_blocks(tensors, codes, quantize) if quantize else []
    stored = with_scales(tensors, codes, quantize) if quantize else tensors
    if wrapper is not None:
        stored = wrapper.rename(tensors, chosen.tied)
    total = sum(torch.Size(shape).numel() * kind.itemsize for kind, shape in stored.values())
    with (
        Progress("export", total, show=show_progress) as progress,
        FolderWriter(out, stored, shard_bytes, replace) as writer,
    ):
        ours, scratch = Scratch(), Scratch()
        for group in groups:
            for offset, shape in group.boxes():
                tensor = ours.empty(shape, torch.float32)
                opened.fill("model", {group.name: LocalShard(tensor, offset, group.shape, owned=True)})
                value_dtypes = dtypes | dict.fromkeys(codes, torch.float32)
                for name, value in to_theirs(group, tensor, value_dtypes, scratch, first_expert=offset[0]):
                    parts = {name: value}
                    if name in codes:
                        parts = dict(zip((name, name + SUFFIX[quantize]), quantized(value, quantize)))
                    parts |= {copy: value for copy, original in copies.items() if original == name}
                    for part, values in parts.items():
                        writer.write(part if wrapper is None else wrapper.name(part), values)
                        progress.add(values.nbytes)
        for name, value in constants.items():
            written = name if wrapper is None else wrapper.name(name)
            writer.write(written, torch.tensor(value, dtype=constant_dtypes[name]))
        for name, table in tables.items():
            writer.write(name, table)
        model_dtype = DTYPE_NAMES[dtype] if dtype else export_dtype(config.train)
        tree = _config_json(chosen, config.model, origin, model_dtype, tokenizer)
        if quantize:
            tree["quantization_config"] = quantization_config(quantize, tensors, codes, chosen.tied)
        if wrapper is not None:
            _write_around(writer, wrapper, wrapper.with_language_model(chosen, config.model, tree), progress)
        else:
            writer.write_json(CONFIG, tree)
            writer.write_json(GENERATION, origin.generation or _generation(tokenizer))
            notes += _write_tokenizer(writer, origin, tokenizer)
    return Export(open_location(out), chosen, opened, groups, dtypes, notes)


def _write_around(writer: FolderWriter, wrapper: WrapperFolder, tree: Tree, progress: Progress) -> None:
    """Write `tree` as config.json, and copy everything of the multimodal model `wrapper` except its language model."""
    writer.write_json(CONFIG, tree)
    for file in wrapper.files():
        writer.copy(file)
    for name, tensor in wrapper.outside():
        writer.write(name, tensor)
        progress.add(tensor.nbytes)


def merge_hf(opened: Checkpoint, path: Path) -> None:
    """Write a checkpoint's weights to one file under Hugging Face's names in float32, and config.json if there is none.

    Args:
        opened: the checkpoint; its model must fit into memory.
        path: `.safetensors`, or `.bin` or `.pt` for torch.load.

    Raises:
        CheckpointError: another suffix, or a write error.
        ConfigError: no family can express the model.
    """
    if path.suffix not in (".safetensors", ".bin", ".pt"):
        raise CheckpointError(f"the suffix of {path.name} is not supported; use .safetensors, .bin or .pt")
    model = config_of(opened).model
    family, state_dict = family_for(model), {}
    groups = family.groups(model)
    with Progress("merge", 4 * sum(math.prod(group.shape) for group in groups)) as progress:
        for group in groups:
            tensor = torch.empty(group.shape)
            opened.fill(
                "model", {group.name: LocalShard(tensor, (0,) * len(group.shape), group.shape, owned=True)}
            )
            dtypes = dict.fromkeys(group.sources, torch.float32)
            state_dict.update({name: value.clone() for name, value in to_theirs(group, tensor, dtypes)})
            progress.add(tensor.nbytes)
    state_dict |= {name: torch.tensor(value) for name, value in family.stored_constants(model).items()}
    state_dict |= family.stored_tables(model) if family.writes_tables else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == ".safetensors":
            save_file(state_dict, path, metadata={"format": "pt"})
        else:
            torch.save(state_dict, path)
        if not (path.parent / CONFIG).exists():
            (path.parent / CONFIG).write_text(json.dumps(family.write_config(model), indent=2) + "\n")
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError if the disk is full
        raise CheckpointError(
            f"{path} could not be written: {error}; free disk space, or choose another path"
        ) from error


VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _origin(checkpoint: Checkpoint, model: ModelConfig) -> Origin:
    """Return the small files of the checkpoint, else of the Hugging Face folder that training started from.

    If the run's vocabulary differs from that folder's, the tokenizer files are taken from the checkpoint.
    """
    saved, init_from = read_origin(checkpoint.tokenizer_folder), model.init_from
    if saved.config is not None or not init_from or not is_model_folder(init_from):
        return saved
    origin_files = read_origin(Path(init_from))
    contents = {file.name: read_folder_file(file) for file in origin_files.files}
    vocabularies = [file for file in saved.files if file.name in VOCABULARY_FILES]
    if any(contents.get(file.name) != read_folder_file(file) for file in vocabularies):
        return dataclasses.replace(origin_files, files=saved.files)
    return origin_files


def export_family(
    model: ModelConfig, origin: Origin, requested: str | None = None
) -> tuple[Family, list[str]]:
    """Return the family to write a model as, and notes.

    Raises ConfigError if there is none.
    """
    if requested is not None:
        chosen = family_named(requested, "--family")
        try:
            chosen.write_config(model)
        except ConfigError as error:
            raise ConfigError(
                f"{chosen.architecture} cannot express this model: {error}; remove --family"
            ) from None
        return chosen, []
    if origin.config is not None:
        try:
            chosen = family_of(origin.config, "the model's origin")
            chosen = FAMILIES.get(chosen.exported_as, chosen)
            chosen.write_config(model)
            return chosen, []
        except ConfigError:  # the model was trained with another model's tokenizer, or changed
            pass
    chosen = family_for(model)
    return chosen, [f"written as {chosen.architecture}, the first family that can express this model"]


def export_dtype(train: TrainConfig) -> torch.dtype:
    """Return the dtype of exported weights that were not imported: the run's compute dtype."""
    return next(dtype for dtype, name in PRECISIONS.items() if name == train.precision)


def _dtypes(
    groups: list[Group], train: TrainConfig, origin: Origin, requested: str | None
) -> dict[str, torch.dtype]:
    names = [name for group in groups for name in group.sources]
    if requested is not None:
        return dict.fromkeys(names, DTYPE_NAMES[requested])
    return {name: origin.dtypes.get(name, export_dtype(train)) for name in names}


def _config_json(
    family: Family, model: ModelConfig, origin: Origin, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> Tree:
    """Return the config.json to write.

    The origin's config.json is used if it describes this model. Otherwise the family's keys replace the origin's, and
    other keys of the origin are kept if the result describes the model. `architectures` is set if the origin has none,
    as in the configuration of a language model inside a multimodal model.
    """
    spelled = str(dtype).removeprefix("torch.")
    if origin.config is None:
        end = tokenizer.eod if tokenizer else None
        ends = {"bos_token_id": end, "eos_token_id": end}
        written = family.write_config(model)
        ends = {name: value for name, value in ends.items() if value is not None or name not in written}
        return written | ends | {"torch_dtype": spelled}
    tree, written = dict(origin.config), family.write_config(model)
    tree.pop("quantization_config", None)  # describes the files that were read
    key = "dtype" if "dtype" in tree else "torch_dtype"
    besides = {name: value for name, value in tree.items() if name != "rope_parameters"}
    tokens = {name: tree[name] for name in SPECIAL_TOKENS if name in tree}
    candidate = next(
        each for each in (tree, besides | written, tokens | written) if _describes(family, each, model)
    )
    return {"architectures": written["architectures"], **candidate, key: spelled}


def _describes(family: Family, tree: Tree, model: ModelConfig) -> bool:
    """Return True if a config.json belongs to this family and describes this model. Aliases of keys are accepted."""
    try:
        return family_of(tree, "") is family and not differences(
            family.read_config(tree), family.described_model(model)
        )
    except ConfigError:
        return False


def _generation(tokenizer: Tokenizer | None) -> dict[str, Any]:
    end = tokenizer.eod if tokenizer else None
    if end is None:
        return {"_from_model_config": True}
    ends = list(tokenizer.stop_ids)
    return {"_from_model_config": True, "bos_token_id": end, "eos_token_id": ends if len(ends) > 1 else end}


def _write_tokenizer(writer: FolderWriter, origin: Origin, tokenizer: Tokenizer | None) -> list[str]:
    """Copy the tokenizer's files; return notes on missing ones."""
    for file in origin.files:
        writer.copy(file)
    if tokenizer is None and not origin.files:
        return ["no tokenizer was written: the checkpoint has none"]
    if not origin.files:
        return [f"no tokenizer was written: transformers has no equivalent of {tokenizer.tokenizer_type}"]
    names = [file.name for file in origin.files]
    if "tokenizer_config.json" not in names and tokenizer is not None:
        writer.write_json("tokenizer_config.json", _tokenizer_config(names, tokenizer))
    return []


def _tokenizer_config(names: list[str], tokenizer: Tokenizer) -> Tree:
    """Return the tokenizer_config.json that transformers needs."""
    if "tokenizer.json" not in names and "vocab.txt" in names:
        return {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.lower_case}
    kind = "PreTrainedTokenizerFast" if "tokenizer.json" in names else "GPT2Tokenizer"
    end = tokenizer.decode([tokenizer.eod]) if tokenizer.eod is not None else None
    return {"tokenizer_class": kind, "eos_token": end}
