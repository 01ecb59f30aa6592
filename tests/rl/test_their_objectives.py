"""TRL's, verl's and NeMo-RL's objectives, written out from their sources, against ours by their own names of settings.

Each transcription takes a padded batch [sequences, tokens], as its system does; ours gets the same tokens packed into
one row. The batch reaches every clip and clamp, and its last sequence is wholly masked.
"""

import math
from collections.abc import Callable
from copy import copy

import pytest
import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.rl.objectives.policy_loss import PolicyLoss, RolloutBatch
from megalith.rl.objectives.rollout_correction import correct_batches

LENGTHS, TOKENS = (7, 3, 5, 4), 7
MASKED = 3  # this sequence has no token in the loss


class Padded:
    """The tensors of a batch that all three systems have, float64 [sequences, tokens]."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)

        def normal(scale: float) -> Tensor:
            return scale * torch.randn(len(LENGTHS), TOKENS, generator=generator, dtype=torch.float64)

        self.shape = torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None]  # of the completions
        self.mask = self.shape.double()
        self.mask[MASKED] = 0
        self.logprobs = (-3 - normal(0.5).abs()).requires_grad_()
        self.entropy = (1 + normal(0.3)).requires_grad_()
        self.old = self.logprobs.detach() + normal(0.3)
        self.old[1, 0] -= 1.5  # a ratio above 3 where the advantage is negative: a dual clip
        self.reference = self.logprobs.detach() + normal(1.5)
        self.reference[0, 0] += 40  # beyond the clamps on both sides
        self.reference[1, 1] -= 40
        self.rollout = self.old + normal(0.15)
        self.rollout[0, 1] -= 1  # a weight beyond every bound
        self.advantages = torch.tensor([1.2, -0.7, -1.4, 0.6], dtype=torch.float64)[:, None]


def by_tokens(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def by_sequences(losses: Tensor, mask: Tensor, sequences: float) -> Tensor:
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1)).sum() / sequences


def trl(batch: Padded, *, loss_type="dapo", level="token", epsilon=0.2, epsilon_high=None, beta=0.0, corrects=True,
        entropy_coef=0.0, longest=7) -> Tensor:  # fmt: skip
    """TRL 1.16's GRPOTrainer._compute_loss, one micro-batch."""
    high, mask = epsilon if epsilon_high is None else epsilon_high, batch.mask
    log_ratio = batch.logprobs - batch.old
    if level == "sequence":
        log_ratio = ((log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1))[:, None]
    ratio = log_ratio.exp()
    if loss_type == "cispo":
        losses = -ratio.clamp(max=high).detach() * batch.advantages * batch.logprobs
    else:
        losses = -torch.min(ratio * batch.advantages, ratio.clamp(1 - epsilon, 1 + high) * batch.advantages)
    if beta:
        d = batch.reference - batch.logprobs
        losses = losses + beta * (d.exp() - d - 1) * (ratio if corrects else 1)
    losses = losses.expand(mask.shape)
    loss = {
        "dapo": lambda: by_tokens(losses, mask),
        "cispo": lambda: by_tokens(losses, mask),
        "grpo": lambda: by_sequences(losses, mask, len(mask)),
        "dr_grpo": lambda: (losses * mask).sum() / (len(mask) * longest),
        "luspo": lambda: (losses * mask).sum(-1).mean(),
    }[loss_type]()
    return loss - entropy_coef * by_tokens(batch.entropy, mask)


