"""Tensor parallelism (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022).

Linears come in pairs, and a pair needs one collective each way. The first is column parallel (output rows are sharded:
each rank computes some of the heads or of the MLP's columns), the second row parallel (input columns are sharded), so
that each rank has a partial sum, which is reduced. Without SP the residual stream is replicated. With SP it is sharded
by tokens (all sequences of the micro-batch concatenated) for norms, dropout and additions; the reduction is then a
reduce-scatter, and an all-gather comes before the next pair: the same bytes, and 1/tp of the stream's memory.

    without SP   x ──(dgrad all-reduced)─ column ── row ──all-reduce──────────────── + bias
    with SP      x ──all-gather───────── column ── row ──reduce-scatter──────────── + bias

Parameters are DTensors over the axis, placed by the table ROLES (roles.py). A replicated parameter that a rank uses on
its own tokens or heads only has a partial gradient there; one all-reduce after the backward pass completes those.

Vocabulary: each rank has ⌈rows / tp⌉ consecutive rows of the padded embedding and of the output matrix, the last ranks
fewer where that is uneven. The padding is the model's own and never depends on the axis. A token's row comes from one
rank, the others add zeros. In the loss no rank has a whole row of logits (ops/cross_entropy.py).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from megalith.comm.collectives import (
    Axis,
    all_gather,
    all_gather_replicated,
    all_reduce,
    all_reduce_gradient,
    all_reduce_no_grad,
    begin_all_gather,
    begin_all_reduce,
    begin_reduce_scatter,
    reduce_scatter,
    wait,
)
from megalith.errors import ConfigError
from megalith.local_shards import local
from megalith.models.loss import Objective, compute_logprobs
from megalith.models.mixers.attention import Attention, CrossAttention, Heads, SelfAttention
from megalith.models.mixers.mla import LatentAttention
from megalith.models.moe import GroupedLinear
from megalith.models.norm import HeadsNorm
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer, layers_of, stacks_of
from megalith.ops.cross_entropy import linear_cross_entropy, linear_logits, softcapped
from megalith.ops.gemm import DeferredWgrad, Gemm, Operand, has_wgrad, linear
from megalith.parallel.seams import plug, replace_parameter
from megalith.parallel.tensor.roles import ALWAYS, UNDER_SP, Role, role_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element


class TensorParallel:
    """The collectives around the matmuls, and the styles of the linears that stand between them."""

    def __init__(self, axis: Axis, sequence_parallel: bool, saves_gathered_inputs: bool = True):
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.saves_gathered_inputs = saves_gathered_inputs

    def pass_layout(self, tokens: int, *, trains: bool, has_position_ids: bool) -> PassLayout:
        """Generation feeds a token at a time, which cannot be sharded; training always is."""
        divides = tokens % self.axis.size == 0
        if self.sequence_parallel and not divides and torch.is_grad_enabled():
            raise ConfigError(
                f"parallel.sequence_parallel cannot cut {tokens} tokens over {self.axis.size} tensor-parallel ranks; "
                "choose a sequence length that tensor_model_parallel_size divides"
            )
        return PassLayout(sharded=self.sequence_parallel and divides)

    def gather(self, x: Tensor, context: Context) -> Tensor:
        """All tokens of the residual stream, with SP [1, tokens / tp, h] -> [1, tokens, h]; gradients are summed."""
        return all_gather(x, self.axis, 1) if context.layout.sharded else all_reduce_gradient(x, self.axis)

    def reduce(self, x: Tensor, context: Context) -> Tensor:
        """The sum of the ranks' parts [batch, seq, h] for the residual stream: with SP [1, tokens / tp, h]."""
        if not context.layout.sharded:
            return all_reduce(x, self.axis)
        return reduce_scatter(x.reshape(1, -1, x.shape[-1]), self.axis, 1)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """The sum of the ranks' x, which each goes on to use for its own heads: gradients are summed as well."""
        return all_reduce_gradient(all_reduce(x, self.axis), self.axis)

    def shard_sequence(self, x: Tensor, layout: PassLayout) -> Tensor:
        """This rank's share of something that every token has: [batch, seq] -> with SP [1, tokens / tp]."""
        return self.to_sp_order(x, layout).chunk(self.axis.size, 1)[self.axis.rank] if layout.sharded else x

    def to_sp_order(self, x: Tensor, layout: PassLayout) -> Tensor:
        """Something that every token has [batch, seq, ...], the ranks' shares of it one after the other: with SP
        [1, tokens, ...]."""
        if not layout.sharded:
            return x
        shares = x.reshape(layout.micro_batches, self.axis.size, -1, *x.shape[2:]).transpose(0, 1)
        return shares.reshape(1, -1, *x.shape[2:])

    def reduce_sequence(self, x: Tensor, layout: PassLayout) -> Tensor:
        """The sum of what the ranks made of their shares of the tokens, of which each goes on to compute the same."""
        return all_reduce(x, self.axis) if layout.sharded else x

    def from_sp_order(self, shares: Tensor, layout: PassLayout, batch: int) -> Tensor:
        """The inverse of `to_sp_order`: [batch, seq, ...]."""
        if not layout.sharded:
            return shares
        x = shares.reshape(self.axis.size, layout.micro_batches, -1, *shares.shape[2:]).transpose(0, 1)
        return x.reshape(batch, -1, *shares.shape[2:])

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, context: Context) -> Tensor:
        """weight [out / tp, h], bias [out / tp] -> [batch, seq, out / tp], with SP [1, tokens, out / tp]"""
        sharded, edge = context.layout.sharded, gemm.edge(weight)
        saves, trains = has_wgrad(weight), torch.is_grad_enabled()
        again = sharded and not self.saves_gathered_inputs
        y = _ColumnLinear.apply(
            x.flatten(0, -2), weight, bias, gemm, edge, saves, trains, self.axis, sharded, again
        )
        return y[None] if sharded else y.unflatten(0, x.shape[:-1])

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, context: Context) -> Tensor:
        """x [batch, seq, in / tp], weight [h, in / tp], bias [h] -> the residual stream's tokens [..., h]"""
        x = self.reduce(linear(x, weight, None, gemm), context)
        return x if bias is None else x + bias


