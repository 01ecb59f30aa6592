"""Parameters and matmuls, counted on a model on the meta device with one layer of each kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

from torch import nn

from megalith.config import LoraConfig, ModelConfig, ParallelConfig
from megalith.models.adapters import ADAPTER, add_adapters, is_initial_factor
from megalith.models.layer import TransformerLayer, layer_class
from megalith.models.linear import MLP, Linear
from megalith.models.mixers.attention import RelativeBias
from megalith.models.model_types import make_model
from megalith.models.moe import GroupedLinear
from megalith.models.norm import Norm
from megalith.models.router import Router
from megalith.models.transformer import layers_of as layers_in
from megalith.parallel.coded_base import is_base_matrix
from megalith.parallel.expert.expert_parallel import expert_sharding
from megalith.parallel.pipeline.stages import Stage, split_stages
from megalith.parallel.tensor.roles import role_of, shared_modules


class Matmul(NamedTuple):
    """A weight [out, in] that tokens are multiplied by, with its size on one rank."""

    rows: int
    """Output size."""
    columns: int
    """Input size."""
    experts: int
    """Number of expert matrices; 0 for a matrix that all tokens use."""
    style: str | None
    """`column` or `row` parallel; None: not sharded by tensor parallelism."""
    reads_encoder: bool = False
    """True for keys and values of cross-attention, whose input is the encoder's output."""


