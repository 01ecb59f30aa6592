"""Inductor settings for compiled layers: kernel selection and the cache on disk."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch.utils.flop_counter import flop_registry

from megalith.compat.torch_inductor import (
    KernelChoices,
    KernelFeatures,
    Scheduler,
    SchedulerNode,
    cache_custom_autograd_functions,
    cache_functions,
    post_grad_pass,
    reduces_rows,
    set_kernel_choices,
    waits_before,
)
from megalith.parallel.overlap.interleave import ATTENTION_FLOPS, Interleave

MAX_WIDTH = 8192  # elements that a Triton program holds in registers


def prepare_compiler() -> None:
    """Configure Inductor. Call it once per process, before a layer is compiled for GPUs."""
    set_kernel_choices(_Choices())
    flop_registry.update(ATTENTION_FLOPS)  # torch uses these to choose what to recompute
    cache_whole_layers()


def cache_whole_layers() -> None:
    """Let torch cache compiled forward and backward graphs of a layer on disk, so that later runs skip tracing.

    By default torch does not cache graphs with autograd functions or a choice of attention kernels, because it cannot
    know what they depend on. Ours depend only on their code: traced code is part of the cache key already, and a hash
    of the files that define operators is added to it.
    """
    key = torch.__version__ + operators_hash()
    cache_custom_autograd_functions()
    choices = ("_sdpa_kernel", "_backend_from_string")  # `with sdpa_kernel(...)` is traced to these
    cache_functions({f"torch.nn.attention.{function}": key for function in choices})


def operators_hash() -> str:
    """Return a hash of this file, which chooses kernels, and of the files that define operators."""
    package = Path(__file__).parents[2]
    files = sorted(
        file for name in ("comm", "compat", "ops", "parallel") for file in package.glob(f"{name}/**/*.py")
    )
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


class _Choices(KernelChoices):
    @staticmethod
    def should_use_persistent_reduction(features: KernelFeatures, cooperative_reduction: bool) -> bool:
        """Make norms read each row once. By default Inductor reads rows of more than 1,024 elements twice.

        On an H200 the forward norms of a layer of width 1,280 take 0.18 ms instead of 0.35. The choice must not depend
        on timing, as with Inductor's multi-kernels, because a resumed run could then round differently.
        """
        if reduces_rows(features, MAX_WIDTH):
            return True
        return KernelChoices.should_use_persistent_reduction(features, cooperative_reduction)

    @staticmethod
    def can_fuse_horizontal(
        scheduler: Scheduler, node1: SchedulerNode, node2: SchedulerNode, shared_data_score: int
    ) -> bool:
        """Prevent fusion across the two halves of a ping-pong micro-batch.

        They share weights, so Inductor would fuse their norms into one kernel, which would wait for the collectives of
        both halves. Then neither would overlap the matmuls of the other.
        """
        is_ping_pong = isinstance(post_grad_pass(), Interleave)
        if is_ping_pong and waits_before(scheduler, node1) != waits_before(scheduler, node2):
            return False
        return KernelChoices.can_fuse_horizontal(scheduler, node1, node2, shared_data_score)
