"""Scores of log ratios under divergences other than the reverse KL (f-DPO, Wang et al. 2024), as in TRL."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.config.preferences import DpoConfig

LARGEST_EXPONENT = 80.0  # exp of it is finite in float32


def divergence_scores(dpo: DpoConfig, log_ratios: Tensor) -> Tensor:
    """Return f′(t) − f′(1) for the ratios t = π / π_ref of answers, given as log t.

    | dpo.f_divergence_type | f′(t) − f′(1) |
    |---|---|
    | reverse_kl | log t |
    | forward_kl | 1 − 1 / t |
    | js_divergence | log(2t / (1 + t)) |
    | alpha_divergence | (t^(α − 1) − 1) / (α − 1), with α = dpo.f_alpha_divergence_coef |
    """
    if dpo.f_divergence_type == "forward_kl":
        return 1 - (-log_ratios).exp()
    if dpo.f_divergence_type == "js_divergence":
        return math.log(2) + logsigmoid(log_ratios)
    power = dpo.f_alpha_divergence_coef - 1
    if dpo.f_divergence_type == "reverse_kl" or abs(power) < 1e-6:
        return log_ratios
    return ((power * log_ratios).clamp(max=LARGEST_EXPONENT).exp() - 1) / power
