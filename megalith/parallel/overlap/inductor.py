"""Inductor's settings for compiled layers: which kernels it chooses, and what it keeps on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch._inductor import config, ir
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler
from torch._inductor.virtualized import V
from torch.utils.flop_counter import flop_registry

from megalith.parallel.overlap.interleave import ATTENTION_FLOPS, Interleave

MAX_WIDTH = 8192  # elements that a Triton program holds in registers


def set_activation_budget(fraction: float) -> None:
    """Set the fraction of activations, 0 to 1, that layers compiled from now on may save for the backward pass."""
    torch._functorch.config.activation_memory_budget = fraction


def prepare_compiler() -> None:
    """Configure Inductor. Call it once per process, before a layer is compiled for GPUs."""
    V.set_choices_handler(_Choices())
    flop_registry.update(ATTENTION_FLOPS)  # torch uses these to choose what to recompute
    cache_whole_layers()


def cache_whole_layers() -> None:
    """Let torch cache the compiled passes of a layer on disk, so that later runs skip tracing.

    By default torch does not cache graphs with autograd functions or a choice of attention kernels, because it cannot
    know what they depend on. Ours depend only on their code: traced code is part of the cache key already, and a hash
    of the files that define operators is added to it.
    """
    key = torch.__version__ + operators_hash()
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    choices = ("_sdpa_kernel", "_backend_from_string")  # `with sdpa_kernel(...)` is traced to these
    config.unsafe_marked_cacheable_functions = {f"torch.nn.attention.{function}": key for function in choices}


def operators_hash() -> str:
    """Return a hash of the files that define operators, and of this one, which chooses among kernels."""
    package = Path(__file__).parents[2]
    files = sorted(file for name in ("comm", "ops", "parallel") for file in package.glob(f"{name}/**/*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Choices(InductorChoices):
    @staticmethod
    def should_use_persistent_reduction(features: SIMDKernelFeatures, cooperative_reduction: bool) -> bool:
        """Make norms read each row once. By default Inductor reads rows of more than 1,024 elements twice.

        On an H200 the forward norms of a layer of width 1,280 take 0.18 ms instead of 0.35. The choice must not depend
        on timing, as with Inductor's multi-kernels, because a resumed run could then round differently.
        """
        along_rows = features.get_reduction_hint() is ReductionHint.INNER
        if along_rows and V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_WIDTH):
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    @staticmethod
    def can_fuse_horizontal(
        scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int
    ) -> bool:
        """Keep the two halves of a ping-pong micro-batch apart.

        They share weights, so Inductor would fuse their norms into one kernel, which would wait for the collectives of
        both halves. Then neither would overlap the matmuls of the other.
        """
        if isinstance(config.post_grad_custom_post_pass, Interleave) and _waits_before(
            scheduler, node1
        ) != _waits_before(scheduler, node2):
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)


def _waits_before(scheduler: Scheduler, node: BaseSchedulerNode) -> set[str]:
    """Return the waits for collectives that a kernel depends on."""
    return {name for name in node.ancestors if isinstance(scheduler.name_to_node[name].node, ir._WaitKernel)}
