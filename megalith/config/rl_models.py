"""Settings of GRPO's and PPO's other models: reward models, a teacher and the critic."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from megalith.config.base import Decides, RequiresSetting, Section

GAE = RequiresSetting("advantage_estimator", "gae", strict=True)


class OtherModels(Section):
    """Reward models that score completions, a teacher, and the critic that estimates advantages. Part of section
    `rl`."""

    decides: ClassVar[Decides] = Decides.UPDATES

    reward_models: Annotated[str | list[str] | None, RequiresSetting("prompts", strict=True)] = None
    """Reward models: runs of `megalith reward`, or Hugging Face folders of a …ForSequenceClassification with one
    label. They have the policy's layout and may have another tokenizer. Or addresses of servers with OpenRLHF's
    protocol, such as http://host:5000/get_reward. In reward_weights they follow reward_funcs."""

    reward_model_timeout: Annotated[PositiveFloat, RequiresSetting("reward_models"), Decides.NOTHING] = 600.0
    """Time limit of a served reward model for the completions of a rollout batch, in seconds."""

    teacher: str | None = None
    """Model that the policy learns from: teacher_coef × (log π_teacher − log π) of each token is added to its
    advantage. A run, a Hugging Face folder, the address of a server (teacher_engine), or without_adapters."""

    teacher_coef: Annotated[PositiveFloat, RequiresSetting("teacher")] = 1.0
    """Weight of the teacher in the advantages."""

    teacher_engine: Annotated[Literal["vllm", "sglang"], RequiresSetting("teacher"), Decides.NOTHING] = "vllm"
    """Program that serves a teacher whose name is an address, such as http://host:8000."""

    teacher_timeout: Annotated[PositiveFloat, RequiresSetting("teacher"), Decides.NOTHING] = 600.0
    """Time limit of a served teacher for the log-probabilities of a rollout batch, in seconds."""

    critic: Annotated[str | None, GAE] = None
    """Initial weights of the critic: a run or Hugging Face folder of a language model or reward model. Default: the
    policy's."""

    critic_lr: Annotated[PositiveFloat | None, GAE] = None
    """Learning rate of the critic, with the policy's schedule. Default: optim.lr."""

    gamma: Annotated[float, Field(gt=0, le=1), GAE] = 1.0
    """Discount of later rewards per token."""

    lam: Annotated[float, Field(ge=0, le=1), GAE] = 1.0
    """λ of generalized advantage estimation: 0 uses only the critic's next value, 1 the sum of the rewards."""

    cliprange_value: Annotated[PositiveFloat | None, GAE] = 0.5
    """Distance from the values before the rollout batch's first update at which the critic's loss is clipped. null: no
    clip."""

    @property
    def uses_critic(self) -> bool:
        """True if a critic estimates the advantages."""
        return self.advantage_estimator == "gae"

    @property
    def reward_model_paths(self) -> list[str]:
        """Paths and addresses of the reward models."""
        return [self.reward_models] if isinstance(self.reward_models, str) else list(self.reward_models or ())
