"""Preference losses against TRL 1.16.0: mean loss and gradients that its trainers' own code computes for four pairs."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalith.config import DpoConfig, RunConfig
from megalith.config.extensions import PREFERENCE_LOSSES
from megalith.config.rules.fine_tuning_rules import check_preference_losses
from megalith.errors import ConfigError
from megalith.rl.objectives.preference_loss import (
    SHARP,
    PreferenceBatch,
    PreferenceLoss,
    answer_pairs,
    chosen_counts,
    rank_values,
)
from megalith.rl.preference_losses.ranked_losses import match_ranks

LOGPS = torch.tensor([[-6.0, -11.0, -4.5, -20.0], [-7.5, -9.0, -8.0, -21.0]], dtype=torch.float64)
REFERENCE = torch.tensor([[-7.0, -10.5, -6.5, -14.0], [-6.0, -9.5, -6.0, -22.5]], dtype=torch.float64)
TOKENS = torch.tensor([[3, 5, 2, 9], [4, 4, 7, 8]])
SETTINGS = {
    "exo_pair": {"label_smoothing": 0.1},
    "robust": {"label_smoothing": 0.1},
    "aot": {"label_smoothing": 0.1},
    "aot_unpaired": {"label_smoothing": 0.1},
    "cpo": {"cpo_alpha": 0.5},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.7},
}
# fmt: off
TRL = {  # mean loss, and its gradients by the log-probabilities of the chosen and the rejected answers
    "sigmoid": [0.96367881, [-0.02406159, -0.04308318, -0.01736064, -0.06784879],
        [0.02406159, 0.04308318, 0.01736064, 0.06784879]],
    "hinge": [1.2, [-0.075, -0.075, -0.0, -0.075], [0.075, 0.075, 0.0, 0.075]],
    "ipo": [2.74913274, [-0.15972222, -0.18916666, -0.09523809, -0.14004629],
        [0.11979166, 0.23645833, 0.02721088, 0.15755208]],
    "exo_pair": [0.67988904, [-0.02365072, -0.04578504, -0.01330505, -0.02877063],
        [0.02365072, 0.04578504, 0.01330505, 0.02877063]],
    "nca_pair": [1.59278455, [-0.01037521, -0.02296085, -0.00236366, -0.05904175],
        [0.01460102, 0.02015361, 0.01328788, 0.02289897]],
    "robust": [0.98242881, [-0.03343659, -0.05245818, -0.02673564, -0.07722379],
        [0.03343659, 0.05245818, 0.02673564, 0.07722379]],
    "bco_pair": [1.59018018, [-0.03191681, -0.04030723, -0.02657577, -0.06436117],
        [0.02920205, 0.04030723, 0.02657577, 0.04579794]],
    "sppo_hard": [19.72222222, [-0.33333333, -1.08333333, 0.16666666, -3.83333333],
        [0.08333333, 1.08333333, -0.16666666, 1.58333333]],
    "apo_zero": [1.01681337, [-0.01833437, -0.01864492, -0.01715881, -0.00912970],
        [0.01783192, 0.01864492, 0.01715881, 0.01783192]],
    "apo_down": [0.96397740, [0.00199224, 0.00031055, 0.00381673, 0.00266035],
        [0.01634212, 0.01833437, 0.01334208, 0.00646934]],
    "discopop": [0.99483693, [-0.03542744, -0.04139374, -0.02258956, -0.06784879],
        [0.03542744, 0.04139374, 0.02258956, 0.06784879]],
    "sigmoid_norm": [0.66705709, [-0.01117685, -0.00775302, -0.01517810, -0.00469761],
        [0.00838263, 0.00969128, 0.00433660, 0.00528482]],
    "cpo": [1.68839291, [-0.05551784, -0.07474001, -0.04575767, -0.05823260],
        [0.02920205, 0.04842422, 0.01944188, 0.03191681]],
    "simpo": [1.48082858, [-0.12018586, -0.06456563, -0.23713703, -0.02631308],
        [0.09013939, 0.08070703, 0.06775343, 0.02960222]],
    "orpo": [2.44932620, [-0.06814193, -0.06082980, -0.08612258, -0.05628777],
        [0.01188035, 0.01018587, 0.01256848, 0.00395389]],
    "aot": [0.84268611, [-0.01907578, -0.03558319, -0.05381809, -0.01907578],
        [0.01907578, 0.03558319, 0.05381809, 0.01907578]],
    "aot_unpaired": [0.79988795, [-0.02719276, -0.02441681, -0.02719276, -0.05013936],
        [0.02441681, 0.02719276, 0.05013936, 0.02719276]],
    "sft": [2.18421052, [-0.05263157, -0.05263157, -0.05263157, -0.05263157], [0.0, 0.0, 0.0, 0.0]],
}
# fmt: on


def batch_of(pairs: slice) -> tuple[PreferenceBatch, Tensor]:
    """Pairs as rows of tokens whose log-probabilities sum to LOGPS and REFERENCE; and the log-probabilities."""
    tokens = TOKENS[:, pairs].T.flatten()  # chosen and rejected in turns
    mask = (torch.arange(10) < tokens[:, None]).float()
    share = mask / tokens[:, None].double()
    logps, reference = (x[:, pairs].T.reshape(-1, 1) * share for x in (LOGPS, REFERENCE))
    ids = torch.zeros(mask.shape, dtype=torch.long)
    numbers = torch.arange(len(tokens))[:, None].expand(mask.shape)
    return PreferenceBatch(
        ids, ids, mask, ids, None, numbers[:, 0], numbers, tokens.float(), reference
    ), logps


def test_every_built_in_loss_has_its_values():
    assert TRL.keys() == PREFERENCE_LOSSES.keys()


@pytest.mark.parametrize("name", TRL)
def test_loss_and_gradient_are_trls(name):
    dpo = DpoConfig(loss_type=name, **{"beta": 0.3} | SETTINGS.get(name, {}))
    value, *gradients = TRL[name]
    total, found = 0.0, []
    whole, every = batch_of(slice(4))
    partners = match_ranks(*rank_values(answer_pairs(whole, every)))
    pairs, tokens = chosen_counts(whole)
    for part in (slice(0, 1), slice(1, 4)):  # two micro-batches of a step
        batch, logprobs = batch_of(part)
        batch = replace(batch, pairs_per_token=pairs / tokens, partners=partners[:, part])
        if not dpo.needs_reference:
            batch.reference_logprobs = None
        loss = PreferenceLoss(dpo)(logprobs.requires_grad_(), None, batch)
        total += loss.item()
        (gradient,) = torch.autograd.grad(loss, logprobs)
        assert (gradient[batch.loss_mask == 0] == 0).all()
        found.append(gradient[:, 0].unflatten(0, (-1, 2)).T)
    assert total / 4 == pytest.approx(value, rel=1e-7)
    assert torch.allclose(torch.cat(found, 1) / 4, torch.tensor(gradients, dtype=torch.float64), atol=2e-8)


def random_batch() -> tuple[PreferenceBatch, Tensor, Tensor]:
    """Three pairs in two packed rows, of which one row has two pairs; and log-probabilities of policy and reference."""
    generator = torch.Generator().manual_seed(5)
    lengths = [(5, 2), (3, 7), (4, 4)]  # chosen and rejected
    mask, ids = torch.zeros(4, 14), torch.zeros(4, 14, dtype=torch.long)
    for number, (row, begin) in enumerate(((0, 1), (0, 7), (2, 2))):
        for side in (0, 1):
            place = slice(begin, begin + lengths[number][side])
            ids[row + side, begin - 1 : place.stop] = 2 * number + side
            mask[row + side, place] = 1
    tokens = torch.tensor([one for pair in lengths for one in pair]).float()
    logps, reference = (-2 * torch.rand(4, 14, generator=generator, dtype=torch.float64) for _ in range(2))
    fields = torch.zeros_like(ids)
    return (
        PreferenceBatch(fields, fields, mask, fields, None, ids[:, 0], ids, tokens, reference),
        logps,
        reference,
    )


def loss_of_trl(dpo: DpoConfig, batch: PreferenceBatch, logps: Tensor, reference: Tensor) -> Tensor:
    """Transcribed from trl/trainer/dpo_trainer.py 1.16.0, _compute_loss, pair by pair."""
    total = torch.zeros((), dtype=torch.float64)
    for pair in range(3):
        sides = [(batch.sequence_ids == 2 * pair + side) & (batch.loss_mask > 0) for side in (0, 1)]
        shared, ratios = min(int(one.sum()) for one in sides), []
        for one in sides:
            sums = []
            for values in (logps[one], reference[one]):
                tail = 1.0 if dpo.ld_alpha is None else dpo.ld_alpha
                sums.append(values[:shared].sum() + tail * values[shared:].sum())
            ratios.append(sums[0] - sums[1])
        if dpo.f_divergence_type == "forward_kl":
            scores = [1 - torch.exp(-ratio) for ratio in ratios]
        elif dpo.f_divergence_type == "js_divergence":
            scores = [math.log(2) + torch.nn.functional.logsigmoid(ratio) for ratio in ratios]
        elif dpo.f_divergence_type == "alpha_divergence" and abs(dpo.f_alpha_divergence_coef - 1.0) >= 1e-6:
            coef = 1.0 / (dpo.f_alpha_divergence_coef - 1.0)
            scores = [
                (torch.exp((dpo.f_alpha_divergence_coef - 1.0) * ratio) - 1.0) * coef for ratio in ratios
            ]
        else:
            scores = ratios
        delta = scores[0] - scores[1]
        if dpo.loss_type == "sigmoid":
            total = total - torch.nn.functional.logsigmoid(dpo.beta * delta)
        elif dpo.loss_type == "hinge":
            total = total + torch.relu(1 - dpo.beta * delta)
        elif dpo.loss_type == "ipo":
            means = [score / one.sum() for score, one in zip(scores, sides)]
            total = total + (means[0] - means[1] - 1 / (2 * dpo.beta)) ** 2
        elif dpo.loss_type == "bco_pair":
            total = total - torch.nn.functional.logsigmoid(dpo.beta * ratios[0])
            total = total - torch.nn.functional.logsigmoid(-dpo.beta * ratios[1])
    return total


@pytest.mark.parametrize(
    "settings",
    [
        *({"f_divergence_type": kind, "loss_type": loss}
          for kind in ("forward_kl", "js_divergence", "alpha_divergence") for loss in ("sigmoid", "hinge", "ipo")),
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 2.0},
        {"ld_alpha": 0.3}, {"ld_alpha": 0.0, "loss_type": "ipo"}, {"ld_alpha": 0.5, "loss_type": "bco_pair"},
        {"ld_alpha": 0.4, "f_divergence_type": "js_divergence"},
    ],
    ids=str,
)  # fmt: skip
def test_divergences_and_weights_of_long_answers_are_trls(settings):
    dpo = DpoConfig(beta=0.3, **settings)
    batch, logps, reference = random_batch()
    ours, theirs = logps.clone().requires_grad_(), logps.clone().requires_grad_()
    loss, expected = PreferenceLoss(dpo)(ours, None, batch), loss_of_trl(dpo, batch, theirs, reference)
    plain = PreferenceLoss(DpoConfig(beta=0.3, loss_type=dpo.loss_type))(logps, None, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert dpo.f_alpha_divergence_coef == 1.0 or loss.item() != pytest.approx(plain.item(), rel=1e-4)
    gradients = [torch.autograd.grad(loss, ours)[0], torch.autograd.grad(expected, theirs)[0]]
    assert torch.allclose(*gradients, rtol=1e-9, atol=1e-12)


def test_pairs_weigh_what_the_policy_would_sample_as_in_trls():
    """Transcribed from trl/trainer/dpo_trainer.py 1.16.0: log_probs − log_sum_sq_probs, of a whole distribution."""
    batch, _, reference = random_batch()
    logits = torch.randn(4, 14, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = torch.arange(56).view(4, 14, 1) % 20
    logps, sharp = (x.log_softmax(-1).gather(2, labels)[..., 0] for x in (logits, logits / SHARP))
    batch = replace(batch, sharp_logprobs=sharp, reference_logprobs=reference)
    aligned = logps - torch.logsumexp(2 * logits.log_softmax(-1), -1)
    dpo, total = DpoConfig(beta=0.3, use_weighting=True), 0.0
    for pair in range(3):
        sides = [(batch.sequence_ids == 2 * pair + side) & (batch.loss_mask > 0) for side in (0, 1)]
        margin = (logps - reference)[sides[0]].sum() - (logps - reference)[sides[1]].sum()
        weight = math.prod(aligned[one].mean().exp().item() for one in sides)
        total -= torch.nn.functional.logsigmoid(0.3 * margin).item() * weight
    values = logps.clone().requires_grad_()
    loss = PreferenceLoss(dpo)(values, None, batch)
    assert loss.item() == pytest.approx(total, rel=1e-9)
    (gradient,) = torch.autograd.grad(loss, values)
    plain = logps.clone().requires_grad_()
    (other,) = torch.autograd.grad(PreferenceLoss(DpoConfig(beta=0.3))(plain, None, batch), plain)
    ratio = (gradient / other)[batch.loss_mask > 0]
    assert (ratio > 0).all() and ratio.unique().numel() > 1


def test_divergences_and_weights_are_refused_with_losses_that_do_not_read_them():
    for settings, message in (
        (
            {"f_divergence_type": "forward_kl", "loss_type": ["sigmoid", "apo_zero"]},
            "apo_zero does not use a divergence",
        ),
        (
            {"ld_alpha": 0.5, "loss_type": "simpo"},
            "dpo.loss_type simpo does not use a log-ratio per answer",
        ),
        ({"ld_alpha": 0.5, "loss_type": "aot"}, "dpo.loss_type aot does not use"),
        ({"use_weighting": True, "loss_type": "aot"}, "dpo.loss_type aot compares a pair with other pairs"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_preference_losses(DpoConfig(**settings))
    check_preference_losses(DpoConfig(f_divergence_type="forward_kl", loss_type=["sigmoid", "a.py:f", "sft"]))


def test_smoothed_labels_weigh_both_orders_of_a_pair():
    """Conservative DPO (Mitchell 2023): −(1 − ε) log σ(β·h) − ε log σ(−β·h)."""
    batch, logprobs = batch_of(slice(4))
    pairs, tokens = chosen_counts(batch)
    batch = replace(batch, pairs_per_token=pairs / tokens)
    loss = PreferenceLoss(DpoConfig(beta=0.3, label_smoothing=0.2))(logprobs, None, batch)
    margin = 0.3 * (LOGPS[0] - LOGPS[1] - REFERENCE[0] + REFERENCE[1])
    expected = 0.8 * torch.log1p((-margin).exp()) + 0.2 * torch.log1p(margin.exp())
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-7)


def test_several_losses_are_added_with_their_weights():
    """MPO of TRL's documentation: sigmoid, bco_pair and sft."""
    config = DpoConfig(loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0], beta=0.3)
    batch, logprobs = batch_of(slice(4))
    expected = 0.8 * TRL["sigmoid"][0] + 0.2 * TRL["bco_pair"][0] + TRL["sft"][0]
    assert PreferenceLoss(config)(logprobs, None, batch).item() / 4 == pytest.approx(expected, rel=1e-7)


