"""FP8 recipes, modelled on Transformer Engine's: the Gemm of a linear layer under each recipe.

     recipe       scale of a tensor                         data
     delayed      largest / amax of previous steps          inputs and weights e4m3, gradients e5m2 (`hybrid`) or e4m3
     tensorwise   of this tensor, rounded down to 2ⁿ        as with delayed
     blockwise    of each block, rounded down to 2ⁿ         1 × 128 along the sum for inputs and gradients, 128 × 128
                                                            for weights; e4m3 throughout
     experts      of each row along the sum (any recipe)    e4m3; wgrads stay in the compute dtype

A cast computes data = round(clamp(x · scale)) and inverse = 1 / scale, so that x ≈ data · inverse. A scale covers the
complete tensor. Maxima are exact and independent of order, so the data of a shard is the shard of the data. Delayed
scales are constant during a step: the amax is a maximum over all micro-batches and ranks, taken at the end of the step.
The first step of a run has tensorwise scales.

Rounding current scales down to a power of two keeps the data unchanged if an amax differs slightly between layouts. A
clamp hides infinities, so an amax that is not finite gives a NaN scale (tensorwise, blockwise), or a skipped step that
records nothing (delayed).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_reduce_no_grad
from megalith.compat.torch_operators import scaled_grouped_mm
from megalith.ops.compiled import as_one_kernel
from megalith.ops.fp8.codes import (
    E4M3,
    FORMATS,
    GRADIENT,
    INPUT,
    WEIGHT,
    amax,
    block_matmul,
    cast,
    cast_blocks,
    power_of_two,
    quantize,
    reciprocal,
    scale_from_amax,
    scaled_matmul,
    transposed,
)
from megalith.ops.gemm import Gemm, Operand
from megalith.ops.grouped_gemm import GroupedGemm, RowGroups


class AmaxTable:
    """State of delayed scaling for all linear layers of the model.

    Each layer has one row with entries for its three tensors.

    Every rank holds the complete table, bitwise identical.
    """

    def __init__(
        self,
        names: Sequence[str],
        formats: str,
        history_len: int,
        algo: str,
        margin: int,
        device: torch.device,
    ):
        """Create a table without scales, with one row per name.

        `algo` derives scales from the "most_recent" amax or from the "max" over `history_len` steps.
        """
        self.rows = {name: row for row, name in enumerate(names)}
        self.formats, self.algo, self.margin = formats, algo, margin
        # Each number has 16 bytes, because kernels launch faster with aligned addresses.
        self.step_amax, self.scale, self.inverse = (
            torch.full((len(names), 3, 4), first, device=device)[..., 0] for first in (0.0, 1.0, 1.0)
        )
        """Amaxes of this step so far; scales, and their inverses."""
        self.history = torch.zeros(history_len, len(names), 3, device=device)  # most recent first
        self.ready = False
        """True once scales exist. Until then, linear layers use current scaling."""

    def begin_step(self) -> None:
        """Reset the amaxes, which an evaluation may have changed."""
        self.step_amax.zero_()

    def end_passes(self, world: Axis) -> None:
        """Reduce the amaxes to their maximum over all ranks, after the last backward pass of a step."""
        self.step_amax.copy_(all_reduce_no_grad(self.step_amax, world, "max"))

    def overflow(self) -> Tensor:
        """Return zero, or NaN if an amax of this step is not finite: a float32 scalar."""
        return (self.step_amax * 0).sum()

    def end_step(self, skipped: Tensor | float) -> None:
        """Update history and scales, unless the step was `skipped` (1). A tensor that was not used keeps its history
        and scale.

        Waits for `skipped` on the host until the first scales exist.
        """
        moves = (
            (self.step_amax > 0)
            & self.step_amax.isfinite()
            & ~torch.as_tensor(skipped, device=self.step_amax.device).bool()
        )
        self.history.copy_(
            torch.where(moves, torch.cat([self.step_amax[None], self.history[:-1]]), self.history)
        )
        amax = self.history[0] if self.algo == "most_recent" else self.history.amax(0)
        for kind, dtype in enumerate(FORMATS[self.formats]):
            scale = scale_from_amax(amax[:, kind], dtype, self.margin)
            self.scale[:, kind] = torch.where(amax[:, kind] > 0, scale, self.scale[:, kind])
        self.inverse.copy_(reciprocal(self.scale))
        self.ready = self.ready or not bool(skipped)

    def state(self) -> dict[str, Tensor]:
        """Return the history [len, 3] and scales [3] of each linear layer, as views, for a checkpoint."""
        rows = {f"{name}.amax_history": self.history[:, row] for name, row in self.rows.items()}
        return rows | {f"{name}.scale": self.scale[row] for name, row in self.rows.items()}

    def load_state(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        """Load the tensors `names` with `read`. If a stored history is longer, only its most recent entries are loaded.

        If all tensors are loaded and their history is not all zero, delayed scaling starts with the next step.
        """
        state = self.state()
        for name in state.keys() & names:
            stored = read(name).to(state[name].device)
            length = min(len(stored), len(state[name]))
            state[name][:length] = stored[:length]
        self.inverse.copy_(reciprocal(self.scale))
        self.ready = state.keys() <= set(names) and bool(self.history.any())


class CurrentScaling:
    """Scales computed from the tensors themselves. The amaxes are reduced over the `axes` that shard the tensors."""

    def __init__(self, formats: str, axes: Sequence[Axis] = ()):
        self.formats, self.axes = FORMATS[formats], axes

    def codes(self, kind: int, x: Tensor, by_row: bool, by_column: bool) -> tuple[Operand, Operand]:
        """Quantize x [m, n] to FP8. Return (data, inverse scale) by row and by column, as requested; both have x's
        shape."""
        scale = self.scale(kind, x)
        return _both(cast(x, scale, None, self.formats[kind], by_row, by_column), reciprocal(scale))

    def scale(self, kind: int, x: Tensor) -> Tensor:
        largest = amax(x)
        for axis in self.axes:
            largest = all_reduce_no_grad(largest, axis, "max")
        return power_of_two(scale_from_amax(largest, self.formats[kind]))


class DelayedScaling:
    """Delayed scaling of one linear layer, which uses one row of an AmaxTable.

    Until the table has scales, it uses current scaling, whose amaxes are reduced over `axes`.
    """

    def __init__(self, table: AmaxTable, name: str, axes: Sequence[Axis] = ()):
        row = table.rows[name]
        self.table, self.current = table, CurrentScaling(table.formats, axes)
        # Views are created here: an index would be a constant in compiled code, different for each layer.
        self.scales, self.inverses, self.step_amax = (
            tuple(each[row].unbind()) for each in (table.scale, table.inverse, table.step_amax)
        )

    def codes(self, kind: int, x: Tensor, by_row: bool, by_column: bool) -> tuple[Operand, Operand]:
        """Quantize x [m, n] to FP8, and record its amax for later scales.

        Returns (data, inverse scale) by row and by column, as requested. Uses x's own amax until the table has scales.
        """
        if self.table.ready:
            scale, inverse = self.scales[kind], self.inverses[kind]
        else:
            scale = self.current.scale(kind, x)
            inverse = reciprocal(scale)
        dtype = self.current.formats[kind]
        return _both(cast(x, scale, self.step_amax[kind], dtype, by_row, by_column), inverse)


def _both(codes: tuple[Tensor, Tensor], inverse: Tensor) -> tuple[Operand, Operand]:
    by_row, by_column = codes
    return (by_row, inverse), (by_column.t(), inverse)


class StepCodes:
    """A weight's FP8 data for all micro-batches of a step, shared by copies of a Gemm. Empty between steps."""

    operands: tuple[Operand, Operand] | None = None
    """FP8 data and inverse scales of the weight, by row and by column; both have the weight's shape."""

    def clear(self) -> None:
        self.operands = None


