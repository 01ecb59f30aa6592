"""Tensor parallelism (Shoeybi et al. 2019) and sequence parallelism (Korthikanti et al. 2022).

Linears come in pairs, and a pair needs one collective each way. The first is column parallel (output rows are sharded:
each rank computes some of the heads or of the MLP's columns), the second row parallel (input columns are sharded), so
that each rank has a partial sum, which is reduced. Without SP the residual stream is replicated. With SP it is sharded
by tokens (all sequences of the micro-batch concatenated) for norms, dropout and additions; the reduction is then a
reduce-scatter, and an all-gather comes before the next pair: the same bytes, and 1/tp of the stream's memory.

    without SP   x ──(dgrad all-reduced)─ column ── row ──all-reduce──────────────── + bias
    with SP      x ──all-gather───────── column ── row ──reduce-scatter──────────── + bias

Parameters are DTensors over the axis, sharded by the table ROLES (roles.py). A replicated parameter that a rank uses
only on its own tokens or heads has a partial gradient there; one all-reduce after the backward pass sums those.

Vocabulary: each rank has ⌈rows / tp⌉ consecutive rows of the padded embedding and of the output matrix, the last ranks
fewer where that is uneven. The padding is the model's own and never depends on the axis. A token's
embedding comes from one rank, and the others add zeros. In the loss no rank has a full row of logits
(ops/cross_entropy.py).
"""

from __future__ import annotations

from collections.abc import Collection
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
from megalith.models.mixers.mamba2 import Mamba2
from megalith.models.mixers.mla import LatentAttention
from megalith.models.moe import GroupedLinear
from megalith.models.norm import HeadsNorm
from megalith.models.pass_context import Context, PassLayout
from megalith.models.transformer import Transformer, layers_of, stacks_of
from megalith.ops.compiled import depend_on
from megalith.ops.cross_entropy import linear_cross_entropy
from megalith.ops.gemm import DeferredWgrad, Gemm, Operand, has_wgrad, linear
from megalith.ops.vocab_softmax import ORDINARY, HeadMath, linear_logits, local_rows, softcapped
from megalith.parallel.seams import plug, replace_parameter
from megalith.parallel.tensor.roles import ALWAYS, UNDER_SP, Role, role_of, shared_modules


