"""Gathers the policy's weight shards from all ranks, in buckets, under Hugging Face names.

Rank 0 gathers one tensor at a time, merges its adapters, splits it into Hugging Face's tensors and converts it to the
run's compute dtype, as `megalith export-hf` does. Rank 0 needs memory for a bucket and one full tensor, never for the
whole model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.exporter import export_dtype, export_family
from megalith.bridge.family import Group, build_on_meta
from megalith.bridge.folder import is_model_folder
from megalith.bridge.folder_writer import FolderWriter
from megalith.bridge.origin import read_origin
from megalith.bridge.peft.peft_writer import save_peft
from megalith.bridge.transfer import Scratch, to_theirs
from megalith.config import RunConfig
from megalith.models.adapters import ADAPTER, GroupedAdapter, adapters
from megalith.parallel.coded_base import coded_shards
from megalith.parallel.gather import GlobalTensor, global_tensors
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.shards import named_shards

BUCKET_BYTES = 2**28  # maximum, unless a single tensor is larger


@dataclass(frozen=True)
class WeightBucket:
    """Tensors that are sent together. `tensors` is empty except on rank 0."""

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
    """Gathers the weights in buckets. Every rank creates one and iterates in step with the others."""

    def __init__(self, model: ParallelModel, config: RunConfig, keeps_units: bool = False):
        """Plan the buckets. Raise ConfigError if no Hugging Face family represents the model.

        With `keeps_units`, all tensors of a unit (`unit_of`) are in one bucket, however large.
        """
        self._keeps_units = keeps_units
        init_from = config.model.init_from
        folder = Path(init_from) if init_from and is_model_folder(init_from) else None
        self.family, _ = export_family(model.config, read_origin(folder))
        self.config, self.world, self.dtype = model.config, model.mesh.world, export_dtype(config.train)
        self._model, self._groups = model, self.family.groups(model.config)
        self._lora, self._init_from = config.lora, init_from
        adapted = build_on_meta(model.config, config.lora)
        self._adapters = {f"{name}.weight": (name + ADAPTER, adapter) for name, adapter in adapters(adapted)}

    def _tensors(self) -> dict[str, GlobalTensor]:
        local = named_shards(self._model.chunks)
        local |= coded_shards(self._model.chunks)
        shards = self._model.parameters.shards  # FSDP2's modules may currently hold unsharded parameters
        return global_tensors(local | {name: shards[name] for name in local if name in shards}, self.world)

    def _bucket_groups(self) -> Iterator[list[Group]]:
        """Yield the tensor groups of each bucket. All ranks yield the same."""
        bucket: list[Group] = []
        size = 0
        by_unit = (
            groupby(self._groups, key=unit_of) if self._keeps_units else ((g, [g]) for g in self._groups)
        )
        for _, members in by_unit:
            members = list(members)
            nbytes = sum(torch.Size(group.shape).numel() for group in members) * self.dtype.itemsize
            if bucket and size + nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket += members
            size += nbytes
        yield bucket

    @torch.no_grad()
    def buckets(self, device: torch.device | str) -> Iterator[WeightBucket]:
        """Yield all weights, with tensors on `device` of rank 0.

        Every rank must iterate to the end, or all must stop after the same bucket.
        """
        tensors = self._tensors()
        for groups in self._bucket_groups():
            gathered: list[Tensor] = []
            for group in groups:
                full_tensor = self._merged(group.name, tensors, device)
                if full_tensor is not None:
                    gathered += self._convert(group, full_tensor)
            yield WeightBucket(groups, self.dtype, gathered)

    def _merged(
        self, name: str, tensors: Mapping[str, GlobalTensor], device: torch.device | str
    ) -> Tensor | None:
        """Gather a tensor on rank 0 and merge its adapters. Returns None on the other ranks."""
        tensor = tensors[name].gather(device)
        if name not in self._adapters:
            return tensor
        prefix, adapter = self._adapters[name]
        values = {kind: tensors[prefix + kind].gather(device) for kind, _ in adapter.named_parameters()}
        if tensor is None:
            return None
        merged = deepcopy(adapter).to_empty(device=device)
        for kind, parameter in merged.named_parameters():
            parameter.copy_(values[kind])
        return merged.merged(tensor)

    @property
    def lora_obstacle(self) -> str | None:
        """Return the reason why servers cannot load the run's adapters onto their base model. None if they can."""
        lora = self._lora
        if lora.use_dora:
            return "lora.use_dora changes the base too"
        if any(isinstance(adapter, GroupedAdapter) for _, adapter in self._adapters.values()):
            return "servers do not load adapters of experts in PEFT's format"
        if lora.begins_with_loftq:
            return "lora.init_lora_weights loftq makes adapters for the quantized base"
        if lora.trainable_token_indices:
            return (
                "lora.trainable_token_indices trains rows of the embedding, which vLLM and SGLang do not load"
            )
        if lora.modules_to_save:
            modules = ", ".join(lora.modules_to_save)
            return f"lora.modules_to_save trains {modules} in full, which vLLM and SGLang do not load with adapters"
        return None

    @torch.no_grad()
    def write_adapters(self, folder: Path) -> int:
        """Write the adapters in PEFT's format and the run's compute dtype. Collective over all ranks; rank 0 writes.

        Returns:
            Bytes of the adapters on rank 0, 0 on other ranks.
        """
        tensors, values = self._tensors(), {}
        for prefix, adapter in self._adapters.values():
            for kind, _ in adapter.named_parameters():
                full = tensors[prefix + kind].gather("cpu")
                if full is not None:
                    values[prefix + kind] = full.to(self.dtype)
        if self.world.rank:
            return 0
        shutil.rmtree(folder, ignore_errors=True)
        args = folder, self.family, self._model.config, self._lora, values.__getitem__
        save_peft(*args, self._init_from)
        return sum(value.nbytes for value in values.values())

    def _convert(self, group: Group, full_tensor: Tensor) -> list[Tensor]:
        # Exports lack the padding rows of an embedding.
        unpadded = full_tensor[: group.shape[0]] if group.shape else full_tensor
        dtypes = dict.fromkeys(group.sources, self.dtype)
        tensors = dict(to_theirs(group, unpadded.to(self.dtype), dtypes, _FreshMemory(full_tensor.device)))
        return [tensors[name].contiguous() for name in group.sources]

    def folder(self, path: str | Path) -> FolderWriter:
        """Return a writer for a folder of weights that an engine can load.

        It replaces an existing folder. Call it on rank 0 only.
        """
        sources = ((name, shape) for group in self._groups for name, shape in group.sources.items())
        return FolderWriter(path, {name: (self.dtype, shape) for name, shape in sources}, replace=True)

    @property
    def config_json(self) -> dict[str, Any]:
        """Content of the folder's config.json."""
        return {
            **self.family.write_config(self.config),
            "torch_dtype": str(self.dtype).removeprefix("torch."),
        }


def unit_of(group: Group) -> str:
    """Return the module of a layer that a tensor belongs to, such as layers.3.mlp."""
    return ".".join(group.name.split(".")[:3])


class _FreshMemory(Scratch):
    """Allocates new memory on a device for each tensor."""

    def __init__(self, device: torch.device):
        self._device = device

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)
