"""Muon (Jordan et al. 2024): orthogonalized momentum for the matrices of layers, and another optimizer for all other
parameters.

The update of a matrix is its Nesterov momentum after a Newton-Schulz iteration (newton_schulz.py), which brings all
singular values close to 1. The update depends on the whole matrix. One of the ranks that shard a matrix owns it. The
other ranks send the owner their shards of the momentum, in the dtype of the iteration, and the owner returns their
shards of the result. Matrices are collected in rounds; while one round is orthogonalized, the next one is sent.

The matrices of a fused weight (query, key and value; gate and up) are orthogonalized separately, as are the matrices of
each expert, and with `muon_split_heads` the matrix of each attention head.

`muon_scale_mode` scales updates by the shape of the matrix. By default their RMS is about the same as for AdamW's
updates, so that both optimizers use the same learning rate and weight decay (Liu et al. 2025).

With `muon_moment2_method: normuon` (Li et al. 2025), each row of an orthogonalized matrix is divided by the square root
of a running mean of its squares, and the matrix is scaled back to the Frobenius norm of an orthogonal one. With
`adamuon`, each element is divided by the square root of a running mean of its square, as in NVIDIA's AdaptiveMuon (a
variant of Si et al. 2025).

`muon_state_dtype` stores state that is shaped like its matrix in bf16 or 8 bits (moments.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.combined import combine
from megalith.optim.functional import FunctionalOptimizer, State, scalar_of, zeros_of
from megalith.optim.moments import Moment, ReducedMoment
from megalith.optim.newton_schulz import EPS, orthogonalize_all
from megalith.optim.optimizer import (
    MOMENT_BYTES,
    TrainedParameter,
    build_named,
    register_optimizer,
    state_bytes_of,
)
from megalith.optim.rounds import is_shared, local_rounds, rounds_of

SCALES = {  # of a matrix [rows, columns], by muon_scale_mode
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Factor for a matrix [rows, columns], by muon_scale_mode."""


ADAMUON_EPS = 1e-8
"""Added to the root of AdaMuon's second moment, as in NVIDIA's AdaptiveMuon."""


@dataclass(frozen=True)
class _Round:
    """A round: matrices that are being sent to their owners."""

    pairs: Sequence[tuple[dict[str, Any], torch.nn.Parameter]]
    """Parameters with their groups."""
    momenta: Sequence[Tensor]
    """New momentum of each parameter."""
    updates: Any
    """Collection of the matrices to orthogonalize."""
    squares: Any
    """Collection of NorMuon's second moments; None without NorMuon."""


class _Whole(NamedTuple):
    value: Tensor
    """Update before it is orthogonalized, [..., rows, columns]."""
    squares: Tensor | None
    """NorMuon's running mean of each row's squares, [..., rows, 1]."""
    item: TrainedParameter


class _Part(NamedTuple):
    matrix: Tensor
    """One of the matrices of a parameter, or several as a batch, [..., rows, columns]."""
    shape: torch.Size
    """Shape of the matrix's rows within the parameter, whose rows alternate between matrices: [..., n, size, columns].
    """
    squares: Tensor | None
    """NorMuon's running means of the rows' squares, [..., n, size, 1]."""