class TensorParallel:
    """The collectives around a layer's matmuls, and the styles of its linears.

    Args:
        axis: the tensor-parallel axis.
        sequence_parallel: shard the residual stream by tokens.
        saves_gathered_inputs: compiled column-parallel linears may save their gathered input for the backward pass.
    """

    def __init__(self, axis: Axis, sequence_parallel: bool, saves_gathered_inputs: bool = True):
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self.saves_gathered_inputs = saves_gathered_inputs

    def pass_layout(
        self, tokens: int, *, trains: bool, has_position_ids: bool, cp_size: int | None = None
    ) -> PassLayout:
        """Shard the tokens under SP. Generation feeds one token at a time, which cannot be sharded."""
        divides = tokens % self.axis.size == 0
        if self.sequence_parallel and not divides and torch.is_grad_enabled():
            raise ConfigError(
                f"parallel.sequence_parallel cannot shard {tokens} tokens over {self.axis.size} tensor-parallel ranks; "
                "choose a sequence length that tensor_model_parallel_size divides"
            )
        return PassLayout(sharded=self.sequence_parallel and divides)

    def gather(self, x: Tensor, context: Context) -> Tensor:
        """All-gather the residual stream under SP: [1, tokens / tp, h] -> [1, tokens, h]. Gradients are summed."""
        return all_gather(x, self.axis, 1) if context.layout.sharded else all_reduce_gradient(x, self.axis)

    def reduce(self, x: Tensor, context: Context) -> Tensor:
        """Sum partial outputs [batch, seq, h] for the residual stream, which is [1, tokens / tp, h] under SP."""
        if not context.layout.sharded:
            return all_reduce(x, self.axis)
        return reduce_scatter(x.reshape(1, -1, x.shape[-1]), self.axis, 1)

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, for use on each rank's own heads. Gradients are summed too."""
        return all_reduce_gradient(all_reduce(x, self.axis), self.axis)

    def shard_sequence(self, x: Tensor, layout: PassLayout) -> Tensor:
        """Return this rank's slice of a per-token tensor: [batch, seq] -> under SP [1, tokens / tp]."""
        return self.to_sp_order(x, layout).chunk(self.axis.size, 1)[self.axis.rank] if layout.sharded else x

    def to_sp_order(self, x: Tensor, layout: PassLayout) -> Tensor:
        """Order a per-token tensor by rank under SP: [batch, seq, ...] -> [1, tokens, ...]."""
        if not layout.sharded:
            return x
        by_rank = x.reshape(layout.micro_batches, self.axis.size, -1, *x.shape[2:]).transpose(0, 1)
        return by_rank.reshape(1, -1, *x.shape[2:])

    def reduce_sequence(self, x: Tensor, layout: PassLayout) -> Tensor:
        """Sum the ranks' results for their tokens. All ranks then compute the same from the sum."""
        return all_reduce(x, self.axis) if layout.sharded else x

    def from_sp_order(self, x: Tensor, layout: PassLayout, batch: int) -> Tensor:
        """Invert `to_sp_order`: [1, tokens, ...] -> [batch, seq, ...]."""
        if not layout.sharded:
            return x
        by_sequence = x.reshape(self.axis.size, layout.micro_batches, -1, *x.shape[2:]).transpose(0, 1)
        return by_sequence.reshape(batch, -1, *x.shape[2:])

    def column(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, context: Context) -> Tensor:
        """Compute a column-parallel linear. Returns [batch, seq, out / tp], or under SP [1, tokens, out / tp].

        weight is [out / tp, h], bias [out / tp].
        """
        sharded, edge = context.layout.sharded, gemm.edge(weight)
        saves, trains = has_wgrad(weight), torch.is_grad_enabled()
        regather = sharded and not self.saves_gathered_inputs
        y = _ColumnLinear.apply(
            x.flatten(0, -2), weight, bias, gemm, edge, saves, trains, self.axis, sharded, regather
        )
        return y[None] if sharded else y.unflatten(0, x.shape[:-1])

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: Gemm, context: Context) -> Tensor:
        """Compute a row-parallel linear. Returns the residual stream, [batch, seq, h] or under SP [1, tokens / tp, h].

        x is [batch, seq, in / tp], weight [h, in / tp], bias [h].
        """
        x = self.reduce(linear(x, weight, None, gemm), context)
        return x if bias is None else x + bias


class _ColumnLinear(torch.autograd.Function):
    """x · weightᵀ + bias of all tokens.

    With SP, the input is all-gathered. Only this rank's tokens are saved for the backward pass, which gathers them
    again. torch.compile would merge the two gathers and save the result, unless the second one depends on the gradient
    (`regather`).

    In the backward pass, the gather overlaps dgrad, and the reduction of dgrad overlaps wgrad. If wgrad is deferred, so
    is the gather.
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
        regather: bool,
    ) -> Tensor:  # x [tokens, or with SP tokens / tp, h] -> [tokens, out / tp]
        operand, saved = gemm.inputs(x, saves, sharded)
        weight, saved_weight = gemm.weights(weight, trains)
        ctx.save_for_backward(*saved_weight, *saved)
        ctx.gemm, ctx.edge, ctx.axis, ctx.sharded = gemm, edge, axis, sharded
        ctx.weight_tensors = len(saved_weight)
        ctx.regather = regather
        if sharded:
            operand = end_gather(begin_gather(operand, axis), operand)
        return gemm.forward(operand, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        saved = ctx.saved_tensors  # read once, because a recomputed layer returns them only once
        weight, x = saved[: ctx.weight_tensors], saved[ctx.weight_tensors :]
        gemm, axis, grad_weight = ctx.gemm, ctx.axis, None
        grad_output = grad
        grad_by_row, grad = gemm.gradients(grad, ctx.needs_input_grad[1])
        gathers = ctx.sharded and ctx.needs_input_grad[1] and ctx.edge is None
        if ctx.regather and torch.compiler.is_compiling():
            x = [depend_on(each, grad_output) if each.dim() else each for each in x]
        gathering = begin_gather(x, axis) if gathers else None
        begin = begin_reduce_scatter if ctx.sharded else begin_all_reduce
        reducing = begin(gemm.dgrad(grad_by_row, weight), axis)
        if gathering is not None:
            x = end_gather(gathering, x)
        if ctx.edge is not None:
            gemm.deferred.append(DeferredWgrad(partial(_wgrad, gemm, grad, x, axis, ctx.sharded), ctx.edge))
        elif ctx.needs_input_grad[1]:
            grad_weight = gemm.wgrad(grad, x)
        return wait(reducing), grad_weight, None, None, None, None, None, None, None, None


def _wgrad(gemm: Gemm, grad: Operand, x: Operand, axis: Axis, sharded: bool) -> Tensor:
    return gemm.wgrad(grad, end_gather(begin_gather(x, axis), x) if sharded else x)


def begin_gather(operand: Operand, axis: Axis) -> list[Tensor]:
    """Start the all-gather of an operand, which `end_gather` returns. Codes are sent as bytes, as gloo has no FP8."""
    return [begin_all_gather(_as_bytes(each), axis) if each.dim() else each for each in operand]


def end_gather(gathering: list[Tensor], operand: Operand) -> list[Tensor]:
    """Return the operand of all ranks' tokens."""
    return [wait(each).view(local.dtype) if local.dim() else each for each, local in zip(gathering, operand)]


