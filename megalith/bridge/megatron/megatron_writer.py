"""Writers of Megatron's two checkpoint formats.

`torch_dist` is a torch.distributed.checkpoint directory, readable in any layout. Identical layers are stacked in one
tensor whose first dimension is the layer, and the experts of a layer likewise. Each layer or expert is a shard, which
is created when it is written. The fp32 weights have two names for the same bytes, because Megatron's two optimizers
name them differently.

The legacy format has one file per tensor and pipeline rank, which is in memory when it is written.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from megalith.bridge.family import Group
from megalith.bridge.megatron.hybrid_rows import DELTA_NORM, join_parts
from megalith.bridge.megatron.megatron_names import (
    EXPERT,
    extra_states,
    layer_of,
    shard_of,
    stack_experts,
    stored_name,
    tp_split,
)
from megalith.bridge.transfer import to_theirs
from megalith.config import ModelConfig
from megalith.models.vocabulary import VOCABULARY

Read = Callable[[str, str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Reader of a box of a tensor in float32: (part, name, offset, shape); part is "model" or an optimizer state."""


class CoreTensors:
    """A model's tensors under table.py's names, created on demand, with the vocabulary padded with zeros."""

    def __init__(self, groups: Sequence[Group], read: Read, dtype: torch.dtype, padded_vocab: int):
        self.model: ModelConfig = groups[0].model
        self.dtype, self.padded_vocab = dtype, padded_vocab
        self._read = read
        self._boxes = {
            name: (group, offset, shape)
            for group in groups
            for offset, shape in group.boxes()
            for name in group.names(offset[0])
        }

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the model's order."""
        return list(self._boxes)

    @property
    def parameters(self) -> list[str]:
        """Names of the tensors that an optimizer updates."""
        return [name for name in self._boxes if not name.endswith(".expert_bias")]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, with vocabulary padding."""
        group, *_ = self._boxes[name]
        shape = group.sources[name]
        return (self.padded_vocab, *shape[1:]) if group.name in VOCABULARY else shape

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor in Megatron: fp32 for the router's expert bias."""
        return torch.float32 if name.endswith(".expert_bias") else self.dtype

    def value(self, name: str, part: str = "model") -> Tensor:
        """Return a tensor, or its optimizer state in float32."""
        group, offset, shape = self._boxes[name]
        dtype = self.dtype_of(name) if part == "model" else torch.float32
        tensor = self._read("model" if part == "master" else part, group.name, offset, shape)
        dtypes = dict.fromkeys(group.names(offset[0]), dtype)
        value = dict(to_theirs(group, tensor, dtypes, first_expert=offset[0]))[name]
        if name.endswith(DELTA_NORM) and self.model.layernorm_zero_centered_gamma and part in WEIGHTS:
            value = value - 1
        missing = self.shape(name)[0] - len(value)
        return torch.cat([value, value.new_zeros(missing, *value.shape[1:])]) if missing else value


WEIGHTS = ("model", "master")
STATE = {  # optimizer state: Megatron's name → the part that it is read from
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "fp32_param": "master",
}
BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
STATE_NAMES = ("optimizer.state.fp32_param.", "optimizer.state.param.")
"""Prefixes of the fp32 weights in the plain and in the distributed optimizer."""


@dataclass(frozen=True)
class _Shard:
    """One of Megatron's tensors, or its optimizer state, as a box of a stored tensor."""

    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    part: str


def write_torch_dist(
    folder: Path, tensors: CoreTensors, common: Mapping[str, Any], transformer_engine: bool, with_state: bool
) -> None:
    """Write an iteration's folder in `torch_dist`; `common` is the state besides the tensors. Raises OSError."""
    shards: dict[MetadataIndex, _Shard] = {}
    # Megatron core's hybrid model asks for the state of the output layer, its GPT does not.
    states = ["output_layer._extra_state/shard_0_1"] if tensors.model.hybrid_layer_pattern else []
    for name in tensors.names:
        key, stack, at = _stack_position(name, tensors.model, transformer_engine)
        for state in extra_states([key], transformer_engine):
            states.append(f"{state}/shard_{_dotted(at or (0,))}_{_dotted(stack or (1,))}")
        parts = {key: "model"}
        if with_state and name in tensors.parameters:
            parts |= {f"optimizer.state.{state}.{key}": part for state, part in STATE.items()}
        shape = tensors.shape(name)
        for stored, part in parts.items():
            index = MetadataIndex(stored, torch.Size(at + (0,) * len(shape)))
            dtype = tensors.dtype_of(name) if part == "model" else torch.float32
            shards[index] = _Shard(stack + shape, index.offset, (1,) * len(at) + shape, dtype, name, part)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that this is one process
            dcp.save(
                {}, storage_writer=_Writer(folder), planner=_Planner(tensors, shards, states), no_dist=True
            )
    except CheckpointException as error:  # torch wraps the cause
        [(cause, _), *_] = error.failures.values()
        raise cause from None
    torch.save(dict(common), folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(BACKENDS))


