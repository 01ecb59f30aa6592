"""Optimizer state in host memory, with the CPU updating its parameters (after Ren et al. 2021).

The moments of an offloaded parameter stay in host memory. A step processes them slice by slice: weights and gradients
of a slice are copied to the host, the CPU's fused kernel updates the weights, and they are copied back. Several slots
let copies in both directions overlap with the CPU, while the device updates its own parameters:

     down   0 1 2 .  3 .  4 .
     CPU      [  0 ][  1 ][  2 ][  3 ][  4 ]
     up             0     1     2     3     4

The fp32 weights stay on the device and are copied with the gradients in every step, so the host never has outdated
weights. These copies are hidden behind the CPU's update, which moves 28 bytes of host memory per parameter. The host
waits for the device once per step, for the gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

SLICE = 2**22  # elements: 16 MiB of weights and as much of gradients in each slot
SLOTS = 3  # one slice is copied to the host, one updated, one copied back
ALIGNMENT = 64  # elements; slices end at vector boundaries, so that results do not depend on them


def select_for_offload(
    named_parameters: Iterable[tuple[str, Tensor]], fraction: float, never: Collection[str] = ()
) -> frozenset[str]:
    """Select the parameters whose optimizer state is moved to the host. Returns their names.

    The largest parameters are selected first, with at most `fraction` of all elements, and none of `never`.

    Small parameters stay on the device unless everything goes to the host, because offloading them saves almost nothing
    and takes three copies per parameter.
    """
    sizes = sorted(
        ((parameter.numel(), name) for name, parameter in named_parameters),
        key=lambda item: item[0],
        reverse=True,
    )
    left = fraction * sum(size for size, _ in sizes)
    chosen = set()
    for size, name in sizes:
        if 0 < size <= left and name not in never:
            left -= size
            chosen.add(name)
    return frozenset(chosen)


@dataclass(frozen=True)
class _SlicePart:
    """The elements of one parameter that belong to a slice."""

    parameter: nn.Parameter
    elements: slice  # of the flattened parameter
    offset: slice  # in the slice


@dataclass(frozen=True)
class _Slice:
    """Pieces of parameters with the same settings, which are updated together."""

    group: dict[str, Any]  # of the optimizer
    pieces: Sequence[_SlicePart]


class _Slot:
    """Pinned memory for a slice, and events for its two copies."""

    def __init__(self, device: torch.device):
        pinned = device.type != "cpu"
        self.values, self.gradients = (torch.empty(SLICE, pin_memory=pinned) for _ in range(2))
        self.arrived, self.sent = (torch.get_device_module(device).Event() for _ in range(2))


class OffloadedOptimizer(torch.optim.Optimizer):
    """Fused torch Adam, AdamW or SGD. The CPU updates the parameters with state in host memory.

    It has the groups and the state of the wrapped optimizer, so checkpoints do not depend on offloading.
    `optimizer_step` calls `step` after it has set `grad_scale` and `found_inf`. Gradients of parameters updated by the
    CPU stay unchanged.
    """

    _step_supports_amp_scaling = True  # torch's name: `step` uses grad_scale and found_inf

    def __init__(
        self, optimizer: torch.optim.Optimizer, on_host: Collection[nn.Parameter], overlap: bool = True
    ):
        """Wrap `optimizer`. The state of the parameters in `on_host`, all on one device, is kept in host memory.

        Without `overlap`, copies and updates alternate, which takes a third of the pinned memory.
        """
        super().__init__(optimizer.param_groups, {})
        self.state = optimizer.state
        self._optimizer = optimizer
        self._on_host = set(on_host)
        self._slices = [s for group in self.param_groups for s in _slices(group, self._on_host)]
        device = next(iter(on_host)).device
        self._streams = torch.get_device_module(device)
        self._down, self._up = self._streams.Stream(), self._streams.Stream()
        self._slots = [_Slot(device) for _ in range(SLOTS if overlap else 1)]
        self._scalars = torch.empty(2, pin_memory=device.type != "cpu")  # grad_scale, found_inf
        self._scalars_copied = self._streams.Event()

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient. Returns when the CPU has finished."""
        current, scalars = self._streams.current_stream(), torch.stack([self.grad_scale, self.found_inf])
        self._down.wait_stream(current)  # for the gradients and the weights of the last step
        with self._streams.stream(self._down):
            self._scalars.copy_(scalars, non_blocking=True)
            self._scalars_copied.record(self._down)
        for slot, part in zip(self._slots, self._slices):
            self._fetch(part, slot)
        self._step_on_device()
        self._scalars_copied.synchronize()
        grad_scale, found_inf = self._scalars
        if not found_inf:
            self._step_on_host(grad_scale)
        current.wait_stream(self._up)
        current.wait_stream(self._down)  # before the gradients are freed

    def _step_on_device(self) -> None:
        hidden = [(parameter, parameter.grad) for parameter in self._on_host]
        for parameter, _ in hidden:
            parameter.grad = None  # hides it from torch's step
        self._optimizer.grad_scale, self._optimizer.found_inf = self.grad_scale, self.found_inf
        self._optimizer.step()
        del self._optimizer.grad_scale, self._optimizer.found_inf
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def _step_on_host(self, grad_scale: Tensor) -> None:
        for number, part in enumerate(self._slices):
            slot = self._slots[number % len(self._slots)]
            slot.arrived.synchronize()
            self._update(part, slot, grad_scale)
            self._send(part, slot)
            following = number + len(self._slots)
            if following < len(self._slices):
                slot.sent.wait(self._down)
                self._fetch(self._slices[following], slot)
        for parameter in self._on_host:
            if parameter.grad is not None and "step" in self.state[parameter]:
                self.state[parameter]["step"] += 1

    def _fetch(self, part: _Slice, slot: _Slot) -> None:
        with self._streams.stream(self._down):
            for piece in _with_gradient(part):
                slot.values[piece.offset].copy_(piece.parameter.view(-1)[piece.elements], non_blocking=True)
                gradient = piece.parameter.grad.reshape(-1)
                slot.gradients[piece.offset].copy_(gradient[piece.elements], non_blocking=True)
            slot.arrived.record(self._down)

    def _send(self, part: _Slice, slot: _Slot) -> None:
        with self._streams.stream(self._up):
            for piece in _with_gradient(part):
                piece.parameter.view(-1)[piece.elements].copy_(slot.values[piece.offset], non_blocking=True)
            slot.sent.record(self._up)

    def _update(self, part: _Slice, slot: _Slot, grad_scale: Tensor) -> None:
        """Run the fused CPU kernel over the pieces that have a gradient, without advancing their step counts."""
        pieces, group = list(_with_gradient(part)), part.group
        weights = [slot.values[piece.offset] for piece in pieces]
        gradients = [slot.gradients[piece.offset] for piece in pieces]
        common = dict(
            fused=True,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            maximize=False,
            grad_scale=grad_scale,
        )
        if isinstance(self._optimizer, torch.optim.SGD):
            momentum = self._moments(pieces, "momentum_buffer") if group["momentum"] else [None] * len(pieces)
            sgd(
                weights, gradients, momentum,
                momentum=group["momentum"], dampening=group["dampening"], nesterov=group["nesterov"], **common,
            )  # fmt: skip
        else:
            beta1, beta2 = group["betas"]
            adam(
                weights, gradients,
                self._moments(pieces, "exp_avg"), self._moments(pieces, "exp_avg_sq"), [],
                [self.state[piece.parameter]["step"].clone() for piece in pieces],
                beta1=beta1, beta2=beta2, eps=group["eps"], amsgrad=False,
                decoupled_weight_decay=group["decoupled_weight_decay"], **common,
            )  # fmt: skip

    def _moments(self, pieces: Iterable[_SlicePart], key: str) -> list[Tensor]:
        return [self.state[piece.parameter][key].view(-1)[piece.elements] for piece in pieces]


def _with_gradient(part: _Slice) -> Iterator[_SlicePart]:
    return (piece for piece in part.pieces if piece.parameter.grad is not None)


def _slices(group: dict[str, Any], on_host: Collection[nn.Parameter]) -> Iterator[_Slice]:
    """Yield the elements of the group's parameters on the host, SLICE elements at a time."""
    pieces: list[_SlicePart] = []
    filled = 0
    for parameter in group["params"]:
        start = 0 if parameter in on_host else parameter.numel()
        while start < parameter.numel():
            room = (SLICE - filled) // ALIGNMENT * ALIGNMENT
            stop = min(start + room, parameter.numel())
            if stop > start:
                pieces.append(_SlicePart(parameter, slice(start, stop), slice(filled, filled + stop - start)))
                filled += stop - start
            start = stop
            if start < parameter.numel():  # the slice is full
                yield _Slice(group, pieces)
                pieces, filled = [], 0
    if pieces:
        yield _Slice(group, pieces)
