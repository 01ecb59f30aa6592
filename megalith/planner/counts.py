"""Parameters, FLOPs and throughput of a model, counted on the model itself: on the meta device, one layer of each kind.

Every parameter has a part by its place in the model, and a size on a rank by the tables that cut it: ROLES over the
tensor axis, EXPERT_SHARDING for experts. A matmul of a token with an `[out, in]` weight costs 2·out·in FLOPs forward
and twice that backward (dgrad and wgrad), so a token costs 6 FLOPs for each weight it meets; of the experts it meets
those that it is sent to. Attention meets no weight: a query against S keys and the sum over S values cost
2·2·S·(heads·head_dim) forward, three times that with the backward. Two conventions are in use (Llama-3-8B at 8,192: 12
% apart):

- **causal** (Megatron-LM): attention counted at half, for the mask hides half of the matrix;
- **full** (PaLM, torchtitan): counted whole.

A sliding window counts with the keys that it leaves, in either. The delta rule of a layer of linear attention is three
products of a token with a head's state: 2·3·(heads·key_dim·value_dim) forward, whatever the sequence's length.

Norms, activations, rotations, the softmax, the loss and the embedding lookup are left out, as everyone does.
Recomputed activations are not counted either: these are the model's FLOPs, not the hardware's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from megalith.config import LoraConfig, ModelConfig, ParallelConfig, RunConfig
from megalith.models.adapters import ADAPTER, add_adapters
from megalith.models.linear import Linear
from megalith.models.model_types import make_model
from megalith.models.moe import GroupedLinear
from megalith.models.norm import Norm
from megalith.models.router import Router
from megalith.models.transformer import TransformerLayer
from megalith.models.transformer import layers_of as layers_in
from megalith.parallel.expert.expert_parallel import EXPERT_SHARDING
from megalith.parallel.pipeline.stages import Stage, split_stages
from megalith.parallel.tensor.roles import role_of

FORWARD_AND_BACKWARD = 3  # the backward costs twice the forward
MULTIPLY_ADD = 2  # FLOPs


class Matmul(NamedTuple):
    """A weight [out, in] that tokens are multiplied with, as a rank has it."""

    rows: int
    """out."""
    columns: int
    """in."""
    experts: int
    """So many of them, each for its own tokens; 0: one, for all tokens."""
    style: str | None
    """`column` or `row` of tensor parallelism; None: not sharded by it."""
    of_encoded: bool = False
    """Whether it takes the encoder's tokens: keys and values of cross-attention."""


