"""It learns: from a short fine-tuning the reward `length` rises by half of its range."""

import numpy as np
import pytest
from small_policy import MODEL, configuration, metrics, tuned

from megalith.rl.grpo import train_grpo

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))]


def answer(asked, rng) -> str:
    """5 to 11 numbers: what fine-tuning teaches, of which none earns half of the reward."""
    return " ".join(map(str, rng.integers(0, 10, rng.integers(5, 12))))


@pytest.mark.parametrize("seed", SEEDS)
def test_the_reward_rises_by_half_of_its_range(tmp_path, seed):
    config = configuration(
        tmp_path,
        model=MODEL | dict(init_from=tuned(tmp_path, answer, seed)),
        train=dict(train_iters=30, micro_batch_size=32, global_batch_size=128, seed=seed),
        rl=dict(reward_funcs="length", num_generations=8, max_completion_length=12, generation_rows=128,
                packing=True, log_entropy=False),
        checkpoint=dict(save_at_end=False),
    )  # fmt: skip
    train_grpo(config)
    rewards = [step["rewards_mean"] for step in metrics(tmp_path / "run")]
    assert np.mean(rewards[-3:]) - rewards[0] > 0.5
