"""Norms of the gradient and of the update per layer, over all ranks, in steps selected by `log.log_norms_interval`.

A layer is a block of the model (`layers.0`), or a module outside of the blocks (`embedding`, `output_layer`). Each
element counts once, on the owner of its shard.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_reduce_no_grad, gather_json
from megalith.parallel.shards import LocalParameters

LAYER = re.compile(r"^(.*?layers\.\d+|[^.]+)")


class LayerNorms:
    """Norms per layer, over the trained parameters. Methods are collective over `world`."""

    def __init__(
        self,
        parameters: LocalParameters,
        world: Axis,
        local_squares: Callable[[list[Tensor]], Tensor],
        counted_elsewhere: Collection[str] = (),
        device: torch.device | str = "cpu",
    ):
        """Group this rank's parameters by layer. See `GradientSquares` for the arguments."""
        self._world, self._device, self._local_squares = world, device, local_squares
        self._layers: dict[str, list[Tensor]] = {}
        names = []
        for name, plain in parameters.named:
            if not plain.requires_grad:
                continue
            layer = LAYER.match(name)[1]
            names.append(layer)
            if parameters.shards[name].owned and plain.numel() and name not in counted_elsewhere:
                self._layers.setdefault(layer, []).append(plain)
        self._names = sorted({name for each in gather_json(names, world) for name in each}, key=_natural)

    @torch.no_grad()
    def gradients(self) -> Tensor:
        """Return the norms of the gradients in `.grad`, float32 [layers] in the order of `named`."""
        return self._norms(
            {
                layer: [plain.grad for plain in weights if plain.grad is not None]
                for layer, weights in self._layers.items()
            }
        )

    @torch.no_grad()
    def weights(self) -> dict[str, list[Tensor]]:
        """Return copies of this rank's weights by layer, for `updates`."""
        return {
            layer: [plain.detach().clone() for plain in weights] for layer, weights in self._layers.items()
        }

    @torch.no_grad()
    def updates(self, before: Mapping[str, list[Tensor]]) -> Tensor:
        """Return the norms of the change since `before`, a result of `weights`. Overwrites `before`."""
        for layer, copies in before.items():
            for copy, plain in zip(copies, self._layers[layer], strict=True):
                copy.sub_(plain)
        return self._norms(before)

    def named(self, norms: Tensor) -> dict[str, float]:
        """Return a dict from layer name to norm. Waits for the device."""
        return dict(zip(self._names, norms.tolist(), strict=True))

    def _norms(self, tensors: Mapping[str, list[Tensor]]) -> Tensor:
        zero = torch.zeros((), device=self._device)
        squares = [self._local_squares(tensors[name]) if tensors.get(name) else zero for name in self._names]
        return all_reduce_no_grad(torch.stack(squares), self._world).sqrt()


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders numbers in a name by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
