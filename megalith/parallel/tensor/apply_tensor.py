"""Sharding of a model's parameters, heads and vocabulary over the tensor axis.

Parameters become DTensors over the axis, sharded by the table ROLES (roles.py).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from megalith.comm.collectives import Axis
from megalith.models.mixers.attention import Attention, CrossAttention, Heads
from megalith.models.mixers.mamba2 import Mamba2
from megalith.models.mixers.mla import LatentAttention
from megalith.models.norm import HeadsNorm
from megalith.models.transformer import Transformer, layers_of, stacks_of
from megalith.parallel.seams import plug, replace_parameter
from megalith.parallel.tensor.partial_gradients import module_roles
from megalith.parallel.tensor.roles import Role
from megalith.parallel.tensor.shared_groups import SharedKVGroup, SharedMambaGroup
from megalith.parallel.tensor.tensor_parallel import TensorParallel
from megalith.parallel.tensor.vocab_parallel import VocabParallel


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
    for _, module, role in module_roles(model, axis.size):
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


def distribute_parameters(module: nn.Module, role: Role, axis: Axis) -> None:
    """Replace the module's own parameters by DTensors over the axis."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # see `local`

    for kind, parameter in list(module.named_parameters(recurse=False)):
        dim = getattr(role, kind)
        placement = Replicate() if dim is None else Shard(dim)
        dtensor = distribute_tensor(parameter, axis.mesh, [placement], src_data_rank=None)
        replace_parameter(module, kind, nn.Parameter(dtensor, requires_grad=parameter.requires_grad))


def _shard_heads(attention: Attention, tensor: TensorParallel, groups: int) -> None:
    """Assign this rank's contiguous range of query heads to the attention module.

    `groups` is the model's number of KV groups. If there are fewer groups than ranks, several ranks share a group.
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
    """Make a Mamba-2 mixer compute this rank's heads of a group that several ranks share."""
    shared = SharedMambaGroup(tensor.axis, mixer, groups)
    plug(mixer, "heads_in_group", mixer.heads_in_group * groups // tensor.axis.size)
    plug(mixer.linear_zxbcdt, "rows", shared.rows)
    plug(mixer.conv_xbc, "rows", shared.units)
    if mixer.gated_norm is not None:
        plug(mixer.gated_norm, "total", partial(shared.total, tensor))
    if (adapter := mixer.linear_zxbcdt.adapter) is not None:
        for b in (*adapter.lora_B.values(), *(adapter.initial_B or {}).values()):
            plug(b, "rows", shared.rows)
