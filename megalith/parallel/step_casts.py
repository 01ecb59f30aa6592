"""Casts weights once per step for all micro-batches: to FP8, and experts to the compute dtype.

Weights are stored in fp32, and by default a layer casts them in each pass. An FP8 cast computes a maximum, the data and
the transposed data. Experts hold most weights of their model: if they are cast in every forward and backward pass, they
are read and written four times in a step of two micro-batches.

Weights that this rank holds are cast before the first pass of a step. Weights that FSDP2 gathers are cast during the
first pass, layer by layer, right after their all-gather, so that the next all-gather still overlaps the layer's GEMMs.
After the cast, the memory of the gathered weight is freed; FSDP2 allocates it again at the layer's next all-gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megalith.local_shards import local
from megalith.models.identity import identity
from megalith.models.linear import Linear
from megalith.models.moe import GroupedLinear
from megalith.models.transformer import layers_of
from megalith.ops.compiled import disable_compile
from megalith.ops.fp8.recipes import BlockGemm, Fp8Gemm
from megalith.parallel.fp8_counts import CountedGemm
from megalith.parallel.seams import plug

CastOnce = list[tuple[Linear, Fp8Gemm | BlockGemm]]


class StepCasts:
    """A context manager around all forward and backward passes of a step. Within it, weights are cast once.

    With `experts`, expert weights that are not stored in the compute dtype are cast once too. The casts are dropped at
    the end of the step, because weights change between steps.
    """

    def __init__(self, chunks: Iterable[nn.Module], experts: bool = False):
        self._resident: CastOnce = []
        self._gathered: list[CastOnce] = []  # by layer
        self._freed: dict[FSDPModule, tuple[Linear, Tensor]] = {}  # one gathered weight per layer
        self._is_on = False
        self._experts: list[tuple[GroupedLinear, torch.dtype]] = []
        for chunk in chunks:
            for layer in layers_of(chunk).values():
                linears = list(_cast_once(layer))
                if linears and isinstance(layer, FSDPModule):
                    self._gathered.append(linears)
                    cast = disable_compile(partial(self._cast_gathered, linears))
                    layer.register_forward_pre_hook(cast)  # runs after FSDP2's hook, which gathers
                else:
                    self._resident += linears
            if experts:
                grouped = (module for module in chunk.modules() if isinstance(module, GroupedLinear))
                dtype = chunk.compute_dtype
                self._experts += [
                    (module, dtype)
                    for module in grouped
                    if module.coded is None and module.weight.dtype != dtype
                ]

    @torch.no_grad()
    def __enter__(self) -> None:
        try:
            self._is_on = True
            for linear, gemm in self._resident:
                _cast(linear, gemm)
            for module, dtype in self._experts:
                plug(module, "step_cast", module.cast(dtype))
        except BaseException:  # such as out of memory: drop the casts made so far
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._is_on = False
        for linears in (self._resident, *self._gathered):
            for _, gemm in linears:
                gemm.step_codes.clear()
        for layer, (linear, weight) in self._freed.items():
            if linear.weight is weight:  # the step failed before the layer's last pass
                _reshard(layer)
        self._freed.clear()
        for module, _ in self._experts:
            plug(module, "step_cast", None)

    @torch.no_grad()
    def _cast_gathered(self, linears: CastOnce, layer: FSDPModule, *_: object) -> None:
        """Cast a layer's weights.

        Called before each of its passes, but casts only in the first one of a training step.
        """
        if self._is_on and linears[-1][1].step_codes.operands is None:
            for linear, gemm in linears:
                _cast(linear, gemm)
                if _can_free_weight(linear, gemm):
                    local(linear.weight).untyped_storage().resize_(0)
                    self._freed[layer] = linear, linear.weight


def _cast(linear: Linear, gemm: Fp8Gemm | BlockGemm) -> None:
    gemm.cast_for_step(linear.rows(local(linear.weight)).to(gemm.dtype))


def _can_free_weight(linear: Linear, gemm: Fp8Gemm | BlockGemm) -> bool:
    """Return True if forward and backward passes use only the FP8 data, not the weight.

    A pass reads the weight of a linear that uses only some of its rows or another dtype. So does CountedGemm, which
    compares the weight with its FP8 data.
    """
    is_counted = isinstance(linear.gemm, CountedGemm)
    return linear.rows is identity and linear.weight.dtype == gemm.dtype and not is_counted


def _reshard(layer: FSDPModule) -> None:
    """Free the layer's gathered weights after a failed forward or backward pass, so that FSDP2 gathers them again.

    FSDP2 itself would not free a layer that stays unsharded after its forward pass.
    """
    layer.set_reshard_after_forward(True, recurse=False)
    layer.reshard()
    layer.set_reshard_after_forward(False, recurse=False)


def step_cast_tensors(module: nn.Module) -> list[Tensor]:
    """Return the casts of a module's weights that exist only during a step."""
    operands = [operand for _, gemm in _cast_once(module) for operand in gemm.step_codes.operands or ()]
    operands += [each.step_cast or () for each in module.modules() if isinstance(each, GroupedLinear)]
    return [tensor for operand in operands for tensor in operand if tensor is not None]


def _cast_once(module: nn.Module) -> Iterator[tuple[Linear, Fp8Gemm | BlockGemm]]:
    for linear in (each for each in module.modules() if isinstance(each, Linear)):
        gemm = linear.gemm.gemm if isinstance(linear.gemm, CountedGemm) else linear.gemm
        if getattr(gemm, "step_codes", None) is not None:
            yield linear, gemm
