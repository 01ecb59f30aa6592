"""`megalith export-hf`: a checkpoint as a folder that transformers loads as it is, one tensor of ours at a time.

A Hugging Face folder, written a tensor at a time: whole, or not there.

The names, types and shapes are known before the first tensor, so each shard's header is written first and tensors go
to their places in any order. Everything is written into `NAME.partial` beside the output, synced, and renamed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalith.bridge.families import family_for, family_named, family_of
from megalith.bridge.family import Family, Group
from megalith.bridge.folder import (
    CONFIG,
    DTYPE_NAMES,
    GENERATION,
    is_model_folder,
    path_exists,
    read_folder_file,
)
from megalith.bridge.importer import PRECISIONS
from megalith.bridge.load import config_of
from megalith.bridge.origin import Origin, read_origin, saved_tokenizer
from megalith.bridge.partial import partial_folder
from megalith.bridge.quantized import (
    SUFFIX,
    Form,
    notes_on_blocks,
    quantization_config,
    quantized_names,
    with_scales,
)
from megalith.bridge.quantized import quantize as quantized
from megalith.bridge.settings import Tree, conversion_notes, differences
from megalith.bridge.transfer import Scratch, to_theirs
from megalith.checkpoint import Checkpoint, open_existing
from megalith.checkpoint.files import Layout, RandomAccessWriter, byte_count
from megalith.config import ModelConfig, TrainConfig
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import CheckpointError, ConfigError
from megalith.io import sync_folder, write_file
from megalith.parallel.shards import LocalShard
from megalith.progress import Progress
from megalith.remote import StorePath, open_location

SHARD_BYTES = 5 * 10**9  # as transformers cuts them


class FolderWriter:
    """The folder at `path`, as a context manager: it takes its name at the end of the block, and only without an error.

    `tensors` gives each tensor's type and shape, in the order in which they are spread over shards.
    """

    def __init__(
        self,
        path: str | Path,
        tensors: Layout,
        shard_bytes: int = SHARD_BYTES,
        replace: bool = False,
    ):
        """Raises CheckpointError when something is at `path`, unless it is to be replaced."""
        self.path = open_location(path)
        self._place = partial_folder(self.path)
        self.partial = self._place.path
        self._tensors = dict(tensors)
        self._shards = _cut(self._tensors, shard_bytes)
        self._where = {name: file for file, names in self._shards.items() for name in names}
        self._files: dict[str, RandomAccessWriter] = {}  # open, by name
        if path_exists(self.path) and not replace:
            raise CheckpointError(f"{self.path} already exists; remove it, or choose another path")

    def __enter__(self) -> FolderWriter:
        try:
            self._place.begin()
            for file, names in self._shards.items():
                self._files[file] = RandomAccessWriter(
                    self.partial / file, {name: self._tensors[name] for name in names}
                )
        except OSError as error:
            self._abandon()
            raise self._refused(error) from error
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Puts a tensor into its place."""
        dtype, shape = self._tensors[name]
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
        try:
            self._files[self._where[name]].put(name, tensor)
        except OSError as error:
            raise self._refused(error) from error

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes a JSON file."""
        self._small(name, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())

    def copy(self, file: Path) -> None:
        """Copies a small file."""
        self._small(file.name, read_folder_file(file))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finish()
                return
            except BaseException as refused:
                self._abandon()
                if isinstance(refused, OSError):
                    raise self._refused(refused) from refused
                raise
        self._abandon()

    def _finish(self) -> None:
        if len(self._shards) > 1:
            total = sum(byte_count(shape, dtype) for dtype, shape in self._tensors.values())
            self.write_json(
                "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": self._where}
            )
        for file in self._files.values():
            file.sync()
        self._close()
        sync_folder(self.partial)
        self._place.commit()

    def _small(self, name: str, content: bytes) -> None:
        try:
            write_file(self.partial / name, content)
        except OSError as error:
            raise self._refused(error) from error

    def _abandon(self) -> None:
        self._close()
        self._place.abandon()

    def _close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()

    def _refused(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"{self.path} could not be written: {error.strerror or error}; nothing of it is left: make room, or choose "
            "another place"
        )


def _cut(tensors: Layout, shard_bytes: int) -> dict[str, list[str]]:
    """File names with the tensors in them: one file, or several of at most `shard_bytes` (but for one large tensor)."""
    shards: list[list[str]] = [[]]
    held = 0
    for name, (dtype, shape) in tensors.items():
        size = byte_count(shape, dtype)
        if held and held + size > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    count = len(shards)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": names for i, names in enumerate(shards, 1)}


SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class Export:
    """What an export has written."""

    path: Path | StorePath
    family: Family
    checkpoint: Checkpoint
    groups: list[Group]
    dtypes: dict[str, torch.dtype]
    """Of each tensor of theirs."""
    notes: list[str]
    """What the user should know."""


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
) -> Export:
    """Writes a run's newest checkpoint, or one step of it, as the Hugging Face folder `out`.

    `family` is an architecture or model type; by default that of the folder that the model came from, else the first
    that can say it. `dtype` (float32, bfloat16, float16) is by default what the run computes in; `quantize` (fp8, int8)
    writes the layers' matrices in codes of a byte with scales (quantized.py). With `replace`, what
    is at `out` goes once the new folder is whole. Raises ConfigError
    where no family can say the model, CheckpointError where the checkpoint is not whole or `out` cannot be written:
    nothing is left then.
    """
    opened = open_existing(checkpoint, show_progress=show_progress)
    config = config_of(opened)
    if config.lora.rank is not None:
        raise ConfigError(
            f"{opened.folder} holds adapters alone; write them with megalith lora export, or merge them with their "
            "base first: megalith lora merge"
        )
    origin = _origin(opened, config.model)
    chosen, notes = export_family(config.model, origin, family)
    notes += conversion_notes(config.model)
    groups = chosen.groups(config.model)
    dtypes = _dtypes(groups, config.train, origin, dtype)
    tokenizer = saved_tokenizer(opened.tokenizer_folder)
    tensors = {name: (dtypes[name], shape) for group in groups for name, shape in group.sources.items()}
    codes = quantized_names(groups, quantize, chosen.not_in_fp8) if quantize else set()
    notes += notes_on_blocks(tensors, codes, quantize) if quantize else []
    stored = with_scales(tensors, codes, quantize) if quantize else tensors
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
                whole = dtypes | dict.fromkeys(codes, torch.float32)
                for name, value in to_theirs(group, tensor, whole, scratch, first_expert=offset[0]):
                    parts = {name: value}
                    if name in codes:
                        parts = dict(zip((name, name + SUFFIX[quantize]), quantized(value, quantize)))
                    for part, values in parts.items():
                        writer.write(part, values)
                        progress.add(values.nbytes)
        model_dtype = DTYPE_NAMES[dtype] if dtype else export_dtype(config.train)
        tree = _config_json(chosen, config.model, origin, model_dtype, tokenizer)
        if quantize:
            tree["quantization_config"] = quantization_config(quantize, tensors, codes, chosen.tied)
        writer.write_json(CONFIG, tree)
        writer.write_json(GENERATION, origin.generation or _generation(tokenizer))
        notes += _write_tokenizer(writer, origin, tokenizer)
    return Export(open_location(out), chosen, opened, groups, dtypes, notes)


def merge_hf(opened: Checkpoint, path: Path) -> None:
    """Writes a checkpoint's weights into one file by Hugging Face's names, in float32, and config.json beside it unless
    one is there: `.safetensors`, or `.bin` or `.pt` for torch.load. Holds the whole model in memory.

    Raises CheckpointError for another suffix, or where the disk refuses; ConfigError where no family can say the model.
    """
    if path.suffix not in (".safetensors", ".bin", ".pt"):
        raise CheckpointError(f"the suffix of {path.name} is not known; end it in .safetensors, .bin or .pt")
    model = config_of(opened).model
    family, found = family_for(model), {}
    groups = family.groups(model)
    with Progress("merge", 4 * sum(math.prod(group.shape) for group in groups)) as progress:
        for group in groups:
            whole = torch.empty(group.shape)
            opened.fill(
                "model", {group.name: LocalShard(whole, (0,) * len(group.shape), group.shape, owned=True)}
            )
            dtypes = dict.fromkeys(group.sources, torch.float32)
            found.update({name: value.clone() for name, value in to_theirs(group, whole, dtypes)})
            progress.add(whole.nbytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if path.suffix == ".safetensors":
            save_file(found, path, metadata={"format": "pt"})
        else:
            torch.save(found, path)
        if not (path.parent / CONFIG).exists():
            (path.parent / CONFIG).write_text(json.dumps(family.write_config(model), indent=2) + "\n")
    except (OSError, RuntimeError) as error:  # torch.save tells of a full disk by the latter
        raise CheckpointError(
            f"{path} could not be written: {error}; make room, or choose another place"
        ) from error


VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def _origin(checkpoint: Checkpoint, model: ModelConfig) -> Origin:
    """The small files of the checkpoint, else of the Hugging Face folder that training began from; the tokenizer's are
    the checkpoint's where the run had another vocabulary than that folder has."""
    kept, began = read_origin(checkpoint.tokenizer_folder), model.init_from
    if kept.config is not None or not began or not is_model_folder(began):
        return kept
    theirs = read_origin(Path(began))
    contents = {file.name: read_folder_file(file) for file in theirs.files}
    vocabularies = [file for file in kept.files if file.name in VOCABULARY_FILES]
    if any(contents.get(file.name) != read_folder_file(file) for file in vocabularies):
        return replace(theirs, files=kept.files)
    return theirs