def _as_bytes(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


class SharedKVGroup:
    """Rows of linear_qkv (or linear_kv) that this rank uses if several ranks share a KV group.

    The rows are this rank's own query heads (in linear_qkv only), and the group's key and value.
    """

    def __init__(self, axis: Axis, attention: SelfAttention | CrossAttention, groups: int):
        ranks = axis.size // groups  # per group
        group, rank = divmod(axis.rank, ranks)
        size, heads = attention.head_dim, attention.heads.in_group
        if isinstance(attention, CrossAttention):
            self.spans = [(group * 2 * size, 2 * size)]  # first row, rows
            return
        first = group * (heads + 2) * size
        queries = (first + rank * (heads // ranks) * size, heads // ranks * size)
        self.spans = [queries, (first + heads * size, 2 * size)]

    def rows(self, parameter: Tensor) -> Tensor:
        """Return [(local query heads + 2) · head_dim, ...], or of linear_kv [2 · head_dim, ...]."""
        return torch.cat([parameter.narrow(0, *span) for span in self.spans])


class SharedMambaGroup:
    """Rows of linear_zxbcdt and units of conv_xbc that this rank uses if several ranks share a group of Mamba-2.

    The rows are z, x and dt of this rank's own heads, and the group's B and C.
    """

    def __init__(self, axis: Axis, mixer: Mamba2, groups: int):
        self.axis, self.groups = axis, groups
        ranks = axis.size // groups  # per group
        self.group, rank = divmod(axis.rank, ranks)
        heads, states = mixer.heads_in_group, 2 * mixer.state_dim
        width = heads * mixer.head_dim
        here, dt = width // ranks, heads // ranks
        conv, linear = self.group * (width + states), self.group * (2 * width + states + heads)
        self._units = [(conv + rank * here, here), (conv + width, states)]
        self._rows = [
            (linear + rank * here, here),
            (linear + width + rank * here, here),
            (linear + 2 * width, states),
            (linear + 2 * width + states + rank * dt, dt),
        ]

    def rows(self, parameter: Tensor) -> Tensor:
        """Return the rows of linear_zxbcdt's weight or bias."""
        return torch.cat([parameter.narrow(0, *span) for span in self._rows])

    def units(self, parameter: Tensor) -> Tensor:
        """Return the units of conv_xbc's taps or bias."""
        return torch.cat([parameter.narrow(0, *span) for span in self._units])

    def total(self, tensor: TensorParallel, squares: Tensor) -> Tensor:
        """Return the sum of `squares` [..., 1, 1] over the ranks that hold heads of the same Mamba-2 group."""
        before, after = self.group, self.groups - self.group - 1
        return tensor.sum_over_ranks(F.pad(squares, (0, 0, before, after))).narrow(-2, before, 1)


def apply_tensor(
    model: Transformer, axis: Axis, sequence_parallel: bool, saves_gathered_inputs: bool = True
) -> TensorParallel | None:
    """Shard a model's parameters, heads and vocabulary over the tensor axis, in place.

    Args:
        model: the model or a stage of it, on the meta device. Its sizes have passed `parallel_rules.check_tensor`.
        axis: the tensor axis. Size 1 changes nothing.
        sequence_parallel: shard the residual stream by tokens.
        saves_gathered_inputs: see TensorParallel.

    Returns:
        The collectives, or None for an axis of size 1.
    """
    if axis.size == 1:
        return None
    tensor = TensorParallel(axis, sequence_parallel, saves_gathered_inputs)
    for stack in stacks_of(model):
        plug(stack, "pass_layout", tensor.pass_layout)
        plug(stack, "shard_sequence", tensor.shard_sequence)
        plug(stack, "reduce_sequence", tensor.reduce_sequence)
    groups = model.config.query_groups
    for _, module, role in _roles(model, axis.size):
        if isinstance(module, HeadsNorm):
            plug(module, "total", tensor.sum_over_ranks)
        distribute_parameters(module, role, axis)
        if role.style is not None:
            plug(module, "style", getattr(tensor, role.style))
    for layer in layers_of(model).values():
        for mixer in layer.mixers:
            if isinstance(mixer, Attention):
                _shard_heads(mixer, tensor, groups)
            if isinstance(mixer, Mamba2) and model.config.mamba_num_groups < axis.size:
                _share_mamba_groups(mixer, tensor, model.config.mamba_num_groups)
    vocabulary = VocabParallel(tensor, model.config.padded_vocab_size)
    plug(model, "loss", vocabulary.loss)
    plug(model, "logprobs", vocabulary.logprobs)
    plug(model, "logits", vocabulary.logits)
    if model.embedding is not None:
        plug(model.embedding, "lookup", vocabulary.lookup)
    return tensor


def _roles(model: Transformer, ranks: int) -> list[tuple[str, nn.Module, Role]]:
    """Return name, module and role of every module with parameters, except experts (expert_parallel.py)."""
    shared, roles = shared_modules(model.config, ranks), []
    for name, module in model.named_modules():
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if has_parameters and not isinstance(module, GroupedLinear):
            owner = model.get_submodule(name.rpartition(".")[0])
            roles.append((name, module, role_of(name, module, shared, owner)))
    return roles


def partial_gradients(model: Transformer, ranks: int, sequence_parallel: bool) -> frozenset[str]:
    """Return the names of the parameters whose gradients must be summed over a tensor axis of `ranks` ranks."""
    if ranks == 1:
        return frozenset()
    return frozenset(
        f"{name}.{kind}"
        for name, _, role in _roles(model, ranks)
        for kind, when in (("weight", role.partial_weight), ("bias", role.partial_bias))
        if when == ALWAYS or (when == UNDER_SP and sequence_parallel)
    )


@torch.no_grad()
def reduce_partial_gradients(model: nn.Module, axis: Axis, names: Collection[str]) -> None:
    """Sum the gradients of these parameters (`partial_gradients`) over the tensor axis, in one fp32 all-reduce.

    Call it after the backward pass and before the gradient norm. Gradients may be plain tensors or DTensors.
    """
    if not names:
        return
    parameters = model.named_parameters()
    gradients = [local(p.grad) for name, p in parameters if name in names and p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([gradient.flatten().float() for gradient in gradients])
    sums = all_reduce_no_grad(flat, axis).split([gradient.numel() for gradient in gradients])
    torch._foreach_copy_(gradients, [total.view_as(gradient) for gradient, total in zip(gradients, sums)])


def distribute_parameters(module: nn.Module, role: Role, axis: Axis) -> None:
    """Replace the module's own parameters by DTensors over the axis."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # see `local`

    for kind, parameter in list(module.named_parameters(recurse=False)):
        dim = getattr(role, kind)
        placement = Replicate() if dim is None else Shard(dim)
        dtensor = distribute_tensor(parameter, axis.mesh, [placement], src_data_rank=None)
        replace_parameter(module, kind, nn.Parameter(dtensor, requires_grad=parameter.requires_grad))


def _shard_heads(attention: Attention, tensor: TensorParallel, groups: int) -> None:
    """Assign this rank's contiguous range of query heads to the attention module, even if several ranks share a KV
    group.

    groups: the model's number of KV groups.
    """
    size, in_group = tensor.axis.size, attention.heads.in_group
    first = tensor.axis.rank * groups * in_group // size
    if isinstance(attention, LatentAttention):
        plug(attention, "gather", tensor.gather)
    if groups < size:
        shared = attention.linear_kv if isinstance(attention, CrossAttention) else attention.linear_qkv
        plug(shared, "rows", SharedKVGroup(tensor.axis, attention, groups).rows)
        in_group = in_group * groups // size
    plug(attention, "heads", Heads(in_group, first))


def _share_mamba_groups(mixer: Mamba2, tensor: TensorParallel, groups: int) -> None:
    """Give Mamba-2 this rank's heads of a group that several ranks share."""
    shared = SharedMambaGroup(tensor.axis, mixer, groups)
    plug(mixer, "heads_in_group", mixer.heads_in_group * groups // tensor.axis.size)
    plug(mixer.linear_zxbcdt, "rows", shared.rows)
    plug(mixer.conv_xbc, "rows", shared.units)
    if mixer.gated_norm is not None:
        plug(mixer.gated_norm, "total", partial(shared.total, tensor))
    if (adapter := mixer.linear_zxbcdt.adapter) is not None:
        for b in (*adapter.lora_B.values(), *(adapter.initial_B or {}).values()):
            plug(b, "rows", shared.rows)


class VocabParallel:
    """Lookup, loss and logits over a vocabulary that is sharded over the tensor axis."""

    def __init__(self, tensor: TensorParallel, padded_vocab: int):
        self.tensor, self.axis = tensor, tensor.axis
        self.rows = -(-padded_vocab // self.axis.size)  # per rank; the last ranks may have fewer
        self.first = self.axis.rank * self.rows

    def lookup(self, input_ids: Tensor, weight: Tensor, context: Context) -> Tensor:
        """Return the embeddings [batch, seq, hidden], under SP [1, tokens / tp, hidden], summed over the ranks."""
        tokens = self.tensor.to_sp_order(input_ids, context.layout)
        index, here = local_rows(tokens - self.first, weight.shape[0])
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
        math: HeadMath = ORDINARY,
    ) -> Tensor:
        """Return `ops.cross_entropy.linear_cross_entropy`, the same on every rank. weight [local rows, hidden]."""
        labels, loss_mask = (self.tensor.to_sp_order(x, context.layout) for x in (labels, loss_mask))
        shard = dict(
            axis=self.axis,
            first=self.first,
            rows=self.rows,
            bias=bias,
            math=math,
            max_label_tokens=context.max_label_tokens,
            z_loss_coeff=context.output_z_loss_coeff,
            z_loss_sum=context.output_z_loss_sum,
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
        math: HeadMath = ORDINARY,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return `models.loss.compute_logprobs`, the same on every rank, as [batch, seq]."""
        layout = context.layout
        shard = dict(axis=self.axis, first=self.first, rows=self.rows, bias=bias, math=math)
        tokens = {name: self.tensor.to_sp_order(x, layout) for name, x in objective.tokens.items()}
        hidden, targets = self.tensor.gather(hidden, context), self.tensor.to_sp_order(targets, layout)
        *outputs, loss = compute_logprobs(
            objective, hidden, weight, targets, tokens, vocab_size, softcap, scale, **shard
        )
        ordered = [
            None if x is None else self.tensor.from_sp_order(x, layout, context.batch) for x in outputs
        ]
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
        math: HeadMath = ORDINARY,
    ) -> Tensor:
        """Return logits [batch, seq, vocab] on every rank, without the vocabulary's padding."""
        shard = linear_logits(
            self.tensor.gather(x, context), weight, bias=bias, math=math
        )  # [..., local rows]
        shard = F.pad(shard, (0, self.rows - shard.shape[-1]))
        logits = all_gather_replicated(shard, self.axis, -1)[..., :vocab_size]
        return softcapped(logits.reshape(context.batch, -1, vocab_size), softcap)
