"""`megalith import-megatron`: convert a checkpoint of Megatron-LM.

The legacy format is `mp_rank_TT[_PPP]/model_optim_rng.pt`, one file per tensor and pipeline rank. Each tensor rank has
a part of each matrix, by rows or columns; each pipeline rank numbers its layers from 0. With interleaving, a file
contains `model0`, `model1`, …: chunk v of stage p follows chunk v of all earlier stages.

The `torch_dist` format is a torch.distributed.checkpoint directory. `.metadata` lists the shards of each tensor with
their position in the `.distcp` files; each shard is a tensor written by torch.save. Identical layers are stacked in one
tensor with the layers as first dimension.
"""

from __future__ import annotations

import io
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.family import MOST_LAYERS, Family
from megalith.bridge.importer import write_run
from megalith.bridge.match import Match, match
from megalith.bridge.megatron.megatron_names import (
    LATENTS,
    LAYER,
    join_shards,
    layer_of,
    plain_name,
    tp_split,
    unstack_experts,
)
from megalith.bridge.megatron.table import BERT, GPT
from megalith.bridge.megatron.unpickle import load_pickle, load_torch
from megalith.checkpoint.extent import Extent, covers_exactly
from megalith.checkpoint.files import DTYPE_CODES
from megalith.checkpoint.steps import CHECKPOINTS, list_steps
from megalith.config.rules.model_rules import check_model
from megalith.errors import CheckpointError, ConfigError, shorten
from megalith.small_files import read_small_file

FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor stored in the parts of the TP ranks."""

    parts: list[Tensor]
    kind: str  # "rows", "columns", "gated", or "copies"

    @property
    def dtype(self) -> str:
        return DTYPE_CODES.get(self.parts[0].dtype, str(self.parts[0].dtype))

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        if self.kind != "copies":
            shape[1 if self.kind == "columns" else 0] *= len(self.parts)
        return tuple(shape)

    def read(self) -> Tensor:
        """Return the joined tensor."""
        return join_shards(self.parts, self.kind)


def read_legacy(folder: Path, trust: bool) -> tuple[dict[str, JoinedTensor], dict[str, Any]]:
    """Return all tensors by their names in the full model, and Megatron's arguments. Raises CheckpointError."""
    states = _files(folder, trust)
    first = next(iter(states.values()))
    args = arguments_in(first)
    tensor_ranks = 1 + max(tp for tp, _ in states)
    stages = 1 + max(pp for _, pp in states)
    if len(states) != tensor_ranks * stages:
        raise CheckpointError(
            f"{folder} has {len(states)} of {tensor_ranks} × {stages} (tensor × pipeline) rank folders; copy the rest"
        )
    chunks = sorted(key for key in first if isinstance(key, str) and re.fullmatch(r"model\d*", key))
    try:
        if (ranks := args.get("expert_model_parallel_size") or 1) > 1:
            raise CheckpointError(
                f"{folder} is of {ranks} expert-parallel ranks, whose legacy files cannot be joined; save it with "
                "--ckpt-format torch_dist"
            )
        experts = int(args.get("num_experts") or 0)
        for state in states.values():
            state.update({chunk: unstack_experts(state[chunk], experts) for chunk in chunks})
        gated = bool(args.get("swiglu") or args.get("quick_geglu"))
        latents = _latent_rows(args)
        return _join_ranks(states, chunks, tensor_ranks, stages, gated, latents), args
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder} is damaged ({error!r}); copy the checkpoint again") from None


