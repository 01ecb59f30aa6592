"""Names and shards of recorded parameters: DTensors with Hugging Face names, or Megatron core's parameters.

`Parameters` lists the parameters of all ranks of one step under the names of a bridge family. A shard's position is a
function that takes the shard out of a whole tensor. It cuts the reference's gradients into the shards of the job's
ranks, and determines how recorded weights are joined.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalith.bridge.family import Family
from megalith.bridge.match import Match, match
from megalith.bridge.megatron.legacy_reader import JoinedTensor
from megalith.bridge.megatron.megatron_importer import EMBEDDING, MegatronSource
from megalith.bridge.megatron.megatron_names import (
    LAYER,
    layer_of,
    plain_name,
    renumber_layers,
    shard_of,
    tp_split,
)
from megalith.bridge.megatron.table import GPT
from megalith.bridge.rows import gate_up, interleaved_qkv, same, stacked
from megalith.checkpoint.files import SafetensorsEntry
from megalith.config import ModelConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.models.vocabulary import VOCABULARY
from megalith.parity.audit.dump import WAY_OUT, ParameterLayout, RankDump

WRAPPERS = {"module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"}
"""Segments of parameter names that DDP, FSDP, torch.compile, checkpointing and DeepSpeed add."""

# fmt: off
TORCHTITAN = {  # its Llama models, whose rotary pairs are interleaved
    "embedding.word_embeddings.weight": same("tok_embeddings.weight"),
    "layers.{layer}.input_layernorm.weight": same("layers.{layer}.attention_norm.weight"),
    "layers.{layer}.self_attention.linear_qkv.weight": interleaved_qkv(
        *(f"layers.{{layer}}.attention.{name}.weight" for name in ("wq", "wk", "wv"))),
    "layers.{layer}.self_attention.linear_proj.weight": same("layers.{layer}.attention.wo.weight"),
    "layers.{layer}.pre_mlp_layernorm.weight": same("layers.{layer}.ffn_norm.weight"),
    "layers.{layer}.mlp.linear_fc1.weight": gate_up("layers.{layer}.feed_forward.w1.weight",
                                                    "layers.{layer}.feed_forward.w3.weight"),
    "layers.{layer}.mlp.linear_fc2.weight": same("layers.{layer}.feed_forward.w2.weight"),
    "final_layernorm.weight": same("norm.weight"),
    "output_layer.weight": same("output.weight"),
}
STACKED_EXPERTS = {  # transformers 5 keeps experts in two tensors, unlike the files of the same models
    "layers.{layer}.mlp.experts.linear_fc1.weight":
        stacked(gate_up("model.layers.{layer}.mlp.experts.gate_up_proj")),
    "layers.{layer}.mlp.experts.linear_fc2.weight": stacked(same("model.layers.{layer}.mlp.experts.down_proj")),
    "layers.{layer}.mlp.router.weight": same("model.layers.{layer}.mlp.gate.weight"),
}
# fmt: on


@dataclass(frozen=True)
class TensorShards:
    """Position of a rank's shard of a DTensor.

    `shards` has an entry per sharded dimension of the mesh: its size, the rank's index on it, the sharded dimension of
    the tensor, and the split factor.
    """

    shards: tuple[tuple[int, int, int, int], ...] = ()

    def of(self, whole: Tensor) -> Tensor:
        """Return this shard of a tensor, as a view."""
        # FSDP over tensor parallelism shards the tensor-parallel shard again: a split factor above 1.
        for size, at, dim, _ in sorted(self.shards, key=lambda shard: shard[3] > 1):
            chunks = whole.chunk(size, dim)
            whole = chunks[at] if at < len(chunks) else whole.narrow(dim, 0, 0)
        return whole


@dataclass(frozen=True)
class MegatronShard:
    """Position of a shard of a Megatron core parameter."""

    kind: str  # "rows", "columns", "gated" or "copies"
    rank: int
    ranks: int

    def of(self, whole: Tensor) -> Tensor:
        """Return this shard of a tensor, as a copy."""
        return shard_of(whole, self.kind, self.rank, self.ranks)


Shard = TensorShards | MegatronShard


@dataclass(frozen=True)
class Entry:
    """A parameter on one rank, with its shard and its names in the model family and in the job."""

    rank: int
    name: str
    job_name: str
    shard: Shard

    @property
    def key(self) -> tuple[str, Shard]:
        return self.name, self.shard


@dataclass(frozen=True)
class StoredParameter:
    """A recorded weight that several ranks hold in shards. Reading it joins them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: list[tuple[TensorShards, SafetensorsEntry]]

    def read(self) -> Tensor:
        """Return the whole weight. Raises CheckpointError if shards are missing or have other shapes."""
        meta = torch.empty(self.shape, device="meta")
        sizes = [shard.of(meta).numel() for shard, _ in self.shards]
        if sum(sizes) != meta.numel() or any(
            tuple(shard.of(meta).shape) != entry.shape for shard, entry in self.shards
        ):
            raise CheckpointError(
                f"{self.shards[0][1].file.parent} has {sum(sizes):,} of the {meta.numel():,} elements of {self.name} "
                f"{list(self.shape)}, or shards whose shapes do not match their layout; {WAY_OUT}"
            )
        if len(self.shards) == 1:
            return self.shards[0][1].read()
        whole = torch.empty(self.shape, dtype=self.shards[0][1].read().dtype)
        for shard, entry in self.shards:
            shard.of(whole).copy_(entry.read())
        return whole


