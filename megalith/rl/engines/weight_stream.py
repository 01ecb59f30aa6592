"""The policy's weights under their Hugging Face names, bucket by bucket, out of the shards of all ranks.

A tensor of ours is put together on rank 0 from its shards, merged with its adapters where it has some, and cut into the
tensors of theirs that it is made of, in the type that the run computes in: what `megalith export-hf` of that step would
write. So rank 0 has memory for a bucket and one tensor of ours, and the model is nowhere whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.exporter import FolderWriter, export_dtype, export_family
from megalith.bridge.family import Group, build_on_meta
from megalith.bridge.folder import is_model_folder
from megalith.bridge.origin import read_origin
from megalith.bridge.transfer import Scratch, to_theirs
from megalith.config import RunConfig
from megalith.generation.engine import named_shards
from megalith.models.adapters import ADAPTER, adapters
from megalith.parallel.gather import GlobalTensor, global_tensors
from megalith.parallel.parallel_model import ParallelModel

BUCKET_BYTES = 2**28  # of a bucket, but for one tensor of ours that is larger


@dataclass(frozen=True)
class WeightBucket:
    """Tensors that travel together. `tensors` are on rank 0 alone."""

    groups: list[Group]
    dtype: torch.dtype
    tensors: list[Tensor]

    @property
    def names(self) -> list[str]:
        return [name for group in self.groups for name in group.sources]

    @property
    def shapes(self) -> list[list[int]]:
        return [list(shape) for group in self.groups for shape in group.sources.values()]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class WeightStream:
    """Every rank makes one, and iterates over its buckets like the others."""

    def __init__(self, model: ParallelModel, config: RunConfig):
        """Raises ConfigError for a model that no Hugging Face family can say."""
        began = config.model.init_from
        folder = Path(began) if began and is_model_folder(began) else None
        self.family, _ = export_family(model.config, read_origin(folder))
        self.config, self.world, self.dtype = model.config, model.mesh.world, export_dtype(config.train)
        self._model, self._groups = model, self.family.groups(model.config)
        adapted = build_on_meta(model.config, config.lora)
        self._adapters = {f"{name}.weight": (name + ADAPTER, adapter) for name, adapter in adapters(adapted)}

    def _tensors(self) -> dict[str, GlobalTensor]:
        own = named_shards(self._model.chunks)
        shards = self._model.parameters.shards  # FSDP2's modules may have whole parameters at the moment
        return global_tensors(own | {name: shards[name] for name in own if name in shards}, self.world)

    def _cut(self) -> Iterator[list[Group]]:
        """The groups of each bucket, the same on every rank."""
        bucket: list[Group] = []
        size = 0
        for group in self._groups:
            nbytes = torch.Size(group.shape).numel() * self.dtype.itemsize
            if bucket and size + nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(group)
            size += nbytes
        yield bucket

    @torch.no_grad()
    def buckets(self, device: torch.device | str) -> Iterator[WeightBucket]:
        """All weights, whose tensors are made on this device of rank 0. Every rank iterates to the end, or all stop
        after the same bucket."""
        tensors = self._tensors()
        for groups in self._cut():
            found: list[Tensor] = []
            for group in groups:
                whole = self._merged(group.name, tensors, device)
                if whole is not None:
                    found += self._theirs(group, whole)
            yield WeightBucket(groups, self.dtype, found)

    def _merged(
        self, name: str, tensors: Mapping[str, GlobalTensor], device: torch.device | str
    ) -> Tensor | None:
        """One of our tensors on rank 0, with what its adapters add to it."""
        whole = tensors[name].gather(device)
        if name not in self._adapters:
            return whole
        prefix, adapter = self._adapters[name]
        values = {kind: tensors[prefix + kind].gather(device) for kind, _ in adapter.named_parameters()}
        if whole is None:
            return None
        filled = deepcopy(adapter).to_empty(device=device)
        for kind, parameter in filled.named_parameters():
            parameter.copy_(values[kind])
        return whole.float() + filled.delta()

    def _theirs(self, group: Group, whole: Tensor) -> list[Tensor]:
        own = (
            whole[: group.shape[0]] if group.shape else whole
        )  # a table has rows for padding that an export lacks
        dtypes = dict.fromkeys(group.sources, self.dtype)
        found = dict(to_theirs(group, own.to(self.dtype), dtypes, _Fresh(whole.device)))
        return [found[name].contiguous() for name in group.sources]

    def folder(self, path: str | Path) -> FolderWriter:
        """What writes the weights as a folder that an engine loads, in the place of one that is there; rank 0's."""
        sources = ((name, shape) for group in self._groups for name, shape in group.sources.items())
        return FolderWriter(path, {name: (self.dtype, shape) for name, shape in sources}, replace=True)

    @property
    def config_json(self) -> dict[str, Any]:
        """The folder's config.json."""
        return {
            **self.family.write_config(self.config),
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }


class _Fresh(Scratch):
    """New memory on a device for each tensor."""

    def __init__(self, device: torch.device):
        self._device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
