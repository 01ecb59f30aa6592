"""It learns: from a short fine-tuning the rewards `length` and `sort` rise by half of what they lack of 1."""

import numpy as np
import pytest
from small_policy import MODEL, configuration, metrics, tuned, write_prompts

from megalith.rl.grpo import train_grpo

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))]


def some_numbers(asked, rng) -> str:
    """5 to 11 of them: none earns half of the reward `length`."""
    return " ".join(map(str, rng.integers(0, 10, rng.integers(5, 12))))


def shuffled(asked, rng) -> str:
    """What was asked, in any order: a third of the places are right."""
    return " ".join(map(str, rng.permutation(asked)))


TASKS = {  # what fine-tuning teaches, of numbers below; its steps and GRPO's; learning rate; settings
    "length": (some_numbers, 10, 60, 30, dict(lr=1e-2), dict(num_generations=8, max_completion_length=12)),
    "sort": (shuffled, 5, 300, 80, dict(lr=5e-3, lr_decay_style="linear"),
             dict(num_generations=16, max_completion_length=8, entropy_coef=0.03)),
}  # fmt: skip
MODELS = {"length": {}, "sort": dict(hidden_size=64, ffn_hidden_size=128, init_method_std=0.15)}
"""With the usual 0.02 so narrow a model learns the form of an answer in these steps, and not to copy."""


@pytest.mark.parametrize("reward", ["length", pytest.param("sort", marks=pytest.mark.full)])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_reward_rises_by_half_of_its_range(tmp_path, reward, seed):
    answer, below, tuning, steps, optim, rl = TASKS[reward]
    model = MODELS[reward]
    write_prompts(tmp_path, below=below)
    config = configuration(
        tmp_path,
        model=MODEL | model | dict(init_from=tuned(tmp_path, answer, seed, tuning, below, **model)),
        optim=optim,
        train=dict(
            train_iters=steps, micro_batch_size=32, global_batch_size=16 * rl["num_generations"], seed=seed
        ),
        rl=dict(reward_funcs=reward, generation_rows=128, packing=True, log_entropy=False) | rl,
        checkpoint=dict(save_at_end=False),
    )
    train_grpo(config)
    rewards = [step["rewards_mean"] for step in metrics(tmp_path / "run")]
    assert np.mean(rewards[-3:]) >= rewards[0] + (1 - rewards[0]) / 2