class _ColumnLinear(torch.autograd.Function):
    """x · weightᵀ + bias of all tokens. Saves only this rank's tokens for the backward pass, and gathers them again;
    but torch compiles two gathers of the same tokens as one, and saves what that gives, unless the second one depends
    on the gradient (`again`).

    In the backward pass the gather runs beside dgrad, and the sum of its result beside wgrad. Where wgrad is put off,
    so is the gather.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gemm: Gemm,
        edge,
        saves: bool,
        trains: bool,
        axis: Axis,
        sharded: bool,
        again: bool,
    ) -> Tensor:  # x [tokens, or with SP tokens / tp, h] -> [tokens, out / tp]
        operand, saved = gemm.inputs(x, saves, sharded)
        weight, saved_weight = gemm.weights(weight, trains)
        ctx.save_for_backward(*saved_weight, *saved)
        ctx.gemm, ctx.edge, ctx.axis, ctx.sharded, ctx.parts = gemm, edge, axis, sharded, len(saved_weight)
        ctx.again = again
        if sharded:
            operand = end_gather(begin_gather(operand, axis), operand)
        return gemm.forward(operand, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        saved = ctx.saved_tensors  # asked for once: a recomputed layer gives them once
        weight, x = saved[: ctx.parts], saved[ctx.parts :]
        gemm, axis, grad_weight = ctx.gemm, ctx.axis, None
        of_sum = grad
        of_rows, grad = gemm.gradients(grad, ctx.needs_input_grad[1])
        gathers = ctx.sharded and ctx.needs_input_grad[1] and ctx.edge is None
        if ctx.again and torch.compiler.is_compiling():
            x = [_in_backward(each, of_sum) if each.dim() else each for each in x]
        gathering = begin_gather(x, axis) if gathers else None
        begin = begin_reduce_scatter if ctx.sharded else begin_all_reduce
        summing = begin(gemm.dgrad(of_rows, weight), axis)
        if gathering is not None:
            x = end_gather(gathering, x)
        if ctx.edge is not None:
            gemm.deferred.append(DeferredWgrad(partial(_wgrad, gemm, grad, x, axis, ctx.sharded), ctx.edge))
        elif ctx.needs_input_grad[1]:
            grad_weight = gemm.wgrad(grad, x)
        return wait(summing), grad_weight, None, None, None, None, None, None, None, None


def _wgrad(gemm: Gemm, grad: Operand, x: Operand, axis: Axis, sharded: bool) -> Tensor:
    return gemm.wgrad(grad, end_gather(begin_gather(x, axis), x) if sharded else x)


def _in_backward(x: Tensor, grad: Tensor) -> Tensor:
    """The bits of x, as the result of a computation with `grad`: torch compiles what is made of it into the backward
    pass."""
    nothing = grad.flatten()[0].view(INTEGERS[grad.itemsize]) & 0
    return (x.view(INTEGERS[x.itemsize]) + nothing.to(INTEGERS[x.itemsize])).view(x.dtype)


def begin_gather(operand: Operand, axis: Axis) -> list[Tensor]:
    """What `end_gather` turns into the operand of all ranks' tokens. Codes travel as bytes: gloo knows no FP8."""
    return [begin_all_gather(_as_bytes(each), axis) if each.dim() else each for each in operand]