def export_family(model: ModelConfig, origin: Origin, asked: str | None = None) -> tuple[Family, list[str]]:
    """The family that a model is written as, and notes on the choice: the one asked for, its origin's, or the first
    that can say it. Raises ConfigError where none can."""
    if asked is not None:
        chosen = family_named(asked, "--family")
        try:
            chosen.write_config(model)
        except ConfigError as error:
            raise ConfigError(
                f"{chosen.architecture} cannot say this model: {error}; leave --family out"
            ) from None
        return chosen, []
    if origin.config is not None:
        try:
            chosen = family_of(origin.config, "the model's origin")
            chosen.write_config(model)
            return chosen, []
        except ConfigError:  # trained from another model's tokenizer, or changed since
            pass
    chosen = family_for(model)
    return chosen, [f"written as {chosen.architecture}, the first family that can say this model"]


def export_dtype(train: TrainConfig) -> torch.dtype:
    """What a run computes in, and so what its weights are written in."""
    return next(dtype for dtype, name in PRECISIONS.items() if name == train.precision)


def _dtypes(
    groups: list[Group], train: TrainConfig, origin: Origin, asked: str | None
) -> dict[str, torch.dtype]:
    names = [name for group in groups for name in group.sources]
    if asked is not None:
        return dict.fromkeys(names, DTYPE_NAMES[asked])
    return {name: origin.dtypes.get(name, export_dtype(train)) for name in names}