class Muon(FunctionalOptimizer):
    """Muon for matrices: state `momentum_buffer`, with NorMuon `row_var`, with AdaMuon `exp_avg_sq`.

    The state has `step` too if the momentum has a warm-up or is rounded. The method `step` is a collective call.
    """

    def __init__(self, matrices: Sequence[TrainedParameter], config: OptimConfig, dtype: torch.dtype):
        """Build Muon for `matrices`, which have `placement.matrices`. Newton-Schulz runs in `dtype`."""
        self._rounding: dict[torch.nn.Parameter, ReducedMoment] = {}
        """Storage and rounding of the parameters whose state has fewer bits than fp32."""
        self._factors: dict[str, Tensor] = {}
        super().__init__(matrices, config)
        self._dtype = dtype

    def initial_state(self, item: TrainedParameter) -> dict[str, Tensor]:
        config = self.config
        rounding = ReducedMoment.of(
            item, config.muon_state_dtype, f"optim.muon_state_dtype {config.muon_state_dtype}"
        )
        if rounding is not None:
            self._rounding[item.parameter] = rounding

        def zeros(signed: bool) -> Tensor | Moment:
            return zeros_of(item) if rounding is None else rounding.zeros(signed)

        state = {"momentum_buffer": zeros(signed=True)}
        if config.muon_momentum_warmup_iters or rounding is not None:
            state["step"] = scalar_of(item)
        if config.muon_moment2_method == "normuon":
            state["row_var"] = torch.zeros(*item.parameter.shape[:-1], 1, device=item.parameter.device)
        if config.muon_moment2_method == "adamuon":
            state["exp_avg_sq"] = zeros(signed=False)
        return state

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        items = [self._items[parameter] for parameter in groups if parameter.grad is not None]
        for parameters in local_rounds(item for item in items if not is_shared(item)):
            self._update_local([(groups[parameter], parameter) for parameter in parameters])
        lists = rounds_of(item for item in items if is_shared(item))
        rounds = [[(groups[parameter], parameter) for parameter in each] for each in lists]
        following = self._start(rounds[0]) if rounds else None
        for number in range(len(rounds)):
            current = following
            following = self._start(rounds[number + 1]) if number + 1 < len(rounds) else None
            self._finish(current)

    def _update_local(self, pairs: Sequence[tuple[dict[str, Any], torch.nn.Parameter]]) -> None:
        """Update the parameters whose matrices are complete on this rank."""
        moved = [
            self._momentum(parameter.grad / self.grad_scale, self.state[parameter]) for _, parameter in pairs
        ]
        matrices = [
            _Whole(update, self.state[parameter].get("row_var"), self._items[parameter])
            for (_, parameter), (_, update) in zip(pairs, moved, strict=True)
        ]
        for (group, parameter), (momentum, _), (result, mean) in zip(
            pairs, moved, self._orthogonalize(matrices), strict=True
        ):
            self._apply(group, parameter, result, {"momentum_buffer": momentum}, mean)

    def _start(self, pairs: Sequence[tuple[dict[str, Any], torch.nn.Parameter]]) -> _Round:
        """Compute the momentum of a round's parameters and send it to the owners."""
        items = [self._items[parameter] for _, parameter in pairs]
        moved = [
            self._momentum(parameter.grad / self.grad_scale, self.state[parameter]) for _, parameter in pairs
        ]
        matrices = [item.placement.shared for item in items]
        costs = [_cost(item) for item in items]
        collect = items[0].placement.collect
        updates = collect(matrices, [update.to(self._dtype) for _, update in moved], costs)
        squares = None
        if self.config.muon_moment2_method == "normuon":
            rows = [matrix.of_rows() for matrix in matrices]
            squares = collect(rows, [self.state[parameter]["row_var"] for _, parameter in pairs], costs)
        return _Round(pairs, [momentum for momentum, _ in moved], updates, squares)

    def _finish(self, this: _Round) -> None:
        """Orthogonalize this rank's matrices of a round, send the results back, and update the parameters."""
        results, means = {}, {}
        wholes = this.updates.wait()
        squares = None if this.squares is None else this.squares.wait()
        matrices = [
            _Whole(
                whole,
                None if squares is None else squares[position][..., :1],
                self._items[this.pairs[position][1]],
            )
            for position, whole in wholes.items()
        ]
        for position, (result, mean) in zip(wholes, self._orthogonalize(matrices), strict=True):
            results[position] = result
            if mean is not None:
                copies = self._items[this.pairs[position][1]].placement.shared.row_copies
                means[position] = mean.expand(*mean.shape[:-1], copies)
        local_means = None if this.squares is None else this.squares.scatter(means)
        for position, result in enumerate(this.updates.scatter(results)):
            changes = {"momentum_buffer": this.momenta[position]}
            self._apply(*this.pairs[position], result, changes, local_means and local_means[position])

    def _apply(
        self,
        group: dict[str, Any],
        parameter: torch.nn.Parameter,
        update: Tensor,
        changes: dict[str, Tensor],
        mean: Tensor | None,
    ) -> None:
        """Update a parameter with `update`, its shard of a scaled orthogonal matrix. Update its state with `changes`
        and `mean`.
        """
        skip = self.found_inf > 0
        if mean is not None:
            changes["row_var"] = mean
        value, changes = self._stepped(self._items[parameter], group, update, changes)
        parameter.copy_(torch.where(skip, parameter, value))
        self.store(parameter, changes, skip)

    def store(self, parameter: torch.nn.Parameter, changes: Mapping[str, Tensor], skip: Tensor) -> None:
        state = self.state[parameter]
        reduced = {key for key in changes if isinstance(state[key], Moment)}
        for number, key in enumerate(sorted(reduced)):
            self._rounding[parameter].store(state[key], changes[key], changes["step"], number, skip)
        super().store(parameter, {key: changes[key] for key in changes.keys() - reduced}, skip)

    def _momentum(self, gradient: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return the new momentum and the matrix to orthogonalize."""
        config, decay = self.config, self.config.muon_momentum
        if config.muon_momentum_warmup_iters:
            progress = (state["step"] / config.muon_momentum_warmup_iters).clamp(max=1)
            decay = config.muon_momentum_start + (decay - config.muon_momentum_start) * progress
        momentum = state["momentum_buffer"].float().lerp(gradient, 1 - decay)
        return momentum, gradient.lerp(momentum, decay) if config.muon_nesterov else momentum

    def _stepped(
        self, item: TrainedParameter, group: Mapping[str, Any], update: Tensor, changes: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a parameter's value and changed state after a step with `update`, this rank's shard of a scaled
        orthogonal matrix.
        """
        state = self.state[item.parameter]
        if "step" in state:
            changes["step"] = state["step"] + 1
        if "exp_avg_sq" in state:
            factors = self._row_factors(item)
            orthogonal = update / factors
            square = state["exp_avg_sq"].float().lerp(orthogonal.square(), 1 - self.config.muon_beta2)
            update = factors * orthogonal / (square.sqrt() + ADAMUON_EPS)
            changes["exp_avg_sq"] = square
        value = item.parameter * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
        return value, changes

    def _row_factors(self, item: TrainedParameter) -> Tensor:
        """Return the scale that `_orthogonalize` applies to each row of a parameter's shard, [rows, 1]."""
        if item.name in self._factors:
            return self._factors[item.name]
        sizes, heads = self._parts(item)
        *_, rows, columns = item.placement.shape or item.parameter.shape
        first = item.placement.offset[-2] if item.placement.offset else 0
        factors = []
        for size, head in zip(sizes, heads, strict=True):
            factors += [self._factor(rows // sum(sizes) * size if head is None else head, columns)] * size
        pattern = torch.tensor(factors, device=item.parameter.device)
        here = torch.arange(first, first + item.parameter.shape[-2], device=pattern.device)
        self._factors[item.name] = pattern[here % len(pattern)][:, None]
        return self._factors[item.name]

    def _factor(self, rows: int, columns: int) -> float:
        """Return the scale of a matrix's update, for shape [rows, columns]."""
        return self.config.muon_extra_scale_factor * SCALES[self.config.muon_scale_mode](rows, columns)

    def _orthogonalize(self, wholes: Sequence[_Whole]) -> list[tuple[Tensor, Tensor | None]]:
        """Return (update, second moment) of each parameter.

        The update is orthogonalized, normalized per row (NorMuon) and scaled. The second moment is the updated running
        mean of each row's squares, or None without NorMuon.
        """
        config = self.config
        split = [self._split(whole) for whole in wholes]
        parts = [part for of_whole in split for part in of_whole]
        results = iter(
            orthogonalize_all(
                [part.matrix for part in parts],
                config.muon_num_ns_steps,
                self._dtype,
                config.muon_coefficient_type,
            )
        )
        outputs = []
        for of_whole in split:
            pieces, means = [], []
            for part in of_whole:
                result = next(results).float()
                if part.squares is not None:
                    mean = part.squares.reshape(*result.shape[:-1], 1).lerp(
                        result.square().mean(-1, keepdim=True), 1 - config.muon_beta2
                    )
                    result = _with_orthogonal_norm(result * (mean + EPS).rsqrt())
                    means.append(mean.reshape(part.squares.shape))
                pieces.append((result * self._factor(*result.shape[-2:])).reshape(part.shape))
            outputs.append((_joined(pieces), _joined(means) if means else None))
        return outputs

    def _split(self, whole: _Whole) -> list[_Part]:
        """Return the matrices that are fused in a parameter. Its rows consist of blocks of the matrices in turn, with
        the block sizes of `_parts`.
        """
        sizes, heads = self._parts(whole.item)
        blocks = whole.value.unflatten(-2, (-1, sum(sizes))).split(list(sizes), dim=-2)
        squares: Sequence[Tensor | None] = [None] * len(sizes)
        if whole.squares is not None:
            squares = whole.squares.unflatten(-2, (-1, sum(sizes))).split(list(sizes), dim=-2)
        return [
            _Part(
                block.flatten(-3, -2) if head is None else block.unflatten(-2, (-1, head)),
                block.shape,
                before,
            )
            for block, head, before in zip(blocks, heads, squares, strict=True)
        ]

    def _parts(self, item: TrainedParameter) -> tuple[Sequence[int], Sequence[int | None]]:
        """Return two lists with an entry per matrix that the parameter fuses: block sizes, and rows per attention head.

        The parameter's rows are blocks of the matrices in turn; a block has the matrix's block size. Rows per head are
        None if the heads are not orthogonalized separately.
        """
        placement, config = item.placement, self.config
        sizes = placement.matrices
        rows = (placement.shape or item.parameter.shape)[-2]
        if placement.fused == "qkv" and not config.muon_split_qkv:
            return (rows,), (None,)
        if placement.fused == "gate_up" and not config.muon_split_gate_up:
            return (rows,), (None,)
        if config.muon_split_heads and placement.heads is not None:
            return sizes, placement.heads
        return sizes, (None,) * len(sizes)


def _joined(blocks: Sequence[Tensor]) -> Tensor:
    """Return the parameter [..., rows, columns] whose rows alternate between `blocks` [..., n, size, columns]."""
    return (blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), dim=-2)).flatten(-3, -2)


def _cost(item: TrainedParameter) -> float:
    """Return the relative cost of a Newton-Schulz step: its multiplications without constant factors."""
    *_, rows, columns = item.placement.shape
    return rows * columns * min(rows, columns)


def _with_orthogonal_norm(x: Tensor) -> Tensor:
    """Scale matrices [..., rows, columns] to the Frobenius norm of an orthogonal matrix."""
    norm = x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    return x * (math.sqrt(min(x.shape[-2:])) / norm)


def _muon_bytes(config: OptimConfig) -> tuple[float, float]:
    copies = 2 if config.muon_moment2_method == "adamuon" else 1
    outside = state_bytes_of(config.muon_scalar_optimizer, config)[1]
    return copies * MOMENT_BYTES[config.muon_state_dtype], outside


@register_optimizer("muon", state_bytes=_muon_bytes)
def build_muon(
    parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str
) -> torch.optim.Optimizer:
    """Build Muon for matrices of layers and `muon_scalar_optimizer` for the other parameters, with state at zero."""
    matrices = [item for item in parameters if item.placement.matrices is not None]
    rest = [item for item in parameters if item.placement.matrices is None]
    if config.muon_fp32_matmul_prec is not None:
        exact = config.muon_fp32_matmul_prec == "highest"
    else:
        exact = precision == "fp32"
    muon = Muon(matrices, config, torch.float32 if exact else torch.bfloat16)
    return combine(
        [build_named(config.muon_scalar_optimizer, rest, config, precision), muon] if rest else [muon]
    )
