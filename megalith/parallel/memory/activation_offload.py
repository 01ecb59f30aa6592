"""Activation offloading: the saved activations of some layers are in host memory until the backward pass needs them.

The first layers of a stage wait longest, so theirs are offloaded. While a layer computes, what it saves is copied to
pinned memory on a separate stream; when the next layer is done, the device's memory is free. In the backward pass the
gradient that reaches the layer above starts a layer's copies back, so that they arrive while that one computes:

    forward    [ layer 0 ][ layer 1 ][ layer 2 ] …      backward  … [ layer 2 ][ layer 1 ][ layer 0 ]
    down                  [0        ][1        ]        up          [1        ][0        ]

What is copied is storage, not tensors: views of the same memory, saved by several operations, are copied once. Not
offloaded are parameters (those that FSDP2 has gathered included), what all layers share, and small tensors. It is
hidden as long as copying a layer takes no longer than computing it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule

from megalith.config import ParallelConfig
from megalith.local_shards import local
from megalith.models.pass_context import Context
from megalith.models.transformer import Runner, Transformer, TransformerLayer, stacks_of
from megalith.parallel.memory.recompute import unit_size
from megalith.parallel.seams import plug
from megalith.parallel.step_casts import step_cast_tensors

SMALLEST = 2**20  # bytes: below it a copy costs more time than the memory is worth


def apply_activation_offload(model: Transformer, parallel: ParallelConfig) -> None:
    """Lets the first cpu_offloading_num_layers layers of `model`, or of a stage of it, keep their activations there.

    With full recomputation that is the input of each unit of layers; units that begin among these layers count.
    """
    if parallel.cpu_offloading_num_layers:
        for stack in stacks_of(model):
            layers = parallel.cpu_offloading_num_layers
            plug(stack, "runner", ActivationOffload(stack.runner, layers, unit_size(parallel)))


class ActivationOffload:
    """A runner around another, and so around compiled layers and all that is recomputed inside them."""

    def __init__(self, run_layers: Runner, layers: int, unit: int = 1):
        """The first `layers` layers, `unit` of them at a time."""
        self._run_layers, self._layers, self._unit = run_layers, layers, unit
        self._streams: _CopyStreams | None = None
        self._last: _Unit | None = None  # of the last pass: it has copies of what is still on the device, too

    def __call__(self, layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
        """x [batch, seq, hidden] through these layers."""
        if not torch.is_grad_enabled():
            return self._run_layers(layers, x, context)
        self._streams = self._streams or _CopyStreams(x.device)
        before = None
        for first in range(0, len(layers), self._unit):
            some = layers[first : first + self._unit]
            unit = None
            if first < self._layers:
                unit = _Unit(self._streams, some, context)
                with saved_tensors_hooks(unit.pack, _unpack):
                    x = self._run_layers(some, x, context)
            else:
                x = self._run_layers(some, x, context)
            if self._last is not None:
                self._last.release()
            if before is not None and x.requires_grad:
                x.register_hook(_Prefetch(before))
            before = self._last = unit
        return x


class _CopyStreams:
    """The streams for copies between a device and the host."""

    def __init__(self, device: torch.device):
        self.device = device
        self.module = torch.get_device_module(device)
        self.down, self.up = self.module.Stream(), self.module.Stream()

    def copied(self, target: Tensor, source: Tensor, stream: torch.Stream) -> torch.Event:
        """Copies on `stream` what the device will have reached; the event is when it is done."""
        event = self.module.Event()
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return event

    def wait(self, event: torch.Event) -> None:
        """Lets the device, not the host, wait for a copy."""
        event.wait(self.module.current_stream())


class _SavedStorage:
    """A storage that the backward pass needs: on the device, on the host, or both."""

    def __init__(self, streams: _CopyStreams, storage: torch.UntypedStorage):
        self.streams = streams
        self.on_device: Tensor | None = _bytes_of(storage)
        self.on_host = torch.empty(
            storage.nbytes(), dtype=torch.uint8, pin_memory=streams.device.type != "cpu"
        )
        self.event = streams.copied(self.on_host, self.on_device, streams.down)  # of the last copy
        self.uses = 0  # tensors in it that have not been asked for again

    def release(self) -> None:
        if self.on_device is not None:
            self.streams.wait(self.event)
            self.on_device = None

    def fetch(self) -> None:
        if self.on_device is None:
            self.on_device = torch.empty(len(self.on_host), dtype=torch.uint8, device=self.streams.device)
            self.event = self.streams.copied(self.on_device, self.on_host, self.streams.up)

    def take(self) -> torch.UntypedStorage:
        self.fetch()
        self.streams.wait(self.event)
        storage = self.on_device.untyped_storage()
        self.uses -= 1
        if self.uses <= 0:
            self.on_device = None  # whoever has it needs it last
        return storage


@dataclass(frozen=True)
class _Packed:
    """A saved tensor: where it lies in its storage."""

    unit: _Unit  # which lives as long as a tensor of it is saved
    stored: _SavedStorage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _Unit:
    """What one pass through some layers has saved."""

    def __init__(self, streams: _CopyStreams, layers: Sequence[nn.Module], context: Context):
        self._streams, self._layers = streams, layers
        encoded = context.encoded  # which all layers attend to
        read = None if encoded is None else encoded.hidden
        self._shared = [*(context.rotary or ()), context.mask, context.documents, read]
        self._storages: dict[int, _SavedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        storage = tensor.untyped_storage()
        if tensor.device != self._streams.device or storage.nbytes() < SMALLEST:
            return tensor
        address = storage.data_ptr()
        if address not in self._storages:
            if self._stays(address):
                return tensor
            self._storages[address] = _SavedStorage(self._streams, storage)
        stored = self._storages[address]
        stored.uses += 1
        return _Packed(
            self, stored, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        )

    def _stays(self, address: int) -> bool:
        """Whether what stands there is a parameter, its cast for the step, or shared by all layers.

        Modules inside a layer that FSDP2 shards by themselves, experts, have their parameters gathered when they begin,
        and freed before the layer ends: what the layer saves after that may stand where they stood.
        """
        inner = (local(parameter) for module in self._inner for parameter in module.parameters())
        return address in self._staying or address in map(_address, inner)

    @cached_property
    def _staying(self) -> set[int]:
        """Asked for first in the layers' forward pass, where their parameters are gathered."""
        staying = [local(parameter) for layer in self._layers for parameter in layer.parameters()]
        staying += [cast for layer in self._layers for cast in step_cast_tensors(layer)]
        return {_address(tensor) for tensor in staying + self._shared if isinstance(tensor, Tensor)}

    @cached_property
    def _inner(self) -> list[nn.Module]:
        modules = (module for layer in self._layers for module in layer.modules() if module is not layer)
        return [module for module in modules if isinstance(module, FSDPModule)]

    def release(self) -> None:
        """Frees the device's memory, from where the device is now on."""
        for stored in self._storages.values():
            stored.release()

    def fetch(self) -> None:
        """Begins to copy everything back, the last first."""
        for stored in reversed(self._storages.values()):
            if stored.uses:
                stored.fetch()


class _Prefetch:
    """A hook on the gradient that comes to the next layers: calls back a unit's tensors if it still has any."""

    def __init__(self, unit: _Unit):
        self._unit = weakref.ref(unit)

    def __call__(self, grad: Tensor) -> None:
        if (unit := self._unit()) is not None:
            unit.fetch()


def _unpack(saved: Tensor | _Packed) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    empty = torch.empty(0, dtype=saved.dtype, device=saved.stored.streams.device)
    return empty.set_(saved.stored.take(), saved.offset, saved.shape, saved.stride)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
