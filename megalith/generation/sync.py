"""Weights from a trained model into an engine, in place.

Where a rank of the model and of the engine have the same shard of a tensor (the same tensor-parallel axis, no stages,
no shards over data), it is cast and copied on the device. All others travel: each owned shard is broadcast from its
rank, in the engine's type and in buckets, and every rank takes what its engine has of it. So an engine has whole
layers, or their tensor-parallel shards, whatever stages, experts' ranks and ZeRO shards the trainer has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.comm.collectives import gather_json
from megalith.errors import ConfigError
from megalith.generation.engine import Engine, named_shards
from megalith.models.transformer import Transformer
from megalith.parallel.gather import ALONE, global_tensors
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.shards import LocalShard

BUCKET = 2**28  # bytes of a broadcast


@dataclass(frozen=True)
class SyncReport:
    """What a sync has moved, on this rank."""

    bytes: int
    """Of the engine's weights."""
    seconds: float
    gathered: int
    """Tensors that came from other ranks."""

    @property
    def gb_per_second(self) -> float:
        return self.bytes / 1e9 / max(self.seconds, 1e-9)


def engine_for(
    model: Transformer | ParallelModel,
    *,
    max_rows: int,
    max_tokens: int,
    dtype: torch.dtype | None = None,
    compile: bool | None = None,
    graphs: bool | None = None,
) -> Engine:
    """An engine with the present weights of a model in any layout, in the type that it computes in or in `dtype`, over
    the model's tensor-parallel axis. Every rank calls it; each then generates from its own prompts, but the ranks of a
    tensor-parallel axis from the same.

    Raises ConfigError for a model of one's own, which has no cache.
    """
    options: dict[str, Any] = dict(max_rows=max_rows, max_tokens=max_tokens, compile=compile, graphs=graphs)
    if model.config is None:
        raise ConfigError(
            "a ModelSpec's own model keeps no KV cache, so no engine runs it; call the model itself"
        )
    source = model
    if isinstance(model, ParallelModel):
        source = model.chunks[0]
        options |= dict(tp=model.mesh.tp, lora=model.spec.run.lora)
    elif model.has_adapters:
        raise ConfigError("the model has adapters: give it itself to Engine(model=...), or merge them")
    engine = Engine(model.config, model.device, dtype or source.compute_dtype, **options)
    sync(engine, model)
    return engine


def sync(engine: Engine, model: Transformer | ParallelModel, version: int | None = None) -> SyncReport:
    """Gives the engine the model's present weights, and `version`, by default one more than it had. Every rank of the
    model calls it."""
    if engine.source is None or engine.source.model is not model:
        engine.source = _Source(engine, model)
    report = engine.source.copy()
    engine.version = engine.version + 1 if version is None else version
    return report


@dataclass(frozen=True)
class _Part:
    """A shard of a tensor, and the rank that gives it."""

    name: str
    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class _Source:
    """Where the weights of an engine come from: found once, for the storage of both stays where it is."""

    def __init__(self, engine: Engine, model: Transformer | ParallelModel):
        self.engine, self.model = engine, model
        is_parallel = isinstance(model, ParallelModel)
        self.world = model.mesh.world if is_parallel else ALONE
        self.own = {
            name: shard
            for name, shard in named_shards(model.chunks if is_parallel else [model]).items()
            if not engine.is_mtp_parameter(name)
        }
        if is_parallel:  # FSDP2's modules may have whole parameters at the moment
            self.own |= {name: shard for name, shard in model.parameters.shards.items() if name in self.own}
        apart = [name for name, shard in engine.shards.items() if not _same(shard, self.own.get(name))]
        apart = sorted({name for names in gather_json(apart, self.world) for name in names})
        self.local = [name for name in engine.shards if name not in apart]
        self.parts: list[_Part] = []
        if apart:
            tensors = global_tensors(
                {name: shard for name, shard in self.own.items() if name in apart}, self.world
            )
            if lost := sorted(set(apart) - set(tensors)):
                raise ConfigError(f"the model has no tensor {lost[0]}; build the engine of its configuration")
            self.parts = [
                _Part(name, part.rank, part.offset, part.shape)
                for name, tensor in tensors.items()
                for part in tensor.parts
            ]
            self.parts.sort(key=lambda part: part.rank)
        self.gathered = len(apart)

    @torch.no_grad()
    def copy(self) -> SyncReport:
        shards, device = self.engine.shards, self.engine.device
        _wait(device)
        began = time.perf_counter()
        if self.local:
            torch._foreach_copy_(
                [shards[name].values for name in self.local], [self.own[name].values for name in self.local]
            )
        for bucket in self._buckets():
            self._broadcast(bucket)
        _wait(device)
        total = sum(shard.values.nbytes for shard in shards.values())
        return SyncReport(total, time.perf_counter() - began, self.gathered)

    def _buckets(self) -> Iterator[list[_Part]]:
        """Parts of one rank and type that go in one broadcast."""
        bucket: list[_Part] = []
        size = 0
        for part in self.parts:
            dtype = self.engine.shards[part.name].values.dtype
            nbytes = torch.Size(part.shape).numel() * dtype.itemsize
            if bucket and (
                size + nbytes > BUCKET
                or part.rank != bucket[0].rank
                or dtype != self.engine.shards[bucket[0].name].values.dtype
            ):
                yield bucket
                bucket, size = [], 0
            bucket.append(part)
            size += nbytes
        if bucket:
            yield bucket

    def _broadcast(self, bucket: list[_Part]) -> None:
        shards, rank = self.engine.shards, bucket[0].rank
        sizes = [torch.Size(part.shape).numel() for part in bucket]
        dtype = shards[bucket[0].name].values.dtype
        flat = torch.empty(sum(sizes), dtype=dtype, device=self.engine.device)
        pieces = [piece.view(part.shape) for piece, part in zip(flat.split(sizes), bucket)]
        if rank == self.world.rank:
            torch._foreach_copy_(pieces, [self.own[part.name].values for part in bucket])
        if self.world.size > 1:
            dist.broadcast(flat, rank, group=self.world.group)
        for part, piece in zip(bucket, pieces):
            _take(shards[part.name], piece, part.offset)


def _same(shard: LocalShard, other: LocalShard | None) -> bool:
    return other is not None and (shard.offset, shard.values.shape) == (other.offset, other.values.shape)


def _take(shard: LocalShard, piece: Tensor, offset: tuple[int, ...]) -> None:
    """Copies into the shard what it has of a piece of the same tensor."""
    here, there = [], []
    for own, size, at, count in zip(shard.offset, shard.values.shape, offset, piece.shape):
        first, last = max(own, at), min(own + size, at + count)
        if first >= last:
            return
        here.append(slice(first - own, last - own))
        there.append(slice(first - at, last - at))
    shard.values[tuple(here)] = piece[tuple(there)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
