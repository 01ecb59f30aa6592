"""Optimizer state in host memory, and the part of the step that the CPU then takes (after Ren et al. 2021).

The moments of an offloaded parameter stay in the host's memory. A step goes through them a slice at a time: the
slice's weights and gradient come down to the host, the CPU's fused kernel steps them, the weights go back up. There
are a few slots for slices, so that one comes down and another goes up while the CPU is at a third, and the device
steps the parameters of its own meanwhile:

    down   0 1 2 .  3 .  4 .
    CPU      [  0 ][  1 ][  2 ][  3 ][  4 ]
    up             0     1     2     3     4

The weights stay where they are, in fp32 on the device, and come down with the gradient in every step. So nothing on
the host can be older than they are, whoever has changed them; the copy hides behind the CPU, which moves 28 bytes of
its memory for each parameter. Once a step the host has to wait for the device: for the gradients.
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
SLOTS = 3  # one slice comes down, one is stepped, one goes up
ALIGNMENT = 64  # a cut falls between the CPU's vectors: elements are stepped as if there were none


def kept_on_host(
    named_parameters: Iterable[tuple[str, Tensor]], fraction: float, never: Collection[str] = ()
) -> frozenset[str]:
    """The names of the parameters whose state goes to the host: the largest first, at most `fraction` of all elements,
    and none of `never`.

    Small ones stay on the device, unless everything goes: they are next to nothing, and each costs three copies.
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
    """Elements of a parameter in a slice."""

    parameter: nn.Parameter
    elements: slice  # of the parameter, flattened
    place: slice  # in the slice


@dataclass(frozen=True)
class _Slice:
    """What is stepped at once: pieces of parameters with the same settings."""

    group: dict[str, Any]  # of the optimizer
    pieces: Sequence[_SlicePart]


class _Slot:
    """Pinned memory for a slice, and when it has come down and gone up."""

    def __init__(self, device: torch.device):
        pinned = device.type != "cpu"
        self.values, self.gradients = (torch.empty(SLICE, pin_memory=pinned) for _ in range(2))
        self.arrived, self.sent = (torch.get_device_module(device).Event() for _ in range(2))


class OffloadedOptimizer(torch.optim.Optimizer):
    """An Adam, AdamW or SGD of torch's, fused, of which the CPU steps the parameters that have their state there.

    Groups and state are those of the optimizer that it is given; only where state lives differs, so a checkpoint sees
    no difference. It is stepped by `optimizer_step`, which sets `grad_scale` and `found_inf`. Gradients of parameters
    that the CPU has stepped are left as they were.
    """

    _step_supports_amp_scaling = True  # torch's name for one that takes grad_scale and found_inf

    def __init__(
        self, optimizer: torch.optim.Optimizer, on_host: Collection[nn.Parameter], overlap: bool = True
    ):
        """`on_host`: parameters of one device whose state is on the CPU. Without `overlap` one thing is done at a
        time, with a third of the pinned memory: for comparison, and where memory is short.
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
        self._known = self._streams.Event()  # the scalars have come down

    @torch.no_grad()
    def step(self) -> None:
        """Steps every parameter that has a gradient. Returns when the CPU has done its part."""
        current, scalars = self._streams.current_stream(), torch.stack([self.grad_scale, self.found_inf])
        self._down.wait_stream(current)  # for the gradients, and for the weights as the last step left them
        with self._streams.stream(self._down):
            self._scalars.copy_(scalars, non_blocking=True)
            self._known.record(self._down)
        for slot, part in zip(self._slots, self._slices):
            self._fetch(part, slot)
        self._step_on_device()
        self._known.synchronize()
        grad_scale, found_inf = self._scalars
        if not found_inf:
            self._step_on_host(grad_scale)
        current.wait_stream(self._up)
        current.wait_stream(self._down)  # gradients may be freed now

    def _step_on_device(self) -> None:
        hidden = [(parameter, parameter.grad) for parameter in self._on_host]
        for parameter, _ in hidden:
            parameter.grad = None  # which torch takes as: not to be stepped
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
                slot.values[piece.place].copy_(piece.parameter.view(-1)[piece.elements], non_blocking=True)
                gradient = piece.parameter.grad.reshape(-1)
                slot.gradients[piece.place].copy_(gradient[piece.elements], non_blocking=True)
            slot.arrived.record(self._down)

    def _send(self, part: _Slice, slot: _Slot) -> None:
        with self._streams.stream(self._up):
            for piece in _with_gradient(part):
                piece.parameter.view(-1)[piece.elements].copy_(slot.values[piece.place], non_blocking=True)
            slot.sent.record(self._up)

    def _update(self, part: _Slice, slot: _Slot, grad_scale: Tensor) -> None:
        """The fused kernel over the pieces that have a gradient; the count of steps is not moved."""
        pieces, group = list(_with_gradient(part)), part.group
        weights = [slot.values[piece.place] for piece in pieces]
        gradients = [slot.gradients[piece.place] for piece in pieces]
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
    """The elements of the group's parameters on the host, one after the other, SLICE at a time."""
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