class Fp8Gemm(Gemm):
    """Matmuls of FP8 data with one scale per tensor. wgrad is in FP8 or, without `fp8_wgrad`, in the compute dtype.

    Operands must be contiguous along the summed dimension. Therefore the data for wgrad, and a weight's data for dgrad,
    are written by column and saved. Without `saves_weights`, the weight itself is saved and dgrad casts it again.
    """

    def __init__(
        self,
        scaling: DelayedScaling | CurrentScaling,
        dtype: torch.dtype,
        fp8_wgrad: bool = True,
        saves_weights: bool = True,
        step_codes: StepCodes | None = None,
    ):
        """Create a Gemm whose results have `dtype`. Without `step_codes`, each pass casts the weight."""
        self.scaling, self.dtype, self.fp8_wgrad, self.saves_weights, self.step_codes = (
            scaling,
            dtype,
            fp8_wgrad,
            saves_weights,
            step_codes,
        )

    def inputs(self, x: Tensor, saves: bool, sharded: bool = False) -> tuple[Operand, Operand]:
        codes, by_column = self.scaling.codes(INPUT, x, True, saves and self.fp8_wgrad and not sharded)
        if not saves:
            return codes, ()
        if not self.fp8_wgrad:
            return codes, (x,)
        return codes, codes if sharded else by_column  # gathered rows are transposed later

    def weights(self, weight: Tensor, trains: bool) -> tuple[Operand, Operand]:
        if self.step_codes is not None and self.step_codes.operands is not None:
            return self.step_codes.operands
        saves = trains and self.saves_weights
        codes, by_column = self.scaling.codes(WEIGHT, weight, True, saves)
        return codes, by_column if saves else (weight,)

    def cast_for_step(self, weight: Tensor) -> None:
        """Cast the weight, given in the compute dtype, for all uses until `step_codes` is cleared."""
        self.step_codes.operands = self.scaling.codes(WEIGHT, weight, True, True)

    def gradients(self, grad: Tensor, has_wgrad: bool) -> tuple[Operand, Operand]:
        codes, by_column = self.scaling.codes(GRADIENT, grad, True, has_wgrad and self.fp8_wgrad)
        if not has_wgrad:
            return codes, ()
        return codes, by_column if self.fp8_wgrad else (grad,)

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        return scaled_matmul(x, weight, self.dtype, bias, fast=True)

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        if len(weight) == 1:
            weight = self.scaling.codes(WEIGHT, weight[0], False, True)[1]
        return scaled_matmul(grad, transposed(weight), self.dtype)

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        if len(x) == 1:
            return super().wgrad(grad, x)
        return scaled_matmul(transposed(grad), transposed(x), self.dtype)


