"""Compare two outcomes of one job.

Scalars are compared by relative error, and gradients by ‖a − b‖ / max(‖b‖, 1e-6 · ‖all gradients‖). The lower bound on
the divisor is for tensors whose true gradient is zero, such as the key bias, where both values are rounding errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megalith.parity.job import Outcome

BOUND = 1e-5
FLOOR = 1e-6


@dataclass
class Errors:
    """Relative errors of an outcome compared with that of one process, and the values that differ although they must be
    equal.
    """

    loss: float = 0.0  # first step
    gradient: float = 0.0  # largest of all parameters
    worst_gradient: str = ""  # its parameter
    norm: float = 0.0  # largest of all steps
    losses: float = 0.0  # largest of all steps
    evaluation: float = 0.0
    different: list[str] = field(default_factory=list)  # descriptions

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.norm, self.losses, self.evaluation)

    def within(self, bound: float = BOUND) -> bool:
        """Return True if all errors are within the bound. NaN is not within the bound."""
        return self.largest <= bound and not self.different


def compare(ranks: Sequence[Outcome], one: Outcome) -> Errors:
    """Return the errors of the outcomes of all ranks, compared with that of one process. Rank 0 has the tensors."""
    outcome = ranks[0]
    gradients = gradient_errors(outcome.gradients, one.gradients)
    worst = max(gradients, key=lambda name: gradients[name])
    different = [
        name
        for name, same in (
            ("skipped steps", outcome.skipped == one.skipped),
            ("loss scales", outcome.loss_scales == one.loss_scales),
            ("generated tokens", outcome.generated == one.generated),
            ("names of the state", outcome.state.keys() == one.state.keys()),
            ("results of ranks", all(_scalars(rank) == _scalars(outcome) for rank in ranks)),
            (f"replicas of {', '.join(outcome.unequal_copies)}", not outcome.unequal_copies),
        )
        if not same
    ]
    return Errors(
        loss=relative_error(outcome.losses[:1], one.losses[:1]),
        gradient=gradients[worst],
        worst_gradient=worst,
        norm=relative_error(outcome.norms, one.norms),
        losses=relative_error(outcome.losses, one.losses),
        evaluation=relative_error([outcome.evaluation], [one.evaluation]),
        different=different,
    )


def _scalars(outcome: Outcome) -> str:
    """Return, as text, the values that must be bitwise equal on all ranks. As text, NaN equals NaN."""
    series = (outcome.losses, outcome.norms, outcome.evaluation)
    return repr((*series, outcome.skipped, outcome.generated))


def relative_error(actual: Sequence[float], expected: Sequence[float]) -> float:
    """Return the largest |a − b| / |b|. It is infinite if a ≠ b and b is zero or one of them is not finite."""
    assert len(actual) == len(expected), f"{len(actual)} values against {len(expected)}"
    return max(
        abs(a - b) / abs(b) if b and math.isfinite(a - b) else _same(a, b) for a, b in zip(actual, expected)
    )


def _same(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf


def gradient_errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of every parameter's gradient. It is infinite if only one of the two runs has it."""
    norms = {name: gradient.norm().item() for name, gradient in expected.items()}
    floor = FLOOR * math.sqrt(sum(norm**2 for norm in norms.values()))
    errors = dict.fromkeys(actual.keys() ^ expected.keys(), math.inf)
    for name in actual.keys() & expected.keys():
        error, scale = (actual[name] - expected[name]).norm().item(), max(norms[name], floor)
        relative = error / scale if scale else _same(error, 0.0)  # 0: all expected gradients are zero
        errors[name] = math.inf if math.isnan(relative) else relative
    return errors
