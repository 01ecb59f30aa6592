"""Dynamic fine-tuning (DFT, Wu et al. 2025): weights the cross-entropy of each token by the token's probability.

The probability has no gradient, so that unlikely tokens do not dominate the updates:

    loss of a token = −p · log p,    p without gradient
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megalith.data.batch import Batch
from megalith.models.loss import Loss


class DynamicFineTuning(Loss):
    """The DFT loss of a step. The token weights (mask and denominator) are the same as in the ordinary
    cross-entropy.
    """

    def __init__(self, cross_entropy: Loss):
        self._cross_entropy = cross_entropy

    def denominator(self, batch: Batch) -> Tensor | float:
        return self._cross_entropy.denominator(batch)

    def logged_weight(self, batch: Batch) -> float | None:
        return self._cross_entropy.logged_weight(batch)

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        return {"weights": self._cross_entropy.weights(batch)}

    def token_losses(self, logprobs: Tensor, entropy: Tensor | None, tokens: Mapping[str, Tensor]) -> Tensor:
        return -tokens["weights"] * logprobs.exp().detach() * logprobs
