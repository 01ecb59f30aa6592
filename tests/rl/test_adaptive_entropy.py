"""The adaptive weight of the entropy bonus is TRL's, step by step, and a resumed run continues it."""

import math

import pytest
from rollout_files import configuration
from test_grpo_layouts import run_of

from megalith.rl.objectives.adaptive_entropy import EntropyController

ADAPTIVE = dict(use_adaptive_entropy=True, entropy_coef=0.01, entropy_coef_delta=0.02, entropy_coef_max=0.04,
                entropy_target=1.0)  # fmt: skip


def trl_coefficients(entropies: list[float]) -> list[float]:
    """The coefficients that GRPOTrainer of TRL 1.16 applies in steps with these entropies, and in the next one."""
    coefficient, last, applied = 0.01, math.inf, []
    for entropy in [*entropies, None]:
        applied.append(coefficient if last <= 1.0 else 0.0)
        if entropy is not None:
            coefficient = min(coefficient + 0.02, 0.04) if entropy <= 1.0 else max(coefficient - 0.02, 0.0)
            last = entropy
    return applied


def test_the_coefficient_is_trls(tmp_path):
    rl, totals = configuration(tmp_path, **ADAPTIVE).rl, {}
    entropies = [2.0, 0.5, 0.4, 0.9, 1.1, 3.0, 0.1]
    applied = []
    for entropy in entropies:
        applied.append(EntropyController(rl, totals).coefficient)
        EntropyController(rl, totals).update(entropy)
    assert [*applied, EntropyController(rl, totals).coefficient] == pytest.approx(trl_coefficients(entropies))
    assert max(applied) == 0.04


def test_a_run_applies_it_in_the_step_after(tmp_path):
    """With a target above every entropy, the bonus begins in the second step."""
    run = run_of(configuration(tmp_path, **ADAPTIVE | {"entropy_target": 50.0}))
    metrics = []
    with run.data.train_loader(0, 0, run.device) as batches:
        for _ in range(3):
            metrics.append(run.train_step(batches).extra_metrics())
    assert [each["entropy_coef"] for each in metrics] == pytest.approx([0.0, 0.03, 0.04])
    assert run.totals["entropy_coef"] == pytest.approx(0.04) and run.task.loss.entropy_coef == pytest.approx(
        0.04
    )
    assert run.totals["entropy_last"] == pytest.approx(metrics[-1]["entropy"])
