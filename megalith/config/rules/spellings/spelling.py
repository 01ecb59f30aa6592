"""A spelling of the objective by another system, and what several spellings depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Rl = Mapping[str, Any]
Meaning = Callable[[Any, Rl], dict[str, Any]]


def _no_settings(value: Any, rl: Rl) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class ObjectiveSpelling:
    """A spelling whose meaning depends on other settings of the objective."""

    path: str
    """The main setting."""
    takes: type[bool] | tuple[str, ...] | None
    """Accepted values; None: those of the setting. Null is always accepted."""
    settings: Meaning
    """Settings by name in the section `rl`; None removes a setting."""
    defaults: Meaning = _no_settings
    null_counts: bool = False
    """Null sets something; otherwise it is the same as omitting the spelling."""
    note: str = ""
    """Text on the reference page."""


RATIO_CLIP = 0.2  # verl and NeMo-RL, lower and upper
EPSILON = 1e-6  # verl and NeMo-RL; added to the standard deviation of rewards
PER_SEQUENCE = "seq-mean-token-mean"


def is_cispo(rl: Rl) -> bool:
    return rl.get("loss_type") == "cispo"


def is_per_sequence(rl: Rl) -> bool:
    return rl.get("importance_sampling_level") == "sequence"