def _stack_position(
    name: str, model: ModelConfig, transformer_engine: bool
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """Return where a tensor of Megatron is stored: the name of the stored tensor, the size of its leading dimensions
    (layers, experts), and the index in them.
    """
    key = stored_name(name, model, transformer_engine, distributed=True)
    stack, at = (), ()
    layer, expert = layer_of(name), EXPERT.search(name)
    layers_alike = model.hybrid_layer_pattern is None and not model.linear_attention_layers
    if (
        layers_alike
        and layer is not None
        and len(set(model.expert_layers) - set(model.mtp_layers))
        in (
            0,
            model.num_layers,
        )
    ):
        key, stack, at = key.replace(f"layers.{layer}.", "layers.", 1), (model.num_layers,), (layer,)
    if expert:
        key = EXPERT.sub(r".experts.experts.\2.\3", key)
        stack, at = (*stack, model.num_experts), (*at, int(expert[1]))
    return key, stack, at


def _dotted(indices: tuple[int, ...]) -> str:
    return ".".join(map(str, indices))


class _Planner(SavePlanner):
    """Planner that creates each shard when it is written, and writes empty extra states."""

    def __init__(self, tensors: CoreTensors, shards: Mapping[MetadataIndex, _Shard], states: Sequence[str]):
        self._tensors, self._states = tensors, states
        self._shards = {(index.fqn, index.offset): shard for index, shard in shards.items()}
        self._items = [_item(index, shard) for index, shard in shards.items()]

    def set_up_planner(self, *ignored: Any, **options: Any) -> None: ...

    def create_local_plan(self) -> SavePlan:
        objects = [WriteItem(MetadataIndex(state), WriteItemType.BYTE_IO) for state in self._states]
        return SavePlan([*self._items, *objects])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            torch.save([None], content := io.BytesIO())
            return content
        shard = self._shards[write_item.index.fqn, write_item.index.offset]
        return self._tensors.value(shard.name, shard.part).contiguous().view(shard.shape)


def _item(index: MetadataIndex, shard: _Shard) -> WriteItem:
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(index.offset, torch.Size(shard.shape)),
        properties=TensorProperties(dtype=shard.dtype),
        size=torch.Size(shard.size),
    )
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


class _Writer(dcp.FileSystemWriter):
    """Writes one file in a single thread. With more threads, their errors would be lost."""

    def __init__(self, folder: Path):
        super().__init__(folder, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta:
        """Return metadata without the folder's name, which changes at the end, and without the time."""
        return StorageMeta()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the metadata, in which tensors under the first of STATE_NAMES are also listed under the second, with
        the same bytes.
        """
        one, other = STATE_NAMES
        stored = metadata.state_dict_metadata
        stored |= {
            other + name.removeprefix(one): stored[name] for name in list(stored) if name.startswith(one)
        }
        duplicates = [
            replace(result, index=replace(result.index, fqn=other + result.index.fqn.removeprefix(one)))
            for result in results[0]
            if result.index.fqn.startswith(one)
        ]
        super().finish(metadata, [*results, duplicates])


def write_ranks(
    folder: Path,
    tensors: CoreTensors,
    common: Mapping[str, Any],
    transformer_engine: bool,
    ranks: int,
    stages: int,
) -> None:
    """Write an iteration's folder in the legacy format, `mp_rank_TT[_PPP]/model_optim_rng.pt`. Raises OSError."""
    model, latents = tensors.model, "copies" if transformer_engine else "rows"
    for stage in range(stages):
        sources = dict(_stage(tensors, stage, stages))
        for rank in range(ranks):
            state: dict[str, Any] = {}
            for name, source in sources.items():
                state[name] = shard_of(
                    tensors.value(source), tp_split(name, model.gated, latents), rank, ranks
                )
            if model.moe_grouped_gemm and not transformer_engine:
                state = stack_experts(state)
            state = join_parts(state)
            state = {stored_name(name, model, transformer_engine): value for name, value in state.items()}
            state |= dict.fromkeys(extra_states(list(state), transformer_engine))
            if stage == stages - 1:
                state["output_layer._extra_state"] = None
            first = stage * model.num_layers // stages
            state = {_renumber(name, first): value for name, value in state.items()}
            path = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            path.mkdir(parents=True)
            torch.save({**common, "model": state}, path / "model_optim_rng.pt")


def _stage(tensors: CoreTensors, stage: int, stages: int) -> Iterator[tuple[str, str]]:
    """Yield each tensor of a pipeline stage with its source. The last stage has a copy of a tied embedding."""
    model, (embedding, head, *_) = tensors.model, VOCABULARY
    per_stage = model.num_layers // stages
    for name in tensors.names:
        layer = layer_of(name)
        its_stage = (
            0 if name.startswith("embedding.") else stages - 1 if layer is None else layer // per_stage
        )
        if its_stage == stage:
            yield name, name
    if 0 < stage == stages - 1 and not model.untie_embeddings_and_output_weights:
        yield head, embedding
    if 0 < stage == stages - 1 and model.mtp_layers:
        yield embedding, embedding


def _renumber(name: str, first: int) -> str:
    layer = layer_of(name)
    return name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer - first}.", 1)
