"""`megalith import-megatron`: convert a checkpoint of Megatron-LM.

legacy_reader.py and torch_dist_reader.py read the two formats of its checkpoints.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from megalith.bridge.family import Family
from megalith.bridge.importer import write_run
from megalith.bridge.match import Match, match
from megalith.bridge.megatron.core_arguments import vocabulary_size, warn_of_ignored_arguments
from megalith.bridge.megatron.hybrid_rows import DELTA_NORM
from megalith.bridge.megatron.legacy_reader import METADATA, read_legacy
from megalith.bridge.megatron.megatron_names import LAYER, plain_name
from megalith.bridge.megatron.table import BERT, GPT, HYBRID
from megalith.bridge.megatron.torch_dist_reader import LazyTensor, read_torch_dist
from megalith.checkpoint.steps import CHECKPOINTS, list_steps
from megalith.config import ModelConfig
from megalith.config.rules.model_rules import check_model
from megalith.errors import CheckpointError, ConfigError, shorten
from megalith.small_files import read_small_file

LATEST = "latest_checkpointed_iteration.txt"
ITERATIONS, RELEASE = "iter_[0-9]*", "release"
HYBRID_NORM = "decoder.final_norm."
EMBEDDING = "embedding.word_embeddings.weight"
PREFIXES = ("", "model.", "module.", "model.module.", "model.module.module.")
NOT_THE_MODEL = ("optimizer.", "rng_state", "rerun_state", "opt_param_scheduler")


def first_rows(stored: Any, rows: int) -> LazyTensor:
    """Return a stored tensor without vocabulary padding."""
    shape = (min(rows, stored.shape[0]), *stored.shape[1:])
    return LazyTensor(stored.dtype, shape, lambda: stored.read()[:rows])


class MegatronSource:
    """A checkpoint's tensors under Megatron core's names, with the interface of `SourceFolder` that `match` needs."""

    settings_name = "record of arguments"
    dtype: torch.dtype | None = None
    config: ClassVar[dict[str, Any]] = {}

    def __init__(self, path: Path, tensors: dict[str, Any]):
        self.path, self.tensors = path, tensors
        self._last: tuple[str, Tensor] | None = None

    def normalize_names(self, family: object) -> None:
        """Do nothing: the names are complete."""

    def read(self, name: str) -> Tensor:
        """Return a tensor by name. The last one is cached, because callers read a tensor in several blocks."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self.tensors[name].read())
        return self._last[1]


def import_megatron(
    source: str | Path,
    out: str | Path,
    *,
    trust: bool = False,
    vocab_size: int | None = None,
    allow: bool = False,
    show_progress: bool = True,
) -> Path:
    """Write a Megatron checkpoint as step 0 of a run.

    Args:
        source: Megatron's save folder, whose newest iteration is used, or the folder of an iteration.
        out: folder or URL of the run; must not exist.
        trust: read pickles that name Megatron's classes. The classes are never loaded (unpickle.py).
        vocab_size: the tokenizer's vocabulary size; default: the size in the checkpoint's arguments, else the padded
            size.
        allow: initialize missing tensors and ignore extra ones.
        show_progress: draw a progress bar.

    Returns:
        The folder of the step.

    Raises:
        ConfigError: the model is not supported.
        CheckpointError: files are damaged. Nothing is left at `out`.
    """
    matched = open_megatron(source, trust, vocab_size, allow)
    return write_run(matched, out, None, show_progress=show_progress)


def is_megatron_folder(path: str | Path) -> bool:
    """Return True if a local folder is Megatron's save folder or an iteration of it, even if damaged.

    A folder with steps of a Megalith run is not, even if it has files for Megatron's scripts.
    """
    folder = Path(path)
    if (folder / CHECKPOINTS).is_dir() and list_steps(folder / CHECKPOINTS):
        return False
    has_files = any((folder / name).is_file() for name in (LATEST, METADATA))
    has_files = has_files or any(any(folder.glob(name)) for name in ("mp_rank_*", "*.distcp", ITERATIONS))
    return has_files or ((folder / RELEASE).is_dir() and is_megatron_folder(folder / RELEASE))


def read_arguments(source: str | Path, trust: bool) -> dict[str, Any]:
    """Return the arguments stored in a checkpoint. Raises the same errors as `import_megatron`."""
    return _read(_iteration(Path(source)), trust)[1]


