"""Two outcomes of one job against the numerics contract.

Numbers are compared by their relative error. A gradient is compared as a whole, ‖a − b‖ against max(‖b‖, 1e-6 · ‖all
gradients‖): the floor is for tensors whose true gradient is zero, such as the bias of the keys, where both sides hold
nothing but rounding.
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
    """Relative errors of an outcome against one process's, and what differs that has to be the same."""

    loss: float = 0.0  # the first
    gradient: float = 0.0  # the worst, and whose it is
    worst_gradient: str = ""
    norm: float = 0.0  # the worst of all steps
    losses: float = 0.0  # the worst of all steps
    evaluation: float = 0.0
    different: list[str] = field(default_factory=list)  # in words

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradient, self.norm, self.losses, self.evaluation)

    def within(self, bound: float = BOUND) -> bool:
        """Whether the outcome counts as equal. An error that is not a number does not."""
        return self.largest <= bound and not self.different


def compare(ranks: Sequence[Outcome], one: Outcome) -> Errors:
    """The errors of the outcomes of all ranks, the first one's having the tensors, against that of one process."""
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
            ("what ranks say", all(_told(rank) == _told(outcome) for rank in ranks)),
            (f"copies of {', '.join(outcome.unequal_copies)}", not outcome.unequal_copies),
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


def _told(outcome: Outcome) -> str:
    """What every rank knows, and all the same to the bit; as text, in which NaN is NaN."""
    numbers = (outcome.losses, outcome.norms, outcome.evaluation)
    return repr((*numbers, outcome.skipped, outcome.generated))


def relative_error(found: Sequence[float], expected: Sequence[float]) -> float:
    """The worst of |a − b| / |b|; infinite where the two differ and b is zero or one of them is not finite."""
    assert len(found) == len(expected), f"{len(found)} figures against {len(expected)}"
    return max(
        abs(a - b) / abs(b) if b and math.isfinite(a - b) else _same(a, b) for a, b in zip(found, expected)
    )


def _same(a: float, b: float) -> float:
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf


def gradient_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The relative error of every parameter's gradient; infinite for one that is on one side alone."""
    norms = {name: gradient.norm().item() for name, gradient in expected.items()}
    floor = FLOOR * math.sqrt(sum(norm**2 for norm in norms.values()))
    errors = dict.fromkeys(found.keys() ^ expected.keys(), math.inf)
    for name in found.keys() & expected.keys():
        error, scale = (found[name] - expected[name]).norm().item(), max(norms[name], floor)
        relative = error / scale if scale else _same(error, 0.0)  # 0: every gradient of one process is zero
        errors[name] = math.inf if math.isnan(relative) else relative
    return errors
