"""Tokens selected over a step: TRL's high-entropy tokens, and verl's KL-Cov and Clip-Cov."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from test_their_objectives import PLAIN, Padded, by_sequences, by_tokens, packed_batch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.rules.rollout_rules import check_rollouts
from megalith.errors import ConfigError
from megalith.rl.objectives import token_selection
from megalith.rl.objectives.policy_loss import entropy_weight
from megalith.rl.objectives.token_selection import select_tokens


def covariances(batch: Padded) -> Tensor:
    """(A − mean of A) (log π − mean of log π) over the tokens in the loss; −∞ elsewhere."""
    advantages, logprobs = batch.advantages.expand_as(batch.mask), batch.logprobs.detach()
    product = (advantages - by_tokens(advantages, batch.mask)) * (logprobs - by_tokens(logprobs, batch.mask))
    return torch.where(batch.mask > 0, product, -torch.inf)


def kl_cov(batch: Padded, fraction: float, coefficient: float = 0.1) -> Tensor:
    log_ratio, covariance = batch.logprobs - batch.old, covariances(batch)
    count = max(1, int(fraction * batch.mask.sum()))
    selected = covariance >= covariance.flatten().topk(count).values[-1]
    penalty = coefficient * log_ratio.abs() * selected
    return by_tokens(-log_ratio.exp() * batch.advantages + penalty, batch.mask)


def clip_cov(batch: Padded, low: float, high: float = 5.0) -> Tensor:
    """With a fraction of 1, which selects every candidate."""
    ratio, covariance = (batch.logprobs - batch.old).exp(), covariances(batch)
    plain, clipped = -ratio * batch.advantages, -ratio.clamp(0.8, 1.2) * batch.advantages
    selected = (covariance > low) & (covariance < high) & (clipped <= plain)
    return by_tokens(torch.maximum(plain, clipped) * ~selected, batch.mask)


def high_entropy(batch: Padded, fraction: float, coefficient: float = 0.0, loss_type: str = "dapo") -> Tensor:
    entropies = batch.entropy[batch.mask > 0]
    selected = (batch.entropy >= torch.quantile(entropies, 1 - fraction)).double() * batch.mask
    ratio = (batch.logprobs - batch.old).exp()
    losses = -torch.min(ratio * batch.advantages, ratio.clamp(0.8, 1.2) * batch.advantages) * selected
    of_losses = by_tokens(losses, batch.mask) if loss_type == "dapo" else by_sequences(losses, batch.mask, 4)
    return of_losses - coefficient * by_tokens(batch.entropy, selected)


CASES = {  # reference, its arguments, settings; loss and sum of gradient magnitudes of the system's own code
    "kl_cov": (kl_cov, dict(fraction=0.2), dict(policy_loss=dict(loss_mode="kl_cov", kl_cov_ratio=0.2)),
               (0.124367185013, 1.209905849053)),
    "clip_cov": (clip_cov, dict(low=0.05), dict(loss_mode="clip_cov", clip_cov_ratio=1.0, clip_cov_lb=0.05),
                 (0.323438844846, 0.523679348106)),
    "entropy": (high_entropy, dict(fraction=0.3, coefficient=0.2), dict(top_entropy_quantile=0.3, entropy_coef=0.2),
                (0.089516847212, 0.44811773952)),
    "entropy of sequences": (high_entropy, dict(fraction=0.5, loss_type="grpo"),
                             dict(top_entropy_quantile=0.5, loss_type="grpo"), (0.348726442685, 0.547966646223)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_the_systems(name):
    reference, arguments, settings, recorded = CASES[name]
    batch = Padded()
    expected = reference(batch, **arguments)
    loss, rows, packed = packed_batch(batch, PLAIN | settings)
    weights = entropy_weight(loss.rl, rows.sequence_tokens).expand(rows.labels.shape)
    values = packed(batch.logprobs.detach()), packed(batch.entropy.detach())
    (rows,) = select_tokens(loss.rl, [replace(rows, entropy_weights=weights)], *([x] for x in values), seed=1)
    value = loss(packed(batch.logprobs), packed(batch.entropy), rows) / loss.denominator(rows)
    gradients = [
        torch.autograd.grad(x, (batch.logprobs, batch.entropy), allow_unused=True, materialize_grads=True)
        for x in (value, expected)
    ]
    assert (value.item(), gradients[0][0].abs().sum().item()) == pytest.approx(recorded, rel=1e-6)
    assert value.item() == pytest.approx(expected.item(), rel=1e-6)
    for gradient, right in zip(*gradients):
        assert torch.allclose(gradient, right, rtol=1e-5, atol=1e-8)


def test_clip_cov_chooses_a_fraction_by_the_seed_and_micro_batches_do_not_matter():
    batch = Padded()
    settings = dict(loss_type="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=0.0, epsilon=0.9)
    loss, rows, packed = packed_batch(batch, PLAIN | settings)
    values = packed(batch.logprobs.detach()), packed(batch.entropy.detach())
    chosen = [
        select_tokens(loss.rl, [rows], *([x] for x in values), seed=seed)[0].selected for seed in range(8)
    ]
    assert all(int(each.sum()) == int(0.2 * batch.mask.sum()) for each in chosen)
    assert len({tuple(each.flatten().tolist()) for each in chosen}) > 1
    names = ("loss_mask", "old_logprobs", "advantages", "rollout_logprobs", "reference_logprobs", "labels")
    half = rows.labels.shape[1] // 2 + 1
    pad = torch.nn.functional.pad

    def part(x: Tensor, number: int) -> Tensor:
        return pad(x, (0, 1))[:, number * half : number * half + half] if x.shape[1] < 2 * half else x

    parts = [replace(rows, **{name: part(getattr(rows, name), n) for name in names}) for n in (0, 1)]
    split = select_tokens(loss.rl, parts, *([part(x, n) for n in (0, 1)] for x in values), seed=3)
    together = torch.cat([each.selected for each in split], dim=1)[:, : rows.labels.shape[1]]
    assert torch.equal(together, chosen[3])


def test_two_data_parallel_ranks_choose_as_one_rank(monkeypatch):
    """Each rank has every other micro-batch; the gather is replaced by the concatenation of both ranks' tables."""
    settings = dict(loss_type="kl_cov", kl_cov_ratio=0.3, top_entropy_quantile=0.4)
    loss, _, _ = packed_batch(Padded(), PLAIN | settings)
    generator = torch.Generator().manual_seed(5)
    batches, logprobs, entropies = [], [], []
    for _ in range(4):
        _, rows, _ = packed_batch(Padded(), PLAIN | settings)
        size = rows.labels.shape
        batches.append(replace(rows, advantages=torch.randn(size, generator=generator)))
        logprobs.append(-torch.rand(size, generator=generator))
        entropies.append(torch.rand(size, generator=generator))
    one = select_tokens(loss.rl, batches, logprobs, entropies, seed=1)
    tables: list[Tensor] = []

    def record(table: Tensor, dp: Axis, dim: int) -> Tensor:
        tables.append(table)
        return table.repeat_interleave(2, dim)

    for gather in (record, lambda table, dp, dim: torch.cat(tables, dim)):
        monkeypatch.setattr(token_selection, "all_gather_replicated", gather)
        ranks = [
            select_tokens(
                loss.rl,
                *(x[rank::2] for x in (batches, logprobs, entropies)),
                1,
                SimpleNamespace(rank=rank, size=2),
            )
            for rank in (0, 1)
        ]
    for number, whole in enumerate(one):
        part = ranks[number % 2][number // 2]
        assert torch.equal(part.selected, whole.selected) and torch.equal(
            part.high_entropy, whole.high_entropy
        )


def test_a_batch_without_its_selection_is_refused():
    for settings in (dict(loss_type="kl_cov"), dict(top_entropy_quantile=0.5)):
        batch = Padded()
        loss, rows, packed = packed_batch(batch, PLAIN | settings)
        with pytest.raises(ConfigError, match=r"call megalith\.rl\.select_tokens"):
            loss(packed(batch.logprobs), packed(batch.entropy), rows)


REFUSED = [
    (dict(loss_type="clip_cov", clip_cov_lb=5.0), "rl.clip_cov_lb 5.0 is not below rl.clip_cov_ub 5.0"),
    (dict(loss_type="gmpo", top_entropy_quantile=0.2), "gmpo has one ratio per sequence, not per token"),
    (
        dict(loss_type="kl_cov", importance_sampling_level="sequence"),
        "but rl.loss_type kl_cov selects tokens; set rl",
    ),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED)
def test_settings_that_contradict_the_selection_are_refused(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_rollouts(RunConfig.from_tree({"rl": {"rollouts": "x", "num_generations": 2} | settings,
                                            "train": {"global_batch_size": 8}}))  # fmt: skip
