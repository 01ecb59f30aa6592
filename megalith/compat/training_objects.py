"""Private attributes of tensors, modules, samplers and optimizers, and of autograd."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import RandomSampler


def tensor_version(tensor: Tensor) -> int:
    """Return a number that increases with every in-place change of the tensor."""
    return tensor._version


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Return the names of the module's own buffers that are not in its state dict."""
    return module._non_persistent_buffers_set


def requested_samples(sampler: RandomSampler) -> int | None:
    """Return the num_samples that a RandomSampler was created with, or None for the length of its data."""
    return sampler._num_samples


def supports_amp_scaling(optimizer: Optimizer) -> bool:
    """Return True if `step` divides gradients by optimizer.grad_scale and skips if optimizer.found_inf is 1."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def mark_stepped(optimizer: Optimizer) -> None:
    """Record that the optimizer has stepped, so that schedulers do not warn about their order."""
    optimizer._opt_called = True


def mark_counting_step(step: Callable) -> Callable:
    """Mark a `step` function as already counting its calls, so schedulers do not wrap it."""
    step._wrapped_by_lr_sched = True
    return step


def in_backward_pass() -> bool:
    """Return True while autograd runs a backward pass on this thread, as during recomputation."""
    return torch._C._current_graph_task_id() != -1