def _latent_rows(args: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of rows of MLA's down projections."""
    if not args.get("multi_latent_attention"):
        return {}
    rows = args.get("q_lora_rank") or 0, args["kv_lora_rank"] + args["qk_pos_emb_head_dim"]
    return dict(zip(LATENTS, rows))


def arguments_in(state: Any) -> dict[str, Any]:
    """Return the run's arguments from a saved state; empty if there are none."""
    args = state.get("args") if isinstance(state, dict) else None
    return dict(vars(args)) if isinstance(args, Namespace) else {}


def _join_ranks(
    states: Mapping[tuple[int, int], dict[str, Any]],
    chunks: list[str],
    tensor_ranks: int,
    stages: int,
    gated: bool,
    latents: Mapping[str, int],
) -> dict[str, JoinedTensor]:
    tensors: dict[str, JoinedTensor] = {}
    layer_offset = 0
    for chunk in chunks:
        for pp in range(stages):
            shards = [states[tp, pp][chunk] for tp in range(tensor_ranks)]
            layers = {layer for name in shards[0] if (layer := layer_of(name)) is not None}
            for name, value in shards[0].items():
                if isinstance(value, Tensor):
                    parts = [shard[name] for shard in shards]
                    latent_rows = latents.get(name.rpartition(".self_attention.")[2])
                    kind = tp_split(name, gated, "copies" if value.shape[:1] == (latent_rows,) else "rows")
                    dimensions = {"copies": 0, "columns": 2}.get(kind, 1)
                    if value.ndim < dimensions or any(part.shape != value.shape for part in parts):
                        raise ValueError(f"{name} is {[list(part.shape) for part in parts]}")
                    tensors[_renumber(name, layer_offset)] = JoinedTensor(parts, kind)
            layer_offset += len(layers)
    return tensors


def _renumber(name: str, layers: int) -> str:
    return LAYER.sub(lambda match: f"{match[1]}.layers.{int(match[2]) + layers}.", name)


def _files(folder: Path, trust: bool) -> dict[tuple[int, int], dict[str, Any]]:
    states = {}
    for path in sorted(folder.iterdir()):
        if match := RANK.fullmatch(path.name):
            states[int(match[1]), int(match[2] or 0)] = load_torch(path / FILE, folder, trust)
    if not states and any(folder.glob("*.distcp")):
        raise CheckpointError(
            f"{folder} has .distcp files, but no {METADATA}, which is written last: the save or a copy is incomplete; "
            "give an earlier iteration"
        )
    if not states or not all(isinstance(state, dict) for state in states.values()):
        raise CheckpointError(f"{folder} has no {FILE} of Megatron; give a folder with mp_rank_00 in it")
    return states


METADATA = ".metadata"
COMMON, COMMON_STATE = "common.pt", "common_state/shard_0_1"
STACKED = re.compile(r"(decoder|encoder)\.layers\.")
EXPERTS = ".experts.experts."


@dataclass(frozen=True)
class StoredShard:
    """A stored shard of a tensor: its box and the bytes of a file."""

    extent: Extent
    file: Path
    start: int
    length: int

    def bytes(self) -> bytes:
        """Return the shard's bytes in the file."""
        with open(self.file, "rb") as file:
            file.seek(self.start)
            return file.read(self.length)

    def read(self) -> Tensor:
        """Return the shard's values."""
        try:
            values = torch.load(io.BytesIO(self.bytes()), map_location="cpu", weights_only=True)
            return values.view(self.extent.shape)
        except Exception as error:  # damaged files raise any exception
            reason = str(error).strip().split("\n")[0]
            raise CheckpointError(
                f"{self.file} has no tensor {list(self.extent.shape)} at byte {self.start} ({reason}); copy the "
                "checkpoint again"
            ) from None


@dataclass(frozen=True)
class DistributedTensor:
    """A tensor in shards, or one layer or expert of a stack: `at` is its index there."""

    stored_shape: tuple[int, ...]
    dtype: str
    shards: list[StoredShard]
    at: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored_shape[len(self.at) :]

    def read(self) -> Tensor:
        """Return the tensor from the shards that overlap it."""
        box = Extent(self.at + (0,) * len(self.shape), (1,) * len(self.at) + self.shape)
        out: Tensor | None = None
        for shard in self.shards:
            both = shard.extent.intersection(box)
            if both is not None:
                values = shard.read()
                out = torch.empty(box.shape, dtype=values.dtype) if out is None else out
                out[both.slices(box)] = values[both.slices(shard.extent)]
        return torch.empty(self.shape) if out is None else out.view(self.shape)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor computed from stored ones when it is read."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def gate_and_up(gate: DistributedTensor, up: DistributedTensor) -> LazyTensor:
    """Return a gated matrix whose halves are stored as `NAME_w` and `NAME_v`."""
    shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
    return LazyTensor(gate.dtype, shape, lambda: torch.cat([gate.read(), up.read()]))


def read_torch_dist(
    folder: Path, trust: bool
) -> tuple[dict[str, DistributedTensor | LazyTensor], dict[str, Any]]:
    """Return all tensors by name, with one entry per layer and expert, and the arguments. Raises CheckpointError."""
    metadata = load_pickle(folder / METADATA, folder, trust)
    try:
        entries = {
            name: entry for name, entry in metadata.state_dict_metadata.items() if hasattr(entry, "chunks")
        }
        where = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): info
            for index, info in metadata.storage_data.items()
        }
        args = arguments_in(_common_state(folder, where, trust))
        tensors: dict[str, DistributedTensor] = {}
        for name, entry in entries.items():
            shards = []
            for chunk in entry.chunks:
                extent = Extent(tuple(chunk.offsets), tuple(chunk.sizes))
                shards.append(_stored(folder, extent, where[name, extent.offset]))
            dtype = entry.properties.state[0]  # (dtype, layout, requires_grad, memory_format, pin_memory)
            code = DTYPE_CODES.get(dtype, str(dtype))
            tensor = DistributedTensor(tuple(entry.size), code, shards)
            _check_shards(folder, name, tensor)
            tensors |= _split_stacks(name, tensor)
        return _join_gates(tensors), args
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"{folder / METADATA} is damaged ({error!r}); copy the checkpoint again"
        ) from None


