"""`megalith import-megatron`: a checkpoint of Megatron-LM as one of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.importer import write_run
from megalith.bridge.match import Match, match
from megalith.bridge.megatron.legacy import METADATA, MadeWhenRead, arguments_in, list_torch_dist, read_legacy
from megalith.bridge.megatron.megatron_names import plain_name
from megalith.bridge.megatron.table import GPT
from megalith.bridge.megatron.unpickle import load_torch
from megalith.config.rules.model_rules import check_model
from megalith.errors import CheckpointError, ConfigError

LATEST = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
EMBEDDING = "embedding.word_embeddings.weight"
PREFIXES = ("", "model.", "module.", "model.module.", "model.module.module.")
NOT_THE_MODEL = ("optimizer.", "rng_state", "rerun_state", "opt_param_scheduler")


def first_rows(stored: Any, rows: int) -> MadeWhenRead:
    """A stored tensor without the rows that pad the vocabulary."""
    shape = (min(rows, stored.shape[0]), *stored.shape[1:])
    return MadeWhenRead(stored.dtype, shape, lambda: stored.read()[:rows])


class MegatronSource:
    """A checkpoint's tensors under Megatron core's names; what `match` takes in a Hugging Face folder's place."""

    settings_name = "record of arguments"
    dtype: torch.dtype | None = None

    def __init__(self, path: Path, tensors: dict[str, Any]):
        self.path, self.tensors = path, tensors
        self._last: tuple[str, Tensor] | None = None

    def complete_names(self, family: object) -> None:
        """The names are whole."""

    def read(self, name: str) -> Tensor:
        """A tensor by its name; the last one is kept, as it is asked for a block at a time."""
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
    """Writes Megatron's newest checkpoint in `source`, or the iteration that it is, as step 0 of a run at `out`.

    Its files are pickles: they are read by an allow-list, and only with `trust`. `vocab_size` is the tokenizer's; by
    default that of the checkpoint's arguments, else the padded one. `allow` is `import_hf`'s. Returns the step. Raises
    ConfigError for a model that cannot be built here, CheckpointError for damaged files: nothing is left then.
    """
    fit = open_megatron(source, trust, vocab_size, allow)
    return write_run(fit, out, None, show_progress=show_progress)


def is_megatron_folder(path: str | Path) -> bool:
    """Whether a folder here is Megatron's: its save folder, or an iteration in it."""
    folder = Path(path)
    found = any((folder / name).is_file() for name in (LATEST, METADATA))
    return found or (folder.is_dir() and any(folder.glob("mp_rank_*")))


def arguments_of(source: str | Path, trust: bool) -> dict[str, Any]:
    """The arguments that a checkpoint keeps. Raises as `import_megatron`."""
    folder = _trusted(source, trust)
    if (folder / METADATA).is_file():
        return arguments_in(load_torch(folder / COMMON))
    return read_legacy(folder)[1]


def open_megatron(
    source: str | Path, trust: bool, vocab_size: int | None = None, allow: bool = False
) -> Match:
    """The tensors of a checkpoint, matched with the model of its arguments. As `import_megatron`."""
    folder = _trusted(source, trust)
    if (folder / METADATA).is_file():
        tensors, args = list_torch_dist(folder), arguments_in(load_torch(folder / COMMON))
    else:
        tensors, args = read_legacy(folder)
    if not args:
        raise CheckpointError(
            f"{folder} has no arguments of its run, which say what the model is; it cannot be read"
        )
    args = dict(args, vocab_size=vocab_size or args.get("vocab_size") or args.get("padded_vocab_size"))
    try:
        model = GPT.read_config(args)
        check_model(model)
    except ConfigError as error:
        told = str(error.within(folder)).replace("config.json has", "its args have")
        raise ConfigError(*told.split("\n")) from None
    tensors = _core_names(folder, tensors)
    for name in (EMBEDDING, "output_layer.weight"):
        if name in tensors and tensors[name].shape:
            tensors[name] = first_rows(tensors[name], model.vocab_size)
    return match(MegatronSource(folder, tensors), GPT, model, allow)


def _core_names(folder: Path, tensors: dict[str, Any]) -> dict[str, Any]:
    """The model's tensors alone, without what stands before their names, norms under names of their own."""
    prefix = next((prefix for prefix in PREFIXES if prefix + EMBEDDING in tensors), None)
    if prefix is None:
        raise CheckpointError(
            f"{folder} has no {EMBEDDING}, so it is no checkpoint of Megatron core's GPT; models from before Megatron "
            "core cannot be read"
        )
    named = {}
    for name, tensor in tensors.items():
        if not name.startswith(prefix) or name.startswith(NOT_THE_MODEL) or "_extra_state" in name:
            continue
        named[plain_name(name.removeprefix(prefix))] = tensor
    return named


def _trusted(source: str | Path, trust: bool) -> Path:
    """The iteration's folder, whose pickles may be read."""
    folder = _iteration(Path(source))
    if not trust:
        raise CheckpointError(
            f"{source} is of pickles, which can name code to run; they are read by a list of what is allowed, but only "
            "when you trust where they come from: give --trust, or in a run file checkpoint.trust: true"
        )
    return folder


def _iteration(folder: Path) -> Path:
    latest = folder / LATEST
    if not latest.is_file():
        if not folder.is_dir():
            raise CheckpointError(
                f"there is no folder {folder}; give Megatron's save folder or one iter_NNNNNNN in it"
            )
        return folder
    text = latest.read_text(encoding="utf-8", errors="replace").strip()
    if not re.fullmatch("release|[0-9]{1,15}", text):
        raise CheckpointError(
            f"{latest} holds {text!r}, which is no iteration; give the folder iter_NNNNNNN itself"
        )
    return folder / ("release" if text == "release" else f"iter_{int(text):07d}")
