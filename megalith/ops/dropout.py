"""Dropout with a mask that depends on the coordinates of an element instead of a random state.

An element's 32 random bits are a hash of (seed, sample, position in the sample, layer, site, column). Masks are thus
the same however tensors are divided over devices or micro-batches, in recomputation, and after resuming; only row keys
are saved for the backward pass.

The hash is murmur3's 32-bit finalizer (Appleby 2011), applied to row key xor mixed column.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from megalith.ops.compiled import as_one_kernel

# Sites of dropout within a layer. The embedding's output counts as layer -1.
ATTENTION_PROBABILITIES, ATTENTION_OUTPUT, MLP_OUTPUT, EMBEDDING_OUTPUT = 0, 1, 2, 3
CROSS_ATTENTION_OUTPUT = -1  # cross-attention of layer n counts as layer -2 - n
# Sites of adapters' inputs, by the matrix's path in the layer. A layer has 8; the others follow those of all layers.
ADAPTER_INPUTS = {
    "self_attention.linear_qkv": 4,
    "self_attention.linear_proj": 5,
    "mlp.linear_fc1": 6,
    "mlp.linear_fc2": 7,
    "mlp.shared_experts.linear_fc1": 6,
    "mlp.shared_experts.linear_fc2": 7,
    "self_attention.linear_zxbcdt": 1 << 20,
    "mamba.linear_zxbcdt": 1 << 20,
    "self_attention.linear_out": (1 << 20) + 1,
    "mamba.linear_out": (1 << 20) + 1,
    "self_attention.linear_bcx": (1 << 20) + 2,
    "self_attention.linear_in": (1 << 20) + 3,
    "self_attention.linear_gates": (1 << 20) + 4,
    "self_attention.linear_q_proj": (1 << 20) + 5,
    "self_attention.linear_q_down_proj": (1 << 20) + 6,
    "self_attention.linear_q_up_proj": (1 << 20) + 7,
    "self_attention.linear_kv_down_proj": (1 << 20) + 8,
    "self_attention.linear_kv_up_proj": (1 << 20) + 9,
    "cross_attention.linear_q": (1 << 20) + 10,
    "cross_attention.linear_kv": (1 << 20) + 11,
    "cross_attention.linear_proj": (1 << 20) + 12,
}


@dataclass
class DropoutKeys:
    """Keys for the dropout masks of a layer. Each method adds the location of a mask within the layer."""

    queries: Tensor  # int32 [batch, seq]: keys of the tokens that attend
    stream: Tensor  # int32: keys of the residual stream's tokens, in its shape
    columns: Tensor  # int32 [hidden]: keys of its columns
    layer: Tensor  # int32 scalar
    outputs: Tensor | None = None  # int32 [2, …]: this layer's `output_rows`

    def query_rows(self) -> Tensor:
        """Return the row keys of attention probabilities in this layer, int32 [batch, seq]."""
        return self.token_rows(ATTENTION_PROBABILITIES)

    def stream_rows(self, site: int) -> Tensor:
        """Return the keys of the residual stream's tokens at this layer and site, int32 in the stream's shape."""
        return mix(self.stream ^ self._site_key(site))

    def token_rows(self, site: int) -> Tensor:
        """Return the keys of all tokens of this rank at a site of this layer, int32 [batch, seq].

        `stream_rows` returns the keys of the residual stream's tokens, which may be only some of these tokens.
        """
        return mix(self.queries ^ self._site_key(site))

    def cross_attention_keys(self) -> DropoutKeys:
        """Return the keys of this layer's cross-attention."""
        return replace(self, layer=-2 - self.layer, outputs=None)

    def output_rows(self, site: int) -> Tensor:
        """Return int32 keys for the tokens of the residual stream, to drop elements of a layer output before it is
        added.

        The result has the stream's shape.
        """
        if site == CROSS_ATTENTION_OUTPUT:
            return self.cross_attention_keys().stream_rows(ATTENTION_OUTPUT)
        return self.outputs[site - ATTENTION_OUTPUT]

    def _site_key(self, site: int) -> Tensor:
        return mix(self.layer * 8 + (site + 1))


def output_rows(stream: Tensor, layers: Tensor) -> Tensor:
    """Return the keys of the residual stream's tokens for ATTENTION_OUTPUT and MLP_OUTPUT in each layer, int32 [layers,
    2, …].

    `stream` int32 […] is the attribute of DropoutKeys, `layers` int32 [layers] are layer indices. Call it outside of
    compiled code, which would recompute a token's key for each of its elements.
    """
    sites = torch.arange(ATTENTION_OUTPUT, MLP_OUTPUT + 1, dtype=torch.int32, device=stream.device)
    site_keys = mix(layers[:, None] * 8 + (sites + 1))  # [layers, 2]
    return mix(stream ^ site_keys.view(*site_keys.shape, *[1] * stream.ndim))