def _read(folder: Path, trust: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the arguments of an iteration's folder."""
    _refuse_other_formats(folder)
    return (read_torch_dist if os.path.lexists(folder / METADATA) else read_legacy)(folder, trust)


def _refuse_other_formats(folder: Path) -> None:
    """Raise CheckpointError for NeMo's and Megatron-Bridge's folders and for tensors stored by zarr."""
    if (folder / "run_config.yaml").is_file() or any(
        (at / "context").is_dir() for at in (folder, folder.parent)
    ):
        raise CheckpointError(
            f"{folder} was written by Megatron-Bridge or NeMo, which do not save Megatron's arguments, so the model's "
            "shape is unknown; export it to Hugging Face's format there (AutoBridge.export_ckpt, or nemo llm export), "
            "and use megalith import-hf"
        )
    backend = folder / "metadata.json"
    if backend.is_file() and b'"zarr"' in read_small_file(backend, folder, largest=65536):
        raise CheckpointError(
            f"{folder} stores its tensors in zarr's format, which is not supported; load it with Megatron core 0.14 or "
            "older, and save it with --ckpt-format torch_dist --dist-ckpt-format torch_dist"
        )


def open_megatron(
    source: str | Path, trust: bool, vocab_size: int | None = None, allow: bool = False
) -> Match:
    """Open a Megatron checkpoint and match its tensors with the model that its stored arguments describe.

    For the arguments and errors, see `import_megatron`.
    """
    folder = _iteration(Path(source))
    tensors, args = _read(folder, trust)
    if not args:
        raise CheckpointError(
            f"{folder} has no saved Megatron arguments (args), so the model's shape is unknown; use a checkpoint "
            "that has them"
        )
    tensors = _model_tensors(folder, tensors)
    args = _with_vocabulary(args, tensors[EMBEDDING], vocab_size)
    try:
        family = _family(tensors)
        model = family.read_config(args)
        check_model(model)
    except ConfigError as error:
        message = str(error.within(folder)).replace("config.json has", "its args have")
        raise ConfigError(*message.split("\n")) from None
    for name in (EMBEDDING, "output_layer.weight", "output_layer.bias"):
        if name in tensors and tensors[name].shape:
            tensors[name] = first_rows(tensors[name], model.vocab_size)
    tensors = _with_plain_norms(tensors, model)
    return match(MegatronSource(folder, tensors), family, model, allow)


def _with_vocabulary(args: dict[str, Any], embedding: Any, vocab_size: int | None) -> dict[str, Any]:
    """Return the arguments with the vocabulary's size, after warning of arguments without effect."""
    rows = embedding.shape[0] if embedding.shape else 0
    args = dict(args, vocab_size=vocab_size or vocabulary_size(args, rows))
    padding = embedding.read()[args["vocab_size"] :] if not vocab_size and args["vocab_size"] < rows else None
    warn_of_ignored_arguments(args, rows, padding is None or bool((padding == padding[:1]).all()))
    return args


def _with_plain_norms(tensors: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Return the tensors with 1 added to the norms of gated delta nets.

    With layernorm_zero_centered_gamma Megatron's norms multiply by 1 + weight; Megalith's delta nets multiply by the
    weight.
    """
    if not model.layernorm_zero_centered_gamma:
        return tensors
    return {
        name: _plus_one(tensor) if name.endswith(DELTA_NORM) else tensor for name, tensor in tensors.items()
    }


def _plus_one(tensor: Any) -> LazyTensor:
    return LazyTensor(tensor.dtype, tensor.shape, lambda: tensor.read().float() + 1)


def _family(names: Collection[str]) -> Family:
    """Infer the family from the tensor names; Megatron's arguments do not name it."""
    stacks = {match[1] for name in names if (match := LAYER.match(name))}
    if stacks == {"decoder", "encoder"}:
        raise ConfigError(
            "it has an encoder and a decoder, and Megatron's T5 is not supported; use Hugging Face's format"
        )
    if any(name.startswith(HYBRID_NORM) for name in names):
        return HYBRID
    return BERT if stacks == {"encoder"} else GPT


def _model_tensors(folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the model's tensors under table.py's names, without prefixes."""
    prefix = next((prefix for prefix in PREFIXES if prefix + EMBEDDING in tensors), None)
    if prefix is None:
        raise CheckpointError(
            f"{folder} has no {EMBEDDING}, so it is not a checkpoint of Megatron core's GPT or BERT; models from "
            "before Megatron core cannot be read"
        )
    named = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix) or name.startswith(NOT_THE_MODEL) or "_extra_state" in name:
            continue
        named[plain_name(name.removeprefix(prefix))] = tensor
    return named


def _iteration(folder: Path) -> Path:
    latest = folder / LATEST
    if not latest.is_file():
        if not folder.is_dir():
            raise CheckpointError(
                f"there is no folder {folder}; pass Megatron's save folder, or one iter_NNNNNNN folder in it"
            )
        if existing := _iterations(folder):
            raise CheckpointError(
                f"{folder} has no {LATEST}, which contains the number of the newest iteration; pass one of "
                f"its folders: {shorten(existing)}"
            )
        return folder
    try:
        text = read_small_file(latest, folder, largest=4096).decode(errors="replace").strip()
    except OSError as error:
        raise CheckpointError(
            f"{latest} cannot be read: {error.strerror}; pass the folder iter_NNNNNNN itself"
        ) from None
    if not re.fullmatch(f"{RELEASE}|[0-9]{{1,15}}", text):
        raise CheckpointError(
            f"{latest} contains {text!r}, which is not an iteration; pass the folder iter_NNNNNNN itself"
        )
    iteration = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not iteration.is_dir():
        raise CheckpointError(
            f"{latest} points to {iteration.name}, which is missing (found: "
            f"{shorten(_iterations(folder)) or 'none'}); copy {iteration.name} from the original checkpoint, or pass "
            "the folder of another iteration"
        )
    return iteration


def _iterations(folder: Path) -> list[str]:
    """Return the names of the iterations' folders in a save folder."""
    return sorted(path.name for name in (ITERATIONS, RELEASE) for path in folder.glob(name) if path.is_dir())