class MetaModel:
    """A model on the meta device with one layer of each kind, and its parameters by part: embedding, attention, mlp,
    experts, norms, head, adapters. Biases count with their part."""

    def __init__(self, model: ModelConfig, lora: LoraConfig | None = None):
        self.config, self.parallel = model, ParallelConfig()
        self._counted: dict[tuple, Any] = {}  # by what was counted and how it is cut
        self._kinds: dict[tuple[int, ...], Counter[int]] = {}
        self.numbers = [*range(model.num_layers), *model.mtp_layers]
        special = set(model.expert_layers), set(model.mtp_layers), set(model.linear_attention_layers)
        kinds = {number: tuple(number in layers for layers in special) for number in self.numbers}
        first = {kinds[number]: number for number in reversed(self.numbers)}
        self._first = {number: first[kinds[number]] for number in self.numbers}
        no_layers = {
            "num_layers": 0,
            "mtp_num_layers": model.mtp_num_layers and 0,
            "encoder_num_layers": None,
        }
        self._model = make_model(model.model_copy(update=no_layers), device="meta")
        if encoders := model.encoder_layers:  # its last layer, which the encoder's norm goes with
            self._first |= dict.fromkeys(range(encoders), encoders - 1)
            self._model.encoder.layers[str(encoders - 1)] = TransformerLayer(model, encoders - 1, "meta")
            first = {"decoder": encoders}
            self._first |= dict.fromkeys(range(encoders, model.num_layers), encoders)
        self._model.layers.update(
            {
                str(number): TransformerLayer(model, number, "meta", cross=encoders > 0)
                for number in first.values()
            }
        )
        self._layers = {layer.number: layer for layer in layers_in(self._model).values()}
        if lora is not None and lora.rank is not None:
            add_adapters(self._model, lora)

    def on_rank(self, parallel: ParallelConfig) -> MetaModel:
        """The same, of which one rank's part is counted: where a cut does not come out even, the most."""
        other = copy(self)
        other.parallel = parallel
        return other

    def layer(self, number: int) -> TransformerLayer:
        """The layer of this number, or one like it."""
        return self._layers[self._first[number]]

    def in_layers(self, numbers: Iterable[int], matrices: bool = False) -> Counter[str]:
        """The parameters of these layers; with `matrices` of those alone that tokens are multiplied with."""
        key = tuple(numbers)
        return self.once(("layers", key, matrices), partial(self._in_layers, key, matrices))

    def _in_layers(self, numbers: tuple[int, ...], matrices: bool) -> Counter[str]:
        total: Counter[str] = Counter()
        for number, times in self.kinds(numbers).items():
            one = self.once(("layer", number, matrices), partial(self._count, self.layer(number), matrices))
            total.update({part: times * size for part, size in one.items()})
        return total

    def kinds(self, numbers: Iterable[int]) -> Counter[int]:
        """The number of the first layer of each kind, and how many of these layers are like it."""
        key = tuple(numbers)
        if key not in self._kinds:
            self._kinds[key] = Counter(map(self._first.__getitem__, key))
        return self._kinds[key]

    def outside(self, chunks: Sequence[Stage] | None = None) -> Counter[str]:
        """The parameters outside of layers: of the model, or of those of a pipeline rank that has these chunks."""
        if chunks is None:
            return self._count(self._model)
        last = (
            self.config.encoder_layers - 1
        )  # behind it stands a norm, and each stage has relative positions
        ends = tuple(chunk for chunk in chunks if chunk.embedding or chunk.head or last >= 0)
        if not ends:
            return Counter()
        held = tuple((chunk.embedding, chunk.head, last in chunk.layers) for chunk in ends)
        return self.once(held, partial(self._outside, ends))

    def _outside(self, ends: tuple[Stage, ...]) -> Counter[str]:
        kept = split_stages(self._model, [ends, []], rank=0)  # as if there were another rank
        return sum(map(self._count, kept), Counter())

    @property
    def output_matrix(self) -> int:
        """Elements of the output matrix, whole."""
        return (self._model.output_layer or self._model.embedding.word_embeddings).weight.numel()

    def matmuls(self, number: int) -> list[Matmul]:
        """The matrices of a layer that tokens are multiplied with, as a rank has them."""
        return self.once(("matmuls", self._first[number]), lambda: self._matmuls(number))

    def _matmuls(self, number: int) -> list[Matmul]:
        found = []
        for name, module in self.layer(number).named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(module, Linear | GroupedLinear | Router) and _part(name, module) != "embedding":
                *experts, rows, columns = self._shape(name, module, "weight", weight.shape)
                style = (
                    None if experts else role_of(name, module, False).style if ADAPTER not in name else None
                )
                of_encoded = name.startswith("cross_attention.linear_kv")
                found.append(Matmul(rows, columns, experts[0] if experts else 0, style, of_encoded))
        return found

    def once(self, key: tuple, count: Callable[[], Any]) -> Any:
        """What `count` gives, which is asked once for each cut of the model."""
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
        """Of a layer, or of a model without its layers."""
        total: Counter[str] = Counter()
        for name, owner in module.named_modules():
            for kind, parameter in owner.named_parameters(recurse=False):
                part = _part(name, owner)
                is_matrix = kind == "weight" and part not in ("embedding", "norms")
                in_layer = name.removeprefix(ENCODER).startswith("layers.")
                if not in_layer and (is_matrix or not matrices):
                    total[part] += self._here(name, owner, kind, parameter.shape)
        return total

    def _here(self, name: str, module: nn.Module, kind: str, shape: Sequence[int]) -> int:
        """What a rank has of a parameter."""
        return math.prod(self._shape(name, module, kind, shape))

    def _shape(self, name: str, module: nn.Module, kind: str, shape: Sequence[int]) -> list[int]:
        parallel, shape = self.parallel, list(shape)
        tensor = parallel.tensor_model_parallel_size
        if isinstance(module, GroupedLinear):
            dims = EXPERT_SHARDING[name.rpartition(".")[2]][kind]
            cuts = [
                (dims["ep"], parallel.expert_model_parallel_size),
                (dims["etp"], parallel.expert_tensor_parallel_size),
            ]
        else:
            dim = getattr(role_of(name, module, self.config.query_groups < tensor), kind)
            cuts = [] if dim is None else [(dim, tensor)]
        for dim, size in cuts:
            shape[dim] = -(-shape[dim] // size)
        return shape


def layers_of(model: ModelConfig, chunks: Iterable[Stage]) -> list[int]:
    """The numbers of the layers of these chunks, with those of multi-token prediction beside the head."""
    found: list[int] = []
    for chunk in chunks:
        found += chunk.layers
        if chunk.head:
            found += model.mtp_layers
    return found


def _part(name: str, module: nn.Module) -> str:
    first = name.removeprefix(ENCODER).partition(".")[0]
    if ADAPTER in name:
        return "adapters"
    if isinstance(module, GroupedLinear):
        return "experts"
    if isinstance(module, Norm):
        return "norms"
    if first.endswith("attention"):
        return "attention"
    return OUTSIDE.get(first, "mlp")


ENCODER = "encoder."  # what the names of an encoder's parts begin with beside a decoder
OUTSIDE = {
    "embedding": "embedding",
    "relative_attention_bias": "embedding",
    "output_layer": "head",
    "vocabulary": "head",
    "lm_head": "head",
    "pooler": "head",
    "binary_head": "head",
}


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by part, over all layers. Biases are counted with their part."""

    embedding: int
    """Token embedding, and positions where they are learned, relative ones too."""
    attention: int
    mlp: int
    """With experts, and the matrices that stand before the layers of multi-token prediction."""
    norms: int
    head: int
    """The output matrix, unless the embedding serves as it, and an encoder's heads."""
    adapters: int
    """They alone are trained where there are any."""
    idle: int
    """Of the mlp's, those that a token does not meet: the experts that it is not sent to."""

    @property
    def non_embedding(self) -> int:
        """Everything but the embedding and the head (the N of Kaplan et al., 2020)."""
        return self.attention + self.mlp + self.norms

    @property
    def active(self) -> int:
        """Those that a token meets."""
        return self.total - self.idle

    @property
    def total(self) -> int:
        """The model's, without adapters."""
        return self.embedding + self.non_embedding + self.head


def count_parameters(
    model: ModelConfig, padded_vocab: bool = True, lora: LoraConfig | None = None
) -> ParameterCounts:
    """The parameters of `model` by part.

    `padded_vocab=False` counts the rows of the vocabulary as published (and as checkpoints store them):
    124,439,808 for GPT-2, 8,030,261,248 for Llama-3-8B.
    """
    if not padded_vocab:
        model = model.model_copy(update={"make_vocab_size_divisible_by": 1})
    meta = MetaModel(model, lora)
    found = meta.outside() + meta.in_layers(meta.numbers)
    return ParameterCounts(
        **{part: found[part] for part in ("embedding", "attention", "norms", "head", "adapters")},
        mlp=found["mlp"] + found["experts"],
        idle=found["experts"] - _met(model, found["experts"]),
    )


def _met(model: ModelConfig, experts: int) -> int:
    """Of the experts' parameters those that a token meets."""
    return experts * model.moe_router_topk // model.num_experts if experts else 0


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs that one token costs forward and backward, by part."""

    attention_projections: int
    """With the delta rule of linear attention."""
    attention_matrix: int
    """Counted whole."""
    mlp: int
    head: int
    adapters: int = 0
    is_causal: bool = True
    """Whether a mask hides half of the attention matrix."""

    @property
    def causal(self) -> int:
        """Megatron-LM's convention: the attention matrix at half, where half of it is hidden."""
        return self.full - (self.attention_matrix // 2 if self.is_causal else 0)

    @property
    def full(self) -> int:
        """PaLM's and torchtitan's convention: the attention matrix whole."""
        return self.attention_projections + self.attention_matrix + self.mlp + self.head + self.adapters


def flops_per_token(
    model: ModelConfig, seq_length: int, lora: LoraConfig | None = None, decoder_length: float | None = None
) -> TokenFlops:
    """FLOPs of one token, forward and backward, in unbroken sequences of `seq_length` tokens.

    Of an encoder-decoder they are those of a sample over its `seq_length` tokens in the encoder; beside these it has
    `decoder_length` in the decoder (None: as many), whose attention is counted whole too, in both conventions.

    The head works on the padded vocabulary. Llama-3-8B at 8,192: 51.5 GFLOP (causal), 57.9 GFLOP (full).
    Weights that adapters freeze have no wgrad: they cost two matmuls a token and not three.
    """
    meta = MetaModel(model, lora)
    if model.encoder_layers:
        return _of_two_stacks(meta, seq_length, seq_length if decoder_length is None else decoder_length)
    met = meta.in_layers(meta.numbers, matrices=True)
    per_weight = (FORWARD_AND_BACKWARD - (met["adapters"] > 0)) * MULTIPLY_ADD
    per_pair = FORWARD_AND_BACKWARD * MULTIPLY_ADD  # of what is no weight, or a trained one
    values = model.v_head_dim if model.multi_latent_attention else model.head_dim
    widths = model.num_attention_heads * (model.head_dim + values)  # of q·kᵀ, and of probabilities·v
    linear = model.linear_attention_layers
    pairs = sum(_keys(model, number, seq_length) for number in meta.numbers if number not in linear)
    return TokenFlops(
        attention_projections=per_weight * met["attention"] + per_pair * len(linear) * delta_rule(model),
        attention_matrix=per_pair * widths * pairs,
        mlp=per_weight * (met["mlp"] + _met(model, met["experts"])),
        head=per_weight * meta.output_matrix * (1 + len(model.mtp_layers)),
        adapters=per_pair * met["adapters"],
        is_causal=model.causal,
    )


def _of_two_stacks(meta: MetaModel, encoder_length: int, decoder_length: float) -> TokenFlops:
    """Keys and values of cross-attention are of the encoder's tokens, all other matrices of the stack's own."""
    model, share = meta.config, decoder_length / encoder_length
    encoders, decoders = range(model.encoder_layers), range(model.encoder_layers, model.num_layers)
    encoder, decoder = (meta.in_layers(numbers, matrices=True) for numbers in (encoders, decoders))
    met = Counter({part: encoder[part] + share * decoder[part] for part in encoder | decoder})
    keys_values = 2 * model.query_groups * model.head_dim * model.hidden_size
    met["attention"] += (1 - share) * len(decoders) * keys_values
    per_weight = (FORWARD_AND_BACKWARD - (met["adapters"] > 0)) * MULTIPLY_ADD
    per_pair = FORWARD_AND_BACKWARD * MULTIPLY_ADD
    widths = 2 * model.num_attention_heads * model.head_dim
    pairs = len(encoders) * encoder_length + len(decoders) * share * (decoder_length + encoder_length)
    return TokenFlops(
        attention_projections=round(per_weight * met["attention"]),
        attention_matrix=round(per_pair * widths * pairs),
        mlp=round(per_weight * met["mlp"]),
        head=round(per_weight * meta.output_matrix * share),
        adapters=round(per_pair * met["adapters"]),
        is_causal=False,
    )


def share_of_tokens(config: RunConfig, number: int) -> float:
    """Of data.seq_length the tokens of a sample that layer `number` reads: 1, but in the decoder behind an encoder."""
    first = config.model.encoder_layers
    return config.data.decoder_length / config.data.seq_length if 0 < first <= number else 1.0


def delta_rule(model: ModelConfig) -> int:
    """Multiplications of a token with the states of a layer of linear attention, forward."""
    return 3 * model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim


def _keys(model: ModelConfig, layer: int, seq_length: int) -> int:
    """Keys that a query meets in a layer, before the causal mask hides half of them.

    A window of w < S keys leaves w·S − w²/2 of the S²/2 that a causal mask does: twice that over S counts here.
    """
    seen = min(model.window(layer) or seq_length, seq_length)
    return 2 * seen - seen**2 // seq_length


@dataclass(frozen=True)
class Throughput:
    """The speed of one step, per device. FLOPs are in the causal convention."""

    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    """Fraction of the device's datasheet peak, 0 to 1; None when the peak is not known."""


def throughput(tokens: int, seconds: float, devices: int, flops: int, peak: float | None) -> Throughput:
    """The speed of a step of `tokens` tokens in `seconds` on `devices` devices.

    `flops` is a token's cost (`flops_per_token(...).causal`), `peak` the device's dense FLOP/s or None.
    """
    rate = tokens / seconds / devices
    achieved = rate * flops
    return Throughput(
        tokens_per_second_per_device=rate,
        tflops_per_device=achieved / 1e12,
        mfu=achieved / peak if peak is not None else None,
    )
