"""Settings of reward models and of KTO. Names and defaults are TRL's where TRL has the setting."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from megalith.config.base import Decides, RequiresSetting
from megalith.config.reference_sync import ReferenceSync
from megalith.config.rl import ChatConfig


class RewardConfig(ChatConfig):
    """Training of a reward model (`megalith reward`; docs/reward_models.md). Names are TRL's."""

    name: ClassVar[str] = "reward"

    packing: bool = False
    """Pack several answers into a row, with separate attention: of pairs the chosen ones into one row and the
    rejected ones into another. Off: one padded answer per row."""

    loss_type: Literal["bradley_terry", "ordinal", "mse", "bce"] = "bradley_terry"
    """bradley_terry: the chosen answer of a pair gets the higher score. ordinal: pairs with graded feedback, by how
    much the first answer is preferred, from 0 to 1. mse and bce read single answers with a label: the square of
    score − label, or the cross-entropy of σ(score) with a label from 0 to 1."""

    center_rewards_coefficient: Annotated[
        NonNegativeFloat | None, RequiresSetting("loss_type", "bradley_terry", "ordinal"), Decides.UPDATES
    ] = None
    """Weight of the square of a pair's summed scores, which keeps scores around 0."""

    step_separator: Annotated[str, Field(min_length=1), RequiresSetting("loss_type", "mse", "bce")] = "\n"
    """Text after each step of a record with steps (`completions` and `labels`). The last token of the separator
    gets the step's score: a process reward model."""

    @property
    def record_form(self) -> str:
        """Form of the records: SAMPLE_FORMS of data/chat/sample_forms.py."""
        forms = {"bradley_terry": "pairs with a margin", "ordinal": "pairs with a preference"}
        return forms.get(self.loss_type, "scored answers")

    @property
    def rows_per_sample(self) -> int:
        """Rows of a sample: a pair has two."""
        return 2 if self.compares_pairs else 1

    @property
    def compares_pairs(self) -> bool:
        """True if the loss compares the answers of pairs."""
        return self.loss_type in ("bradley_terry", "ordinal")


class KtoConfig(ChatConfig, ReferenceSync):
    """Training on answers marked as desirable or not (`megalith kto`; docs/kto.md). Names are TRL's."""

    name: ClassVar[str] = "kto"

    packing: bool = False
    """Pack several answers into a row, with separate attention. Off: one padded answer per row."""

    loss_type: Annotated[Literal["kto", "apo_zero_unpaired", "bco"], Decides.SAMPLES] = "kto"
    """kto compares an answer's log-ratio to the reference with an estimate of the KL divergence, apo_zero_unpaired
    with 0. bco is the cross-entropy of a classifier, with the mean log-ratio of all answers of the run so far as
    shift."""

    beta: Annotated[PositiveFloat, Decides.UPDATES] = 0.1
    """Strength of the pull towards the reference: larger stays closer to it."""

    desirable_weight: Annotated[NonNegativeFloat, Decides.UPDATES] = 1.0
    """Weight of the losses of desirable answers."""

    undesirable_weight: Annotated[NonNegativeFloat, Decides.UPDATES] = 1.0
    """Weight of the losses of undesirable answers."""

    @property
    def record_form(self) -> str:
        """Form of the records: SAMPLE_FORMS of data/chat/sample_forms.py."""
        return "marked answers with another" if self.needs_kl else "marked answers"

    @property
    def needs_kl(self) -> bool:
        """True if the loss compares with the KL divergence, which mismatched answers estimate."""
        return self.loss_type == "kto"
