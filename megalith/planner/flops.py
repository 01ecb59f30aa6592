"""FLOPs per token, and the throughput and utilization that follow from them.

Multiplying a token by an `[out, in]` weight takes 2·out·in FLOPs forward and twice as many backward (dgrad and wgrad):
6 FLOPs per parameter and token. A token uses only the experts that it is routed to. Attention scores and values cost
2·2·S·(heads·head_dim) forward for S keys, three times that with the backward pass; a sliding window counts its visible
keys only. A delta rule costs 2·3·(heads·key_dim·value_dim) forward, a state space model 2·2·(heads·state_dim·head_dim).
There are two conventions:

- **causal** (Megatron-LM): half of the attention matrix, because the mask hides the other half;
- **full** (PaLM, torchtitan): the full matrix. For Llama-3-8B at 8,192 tokens they differ by 12 %.

Norms, activations, RoPE, softmax, loss and lookups are not counted, as is usual, and neither is recomputation: these
are model FLOPs, not hardware FLOPs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from megalith.config import LoraConfig, ModelConfig, RunConfig
from megalith.config.hybrid import DELTA_RULES
from megalith.planner.counts import INITIAL, MetaModel, active_experts

FORWARD_AND_BACKWARD = 3  # the backward costs twice the forward
MULTIPLY_ADD = 2  # FLOPs


@dataclass(frozen=True)
class TokenFlops:
    """Forward and backward FLOPs per token, by operation."""

    attention_projections: int
    """FLOPs of attention's projections, and of the recurrences of delta nets and state space models."""
    attention_matrix: int
    """FLOPs of attention's scores and values, for the full matrix."""
    mlp: int
    head: int
    adapters: int = 0
    is_causal: bool = True
    """True if a mask hides half of the attention matrix."""

    @property
    def causal(self) -> int:
        """FLOPs by Megatron-LM's convention: a causal attention matrix counts half."""
        return self.full - (self.attention_matrix // 2 if self.is_causal else 0)

    @property
    def full(self) -> int:
        """FLOPs by the convention of PaLM and torchtitan: the full attention matrix counts."""
        return self.attention_projections + self.attention_matrix + self.mlp + self.head + self.adapters


def flops_per_token(
    model: ModelConfig, seq_length: int, lora: LoraConfig | None = None, decoder_length: float | None = None
) -> TokenFlops:
    """Return the FLOPs per token, forward and backward. Llama-3-8B at 8,192: 51.5 GFLOP (causal), 57.9 GFLOP (full).

    The output matrix has the padded vocabulary. Frozen weights have no wgrad, so they cost 4 FLOPs per weight and token
    instead of 6.

    Args:
        model: configuration of the model.
        seq_length: tokens of a sequence without document boundaries. For an encoder-decoder, the encoder's tokens, by
            which the FLOPs of a sample are divided.
        lora: adapters, which freeze all other weights but `modules_to_save`.
        decoder_length: mean tokens of the decoder; None: `seq_length`. An encoder-decoder's attention is counted in
            full in both conventions.
    """
    meta = MetaModel(model, lora)
    if model.encoder_layers:
        return _encoder_decoder_flops(
            meta, seq_length, seq_length if decoder_length is None else decoder_length
        )
    weights = meta.in_layers(meta.layer_numbers, matrices=True)
    active_adapters = weights["adapters"] - meta.idle_adapters()
    per_weight = (FORWARD_AND_BACKWARD - (weights["adapters"] > 0)) * MULTIPLY_ADD
    per_pair = FORWARD_AND_BACKWARD * MULTIPLY_ADD  # of a product of activations, or of a trained weight
    values = model.v_head_dim if model.multi_latent_attention else model.head_dim
    per_head = per_pair if meta.trains_head else per_weight
    widths = model.num_attention_heads * (model.head_dim + values)  # of q·kᵀ and of probabilities·v
    pairs = sum(_keys(model, number, seq_length) for number in model.attention_layers)
    return TokenFlops(
        attention_projections=per_weight * weights["attention"]
        + per_pair * sum(recurrence_macs(model, number) for number in model.linear_attention_layers),
        attention_matrix=per_pair * widths * pairs,
        mlp=per_weight * (weights["mlp"] + active_experts(model, weights["experts"])),
        head=per_head * meta.output_matrix * (1 + len(model.mtp_layers)),
        adapters=per_pair * active_adapters + per_weight * weights[INITIAL],
        is_causal=model.causal,
    )


def _encoder_decoder_flops(meta: MetaModel, encoder_length: int, decoder_length: float) -> TokenFlops:
    """Return the FLOPs of a sample per encoder token. Cross-attention computes keys and values from encoder tokens."""
    model, share = meta.config, decoder_length / encoder_length
    encoders, decoders = range(model.encoder_layers), range(model.encoder_layers, model.num_layers)
    encoder, decoder = (
        meta.in_layers(layer_numbers, matrices=True) for layer_numbers in (encoders, decoders)
    )
    weights = Counter({part: encoder[part] + share * decoder[part] for part in encoder | decoder})
    keys_values = 2 * model.query_groups * model.head_dim * model.hidden_size
    weights["attention"] += (1 - share) * len(decoders) * keys_values
    per_weight = (FORWARD_AND_BACKWARD - (weights["adapters"] > 0)) * MULTIPLY_ADD
    per_pair = FORWARD_AND_BACKWARD * MULTIPLY_ADD
    per_head = per_pair if meta.trains_head else per_weight
    widths = 2 * model.num_attention_heads * model.head_dim
    pairs = len(encoders) * encoder_length + len(decoders) * share * (decoder_length + encoder_length)
    return TokenFlops(
        attention_projections=round(per_weight * weights["attention"]),
        attention_matrix=round(per_pair * widths * pairs),
        mlp=round(per_weight * weights["mlp"]),
        head=round(per_head * meta.output_matrix * share),
        adapters=round(per_pair * weights["adapters"] + per_weight * weights[INITIAL]),
        is_causal=False,
    )


def token_fraction(config: RunConfig, number: int) -> float:
    """Return the tokens that layer `number` processes, divided by data.seq_length: 1 except in a T5 decoder."""
    first = config.model.encoder_layers
    return config.data.decoder_length / config.data.seq_length if 0 < first <= number else 1.0


def recurrence_macs(model: ModelConfig, layer: int) -> int:
    """Return the forward multiply-adds per token of a recurrent mixer's recurrence."""
    mixer = model.recurrent_mixer(layer)
    if mixer in DELTA_RULES:  # read, write, read
        return 3 * model.linear_num_value_heads * model.linear_key_head_dim * model.linear_value_head_dim
    if mixer == "mamba2":  # write, read
        return 2 * model.mamba_heads * model.mamba_state_dim * model.mamba_head_dim
    return 0


def _keys(model: ModelConfig, layer: int, seq_length: int) -> int:
    """Return the keys per query of a layer, before the causal mask hides half of them.

    With a causal mask, a window of w < S keys leaves w·S − w²/2 of the S²/2 pairs of query and key; chunks of w keys
    leave w·S/2. The result is twice the number of pairs divided by S.
    """
    if sides := model.two_sided_window(layer):
        widths = [min(width, seq_length - 1) for width in sides]
        cut_off = sum(width * (width + 1) for width in widths) // (
            2 * seq_length
        )  # at the ends of the sequence
        return 1 + sum(widths) - cut_off
    seen = model.reach(layer, seq_length)
    if model.attention_chunk(layer) is not None:
        return seen
    return 2 * seen - seen**2 // seq_length


@dataclass(frozen=True)
class Throughput:
    """The speed of one step, per device. FLOPs are in the causal convention."""

    tokens_per_second_per_device: float
    tflops_per_device: float
    mfu: float | None
    """Fraction of the device's datasheet peak, 0 to 1; None if the peak is unknown."""


def throughput(tokens: int, seconds: float, devices: int, flops: int, peak: float | None) -> Throughput:
    """Return the speed of a step.

    Args:
        tokens: tokens of the step over all devices.
        seconds: duration of the step.
        devices: number of devices.
        flops: FLOPs per token, `flops_per_token(...).causal`.
        peak: dense peak FLOP/s of a device, or None if unknown.
    """
    rate = tokens / seconds / devices
    achieved = rate * flops
    return Throughput(
        tokens_per_second_per_device=rate,
        tflops_per_device=achieved / 1e12,
        mfu=achieved / peak if peak is not None else None,
    )
