"""FP8 matmuls: what a linear's Gemm is under each recipe, after those of Transformer Engine.

    recipe       scale of a tensor                         codes
    delayed      largest / amax of the steps before        inputs and weights e4m3, gradients e5m2 (`hybrid`) or e4m3
    tensorwise   of this tensor, rounded down to 2ⁿ        the same
    blockwise    of each block, rounded down to 2ⁿ         1 × 128 along the sum of inputs and gradients, 128 × 128 of
                                                           weights; e4m3 throughout
    experts      of each row along the sum (any recipe)    e4m3; their wgrads stay in the compute dtype

codes = round(clamp(x · scale)), x ≈ codes · inverse with inverse = 1 / scale. A scale belongs to the whole tensor,
however it is sharded: a maximum is exact and has no order, so codes of a shard are the shard of the codes. Delayed
scales are constants of a step: the amax is a maximum over all micro-batches and all ranks, taken at the step's end, so
neither recomputation nor a schedule changes it. A run's first step has no step before it: its scales are tensorwise.

A current scale is rounded down to a power of two, as a block's is: a rounding of an amax, as between layouts, would
otherwise move all codes of the tensor; so it moves none, but where it crosses a power of two.

A clamp hides infinities, so an amax that is not finite becomes a scale of NaN (tensorwise, blockwise), or makes the
step one that is skipped (delayed), which records nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, all_reduce_no_grad
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
    """Delayed scaling of all of a model's linears: a row for each, whichever rank holds it, with its three tensors.

    Every rank has the whole table, the same bits.
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
        """`algo`: the scale follows the "most_recent" amax or the "max" of `history_len` steps."""
        self.rows = {name: row for row, name in enumerate(names)}
        self.formats, self.algo, self.margin = formats, algo, margin
        # a number has 16 bytes to itself: a kernel's launch is cheaper at such an address
        self.seen, self.scale, self.inverse = (
            torch.full((len(names), 3, 4), first, device=device)[..., 0] for first in (0.0, 1.0, 1.0)
        )
        """The amax of this step so far; scales, and their inverses."""
        self.history = torch.zeros(history_len, len(names), 3, device=device)  # the newest first
        self.ready = False
        """Whether there are scales. Before, linears scale currently."""

    def begin_step(self) -> None:
        """Forgets what has been seen since the last step, as in an evaluation."""
        self.seen.zero_()

    def end_passes(self, world: Axis) -> None:
        """After the step's last pass: every rank's amaxes become those of the whole run."""
        self.seen.copy_(all_reduce_no_grad(self.seen, world, "max"))

    def overflow(self) -> Tensor:
        """Zero, or NaN where an amax of this step is not finite: float32 scalar."""
        return (self.seen * 0).sum()

    def end_step(self, skipped: Tensor | float) -> None:
        """Moves history and scales on, unless the step was `skipped` (1). A tensor that was not seen stays.

        Waits for `skipped` on the host until a step has given the first scales.
        """
        moves = (
            (self.seen > 0) & self.seen.isfinite() & ~torch.as_tensor(skipped, device=self.seen.device).bool()
        )
        self.history.copy_(torch.where(moves, torch.cat([self.seen[None], self.history[:-1]]), self.history))
        amax = self.history[0] if self.algo == "most_recent" else self.history.amax(0)
        for kind, dtype in enumerate(FORMATS[self.formats]):
            scale = scale_from_amax(amax[:, kind], dtype, self.margin)
            self.scale[:, kind] = torch.where(amax[:, kind] > 0, scale, self.scale[:, kind])
        self.inverse.copy_(reciprocal(self.scale))
        self.ready = self.ready or not bool(skipped)

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: of each linear its history [len, 3] and its scales [3], views of what is here."""
        rows = {f"{name}.amax_history": self.history[:, row] for name, row in self.rows.items()}
        return rows | {f"{name}.scale": self.scale[row] for name, row in self.rows.items()}

    def load_state(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        """Fills it with what `read` has of `names`; of a history of another length the newest. Ready if it has all
        and they are a step's."""
        state = self.state()
        for name in state.keys() & names:
            stored = read(name).to(state[name].device)
            length = min(len(stored), len(state[name]))
            state[name][:length] = stored[:length]
        self.inverse.copy_(reciprocal(self.scale))
        self.ready = state.keys() <= set(names) and bool(self.history.any())


class CurrentScaling:
    """Scales from the tensors themselves, each the maximum over the `axes` whose ranks hold its shards."""

    def __init__(self, formats: str, axes: Sequence[Axis] = ()):
        self.formats, self.axes = FORMATS[formats], axes

    def codes(self, kind: int, x: Tensor, by_row: bool, by_column: bool) -> tuple[Operand, Operand]:
        """Codes of x [m, n] by row, and by column with the same shape, of what was asked for."""
        scale = self.scale(kind, x)
        return _both(cast(x, scale, None, self.formats[kind], by_row, by_column), reciprocal(scale))

    def scale(self, kind: int, x: Tensor) -> Tensor:
        largest = amax(x)
        for axis in self.axes:
            largest = all_reduce_no_grad(largest, axis, "max")
        return power_of_two(scale_from_amax(largest, self.formats[kind]))


