"""Muon (Jordan et al. 2024): orthogonalized momentum for the matrices of layers, AdamW for all other parameters.

The update of a matrix is its Nesterov momentum after five steps of a quintic Newton-Schulz iteration, which bring all
singular values close to 1 using only matmuls. It depends on the whole matrix, so each rank gathers the momentum of one
matrix at a time, orthogonalizes it, and keeps its shard of the result. The matrices of a fused weight (query, key and
value; gate and up) are orthogonalized separately, and so is each expert's.

`muon_scale_mode` scales updates by the shape of the matrix. By default their RMS is about that of AdamW's updates, so
that both use the same learning rate and weight decay (Liu et al. 2025).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalith.config import OptimConfig
from megalith.optim.adam import build_adamw
from megalith.optim.combined import combine
from megalith.optim.optimizer import TrainedParameter, adam_bytes, decay_groups, register_optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7

SCALES = {  # of a matrix [rows, columns], by muon_scale_mode
    "spectral": lambda rows, columns: math.sqrt(max(rows, columns)),
    "unit_rms_norm": lambda rows, columns: math.sqrt(rows / columns),
    "shape_scaling": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}
"""Factor for a matrix [rows, columns], by muon_scale_mode."""


def orthogonalized(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return U · Vᵀ for each matrix U · S · Vᵀ in x [..., rows, columns], computed in `dtype`.

    The result is approximate: its singular values are between about 0.7 and 1.2 instead of 1.
    """
    a, b, c = COEFFICIENTS
    wide = x.shape[-2] <= x.shape[-1]
    y = x.to(dtype) if wide else x.to(dtype).mT
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y if wide else y.mT


class Muon(torch.optim.Optimizer):
    """Muon for matrices. `step` is a collective call.

    `optimizer_step` calls `step` after it has set `grad_scale` and `found_inf`.
    """

    _step_supports_amp_scaling = True

    def __init__(self, matrices: Sequence[TrainedParameter], config: OptimConfig, dtype: torch.dtype):
        """Build Muon for `matrices`, which have `placement.matrices`. Newton-Schulz runs in `dtype`."""
        super().__init__(decay_groups(matrices, config), {"lr": config.lr})
        self._config, self._dtype = config, dtype
        self._placements = {item.parameter: item.placement for item in matrices}
        for item in matrices:
            self.state[item.parameter] = {"momentum_buffer": torch.zeros_like(item.parameter)}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_matrix(parameter, group)

    def _step_matrix(self, parameter: Tensor, group: Mapping) -> None:
        momentum, buffer = self._config.muon_momentum, self.state[parameter]["momentum_buffer"]
        gradient = parameter.grad / self.grad_scale
        moved = buffer.lerp(gradient, 1 - momentum)
        update = gradient.lerp(moved, momentum) if self._config.muon_nesterov else moved
        placement = self._placements[parameter]
        update = placement.shard(self._orthogonalize(placement.gather(update), placement.matrices))
        stepped = parameter * (1 - group["lr"] * group["weight_decay"]) - group["lr"] * update
        keep = self.found_inf > 0  # on the device, so that the host does not wait
        parameter.copy_(torch.where(keep, parameter, stepped))
        buffer.copy_(torch.where(keep, buffer, moved))

    def _orthogonalize(self, weight: Tensor, sizes: Sequence[int]) -> Tensor:
        """Orthogonalize and scale the matrices in weight [..., rows, columns].

        The rows alternate between the matrices: `sizes` rows of each at a time.
        """
        config, results = self._config, []
        blocks = weight.unflatten(-2, (-1, sum(sizes)))
        for part in blocks.split(list(sizes), dim=-2):
            matrix = part.flatten(-3, -2)
            factor = config.muon_extra_scale_factor * SCALES[config.muon_scale_mode](*matrix.shape[-2:])
            update = orthogonalized(matrix, config.muon_num_ns_steps, self._dtype).float() * factor
            results.append(update.unflatten(-2, part.shape[-3:-1]))
        return torch.cat(results, dim=-2).flatten(-3, -2)


@register_optimizer("muon", state_bytes=lambda config: (4, adam_bytes(config)[1]))
def build_muon(
    parameters: Sequence[TrainedParameter], config: OptimConfig, precision: str
) -> torch.optim.Optimizer:
    """Build Muon for matrices of layers and AdamW for the other parameters, with state at zero."""
    matrices = [item for item in parameters if item.placement.matrices is not None]
    rest = [item for item in parameters if item.placement.matrices is None]
    if config.muon_fp32_matmul_prec is not None:
        exact = config.muon_fp32_matmul_prec == "highest"
    else:
        exact = precision == "fp32"
    muon = Muon(matrices, config, torch.float32 if exact else torch.bfloat16)
    return combine([build_adamw(rest, config, precision), muon] if rest else [muon])
