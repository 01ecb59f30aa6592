"""Reader of a Hugging Face folder: its config.json and the tensors of its shards.

Tensors are listed with dtype and shape and read one at a time. safetensors files are read like a checkpoint's
(checkpoint/files.py), `.bin` files by torch.load(weights_only=True), which builds nothing but tensors.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalith.bridge.family import Family
from megalith.bridge.fused_experts import has_rows_per_expert, split_fused_experts
from megalith.bridge.multimodal import language_config, language_tensors, wrapper_of
from megalith.bridge.quantized import MXFP4Experts, unpack_quantized
from megalith.checkpoint.files import DTYPE_CODES, SafetensorsEntry, list_safetensors
from megalith.checkpoint.manifest import fetch_error
from megalith.data.tokenizers.hub import local_folder
from megalith.errors import CheckpointError, shorten
from megalith.models.vocabulary import VOCABULARY
from megalith.remote import StorePath, open_location
from megalith.small_files import read_small_file
from megalith.temporary_folders import TemporaryFolder

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX_SUFFIX = ".index.json"
ADAPTER = "adapter_config.json"  # of PEFT
WEIGHTS = (  # an index or the only file; the first that exists is read
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin",
)  # fmt: skip
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
NAMED_TEMPLATES = "additional_chat_templates"  # folder of further chat templates, NAME.jinja
FETCHED_ENDINGS = (".safetensors", INDEX_SUFFIX)
T = TypeVar("T")
OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
LONGEST_NAME = 255  # bytes of a file name, on all common file systems
DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SourceFolder:
    """A Hugging Face folder with its tensors, each read on demand."""

    settings_name = CONFIG

    def __init__(self, path: str | Path):
        """Open a folder. For a multimodal model, only the tensors of the language model are listed.

        Args:
            path: a folder, a URL of one, or a hub name.

        Raises:
            CheckpointError: files are missing or damaged.
            DataError: the hub name is not available.
        """
        self.path = resolve_folder(path)
        self.wrapper = wrapper_of(read_json(self.path / CONFIG))
        self.config = read_config_json(self.path)
        tensors = list_weights(self.path)
        if self.wrapper is not None:
            tensors = language_tensors(tensors)
        self.tensors = unpack_quantized(tensors, self.config, DTYPE_CODES[self.dtype or torch.bfloat16])

    @property
    def notes(self) -> list[str]:
        """Notes on tensors that are not read."""
        if self.wrapper is None:
            return []
        return [
            f"only the language model of this {self.wrapper} is read; the tower for images or audio and its projector "
            "are ignored"
        ]

    @property
    def dtype(self) -> torch.dtype | None:
        """Weight dtype according to config.json, or None if it names none."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype") or "")
        return DTYPE_NAMES.get(name.removeprefix("torch."))

    def normalize_names(self, family: Family) -> None:
        """Rename tensors to their current full names. Affects older files, files of a bare model (as GPT-2 was
        published), and files of a model with a head if the family is the bare model.
        """
        self.tensors = with_current_names(self.tensors, family)
        if not any(name.startswith(family.prefix) for name in self.tensors):
            roots = family.roots_outside_prefix
            self.tensors = {
                name if name.partition(".")[0] in roots else family.prefix + name: stored
                for name, stored in self.tensors.items()
            }
        if family.prefix_with_head:
            self.tensors = {
                name.removeprefix(family.prefix_with_head): stored for name, stored in self.tensors.items()
            }
        for copy in family.embedding_copies:
            embedding = family.tensors[VOCABULARY[0]].names[0]
            if copy in self.tensors and embedding not in self.tensors:
                self.tensors[embedding] = self.tensors.pop(copy)
        if has_rows_per_expert(family.tensors):
            self.tensors = split_fused_experts(self.tensors)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor by name."""
        return self.tensors[name].read()

    def read_per_expert(self, name: str) -> torch.Tensor | MXFP4Experts:
        """Return a tensor that can be indexed by expert; experts in MXFP4 are read one at a time."""
        stored = self.tensors[name]
        return stored if isinstance(stored, MXFP4Experts) else stored.read()


def with_current_names(tensors: Mapping[str, T], family: Family) -> dict[str, T]:
    """Return tensors by name, with the current endings of names for those of older files."""
    tensors = dict(tensors)
    for old, new in (OLD_NORMS | family.renamed).items():
        ends = {name: name.removesuffix(old) + new for name in tensors if name.endswith(old)}
        tensors = {ends.get(name, name): stored for name, stored in tensors.items()}
    return tensors


def is_model_folder(path: str | Path | StorePath) -> bool:
    """Return True if a folder has Hugging Face's config.json."""
    return path_exists(open_location(path) / CONFIG)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the paths of a tokenizer's files in a folder, with those of its named chat templates."""
    named = sorted(folder.glob(f"{NAMED_TEMPLATES}/*.jinja"))
    return [*(folder / name for name in TOKENIZER_FILES if (folder / name).exists()), *named]


def name_in_folder(file: Path) -> str:
    """Return the name of a file of `tokenizer_files` relative to its folder."""
    return f"{NAMED_TEMPLATES}/{file.name}" if file.parent.name == NAMED_TEMPLATES else file.name


def path_exists(path: Path | StorePath) -> bool:
    """Return True if a file or folder exists. Raises CheckpointError if an object store does not answer."""
    try:
        return path.exists()
    except OSError as error:
        if isinstance(path, StorePath):
            raise fetch_error(path, error) from error
        raise


