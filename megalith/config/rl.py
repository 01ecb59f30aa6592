"""Settings of GRPO and related methods: section `rl`.

Names and defaults are TRL's where TRL has the setting.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megalith.config.base import Decides, RequiresSetting
from megalith.config.extensions import ADVANTAGE_ESTIMATORS, LOSSES, is_extension
from megalith.config.reference_sync import ReferenceSync
from megalith.config.rl_advantages import AdvantageSettings
from megalith.config.rl_engines import EngineSettings
from megalith.config.rl_models import OtherModels
from megalith.config.rl_policy_loss import PolicyLossSettings
from megalith.config.rl_rollouts import RolloutSettings
from megalith.config.rl_speculation import SpeculationSettings
from megalith.config.rl_tools import ToolSettings
from megalith.errors import nearest_of

OTHER_SPELLINGS: dict[str, dict[str, Any]] = {
    "top_p": {"None": 1.0},
    "top_k": {"None": 0, "-1": 0},
    "min_p": {"None": 0.0},
    "repetition_penalty": {"None": 1.0},
    "presence_penalty": {"None": 0.0},
    "frequency_penalty": {"None": 0.0},
    "scale_rewards": {"True": "group", "False": "none"},
    "router_replay": {"R3": "policy", "disabled": "none", "None": "none"},
}


class RlConfig(
    PolicyLossSettings,
    AdvantageSettings,
    EngineSettings,
    RolloutSettings,
    ToolSettings,
    OtherModels,
    SpeculationSettings,
    ReferenceSync,
):
    """GRPO and related methods: rollouts, advantages, objective (docs/grpo.md, docs/grpo_objective.md)."""

    decides: ClassVar[Decides] = Decides.UPDATES
    requires: ClassVar[RequiresSetting] = RequiresSetting("prompts_or_rollouts")

    packing: bool = False
    """Pack several completions with their prompts into a row of data.seq_length tokens, with separate attention."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of the rollouts. Log-probabilities are those of logits / temperature."""

    num_generations: PositiveInt = 8
    """Completions per prompt (the group size). A rollout batch has whole groups."""

    num_iterations: PositiveInt = 1
    """Times that each rollout batch is trained on."""

    mini_batches: PositiveInt = 1
    """Optimizer steps per pass over a rollout batch, each on train.global_batch_size completions."""

    exact: Annotated[bool, RequiresSetting("prompts"), Decides.NOTHING] = False
    """Use the same batch-invariant operators in the trainer and in Megalith's own engine, so that both have the same
    log-probabilities bit for bit, and end the run if any differs (docs/exactness.md). Slower."""

    old_logprobs: Literal["policy", "rollout"] = "policy"
    """Denominator of the policy ratio (π_old). policy: the trainer's policy before the first step on the rollout batch.
    rollout: the engine that sampled the rollouts."""

    router_replay: Literal["none", "policy", "all"] = "none"
    """Replay the experts that the engine chose while sampling: in forward passes of the policy, or of the policy and
    the reference model (`all`). For models with experts."""

    @field_validator("loss_type", "advantage_estimator")
    @classmethod
    def _check_extension(cls, value: str, info: ValidationInfo) -> str:
        built_in = {"loss_type": LOSSES, "advantage_estimator": ADVANTAGE_ESTIMATORS}[info.field_name]
        if not is_extension(value, built_in):
            text = f"write a built-in name or path.py:object{nearest_of(value, built_in)}"
            raise PydanticCustomError("extension", text.replace("{", "{{").replace("}", "}}"))
        return value

    @field_validator(*OTHER_SPELLINGS, mode="before")
    @classmethod
    def _read_other_spellings(cls, value: Any, info: ValidationInfo) -> Any:
        """Map values of other systems: null and −1 for off (TRL, NeMo-RL, verl), TRL's booleans and verl's modes."""
        return OTHER_SPELLINGS[info.field_name].get(str(value), value)

    @property
    def num_eval_generations(self) -> int:
        """Completions per held-out prompt."""
        return self.num_generations_eval or self.num_generations

    def drift_limit(self, precision: str) -> float:
        """Return max_drift, or its default for this train.precision; 1, no drift at all, with `exact`."""
        if self.exact:
            return 1.0
        return self.max_drift or (1.002 if precision == "fp32" else 1.1)

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.num_iterations * self.mini_batches

    @property
    def counts_masked_sequences(self) -> bool:
        """Value of count_masked_sequences. Default: true unless filter_zero_std is set."""
        if self.count_masked_sequences is None:
            return not self.filter_zero_std
        return self.count_masked_sequences

    @property
    def corrects_batches(self) -> bool:
        """True if the log-probabilities of a rollout batch are corrected before training on it.

        This is so if rollout_rs or rollout_is_batch_normalize applies and the old policy's log-probabilities come from
        the policy, not from the engine.
        """
        return self.old_logprobs == "policy" and (self.rollout_rs is not None or self.normalizes_mismatch)

    @property
    def replays_routes(self) -> bool:
        """True if the trainer's routers replay the experts that the engine chose."""
        return self.router_replay != "none"

    @property
    def interpolates_old_logprobs(self) -> bool:
        """True if the old policy is interpolated between the rollouts' and the current policy."""
        return self.use_decoupled_loss and self.prox_logp_method == "loglinear" and self.steps_per_batch > 1

    @property
    def needs_old_logprobs_pass(self) -> bool:
        """True if the old log-probabilities need separate forward passes."""
        return (
            self.old_logprobs == "policy"
            and (self.steps_per_batch > 1 or self.use_kl_in_reward or self.corrects_batches)
            and not self.interpolates_old_logprobs
        )