def test_a_pair_of_padding_adds_nothing_to_any_loss():
    batch, logprobs = batch_of(slice(4))
    empty = torch.where(batch.sequence_ids < 6, batch.loss_mask, 0.0)
    tokens = torch.where(torch.arange(8) < 6, batch.sequence_tokens, 0.0)
    batch = replace(batch, loss_mask=empty, sequence_tokens=tokens)
    three, of_three = batch_of(slice(3))
    for name in TRL:
        dpo = DpoConfig(loss_type=name, **{"beta": 0.3} | SETTINGS.get(name, {}))
        values = logprobs.clone().requires_grad_()
        loss = PreferenceLoss(dpo)(values, None, batch)
        (gradient,) = torch.autograd.grad(loss, values)
        assert loss.item() == pytest.approx(PreferenceLoss(dpo)(of_three, None, three).item(), rel=1e-6), name
        assert gradient.isfinite().all() and (gradient[6:] == 0).all(), name


def test_an_answer_of_probability_1_has_a_finite_odds_ratio():
    batch, logprobs = batch_of(slice(4))
    batch.reference_logprobs = None
    values = torch.zeros_like(logprobs).requires_grad_()
    loss = PreferenceLoss(DpoConfig(loss_type="orpo"))(values, None, batch)
    assert math.isfinite(loss.item()) and torch.autograd.grad(loss, values)[0].isfinite().all()


