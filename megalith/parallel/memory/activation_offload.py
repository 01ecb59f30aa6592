"""Activation offloading: moves the saved activations of some layers to host memory until the backward pass needs
them.

The first layers of a stage wait longest, so theirs are offloaded. While a layer computes, the tensors that it saves are
copied to pinned memory on a separate stream; when the next layer is done, the device's memory is free. In the backward
pass, when a gradient reaches layer n + 1, the copies of layer n back to the device start and overlap the backward pass
of n + 1:

    forward    [ layer 0 ][ layer 1 ][ layer 2 ] …      backward  … [ layer 2 ][ layer 1 ][ layer 0 ]
    down                  [0        ][1        ]        up          [1        ][0        ]

The copies are of storages, not of tensors: memory that several saved views share is copied once. Parameters (also those
that FSDP2 has gathered), tensors that all layers share, and small tensors are not offloaded. The copies are hidden as
long as copying a layer takes no longer than computing it.
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
from megalith.models.layer import TransformerLayer
from megalith.models.pass_context import Context
from megalith.models.transformer import Runner, Transformer, stacks_of
from megalith.parallel.memory.recompute import unit_size
from megalith.parallel.seams import plug
from megalith.parallel.step_casts import step_cast_tensors

SMALLEST = 2**20  # bytes: below it a copy costs more time than the memory is worth


def apply_activation_offload(model: Transformer, parallel: ParallelConfig) -> None:
    """Offload the activations of the first cpu_offloading_num_layers layers of a model or stage to the host.

    With full recomputation, the offloaded activations are the inputs of the recomputed units that start in these
    layers.
    """
    if parallel.cpu_offloading_num_layers:
        for stack in stacks_of(model):
            layers = parallel.cpu_offloading_num_layers
            plug(stack, "runner", ActivationOffload(stack.runner, layers, unit_size(parallel)))


class ActivationOffload:
    """A layer runner that wraps another runner, so that offloading happens outside of compiled and
    recomputed layers.
    """

    def __init__(self, run_layers: Runner, layers: int, unit: int = 1):
        """Offload the first `layers` layers, `unit` layers at a time."""
        self._run_layers, self._layers, self._unit = run_layers, layers, unit
        self._streams: _CopyStreams | None = None
        self._last: _OffloadUnit | None = None  # of the last pass; its tensors are still on the device too

    def __call__(self, layers: Sequence[TransformerLayer], x: Tensor, context: Context) -> Tensor:
        """Run x [batch, seq, hidden] through these layers."""
        if not torch.is_grad_enabled():
            return self._run_layers(layers, x, context)
        self._streams = self._streams or _CopyStreams(x.device)
        before = None
        for first in range(0, len(layers), self._unit):
            some = layers[first : first + self._unit]
            unit = None
            if first < self._layers:
                unit = _OffloadUnit(self._streams, some, context)
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
    """The streams for copies between the device and the host."""

    def __init__(self, device: torch.device):
        self.device = device
        self.module = torch.get_device_module(device)
        self.down, self.up = self.module.Stream(), self.module.Stream()

    def copied(self, target: Tensor, source: Tensor, stream: torch.Stream) -> torch.Event:
        """Start a copy on `stream` after the work queued on the current stream. Return an event that marks its end."""
        event = self.module.Event()
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            target.copy_(source, non_blocking=True)
            event.record(stream)
        return event

    def wait(self, event: torch.Event) -> None:
        """Make the current stream wait for the copy that `event` marks."""
        event.wait(self.module.current_stream())


class _SavedStorage:
    """The storage of tensors saved for the backward pass. It is on the device, on the host, or on both."""

    def __init__(self, streams: _CopyStreams, storage: torch.UntypedStorage):
        self.streams = streams
        self.on_device: Tensor | None = _bytes_of(storage)
        self.on_host = torch.empty(
            storage.nbytes(), dtype=torch.uint8, pin_memory=streams.device.type != "cpu"
        )
        self.event = streams.copied(self.on_host, self.on_device, streams.down)  # of the last copy
        self.uses = 0  # saved tensors in it that have not been unpacked yet

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
            self.on_device = None  # the last user holds it
        return storage


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor that was saved for the backward pass, as a view of its storage."""

    unit: _OffloadUnit  # kept alive as long as a tensor of it is saved
    stored: _SavedStorage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class _OffloadUnit:
    """The tensors that one forward pass through some layers saves."""

    def __init__(self, streams: _CopyStreams, layers: Sequence[nn.Module], context: Context):
        self._streams, self._layers = streams, layers
        encoded = context.encoded  # read by all layers
        read = None if encoded is None else encoded.hidden
        self._shared = [
            *(context.rotary or ()),
            context.mask,
            context.documents,
            context.chunk_documents,
            read,
        ]
        self._storages: dict[int, _SavedStorage] = {}

    def pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        storage = tensor.untyped_storage()
        if tensor.device != self._streams.device or storage.nbytes() < SMALLEST:
            return tensor
        address = storage.data_ptr()
        if address not in self._storages:
            if self._is_kept(address):
                return tensor
            self._storages[address] = _SavedStorage(self._streams, storage)
        stored = self._storages[address]
        stored.uses += 1
        return _SavedTensor(
            self, stored, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        )

    def _is_kept(self, address: int) -> bool:
        """Return True if the storage belongs to a parameter, to a parameter's cast for the step, or is shared by all
        layers.

        FSDP2 gathers the parameters of experts when they start, and frees them before the layer ends. Tensors saved
        after that may reuse their addresses, so these are looked up each time.
        """
        inner = (local(parameter) for module in self._inner_fsdp_modules for parameter in module.parameters())
        return address in self._kept or address in map(_address, inner)

    @cached_property
    def _kept(self) -> set[int]:
        """Addresses that are not offloaded. First read in the forward pass, while parameters are gathered."""
        kept = [local(parameter) for layer in self._layers for parameter in layer.parameters()]
        kept += [cast for layer in self._layers for cast in step_cast_tensors(layer)]
        return {_address(tensor) for tensor in kept + self._shared if isinstance(tensor, Tensor)}

    @cached_property
    def _inner_fsdp_modules(self) -> list[nn.Module]:
        modules = (module for layer in self._layers for module in layer.modules() if module is not layer)
        return [module for module in modules if isinstance(module, FSDPModule)]

    def release(self) -> None:
        """Free the device memory, after the work queued on the current stream."""
        for stored in self._storages.values():
            stored.release()

    def fetch(self) -> None:
        """Start copying all tensors back to the device, in the reverse of the order in which they were saved."""
        for stored in reversed(self._storages.values()):
            if stored.uses:
                stored.fetch()


class _Prefetch:
    """A hook on the gradient of the following layers. It starts to copy a unit's tensors back to the device."""

    def __init__(self, unit: _OffloadUnit):
        self._unit = weakref.ref(unit)

    def __call__(self, grad: Tensor) -> None:
        if (unit := self._unit()) is not None:
            unit.fetch()


def _unpack(saved: Tensor | _SavedTensor) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    empty = torch.empty(0, dtype=saved.dtype, device=saved.stored.streams.device)
    return empty.set_(saved.stored.take(), saved.offset, saved.shape, saved.stride)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
