"""Settings, choices and graph passes of Inductor, torch's compiler. Importing this takes seconds."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config, ir
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.virtualized import V

KernelChoices = InductorChoices
"""Base class of choices. Static methods: should_use_persistent_reduction(features, cooperative_reduction) and
can_fuse_horizontal(scheduler, node1, node2, shared_data_score), which return booleans."""

KernelFeatures, SchedulerNode = SIMDKernelFeatures, BaseSchedulerNode
"""A kernel to be generated, and a node of the scheduler's graph."""

GraphPass = CustomGraphPass
"""Base class of passes over the graph: __call__(graph) changes it, and uuid() is its part of the cache key."""

hash_files = get_hash_for_files
"""Hash of torch's version and the contents of files, for GraphPass.uuid: (paths) -> bytes."""


def set_activation_budget(fraction: float) -> None:
    """Set the fraction of activations that layers compiled after this call may save for the backward pass."""
    torch._functorch.config.activation_memory_budget = fraction


def cache_custom_autograd_functions() -> None:
    """Let torch cache compiled graphs with autograd functions on disk. Their traced code is part of the key."""
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True


def cache_functions(keys: dict[str, str]) -> None:
    """Let torch cache graphs that call these functions. `keys` maps a qualified name to its cache key."""
    config.unsafe_marked_cacheable_functions = keys


def set_kernel_choices(choices: KernelChoices) -> None:
    """Make Inductor choose kernels with `choices`."""
    V.set_choices_handler(choices)


def reduces_rows(features: KernelFeatures, max_width: int) -> bool:
    """Return True if a kernel reduces along contiguous rows that are known to have at most `max_width` elements."""
    along_rows = features.get_reduction_hint() is ReductionHint.INNER
    return along_rows and V.graph.sizevars.statically_known_leq(features.reduction_numel, max_width)


def post_grad_pass() -> Any:
    """Return the custom pass over the graph that is being compiled, or None."""
    return config.post_grad_custom_post_pass


def waits_before(scheduler: Scheduler, node: SchedulerNode) -> set[str]:
    """Return the names of the collective waits among the nodes that `node` depends on."""
    return {name for name in node.ancestors if isinstance(scheduler.name_to_node[name].node, ir._WaitKernel)}