class BlockGemm(Gemm):
    """Matmuls of e4m3 data with one power-of-two scale per block. Sizes and tokens must be multiples of 128.

    x and gradients are cast twice, with blocks of 1 × 128 along each dimension. A weight has blocks of 128 × 128.
    `saves_weights` and `step_codes` are as in Fp8Gemm.
    """

    def __init__(self, dtype: torch.dtype, saves_weights: bool = True, step_codes: StepCodes | None = None):
        self.dtype, self.saves_weights, self.step_codes = dtype, saves_weights, step_codes

    def inputs(self, x: Tensor, saves: bool, sharded: bool = False) -> tuple[Operand, Operand]:
        return _in_blocks(x, saves)

    def weights(self, weight: Tensor, trains: bool) -> tuple[Operand, Operand]:
        if self.step_codes is not None and self.step_codes.operands is not None:
            return self.step_codes.operands
        saves = trains and self.saves_weights
        codes, inverse, by_column, _ = cast_blocks(weight, True, saves, True)
        return (codes, inverse), (by_column.t(), inverse) if saves else (weight,)

    def cast_for_step(self, weight: Tensor) -> None:
        """Cast the weight for all uses until `step_codes` is cleared, as in `Fp8Gemm.cast_for_step`."""
        codes, inverse, by_column, _ = cast_blocks(weight, True, True, True)
        self.step_codes.operands = (codes, inverse), (by_column.t(), inverse)

    def gradients(self, grad: Tensor, has_wgrad: bool) -> tuple[Operand, Operand]:
        return _in_blocks(grad, has_wgrad)

    def forward(self, x: Operand, weight: Operand, bias: Tensor | None = None) -> Tensor:
        y = block_matmul(*x, *weight, True, self.dtype)
        return y if bias is None else y + bias

    def dgrad(self, grad: Operand, weight: Operand) -> Tensor:
        if len(weight) == 1:
            _, inverse, codes, _ = cast_blocks(weight[0], True, True, True)
        else:
            (codes,), inverse = transposed(weight[:1]), weight[1]
        return block_matmul(*grad, codes, inverse.t(), True, self.dtype)

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        (a, b), inverses = transposed((grad[0],)) + transposed((x[0],)), (grad[1], x[1])
        return block_matmul(a, inverses[0].t(), b, inverses[1].t(), False, self.dtype)


