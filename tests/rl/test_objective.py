"""The objectives are the published formulas, written out plainly here; their gradients are finite differences."""

import itertools
import math

import numpy as np
import pytest
import torch

from megalith.config import DpoConfig, RlConfig, RunConfig
from megalith.config.rules.rollout_rules import check_rollouts
from megalith.errors import ConfigError
from megalith.rl.objectives.policy_loss import PolicyLoss, RolloutBatch, divisor, mismatch_weights
from megalith.rl.objectives.preference_loss import PreferenceBatch, PreferenceLoss
from megalith.rl.objectives.sequences import Sequences
from megalith.rl.sampling.drift import mean_ratio

SEQ, TOKENS = 7, (5, 1, 3, 0)  # tokens in the loss of each sequence: the last has none


def batch_of(
    generator: torch.Generator, dtype=torch.float64, old: bool = True
) -> tuple[RolloutBatch, torch.Tensor]:
    """Four sequences, two in each row; and log-probabilities."""
    numbers = torch.tensor([[0] * 5 + [1] * 2, [2] * 4 + [3] * 3])
    mask = torch.zeros(2, SEQ)
    for number, count in enumerate(TOKENS):
        row, first = number // 2, (0, 5, 0, 4)[number]
        mask[row, first : first + count] = 1

    def random() -> torch.Tensor:
        return -0.5 - torch.rand(2, SEQ, generator=generator, dtype=dtype)

    logprobs = random()
    advantages = torch.tensor([1.2, -0.7, -1.4, 0.6], dtype=dtype)[numbers]
    ids = torch.zeros(2, SEQ, dtype=torch.long)
    batch = RolloutBatch(
        ids, ids, mask, ids, None, torch.arange(2), advantages, numbers, torch.tensor(TOKENS).float(),
        random(), random() if old else None, random(),
    )  # fmt: skip
    return batch, logprobs


def plain(rl: RlConfig, logprobs: np.ndarray, entropy: np.ndarray, batch: RolloutBatch) -> float:
    """The step's loss by loops and scalars: Σ / denominator, from what the papers write."""
    high = rl.epsilon if rl.epsilon_high is None else rl.epsilon_high
    per_sequence, entropies = [], []
    for number in range(len(TOKENS)):
        where = np.argwhere(((batch.sequence_ids == number) & (batch.loss_mask > 0)).numpy())
        at = [tuple(place) for place in where]
        pi, old, ref, engine = (
            [float(x[place]) for place in at]
            for x in (logprobs, batch.old_logprobs, batch.reference_logprobs, batch.rollout_logprobs)
        )
        ratios = [math.exp(p - o) for p, o in zip(pi, old)]
        if rl.importance_sampling_level == "sequence" and at:
            ratios = [math.prod(ratios) ** (1 / len(at))] * len(at)
        weights = [math.exp(o - e) for o, e in zip(old, engine)]
        mode = rl.vllm_importance_sampling_mode
        if mode.startswith("sequence"):
            weights = [math.prod(weights)] * len(at)
        own = {"token_mask": (0.5, 5), "sequence_mask": (0, 3), "geometric_mask": (0.999, 1.002)}.get(
            mode, (0, 2)
        )
        low = own[0] if rl.vllm_importance_sampling_clip_min is None else rl.vllm_importance_sampling_clip_min
        top = rl.vllm_importance_sampling_clip_max or own[1]
        if mode.startswith("geometric"):
            weights = weights if at and low <= math.prod(weights) ** (1 / len(at)) <= top else [0.0] * len(at)
        elif mode.endswith("mask"):
            weights = [w if low <= w <= top else 0.0 for w in weights]
        else:
            weights = [min(max(w, low), top) for w in weights]
        losses = []
        for k, place in enumerate(at):
            a, r = float(batch.advantages[place]), ratios[k]
            if rl.loss_type == "cispo":
                loss = -min(math.exp(pi[k] - old[k]), high) * a * pi[k]
            else:
                loss = -min(min(r, rl.delta or math.inf) * a, min(max(r, 1 - rl.epsilon), 1 + high) * a)
                if rl.clip_ratio_c and a < 0:
                    loss = min(loss, -rl.clip_ratio_c * a)
            loss *= weights[k] if rl.vllm_importance_sampling_correction else 1
            d = ref[k] - pi[k]
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - d - 1}[rl.kl_estimator]
            loss += rl.beta * kl * (r if rl.use_bias_correction_kl else 1)
            losses.append(loss)
            entropies.append(float(entropy[place]))
        per_sequence.append(losses)
    total, filled = sum(map(sum, per_sequence)), [one for one in per_sequence if one]
    counted = len(filled) if rl.count_masked_sequences is False else len(TOKENS)
    loss = {
        "dapo": lambda: total / sum(TOKENS),
        "cispo": lambda: total / sum(TOKENS),
        "grpo": lambda: sum(sum(one) / len(one) for one in filled) / counted,
        "luspo": lambda: total / counted,
        "dr_grpo": lambda: total / (counted * rl.max_completion_length),
    }[rl.loss_type]()
    return loss - rl.entropy_coef * sum(entropies) / sum(TOKENS)


