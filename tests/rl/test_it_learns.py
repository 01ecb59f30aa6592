"""It learns: from a short fine-tuning the reward `length` rises by a half, and `sort` by half of what it lacks."""

import numpy as np
import pytest
from small_policy import MODEL, configuration, metrics, tuned

from megalith.rl.grpo import train_grpo

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))]


def some_numbers(asked, rng) -> str:
    """5 to 11 of them: none earns half of the reward `length`."""
    return " ".join(map(str, rng.integers(0, 10, rng.integers(5, 12))))


def shuffled(asked, rng) -> str:
    """What was asked, in any order: a third of the places are right."""
    return " ".join(map(str, rng.permutation(asked)))


TASKS = {  # what fine-tuning teaches, its steps, GRPO's steps, settings
    "length": (some_numbers, 60, 30, 1e-2, 12),
    "sort": (shuffled, 300, 80, 5e-3, 8),
}


@pytest.mark.parametrize("reward", TASKS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_reward_rises_by_half_of_its_range(tmp_path, reward, seed):
    answer, tuning, steps, lr, longest = TASKS[reward]
    config = configuration(
        tmp_path,
        model=MODEL | dict(init_from=tuned(tmp_path, answer, seed, tuning)),
        optim=dict(lr=lr, adam_beta2=0.95),
        train=dict(train_iters=steps, micro_batch_size=32, global_batch_size=128, seed=seed),
        rl=dict(reward_funcs=reward, num_generations=8, max_completion_length=longest, generation_rows=128,
                packing=True, log_entropy=False),
        checkpoint=dict(save_at_end=False),
    )  # fmt: skip
    train_grpo(config)
    rewards = [step["rewards_mean"] for step in metrics(tmp_path / "run")]
    enough = 0.5 if reward == "length" else (1 - rewards[0]) / 2
    assert np.mean(rewards[-3:]) - rewards[0] > enough
