"""PPO with a critic: verl's advantages and value loss, in every layout, through checkpoints, and that it learns."""

import json
from pathlib import Path

import pytest
import torch
from default_cases import in_full
from rollout_files import configuration as rollout_configuration
from small_policy import configuration, metrics
from test_grpo_layouts import assert_same, outcome, outcomes

from megalith.comm.collectives import Axis
from megalith.parity.check import LAYOUTS
from megalith.rl import train_grpo
from megalith.rl.advantages.gae import ValueLoss, gae, with_gae
from megalith.rl.objectives.policy_loss import RolloutBatch


def verl_gae(rewards, values, mask, gamma, lam):
    """compute_gae_advantage_return of verl 0.9.1, with masked_whiten."""
    following = last = 0
    reversed_advantages = []
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        new = delta + gamma * lam * last
        following = values[:, t] * mask[:, t] + (1 - mask[:, t]) * following
        last = new * mask[:, t] + (1 - mask[:, t]) * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    returns = advantages + values
    mean = (advantages * mask).sum() / mask.sum()
    variance = ((advantages - mean) ** 2 * mask).sum() / mask.sum() * (mask.sum() / (mask.sum() - 1))
    return (advantages - mean) * torch.rsqrt(variance + 1e-8), returns


def verl_value_loss(predicted, returns, values, mask, cliprange):
    """compute_value_loss of verl 0.9.1 with token-mean."""
    clipped = torch.max(torch.min(predicted, values + cliprange), values - cliprange)
    losses = torch.max((predicted - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * (losses * mask).sum() / mask.sum()


LENGTHS = [(2, 5), (1, 1), (3, 7), (2, 4)]  # of prompts and completions
ROWS = [[0, 1], [2], [3]]


def batch_of(rows: list[list[int]], rewards: torch.Tensor, values: torch.Tensor, hole: bool):
    """Sequences packed into rows, their values at the tokens before each, and their masks from the left."""
    shape = (len(rows), 16)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    rewards_of_tokens, scores = torch.zeros(shape), torch.full(shape, 9.0)
    number, cells = 0, {}
    for row, sequences in enumerate(rows):
        start = 0
        for sequence in sequences:
            prompt, answer = LENGTHS[sequence]
            first, end = start + prompt - 1, start + prompt + answer - 1
            ids[row, start:end] = number
            mask[row, first:end] = 1.0
            if hole and answer > 4:
                mask[row, first + 2] = 0.0
            rewards_of_tokens[row, start:end] = rewards[sequence]
            scores[row, first:end] = values[sequence, :answer]
            cells[sequence] = (row, first, end)
            start, number = end, number + 1
    tokens = torch.zeros(number).index_add_(0, ids.flatten(), mask.flatten())
    batch = RolloutBatch(ids, ids, mask, ids, None, torch.arange(len(rows)), rewards_of_tokens, ids, tokens)
    return batch, scores, cells


@pytest.mark.parametrize(("gamma", "lam", "hole"), [(1.0, 1.0, False), (0.99, 0.95, False), (0.9, 0.5, True)])
def test_advantages_and_returns_are_verls_packed_or_padded(gamma: float, lam: float, hole: bool):
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(4, generator=generator), torch.randn(4, 7, generator=generator)
    longest = max(answer for _, answer in LENGTHS)
    theirs_mask, theirs_rewards = torch.zeros(4, longest), torch.zeros(4, longest)
    for k, (_, answer) in enumerate(LENGTHS):
        theirs_mask[k, :answer] = 1.0
        if hole and answer > 4:
            theirs_mask[k, 2] = 0.0
        theirs_rewards[k, answer - 1] = rewards[k]
    advantages, returns = verl_gae(theirs_rewards, values, theirs_mask, gamma, lam)
    for rows in (ROWS, [[k] for k in range(4)]):
        batch, scores, cells = batch_of(rows, rewards, values, hole)
        (result,) = with_gae([batch], [scores], gamma, lam, Axis())
        for k, (row, first, end) in cells.items():
            counted = theirs_mask[k, : end - first] > 0
            for ours, theirs in ((result.advantages, advantages), (result.returns, returns)):
                assert torch.allclose(
                    ours[row, first:end][counted], theirs[k, : end - first][counted], atol=1e-5
                )
        assert (result.advantages[batch.loss_mask == 0] == 0).all()
        predicted = (scores + 0.7 * torch.randn(scores.shape, generator=generator)).requires_grad_()
        loss = ValueLoss(0.5)(predicted, None, result) / batch.loss_mask.sum()
        expected = verl_value_loss(predicted, result.returns, result.values, batch.loss_mask, 0.5)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        ours, theirs = (torch.autograd.grad(one, predicted, retain_graph=True)[0] for one in (loss, expected))
        assert torch.allclose(ours, theirs, atol=1e-6) and ours.abs().sum() > 0


def test_lambda_of_0_and_1():
    rewards, values = torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([[0.5, 1.0, 1.5]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert gae(rewards, values, mask, 1.0, 1.0)[0].tolist() == [[1.5, 1.0, 0.5]]
    assert gae(rewards, values, mask, 1.0, 0.0)[0].tolist() == [[0.5, 0.5, 0.5]]


PPO = dict(advantage_estimator="gae", lam=0.95, cliprange_value=0.2)


@pytest.mark.parametrize("names", [("tp2-sp",), in_full(("dp2-zero2", "pp2", "cp2"))], ids="+".join)
def test_every_layout_trains_policy_and_critic_as_one_process_does(
    pool, tmp_path: Path, names: tuple[str, ...]
):
    def config(parallel: dict | None = None):
        train = dict(train_iters=3)
        return rollout_configuration(
            tmp_path, parallel, train=train, lr=1e-3, packing=True, mini_batches=2, **PPO
        )

    one = outcome(config())
    results = pool.run(outcomes, [config(LAYOUTS[name].parallel) for name in names], size=2)[0]
    for name, other in zip(names, results):
        assert_same(other, one, name)
    assert len({figures["value_loss"] for figures in one["figures"]}) == 3


def test_a_resumed_run_continues_with_its_critic(tmp_path: Path):
    def run(folder: str, steps: int, **sections):
        train = dict(
            train_iters=4, exit_interval=steps, deterministic=True, output_dir=str(tmp_path / folder)
        )
        config = configuration(tmp_path, rl=PPO | dict(critic_lr=3e-2), train=train, **sections)
        train_grpo(config)
        return metrics(tmp_path / folder)

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4, checkpoint=dict(load=str(tmp_path / "parts")))
    torch.use_deterministic_algorithms(False)
    for key in ("loss", "value_loss", "values_mean", "critic_grad_norm"):
        assert [one[key] for one in parts] == [one[key] for one in whole], key
    manifest = json.loads(
        (tmp_path / "whole" / "checkpoints" / "step_00000004" / "manifest.json").read_text()
    )
    assert "score.weight" in manifest["tensors"]["critic"] and "critic_optimizer" in manifest["tensors"]


@pytest.mark.full
def test_the_critic_learns_with_one_completion_per_prompt(tmp_path: Path):
    rl = PPO | dict(critic_lr=1e-2, num_generations=1, max_completion_length=6)
    train_grpo(
        configuration(tmp_path, rl=rl, train=dict(train_iters=8, micro_batch_size=8, global_batch_size=16))
    )
    errors = [one["value_error"] for one in metrics(tmp_path / "run")]
    assert sum(errors[-3:]) < 0.6 * sum(errors[:3])
