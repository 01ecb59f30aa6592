"""Preference losses that need no reference model. A run that uses only these does not load one.

The formulas are from TRL's CPOTrainer and ORPOTrainer, except that the likelihood of the chosen answer excludes its
prompt.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megalith.config.preferences import DpoConfig
from megalith.rl.preference_losses.answer_pairs import AnswerPairs


def cpo(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return −log σ(β · (log π(chosen) − log π(rejected))) + dpo.cpo_alpha · NLL, [pairs] (CPO, Xu et al. 2024)."""
    margin = pairs.chosen_logps - pairs.rejected_logps
    return -logsigmoid(dpo.beta * margin) + dpo.cpo_alpha * pairs.nll


def simpo(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return −log σ(β · (difference of the answers' mean log π) − γ), [pairs] (SimPO, Meng et al. 2024)."""
    chosen, rejected = _mean_logps(pairs)
    return -logsigmoid(dpo.beta * (chosen - rejected) - dpo.simpo_gamma)


def orpo(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return NLL − β · log σ(log odds(chosen) − log odds(rejected)), [pairs] (ORPO, Hong et al. 2024).

    odds = p / (1 − p), with p = exp(mean log π) of an answer.
    """
    chosen, rejected = _mean_logps(pairs)
    return pairs.nll - dpo.beta * logsigmoid(_log_odds(chosen) - _log_odds(rejected))


def sft(dpo: DpoConfig, pairs: AnswerPairs) -> Tensor:
    """Return the NLL of the chosen answer, [pairs], a term to add to others."""
    return pairs.nll


def _mean_logps(pairs: AnswerPairs) -> tuple[Tensor, Tensor]:
    return pairs.chosen_logps / pairs.chosen_tokens, pairs.rejected_logps / pairs.rejected_tokens


def _log_odds(mean_logps: Tensor) -> Tensor:
    """Return log p − log(1 − p), with p clamped to slightly less than 1."""
    bounded = mean_logps.clamp(max=-torch.finfo(mean_logps.dtype).eps)
    return bounded - (-bounded.expm1()).log()