def resolve_folder(path: str | Path) -> Path:
    """Return the local folder for a path, URL or hub name.

    A hub name is looked up in the local cache, and downloaded if the hub's settings allow it. A URL is downloaded to a
    temporary folder once per process.
    """
    folder = open_location(path)
    if isinstance(folder, StorePath):
        return _fetched(folder)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file; pass the folder that contains {CONFIG} and the weights")
    return local_folder(
        str(path),
        (
            CONFIG,
            GENERATION,
            *TOKENIZER_FILES,
            f"{NAMED_TEMPLATES}/*.jinja",
            "*.safetensors",
            "*" + INDEX_SUFFIX,
        ),
    )


@cache
def _fetched(folder: StorePath) -> Path:
    if not is_model_folder(folder):
        raise CheckpointError(f"{folder} has no {CONFIG}; pass the URL of a Hugging Face model's folder")
    made = TemporaryFolder("megalith_model_")
    atexit.register(made.remove)
    temporary = made.path
    try:
        for file in folder.iterdir():
            if file.name in (CONFIG, GENERATION, *TOKENIZER_FILES) or file.name.endswith(FETCHED_ENDINGS):
                file.fetch(temporary / file.name)
            elif file.name == NAMED_TEMPLATES:
                (temporary / NAMED_TEMPLATES).mkdir()
                for template in file.iterdir():
                    if template.name.endswith(".jinja"):
                        template.fetch(temporary / NAMED_TEMPLATES / template.name)
    except OSError as error:
        raise fetch_error(folder, error) from error
    return temporary


def read_folder_file(path: Path) -> bytes:
    """Return the content of a small file of a folder. Raises CheckpointError; see small_files.py."""
    folder = path.parent.parent if path.parent.name == NAMED_TEMPLATES else path.parent
    try:
        return read_small_file(path, folder)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {_instead_of(folder)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; fetch it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises CheckpointError if there is none."""
    try:
        content = json.loads(read_folder_file(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not contain a JSON object; fetch it again")
    return content


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the config.json of a folder. For a multimodal model, return its language model's. Raises
    CheckpointError.
    """
    return language_config(read_json(folder / CONFIG))


def _instead_of(folder: Path) -> str:
    """Return advice for a model folder in which a required file is missing."""
    if any(folder.glob("*.distcp")):
        return (
            "this is a checkpoint of torch.distributed.checkpoint: convert it to Hugging Face's format with the "
            "program that wrote it (torchtitan: scripts/checkpoint_conversion/convert_to_hf.py), or try "
            "`megalith import-megatron`"
        )
    if any(folder.glob("*.safetensors")):
        return f"copy the model's {CONFIG} and its tokenizer's files into the folder of the weights"
    return "give a folder of a Hugging Face model"


def list_weights(folder: Path) -> dict[str, SafetensorsEntry | Pickled]:
    """Return the tensors of a folder by name. Raises CheckpointError if files are missing, damaged or ambiguous."""
    file = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if file is None:
        raise CheckpointError(f"{folder} has no weights; it needs one of {', '.join(WEIGHTS)}")
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{folder} has a model and an adapter ({ADAPTER}), which transformers would add to the model; "
            "move the adapter's files to a separate folder, and set lora.load to that folder"
        )
    whole = file.with_name(file.name.removesuffix(INDEX_SUFFIX))
    if whole != file and whole.exists() and whole.name not in _weight_map(file).values():
        raise CheckpointError(
            f"{folder} has {whole.name} and {file.name}, which lists other files, and loaders disagree on which of "
            "them is the model; remove the outdated one"
        )
    return _list_shards(file) if file.name.endswith(INDEX_SUFFIX) else list_tensors(file)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map of tensors to files; fetch it again")
    return weight_map


def _list_shards(index: Path) -> dict[str, SafetensorsEntry | Pickled]:
    weight_map = _weight_map(index)
    tensors: dict[str, SafetensorsEntry | Pickled] = {}
    for file in sorted(set(weight_map.values())):
        if len(file.encode(errors="surrogatepass")) > LONGEST_NAME:
            raise CheckpointError(
                f"{index} has a file name of {len(file):,} characters ({file[:40]}…), more than file systems "
                "allow; fetch the index again"
            )
        if Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(
                f"{index} names the file {file!r}, which is outside its folder; do not trust this index"
            )
        listed = list_tensors(index.parent / file)
        missing = [name for name, at in weight_map.items() if at == file and name not in listed]
        if missing:
            raise CheckpointError(
                f"{index.parent / file} lacks tensors that the index lists: {shorten(missing)}; "
                "fetch it again"
            )
        tensors |= listed
    return tensors


@dataclass(frozen=True)
class Pickled:
    """A tensor of a `.bin` file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    key: str

    def read(self) -> Tensor:
        """Return the tensor, memory-mapped if torch can map the file."""
        return _load(self.file)[self.key]


def list_tensors(file: Path) -> dict[str, SafetensorsEntry | Pickled]:
    """Return the tensors of a file by name. Raises CheckpointError if it is missing, damaged or holds anything else."""
    if not file.is_file():
        problem = "is not a file" if file.exists() else "is missing"
        raise CheckpointError(f"{file} {problem}; fetch the whole folder again")
    if file.suffix == ".safetensors":
        return list_safetensors(file, "fetch it again")
    return {
        name: Pickled(file, DTYPE_CODES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape), name)
        for name, tensor in _load(file).items()
    }


@lru_cache(maxsize=1)  # older files cannot be mapped and are read into memory, so only one is cached
def _load(file: Path) -> dict[str, Tensor]:
    try:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # torch can map only the zip files that it has written since 1.6
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise any exception
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{file} cannot be read as tensors only ({reason}), and code in it is never run; "
            "fetch it again, or use the model in safetensors"
        ) from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise CheckpointError(
            f"{file} contains something other than named tensors; use the model's weights in safetensors"
        )
    return content