class RecordedSource(MegatronSource):
    """The recorded weights, with the interface of `SourceFolder` that `match` needs."""

    settings_name = "--model"

    def read_per_expert(self, name: str) -> Tensor:
        """Return the tensor `name` in a form that can be indexed by expert."""
        return self.read(name)


@dataclass(frozen=True)
class Parameters:
    """The parameters of all ranks of a step, and their weights at its start."""

    entries: list[Entry]
    matched: Match
    tied_copy: str | None
    """Name of the output matrix's parameter in a job that has one although the model ties it to the embedding."""

    @property
    def embedding(self) -> str:
        """Name of the word embedding."""
        return next(g for g in self.matched.groups if g.name == VOCABULARY[0]).names()[0]


def read_parameters(ranks: Sequence[RankDump], family: Family, model: ModelConfig) -> Parameters:
    """Return the parameters of a step.

    Args:
        ranks: the dumps of all ranks.
        family: family of the config.json.
        model: model that the config.json describes.

    Raises:
        CheckpointError: the recorded parameters do not fit the model.
    """
    names = {plain(name) for dump in ranks for name in dump.header.parameters}
    family = _naming(family, names, model)
    entries = _megatron_entries(ranks) if family is GPT else _entries(ranks, family, names)
    weights: dict[str, dict[Shard, tuple[ParameterLayout, SafetensorsEntry]]] = {}
    for entry in entries:
        dump = ranks[entry.rank]
        stored = dump.tensors.get(f"weight.{entry.job_name}")
        if stored is not None:
            layout = dump.header.parameters[entry.job_name]
            weights.setdefault(entry.name, {}).setdefault(entry.shard, (layout, stored))
    tied = not model.untie_embeddings_and_output_weights
    tied_copy = family.tied if tied and family.tied in weights else None
    weights.pop(tied_copy, None)
    tensors = {name: _stored(name, list(parts.items())) for name, parts in weights.items()}
    if family is GPT and EMBEDDING in tensors:
        # The padded rows of Megatron's vocabulary are part of its softmax.
        model = model.model_copy(update={"vocab_size": tensors[EMBEDDING].shape[0]})
    source = RecordedSource(ranks[0].path.parent, tensors)
    try:
        matched = match(source, family, model)
    except CheckpointError as error:
        raise CheckpointError(
            str(error).partition("; fetch it again")[0]
            + "; pass the config.json of the recorded model, and record with the model that all ranks share"
        ) from None
    return Parameters(entries, matched, tied_copy)


