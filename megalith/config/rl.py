"""Reinforcement learning: how rewards become a gradient. Names and defaults are TRL's where TRL has the setting."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from megalith.config.base import Decides, Needs, Section


class RlConfig(Section):
    """GRPO and its kin: rollouts, advantages, objective (docs/grpo_objective.md has the formulas)."""

    decides: ClassVar[Decides] = Decides.UPDATES
    needs: ClassVar[Needs] = Needs("rollouts")

    rollouts: Annotated[str | list[str] | None, Decides.SAMPLES] = None
    """Files of rollouts to train on, JSONL or .jsonl.zst, in this order (`megalith grpo`)."""

    rollout_version: Annotated[NonNegativeInt | None, Decides.NOTHING] = None
    """The step of the weights that sampled the rollouts; those of another are refused. Absent: any."""

    packing: bool = False
    """Packs several completions with their prompts into a row of data.seq_length tokens, attention kept apart."""

    temperature: PositiveFloat = 1.0
    """That of the rollouts: log-probabilities are those of logits / temperature."""

    num_generations: PositiveInt = 8
    """Completions of a prompt: a group. A rollout batch is of whole groups."""

    num_iterations: PositiveInt = 1
    """How often each rollout batch is trained on."""

    mini_batches: PositiveInt = 1
    """Optimizer steps that a rollout batch is cut into: it has so many global batches."""

    old_logprobs: Literal["policy", "rollout"] = "policy"
    """What the ratio is taken to: the weights before the rollout batch, or the log-probabilities in the file."""

    reward_weights: list[float] | None = None
    """A weight for each reward of the file, in its order; absent: 1 each. The weighted sum is normalised."""

    advantage_baseline: Literal["group", "leave_one_out"] = "group"
    """What is taken off a reward: its group's mean, or the mean of the others in the group."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Advantages are divided by the standard deviation of the group or of the rollout batch, + 1e-4."""

    filter_zero_std: bool = False
    """Leaves out groups whose rewards are all equal, for they have no gradient; how many is said at the start."""

    mask_truncated_completions: bool = False
    """Takes completions that were cut off at their longest out of the loss, but not out of the baseline."""

    max_completion_length: PositiveInt = 256
    """The longest completion: the divisor of dr_grpo, and where the overlong penalty is 1."""

    overlong_buffer_len: NonNegativeInt = 0
    """DAPO: over so many last tokens before max_completion_length a penalty grows from 0; 0: none."""

    overlong_penalty_factor: Annotated[NonNegativeFloat, Needs("overlong_buffer_len", above=0)] = 1.0
    """DAPO: the penalty at max_completion_length."""

    loss_type: Literal["dapo", "grpo", "dr_grpo", "luspo", "cispo"] = "dapo"
    """Aggregation: mean of tokens (dapo, cispo), of sequences' means (grpo), of their sums (luspo), or a constant
    divisor (dr_grpo). cispo weighs log-probabilities by a capped ratio without a gradient in place of PPO's clip."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """The ratio of a token, or the geometric mean over its sequence (GSPO)."""

    epsilon: NonNegativeFloat = 0.2
    """The ratio is clipped at 1 − epsilon."""

    epsilon_high: NonNegativeFloat | None = None
    """And at 1 + epsilon_high; absent: epsilon. With cispo the cap of the ratio itself."""

    delta: PositiveFloat | None = None
    """Caps the ratio in the branch without a clip too (INTELLECT-2); above 1 + epsilon_high."""

    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: where the advantage is negative the loss is at most so many times it."""

    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference: the weights that the run began from. 0: there is none."""

    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Needs("beta", above=0)] = "k3"
    """With d = log π_ref − log π: −d, d² / 2, or exp(d) − d − 1."""

    use_bias_correction_kl: Annotated[bool, Needs("beta", above=0)] = True
    """Multiplies the KL by the token's ratio to the old policy: its gradient is then unbiased."""

    entropy_coef: float = 0.0
    """Weight of the mean entropy of tokens, which is taken off the loss."""

    log_entropy: Annotated[bool, Decides.NOTHING] = True
    """Logs the entropy even where the loss does not use it."""

    vllm_importance_sampling_correction: bool = True
    """Weighs losses by exp(log π_old − log π_rollout), where the file has the rollout's log-probabilities."""

    vllm_importance_sampling_mode: Annotated[
        Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"],
        Needs("vllm_importance_sampling_correction", True),
    ] = "sequence_mask"
    """Of each token or of the whole sequence; beyond the bounds the weight is the bound, or 0."""

    vllm_importance_sampling_clip_max: Annotated[
        PositiveFloat | None, Needs("vllm_importance_sampling_correction", True)
    ] = 3.0
    """The upper bound of that weight."""

    vllm_importance_sampling_clip_min: Annotated[
        NonNegativeFloat | None, Needs("vllm_importance_sampling_correction", True)
    ] = None
    """The lower bound of that weight."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _refuse_bnpo(cls, value: Any) -> Any:
        if value == "bnpo":
            text = (
                "it divides by each micro-batch's tokens, so the run would depend on the layout; choose dapo"
            )
            raise PydanticCustomError("bnpo", text)
        return value

    @property
    def files(self) -> list[str]:
        """The files of rollouts."""
        return [self.rollouts] if isinstance(self.rollouts, str) else list(self.rollouts or ())

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps made with a rollout batch."""
        return self.num_iterations * self.mini_batches

    @property
    def upper_epsilon(self) -> float:
        """How far above 1 a ratio is clipped; with cispo, where."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def computes_old(self) -> bool:
        """Whether the old log-probabilities need passes of their own: a batch's only step is by what they would be."""
        return self.old_logprobs == "policy" and self.steps_per_batch > 1
