"""The KL in the reward, the clipped rewards and the whitened advantages of RLOO, against TRL 1.16's formulas."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.rules.rollout_rules import check_rollouts
from megalith.errors import ConfigError
from megalith.rl.advantages.advantages import total_rewards
from megalith.rl.advantages.reward_kl import BatchRewards, with_reward_kl
from megalith.rl.objectives.policy_loss import RolloutBatch

GROUPS, EACH, TOKENS = 2, 3, 4


def rl_of(**settings) -> RunConfig:
    tree = dict(
        rollouts="x", num_generations=EACH, advantage_estimator="rloo", beta=0.3, use_kl_in_reward=True
    )
    return RunConfig.from_tree({"rl": tree | settings, "train": {"global_batch_size": 6}})


def batches_of(generator: torch.Generator) -> tuple[list[RolloutBatch], list[list[int]]]:
    """Two micro-batches of packed rows, whose sequences are in another order than the completions."""
    numbers, made = [[4, 0, 2], [1, 5, 3]], []
    for owners in numbers:
        shape = (1, TOKENS * len(owners))
        ids = torch.zeros(shape, dtype=torch.int64)
        mask = (torch.rand(shape, generator=generator) > 0.3).float()
        mask[0, ::TOKENS] = 1
        sequences = torch.arange(len(owners)).repeat_interleave(TOKENS)[None]
        counts = torch.stack([mask[sequences == n].sum() for n in range(len(owners))])
        old, reference = (torch.randn(shape, generator=generator) - 3 for _ in range(2))
        made.append(RolloutBatch(ids, ids, mask, ids, None, ids[:, 0], torch.zeros(shape), sequences, counts,
                                 None, old, reference))  # fmt: skip
    return made, numbers


def test_advantages_are_those_of_trl():
    """RLOOTrainer._generate_and_score_completions, from the rewards on."""
    generator = torch.Generator().manual_seed(5)
    config = rl_of(whiten_advantages=True, reward_clip_range=[0.2, 0.9])
    rewards = np.array([[[0.0], [1.0], [0.5]], [[2.0], [0.3], [np.nan]]])
    lengths = np.full((GROUPS, EACH), TOKENS)
    total = total_rewards(config.rl, rewards, lengths)
    batches, numbers = batches_of(generator)
    run = SimpleNamespace(config=config, device=torch.device("cpu"), mesh=SimpleNamespace(dp=Axis()))
    results, mean_kl = with_reward_kl(run, batches, numbers, BatchRewards(total, lengths))

    kl = torch.zeros(GROUPS * EACH, dtype=torch.float64)
    for batch, owners in zip(batches, numbers):
        per_token = (batch.old_logprobs - batch.reference_logprobs) * batch.loss_mask
        for place, owner in enumerate(owners):
            kl[owner] = per_token[batch.sequence_ids == place].sum()
    theirs = torch.tensor(rewards[..., 0]).flatten().clamp(0.2, 0.9) - 0.3 * kl
    grouped = theirs.view(GROUPS, EACH)
    count = (~grouped.isnan()).sum(1, keepdim=True)
    baselines = (grouped.nansum(1, keepdim=True) - grouped) / (count - 1)
    advantages = theirs - baselines.flatten()
    present = advantages[~advantages.isnan()]
    expected = ((advantages - present.mean()) / (present.std() + 1e-4)).nan_to_num(nan=0.0)

    for batch, owners in zip(results, numbers):
        values = expected[torch.tensor(owners)][batch.sequence_ids].float() * batch.loss_mask
        torch.testing.assert_close(batch.advantages, values, rtol=1e-5, atol=1e-6)
    tokens = sum(batch.loss_mask.sum().item() for batch in batches)
    assert mean_kl == pytest.approx(kl.sum().item() / tokens, rel=1e-5)


def test_settings_that_contradict_it_are_refused():
    with pytest.raises(ConfigError, match=r"gdpo with rl\.advantage_level trajectory does not use"):
        check_rollouts(rl_of(advantage_estimator="gdpo"))
    with pytest.raises(ConfigError, match=r"write a minimum and a maximum, such as \[-1, 1\]"):
        rl_of(reward_clip_range=[1.0])
    with pytest.raises(ConfigError, match=r"use_kl_in_reward is True, but it requires rl\.beta above 0"):
        check_rollouts(rl_of(beta=0.0))
