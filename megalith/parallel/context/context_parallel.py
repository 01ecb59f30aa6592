"""Context parallelism: each rank has a shard of every sequence, and only attention and other mixers communicate.

Every rank of the axis has an early and a late chunk of each sequence (zigzag.py). Positions, dropout and the loss use
each token's global position, so these parts of the model need no change. Mixers with a state need the state after all
earlier tokens (recurrent_states.py). Attention needs all earlier keys and values, by `cp_comm_type`:

    p2p         keys and values go around a ring, overlapped with compute (Liu et al. 2023)
    all_gather  keys and values are all-gathered
    a2a         Ulysses: an all-to-all of heads for tokens (ulysses.py)
    a2a+p2p     a2a within groups of adjacent ranks, a ring among the groups

All four are one algorithm on two levels: an all-to-all over `inner` within a ring or all-gather over `outer`; either
may have size 1. Adjacent ranks form an inner group, so that after the all-to-all their chunks join into the two chunks
that zigzag gives to the group in the ring of groups. Gradients of the parameters are partial: they are reduced over
data and context together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_gather, all_gather_replicated
from megalith.compat.device_mesh import unflatten_mesh
from megalith.errors import ConfigError
from megalith.models.mixers.attention import Attention, CrossAttention, RelativeBias
from megalith.models.mixers.recurrent import Recurrent
from megalith.models.pass_context import PassLayout
from megalith.models.transformer import Transformer, layers_of, stacks_of
from megalith.ops.attention_core import attention
from megalith.ops.delta_rule import gated_delta_rule
from megalith.ops.state_space import state_space
from megalith.parallel.context.full_sequences import ShardedOrFull
from megalith.parallel.context.recurrent_states import (
    context_convolution,
    context_delta_rule,
    context_state_space,
    local_document_ids,
)
from megalith.parallel.context.ring import ring_attention
from megalith.parallel.context.ulysses import heads_from_tokens, tokens_from_heads
from megalith.parallel.context.zigzag import from_zigzag, spans
from megalith.parallel.mesh import axis_of
from megalith.parallel.seams import plug

if TYPE_CHECKING:
    from megalith.data.batch import Batch


def apply_context(
    model: Transformer, axis: Axis, cp_comm_type: str, hierarchical_sizes: Sequence[int] | None = None
) -> None:
    """Make the mixers of `model` process sequences sharded by `shard_batch`. In place, collective.

    Args:
        model: the model or a stage of it.
        axis: the context axis.
        cp_comm_type: how ranks exchange keys and values (p2p, all_gather) or heads (a2a); a2a+p2p combines both.
        hierarchical_sizes: sizes of a2a and p2p, for a2a+p2p only.

    Raises:
        ConfigError: a mixer is neither attention nor recurrent. Or the model has cross-attention, unless cp_comm_type
            is a2a and the model reads encoder_token_index.
    """
    if axis.size == 1:
        return
    mixers = [mixer for layer in layers_of(model).values() for mixer in layer.mixers]
    crosses = any(isinstance(mixer, CrossAttention) for mixer in mixers)
    others = [m for m in mixers if not isinstance(m, Attention | Recurrent)]
    if crosses and "encoder_token_index" not in model.reads:
        others += [m for m in mixers if isinstance(m, CrossAttention)]
    if others:
        raise ConfigError(
            f"context_parallel_size {axis.size} shards sequences, but the model has "
            f"{type(others[0]).__name__}, which needs full sequences; set context_parallel_size "
            "to 1 and use tensor or sequence parallelism"
        )
    if crosses and cp_comm_type != "a2a":
        raise ConfigError(
            f"cp_comm_type {cp_comm_type} supports only self-attention, but the model has CrossAttention; set "
            "cp_comm_type to a2a"
        )
    core = ShardedOrFull(context_core(axis, cp_comm_type, hierarchical_sizes), attention)
    for mixer in mixers:
        if isinstance(mixer, Attention):
            plug(mixer, "core", core)
        else:
            _pass_states(mixer, axis)
    for stack in stacks_of(model):
        plug(stack, "pass_layout", partial(_pass_layout, stack.pass_layout, axis.size))
    for module in model.modules():
        if isinstance(module, RelativeBias):
            plug(module, "scores", partial(_scores_of_heads, axis))


def apply_dynamic_context(model: Transformer, groups: Mapping[int, Axis], cp_comm_type: str) -> None:
    """Replace the attention of `model`, in place, so that each forward pass can shard rows over one of `groups`.

    Args:
        model: the model. Its mixers are attention.
        groups: axes by size. `TokenInputs.cp_size` selects the axis of a pass.
        cp_comm_type: how ranks exchange keys and values (p2p, all_gather) or heads (a2a).
    """
    cores = {
        size: attention if size == 1 else context_core(axis, cp_comm_type) for size, axis in groups.items()
    }
    core = ShardedOrFull(_pass_core, attention)
    for layer in layers_of(model).values():
        for mixer in layer.mixers:
            plug(mixer, "core", core)
    for stack in stacks_of(model):
        plug(stack, "pass_layout", partial(_dynamic_layout, stack.pass_layout, cores))


def _pass_core(
    query: Tensor, key: Tensor, value: Tensor, *, run: Callable[..., Tensor], **settings
) -> Tensor:
    """Compute attention with the implementation that the current forward pass has selected.

    Recomputation wraps this function.
    """
    return run(query, key, value, **settings)


def _dynamic_layout(
    before: Callable[..., PassLayout],
    cores: Mapping[int, Callable[..., Tensor]],
    tokens: int,
    *,
    trains: bool,
    has_position_ids: bool,
    cp_size: int | None = None,
) -> PassLayout:
    """Return how a forward pass arranges its tokens if its rows are sharded over `cp_size` ranks.

    A pass without position ids, such as in generation, has full sequences on every rank.
    """
    layout = before(tokens, trains=trains, has_position_ids=has_position_ids)
    if not has_position_ids or cp_size is None:
        return replace(layout, full_sequence=True)
    return replace(layout, cp_size=cp_size, core=cores[cp_size])


RECURRENCES = {gated_delta_rule: context_delta_rule, state_space: context_state_space}
"""Version of each recurrence that computes this rank's chunks instead of a full sequence."""


