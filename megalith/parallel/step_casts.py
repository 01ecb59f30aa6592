"""Weights that are cast once a step, for all its micro-batches: FP8's codes, and the experts' in the compute dtype.

A weight is there in fp32, and a matmul takes a cast of it, which most layers make where they compute. FP8's cast needs
a maximum, a code and a transposed code of each weight. Experts are by far the most weights of their model: cast anew
for each pass, forward and backward, they are read and written four times in a step of two micro-batches.

What is here is cast before the step's first pass. What FSDP2 gathers is cast in that pass, layer by layer, as soon as
the layer is gathered, so that the next one's all-gather still runs beside its GEMMs. The gathered weight's memory is
free as soon as there are codes, which all passes of the step take; FSDP2 makes it anew when it gathers the layer again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megalith.comm.collectives import local
from megalith.models.linear import Linear, every_row
from megalith.models.moe import GroupedLinear
from megalith.models.transformer import layers_of
from megalith.ops.compiled import outside_of_graphs
from megalith.ops.fp8.recipes import BlockGemm, Fp8Gemm
from megalith.parallel.fp8_counts import CountedGemm
from megalith.parallel.seams import plug

CastOnce = list[tuple[Linear, Fp8Gemm | BlockGemm]]


class StepCasts:
    """The linears of a rank's chunks whose weights are cast once a step: a context of all its passes. `experts`: theirs
    too, where they are not in the compute dtype anyway.

    Weights change between the steps alone, by whatever; so nothing is there of a step before.
    """

    def __init__(self, chunks: Iterable[nn.Module], experts: bool = False):
        self._here: CastOnce = []
        self._gathered: list[CastOnce] = []  # by layer
        self._freed: dict[FSDPModule, tuple[Linear, Tensor]] = {}  # of a layer one weight as it was gathered
        self._is_on = False
        self._experts: list[tuple[GroupedLinear, torch.dtype]] = []
        for chunk in chunks:
            for layer in layers_of(chunk).values():
                linears = list(_cast_once(layer))
                if linears and isinstance(layer, FSDPModule):
                    self._gathered.append(linears)
                    cast = outside_of_graphs(partial(self._cast_gathered, linears))
                    layer.register_forward_pre_hook(cast)  # behind FSDP2's, which gathers
                else:
                    self._here += linears
            if experts:
                found = (module for module in chunk.modules() if isinstance(module, GroupedLinear))
                dtype = chunk.compute_dtype
                self._experts += [(module, dtype) for module in found if module.weight.dtype != dtype]

    @torch.no_grad()
    def __enter__(self) -> None:
        try:
            self._is_on = True
            for linear, gemm in self._here:
                _cast(linear, gemm)
            for module, dtype in self._experts:
                plug(module, "step_cast", module.cast(dtype))
        except BaseException:  # out of memory: else what was cast so far would stay for passes after the step
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        self._is_on = False
        for linears in (self._here, *self._gathered):
            for _, gemm in linears:
                gemm.step_codes.clear()
        for layer, (linear, weight) in self._freed.items():
            if linear.weight is weight:  # the step has failed before the layer's last pass
                _shard(layer)
        self._freed.clear()
        for module, _ in self._experts:
            plug(module, "step_cast", None)

    @torch.no_grad()
    def _cast_gathered(self, linears: CastOnce, layer: FSDPModule, *_: object) -> None:
        """A layer's, before each of its passes: in a step's first, and in none of an evaluation."""
        if self._is_on and linears[-1][1].step_codes.operands is None:
            for linear, gemm in linears:
                _cast(linear, gemm)
                if _is_read_by_its_cast_alone(linear, gemm):
                    local(linear.weight).untyped_storage().resize_(0)
                    self._freed[layer] = linear, linear.weight


def _cast(linear: Linear, gemm: Fp8Gemm | BlockGemm) -> None:
    gemm.cast_for_step(linear.rows(local(linear.weight)).to(gemm.dtype))


def _is_read_by_its_cast_alone(linear: Linear, gemm: Fp8Gemm | BlockGemm) -> bool:
    """Whether passes that have the codes take no element of the weight: neither rows of it or another dtype, which
    would be copies, nor its numbers, which are counted beside the codes."""
    is_counted = isinstance(linear.gemm, CountedGemm)
    return linear.rows is every_row and linear.weight.dtype == gemm.dtype and not is_counted


def _shard(layer: FSDPModule) -> None:
    """Lets FSDP2 gather the layer anew for its next pass, whatever pass has failed; of one that stays gathered it would
    free nothing in the midst of a forward pass."""
    layer.set_reshard_after_forward(True, recurse=False)
    layer.reshard()
    layer.set_reshard_after_forward(False, recurse=False)


def cast_for_step(module: nn.Module) -> list[Tensor]:
    """What stays of a module's weights for all passes of a step; nothing between the steps."""
    operands = [operand for _, gemm in _cast_once(module) for operand in gemm.step_codes.operands or ()]
    operands += [each.step_cast or () for each in module.modules() if isinstance(each, GroupedLinear)]
    return [tensor for operand in operands for tensor in operand if tensor is not None]


def _cast_once(module: nn.Module) -> Iterator[tuple[Linear, Fp8Gemm | BlockGemm]]:
    for linear in (each for each in module.modules() if isinstance(each, Linear)):
        gemm = linear.gemm.gemm if isinstance(linear.gemm, CountedGemm) else linear.gemm
        if getattr(gemm, "step_codes", None) is not None:
            yield linear, gemm