class MetaModel:
    """A model on the meta device with one layer of each kind.

    Parameters are counted by part: embedding, attention, mlp, experts, norms, head, adapters, and the frozen first
    factors of PiSSA and OLoRA. A bias counts toward the part that it belongs to. Sizes on a rank follow the sharding
    tables: ROLES for tensor parallelism, EXPERT_SHARDING for experts.
    """

    def __init__(self, model: ModelConfig, lora: LoraConfig | None = None):
        self.config, self.parallel = model, ParallelConfig()
        self._counted: dict[tuple, Any] = {}  # by subject and sharding
        self._kinds: dict[tuple[int, ...], Counter[int]] = {}
        self.layer_numbers = [*range(model.num_layers), *model.mtp_layers]
        special = set(model.expert_layers), set(model.mtp_layers)
        mixers = {number: model.recurrent_mixer(number) for number in model.linear_attention_layers}
        pattern = [*(model.pattern_layers or [None] * model.num_layers), *[None] * len(model.mtp_layers)]
        adapted = _adapter_ranks(model, lora)
        kinds = {
            number: (
                *(number in layers for layers in special),
                mixers.get(number),
                pattern[number],
                model.has_proj_bias(number),
                model.has_input_layernorm(number),
                adapted.get(number),
            )
            for number in self.layer_numbers
        }
        first = {kinds[number]: number for number in reversed(self.layer_numbers)}
        self._first = {number: first[kinds[number]] for number in self.layer_numbers}
        no_layers = {
            "num_layers": 0,
            "mtp_num_layers": model.mtp_num_layers and 0,
            "encoder_num_layers": None,
        }
        self._model = make_model(model.model_copy(update=no_layers), device="meta")
        if encoders := model.encoder_layers:
            # the last layer of a kind, because the encoder's norm is counted with the encoder's last layer
            last = {kinds[number]: number for number in range(encoders)}
            self._first |= {number: last[kinds[number]] for number in range(encoders)}
            for number in last.values():
                self._model.encoder.layers[str(number)] = layer_class(model, number)(model, number, "meta")
            first = {kinds[number]: number for number in reversed(range(encoders, model.num_layers))}
            self._first |= {number: first[kinds[number]] for number in range(encoders, model.num_layers)}
        self._model.layers.update(
            {
                str(number): layer_class(model, number, cross=encoders > 0)(model, number, "meta")
                for number in first.values()
            }
        )
        self._layers = {layer.number: layer for layer in layers_in(self._model).values()}
        if lora is not None and lora.rank is not None:
            add_adapters(self._model, lora, model)

    def on_rank(self, parallel: ParallelConfig) -> MetaModel:
        """Return a copy that counts the shards of one rank. If a size is not divisible, it counts the largest shard."""
        other = copy(self)
        other.parallel = parallel
        return other

    def layer(self, number: int) -> TransformerLayer:
        """Return a layer of the same kind as layer `number`."""
        return self._layers[self._first[number]]

    def in_layers(self, layer_numbers: Iterable[int], matrices: bool = False) -> Counter[str]:
        """Return the number of parameters of these layers by module. With `matrices`, count only matmul weights."""
        key = tuple(layer_numbers)
        return self.cached(("layers", key, matrices), partial(self._in_layers, key, matrices))

    def _in_layers(self, layer_numbers: tuple[int, ...], matrices: bool) -> Counter[str]:
        total: Counter[str] = Counter()
        for number, times in self.kinds(layer_numbers).items():
            counts = self.cached(
                ("layer", number, matrices), partial(self._count, self.layer(number), matrices)
            )
            total.update({part: times * size for part, size in counts.items()})
        return total

    def saved(self, chunks: Sequence[Stage] | None = None) -> int:
        """Return the number of fully trained parameters besides adapters: `lora.modules_to_save` and a score head. It
        is 0 without adapters.

        `chunks` is as in `outside`.
        """
        if not self._model.has_adapters:
            return 0
        layers = self.layer_numbers if chunks is None else layers_of(self.config, chunks)
        total = self._outside_of(chunks, self._count_saved, "saved outside") or 0
        for number, times in self.kinds(layers).items():
            total += times * self.cached(("saved", number), partial(self._count_saved, self.layer(number)))
        return total

    def _count_saved(self, module: nn.Module) -> int:
        return sum(
            math.prod(self._shape(name, owner, kind, parameter.shape))
            for name, owner, kind, parameter in _parameters(module)
            if parameter.requires_grad and ADAPTER not in name
        )

    @property
    def trains_head(self) -> bool:
        """True if the output matrix is trained."""
        return self._head.requires_grad

    @property
    def _head(self) -> nn.Parameter:
        if self.config.score_head:
            return self._model.score.weight
        return (self._model.output_layer or self._model.embedding.word_embeddings).weight

    def idle_adapters(self) -> int:
        """Return the number of adapter parameters of the experts that a token does not use."""
        model, total = self.config, 0
        for number, times in self.kinds(self.layer_numbers).items():
            for name, module in self.layer(number).named_modules():
                if isinstance(module, GroupedLinear) and ADAPTER in name:
                    total += times * module.weight.numel()
        return total - active_experts(model, total)

    def kinds(self, layer_numbers: Iterable[int]) -> Counter[int]:
        """Count these layers by kind. A kind is identified by the index of the first layer that has it."""
        key = tuple(layer_numbers)
        if key not in self._kinds:
            self._kinds[key] = Counter(map(self._first.__getitem__, key))
        return self._kinds[key]

    def outside(self, chunks: Sequence[Stage] | None = None) -> Counter[str]:
        """Return the number of parameters outside of layers, by module.

        Args:
            chunks: count only the parameters of a pipeline rank with these chunks; None means all.
        """
        return self._outside_of(chunks, self._count, "outside") or Counter()

    def _outside_of(
        self, chunks: Sequence[Stage] | None, count: Callable[[nn.Module], Any], what: str
    ) -> Any:
        """Sum `count` over the modules outside the layers. Returns None if the chunks have no such modules."""
        if chunks is None:
            return count(self._model)
        # The encoder's norm follows this layer. Each stage of an encoder-decoder has relative positions.
        last = self.config.encoder_layers - 1
        ends = tuple(chunk for chunk in chunks if chunk.embedding or chunk.head or last >= 0)
        if not ends:
            return None
        key = tuple((chunk.embedding, chunk.head, last in chunk.layers) for chunk in ends)
        return self.cached((what, key), partial(self._outside, ends, count))

    def _outside(self, ends: tuple[Stage, ...], count: Callable[[nn.Module], Any]) -> Any:
        stages = split_stages(self._model, [ends, []], rank=0)  # the second rank is empty
        return reduce(add, map(count, stages))

    @property
    def output_matrix(self) -> int:
        """Elements of the unsharded output matrix."""
        return self._head.numel()

    def matmuls(self, number: int) -> list[Matmul]:
        """Return the weight matrices in layer `number` that multiply the tokens, with their shapes on one rank."""
        return self.cached(("matmuls", self._first[number]), lambda: self._matmuls(number))

    def _matmuls(self, number: int) -> list[Matmul]:
        matmuls = []
        for name, module in self.layer(number).named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, Linear | GroupedLinear | Router) and _part(name, module) != "embedding":
                *experts, rows, columns = self._shape(name, module, "weight", weight.shape)
                style = None if experts else role_of(name, module).style if ADAPTER not in name else None
                reads_encoder = name.startswith("cross_attention.linear_kv")
                matmuls.append(Matmul(rows, columns, experts[0] if experts else 0, style, reads_encoder))
        return matmuls

    def adapter_matrices(self, number: int) -> list[tuple[bool, Matmul]]:
        """Return the matrices of a layer's adapters, with their shapes on one rank, and True for each A."""
        return self.cached(("adapters", self._first[number]), lambda: self._adapter_matrices(number))

    def _adapter_matrices(self, number: int) -> list[tuple[bool, Matmul]]:
        matrices = []
        for name, module in self.layer(number).named_modules():
            if ADAPTER in name and isinstance(module, Linear | GroupedLinear):
                *experts, rows, columns = self._shape(name, module, "weight", module.weight.shape)
                matmul = Matmul(rows, columns, experts[0] if experts else 0, None, False)
                matrices.append((".lora_A." in name or ".initial_A." in name, matmul))
        return matrices

    def base_matrices(self, number: int) -> list[list[int]]:
        """Return the shapes, on one rank, of a layer's weights that `lora.quantize_base` quantizes."""
        return [
            self._shape(name, module, "weight", module.weight.shape)
            for name, module in self.layer(number).named_modules()
            if is_base_matrix(name, module)
        ]

    def cached(self, key: tuple, count: Callable[[], Any]) -> Any:
        """Return `count()`, cached by key and sharding."""
        parallel = self.parallel
        cut = (
            parallel.tensor_model_parallel_size,
            parallel.expert_model_parallel_size,
            parallel.expert_tensor_parallel_size,
        )
        if (*key, cut) not in self._counted:
            self._counted[*key, cut] = count()
        return self._counted[*key, cut]

    def _count(self, module: nn.Module, matrices: bool = False) -> Counter[str]:
        """Count the parameters of a layer, or of a model without its layers, by module."""
        total: Counter[str] = Counter()
        for name, owner, kind, parameter in _parameters(module):
            part = _part(name, owner)
            is_matrix = kind == "weight" and part not in ("embedding", "norms")
            if is_matrix or not matrices:
                total[part] += math.prod(self._shape(name, owner, kind, parameter.shape))
        return total

    def _shape(self, name: str, module: nn.Module, kind: str, shape: Sequence[int]) -> list[int]:
        parallel, shape = self.parallel, list(shape)
        tensor = parallel.tensor_model_parallel_size
        if isinstance(module, GroupedLinear):
            dims = expert_sharding(name)[kind]
            sizes = dict(
                ep=parallel.expert_model_parallel_size,
                etp=parallel.expert_tensor_parallel_size,
            )
            cuts = [(dim, sizes[axis]) for axis, dim in dims.items()]
        else:
            role = role_of(name, module, shared_modules(self.config, tensor), owner=MLP)  # of its xIELU
            dim = getattr(role, kind)
            cuts = [] if dim is None else [(dim, tensor)]
        for dim, size in cuts:
            shape[dim] = -(-shape[dim] // size)
        return shape


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield the parameters of a layer, or of a model outside its layers, each with its module and its name."""
    for name, owner in module.named_modules():
        if not name.removeprefix(ENCODER).startswith("layers."):
            for kind, parameter in owner.named_parameters(recurse=False):
                yield name, owner, kind, parameter


def _adapter_ranks(model: ModelConfig, lora: LoraConfig | None) -> dict[int, tuple[int, ...]]:
    """Return the ranks of the adapters that each layer may have, by number; a layer without adapters is missing."""
    if lora is None or lora.rank is None:
        return {}
    parts, encoders = lora.parts(model), model.encoder_layers
    return {
        number: tuple(
            lora.rank_of(f"{ENCODER if number < encoders else ''}layers.{number}", site, part)
            for site, names in parts.items()
            for part in names
        )
        for number in range(model.num_layers + len(model.mtp_layers))
        if lora.adapts_layer(number, model)
    }


def layers_of(model: ModelConfig, chunks: Iterable[Stage]) -> list[int]:
    """Return the indices of the layers of these chunks. MTP layers belong to the chunk with the head."""
    layer_numbers: list[int] = []
    for chunk in chunks:
        layer_numbers += chunk.layers
        if chunk.head:
            layer_numbers += model.mtp_layers
    return layer_numbers


def _part(name: str, module: nn.Module) -> str:
    first = name.removeprefix(ENCODER).partition(".")[0]
    if is_initial_factor(name):
        return INITIAL
    if ADAPTER in name:
        return "adapters"
    if isinstance(module, GroupedLinear):
        return "experts"
    if isinstance(module, RelativeBias):
        return "embedding"
    if isinstance(module, Norm):
        return "norms"
    if first.endswith("attention") or first == "mamba":
        return "attention"
    return OUTSIDE.get(first, "mlp")


INITIAL = "initial factors"  # frozen, in fp32
ENCODER = "encoder."  # prefix of the encoder's names in an encoder-decoder
OUTSIDE = {
    "embedding": "embedding",
    "relative_attention_bias": "embedding",
    "output_layer": "head",
    "vocabulary": "head",
    "score": "head",
    "lm_head": "head",
    "pooler": "head",
    "binary_head": "head",
}


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts by module, summed over all layers. A bias counts with its module."""

    embedding: int
    """Token embedding and learned positions, absolute or relative."""
    attention: int
    mlp: int
    """MLPs, including experts and the input projections of MTP layers."""
    norms: int
    head: int
    """The output matrix unless it is tied to the embedding, and BERT's heads."""
    adapters: int
    """LoRA adapters. If there are any, only they and `saved` are trained."""
    idle: int
    """Parameters of the experts that a token is not routed to; part of `mlp`."""
    saved: int = 0
    """Parameters outside the adapters that are trained in full."""

    @property
    def trained(self) -> int:
        """Parameters that are trained."""
        return self.adapters + self.saved if self.adapters else self.total

    @property
    def non_embedding(self) -> int:
        """Parameters without embedding and head (N in Kaplan et al., 2020)."""
        return self.attention + self.mlp + self.norms

    @property
    def active(self) -> int:
        """Parameters that a token uses."""
        return self.total - self.idle

    @property
    def total(self) -> int:
        """Parameters of the model, without adapters."""
        return self.embedding + self.non_embedding + self.head


def count_parameters(
    model: ModelConfig, padded_vocab: bool = True, lora: LoraConfig | None = None
) -> ParameterCounts:
    """Count the parameters of `model` by module.

    Args:
        model: configuration of the model.
        padded_vocab: count the padded vocabulary. False counts the vocabulary without padding, as published and as
            stored in checkpoints: 124,439,808 parameters for GPT-2, 8,030,261,248 for Llama-3-8B.
        lora: adapters to count.
    """
    if not padded_vocab:
        model = model.model_copy(update={"make_vocab_size_divisible_by": 1})
    meta = MetaModel(model, lora)
    counts = meta.outside() + meta.in_layers(meta.layer_numbers)
    return ParameterCounts(
        **{part: counts[part] for part in ("embedding", "attention", "norms", "head", "adapters")},
        mlp=counts["mlp"] + counts["experts"],
        idle=counts["experts"] - active_experts(model, counts["experts"]),
        saved=meta.saved(),
    )


def active_experts(model: ModelConfig, experts: int) -> int:
    """Return how many of the `experts` parameters in a layer's experts a token uses."""
    return experts * model.moe_router_topk // model.num_experts if experts else 0