def verl(batch: Padded, *, mode="vanilla", low=0.2, high=0.2, c=3.0, aggregation="token-mean", kl=0.0,
         kl_type="low_var_kl", entropy=0.0, rollout_is=None, threshold=2.0, longest=7, normalize=False, rs=None,
         bounds=None, bypass=None) -> Tensor:  # fmt: skip
    """verl 0.9.1's ppo_loss: the registered policy loss, agg_loss by global_batch_size, kl_penalty, and
    rollout_corr_helper.py; `bypass` is the loss_type of its bypass mode."""
    mask, advantages = batch.mask, batch.advantages
    whole = mask
    if bypass:
        batch = copy(batch)
        batch.old = batch.rollout
    if rs:
        trainer = batch.logprobs.detach() if bypass else batch.old
        keeps = rejection_mask(trainer - batch.rollout, mask, rs, bounds)
        assert 0 < keeps.sum() < mask.sum()
        mask = keeps
    in_batch = whole if bypass else mask  # which rejection changes before the loss, or within it

    def aggregate(x: Tensor, mask: Tensor) -> Tensor:
        per_sequence = (x * mask).sum(-1)
        return {
            "token-mean": lambda: per_sequence.sum() / in_batch.sum(),
            "seq-mean-token-mean": lambda: by_sequences(x, mask, len(mask)),
            "seq-mean-token-sum": lambda: per_sequence.sum() / len(mask),
            "seq-mean-token-sum-norm": lambda: per_sequence.sum() / len(mask) / longest,
        }[aggregation]()

    log_ratio = batch.logprobs - batch.old
    if mode == "gspo":
        mean = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        log_ratio = batch.logprobs - batch.logprobs.detach() + mean.detach()[:, None]
        log_ratio = log_ratio.clamp(max=10)
    else:
        log_ratio = log_ratio.clamp(-20, 20)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    if mode == "cispo":
        losses = -clipped.detach() * advantages * batch.logprobs
    else:
        losses = torch.maximum(-advantages * ratio, -advantages * clipped)
        if mode == "vanilla":
            losses = torch.where(advantages < 0, torch.min(-advantages * c, losses), losses)
    if bypass == "reinforce":
        losses = -advantages * batch.logprobs
    if rollout_is and bypass != "ppo_clip":
        difference = (batch.logprobs.detach() if bypass else batch.old) - batch.rollout
        gap = difference.clamp(-20, 20)
        if rollout_is == "sequence":
            gap = (difference * whole).sum(-1, keepdim=True).clamp(-20, 20).expand_as(gap)
        weights = gap.exp() * whole
        if isinstance(threshold, str):
            least, most = map(float, threshold.split("_"))
            weights = torch.where((weights >= least) & (weights <= most), weights, 0)
        else:
            weights = weights.clamp(max=threshold)
        if normalize:
            per_sequence = (weights * whole).sum(-1) / whole.sum(-1).clamp(min=1e-8)
            is_present = whole.sum(-1) > 0
            by_level = {"token": weights[whole > 0].mean(), "sequence": per_sequence[is_present].mean()}
            weights = weights / by_level[rollout_is]
        losses = losses * weights
    loss = aggregate(losses, mask) - entropy * aggregate(batch.entropy, in_batch)
    d = batch.reference - batch.logprobs
    if kl_type == "low_var_kl":
        d = d.clamp(-20, 20)
        estimate = (d.exp() - d - 1).clamp(-10, 10)
    else:
        estimate = {"kl": -d, "mse": d.square() / 2}[kl_type]
    return loss + kl * aggregate(estimate, in_batch)


def rejection_mask(log_ratio: Tensor, mask: Tensor, names: str, thresholds: str | float) -> Tensor:
    """compute_rollout_rejection_mask of verl 0.9.1."""
    options, texts = names.split(","), str(thresholds).split(",")
    safe, keeps = log_ratio.clamp(-20, 20), torch.ones_like(mask)
    tokens = {"k1": -safe, "k2": 0.5 * safe**2, "k3": safe.exp() - 1 - safe}
    for option, text in zip(options, texts if len(texts) > 1 else texts * len(options)):
        level, _, kind = option.rpartition("_")
        values = tokens[kind]
        if level == "seq_max":
            values = values.masked_fill(mask == 0, -math.inf).max(-1, keepdim=True).values
        elif level != "token":
            values = (values * mask).sum(-1, keepdim=True)
            values = values / (mask.sum(-1, keepdim=True) + 1e-8) if level == "seq_mean" else values
        if kind == "k1":
            low, high = text.split("_") if "_" in text else (1 / float(text), text)
            keep = (values >= math.log(float(low))) & (values <= math.log(float(high)))
        else:
            keep = values <= float(text)
        keeps = keeps * keep
    return mask * keeps


