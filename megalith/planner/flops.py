"""Parameters, FLOPs and throughput of a model, from the numbers of its configuration alone.

A matmul of a token with an `[out, in]` weight costs 2·out·in FLOPs forward and twice that backward (one
matmul for dgrad, one for wgrad), so a token costs 6 FLOPs for each weight it meets; of the
experts it meets those that it is sent to.
Attention meets no weight: a query against S keys and the sum over S values cost 2·2·S·(heads·head_dim)
forward, three times that with the backward. Two conventions are in use (Llama-3-8B at 8,192: 12 % apart):

- **causal** (Megatron-LM): attention counted at half, for the mask hides half of the matrix;
- **full** (PaLM, torchtitan): counted whole.

A sliding window counts with the keys that it leaves, in either.

Norms, activations, rotations, the softmax, the loss and the embedding lookup are left out, as everyone does.
Recomputed activations are not counted either: these are the model's FLOPs, not the hardware's. Nothing here
imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalith.planner.layer_sizes import (
    attention_weights,
    layer_size,
    mlp_size,
    mlp_weights,
    weights_beside_experts,
)

if TYPE_CHECKING:
    from megalith.config import LoraConfig, ModelConfig

FORWARD_AND_BACKWARD = 3  # the backward costs twice the forward
MULTIPLY_ADD = 2  # FLOPs


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters by part, over all layers. Biases are counted with their part."""

    embedding: int
    """Token embedding, and positions where they are learned."""
    attention: int
    mlp: int
    """With the matrices that stand before the layers of multi-token prediction."""
    norms: int
    head: int
    """The output matrix; 0 when the embedding serves as it."""
    idle: int = 0
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
        return self.embedding + self.non_embedding + self.head


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs that one token costs forward and backward, by part."""

    attention_projections: int
    attention_matrix: int
    """Counted whole."""
    mlp: int
    head: int
    adapters: int = 0

    @property
    def causal(self) -> int:
        """Megatron-LM's convention: the attention matrix at half."""
        return self.full - self.attention_matrix // 2

    @property
    def full(self) -> int:
        """PaLM's and torchtitan's convention: the attention matrix whole."""
        return self.attention_projections + self.attention_matrix + self.mlp + self.head + self.adapters


@dataclass(frozen=True)
class Throughput:
    """The speed of one step, per device. FLOPs are in the causal convention."""

    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    """Fraction of the device's datasheet peak, 0 to 1; None when the peak is not known."""


def count_parameters(model: ModelConfig, padded_vocab: bool = True) -> ParameterCounts:
    """The parameters of `model` by part.

    `padded_vocab=False` counts the rows of the vocabulary as published (and as checkpoints store them):
    124,439,808 for GPT-2, 8,030,261,248 for Llama-3-8B.
    """
    hidden = model.hidden_size
    rows = model.padded_vocab_size if padded_vocab else model.vocab_size
    norm = 2 if model.normalization == "LayerNorm" else 1  # weight and bias, or weight
    with_experts = len(model.expert_layers)
    layers = [layer_size(model, number in model.expert_layers) for number in _layers(model)]
    joins = len(model.further_layers) * (2 * hidden * hidden)
    join_norms = len(model.further_layers) * 3 * norm * hidden
    embedding = rows * hidden
    if model.position_embedding_type == "learned_absolute":
        embedding += model.max_position_embeddings * hidden
    return ParameterCounts(
        embedding=embedding,
        attention=sum(layer.attention for layer in layers),
        mlp=sum(layer.mlp + layer.experts for layer in layers) + joins,
        norms=sum(layer.norms for layer in layers) + norm * hidden + join_norms,
        head=rows * hidden if model.untie_embeddings_and_output_weights else 0,
        idle=with_experts
        * ((model.num_experts or 0) - model.moe_router_topk)
        * mlp_size(model, model.expert_size),
    )


def _layers(model: ModelConfig) -> list[int]:
    return [*range(model.num_layers), *model.further_layers]


def flops_per_token(model: ModelConfig, seq_length: int, lora: LoraConfig | None = None) -> TokenFlops:
    """FLOPs of one token, forward and backward, in unbroken sequences of `seq_length` tokens.

    The head works on the padded vocabulary. Llama-3-8B at 8,192: 51.5 GFLOP (causal), 57.9 GFLOP (full).
    Weights that adapters freeze have no gradient of their own: they cost two matmuls a token and not three.
    """
    with_experts = len(model.expert_layers)
    adapters = 0 if lora is None else lora.parameters(model)
    per_weight = (FORWARD_AND_BACKWARD - (adapters > 0)) * MULTIPLY_ADD
    per_pair = FORWARD_AND_BACKWARD * MULTIPLY_ADD  # of what is no weight, or a trained one
    values = model.v_head_dim if model.multi_latent_attention else model.head_dim
    widths = model.num_attention_heads * (model.head_dim + values)  # of q·kᵀ, and of probabilities·v
    layers = len(_layers(model))
    mlp = (layers - with_experts) * mlp_weights(model, model.ffn_size)
    mlp += len(model.further_layers) * 2 * model.hidden_size**2
    if with_experts:
        mlp += with_experts * weights_beside_experts(model)
        mlp += with_experts * model.moe_router_topk * mlp_weights(model, model.expert_size)
    return TokenFlops(
        attention_projections=per_weight * layers * attention_weights(model),
        attention_matrix=per_pair * widths * _keys(model, seq_length),
        mlp=per_weight * mlp,
        head=per_weight * model.hidden_size * model.padded_vocab_size * (1 + len(model.further_layers)),
        adapters=per_pair * layers * adapters,
    )


def _keys(model: ModelConfig, seq_length: int) -> int:
    """Keys that a query meets, over all layers, before the causal mask hides half of them.

    A window of w < S keys leaves w·S − w²/2 of the S²/2 that a causal mask does: twice that over S counts here.
    """
    total = 0
    for layer in _layers(model):
        seen = min(model.window(layer) or seq_length, seq_length)
        total += 2 * seen - seen**2 // seq_length
    return total


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
