"""Settings of DPO, KTO and reward models. Names and defaults are TRL's where TRL has the setting."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megalith.config.base import Decides, RequiresSetting
from megalith.config.extensions import PREFERENCE_LOSSES, is_extension
from megalith.config.fine_tuning import ChatConfig
from megalith.config.reference_sync import ReferenceSync
from megalith.errors import nearest_of


class RewardConfig(ChatConfig):
    """Training of a reward model (`megalith reward`; docs/reward_models.md). Names are TRL's."""

    name: ClassVar[str] = "reward"

    packing: bool = False
    """Pack several answers into a row, with separate attention. The chosen answers of pairs share one row, their
    rejected answers another. Off: one padded answer per row."""

    loss_type: Literal["bradley_terry", "ordinal", "mse", "bce"] = "bradley_terry"
    """bradley_terry: the chosen answer of a pair gets the higher score. ordinal: pairs with a grade
    from 0 to 1 of how much the first answer is preferred. mse and bce read single answers with a label: the square of
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
        """Format of the records, one of SAMPLE_FORMS in data/chat/sample_forms.py."""
        forms = {"bradley_terry": "pairs with a margin", "ordinal": "pairs with a preference"}
        return forms.get(self.loss_type, "scored answers")

    @property
    def rows_per_sample(self) -> int:
        """Number of rows per sample, which is 2 for a pair."""
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
    """kto compares an answer's log-ratio to the reference with an estimate of the KL divergence, and apo_zero_unpaired
    compares it with 0. bco is the cross-entropy of a classifier, shifted by the mean log-ratio of all answers of the
    run so far."""

    beta: Annotated[PositiveFloat, Decides.UPDATES] = 0.1
    """Strength of the pull towards the reference model. With larger values, the policy stays closer to it."""

    desirable_weight: Annotated[NonNegativeFloat, Decides.UPDATES] = 1.0
    """Weight of the losses of desirable answers."""

    undesirable_weight: Annotated[NonNegativeFloat, Decides.UPDATES] = 1.0
    """Weight of the losses of undesirable answers."""

    @property
    def record_form(self) -> str:
        """Format of the records, one of SAMPLE_FORMS in data/chat/sample_forms.py."""
        return "marked answers with another" if self.needs_kl else "marked answers"

    @property
    def needs_kl(self) -> bool:
        """True if the loss compares with the KL divergence, which mismatched answers estimate."""
        return self.loss_type == "kto"


REFERENCE_FREE = {"cpo", "simpo", "orpo", "sft"}
"""Values of dpo.loss_type that read no reference model."""
OF_MARGINS = {"sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "exo_pair", "discopop"}
"""Values of dpo.loss_type that read the difference of the answers' scores, which f_divergence_type defines."""
SORTED = {"aot", "aot_unpaired"}
"""Values of dpo.loss_type that compare the pairs of a step by rank."""


class DpoConfig(ChatConfig, ReferenceSync):
    """Direct preference optimization (`megalith dpo`; docs/preference.md has the formulas). Names are TRL's."""

    name: ClassVar[str] = "dpo"
    record_form: ClassVar[str] = "pairs"

    packing: bool = False
    """Pack the chosen answers of several pairs into a row, and their rejected answers into another. Off: one
    padded answer per row."""

    loss_type: Annotated[str | list[str], Decides.UPDATES] = "sigmoid"
    """Loss of a pair, or several that are added: sigmoid, hinge, ipo, robust, sigmoid_norm, exo_pair, discopop,
    nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, aot, aot_unpaired; without a reference model cpo, simpo,
    orpo, sft. Or path.py:function."""

    loss_weights: Annotated[list[float] | None, Decides.UPDATES] = None
    """Weight of each loss in loss_type. Default: 1 each."""

    beta: Annotated[PositiveFloat, Decides.UPDATES] = 0.1
    """Strength of the pull towards the reference model. With larger values, the policy stays closer to it."""

    label_smoothing: Annotated[
        NonNegativeFloat,
        Field(lt=0.5),
        RequiresSetting("loss_type", "sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"),
        Decides.UPDATES,
    ] = 0.0
    """Assumed probability that a preference label is wrong."""

    simpo_gamma: Annotated[float, RequiresSetting("loss_type", "simpo"), Decides.UPDATES] = 0.5
    """Margin that simpo subtracts from beta times the difference of the mean log-probabilities."""

    cpo_alpha: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "cpo"), Decides.UPDATES] = 1.0
    """Weight of the chosen answers' negative log-likelihood in cpo."""

    discopop_tau: Annotated[PositiveFloat, RequiresSetting("loss_type", "discopop"), Decides.UPDATES] = 0.05
    """Temperature of the mixture in discopop."""

    f_divergence_type: Annotated[
        Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"], Decides.UPDATES
    ] = "reverse_kl"
    """Divergence from the reference that the losses sigmoid, hinge, ipo, robust, sigmoid_norm, exo_pair and discopop
    penalize (f-DPO)."""

    f_alpha_divergence_coef: Annotated[
        float, RequiresSetting("f_divergence_type", "alpha_divergence"), Decides.UPDATES
    ] = 0.5
    """Order of alpha_divergence. 1: the reverse KL."""

    use_weighting: Annotated[bool, Decides.UPDATES] = False
    """Weight pairs by how likely the policy would sample their answers (WPO). Takes one more forward pass of the
    policy."""

    ld_alpha: Annotated[float | None, Field(ge=0, le=1), Decides.UPDATES] = None
    """Weight of the tokens of an answer beyond the length of its pair's shorter answer (LD-DPO). Absent: 1."""

    @field_validator("loss_type")
    @classmethod
    def _check_losses(cls, value: str | list[str]) -> str | list[str]:
        for name in value if isinstance(value, list) else [value]:
            if not is_extension(name, PREFERENCE_LOSSES):
                text = f"{name!r}: write a built-in name or path.py:function{nearest_of(name, PREFERENCE_LOSSES)}"
                raise PydanticCustomError("extension", text.replace("{", "{{").replace("}", "}}"))
        if not value:
            raise PydanticCustomError("empty", "name at least one loss")
        return value

    @property
    def losses(self) -> dict[str, float]:
        """Weight of each loss, by its name."""
        names = self.loss_type if isinstance(self.loss_type, list) else [self.loss_type]
        return dict(zip(names, self.loss_weights or [1.0] * len(names)))

    @property
    def needs_reference(self) -> bool:
        """True if a loss needs the reference's log-probabilities."""
        return not self.losses.keys() <= REFERENCE_FREE

    @property
    def sorts_pairs(self) -> bool:
        """True if a loss compares the pairs of a step by rank."""
        return not self.losses.keys().isdisjoint(SORTED)

    @property
    def uses_mean_rewards(self) -> bool:
        """True if rewards are β times the mean log-probability over an answer's tokens, as in SimPO and ORPO."""
        return not self.needs_reference and not self.losses.keys().isdisjoint({"simpo", "orpo"})