def _stored(folder: Path, extent: Extent, info: Any) -> StoredShard:
    if Path(info.relative_path).name != info.relative_path:
        raise CheckpointError(
            f"{folder} names the file {info.relative_path!r}, which is outside it; it is not to be trusted"
        )
    return StoredShard(extent, folder / info.relative_path, info.offset, info.length)


def _common_state(folder: Path, where: Mapping[tuple[str, tuple[int, ...]], Any], trust: bool) -> Any:
    """Return the state besides the tensors: a separate file, or from core 0.19 on an object among the shards."""
    if (COMMON_STATE, ()) not in where or os.path.lexists(folder / COMMON):
        return load_torch(folder / COMMON, folder, trust)
    stored = _stored(folder, Extent((), ()), where[COMMON_STATE, ()])
    _check_stored(stored, COMMON_STATE)
    [state] = load_torch(stored.file, folder, trust, stored.bytes())
    return state


def _check_stored(shard: StoredShard, name: str) -> None:
    if not shard.file.is_file():
        raise CheckpointError(f"{shard.file} is missing, which holds {name}; copy the checkpoint again")
    if not 0 <= shard.start <= shard.start + shard.length <= shard.file.stat().st_size:
        raise CheckpointError(f"{shard.file} ends before {name} does; copy the checkpoint again")


def _check_shards(folder: Path, name: str, tensor: DistributedTensor) -> None:
    for shard in tensor.shards:
        _check_stored(shard, name)
    if not covers_exactly(tensor.stored_shape, [shard.extent for shard in tensor.shards]):
        raise CheckpointError(f"{folder}: the shards of {name} do not cover it; copy the checkpoint again")


def _split_stacks(name: str, tensor: DistributedTensor) -> dict[str, DistributedTensor]:
    """Return the entries of a stack of layers, experts or both, under their unstacked names."""
    stack, names = STACKED.search(name), {(): name}
    if stack and not name[stack.end() :].split(".")[0].isdigit():
        before, rest = name[: stack.end()], name[stack.end() :]
        names = {(layer,): f"{before}{layer}.{rest}" for layer in range(_count(name, tensor, 0))}
    if EXPERTS in name and not name.partition(EXPERTS)[2].split(".")[0].isdigit():
        names = {
            (*at, expert): one.replace(EXPERTS, f"{EXPERTS}{expert}.")
            for at, one in names.items()
            for expert in range(_count(name, tensor, len(at)))
        }
    return {
        one.replace(EXPERTS, ".experts.local_experts."): DistributedTensor(
            tensor.stored_shape, tensor.dtype, tensor.shards, at
        )
        for at, one in names.items()
    }


