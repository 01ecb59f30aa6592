"""Sums of gradients that are partial on each tensor-parallel rank.

If a rank uses a replicated parameter only on its own tokens or heads, the parameter's gradient on that rank is partial.
One all-reduce after the backward pass sums all partial gradients.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.local_shards import local
from megalith.models.moe import GroupedLinear
from megalith.models.transformer import Transformer
from megalith.parallel.tensor.roles import ALWAYS, UNDER_SP, Role, role_of, shared_modules


def module_roles(model: Transformer, ranks: int) -> list[tuple[str, nn.Module, Role]]:
    """Return (name, module, role) of every module with parameters, except experts (expert_parallel.py)."""
    shared, roles = shared_modules(model.config, ranks), []
    for name, module in model.named_modules():
        has_parameters = any(True for _ in module.parameters(recurse=False))
        if has_parameters and not isinstance(module, GroupedLinear):
            owner = model.get_submodule(name.rpartition(".")[0])
            roles.append((name, module, role_of(name, module, shared, owner)))
    return roles


def partial_gradients(model: Transformer, ranks: int, sequence_parallel: bool) -> frozenset[str]:
    """Return the names of the parameters that need a gradient sum over a tensor axis of `ranks` ranks."""
    if ranks == 1:
        return frozenset()
    return frozenset(
        f"{name}.{kind}"
        for name, _, role in module_roles(model, ranks)
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