class DelayedScaling:
    """A linear's row of an AmaxTable; while that has no scales, current ones over the `axes`."""

    def __init__(self, table: AmaxTable, name: str, axes: Sequence[Axis] = ()):
        row = table.rows[name]
        self.table, self.current = table, CurrentScaling(table.formats, axes)
        # views made here: an index would be a constant of what is compiled, and of each linear another
        self.scales, self.inverses, self.seen = (
            tuple(each[row].unbind()) for each in (table.scale, table.inverse, table.seen)
        )

    def codes(self, kind: int, x: Tensor, by_row: bool, by_column: bool) -> tuple[Operand, Operand]:
        """As CurrentScaling's, with x's amax recorded."""
        if self.table.ready:
            scale, inverse = self.scales[kind], self.inverses[kind]
        else:
            scale = self.current.scale(kind, x)
            inverse = reciprocal(scale)
        dtype = self.current.formats[kind]
        return _both(cast(x, scale, self.seen[kind], dtype, by_row, by_column), inverse)


def _both(codes: tuple[Tensor, Tensor], inverse: Tensor) -> tuple[Operand, Operand]:
    by_row, by_column = codes
    return (by_row, inverse), (by_column.t(), inverse)


class StepCodes:
    """A weight's codes for all passes of a step, which copies of a Gemm share; None between the steps."""

    operands: tuple[Operand, Operand] | None = None
    """By row, and by column with the same shape."""

    def clear(self) -> None:
        self.operands = None


class Fp8Gemm(Gemm):
    """Matmuls of codes with one scale a tensor. wgrad is in FP8 too, or with `fp8_wgrad` off in the compute dtype.

    What a matmul sums along lies contiguous in memory: codes for wgrad are written by column, and so are a weight's
    for dgrad. These are saved; or, unless it `saves_weights`, the weight itself, which dgrad casts again.
    """

    def __init__(
        self,
        scaling: DelayedScaling | CurrentScaling,
        dtype: torch.dtype,
        fp8_wgrad: bool = True,
        saves_weights: bool = True,
        step_codes: StepCodes | None = None,
    ):
        """`dtype` is that of results. None for `step_codes`: each pass casts."""
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
        return codes, codes if sharded else by_column  # gathered rows are transposed afterwards

    def weights(self, weight: Tensor, trains: bool) -> tuple[Operand, Operand]:
        if self.step_codes is not None and self.step_codes.operands is not None:
            return self.step_codes.operands
        saves = trains and self.saves_weights
        codes, by_column = self.scaling.codes(WEIGHT, weight, True, saves)
        return codes, by_column if saves else (weight,)

    def cast_for_step(self, weight: Tensor) -> None:
        """Casts the weight, in the compute dtype, for every `weights` until `step_codes` are cleared."""
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
    """Matmuls of e4m3 codes with a scale a block, a power of two. Sizes and tokens are multiples of 128.

    x and gradients have blocks of 1 × 128 along each of their dimensions, and so codes of two kinds; a weight's blocks
    are 128 × 128. `saves_weights` and `step_codes` are as Fp8Gemm's.
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
        """As Fp8Gemm's."""
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
    """x [tokens, k] in blocks 1 × 128: codes [tokens, k], inverses [tokens, k / 128]; and `by_column` in blocks of 128
    tokens × 1, which are the rows that travel together: codes [tokens, k], inverses [tokens / 128, k]."""
    codes, inverse, codes_t, inverse_t = cast_blocks(x, True, by_column, False)
    return (codes, inverse.t()), (codes_t.t(), inverse_t) if by_column else ()


class Fp8GroupedGemm(GroupedGemm):
    """Experts in FP8: forward and dgrad with a scale for each row along the sum; wgrad as without FP8."""

    def __init__(self, kernel: bool, cut: Axis | None = None, cut_gradient: Axis | None = None):
        """The axes over which the sums of `forward` and of `dgrad` are cut."""
        super().__init__(kernel)
        self.cut, self.cut_gradient = cut or Axis(), cut_gradient or Axis()

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return self._in_codes(x, weight, groups, self.cut, fast=True)

    def dgrad(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return self._in_codes(grad, weight.mT, groups, self.cut_gradient, fast=False)

    def _in_codes(self, rows: Tensor, matrices: Tensor, groups: RowGroups, cut: Axis, fast: bool) -> Tensor:
        """Each group's rows [rows, k] by its matrix [groups, ·, k], transposed."""
        (a, a_inverse), (b, b_inverse) = _rows_in_codes(rows, cut, True), _rows_in_codes(matrices, cut, False)
        if rows.is_cuda and len(rows):
            return torch._scaled_grouped_mm(
                a, b.mT, a_inverse, b_inverse, offs=groups.ends, out_dtype=rows.dtype, use_fast_accum=fast
            )
        a, b = a.double() * a_inverse.double()[..., None], b.double() * b_inverse.double()[..., None]
        return self._by_rows(a, b.mT, groups).to(rows.dtype)


def _rows_in_codes(x: Tensor, cut: Axis, rows_vary: bool) -> Operand:
    """e4m3 codes of x [..., k], contiguous, and inverses [...]: a scale for each row, whose parts `cut` has."""
    largest = all_reduce_no_grad(as_one_kernel(_row_amax, x, rows_vary=rows_vary), cut, "max")
    return as_one_kernel(_row_codes, x, largest, rows_vary=rows_vary)


def _row_amax(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True).float()


def _row_codes(x: Tensor, largest: Tensor) -> Operand:
    scale = scale_from_amax(largest, E4M3)
    return quantize(x, scale, E4M3).contiguous(), reciprocal(scale).squeeze(-1)
