"""Copying of a trained model's weights into an engine, in place.

Tensors with the same shard in model and engine on a rank (same tensor-parallel axis, no stages, not sharded over data)
are cast and copied on the device. All other tensors are broadcast shard by shard from the ranks that own them, in the
engine's dtype and in buckets, and every rank copies the parts that its engine needs. Engines can thus have complete
layers or tensor-parallel shards, whatever pipeline, expert and ZeRO layout the trainer uses.

After the first sync, only the elements of a bucket whose bits have changed in the engine's dtype are broadcast, with
their indices, if these are fewer bytes. In bf16, an update with a small learning rate changes few of them. The rank
that owns a shard finds the changes by comparing it with its own engine.

The base of adapters never changes, so after the first sync only the adapters and the modules of lora.modules_to_save
are copied. The engine holds the base in its own dtype; a base quantized by lora.quantize_base is dequantized once.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.comm.collectives import gather_json
from megalith.errors import ConfigError
from megalith.generation.engine import Engine
from megalith.generation.engine_model import SlotSizes
from megalith.generation.speculation import Speculation
from megalith.models.adapters import ADAPTER, is_initial_factor, is_trained_with_adapters
from megalith.models.saved_modules import saved_names_of
from megalith.models.transformer import Transformer
from megalith.parallel.coded_base import CodedShard, coded_shards
from megalith.parallel.gather import ALONE, global_tensors
from megalith.parallel.parallel_model import ParallelModel
from megalith.parallel.shards import LocalShard, named_shards

BUCKET = 2**28  # bytes per broadcast


@dataclass(frozen=True)
class SyncReport:
    """Amount of data moved by a sync, on this rank."""

    bytes: int
    """Bytes of the engine's weights that were copied. For a model with adapters, syncs after the first one copy only
    the adapters and the modules that are trained with them."""
    seconds: float
    gathered: int
    """Number of tensors that came from other ranks."""
    sent_bytes: int = 0
    """Bytes that left a process: those broadcast between ranks, or sent to servers by rank 0."""

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
    records_routes: bool = False,
    batch_invariant: bool | None = None,
    prefix_reuse: bool = True,
    prefix_cache_bytes: int = 0,
    speculation: Speculation | None = None,
    adapter_slots: SlotSizes | None = None,
) -> Engine:
    """Build an engine with the current weights of a model in any layout, over its tensor-parallel axis.

    Collective over all ranks.

    The ranks of a tensor-parallel axis then generate from the same prompts; ranks of different axes may have different
    prompts.

    Args:
        model: trained model, sharded in any layout.
        max_rows: maximum number of concurrent sequences.
        max_tokens: maximum length of a sequence.
        dtype: dtype of the engine. Default: the model's compute dtype.
        compile: see `Engine`.
        graphs: see `Engine`.
        records_routes: see `Engine`.
        batch_invariant: see `Engine`. Default: the setting of the model's run.
        prefix_reuse: see `Engine`.
        prefix_cache_bytes: see `Engine`.
        speculation: see `Engine`.
        adapter_slots: see `Engine`.

    Raises:
        ConfigError: the model is a custom one without a KV cache, or a single-device model with adapters.
    """
    options: dict[str, Any] = dict(
        max_rows=max_rows,
        max_tokens=max_tokens,
        compile=compile,
        graphs=graphs,
        records_routes=records_routes,
        batch_invariant=bool(batch_invariant),
        prefix_reuse=prefix_reuse,
        prefix_cache_bytes=prefix_cache_bytes,
        speculation=speculation,
        adapter_slots=adapter_slots,
    )
    if model.config is None:
        raise ConfigError(
            "a custom ModelSpec's model has no KV cache, so engines do not support it; call the model itself"
        )
    source = model
    if isinstance(model, ParallelModel):
        source = model.chunks[0]
        options |= dict(tp=model.mesh.tp, lora=model.spec.run.lora)
        if batch_invariant is None:
            options["batch_invariant"] = model.spec.run.is_batch_invariant
    elif model.has_adapters:
        raise ConfigError(
            "the model has adapters; pass the model to Engine(model=...), or merge the adapters first"
        )
    engine = Engine(model.config, model.device, dtype or source.compute_dtype, **options)
    sync(engine, model)
    return engine


def sync(engine: Engine, model: Transformer | ParallelModel, version: int | None = None) -> SyncReport:
    """Copy the model's current weights into the engine and set its version, by default the next one. Collective over
    all ranks.
    """
    if engine.source is None or engine.source.model is not model:
        engine.source = _WeightSource(engine, model)
    report = engine.source.copy()
    engine.version = engine.version + 1 if version is None else version
    return report


@dataclass(frozen=True)
class _Part:
    """A shard of a tensor, with the rank that broadcasts it."""

    name: str
    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class _WeightSource:
    """Source of an engine's weights. It is built once, because the storage of model and engine stays in place."""

    def __init__(self, engine: Engine, model: Transformer | ParallelModel):
        self.engine, self.model = engine, model
        is_parallel = isinstance(model, ParallelModel)
        self.world = model.mesh.world if is_parallel else ALONE
        self.shards = {
            name: shard
            for name, shard in named_shards(model.chunks if is_parallel else [model]).items()
            if not engine.is_mtp_parameter(name)
        }
        self.shards |= coded_shards(model.chunks if is_parallel else [model])
        self.has_adapters = any(ADAPTER in name for name in self.shards)
        self.saved_names = saved_names_of(model.chunks if is_parallel else [model])
        self.has_copied_base = self._has_copied_all = False
        self._sent_bytes = 0
        if is_parallel:  # FSDP2's modules may hold gathered parameters
            self.shards |= {
                name: shard for name, shard in model.parameters.shards.items() if name in self.shards
            }
        remote_names = [
            name for name, shard in engine.shards.items() if not _same(shard, self.shards.get(name))
        ]
        remote_names = sorted({name for names in gather_json(remote_names, self.world) for name in names})
        self.local = [name for name in engine.shards if name not in remote_names]
        self.parts: list[_Part] = []
        if remote_names:
            tensors = global_tensors(
                {name: shard for name, shard in self.shards.items() if name in remote_names}, self.world
            )
            if lost := sorted(set(remote_names) - set(tensors)):
                raise ConfigError(
                    f"the model has no tensor {lost[0]}; build the engine with its configuration"
                )
            self.parts = [
                _Part(name, part.rank, part.offset, part.shape)
                for name, tensor in tensors.items()
                for part in tensor.parts
            ]
            self.parts.sort(key=lambda part: part.rank)
        self.gathered = len(remote_names)

    @torch.no_grad()
    def copy(self) -> SyncReport:
        shards, device = self.engine.shards, self.engine.device
        _wait(device)
        began = time.perf_counter()
        sent = {
            name
            for name in shards
            if (is_trained_with_adapters(name, self.saved_names) and not is_initial_factor(name))
            or not (self.has_adapters and self.has_copied_base)
        }
        names = [name for name in self.local if name in sent]
        for name in names:
            if isinstance(self.shards[name], CodedShard):
                shards[name].values.copy_(self.shards[name].values)
        if plain := [name for name in names if not isinstance(self.shards[name], CodedShard)]:
            torch._foreach_copy_(
                [shards[name].values for name in plain], [self.shards[name].values for name in plain]
            )
        self._sent_bytes = 0
        for bucket in self._buckets(sent):
            self._broadcast(bucket)
        _wait(device)
        self.has_copied_base = self._has_copied_all = True
        total = sum(shards[name].values.nbytes for name in sent)
        return SyncReport(total, time.perf_counter() - began, self.gathered, self._sent_bytes)

    def _buckets(self, names: Collection[str]) -> Iterator[list[_Part]]:
        """Yield groups of these tensors with the same rank and dtype, each small enough for one broadcast."""
        bucket: list[_Part] = []
        size = 0
        for part in (each for each in self.parts if each.name in names):
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
            torch._foreach_copy_(pieces, [self.shards[part.name].values for part in bucket])
        changed = None
        if self.world.size > 1:
            changed = self._broadcast_changes(bucket, flat)
        masks = None if changed is None else changed.split(sizes)
        for number, (part, piece) in enumerate(zip(bucket, pieces)):
            mask = None if masks is None else masks[number].view(part.shape)
            _copy_overlap(shards[part.name], piece, part.offset, mask)

    def _broadcast_changes(self, bucket: list[_Part], flat: Tensor) -> Tensor | None:
        """Broadcast the values of a bucket, or only the changed values and their indices if these are fewer bytes.

        Args:
            bucket: slices that one rank owns.
            flat: on that rank, the values of the parts; on the others, a buffer that is filled with them.

        Returns:
            A mask of the valid elements of `flat`, bool [elements]. None means all are valid.
        """
        rank, group, index = bucket[0].rank, self.world.group, None
        count = torch.full((1,), -1, device=flat.device)
        if self._has_copied_all:
            if rank == self.world.rank and (before := self._engine_values(bucket)) is not None:
                index = (_bits(flat) != _bits(before)).nonzero()[:, 0].int()
                if len(index) * (index.itemsize + flat.itemsize) < flat.nbytes:
                    count.fill_(len(index))
            dist.broadcast(count, rank, group=group)
        changes = int(count)
        if changes < 0:
            dist.broadcast(flat, rank, group=group)
            self._sent_bytes += flat.nbytes
            return None
        changed = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
        if changes:
            if rank != self.world.rank:
                index = torch.empty(changes, dtype=torch.int32, device=flat.device)
            dist.broadcast(index, rank, group=group)
            values = flat[index.long()]
            dist.broadcast(values, rank, group=group)
            flat[index.long()] = values
            changed[index.long()] = True
        self._sent_bytes += changes * (4 + flat.itemsize)
        return changed

    def _engine_values(self, bucket: list[_Part]) -> Tensor | None:
        """Return the values of these slices in this rank's engine, [elements], or None if it lacks some of them."""
        values = []
        for part in bucket:
            shard = self.engine.shards[part.name]
            begins = [at - first for at, first in zip(part.offset, shard.offset)]
            ends = [at + size for at, size in zip(begins, part.shape)]
            if min(begins, default=0) < 0 or any(end > n for end, n in zip(ends, shard.values.shape)):
                return None
            values.append(shard.values[tuple(map(slice, begins, ends))].flatten())
        return torch.cat(values)


def _same(shard: LocalShard, other: LocalShard | None) -> bool:
    return other is not None and (shard.offset, shard.values.shape) == (other.offset, other.values.shape)


def _bits(x: Tensor) -> Tensor:
    """Return the elements as integers with the same bits, so that NaN equals itself and 0 does not equal −0."""
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def _copy_overlap(
    shard: LocalShard, piece: Tensor, offset: tuple[int, ...], valid: Tensor | None = None
) -> None:
    """Copy the overlap with another slice of the same tensor into the shard, except where `valid` is False."""
    target, source = [], []
    for start, size, piece_start, piece_size in zip(shard.offset, shard.values.shape, offset, piece.shape):
        first, last = max(start, piece_start), min(start + size, piece_start + piece_size)
        if first >= last:
            return
        target.append(slice(first - start, last - start))
        source.append(slice(first - piece_start, last - piece_start))
    overlap = piece[tuple(source)]
    if valid is not None:
        overlap = torch.where(valid[tuple(source)], overlap, shard.values[tuple(target)])
    shard.values[tuple(target)] = overlap


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