def token_keys(seed: int, sample_numbers: Tensor, positions: Tensor) -> Tensor:
    """Return the keys of tokens, int32 [batch, seq], from sample_numbers int64 [batch] and positions int64 [seq].

    A sample's number is its index in the run's data stream, so the step needs no key.
    """
    low, high = _low_half(sample_numbers), _low_half(sample_numbers >> 32)
    sample = mix(low ^ mix(high ^ _signed(seed * 0x9E3779B1 & 0xFFFFFFFF)))  # [batch]
    return mix(sample[:, None] ^ _mixed_indices(positions + 0x632BE5AB))  # [batch, seq]


def column_keys(width: int, device: torch.device | str, first: int = 0) -> Tensor:
    """Return the keys of columns, starting at column `first`: int32 [width].

    Call it outside of compiled code if speed matters: a compiler would recompute the keys for each element.
    """
    return _mixed_indices(torch.arange(first, first + width, device=device))


class Mask(NamedTuple):
    """Arguments of `counter_dropout` besides the tensor."""

    probability: float
    rows: Tensor
    columns: Tensor


def counter_dropout(x: Tensor, probability: float, rows: Tensor, columns: Tensor) -> Tensor:
    """Drop elements of x [batch, seq, width] and scale the others by 1 / (1 - probability).

    `rows` int32 [batch, seq] are token keys (`DropoutKeys.stream_rows`), `columns` int32 [width] column keys.
    """
    return _CounterDropout.apply(x, probability, rows, columns)


class _CounterDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, probability: float, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.probability = probability
        return as_one_kernel(_drop, x, probability, rows, columns)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = as_one_kernel(_drop, grad, ctx.probability, *ctx.saved_tensors)
        return grad, None, None, None


def _drop(x: Tensor, probability: float, rows: Tensor, columns: Tensor) -> Tensor:
    mask = keep(rows[..., None] ^ columns, probability)  # [batch, seq, width]
    return torch.where(mask, x * (1.0 / (1.0 - probability)), 0.0)


def attention_keep_mask(
    rows: Tensor, heads: int, key_positions: Tensor, probability: float, first_head: int = 0
) -> Tensor:
    """Return a mask of the attention probabilities that dropout keeps, bool [batch, heads, queries, keys].

    Args:
        rows: int32 [batch, queries], keys of the tokens that attend (`DropoutKeys.query_rows`).
        heads: number of heads.
        key_positions: int64 [keys], positions in the full sequence.
        probability: dropout probability.
        first_head: index of the first of these heads in the layer.
    """
    head = torch.arange(first_head, first_head + heads, device=rows.device)[:, None]
    columns = _mixed_indices((head + 1) * 0x1000000 ^ key_positions)  # [heads, keys]
    return keep(rows[:, None, :, None] ^ columns[None, :, None, :], probability)


def keep(keys: Tensor, probability: float) -> Tensor:
    """Return a mask of the elements that dropout keeps, by their int32 keys."""
    return (mix(keys) & 0x7FFFFFFF) >= int(probability * 0x80000000)


def mix(h: Tensor) -> Tensor:
    """Apply Murmur3's finalizer to int32: every input bit affects every output bit."""
    h = (h ^ ((h >> 16) & 0xFFFF)) * -2048144789  # 0x85EBCA6B
    h = (h ^ ((h >> 13) & 0x7FFFF)) * -1028477387  # 0xC2B2AE35
    return h ^ ((h >> 16) & 0xFFFF)


def _mixed_indices(indices: Tensor) -> Tensor:
    """Apply `mix` to int64 indices below 2^32. Returns int32.

    It computes in int64 and masks the results, because a compiler may compute an index in wider integers than the
    tensor's, in which an int32 product does not wrap (seen with torch 2.13 on a CPU).
    """
    h = indices
    h = (h ^ (h >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return _low_half(h ^ (h >> 16))


def _low_half(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64, as int32."""
    x = x & 0xFFFFFFFF
    return torch.where(x >= 0x80000000, x - 0x100000000, x).to(torch.int32)


def _signed(x: int) -> int:
    return x - 0x100000000 if x >= 0x80000000 else x
