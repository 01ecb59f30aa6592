"""Settings of advantages (docs/grpo_objective.md). Names and defaults are TRL's where TRL has the setting."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megalith.config.base import Decides, RequiresSetting, Section


class AdvantageSettings(Section):
    """Advantages from rewards. Part of section `rl`."""

    decides: ClassVar[Decides] = Decides.UPDATES
    requires: ClassVar[RequiresSetting] = RequiresSetting("prompts_or_rollouts")

    reward_weights: list[float] | None = None
    """Weight of each reward, in order. Default: 1 each. Advantages are computed from the weighted sum."""

    advantage_estimator: str = "group"
    """Advantages from the rewards: group (relative to the group; see advantage_baseline and scale_rewards), rloo,
    reinforce_plus_plus, reinforce_plus_plus_baseline, opo, gpg, grpo_passk (with scale_rewards), gdpo, or
    path.py:function."""

    advantage_baseline: Literal["group", "leave_one_out"] = "group"
    """Baseline of the advantage: the mean of the group, or of the other completions in the group."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group or of the rollout batch, + advantage_epsilon."""

    advantage_epsilon: NonNegativeFloat = 1e-4
    """Added to the standard deviation that divides advantages: 1e-4 in TRL, 1e-6 in verl and NeMo-RL."""

    advantage_deviation: Literal["group", "others"] = "group"
    """With scale_rewards group: standard deviation of the whole group, or of the other completions in it
    where that is not 0 (NeMo-RL)."""

    filter_zero_std: bool = False
    """Exclude groups with identical rewards, which have no gradient, from the loss."""

    mask_truncated_completions: bool = False
    """Exclude truncated completions from the loss, but not from the baseline."""

    max_completion_length: PositiveInt = 256
    """Maximum number of completion tokens. It is also the divisor of dr_grpo and the length with the full
    overlong penalty."""

    reward_clip_range: list[float] | None = None
    """Minimum and maximum of a completion's weighted sum of rewards. Default: no bounds."""

    whiten_advantages: bool = False
    """Subtract the rollout batch's mean from the advantages and divide them by its standard deviation plus
    advantage_epsilon."""

    use_kl_in_reward: Annotated[bool, RequiresSetting("beta", greater_than=0, strict=True)] = False
    """Subtract beta times a completion's sum of log π_old − log π_ref from its reward, instead of adding a KL to the
    loss (RLOO, verl)."""

    overlong_buffer_len: NonNegativeInt = 0
    """DAPO: number of tokens before max_completion_length over which a length penalty grows from 0. 0: no penalty."""

    overlong_penalty_factor: Annotated[
        NonNegativeFloat, RequiresSetting("overlong_buffer_len", greater_than=0)
    ] = 1.0
    """DAPO: the penalty at max_completion_length."""

    @field_validator("reward_clip_range")
    @classmethod
    def _check_range(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and (len(value) != 2 or value[0] > value[1]):
            raise PydanticCustomError("range", "write a minimum and a maximum, such as [-1, 1]")
        return value