def end_gather(begun: list[Tensor], operand: Operand) -> list[Tensor]:
    return [wait(each).view(own.dtype) if own.dim() else each for each, own in zip(begun, operand)]


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


class SharedKVGroup:
    """The rows of linear_qkv, or of linear_kv, that a rank uses which shares its KV group with others: of linear_qkv
    its query heads, the group's key and value of both."""

    def __init__(self, axis: Axis, attention: SelfAttention | CrossAttention, groups: int):
        sharing = axis.size // groups  # ranks of a group
        group, place = divmod(axis.rank, sharing)
        size, heads = attention.head_dim, attention.heads.in_group
        if isinstance(attention, CrossAttention):
            self.spans = [(group * 2 * size, 2 * size)]  # first row, rows
            return
        first = group * (heads + 2) * size
        queries = (first + place * (heads // sharing) * size, heads // sharing * size)
        self.spans = [queries, (first + heads * size, 2 * size)]

    def rows(self, parameter: Tensor) -> Tensor:
        """[(query heads here + 2) · head_dim, ...], of linear_kv [2 · head_dim, ...]"""
        return torch.cat([parameter.narrow(0, *span) for span in self.spans])


def apply_tensor(
    model: Transformer, axis: Axis, sequence_parallel: bool, saves_gathered_inputs: bool = True
) -> TensorParallel | None:
    """Cuts `model`, or a stage of it, on the meta device, over the axis, in place: parameters, matmuls, vocabulary.

    The sizes divide as `megalith.config.rules.parallel_rules.check_tensor` demands. `model.partial_gradients` gets the
    names of the parameters for `reduce_partial_gradients`. Returns the collectives; an axis of one changes nothing
    and has none.
    """
    plug(model, "partial_gradients", frozenset())
    if axis.size == 1:
        return None
    tensor = TensorParallel(axis, sequence_parallel, saves_gathered_inputs)
    for stack in stacks_of(model):
        plug(stack, "pass_layout", tensor.pass_layout)
        plug(stack, "shard_sequence", tensor.shard_sequence)
        plug(stack, "reduce_sequence", tensor.reduce_sequence)
    groups = model.config.query_groups
    partial_names = []
    for name, module in list(model.named_modules()):
        if isinstance(module, GroupedLinear):  # cut by expert_parallel.py
            continue
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        role = role_of(name, module, groups < axis.size, model.get_submodule(name.rpartition(".")[0]))
        if isinstance(module, HeadsNorm):
            plug(module, "total", tensor.sum_over_ranks)
        place(module, role, axis)
        if role.style is not None:
            plug(module, "style", getattr(tensor, role.style))
        for kind, when in (("weight", role.partial_weight), ("bias", role.partial_bias)):
            if when == ALWAYS or (when == UNDER_SP and sequence_parallel):
                partial_names.append(f"{name}.{kind}")
    for layer in layers_of(model).values():
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                _cut_heads(mixer, tensor, groups)
    vocabulary = VocabParallel(tensor, model.config.padded_vocab_size)
    plug(model, "loss", vocabulary.loss)
    plug(model, "logprobs", vocabulary.logprobs)
    plug(model, "logits", vocabulary.logits)
    if model.embedding is not None:
        plug(model.embedding, "lookup", vocabulary.lookup)
    plug(model, "partial_gradients", frozenset(partial_names))
    return tensor


def partial_parameters(model: Transformer) -> list[nn.Parameter]:
    """The parameters of which a rank's gradient is a part of the sum over the tensor axis, in the model's order."""
    return [parameter for name, parameter in model.named_parameters() if name in model.partial_gradients]


@torch.no_grad()
def reduce_partial_gradients(model: Transformer, axis: Axis) -> None:
    """After the backward pass, before the norm: sums the gradients of `partial_parameters` over the tensor axis.

    One all-reduce in fp32 over them all. A gradient may be a plain tensor or a DTensor, whole or sharded by FSDP2.
    """
    if axis.size == 1:
        return
    gradients = [local(p.grad) for p in partial_parameters(model) if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten().float() for gradient in gradients])
    sums = all_reduce_no_grad(flat, axis).split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [total.view_as(gradient) for gradient, total in zip(gradients, sums)])