def nemo(batch: Padded, *, low=0.2, high=0.2, c=None, kl=0.0, kl_type="k3", in_clamp=20.0, out_clamp=10.0,
         tokens=True, sequence_ratios=False, cispo=False, corrects=False, kind=None, ratio_max=None,
         ratio_min=None) -> Tensor:  # fmt: skip
    """NeMo-RL 7ea279a's ClippedPGLossFn; the masked sequence is one that overlong_filtering took out."""
    mask, advantages, count = batch.mask, batch.advantages, len(batch.mask) - 1
    own = batch.shape.double()  # its token_mask, which a sample_mask of 0 leaves as it is

    def mean(x: Tensor) -> Tensor:
        x = x.expand(mask.shape)
        return by_tokens(x, mask) if tokens else by_sequences(x, mask, count)

    def of_sequence(x: Tensor) -> Tensor:
        return ((x * own).sum(-1) / own.sum(-1))[:, None]

    log_ratio = batch.logprobs - batch.old
    ratio = (of_sequence(log_ratio) if sequence_ratios else log_ratio).exp()
    clipped = ratio.clamp(1 - low, 1 + high)
    if cispo:
        losses = -advantages * clipped.detach() * batch.logprobs
    else:
        losses = torch.max(-advantages * ratio, -advantages * clipped)
    if c is not None:
        losses = torch.where(advantages < 0, torch.min(losses, -advantages * c), losses)
    if corrects:
        gap = batch.old - batch.rollout
        weights = ((gap * mask).sum(-1, keepdim=True) if sequence_ratios else gap).exp()
        if kind == "tis":
            weights = weights.clamp(ratio_min or 0, ratio_max)
        elif kind == "icepop":
            weights = torch.where((weights >= ratio_min) & (weights <= ratio_max), weights, 0)
        elif kind == "seq-mask-tis":
            geometric = of_sequence(gap).exp()
            weights = weights * ((geometric >= ratio_min) & (geometric <= ratio_max))
        losses = losses * weights
    loss = mean(losses)
    if kl:
        d = batch.reference - batch.logprobs
        clamped = d if in_clamp is None else d.clamp(-in_clamp, in_clamp)
        weights = (batch.logprobs - batch.logprobs.detach()).exp()
        weights = torch.where(d == clamped, weights, weights.detach())
        estimate = {"k1": -clamped, "k2": clamped.square() / 2, "k3": clamped.exp() - 1 - clamped}[
            kl_type
        ] * weights
        loss = loss + kl * mean(estimate if out_clamp is None else estimate.clamp(-out_clamp, out_clamp))
    return loss


def ours(batch: Padded, settings: dict, denominator: float | None = None) -> Tensor:
    """By a run file with these settings of the section rl."""
    loss, rows, packed = packed_batch(batch, settings)
    divisor = loss.denominator(rows) if denominator is None else denominator
    return loss(packed(batch.logprobs), packed(batch.entropy), rows) / divisor


def packed_batch(
    batch: Padded, settings: dict
) -> tuple[PolicyLoss, RolloutBatch, Callable[[Tensor], Tensor]]:
    """The loss with these settings, the batch in one row, and the function that packs a tensor."""
    rl = RunConfig.from_tree({"rl": {"rollouts": "x", "max_completion_length": 7} | settings}).rl

    def packed(x: Tensor) -> Tensor:
        return x.expand(batch.mask.shape)[batch.shape][None]

    numbers = packed(torch.arange(len(LENGTHS))[:, None])
    ids = torch.zeros_like(numbers)
    old = packed(batch.old) if rl.old_logprobs == "policy" else None
    rows = RolloutBatch(ids, ids, packed(batch.mask), ids, None, ids[:, 0], packed(batch.advantages), numbers,
                        batch.mask.sum(-1), packed(batch.rollout), old, packed(batch.reference),
                        )  # fmt: skip
    if rl.corrects_batches:
        (rows,), _ = correct_batches(rl, [[rows]], Axis(), torch.device("cpu"))
    return PolicyLoss(rl), rows, packed