def _in_blocks(x: Tensor, by_column: bool) -> tuple[Operand, Operand]:
    """Return x [tokens, k] in blocks of 1 × 128, and with `by_column` also in blocks of 128 tokens × 1.

    Returns:
        FP8 data [tokens, k] and inverse scales [tokens, k / 128].
        FP8 data [tokens, k] and inverse scales [tokens / 128, k], which are sent together; () without `by_column`.
    """
    codes, inverse, codes_t, inverse_t = cast_blocks(x, True, by_column, False)
    return (codes, inverse.t()), (codes_t.t(), inverse_t) if by_column else ()


class Fp8GroupedGemm(GroupedGemm):
    """Experts in FP8: forward and dgrad with one scale per row along the summed dimension. wgrad does not use FP8."""

    def __init__(self, kernel: bool, axis: Axis | None = None, gradient_axis: Axis | None = None):
        """Create a Gemm. `axis` shards the sums of `forward`, and `gradient_axis` the sums of `dgrad`."""
        super().__init__(kernel)
        self.axis, self.gradient_axis = axis or Axis(), gradient_axis or Axis()

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return self._in_codes(x, weight, groups, self.axis, fast=True)

    def dgrad(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return self._in_codes(grad, weight.mT, groups, self.gradient_axis, fast=False)

    def _in_codes(self, rows: Tensor, matrices: Tensor, groups: RowGroups, axis: Axis, fast: bool) -> Tensor:
        """Multiply rows [rows, k] in e4m3 by their group's matrix, transposed: matrices [groups, n, k] → [rows, n]."""
        (a, a_inverse), (b, b_inverse) = (
            _rows_in_codes(rows, axis, True),
            _rows_in_codes(matrices, axis, False),
        )
        if rows.is_cuda and len(rows):
            return scaled_grouped_mm(
                a, b.mT, a_inverse, b_inverse, offs=groups.ends, out_dtype=rows.dtype, use_fast_accum=fast
            )
        a, b = a.double() * a_inverse.double()[..., None], b.double() * b_inverse.double()[..., None]
        return self._by_rows(a, b.mT, groups).to(rows.dtype)


def _rows_in_codes(x: Tensor, axis: Axis, rows_vary: bool) -> Operand:
    """Return contiguous e4m3 data of x [..., k] and inverse scales [...], one per row; `axis` shards the rows."""
    largest = all_reduce_no_grad(as_one_kernel(_row_amax, x, rows_vary=rows_vary), axis, "max")
    return as_one_kernel(_row_codes, x, largest, rows_vary=rows_vary)


def _row_amax(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True).float()


def _row_codes(x: Tensor, largest: Tensor) -> Operand:
    scale = scale_from_amax(largest, E4M3)
    return quantize(x, scale, E4M3).contiguous(), reciprocal(scale).squeeze(-1)
