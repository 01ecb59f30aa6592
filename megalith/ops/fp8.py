"""FP8 matmuls: what a linear's Gemm is under each recipe, after those of Transformer Engine.

    recipe       scale of a tensor                         codes
    delayed      largest / amax of the steps before        inputs and weights e4m3, gradients e5m2 (`hybrid`) or e4m3
    tensorwise   largest / amax of this tensor             the same
    blockwise    of each block, rounded down to 2ⁿ         1 × 128 along the sum of inputs and gradients, 128 × 128 of
                                                           weights; e4m3 throughout
    experts      of each row along the sum (any recipe)    e4m3; their wgrads stay in the compute dtype

codes = round(clamp(x · scale)), x ≈ codes · inverse with inverse = 1 / scale. A scale belongs to the whole tensor,
however it is sharded: a maximum is exact and has no order, so codes of a shard are the shard of the codes. Delayed
scales are constants of a step: the amax is a maximum over all micro-batches and all ranks, taken at the step's end, so
neither recomputation nor a schedule changes it. A run's first step has no step before it: its forward and backward
passes run once more, before, in the compute dtype, for the amaxes alone.

A clamp hides infinities, so an amax that is not finite becomes a scale of NaN (tensorwise, blockwise), or makes the
step one that is skipped (delayed), which records nothing.

A CPU has no FP8 matmul of use: there codes are multiplied in fp64, where sums of products of two e4m3 numbers are exact
in any order up to 2¹⁷ terms. It is the reference of what a GPU computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from megalith.comm.collectives import Axis, summed
from megalith.ops.gemm import GEMM, Gemm, Operand
from megalith.ops.grouped_gemm import GroupedGemm, RowGroups

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
FORMATS = {"hybrid": (E4M3, E4M3, E5M2), "e4m3": (E4M3, E4M3, E4M3)}  # of inputs, weights and gradients
INPUT, WEIGHT, GRADIENT = 0, 1, 2
BLOCK = 128
LARGEST_SCALE = torch.finfo(torch.float32).max


def scale_of(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """largest / amax / 2^margin in fp32, divided once: 1 for an amax of 0, NaN for one that is not finite."""
    scale = (LARGEST[dtype] / amax.double() / 2**margin).clamp(max=LARGEST_SCALE).float()
    return torch.where(amax == 0, 1.0, torch.where(amax.isfinite(), scale, torch.nan))


def power_of_two(scale: Tensor) -> Tensor:
    """A positive scale, rounded down to a power of two; NaN stays."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.where(scale.isfinite(), 0.5, mantissa), exponent)


def inverse_of(scale: Tensor) -> Tensor:
    return (1 / scale.double()).float()


