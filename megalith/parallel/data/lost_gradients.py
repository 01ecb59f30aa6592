"""Where NaN or Inf began: each rank's own gradients, looked at before they are summed over the ranks.

After a step the gradient of a parameter is a sum over ranks, and NaN in it says nothing of the rank that it came from.
So the backward pass is made once more with a hook on every parameter, which sees what this rank alone gives. Backward
passes go from the loss to the embedding and carry NaN along: the first that is met is the nearest to its origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Watched:
    """The parameters whose gradient of some micro-batch was not finite on this rank, in the order they were met."""

    def __init__(self) -> None:
        self._met: dict[str, Tensor] = {}

    def see(self, name: str, gradient: Tensor) -> None:
        own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        lost = ~own.isfinite().all()
        self._met[name] = self._met[name] | lost if name in self._met else lost

    def names(self) -> list[str]:
        """Waits for the device."""
        return [name for name, lost in self._met.items() if lost]


@contextmanager
def watched_gradients(chunks: Iterable[nn.Module]) -> Iterator[Watched]:
    """In it, forward and backward passes are made without compiled code and fill the Watched."""
    watched, handles = Watched(), []
    hooked: dict[int, nn.Parameter] = {}

    def hook(prefix: str, module: nn.Module) -> None:
        # Called when the layer's parameters are gathered: the tensors that autograd will see are there only now. Those
        # of the modules inside too, since a norm is not always called as a module.
        for own_name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in hooked:
                name = f"{prefix}.{own_name}" if prefix else own_name
                hooked[id(parameter)] = parameter
                handles.append(parameter.register_hook(lambda grad, name=name: watched.see(name, grad)))

    for chunk in chunks:
        for prefix, module in chunk.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda module, _, prefix=prefix: hook(prefix, module))
            )
    try:
        with torch.compiler.set_stance("force_eager"):
            yield watched
    finally:
        for handle in handles:
            handle.remove()