def loss_of(rl: RlConfig, logprobs: torch.Tensor, entropy: torch.Tensor, batch: RolloutBatch) -> torch.Tensor:
    return PolicyLoss(rl)(logprobs, entropy, batch) / divisor(rl, batch.sequence_tokens)


OBJECTIVES = {
    "ppo": dict(),
    "dapo": dict(epsilon_high=0.28),
    "two-sided": dict(delta=1.5),
    "dual clip": dict(clip_ratio_c=1.3),
    "gspo": dict(importance_sampling_level="sequence", epsilon=0.1, epsilon_high=0.15),
    "gspo k3": dict(importance_sampling_level="sequence", beta=0.3),
    "cispo": dict(loss_type="cispo", epsilon_high=1.2),
    "k1": dict(beta=0.3, kl_estimator="k1"),
    "k2": dict(beta=0.3, kl_estimator="k2", use_bias_correction_kl=False),
    "k3": dict(beta=0.3),
    "k3 biased": dict(beta=0.3, use_bias_correction_kl=False),
    "entropy": dict(entropy_coef=0.2),
    "valid": dict(count_masked_sequences=False),
    **{
        f"{level} {beyond}": dict(vllm_importance_sampling_mode=f"{level}_{beyond}",
                                  vllm_importance_sampling_clip_max=1.2, vllm_importance_sampling_clip_min=0.7)
        for level, beyond in (*itertools.product(("token", "sequence"), ("truncate", "mask")), ("geometric", "mask"))
    },
    **{mode: dict(vllm_importance_sampling_mode=mode)
       for mode in ("token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")},
}  # fmt: skip
CASES = [(name, None) for name in OBJECTIVES] + list(
    itertools.product(("ppo", "gspo", "k3", "entropy", "valid"), ("grpo", "dr_grpo", "luspo"))
)


def settings(name: str, loss_type: str | None) -> RlConfig:
    more = {"loss_type": loss_type} if loss_type else {}
    plain = {"vllm_importance_sampling_mode": "token_truncate", "max_completion_length": 9}
    return RlConfig(rollouts="x", **plain | OBJECTIVES[name] | more)


@pytest.mark.parametrize(("name", "loss_type"), CASES)
def test_the_loss_is_the_published_formula(name, loss_type):
    rl, generator = settings(name, loss_type), torch.Generator().manual_seed(1)
    clipped = 0
    for _ in range(5):
        batch, logprobs = batch_of(generator)
        entropy = torch.rand(2, SEQ, generator=generator, dtype=torch.float64)
        expected = plain(rl, logprobs.numpy(), entropy.numpy(), batch)
        assert loss_of(rl, logprobs, entropy, batch).item() == pytest.approx(expected, rel=1e-12)
        clipped += ((logprobs - batch.old_logprobs).abs() > 0.2).sum()
    assert clipped > 20  # both sides of the clips were met