def _config_json(
    family: Family, model: ModelConfig, origin: Origin, dtype: torch.dtype, tokenizer: Tokenizer | None
) -> Tree:
    """The origin's, where it says the same model; else the family's, over what the origin has besides, where that
    says it."""
    spelled = str(dtype).removeprefix("torch.")
    if origin.config is None:
        end = tokenizer.eod if tokenizer else None
        return {
            **family.write_config(model),
            "bos_token_id": end,
            "eos_token_id": end,
            "torch_dtype": spelled,
        }
    tree, written = dict(origin.config), family.write_config(model)
    tree.pop("quantization_config", None)  # of the files that were read
    key = "dtype" if "dtype" in tree else "torch_dtype"
    besides = {name: value for name, value in tree.items() if name != "rope_parameters"}
    tokens = {name: tree[name] for name in SPECIAL_TOKENS if name in tree}
    said = next(each for each in (tree, besides | written, tokens | written) if _says(family, each, model))
    return {**said, key: spelled}


def _says(family: Family, tree: Tree, model: ModelConfig) -> bool:
    """Whether a config.json is of this family and says this model: one key may have several names there."""
    try:
        return family_of(tree, "") is family and not differences(family.read_config(tree), model)
    except ConfigError:
        return False


def _generation(tokenizer: Tokenizer | None) -> dict[str, Any]:
    end = tokenizer.eod if tokenizer else None
    return {"_from_model_config": True} | (
        {"bos_token_id": end, "eos_token_id": end} if end is not None else {}
    )


def _write_tokenizer(writer: FolderWriter, origin: Origin, tokenizer: Tokenizer | None) -> list[str]:
    """Copies the tokenizer's files; returns notes on what transformers will not find."""
    for file in origin.files:
        writer.copy(file)
    if tokenizer is None and not origin.files:
        return ["no tokenizer was written: the checkpoint has none"]
    if not origin.files:
        return [f"no tokenizer was written: transformers has nothing like {tokenizer.tokenizer_type}"]
    names = [file.name for file in origin.files]
    if "tokenizer_config.json" not in names and tokenizer is not None:
        writer.write_json("tokenizer_config.json", _tokenizer_config(names, tokenizer))
    return []


def _tokenizer_config(names: list[str], tokenizer: Tokenizer) -> Tree:
    """What transformers has to know of a tokenizer's files."""
    if "tokenizer.json" not in names and "vocab.txt" in names:
        return {"tokenizer_class": "BertTokenizer", "do_lower_case": tokenizer.lower_case}
    kind = "PreTrainedTokenizerFast" if "tokenizer.json" in names else "GPT2Tokenizer"
    end = tokenizer.decode([tokenizer.eod]) if tokenizer.eod is not None else None
    return {"tokenizer_class": kind, "eos_token": end}