def plain(name: str) -> str:
    """Return a parameter's name without the segments that wrappers add."""
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def _naming(family: Family, names: Iterable[str], model: ModelConfig) -> Family:
    """Return the family with the tensor names of the system that was recorded."""
    names = set(names)
    if EMBEDDING in names or any(LAYER.match(name) for name in names):
        return GPT
    if any(name.endswith("tok_embeddings.weight") for name in names):
        if model.num_experts is not None:
            raise ConfigError(
                "torchtitan's models with experts have names that the audit cannot map; audit a dense model"
            )
        return replace(family, tensors=TORCHTITAN, tied="output.weight", prefix="")
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in names):
        return replace(family, tensors={**family.tensors, **STACKED_EXPERTS})
    return family


def _entries(ranks: Sequence[RankDump], family: Family, names: Iterable[str]) -> list[Entry]:
    prefix = "" if any(name.startswith(family.prefix) for name in names) else family.prefix
    entries = []
    for dump in ranks:
        for job_name, layout in dump.header.parameters.items():
            name = plain(job_name)
            name = name if name == family.tied else prefix + name
            shards = tuple((size, at, dim, by) for size, at, dim, by in layout.shards if dim is not None)
            entries.append(Entry(dump.header.rank, name, job_name, TensorShards(shards)))
    return entries


def _megatron_entries(ranks: Sequence[RankDump]) -> list[Entry]:
    tp_size = 1 + max(dump.at("tp") for dump in ranks)
    entries, first_layer, gated = [], _first_layers(ranks), _gated(ranks)
    for dump in ranks:
        for job_name in dump.header.parameters:
            name = renumber_layers(plain_name(plain(job_name)), first_layer[dump.at("pp")])
            kind = tp_split(name, gated)
            shard = MegatronShard(kind, 0 if kind == "copies" else dump.at("tp"), tp_size)
            entries.append(Entry(dump.header.rank, name, job_name, shard))
    return entries


def _first_layers(ranks: Sequence[RankDump]) -> dict[int, int]:
    """Return the index of each pipeline rank's first layer. Each rank's names count its layers from 0."""
    counts: dict[int, int] = {}
    for dump in ranks:
        layers = {layer_of(plain(name)) for name in dump.header.parameters} - {None}
        counts[dump.at("pp")] = len(layers)
    return {pp: sum(count for other, count in counts.items() if other < pp) for pp in counts}


def _gated(ranks: Sequence[RankDump]) -> bool:
    """Return True if the MLP is gated, so that its first matrix has twice as many rows as the second has columns."""
    shapes = {plain(name): layout.shape for dump in ranks for name, layout in dump.header.parameters.items()}
    first = next((shape for name, shape in shapes.items() if name.endswith("linear_fc1.weight")), None)
    second = next((shape for name, shape in shapes.items() if name.endswith("linear_fc2.weight")), None)
    return bool(first and second and len(second) == 2) and first[0] == 2 * second[1]


def _stored(name: str, parts: Sequence[tuple[Shard, tuple[ParameterLayout, SafetensorsEntry]]]) -> Any:
    """Convert a weight, given its shards, to the form that `match` needs."""
    position, (layout, entry) = parts[0]
    if isinstance(position, TensorShards):
        shards = [(shard, stored) for shard, (_, stored) in parts]
        return StoredParameter(name, entry.dtype, tuple(layout.shape), shards)
    if position.kind == "copies":
        return entry
    by_rank = {shard.rank: stored for shard, (_, stored) in parts}
    if sorted(by_rank) != list(range(position.ranks)) or any(
        stored.shape != entry.shape or len(stored.shape) < (2 if position.kind == "columns" else 1)
        for stored in by_rank.values()
    ):
        raise CheckpointError(
            f"{entry.file.parent} has {name} from only {len(by_rank)} of {position.ranks} tensor-parallel ranks, or "
            f"with shapes that differ; pass each rank's tp index as mesh={{'tp': …}}, and {WAY_OUT}"
        )
    return JoinedTensor([by_rank[rank].read() for rank in range(position.ranks)], position.kind)


def vocabulary_rows(model: ModelConfig) -> Mapping[str, int]:
    """Return the unpadded number of rows of the tensors with one row per vocabulary entry, by name."""
    return dict.fromkeys(VOCABULARY, model.vocab_size)


def layer_number(name: str) -> int | None:
    """Return the layer index in a parameter's name, or None."""
    in_layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.", f".{name}")
    return int(in_layer[1]) if in_layer else None
