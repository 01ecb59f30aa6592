"""SAPO, VESPO, GMPO, GPG, token-sum and the off-policy mask, written out from TRL's and verl's sources, against ours.

`RECORDED` has the losses that the systems' own code computes for the same batch.
"""

import math

import pytest
import torch
from test_their_objectives import PLAIN, Padded, by_sequences, by_tokens, ours
from torch import Tensor

from megalith.config import RunConfig
from megalith.config.rules.notes import idle_notes
from megalith.config.rules.rollout_rules import check_rollouts
from megalith.errors import ConfigError
from megalith.rl.objectives.policy_loss import PolicyLoss, RolloutBatch


def sapo(batch: Padded, positive: float = 1.0, negative: float = 1.05) -> Tensor:
    ratio = (batch.logprobs - batch.old).exp()
    tau = torch.tensor([positive if a > 0 else negative for a in batch.advantages.flatten()])[:, None]
    losses = -4 / tau / (1 + (-tau * (ratio - 1)).exp()) * batch.advantages
    return by_sequences(losses, batch.mask, len(batch.mask))


def gpg(batch: Padded) -> Tensor:
    return by_tokens(-batch.advantages * batch.logprobs, batch.mask)


def token_sum(batch: Padded) -> Tensor:
    ratio = (batch.logprobs - batch.old).exp()
    losses = torch.maximum(-batch.advantages * ratio, -batch.advantages * ratio.clamp(0.8, 1.2))
    return (losses * batch.mask).sum() - 0.1 * by_tokens(batch.entropy, batch.mask)


def gmpo(batch: Padded, low: float = 0.2, high: float = 0.2, weighted: bool = False) -> Tensor:
    """verl's geo_mean: each sequence's ratio is a product of clipped ones, to the power of 1 / length."""
    losses = []
    for number, advantage in enumerate(batch.advantages.flatten().tolist()):
        inside = batch.mask[number] > 0
        if not inside.any():
            losses.append(torch.zeros(()))
            continue
        log_ratios = (batch.logprobs - batch.old)[number][inside]
        bounded = log_ratios.clamp(max=high) if advantage > 0 else log_ratios.clamp(min=-low)
        weights = (batch.old - batch.rollout)[number][inside].exp().clamp(max=1.5)
        weight = weights.log().mean().exp() if weighted else 1.0
        losses.append(-advantage * bounded.mean().exp() * weight)
    return torch.stack(losses).mean()


def vespo(batch: Padded, weighted: bool = False) -> Tensor:
    """TRL's get_gamma_weights with k 2 and λ 3 for advantages of at least 0, otherwise k 3 and λ 2."""
    log_w = ((batch.logprobs - batch.old).detach() * batch.mask).sum(-1, keepdim=True)
    if weighted:
        log_w = log_w + ((batch.old - batch.rollout).exp().clamp(max=1.5).log() * batch.mask).sum(
            -1, keepdim=True
        )
    w = log_w.clamp(math.log(1e-8), 20).exp()
    phi = torch.where(batch.advantages >= 0, w**2 * (3 - 3 * w).exp(), w**3 * (2 - 2 * w).exp())
    return by_tokens(-phi * batch.advantages * batch.logprobs, batch.mask)


def off_policy(batch: Padded, threshold: float) -> Tensor:
    """PPO's clip without sequences of a negative advantage whose mean of log π_rollout − log π is above a threshold."""
    ratio = (batch.logprobs - batch.old).exp()
    losses = -torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages)
    gap = ((batch.rollout - batch.logprobs).detach() * batch.mask).sum(-1, keepdim=True)
    gap = gap / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    keeps = (batch.advantages >= 0) | (gap <= threshold)
    assert 0 < (keeps & (batch.advantages < 0)).sum() < (batch.advantages < 0).sum()
    return by_tokens(losses * keeps, batch.mask)


def rloo(batch: Padded) -> Tensor:
    """TRL's RLOOTrainer._compute_loss: PPO's clip of the product of a sequence's ratios. For a sequence without a token
    in the loss, TRL adds −A, which has no gradient and is left out here."""
    log_ratio = (batch.logprobs * batch.mask).sum(1) - (batch.old * batch.mask).sum(1)
    ratio, advantages = log_ratio.exp(), batch.advantages[:, 0]
    return (
        -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).where(batch.mask.any(1), 0).mean()
    )


MISMATCH = {"rollout_is": "token", "rollout_is_threshold": 1.5}
CASES = {
    "TRL sapo": (sapo, {}, {"loss_type": "sapo"}),
    "verl sapo": (sapo, {"positive": 0.7, "negative": 2.0}, {"loss_mode": "sapo", "tau_pos": 0.7, "tau_neg": 2.0}),
    "verl gpg": (gpg, {}, {"policy_loss": "gpg", "loss_agg_mode": "token-mean"}),
    "verl geo_mean": (gmpo, {"low": 0.1, "high": 0.3},
                      {"loss_mode": "geo_mean", "clip_ratio_low": 0.1, "clip_ratio_high": 0.3}),
    "verl geo_mean rollout_is": (gmpo, {"weighted": True}, {"policy_loss": {"loss_mode": "geo_mean"}} | MISMATCH),
    "TRL vespo": (vespo, {}, {"loss_type": "vespo"}),
    "TRL vespo corrected": (vespo, {"weighted": True}, {"loss_type": "vespo"} | MISMATCH),
    "TRL off_policy_mask_threshold": (off_policy, {"threshold": 0.1}, {"off_policy_mask_threshold": 0.1}),
    "TRL rloo": (rloo, {}, {"loss_type": "rloo"}),
    "verl token-sum": (token_sum, {}, {"loss_agg_mode": "token-sum", "entropy_coef": 0.1}),
}  # fmt: skip

