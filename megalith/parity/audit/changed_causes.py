"""Causes that change the computation: labels, masks, positions and model settings.

For each cause, the step is rerun with the change. The cause is named if the result equals the recorded gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalith.config import ModelConfig
from megalith.parity.audit import tokens as changes
from megalith.parity.audit.combinations import combinations, name_combination
from megalith.parity.audit.evidence import Change, StepEvidence, Sums
from megalith.parity.audit.findings import Finding, find

CHANGES: dict[str, Change] = {
    "labels-shifted-twice": changes.shift_labels_again,
    "labels-not-shifted": changes.leave_labels_unshifted,
    "loss-mask-ignored": changes.count_all_tokens,
    "padding-in-loss": changes.count_padding,
    "attention-mask-ignored": changes.attend_to_padding,
    "attends-to-future": changes.attend_to_future,
    "position-ids-ignored": changes.ignore_position_ids,
    "attends-across-documents": changes.attend_across_documents,
    "documents-ignored": changes.ignore_documents,
}
"""Change of the batch that has the same effect as each fault."""

SETTINGS: tuple[dict[str, Any], ...] = (
    {"rotary_base": 10000.0},
    {"rope_scaling": None},
    {"window_size": None},
    {"final_logit_softcapping": None},
    {"attn_logit_softcapping": None},
    {"norm_epsilon": 1e-5},
    {"norm_epsilon": 1e-6},
    {"embedding_multiplier": 1.0},
    {"logits_scaling": 1.0},
    {"scale_embeddings": False},
)
"""Changes of the model's configuration, each for one forgotten setting of config.json."""

RunChanged = Callable[[Change | None, ModelConfig | None], Sums]
"""Function that reruns the step with a change of the batches or another configuration; None: unchanged."""


def name_changed_batch(e: StepEvidence, rerun: RunChanged) -> list[Finding]:
    """Return the causes if a change of the batch explains the gradients."""
    batches = e.batches
    for cause, change in CHANGES.items():
        if all(changes.same_batch(change(b), b) for of_rank in batches for b in of_rank):
            continue
        sums = rerun(change, None)
        if _is_new(e, sums) and (findings := name_combination(e, sums, cause)):
            return findings
    return []


def name_changed_model(e: StepEvidence, model: ModelConfig, rerun: RunChanged) -> list[Finding]:
    """Return the causes if a change of the model explains the gradients."""
    for setting in SETTINGS:
        [(name, value)] = setting.items()
        if not hasattr(model, name) or getattr(model, name) in (value, None):
            continue
        sums = rerun(None, model.model_copy(update=setting))
        details = f"{name} {value} instead of {getattr(model, name)}"
        if _is_new(e, sums) and (findings := name_combination(e, sums, "model-setting")):
            return [find(e, "model-setting", details), *findings[1:]]
    return []


def _is_new(e: StepEvidence, sums: Sums) -> bool:
    """Return True if a change affects gradients by more than the precision of the job."""
    predicted = e.combine(next(combinations(e, sums.counts))[1], sums)
    right = e.combine(e.weights_of_mean(), e.exact)
    return bool((e.errors(right, predicted) > e.bound).any())