PLAIN = {"vllm_importance_sampling_correction": False}
TRL = {
    **{f"{kind} entropy": (dict(loss_type=kind, entropy_coef=0.3), {})
       for kind in ("grpo", "dapo", "dr_grpo", "luspo")},
    "cispo": (dict(loss_type="cispo", epsilon_high=1.5, entropy_coef=0.3), {}),
    "kl": (dict(loss_type="grpo", beta=0.04), {}),
    "kl biased": (dict(beta=0.04, corrects=False), dict(use_bias_correction_kl=False)),
    "gspo": (dict(loss_type="grpo", level="sequence", epsilon_high=0.3), dict(importance_sampling_level="sequence")),
}  # fmt: skip
NAMES = ("loss_type", "epsilon", "epsilon_high", "beta", "entropy_coef")
VERL = {
    "clip_ratio": (dict(low=0.1, high=0.1), dict(clip_ratio=0.1)),
    "clip_ratio_low": (dict(low=0.1), dict(clip_ratio_low=0.1)),
    "clip_ratio_high": (dict(high=0.28), dict(clip_ratio=0.1, clip_ratio_low=0.2, clip_ratio_high=0.28)),
    "vanilla": (dict(), dict(loss_mode="vanilla")),
    "a dual clip out of reach": (dict(c=50.0), dict(loss_mode="vanilla", clip_ratio_c=50.0)),
    "gspo": (dict(mode="gspo", low=0.05, high=0.1, aggregation="seq-mean-token-mean"),
             dict(loss_mode="gspo", clip_ratio_low=0.05, clip_ratio_high=0.1, clip_ratio_c=3.0)),
    "policy_loss gspo": (dict(mode="gspo", aggregation="seq-mean-token-mean", kl=0.001, entropy=0.1),
                         dict(policy_loss="gspo", loss_agg_mode="seq-mean-token-mean", use_kl_loss=True,
                              entropy_coeff=0.1)),
    "gspo rollout_is": (dict(mode="gspo", aggregation="seq-mean-token-mean", rollout_is="sequence", threshold=1.5),
                        dict(policy_loss={"loss_mode": "gspo"}, rollout_is="sequence", rollout_is_threshold=1.5)),
    "cispo": (dict(mode="cispo", high=0.28), dict(loss_mode="cispo", clip_ratio_high=0.28, loss_agg_mode="token-mean")),
    "cispo by both": (dict(mode="cispo", low=0.4, high=0.4), dict(policy_loss={"loss_mode": "cispo"}, clip_ratio=0.4)),
    "cispo alone": (dict(mode="cispo"), dict(policy_loss="cispo")),
    "loss_type cispo": (dict(mode="cispo", low=0.1, high=0.28),
                        dict(loss_type="cispo", clip_ratio_low=0.1, clip_ratio_high=0.28)),
    **{f"aggregation {kind}": (dict(aggregation=kind, kl=0.02, entropy=0.1, high=0.28),
                               dict(loss_agg_mode=kind, kl_loss_coef=0.02, use_kl_loss=True, entropy_coeff=0.1,
                                    clip_ratio_high=0.28))
       for kind in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")},
    **{f"kl {kind}": (dict(kl=0.02, kl_type=kind), dict(loss_mode="vanilla", kl_loss_coef=0.02, kl_loss_type=kind))
       for kind in ("kl", "mse", "low_var_kl")},
    **{f"rollout_is {level} {threshold}": (dict(rollout_is=level, threshold=threshold),
                                           dict(clip_ratio=0.2, rollout_is=level, rollout_is_threshold=threshold))
       for level in ("token", "sequence") for threshold in (1.2, "0.7_1.4")},
    **{f"rollout_is {level} normalized": (
        dict(rollout_is=level, threshold=threshold, normalize=True),
        dict(clip_ratio=0.2, rollout_is=level, rollout_is_threshold=threshold, rollout_is_batch_normalize=True))
       for level, threshold in (("token", 1.2), ("sequence", "0.3_1.4"))},
    **{f"rollout_rs {rs}{' bypass' * bypass}": (
        dict(rs=rs, bounds=bounds, bypass="ppo_clip" if bypass else None, kl=0.02, entropy=0.1),
        dict(clip_ratio=0.2, kl_loss_coef=0.02, use_kl_loss=True, entropy_coeff=0.1,
             rollout_correction=dict(rollout_rs=rs, rollout_rs_threshold=bounds, bypass_mode=bypass)))
       for bypass in (False, True) for rs, bounds in (
           ("token_k1", "0.9_1.3"), ("token_k2", 0.02), ("token_k3", "0.03"), ("seq_sum_k1", 1.65), ("seq_sum_k2", 0.7),
           ("seq_sum_k3", 0.6), ("seq_mean_k1", "0.88_1.2"), ("seq_mean_k2", 0.11), ("seq_mean_k3", 0.13),
           ("seq_max_k2", 0.4), ("seq_max_k3", 0.3), ("token_k1,seq_mean_k3", "0.8_1.3,0.13"))},
    "rollout_rs with rollout_is": (
        dict(rs="token_k1", bounds="0.9_1.3", rollout_is="token", threshold=1.2, aggregation="seq-mean-token-mean"),
        dict(clip_ratio=0.2, loss_agg_mode="seq-mean-token-mean",
             rollout_correction=dict(rollout_is="token", rollout_is_threshold=1.2, rollout_rs="token_k1",
                                     rollout_rs_threshold="0.9_1.3"))),
    **{f"bypass {kind} {level} {threshold}": (
        dict(bypass=kind, rollout_is=level, threshold=threshold, rs="token_k2", bounds=0.3),
        dict(clip_ratio=0.2, rollout_correction=dict(
            rollout_is=level, rollout_is_threshold=threshold, bypass_mode=True, loss_type=kind, rollout_rs="token_k2",
            rollout_rs_threshold=0.3)))
       for kind in ("ppo_clip", "reinforce")
       for level, threshold in (("token", 1.2), ("sequence", 1.5), ("token", "0.6_1.4"), (None, 2.0))},
}  # fmt: skip
MIN, MAX = "truncated_importance_sampling_ratio_min", "truncated_importance_sampling_ratio"
KIND, KL = "truncated_importance_sampling_type", "reference_policy_kl_penalty"
CORRECTS = dict(use_importance_sampling_correction=True)
NEMO = {
    "token level": (dict(low=0.1, high=0.28), dict(ratio_clip_min=0.1, ratio_clip_max=0.28, token_level_loss=True)),
    "sequence level": (dict(low=0.1, tokens=False), dict(ratio_clip_min=0.1, token_level_loss=False)),
    "dual clip": (dict(c=3.0), dict(ratio_clip_c=3.0, disable_ppo_ratio=False, positive_example_nll_weight=0.0)),
    "gspo": (dict(sequence_ratios=True, tokens=False), dict(sequence_level_importance_ratios=True)),
    "gspo corrected": (dict(sequence_ratios=True, tokens=False, corrects=True),
                       dict(sequence_level_importance_ratios=True, token_level_loss=False) | CORRECTS),
    "gspo tis": (dict(sequence_ratios=True, tokens=False, corrects=True, kind="tis", ratio_max=1.5),
                 dict(sequence_level_importance_ratios=True, **{KIND: "tis", MAX: 1.5}) | CORRECTS),
    "cispo": (dict(cispo=True, high=0.28), dict(use_cispo=True, ratio_clip_max=0.28, token_level_loss=True)),
    "cispo alone": (dict(cispo=True), dict(use_cispo=True)),
    **{f"kl {kind}": (dict(kl=0.02, kl_type=kind), dict(reference_policy_kl_type=kind, **{KL: 0.02}))
       for kind in ("k1", "k2", "k3")},
    "kl of sequences": (dict(kl=0.02, tokens=False), dict(reference_policy_kl_penalty=0.02, token_level_loss=False)),
    "kl clamped otherwise": (dict(kl=0.02, in_clamp=1.0, out_clamp=None),
                             dict(kl_input_clamp_value=1.0, kl_output_clamp_value=None, **{KL: 0.02})),
    "corrected": (dict(corrects=True), {KIND: None, MAX: None, MIN: None} | CORRECTS),
    "tis": (dict(corrects=True, kind="tis", ratio_max=1.2, ratio_min=0.8),
            dict(truncated_importance_sampling_type="tis", **{MAX: 1.2, MIN: 0.8}) | CORRECTS),
    "icepop": (dict(corrects=True, kind="icepop", ratio_max=1.5, ratio_min=0.6),
               dict(truncated_importance_sampling_type="icepop", **{MAX: 1.5, MIN: 0.6}) | CORRECTS),
    "seq-mask-tis": (dict(corrects=True, kind="seq-mask-tis", ratio_max=1.1, ratio_min=0.9),
                     dict(truncated_importance_sampling_type="seq-mask-tis", **{MAX: 1.1, MIN: 0.9}) | CORRECTS),
}  # fmt: skip


def cases():
    for name, (theirs, more) in TRL.items():
        yield f"TRL {name}", trl, theirs, PLAIN | {key: theirs[key] for key in NAMES if key in theirs} | more
    for name, (theirs, own) in VERL.items():
        has_own = own.keys() & {"rollout_is", "rollout_correction"}
        yield f"verl {name}", verl, theirs, {} if has_own else PLAIN, own
    for name, (theirs, own) in NEMO.items():
        yield (
            f"NeMo-RL {name}",
            nemo,
            theirs,
            {} if own.keys() >= CORRECTS.keys() else PLAIN,
            own,
            {"overlong_filtering": True},
        )


@pytest.mark.parametrize(("theirs", "given", "settings"),
                         [pytest.param(*case[1:3], case[3:], id=case[0]) for case in cases()])  # fmt: skip
def test_loss_and_gradient_are_theirs(theirs, given, settings):
    batch = Padded()
    expected = theirs(batch, **given)
    loss = ours(batch, {key: value for part in settings for key, value in part.items()})
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    at = batch.logprobs, batch.entropy
    mine, right = (
        torch.autograd.grad(x, at, allow_unused=True, materialize_grads=True) for x in (loss, expected)
    )
    for found, gradient in zip(mine, right):
        assert torch.allclose(found, gradient, rtol=1e-6, atol=1e-9)
    assert right[0].count_nonzero() > 2