def _count(name: str, tensor: DistributedTensor, dimension: int) -> int:
    if tensor.stored_shape[dimension] > MOST_LAYERS:
        raise ValueError(f"{name} has {tensor.stored_shape[dimension]:,} layers or experts")
    return tensor.stored_shape[dimension]


def _join_gates(tensors: dict[str, DistributedTensor]) -> dict[str, DistributedTensor | LazyTensor]:
    halves = {name[:-2] for name in tensors if name.endswith("_w") and f"{name[:-2]}_v" in tensors}
    joined = {name: gate_and_up(tensors.pop(f"{name}_w"), tensors.pop(f"{name}_v")) for name in halves}
    return {**tensors, **joined}


LATEST = "latest_checkpointed_iteration.txt"
ITERATIONS, RELEASE = "iter_[0-9]*", "release"
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

    def __init__(self, path: Path, tensors: dict[str, Any]):
        self.path, self.tensors = path, tensors
        self._last: tuple[str, Tensor] | None = None

    def normalize_names(self, family: object) -> None:
        """Do nothing: the names are complete."""

    def read(self, name: str) -> Tensor:
        """Return a tensor by name. The last one is cached, because it is read in blocks."""
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
        vocab_size: the tokenizer's; default: that in the checkpoint's arguments, else the padded size.
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
    """Return whether a local folder is Megatron's save folder or an iteration of it, even if damaged.

    A folder with steps of a Megalith run is not, even if it has files for Megatron's scripts.
    """
    folder = Path(path)
    if (folder / CHECKPOINTS).is_dir() and list_steps(folder / CHECKPOINTS):
        return False
    has_files = any((folder / name).is_file() for name in (LATEST, METADATA))
    has_files = has_files or any(any(folder.glob(name)) for name in ("mp_rank_*", "*.distcp", ITERATIONS))
    return has_files or ((folder / RELEASE).is_dir() and is_megatron_folder(folder / RELEASE))


def read_arguments(source: str | Path, trust: bool) -> dict[str, Any]:
    """Return the arguments stored in a checkpoint. Raises as `import_megatron`."""
    return _read(_iteration(Path(source)), trust)[1]


def _read(folder: Path, trust: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the arguments of an iteration's folder."""
    return (read_torch_dist if os.path.lexists(folder / METADATA) else read_legacy)(folder, trust)


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
            f"{folder} does not contain its run's arguments, which describe the model; it cannot be read"
        )
    args = dict(args, vocab_size=vocab_size or args.get("vocab_size") or args.get("padded_vocab_size"))
    tensors = _model_tensors(folder, tensors)
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
    return match(MegatronSource(folder, tensors), family, model, allow)


def _family(names: Iterable[str]) -> Family:
    """Return the family by the tensors' names; the arguments do not contain it."""
    stacks = {match[1] for name in names if (match := LAYER.match(name))}
    if stacks == {"decoder", "encoder"}:
        raise ConfigError(
            "it has an encoder and a decoder, and Megatron's T5 is not supported; use Hugging Face's format"
        )
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
                f"there is no folder {folder}; give Megatron's save folder or one iter_NNNNNNN in it"
            )
        if existing := _iterations(folder):
            raise CheckpointError(f"{folder} has no {LATEST}; give one of its folders: {shorten(existing)}")
        return folder
    try:
        text = read_small_file(latest, folder, largest=4096).decode(errors="replace").strip()
    except OSError as error:
        raise CheckpointError(
            f"{latest} cannot be read: {error.strerror}; give the folder iter_NNNNNNN itself"
        ) from None
    if not re.fullmatch(f"{RELEASE}|[0-9]{{1,15}}", text):
        raise CheckpointError(
            f"{latest} holds {text!r}, which is not an iteration; give the folder iter_NNNNNNN itself"
        )
    iteration = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not iteration.is_dir():
        raise CheckpointError(
            f"{latest} names {iteration.name}, which does not exist; there are "
            f"{shorten(_iterations(folder)) or 'none'}: copy it, or give the folder of another"
        )
    return iteration


def _iterations(folder: Path) -> list[str]:
    """Return the names of the iterations' folders in a save folder."""
    return sorted(path.name for name in (ITERATIONS, RELEASE) for path in folder.glob(name) if path.is_dir())
