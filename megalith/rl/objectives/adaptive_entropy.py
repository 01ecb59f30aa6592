"""Adaptive coefficient of the entropy bonus (`rl.use_adaptive_entropy`), as in TRL (Skywork-OR1).

After each step, rl.entropy_coef_delta is added to the coefficient if the mean entropy over the step's tokens is at most
rl.entropy_target, and subtracted otherwise. The coefficient stays between rl.entropy_coef_min and rl.entropy_coef_max.
A step has the bonus only if the entropy of the step before it was at most the target. The first step has no bonus.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping

from megalith.config.rl import RlConfig

COEFFICIENT, LAST = "entropy_coef", "entropy_last"  # counters of a checkpoint


class EntropyController:
    """Adapts the entropy coefficient from step to step. Its state is in `totals`, which checkpoints contain."""

    def __init__(self, rl: RlConfig, totals: MutableMapping[str, int | float]):
        self._rl, self._totals = rl, totals

    @property
    def coefficient(self) -> float:
        """Entropy coefficient of the next step."""
        is_low = self._totals.get(LAST, math.inf) <= self._rl.entropy_target
        return self._value if is_low else 0.0

    @property
    def _value(self) -> float:
        return self._totals.get(COEFFICIENT, self._rl.entropy_coef)

    def update(self, entropy: float) -> None:
        """Update the coefficient from the mean entropy over a step's tokens."""
        rl = self._rl
        if entropy <= rl.entropy_target:
            self._totals[COEFFICIENT] = min(self._value + rl.entropy_coef_delta, rl.entropy_coef_max)
        else:
            self._totals[COEFFICIENT] = max(self._value - rl.entropy_coef_delta, rl.entropy_coef_min)
        self._totals[LAST] = entropy
