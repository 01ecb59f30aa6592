"""It learns to call a tool: the example's reward rises from guessing to the calculator's answers."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from small_policy import metrics

from megalith.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.full
def test_the_calculators_reward_rises(tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    runpy.run_path(str(EXAMPLES / "grpo" / "calculator.py"))["main"]()
    cpu = ("--runtime.device", "cpu", "--runtime.compile", "false")
    assert main(["sft", "examples/grpo/calculator_sft.yaml", *cpu]) == 0
    assert main(["grpo", "examples/grpo/calculator.yaml", *cpu]) == 0
    steps = metrics(tmp_path / "runs" / "calculator")
    rewards = [step["rewards_mean"] for step in steps]
    assert np.mean(rewards[:2]) < 0.35 and np.mean(rewards[-5:]) > 0.7, rewards
    assert steps[-1]["tools/calls"] > 2 * steps[0]["tools/calls"]
