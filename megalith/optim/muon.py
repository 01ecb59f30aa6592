"""Muon (Jordan et al. 2024): orthogonalized momentum for the matrices of layers, another optimizer for the rest.

The update of a matrix is its Nesterov momentum after a Newton-Schulz iteration (newton_schulz.py), which brings all
singular values close to 1. It depends on the whole matrix, so each rank gathers the momentum of one matrix at a time,
orthogonalizes it, and keeps its shard of the result. The matrices of a fused weight (query, key and value; gate and up)
are orthogonalized separately, and so is each expert's; with `muon_split_heads` also each attention head's.

`muon_scale_mode` scales updates by the shape of the matrix. By default their RMS is about that of AdamW's updates, so
that both use the same learning rate and weight decay (Liu et al. 2025).

With `muon_moment2_method: normuon` (Li et al. 2025), each row of an orthogonalized matrix is divided by the root of a
running mean of its squares, and the matrix is scaled back to the Frobenius norm of an orthogonal one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.combined import combine
from megalith.optim.functional import FunctionalOptimizer, State, zeros_of
from megalith.optim.newton_schulz import EPS, orthogonalized
from megalith.optim.optimizer import TrainedParameter, build_named, register_optimizer, state_bytes_of

SCALES = {  # of a matrix [rows, columns], by muon_scale_mode
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Factor for a matrix [rows, columns], by muon_scale_mode."""


class Muon(FunctionalOptimizer):
    """Muon for matrices, with the state `momentum_buffer` and, for NorMuon, `row_var`. `step` is a collective call."""

    def __init__(self, matrices: Sequence[TrainedParameter], config: OptimConfig, dtype: torch.dtype):
        """Build Muon for `matrices`, which have `placement.matrices`. Newton-Schulz runs in `dtype`."""
        super().__init__(matrices, config)
        self._dtype = dtype

    def initial_state(self, item: TrainedParameter) -> dict[str, Tensor]:
        state = {"momentum_buffer": zeros_of(item)}
        if self.config.muon_moment2_method == "normuon":
            state["row_var"] = torch.zeros(*item.parameter.shape[:-1], 1, device=item.parameter.device)
        return state

    def update(
        self, item: TrainedParameter, gradient: Tensor, state: State, group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, placement, lr = self.config, item.placement, group["lr"]
        momentum = state["momentum_buffer"].lerp(gradient, 1 - config.muon_momentum)
        update = gradient.lerp(momentum, config.muon_momentum) if config.muon_nesterov else momentum
        changes = {"momentum_buffer": momentum}
        whole = placement.gather(update)
        squares = None
        if "row_var" in state:
            squares = placement.gather(state["row_var"].expand_as(update))[..., :1]
        whole, squares = self._orthogonalize(whole, squares, item)
        if squares is not None:
            local = placement.shard(squares.expand_as(whole))[..., :1]
            changes["row_var"] = local if local.shape[-1] else state["row_var"]
        value = item.parameter * (1 - lr * group["weight_decay"]) - lr * placement.shard(whole)
        return value, changes

    def _orthogonalize(
        self, weight: Tensor, squares: Tensor | None, item: TrainedParameter
    ) -> tuple[Tensor, Tensor | None]:
        """Orthogonalize, normalize and scale the matrices in weight [..., rows, columns].

        The rows alternate between the matrices: `sizes` rows of each at a time. `squares` [..., rows, 1] is NorMuon's
        running mean of each row's squares, which is returned with this step's.
        """
        sizes, heads = self._parts(item)
        size, pieces, means = sum(sizes), [], []
        blocks = weight.unflatten(-2, (-1, size)).split(list(sizes), dim=-2)
        for number, (part, head) in enumerate(zip(blocks, heads, strict=True)):
            matrix = part.flatten(-3, -2) if head is None else part.unflatten(-2, (-1, head))
            result = orthogonalized(
                matrix, self.config.muon_num_ns_steps, self._dtype, self.config.muon_coefficient_type
            ).float()
            if squares is not None:
                before = squares.unflatten(-2, (-1, size)).split(list(sizes), dim=-2)[number]
                mean = before.reshape(*matrix.shape[:-1], 1).lerp(
                    result.square().mean(-1, keepdim=True), 1 - self.config.muon_beta2
                )
                result = _with_orthogonal_norm(result * (mean + EPS).rsqrt())
                means.append(mean.reshape(before.shape))
            factor = self.config.muon_extra_scale_factor * SCALES[self.config.muon_scale_mode](
                *matrix.shape[-2:]
            )
            pieces.append((result * factor).reshape(part.shape))
        joined = torch.cat(pieces, dim=-2).flatten(-3, -2)
        return joined, torch.cat(means, dim=-2).flatten(-3, -2) if means else None

    def _parts(self, item: TrainedParameter) -> tuple[Sequence[int], Sequence[int | None]]:
        """Return the rows at which the parameter's matrices alternate, and the rows per attention head of each."""
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


def _with_orthogonal_norm(x: Tensor) -> Tensor:
    """Scale matrices [..., rows, columns] to the Frobenius norm of an orthogonal matrix."""
    norm = x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    return x * (math.sqrt(min(x.shape[-2:])) / norm)


@register_optimizer(
    "muon", state_bytes=lambda config: (4, state_bytes_of(config.muon_scalar_optimizer, config)[1])
)
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
