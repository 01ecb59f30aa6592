"""Online DPO: TRL's loss and gradients, with the completions of a pair in different micro-batches, and runs of it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_policy import configuration, metrics
from torch import Tensor
from torch.nn import functional as F

from megalith.comm.collectives import Axis
from megalith.config import RlConfig
from megalith.config.rules.rollout_rules import check_rollouts
from megalith.errors import ConfigError
from megalith.rl.grpo import train_grpo
from megalith.rl.objectives.online_pairs import preferred, with_pairs
from megalith.rl.objectives.policy_loss import PolicyLoss, RolloutBatch

LENGTHS = torch.tensor([5, 3, 2, 6])
REWARDS = np.array([[0.2, 0.9], [0.5, 0.5]])
ORDER = ([0, 2, 3], [1])  # completions of the two micro-batches


def trl(logprobs: Tensor, reference: Tensor, mask: Tensor, kind: str, beta: float) -> Tensor:
    """OnlineDPOTrainer.training_step of TRL 1.16.0, whose first halves are the first completions of the prompts."""
    at = [0, 2, 1, 3]
    logprobs, reference, mask = logprobs[at], reference[at], mask[at]
    rewards = torch.from_numpy(REWARDS).T.flatten()
    first_half, second_half = rewards.split(2)
    prefers_first = first_half >= second_half
    numbers = torch.arange(2)
    chosen = numbers + (~prefers_first * 2)
    rejected = numbers + (prefers_first * 2)
    both = torch.cat((chosen, rejected))
    chosen_sum, rejected_sum = (logprobs[both] * mask[both]).sum(1).split(2)
    chosen_reference, rejected_reference = (reference[both] * mask[both]).sum(1).split(2)
    logits = (chosen_sum - rejected_sum) - (chosen_reference - rejected_reference)
    losses = -F.logsigmoid(beta * logits) if kind == "online_dpo" else (logits - 1 / (2 * beta)) ** 2
    return losses.mean()


@pytest.mark.parametrize("kind", ["online_dpo", "online_ipo"])
def test_loss_and_gradient_are_trls(kind):
    generator = torch.Generator().manual_seed(5)
    logprobs = (-2 - torch.rand(4, 6, generator=generator, dtype=torch.float64)).requires_grad_()
    reference = logprobs.detach() + 0.3 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = (torch.arange(6) < LENGTHS[:, None]).double()
    rl = RlConfig(rollouts="x", loss_type=kind, num_generations=2, beta=0.7)
    batches = []
    for rows in ORDER:
        ids = torch.zeros(len(rows), 6, dtype=torch.long)
        numbers = torch.arange(len(rows))[:, None].expand(ids.shape)
        batches.append(
            RolloutBatch(ids, ids, mask[rows], ids, None, ids[:, 0], torch.zeros(ids.shape), numbers,
                         LENGTHS[rows].double(), reference_logprobs=reference[rows])
        )  # fmt: skip
    run = SimpleNamespace(device=torch.device("cpu"), mesh=SimpleNamespace(dp=Axis()))
    before = [logprobs.detach()[rows] for rows in ORDER]
    batches = with_pairs(run, batches, ORDER, before, REWARDS)
    loss = PolicyLoss(rl)
    total = sum(loss(logprobs[rows], None, batch) for rows, batch in zip(ORDER, batches))
    mine = total / sum(loss.denominator(batch) for batch in batches)
    expected = trl(logprobs, reference, mask, kind, 0.7)
    assert mine.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = [torch.autograd.grad(x, logprobs)[0] for x in (mine, expected)]
    assert torch.allclose(*gradients, rtol=1e-6, atol=1e-9) and gradients[1].count_nonzero() == LENGTHS.sum()


def test_the_larger_reward_is_preferred_and_the_first_of_equal_ones():
    rewards = np.array([[1.0, 2.0], [3.0, 3.0], [np.nan, -5.0]])
    assert preferred(rewards).tolist() == [[-1, 1], [1, -1], [-1, 1]]


def test_a_run_learns_what_its_reward_prefers_in_any_micro_batches(tmp_path):
    """The reward is larger for shorter completions."""
    rl = dict(loss_type="online_dpo", num_generations=2, beta=0.5)
    results = []
    for size in (1, 4):
        train = dict(
            train_iters=6, global_batch_size=16, micro_batch_size=size, output_dir=str(tmp_path / str(size))
        )
        train_grpo(configuration(tmp_path, rl=rl, train=train))
        results.append(metrics(tmp_path / str(size)))
    losses = [[step["loss"] for step in steps] for steps in results]
    assert losses[0][0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[0][:3] == pytest.approx(losses[1][:3], rel=1e-5)
    lengths = [step["completion_length"] for step in results[0]]
    assert np.mean(lengths[-2:]) < np.mean(lengths[:2])


REFUSED = [
    ({"num_generations": 4}, "rl.num_generations is 4"),
    ({"beta": 0.0}, "rl.beta, the β of its formula, is 0"),
    ({"mask_truncated_completions": True}, "to which rl.mask_truncated_completions does not apply; leave"),
    ({"tools": "math_tools.py:add"}, "to which rl.tools does not apply; leave rl.tools out"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_runs_without_pairs_are_refused(tmp_path, settings, sentence):
    rl = dict(loss_type="online_dpo", num_generations=2, beta=0.5) | settings
    with pytest.raises(ConfigError, match=sentence):
        check_rollouts(configuration(tmp_path, rl=rl))