RECORDED = {  # loss, and sum of the gradient's magnitudes, of the code of TRL 1.16.0 and of verl b178a3c
    "TRL sapo": (0.47282650697, 0.780601877051),
    "TRL vespo": (1.948095313185, 0.782279842732),
    "TRL vespo corrected": (2.143515235019, 0.71713989656),
    "TRL off_policy_mask_threshold": (-0.28988210033, 0.697385564168),
    "TRL rloo": (0.593575466644 + 0.6 / 4, 3.404984942490),
    "verl sapo": (-0.289395631941, 0.706985249124),
    "verl gpg": (-0.086360452474, 1.166666666667),
    "verl geo_mean": (0.354031574146, 0.684240220516),
    "verl geo_mean rollout_is": (0.36876470924, 0.797579773274),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_the_systems(name):
    reference, arguments, settings = CASES[name]
    batch = Padded()
    expected = reference(batch, **arguments)
    loss = ours(batch, ({} if "rollout_is" in settings else PLAIN) | settings)
    if name == "verl token-sum":  # `ours` divides by the denominator, which is 0 and counts as 1
        loss = ours(batch, PLAIN | settings, denominator=1.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    if name in RECORDED:
        magnitude = torch.autograd.grad(expected, batch.logprobs, retain_graph=True)[0].abs().sum().item()
        assert (expected.item(), magnitude) == pytest.approx(RECORDED[name], rel=1e-6)
    gradients = [
        torch.autograd.grad(x, (batch.logprobs, batch.entropy), allow_unused=True, materialize_grads=True)
        for x in (loss, expected)
    ]
    for gradient, right in zip(*gradients):
        assert torch.allclose(gradient, right, rtol=1e-5, atol=1e-8)
    assert gradients[1][0].count_nonzero() > 2


def test_packed_sequences_are_padded_ones_and_padding_reaches_no_sequence():
    """The sums over sequences of gmpo and vespo and the off-policy mask, with NaN outside the loss."""
    for settings in ({"loss_type": "gmpo"}, {"loss_type": "vespo"}, {"off_policy_mask_threshold": 0.1}):
        batch, plain = Padded(), Padded()
        for x in (batch.old, batch.rollout):
            x[batch.mask == 0] = torch.nan
        losses = [ours(each, PLAIN | settings) for each in (batch, plain)]
        gradients = [torch.autograd.grad(x, each.logprobs)[0] for x, each in zip(losses, (batch, plain))]
        assert torch.equal(*losses) and torch.equal(*gradients) and gradients[0].isfinite().all()


def test_a_loss_over_sequences_gets_full_micro_batches():
    ids, ones = torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)
    rows = RolloutBatch(ids, ids, ones, ids, None, ids[:, 0], ones, ids, torch.tensor([2.0]))
    for settings in ({"loss_type": "gmpo"}, {"loss_type": "vespo"}, {"off_policy_mask_threshold": 0.1}):
        rl = RunConfig.from_tree({"rl": {"rollouts": "x"} | settings}).rl
        assert PolicyLoss(rl).tokens(rows) is None
    assert PolicyLoss(RunConfig.from_tree({"rl": {"loss_type": "sapo"}}).rl).tokens(rows) is not None


REFUSED = [
    ({"loss_type": "sapo", "clip_ratio_c": 3.0}, "is 3.0, but rl.loss_type sapo does not use PPO's clip"),
    ({"loss_type": "gmpo", "importance_sampling_level": "sequence"}, "gmpo clips each token's ratio before its mean"),
    ({"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}, "mode to token_truncate or token_mask"),
    ({"loss_mode": "sapo", "loss_agg_mode": "token-mean"}, "and the loss is sapo; verl up to 0.8 ignores"),
    ({"loss_mode": "gpg", "loss_agg_mode": "seq-mean-token-mean"}, "rl.loss_agg_mode sets rl.loss_type to 'grpo'"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_settings_that_contradict_the_loss_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_rollouts(RunConfig.from_tree({"rl": {"rollouts": "x", "num_generations": 2} | settings,
                                            "train": {"global_batch_size": 8}}))  # fmt: skip


def test_bounds_of_a_clip_that_the_loss_does_not_have_are_noted():
    for loss_type, count in {"sapo": 2, "vespo": 2, "gpg": 2, "gmpo": 0, "dapo": 0}.items():
        tree = {"rl": {"rollouts": "x", "loss_type": loss_type, "epsilon": 0.1, "epsilon_high": 0.3}}
        notes = idle_notes(RunConfig.from_tree(tree))
        assert len(notes) == count and all(f"rl.loss_type {loss_type} does not read it" in x for x in notes)
