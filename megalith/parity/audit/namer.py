"""The order in which an audit tries causes for a step's differences, simplest first.

Each cause predicts the gradients that its fault would give. It is named only if the prediction equals every recorded
gradient within the precision of the job. Departures that no cause predicts are reported as unexplained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.parity.audit.changed_causes import RunChanged, name_changed_batch, name_changed_model
from megalith.parity.audit.combinations import name_combination, name_not_zeroed
from megalith.parity.audit.evidence import StepEvidence
from megalith.parity.audit.factors import name_rank_factors
from megalith.parity.audit.findings import Finding, find, find_in
from megalith.parity.audit.partial_causes import name_parts
from megalith.parity.audit.token_weights import name_token_weights
from megalith.parity.audit.unexplained import name_dropout, name_unexplained


def name_causes(
    e: StepEvidence,
    previous: StepEvidence | None,
    *,
    model: ModelConfig,
    rerun: RunChanged,
    token_gradients: Callable[[], Iterator[Tensor]],
    tied: Mapping[str, str],
    losses_depart: bool,
) -> list[Finding]:
    """Return the causes of a step's wrong gradients, at least one.

    Args:
        e: evidence of the step.
        previous: evidence of the step before, or None.
        model: the reference's configuration.
        rerun: function that computes the reference with a change.
        token_gradients: function that yields each token's gradients, in the order of the micro-batches.
        tied: name of the embedding by the name of the output matrix, if config.json ties them; otherwise empty.
        losses_depart: recorded losses differ from the reference's.
    """
    if not torch.isfinite(e.expected).all():
        return [find(e, "not-finite", "those of the reference too: weights are not finite")]
    if not torch.isfinite(e.observed).all():
        return [find_in(e, "not-finite", ~torch.isfinite(e.observed).all(1))]
    return (
        name_combination(e, e.exact, only_factors=True)
        or name_not_zeroed(e, previous)
        or name_combination(e, e.exact)
        or name_rank_factors(e)
        or name_parts(e, tied)
        or name_dropout(e)
        or name_changed_batch(e, rerun)
        or name_changed_model(e, model, rerun)
        or name_token_weights(e, token_gradients)
        or name_unexplained(e, losses_depart)
    )
