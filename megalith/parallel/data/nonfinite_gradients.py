"""Finds the parameters at which NaN or Inf first appears in a rank's local gradients.

After a step, a gradient is a sum over ranks, so NaN in it does not show which rank it came from. Therefore the backward
pass is repeated with a hook on every parameter that sees only this rank's gradient. A backward pass runs from the
loss to the embedding and propagates NaN, so the first parameter found is the nearest to its origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.ops.compiled import run_eagerly


class NonfiniteGradients:
    """Parameters that had non-finite gradients on this rank in some micro-batch, in backward order."""

    def __init__(self) -> None:
        self._is_nonfinite: dict[str, Tensor] = {}

    def record(self, name: str, gradient: Tensor) -> None:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        is_nonfinite = ~local.isfinite().all()
        before = self._is_nonfinite.get(name)
        self._is_nonfinite[name] = is_nonfinite if before is None else before | is_nonfinite

    def names(self) -> list[str]:
        """Return the names of the parameters with a non-finite gradient. Waits for the device."""
        return [name for name, is_nonfinite in self._is_nonfinite.items() if is_nonfinite]


@contextmanager
def watch_nonfinite_gradients(chunks: Iterable[nn.Module]) -> Iterator[NonfiniteGradients]:
    """Record non-finite gradients of all forward and backward passes in this context. The passes run uncompiled."""
    nonfinite, handles = NonfiniteGradients(), []
    hooked: dict[int, nn.Parameter] = {}

    def hook(prefix: str, module: nn.Module) -> None:
        # Called when the layer's parameters are gathered, because autograd's tensors exist only then. Hooks parameters
        # of submodules too, because a norm is not always called as a module.
        for suffix, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in hooked:
                name = f"{prefix}.{suffix}" if prefix else suffix
                hooked[id(parameter)] = parameter
                handles.append(parameter.register_hook(lambda grad, name=name: nonfinite.record(name, grad)))

    for chunk in chunks:
        for prefix, module in chunk.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda module, _, prefix=prefix: hook(prefix, module))
            )
    try:
        with run_eagerly():
            yield nonfinite
    finally:
        for handle in handles:
            handle.remove()