def _pass_states(mixer: Recurrent, axis: Axis) -> None:
    """Plug the context-parallel convolution, document numbers and recurrence into a mixer with a state, in place."""
    plug(mixer, "convolution", ShardedOrFull(partial(context_convolution, axis), mixer.convolution))
    plug(mixer, "document_numbers", partial(local_document_ids, axis))
    if mixer.recurrence is not None:
        sharded = partial(RECURRENCES[mixer.recurrence], axis)
        plug(mixer, "recurrence", ShardedOrFull(sharded, mixer.recurrence))


def _scores_of_heads(
    axis: Axis, weight: Tensor, token_index: Tensor, layout: PassLayout
) -> tuple[Tensor, Tensor]:
    """Return this rank's columns of the relative bias table `weight` [buckets, heads], and the tokens' indices in the
    full sequence.

    In passes over full sequences, return `weight` and `token_index` unchanged.
    """
    if layout.full_sequence:
        return weight, token_index
    full_index = torch.arange(len(token_index) * axis.size, device=token_index.device)
    return weight.chunk(axis.size, 1)[axis.rank], full_index


def context_core(axis: Axis, cp_comm_type: str, hierarchical_sizes: Sequence[int] | None = None) -> Callable:
    """Return the attention core for sequences that are sharded over `axis`."""
    inner, outer = _inner_and_outer(axis, cp_comm_type, hierarchical_sizes)
    return partial(context_attention, inner=inner, outer=outer, gather=cp_comm_type == "all_gather")


def _pass_layout(
    before: Callable[..., PassLayout],
    size: int,
    tokens: int,
    *,
    trains: bool,
    has_position_ids: bool,
    cp_size: int | None = None,
) -> PassLayout:
    """Return how a forward pass arranges its tokens. A pass with position ids has a shard of every sequence on each
    rank.

    Passes without position ids, such as generation, get full sequences.
    """
    layout = before(tokens, trains=trains, has_position_ids=has_position_ids)
    if not has_position_ids:
        return replace(layout, full_sequence=True)
    return replace(layout, cp_size=size)