def place(module: nn.Module, role: Role, axis: Axis) -> None:
    """Makes the module's parameters DTensors over the axis."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # see `local`

    for kind, parameter in list(module.named_parameters(recurse=False)):
        dim = getattr(role, kind)
        placement = Replicate() if dim is None else Shard(dim)
        placed = distribute_tensor(parameter, axis.mesh, [placement], src_data_rank=None)
        replace_parameter(module, kind, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _cut_heads(attention: Attention, tensor: TensorParallel, groups: int) -> None:
    """A rank's query heads stand one after the other in the order of all heads, with or without shared groups."""
    size, in_group = tensor.axis.size, attention.heads.in_group
    first = tensor.axis.rank * groups * in_group // size
    if isinstance(attention, LatentAttention):
        plug(attention, "gather", tensor.gather)
    if groups < size:
        shared = attention.linear_kv if isinstance(attention, CrossAttention) else attention.linear_qkv
        plug(shared, "rows", SharedKVGroup(tensor.axis, attention, groups).rows)
        in_group = in_group * groups // size
    plug(attention, "heads", Heads(in_group, first))


class VocabParallel:
    """The seams of Embedding and Transformer over the vocabulary, for one rank of the axis."""

    def __init__(self, tensor: TensorParallel, padded_vocab: int):
        self.tensor, self.axis = tensor, tensor.axis
        self.rows = -(-padded_vocab // self.axis.size)  # of a full rank
        self.first = self.axis.rank * self.rows

    def lookup(self, input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
        """The tokens' rows [batch, seq, hidden], with SP [1, tokens / tp, hidden]: a sum, as each rank has its own."""
        index, here = self._own(self.tensor.to_sp_order(input_ids, context.layout), weight)
        return self.tensor.reduce(F.embedding(index, weight) * here[..., None], context)

    def loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        vocab_size: int,
        softcap: float | None,
        context: Context,
        scale: Tensor | None = None,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        """As `megalith.ops.cross_entropy.linear_cross_entropy`, the same on every rank; weight [rows here, hidden]."""
        labels, loss_mask = (self.tensor.to_sp_order(x, context.layout) for x in (labels, loss_mask))
        shard = dict(
            axis=self.axis,
            first=self.first,
            rows=self.rows,
            bias=bias,
            max_label_tokens=context.max_label_tokens,
        )
        hidden = self.tensor.gather(hidden, context)
        return linear_cross_entropy(hidden, weight, labels, loss_mask, vocab_size, softcap, scale, **shard)

    def logprobs(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        softcap: float | None,
        context: Context,
        objective: Objective,
        scale: Tensor | None = None,
        *,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As `megalith.models.loss.compute_logprobs`, the same on every rank, in the sequences' order."""
        layout, shard = context.layout, dict(axis=self.axis, first=self.first, rows=self.rows, bias=bias)
        tokens = {name: self.tensor.to_sp_order(x, layout) for name, x in objective.tokens.items()}
        hidden, targets = self.tensor.gather(hidden, context), self.tensor.to_sp_order(targets, layout)
        *found, loss = compute_logprobs(
            objective, hidden, weight, targets, tokens, vocab_size, softcap, scale, **shard
        )
        ordered = [None if x is None else self.tensor.from_sp_order(x, layout, context.batch) for x in found]
        return ordered[0], ordered[1], loss

    def logits(
        self,
        x: Tensor,
        weight: Tensor,
        vocab_size: int,
        softcap: float | None,
        context: Context,
        *,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Logits [batch, seq, vocab] of every entry, on every rank, their padding left out."""
        part = linear_logits(self.tensor.gather(x, context), weight, bias=bias)  # [..., rows here]
        part = F.pad(part, (0, self.rows - part.shape[-1]))
        logits = all_gather_replicated(part, self.axis, -1)[..., :vocab_size]
        return softcapped(logits.reshape(context.batch, -1, vocab_size), softcap)

    def _own(self, tokens: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of the tokens in this rank's shard, 0 for those held elsewhere, and which ones are here."""
        index = tokens - self.first
        here = (index >= 0) & (index < weight.shape[0])
        return torch.where(here, index, 0), here