def codes_of(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """round(x · scale) in an FP8 dtype, clamped first: casts of torch differ on what is too large."""
    largest = LARGEST[dtype]
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def scaled_matmul(a: Operand, b: Operand, dtype: torch.dtype) -> Tensor:
    """a · bᵀ of codes a [m, k] and b [n, k] with their inverses → [m, n], computed in fp64."""
    (left, left_inverse), (right, right_inverse) = a, b
    product = left.double() @ right.double().T
    return (product * (left_inverse.double() * right_inverse.double())).to(dtype)


def transposed(operand: Operand) -> Operand:
    codes, inverse = operand
    return codes.t().contiguous(), inverse


@torch.library.custom_op("megalith::fp8_cast", mutates_args=())
def cast_and_record(x: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """codes_of(x, scale), with |x|'s maximum added to `seen`, float32 scalar.

    autograd is not told that `seen` changes: it is no part of what it computes, and a maximum that is taken twice, as
    where a layer is recomputed, is the same.
    """
    with torch.autograd._unsafe_preserve_version_counter(seen):
        seen.copy_(torch.maximum(seen, x.abs().amax().float()))
    return codes_of(x, scale, dtype)


@cast_and_record.register_fake
def _(x: Tensor, scale: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


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
        self.formats, self.algo, self.margin = FORMATS[formats], algo, margin
        zeros = torch.zeros(len(names), 3, device=device)
        self.seen = zeros  # the amax of this step so far
        self.history = zeros.expand(history_len, -1, -1).clone()  # the newest first
        self.scale, self.inverse = torch.ones_like(zeros), torch.ones_like(zeros)
        self.ready: bool | None = False
        """Whether there are scales. Before, linears compute in the compute dtype and record; None while they do so for
        the first."""

    def begin_first(self) -> None:
        """The first scales are looked for: the next passes record alone."""
        self.ready = None

    def begin_step(self) -> None:
        """Forgets what has been seen since the last step, as in an evaluation."""
        self.seen.zero_()

    def end_passes(self, world: Axis) -> None:
        """After the step's last pass: every rank's amaxes become those of the whole run."""
        self.seen.copy_(summed(self.seen, world, "max"))

    def overflow(self) -> Tensor:
        """Zero, or NaN where an amax of this step is not finite: float32 scalar."""
        return (self.seen * 0).sum()

    def end_step(self, skipped: Tensor | float) -> None:
        """Moves history and scales on, unless the step was `skipped` (1). A tensor that was not seen stays."""
        moves = (
            (self.seen > 0) & self.seen.isfinite() & ~torch.as_tensor(skipped, device=self.seen.device).bool()
        )
        self.history.copy_(torch.where(moves, torch.cat([self.seen[None], self.history[:-1]]), self.history))
        amax = self.history[0] if self.algo == "most_recent" else self.history.amax(0)
        for kind, dtype in enumerate(self.formats):
            scale = scale_of(amax[:, kind], dtype, self.margin)
            self.scale[:, kind] = torch.where(amax[:, kind] > 0, scale, self.scale[:, kind])
        self.inverse.copy_(inverse_of(self.scale))
        self.ready = True

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint holds: of each linear its history [len, 3] and its scales [3], views of what is here."""
        rows = {f"{name}.amax_history": self.history[:, row] for name, row in self.rows.items()}
        return rows | {f"{name}.scale": self.scale[row] for name, row in self.rows.items()}

    def load_state(self, names: Collection[str], read: Callable[[str], Tensor]) -> None:
        """Fills it with what `read` has of `names`; of a history of another length the newest. Ready if it has all."""
        state = self.state()
        for name in state.keys() & names:
            stored = read(name).to(state[name].device)
            length = min(len(stored), len(state[name]))
            state[name][:length] = stored[:length]
        self.inverse.copy_(inverse_of(self.scale))
        self.ready = state.keys() <= set(names)


class DelayedScaling:
    """A linear's row of an AmaxTable."""

    def __init__(self, table: AmaxTable, name: str):
        row = table.rows[name]
        self.table = table
        # views made here: an index would be a constant of what is compiled, and of each linear another
        self.scales, self.inverses, self.seen = (
            tuple(each[row].unbind()) for each in (table.scale, table.inverse, table.seen)
        )

    @property
    def ready(self) -> bool:
        return self.table.ready

    def codes(self, kind: int, x: Tensor) -> Operand:
        codes = cast_and_record(x, self.scales[kind], self.seen[kind], self.table.formats[kind])
        return codes, self.inverses[kind]

    def record(self, kind: int, x: Tensor) -> None:
        self.seen[kind].copy_(torch.maximum(self.seen[kind], x.detach().abs().amax().float()))


class CurrentScaling:
    """Scales from the tensors themselves, each the maximum over the `axes` whose ranks hold its shards."""

    ready = True

    def __init__(self, formats: str, axes: Sequence[Axis] = ()):
        self.formats, self.axes = FORMATS[formats], axes

    def codes(self, kind: int, x: Tensor) -> Operand:
        amax = x.abs().amax().float()
        for axis in self.axes:
            amax = summed(amax, axis, "max")
        scale = scale_of(amax, self.formats[kind])
        return codes_of(x, scale, self.formats[kind]), inverse_of(scale)


class Fp8Gemm(Gemm):
    """Matmuls of codes with one scale a tensor. wgrad is in FP8 too, or with `fp8_wgrad` off in the compute dtype."""

    def __init__(self, scaling: DelayedScaling | CurrentScaling, dtype: torch.dtype, fp8_wgrad: bool = True):
        """`dtype` is that of results."""
        self.scaling, self.dtype, self.fp8_wgrad = scaling, dtype, fp8_wgrad

    def input(self, x: Tensor) -> Operand:
        return self._codes(INPUT, x)

    def saved(self, x: Tensor, operand: Operand) -> Operand:
        return operand if self.fp8_wgrad else (x,)

    def gradient(self, grad: Tensor) -> Operand:
        codes = self._codes(GRADIENT, grad)
        return codes if self.fp8_wgrad or not self.scaling.ready else (*codes, grad)

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weight_codes = self._codes(WEIGHT, weight)
        if not self.scaling.ready:
            return GEMM.forward(x, weight, bias)
        y = scaled_matmul(x, weight_codes, self.dtype)
        return y if bias is None else y + bias

    def dgrad(self, grad: Operand, weight: Tensor) -> Tensor:
        if not self.scaling.ready:
            return GEMM.dgrad(grad, weight)
        return scaled_matmul(grad[:2], transposed(self._codes(WEIGHT, weight)), self.dtype)

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        if len(x) == 1:
            return GEMM.wgrad(grad[-1:], x)
        return scaled_matmul(transposed(grad), transposed(x), self.dtype)

    def _codes(self, kind: int, x: Tensor) -> Operand:
        if self.scaling.ready:
            return self.scaling.codes(kind, x)
        self.scaling.record(kind, x)
        return (x,)


class BlockGemm(Gemm):
    """Matmuls of e4m3 codes with a scale a block, a power of two. Sizes and tokens are multiples of 128."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def input(self, x: Tensor) -> Operand:
        return rows_in_blocks(x)

    def saved(self, x: Tensor, operand: Operand) -> Operand:
        return tokens_in_blocks(x)

    def gradient(self, grad: Tensor) -> Operand:
        return *rows_in_blocks(grad), *tokens_in_blocks(grad)

    def forward(self, x: Operand, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = (decoded_rows(x) @ decoded_tiles(tiles(weight)).T).to(self.dtype)
        return y if bias is None else y + bias

    def dgrad(self, grad: Operand, weight: Tensor) -> Tensor:
        return (decoded_rows(grad[:2]) @ decoded_tiles(tiles(weight))).to(self.dtype)

    def wgrad(self, grad: Operand, x: Operand) -> Tensor:
        return (decoded_tokens(grad[2:]).T @ decoded_tokens(x)).to(self.dtype)


def _block_codes(blocks: Tensor, dims: tuple[int, ...]) -> Operand:
    """Codes of blocks along `dims`, and their inverses."""
    scale = scale_of(blocks.abs().amax(dims, keepdim=True).float(), E4M3)
    scale = power_of_two(scale)
    return codes_of(blocks, scale, E4M3), inverse_of(scale).squeeze(dims)


def rows_in_blocks(x: Tensor) -> Operand:
    """x [tokens, k] in blocks 1 × 128: codes [tokens, k], inverses [tokens, k / 128]."""
    codes, inverse = _block_codes(x.unflatten(1, (-1, BLOCK)), (2,))
    return codes.flatten(1), inverse


def tokens_in_blocks(x: Tensor) -> Operand:
    """x [tokens, k] in blocks of 128 tokens × 1, which are the rows that travel together: codes [tokens / 128, 128, k],
    inverses [tokens / 128, k]."""
    return _block_codes(x.unflatten(0, (-1, BLOCK)), (1,))


def tiles(weight: Tensor) -> Operand:
    """weight [n, k] in blocks 128 × 128: codes [n / 128, 128, k / 128, 128], inverses [n / 128, k / 128]."""
    return _block_codes(weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)), (1, 3))


def decoded_rows(operand: Operand) -> Tensor:
    """What codes stand for, in fp64: [tokens, k]."""
    codes, inverse = operand
    return (codes.double().unflatten(1, (-1, BLOCK)) * inverse.double()[..., None]).flatten(1)


def decoded_tokens(operand: Operand) -> Tensor:
    codes, inverse = operand
    return (codes.double() * inverse.double()[:, None]).flatten(0, 1)


def decoded_tiles(operand: Operand) -> Tensor:
    codes, inverse = operand
    return (codes.double() * inverse.double()[:, None, :, None]).flatten(2).flatten(0, 1)


class Fp8GroupedGemm(GroupedGemm):
    """Experts in FP8: forward and dgrad with a scale for each row along the sum; wgrad as without FP8."""

    def __init__(self, kernel: bool, cut: Axis | None = None, cut_gradient: Axis | None = None):
        """The axes over which the sums of `forward` and of `dgrad` are cut."""
        super().__init__(kernel)
        self.cut, self.cut_gradient = cut or Axis(), cut_gradient or Axis()

    def forward(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return self._in_codes(x, weight.mT, groups, self.cut)

    def dgrad(self, grad: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return self._in_codes(grad, weight, groups, self.cut_gradient)

    def _in_codes(self, rows: Tensor, matrices: Tensor, groups: RowGroups, cut: Axis) -> Tensor:
        """Each group's rows [rows, k] by its matrix [groups, k, ·]."""
        decoded = [_decoded_by_row(rows, 1, cut), _decoded_by_row(matrices, 1, cut)]
        return self._by_rows(*decoded, groups).to(rows.dtype)


def _decoded_by_row(x: Tensor, dim: int, cut: Axis) -> Tensor:
    """What e4m3 codes of x stand for, with a scale for each row along `dim`, in fp64."""
    scale = scale_of(summed(x.abs().amax(dim, keepdim=True).float(), cut, "max"), E4M3)
    return codes_of(x, scale, E4M3).double() * inverse_of(scale).double()