@pytest.mark.parametrize(("name", "loss_type"), CASES)
def test_gradients_are_finite_differences(name, loss_type):
    rl, generator = settings(name, loss_type), torch.Generator().manual_seed(2)
    batch, logprobs = batch_of(generator)
    entropy = torch.rand(2, SEQ, generator=generator, dtype=torch.float64, requires_grad=True)
    logprobs.requires_grad_()
    held = (logprobs - batch.old_logprobs).exp().clamp(max=rl.upper_epsilon).detach()

    def loss(x: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        if rl.loss_type != "cispo":
            return loss_of(rl, x, e, batch)
        weights = (
            (batch.old_logprobs - batch.rollout_logprobs).exp().clamp(max=2.0)
        )  # the ratio has no gradient
        return (-held * batch.advantages * x * weights * batch.loss_mask).sum() / sum(TOKENS)

    grads = torch.autograd.grad(loss_of(rl, logprobs, entropy, batch), (logprobs, entropy), allow_unused=True)
    for x, grad in zip((logprobs, entropy), grads):
        for place in np.ndindex(2, SEQ):
            moved = torch.zeros(2, SEQ, dtype=torch.float64)
            moved[place] = 1e-6
            ends = [
                loss(*(y + sign * moved if y is x else y for y in (logprobs, entropy))).item()
                for sign in (1, -1)
            ]
            found = 0.0 if grad is None else grad[place].item()
            assert (ends[0] - ends[1]) / 2e-6 == pytest.approx(found, rel=1e-5, abs=1e-9), place
            assert found == 0 or batch.loss_mask[place] == 1


def decoupled(rl: RlConfig, logprobs: np.ndarray, batch: RolloutBatch, alpha: np.ndarray | None) -> tuple:
    """The loss and its gradient by log π_θ, by loops: −Σ_t (π_prox / π_behav) min(u A, clip(u, 1 − ε, 1 + ε) A) / Σ 1
    with u = π_θ / π_prox (Hilton et al. 2021; AReaL, arXiv 2505.24298). π_prox is that of a pass, or
    π_behav^(1 − α) π_θ^α, or π_θ itself."""
    loss, grads = 0.0, np.zeros_like(logprobs)
    for at in np.ndindex(*logprobs.shape):
        if not batch.loss_mask[at]:
            continue
        theta, behaviour, a = (
            math.exp(logprobs[at]),
            math.exp(batch.rollout_logprobs[at]),
            float(batch.advantages[at]),
        )
        if alpha is not None:
            proximal = behaviour ** (1 - alpha[at]) * theta ** alpha[at]
        else:
            proximal = theta if batch.old_logprobs is None else math.exp(batch.old_logprobs[at])
        weight, u = proximal / behaviour, theta / proximal
        if rl.behav_imp_weight_cap is not None and weight > rl.behav_imp_weight_cap:
            continue
        clipped = min(max(u, 1 - rl.epsilon), 1 + rl.epsilon)
        loss -= weight * min(u * a, clipped * a)
        if u * a <= clipped * a:
            grads[at] = -weight * a * u
    return loss / sum(TOKENS), grads / sum(TOKENS)


@pytest.mark.parametrize("cap", [None, 1.3])
@pytest.mark.parametrize("proximal", ["pass", "line", "ours"])
def test_the_decoupled_loss_is_the_published_formula(proximal, cap):
    rl = RlConfig(rollouts="x", use_decoupled_loss=True, behav_imp_weight_cap=cap, mini_batches=2,
                  vllm_importance_sampling_correction=False)  # fmt: skip
    generator, left_out = torch.Generator().manual_seed(4), 0
    for _ in range(10):
        batch, logprobs = batch_of(generator, old=proximal == "pass")
        if proximal == "line":
            versions = torch.randint(4, 8, (2, SEQ), generator=generator)  # of weights up to those of step 7
            alpha = ((7.0 - versions) / (9.0 - versions)).double().numpy()  # at step 9
            batch.proximal_weight = torch.from_numpy(alpha)
        expected, grads = decoupled(rl, logprobs.numpy(), batch, alpha if proximal == "line" else None)
        logprobs.requires_grad_()
        loss = loss_of(rl, logprobs, None, batch)
        (grad,) = torch.autograd.grad(loss, logprobs)
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        assert np.allclose(grad, grads, rtol=1e-6, atol=1e-12)
        tokens = PolicyLoss(rl).tokens(
            batch
        )  # as the pass over the vocabulary takes them, a chunk of tokens at a time
        by_chunks = sum(
            PolicyLoss(rl).token_losses(logprobs[:, at], None, {k: v[:, at] for k, v in tokens.items()}).sum()
            for at in (slice(0, 3), slice(3, SEQ))
        )
        assert by_chunks.item() / sum(TOKENS) == pytest.approx(expected, rel=1e-6)
        left_out += ((batch.loss_mask > 0).numpy() & (grads == 0)).sum()
    assert left_out > 5 or (proximal == "ours" and cap is None)


KINKS = [  # advantage, ratio, settings, one-sided derivatives by the ratio below and above
    (1.0, 1.2, {}, (-1.0, 0.0)),
    (1.0, 0.8, {}, (-1.0, -1.0)),
    (-1.0, 0.8, {}, (0.0, 1.0)),
    (-1.0, 1.2, {}, (1.0, 1.0)),
    (-1.0, 1.5, {"delta": 1.5}, (1.0, 0.0)),
    (-1.0, 3.0, {"clip_ratio_c": 3.0}, (1.0, 0.0)),
]


@pytest.mark.parametrize(("advantage", "ratio", "given", "sides"), KINKS)
def test_at_a_kink_the_gradient_is_between_those_of_its_sides(advantage, ratio, given, sides):
    rl = RlConfig(rollouts="x", **given)
    ids = torch.zeros(1, 1, dtype=torch.long)

    def loss(log_ratio: torch.Tensor) -> torch.Tensor:
        batch = RolloutBatch(ids, ids, torch.ones(1, 1), ids, None, ids[0], torch.full((1, 1), advantage).double(),
                             ids, torch.ones(1), None, torch.zeros(1, 1).double())  # fmt: skip
        return loss_of(rl, log_ratio, None, batch)

    x = torch.full((1, 1), ratio, dtype=torch.float64).log().requires_grad_()
    for sign, side in zip((-1, 1), sides):
        moved = (loss(x + sign * 1e-7) - loss(x)).item() / (sign * 1e-7)
        assert moved == pytest.approx(side * ratio, abs=1e-5)
    grad = torch.autograd.grad(loss(x), x)[0].item()
    assert min(sides) * ratio - 1e-9 <= grad <= max(sides) * ratio + 1e-9


def test_on_policy_the_gradient_is_reinforce_and_the_ratio_1():
    rl = RlConfig(rollouts="x", vllm_importance_sampling_correction=False)
    batch, logprobs = batch_of(torch.Generator().manual_seed(3), old=False)
    logprobs.requires_grad_()
    loss = PolicyLoss(rl)
    (grad,) = torch.autograd.grad(loss(logprobs, torch.zeros(2, SEQ), batch), logprobs)
    assert torch.equal(grad, -batch.advantages * batch.loss_mask)
    figures = dict(zip(loss.METRICS, loss.take_sums().tolist()))
    assert figures["ratio"] == figures["tokens"] == sum(TOKENS)
    assert loss.take_sums() is None


def test_tokens_count_as_clipped_where_the_clip_takes_their_gradient_away():
    rl = RlConfig(rollouts="x", vllm_importance_sampling_correction=False)
    batch, logprobs = batch_of(torch.Generator().manual_seed(3))
    loss = PolicyLoss(rl)
    loss(logprobs, None, batch)
    counts = dict(zip(loss.METRICS, loss.take_sums().tolist()))
    ratio, inside = (logprobs - batch.old_logprobs).exp(), batch.loss_mask > 0
    low = (ratio < 1 - rl.epsilon) & (batch.advantages < 0) & inside
    high = (ratio > 1 + rl.upper_epsilon) & (batch.advantages > 0) & inside
    assert (counts["clip_low"], counts["clip_high"]) == (low.sum(), high.sum())
    assert low.any() and high.any() and (inside & (ratio > 1 + rl.upper_epsilon) & ~high).any()


def test_what_stands_outside_of_the_loss_reaches_nothing():
    rl = RlConfig(rollouts="x", beta=0.1)
    batch, logprobs = batch_of(torch.Generator().manual_seed(3))
    outside = batch.loss_mask == 0
    first = loss_of(rl, logprobs, torch.zeros(2, SEQ), batch)
    for x in (batch.old_logprobs, batch.reference_logprobs, batch.rollout_logprobs):
        x[outside] = torch.nan
    logprobs[outside] = torch.inf
    logprobs.requires_grad_()
    second = loss_of(rl, logprobs, torch.zeros(2, SEQ), batch)
    assert torch.equal(first, second)
    assert torch.autograd.grad(second, logprobs)[0].isfinite().all()


@pytest.mark.parametrize("old", [True, False])
def test_drift_leaves_out_tokens_that_cannot_be_compared(old):
    batch, logprobs = batch_of(torch.Generator().manual_seed(3), old=old)
    mine, inside = batch.old_logprobs if old else logprobs, batch.loss_mask > 0
    batch.rollout_logprobs[0, 1] = batch.rollout_logprobs[1, 0] = torch.nan
    loss = PolicyLoss(RlConfig(rollouts="x"))
    loss(logprobs, None, batch)
    d = (mine - batch.rollout_logprobs)[inside]
    d = d[~d.isnan()].double().numpy()
    assert len(d) == sum(TOKENS) - 2
    found = loss.means(loss.take_sums())
    assert [found[name] for name in PolicyLoss.DRIFT] == pytest.approx(
        [np.abs(d).mean(), mean_ratio(d, 0 * d), (np.exp(d) - d - 1).mean(), (np.abs(d) > 1).mean()]
    )
    batch.rollout_logprobs[:] = torch.nan
    loss(logprobs, None, batch)
    found = loss.means(loss.take_sums())
    assert [found[name] for name in PolicyLoss.DRIFT] == [None] * 4 and found["ratio"] > 0


def test_a_micro_batch_without_a_sequence_adds_nothing():
    rl, ids = RlConfig(rollouts="x", loss_type="grpo"), torch.zeros(1, SEQ, dtype=torch.long)
    zeros = torch.zeros(1, SEQ)
    batch = RolloutBatch(ids, ids, zeros, ids, None, ids[0, :1], zeros, ids, torch.zeros(0))
    logprobs = torch.randn(1, SEQ, requires_grad=True)
    loss = PolicyLoss(rl)(logprobs, zeros, batch)
    assert loss.item() == 0 and divisor(rl, batch.sequence_tokens) == 0
    assert torch.equal(torch.autograd.grad(loss, logprobs)[0], zeros)


REFUSED = [
    (dict(loss_type="bnpo"), "rl.loss_type is 'bnpo': it divides by each micro-batch's tokens"),
    (dict(num_generations=3), "= 8 completions is not a multiple of rl.num_generations 3"),
    (dict(delta=1.1), "rl.delta 1.1 is not above 1 \\+ epsilon_high"),
    (dict(loss_type="cispo", delta=3.0), "rl.delta is 3.0, but rl.loss_type cispo"),
    (dict(loss_type="cispo", importance_sampling_level="sequence"), "cispo caps each token's ratio"),
    (dict(use_decoupled_loss=True, vllm_importance_sampling_clip_max=3.0), "only bound is rl.behav_imp_weight_cap"),
    (dict(use_decoupled_loss=True, old_logprobs="rollout"), "the proximal policy would be the sampling policy"),
    (dict(use_decoupled_loss=True, prox_logp_method="loglinear", mini_batches=2), "whose weight versions do not apply"),
    (dict(vllm_importance_sampling_clip_min=4.0), "clip_min 4.0 is above rl.vllm_importance_sampling_clip_max 2.0"),
]  # fmt: skip


@pytest.mark.parametrize(("rl", "sentence"), REFUSED)
def test_settings_that_cannot_be_are_refused(rl, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check_rollouts(
            RunConfig.from_tree(
                {
                    "rl": dict(rollouts="x") | rl,
                    "train": dict(global_batch_size=8),
                    "checkpoint": dict(save_interval=4),
                }
            )
        )


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


PREFERENCES = {  # ℓ of β · the margin of sums, and of means
    "sigmoid": lambda sums, means: -0.9 * log_sigmoid(sums) - 0.1 * log_sigmoid(-sums),
    "robust": lambda sums, means: (0.1 * log_sigmoid(-sums) - 0.9 * log_sigmoid(sums)) / 0.8,
    "hinge": lambda sums, means: max(0, 1 - sums),
    "ipo": lambda sums, means: (means / 0.3 - 1 / 0.6) ** 2,
    "sigmoid_norm": lambda sums, means: -log_sigmoid(means),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loss_type", PREFERENCES)
def test_preferences_are_their_formulas_and_what_fills_up_is_nothing(loss_type, packed):
    generator = torch.Generator().manual_seed(3)
    ids = torch.zeros(4, SEQ, dtype=torch.long)
    mask = (torch.rand(4, SEQ, generator=generator) > 0.5).float()
    mask[:, -1] = mask[:, 0] = 1
    numbers = torch.arange(4)[:, None].expand(4, SEQ)
    if packed:  # two pairs in two rows, and a third that is empty
        numbers = torch.tensor([[0] * 3 + [2] * 4, [1] * 2 + [3] * 5, [4] * SEQ, [5] * SEQ])
        mask[2:] = 0
    tokens = torch.zeros(int(numbers.max()) + 1).index_add_(0, numbers.flatten(), mask.flatten())
    reference = -torch.rand(4, SEQ, generator=generator, dtype=torch.float64)
    batch = PreferenceBatch(ids, ids, mask, ids, None, ids[:, 0], numbers, tokens, reference)
    logprobs = (-torch.rand(4, SEQ, generator=generator, dtype=torch.float64)).requires_grad_()
    smoothing = {"label_smoothing": 0.1} if loss_type in ("sigmoid", "robust") else {}
    loss = PreferenceLoss(DpoConfig(loss_type=loss_type, beta=0.3, **smoothing))
    value, expected, margins = loss(logprobs, None, batch), 0.0, []
    for pair in range(2):
        of_pair = [(numbers == 2 * pair + k) & (mask > 0) for k in (0, 1)]
        sums = [(logprobs - reference)[where].sum().item() for where in of_pair]
        means = [(logprobs - reference)[where].mean().item() for where in of_pair]
        margins.append(0.3 * (sums[0] - sums[1]))
        expected += PREFERENCES[loss_type](margins[-1], 0.3 * (means[0] - means[1]))
    assert value.item() == pytest.approx(expected, rel=1e-9) and loss.denominator(batch) == 2
    figures = loss.means(loss._sums)
    assert figures["rewards/margins"] == pytest.approx(sum(margins) / 2)
    assert figures["rewards/accuracies"] == sum(margin > 0 for margin in margins) / 2
    (grad,) = torch.autograd.grad(value, logprobs)
    rejected = (numbers % 2).bool()
    if loss_type != "ipo":  # whose margin may be too large
        assert (grad[~rejected & (mask > 0)] < 0).all() and (grad[rejected & (mask > 0)] > 0).all()
    assert (grad[mask == 0] == 0).all()
    assert torch.autograd.gradcheck(lambda x: loss(x, None, batch), logprobs)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_probability_that_the_engine_did_not_give_counts_as_equal(level):
    """NaN at one token: its weight is that of the trainer's own log-probability in its place."""
    rl = RlConfig(vllm_importance_sampling_correction=True, vllm_importance_sampling_mode=f"{level}_truncate")
    batch, _ = batch_of(torch.Generator().manual_seed(3))
    absent, same = (batch.rollout_logprobs.clone() for _ in range(2))
    absent[0, 1], same[0, 1] = math.nan, batch.old_logprobs[0, 1]
    found, wanted = (
        mismatch_weights(rl, batch.old_logprobs, x, Sequences.from_batch(batch)) for x in (absent, same)
    )
    assert found.isfinite().all() and torch.equal(found, wanted)