def shard_batch(batch: Batch, axis: Axis) -> tuple[Batch, Tensor]:
    """Return this rank's shard of `batch` along seq, and the index of its tokens in the full sequence.

    Document ends and padding masks still describe full sequences. If an encoder reads another sequence, the batch also
    gets encoder_token_index, the index of that sequence's tokens.

    Args:
        batch: seq is a multiple of 2 · size (rules.check_context).
        axis: the context axis.

    Returns:
        The local batch, and the token index, int64 [seq / size], for `TokenInputs.token_index`.
    """
    if axis.size == 1:
        return batch, torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    token_index = _local_token_index(batch.input_ids, axis)
    shards = {name: batch[name][:, token_index] for name in batch.of_tokens if batch[name] is not None}
    for name in batch.of_encoder_tokens:
        shards["encoder_token_index"] = _local_token_index(batch[name], axis)
        shards[name] = batch[name][:, shards["encoder_token_index"]]
    return replace(batch, **shards), token_index


def _local_token_index(tokens: Tensor, axis: Axis) -> Tensor:
    """Return the index of this rank's tokens among `tokens` [batch, seq]."""
    seq = tokens.shape[1]
    assert seq % (2 * axis.size) == 0, f"{seq} tokens cannot be split into 2 · {axis.size} chunks"
    token_index = torch.cat(
        [torch.arange(s.start, s.stop) for s in spans(axis.rank, axis.size, seq // axis.size)]
    )
    return token_index.to(tokens.device)


def unshard(x: Tensor, axis: Axis, dim: int = 1) -> Tensor:
    """All-gather x along `dim` into the full sequence, in token order. Differentiable; the backward pass sums gradients
    over ranks.
    """
    if axis.size == 1:
        return x
    return from_zigzag(all_gather(x[None], axis), dim)


def unshard_replicated(x: Tensor, axis: Axis) -> Tensor:
    """Unshard x along dimension 1 for a computation that all ranks repeat. The gradient is this rank's slice."""
    return x if axis.size == 1 else from_zigzag(all_gather_replicated(x[None], axis), 1)


def context_attention(
    query: Tensor,  # [batch, seq, heads, head_dim]: this rank's shard of the sequence
    key: Tensor,  # [batch, seq, groups, head_dim]
    value: Tensor,  # [batch, seq, groups, head_dim]
    *,
    inner: Axis,
    outer: Axis,
    gather: bool,
    causal: bool = True,
    mask: Tensor | None = None,  # bool [batch, 1, queries, keys] of full sequences; a2a only
    documents: Tensor | None = None,  # int32 [batch, documents]: ends in the full sequences
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_rows: Tensor | None = None,  # int32 [batch, seq]
    first_head: int = 0,
    alibi: int | None = None,
    saved: bool = False,
    bias: Tensor | None = None,  # [1, heads after the exchange, queries, keys]; a2a only
    sink: Tensor | None = None,  # float32 [heads]
) -> Tensor:
    """Compute ops.attention_core.attention over a sharded sequence. Returns [batch, seq, heads, head_dim]."""
    assert outer.size == 1 or (mask is None and bias is None), (
        "a ring supports documents, but no mask or bias"
    )
    query, key, value = heads_from_tokens(query, key, value, inner)
    if dropout and inner.size > 1:
        dropout_rows = unshard(dropout_rows, inner)
    settings = dict(
        causal=causal,
        documents=documents,
        window=window,
        softcap=softcap,
        scale=scale,
        dropout=dropout,
        dropout_rows=dropout_rows,
        first_head=first_head + inner.rank * query.shape[2],
        alibi=alibi,
        sink=sink,
    )
    if sink is not None and inner.size > 1:  # that of the heads after the exchange
        settings["sink"] = sink.narrow(0, inner.rank * query.shape[2], query.shape[2])
    if outer.size == 1:
        out = attention(query, key, value, mask=mask, bias=bias, saved=saved, **settings)
    else:  # a ring ignores `saved`
        ring = dict(size=outer.size, rank=outer.rank, group=outer.name, gather=gather)
        out = ring_attention(query, key, value, **ring, **settings)
    return tokens_from_heads(out, inner)


def _inner_and_outer(
    axis: Axis, cp_comm_type: str, hierarchical_sizes: Sequence[int] | None
) -> tuple[Axis, Axis]:
    """Return the `inner` axis of the all-to-all of heads and the `outer` axis of the ring or all-gather.

    An axis that cp_comm_type does not use has size 1.
    """
    if cp_comm_type == "a2a":
        return axis, Axis()
    if cp_comm_type != "a2a+p2p":
        return Axis(), axis
    inner, outer = hierarchical_sizes
    both = unflatten_mesh(axis.mesh, (outer, inner), ("cp_outer", "cp_inner"))
    return replace(axis_of(both["cp_inner"]), direct=axis.direct), axis_of(both["cp_outer"])
