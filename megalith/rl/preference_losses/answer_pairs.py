"""The inputs of preference losses: per-pair sums over the answers' tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AnswerPairs:
    """The pairs of a micro-batch, float32 [pairs] per field. Gradients flow back to the log-probabilities."""

    chosen_logps: Tensor
    """Σ log π over the tokens of the chosen answer."""
    rejected_logps: Tensor
    chosen_ratios: Tensor
    """Σ (log π − log π_ref) over the tokens of the chosen answer; Σ log π without a reference."""
    rejected_ratios: Tensor
    chosen_tokens: Tensor
    """Number of tokens of the chosen answer, at least 1."""
    rejected_tokens: Tensor
    pairs_per_token: Tensor
    """Number of pairs in the step divided by the number of tokens in their chosen answers, a scalar."""
    partners: Tensor | None = None
    """Values of other pairs of the step, without gradient, [3, pairs]: the reference's margin with the rank of
    this pair's margin, the rejected log ratio with the rank of its chosen one, and the chosen log ratio with the rank
    of its rejected one. None unless dpo.sorts_pairs."""
    scores: tuple[Tensor, Tensor] | None = None
    """Scores of the chosen and rejected log ratios (divergences.py). None: the log ratios."""

    @property
    def margin(self) -> Tensor:
        """Margin h: the score of the chosen answer's log ratio minus the score of the rejected answer's."""
        chosen, rejected = self.scores or (self.chosen_ratios, self.rejected_ratios)
        return chosen - rejected

    @property
    def mean_margin(self) -> Tensor:
        """Margin between the scores after each is divided by its answer's number of tokens."""
        chosen, rejected = self.scores or (self.chosen_ratios, self.rejected_ratios)
        return chosen / self.chosen_tokens - rejected / self.rejected_tokens

    @property
    def nll(self) -> Tensor:
        """Negative log-likelihood of the chosen answers. It is scaled so that its mean over pairs equals the mean over
        their tokens.
        """
        return -self.chosen_logps * self.pairs_per_token
