"""Megatron's two forms of a checkpoint, written a tensor at a time.

`torch_dist` is a torch.distributed.checkpoint directory. Layers that are alike are one tensor with the layers as its
first dimension, a layer's experts likewise; each layer or expert is a shard, and is only made when its turn comes. Any
layout reads it. Of the optimizer's state one tensor has two names, as Megatron's two kinds of optimizer call the fp32
weights otherwise; both point to the same bytes.

The legacy form is a file a tensor and pipeline rank, which is whole in memory when it is written.
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

from megalith.bridge.family import VOCABULARY, Group
from megalith.bridge.megatron.megatron_names import (
    EXPERT,
    cut_of,
    experts_together,
    layer_of,
    shard_of,
    states_beside,
    stored_name,
)
from megalith.bridge.transfer import to_theirs
from megalith.config import ModelConfig

Read = Callable[[str, str, tuple[int, ...], tuple[int, ...]], Tensor]
"""Of a part ("model", or a key of the optimizer's state) our tensor's box in float32: part, name, offset, shape."""


class CoreTensors:
    """A model's tensors under table.py's names, each made when it is asked for; the vocabulary padded with zeros."""

    def __init__(self, groups: Sequence[Group], read: Read, dtype: torch.dtype, padded_vocab: int):
        self.model: ModelConfig = groups[0].model
        self.dtype, self.padded_vocab = dtype, padded_vocab
        self._read = read
        self._boxes = {
            group.names(offset[0])[0]: (group, offset, shape)
            for group in groups
            for offset, shape in group.boxes()
        }

    @property
    def names(self) -> list[str]:
        """Of all tensors, in the model's order."""
        return list(self._boxes)

    @property
    def parameters(self) -> list[str]:
        """Of those that an optimizer steps."""
        return [name for name in self._boxes if not name.endswith(".expert_bias")]

    def shape(self, name: str) -> tuple[int, ...]:
        """With the vocabulary's padding."""
        group, *_ = self._boxes[name]
        shape = group.sources[name]
        return (self.padded_vocab, *shape[1:]) if group.name in VOCABULARY else shape

    def dtype_of(self, name: str) -> torch.dtype:
        """The type that Megatron has a tensor in: the router's bias is always fp32."""
        return torch.float32 if name.endswith(".expert_bias") else self.dtype

    def value(self, name: str, part: str = "model") -> Tensor:
        """The tensor, or the optimizer's state of it in float32."""
        group, offset, shape = self._boxes[name]
        dtype = self.dtype_of(name) if part == "model" else torch.float32
        tensor = self._read("model" if part == "master" else part, group.name, offset, shape)
        [(_, value)] = to_theirs(group, tensor, {name: dtype}, first_expert=offset[0])
        missing = self.shape(name)[0] - len(value)
        return torch.cat([value, value.new_zeros(missing, *value.shape[1:])]) if missing else value


STATE = {  # the optimizer's: how Megatron names it, and the part that it is read from
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
SAME_BYTES = ("optimizer.state.fp32_param.", "optimizer.state.param.")
"""The fp32 weights, by the optimizer that has them whole and by the distributed one."""


@dataclass(frozen=True)
class _Shard:
    """A box of a stored tensor, which is the whole of one of Megatron's: what it is a tensor or the state of."""

    size: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    part: str


def write_torch_dist(
    folder: Path, tensors: CoreTensors, common: Mapping[str, Any], transformer_engine: bool, with_state: bool
) -> None:
    """Fills an iteration's folder; `common` is what stands beside the tensors. Raises OSError."""
    shards: dict[MetadataIndex, _Shard] = {}
    states: list[str] = []
    for name in tensors.names:
        key, stack, at = _placed(name, tensors.model, transformer_engine)
        for state in states_beside([key], transformer_engine):
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
            warnings.simplefilter("ignore")  # torch's, that this is one process
            dcp.save(
                {}, storage_writer=_Writer(folder), planner=_Planner(tensors, shards, states), no_dist=True
            )
    except CheckpointException as error:  # torch's, around what went wrong
        [(cause, _), *_] = error.failures.values()
        raise cause from None
    torch.save(dict(common), folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(BACKENDS))


def _placed(
    name: str, model: ModelConfig, transformer_engine: bool
) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    """The stored tensor that one of Megatron's is in, the stack's size, and its place there."""
    key = stored_name(name, model, transformer_engine, distributed=True)
    stack, at = (), ()
    layer, expert = layer_of(name), EXPERT.search(name)
    if layer is not None and len(set(model.expert_layers) - set(model.mtp_layers)) in (
        0,
        model.num_layers,
    ):
        key, stack, at = key.replace(f"layers.{layer}.", "layers.", 1), (model.num_layers,), (layer,)
    if expert:
        key = EXPERT.sub(r".experts.experts.\2.\3", key)
        stack, at = (*stack, model.num_experts), (*at, int(expert[1]))
    return key, stack, at


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


class _Planner(SavePlanner):
    """Has torch write the shards, each made when it is asked for, and the states, which are None."""

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
    """One file, written by one thread: an error in another one would be lost."""

    def __init__(self, folder: Path):
        super().__init__(folder, per_thread_copy_ahead=0)

    def storage_meta(self) -> StorageMeta:
        """Names neither the folder, which gets another name when it is whole, nor this moment."""
        return StorageMeta()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Gives what is under the one of SAME_BYTES the other name too."""
        one, other = SAME_BYTES
        stored = metadata.state_dict_metadata
        stored |= {
            other + name.removeprefix(one): stored[name] for name in list(stored) if name.startswith(one)
        }
        again = [
            replace(result, index=replace(result.index, fqn=other + result.index.fqn.removeprefix(one)))
            for result in results[0]
            if result.index.fqn.startswith(one)
        ]
        super().finish(metadata, [*results, again])


def write_ranks(
    folder: Path,
    tensors: CoreTensors,
    common: Mapping[str, Any],
    transformer_engine: bool,
    ranks: int,
    stages: int,
) -> None:
    """Fills an iteration's folder with `mp_rank_TT[_PPP]/model_optim_rng.pt`. Raises OSError."""
    model, latents = tensors.model, "copies" if transformer_engine else "rows"
    for stage in range(stages):
        held = dict(_stage(tensors, stage, stages))
        for rank in range(ranks):
            state: dict[str, Any] = {}
            for name, source in held.items():
                state[name] = shard_of(tensors.value(source), cut_of(name, model.gated, latents), rank, ranks)
            if model.moe_grouped_gemm and not transformer_engine:
                state = experts_together(state)
            state = {stored_name(name, model, transformer_engine): value for name, value in state.items()}
            state |= dict.fromkeys(states_beside(list(state), transformer_engine))
            if stage == stages - 1:
                state["output_layer._extra_state"] = None
            first = stage * model.num_layers // stages
            state = {_numbered_from(name, first): value for name, value in state.items()}
            path = folder / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            path.mkdir(parents=True)
            torch.save({**common, "model": state}, path / "model_optim_rng.pt")


def _stage(tensors: CoreTensors, stage: int, stages: int) -> Iterator[tuple[str, str]]:
    """The tensors of a pipeline stage, and the one that each is; the last has the embedding too where it reads it."""
    model, (embedding, head, *_) = tensors.model, VOCABULARY
    per_stage = model.num_layers // stages
    for name in tensors.names:
        layer = layer_of(name)
        own = 0 if name.startswith("embedding.") else stages - 1 if layer is None else layer // per_stage
        if own == stage:
            yield name, name
    if 0 < stage == stages - 1 and not model.untie_embeddings_and_output_weights:
        yield head, embedding
    if 0 < stage == stages - 1 and model.mtp_layers:
        yield embedding, embedding


def _numbered_from(name: str, first: int) -> str:
    layer = layer_of(name)
    return name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer - first}.", 1)
