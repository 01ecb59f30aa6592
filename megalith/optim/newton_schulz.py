"""Orthogonalization of matrices by quintic Newton-Schulz iterations, with the published sets of coefficients.

An iteration maps every singular value s in [0, 1] to a · s + b · s³ + c · s⁵ using only matmuls.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPS = 1e-7
BATCH_ELEMENTS = (
    2**25
)  # of matrices that share matmuls: more would not be faster, and joining them takes memory

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    # Jordan et al. 2024
    "simple": ((3.4445, -4.7750, 2.0315),),
    # optimized for five different iterations; modded-nanogpt, after Cesista et al. 2025
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al. 2025, with their safety factor of 1.01
    "polar_express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # Boissin et al. 2025
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
}
"""Coefficients (a, b, c) of each iteration, by `optim.muon_coefficient_type`."""


def iterations(kind: str, steps: int) -> list[tuple[float, float, float]]:
    """Return the coefficients of `steps` iterations.

    The coefficient sets repeat, except `polar_express`, which continues with its last iteration.
    """
    table = COEFFICIENTS[kind]
    if kind == "polar_express":
        return [table[min(step, len(table) - 1)] for step in range(steps)]
    return [table[step % len(table)] for step in range(steps)]


def orthogonalized(x: Tensor, steps: int, dtype: torch.dtype, kind: str = "simple") -> Tensor:
    """Return U · Vᵀ for each matrix U · S · Vᵀ in x [..., rows, columns], computed in `dtype`.

    The result is approximate: with five steps, its singular values are between about 0.7 and 1.2 instead of 1.
    """
    wide = x.shape[-2] <= x.shape[-1]
    y = x.to(dtype) if wide else x.to(dtype).mT
    y = y / y.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    shape, y = y.shape, y.reshape(-1, *y.shape[-2:])
    for a, b, c in iterations(kind, steps):
        gram = y @ y.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    y = y.view(shape)
    return y if wide else y.mT


def orthogonalize_all(
    matrices: Sequence[Tensor], steps: int, dtype: torch.dtype, kind: str = "simple"
) -> list[Tensor]:
    """Return the result of `orthogonalized` for each matrix [..., rows, columns]. Small matrices of the same shape
    share their matmuls.
    """
    results: dict[int, Tensor] = {}
    waiting: dict[tuple[int, int], list[int]] = {}

    def run(positions: Sequence[int]) -> None:
        parts = [matrices[position].reshape(-1, *matrices[position].shape[-2:]) for position in positions]
        joined = orthogonalized(parts[0] if len(parts) == 1 else torch.cat(parts), steps, dtype, kind)
        for position, result in zip(positions, joined.split([len(part) for part in parts]), strict=True):
            results[position] = result.view(matrices[position].shape)

    for position, matrix in enumerate(matrices):
        rows, columns = matrix.shape[-2:]
        batch = waiting.setdefault((rows, columns), [])
        if batch and sum(matrices[each].numel() for each in batch) + matrix.numel() > BATCH_ELEMENTS:
            run(waiting.pop((rows, columns)))
            batch = waiting.setdefault((rows, columns), [])
        batch.append(position)
    for batch in waiting.values():
        run(batch)
    return [results[position] for position in range(len(matrices))]