@pytest.mark.parametrize(
    ("loss_type", "needs", "means"),
    [("sigmoid", True, False), (["simpo", "sft"], False, True), ("cpo", False, False), (["orpo", "ipo"], True, False)],
)  # fmt: skip
def test_losses_without_a_reference_load_none(loss_type, needs, means):
    config = RunConfig.from_tree({"dpo": {"enabled": True, "loss_type": loss_type}})
    assert config.dpo.needs_reference == config.has_reference_model == needs
    assert config.dpo.uses_mean_rewards == means
    batch, logprobs = batch_of(slice(4))
    loss = PreferenceLoss(config.dpo)
    loss(logprobs, None, replace(batch, reference_logprobs=batch.reference_logprobs if needs else None))
    scores = LOGPS - REFERENCE if needs else LOGPS / TOKENS if means else LOGPS
    metrics = loss.means(loss.take_sums())
    assert metrics["rewards/chosen"] == pytest.approx(config.dpo.beta * scores[0].mean().item())
    assert metrics["logps/rejected"] == pytest.approx(LOGPS[1].mean().item())


REFUSED = [
    ({"loss_type": "simp"}, "'simp': write a built-in name or path.py:function"),
    ({"loss_type": []}, "name at least one loss"),
    ({"loss_type": ["sigmoid", "sigmoid"]}, "has sigmoid 2 times"),
    ({"loss_type": "exo_pair"}, "exo_pair needs dpo.label_smoothing above 0"),
    ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "dpo.loss_weights has 1 weights for 2 losses"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_losses_that_cannot_be_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_preference_losses(RunConfig.from_tree({"dpo": {"enabled": True} | settings}).dpo)
