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

MAX_WIDTH = 8192  # elements that a program holds in registers


def set_activation_budget(share: float) -> None:
    """`share`: of what layers compiled from here on would keep for the backward pass what they may, 0 to 1."""
    torch._functorch.config.activation_memory_budget = share


def prepare_compiler() -> None:
    """Once for the process, before a layer is compiled for GPUs."""
    V.set_choices_handler(_Choices())
    flop_registry.update(ATTENTION_FLOPS)  # by which torch weighs what to compute again
    cache_whole_layers()


def cache_whole_layers() -> None:
    """Lets torch keep on disk what it makes of a layer's two passes, so that a later start need not trace them anew.

    It keeps none with an autograd function or a choice of attention kernels inside, as it cannot know in general what
    these depend on. Ours depend on their code alone: what is traced is in the key, and of operators of our own, which
    torch does not look into, the files are put there.
    """
    key = torch.__version__ + operators_hash()
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    choices = ("_sdpa_kernel", "_backend_from_string")  # what `with sdpa_kernel(...)` is traced to
    config.unsafe_marked_cacheable_functions = {f"torch.nn.attention.{function}": key for function in choices}


def operators_hash() -> str:
    """Of the files that define operators, this one too, which chooses among kernels."""
    package = Path(__file__).parents[2]
    files = sorted(file for name in ("comm", "ops", "parallel") for file in package.glob(f"{name}/**/*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Choices(InductorChoices):
    @staticmethod
    def should_use_persistent_reduction(features: SIMDKernelFeatures, cooperative_reduction: bool) -> bool:
        """A norm reads its row once: Inductor by itself does so up to 1,024 elements, and reads longer rows twice.

        On an H200 the forward norms of a layer of width 1,280 take 0.18 ms and not 0.35. The choice must not be made
        by timing at the start, as Inductor's multi-kernels make it: a run that goes on would round in another way.
        """
        along_rows = features.get_reduction_hint() is ReductionHint.INNER
        if along_rows and V.graph.sizevars.statically_known_leq(features.reduction_numel, MAX_WIDTH):
            return True
        return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    @staticmethod
    def can_fuse_horizontal(
        scheduler: Scheduler, node1: BaseSchedulerNode, node2: BaseSchedulerNode, shared_data_score: int
    ) -> bool:
        """The halves of a micro-batch share weights, for which Inductor would put the norms of both into one kernel:
        it would wait for the collectives of both, and neither would overlap the other's matmuls."""
        if isinstance(config.post_grad_custom_post_pass, Interleave) and _awaited(
            scheduler, node1
        ) != _awaited(scheduler, node2):
            return False
        return InductorChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)


def _awaited(scheduler: Scheduler, node: BaseSchedulerNode) -> set[str]:
    """The waits for collectives that stand before a kernel."""
    return {name for name in node.ancestors if isinstance(scheduler.name_to_node[name].node, ir._WaitKernel)}
