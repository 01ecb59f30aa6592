"""Post-training: chat data, by answers or by preferences, and reinforcement learning.

How records become sequences, what is learned of them, and how rewards become a gradient. Names and defaults are TRL's
where TRL has the setting.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticCustomError

from megalith.config.base import Decides, Needs, Section


class ChatConfig(Section):
    """What fine-tuning has in common, whatever it learns from chat data. Names are TRL's."""

    decides: ClassVar[Decides] = Decides.SAMPLES
    needs: ClassVar[Needs] = Needs("enabled", True)
    name: ClassVar[str]
    """Of the section."""

    enabled: bool = False
    """data's paths name chat data (JSONL, parquet, a saved dataset). The section's command sets it."""

    chat_template_path: str | None = None
    """A Jinja file, or a folder with chat_template.jinja. Absent: the tokenizer's own."""

    truncation_mode: Literal["keep_start", "keep_end", "drop"] | None = None
    """What becomes of a sample longer than data.seq_length. Absent: it is refused."""

    skip_bad_samples: bool = False
    """Samples that cannot be used are counted and left out. Off: the first one ends the run."""

    num_train_epochs: Annotated[PositiveFloat | None, Decides.UPDATES] = None
    """Passes over the samples, in place of train.train_iters."""

    packing: bool = False


class SftConfig(ChatConfig):
    """Supervised fine-tuning on conversations (`megalith sft`). Names are TRL's."""

    name: ClassVar[str] = "sft"

    assistant_only_loss: bool = True
    """Only what the assistant says is learned, not what the others say."""

    completion_only_loss: bool = True
    """Of prompt and completion only the completion is learned."""

    packing: bool = True
    """Several whole samples in a sequence, each attending to itself alone. Off: one, and padding."""


class DpoConfig(ChatConfig):
    """Direct preference optimization (`megalith dpo`; docs/preference.md has the formulas). Names are TRL's."""

    name: ClassVar[str] = "dpo"

    packing: bool = False
    """The chosen answers of several pairs in a sequence, their rejected ones in another. Off: one, and padding."""

    loss_type: Annotated[Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"], Decides.UPDATES] = (
        "sigmoid"
    )
    """What is made of a pair's margin; ipo and sigmoid_norm take the mean of an answer's tokens, not their sum."""

    beta: Annotated[PositiveFloat, Decides.UPDATES] = 0.1
    """How closely the policy keeps to the reference: larger is closer."""

    label_smoothing: Annotated[
        NonNegativeFloat, Field(lt=0.5), Needs("loss_type", "sigmoid", "robust"), Decides.UPDATES
    ] = 0.0
    """How often the choice is taken to be wrong: 0 to 0.5."""


class DistillConfig(Section):
    """Learning from a larger model's predictions (`megalith distill`; docs/distillation.md)."""

    decides: ClassVar[Decides] = Decides.UPDATES
    needs: ClassVar[Needs] = Needs("teacher_or_logits")

    teacher: str | None = None
    """A model of the same vocabulary: a folder of Hugging Face's or Megatron-LM's, or a run. It stays as it is."""

    logits_dir: str | None = None
    """A folder of the teacher's predictions for this run's samples, which `megalith teacher-logits` writes: `distill`
    then reads them, and has no second model."""

    logits_top_k: Annotated[PositiveInt, Needs("logits_dir")] = 64
    """So many of the likeliest entries of the vocabulary are stored after each token; all others count as one."""

    kd_ratio: Annotated[float, Field(ge=0, le=1)] = 0.5
    """α: a token's loss is (1 − α) · cross-entropy + α · T² · divergence."""

    temperature: Annotated[float, Field(ge=0.05, le=100)] = 1.0
    """T: compared are the softmaxes of logits / T. Beyond 100, T² times what fp32 rounds is more than they differ."""

    divergence: Literal["forward_kl", "reverse_kl"] = "forward_kl"
    """forward_kl takes the mean over the teacher's predictions, reverse_kl over the student's own."""

    @property
    def teacher_or_logits(self) -> str | None:
        """distill.logits_dir or distill.teacher, what is learned from."""
        return self.logits_dir or self.teacher


MISMATCH_BOUNDS: dict[str, tuple[float | None, float]] = {
    "token_truncate": (None, 2.0),  # truncated importance sampling; verl, NeMo-RL
    "token_mask": (0.5, 5.0),  # IcePop
    "sequence_truncate": (None, 2.0),  # verl
    "sequence_mask": (None, 3.0),  # TRL
    "geometric_mask": (0.999, 1.002),  # NeMo-RL's seq-mask-tis
    "token_unbounded": (None, math.inf),  # NeMo-RL without a truncation
    "sequence_unbounded": (None, math.inf),
}


SGLANG = "http://127.0.0.1:30000"  # its own default
OTHER_SPELLINGS: dict[str, dict[str, Any]] = {
    "top_p": {"None": 1.0},
    "top_k": {"None": 0, "-1": 0},
    "min_p": {"None": 0.0},
    "scale_rewards": {"True": "group", "False": "none"},
}


class RlConfig(Section):
    """GRPO and its kin: rollouts, advantages, objective (docs/grpo.md; docs/grpo_objective.md has the formulas)."""

    decides: ClassVar[Decides] = Decides.UPDATES
    needs: ClassVar[Needs] = Needs("prompts_or_rollouts")

    prompts: Annotated[str | list[str] | None, Decides.SAMPLES] = None
    """What the policy is asked (`megalith grpo`): JSONL, parquet or a folder of `save_to_disk`, several or with a glob.
    It samples completions, which reward_funcs judge."""

    eval_prompts: Annotated[str | list[str] | None, Needs("prompts", strict=True), Decides.NOTHING] = None
    """Held-out prompts, files like those of prompts. Every train.eval_interval steps and after the last one the weights
    of then answer them, and reward_funcs judge; nothing is learned from them."""

    num_generations_eval: Annotated[PositiveInt | None, Needs("eval_prompts"), Decides.NOTHING] = None
    """Completions of a held-out prompt; absent: num_generations."""

    eval_temperature: Annotated[NonNegativeFloat | None, Needs("eval_prompts"), Decides.NOTHING] = None
    """Theirs; 0: always the likeliest token. Absent: temperature."""

    max_eval_prompts: Annotated[PositiveInt | None, Needs("eval_prompts"), Decides.NOTHING] = None
    """The first so many of the held-out prompts; absent: all."""

    rollouts: Annotated[str | list[str] | None, Decides.SAMPLES] = None
    """Files of rollouts to train on in the place of prompts, JSONL or .jsonl.zst, in this order."""

    reward_funcs: Annotated[str | list[str] | None, Needs("prompts", strict=True)] = None
    """How completions are judged: gsm8k, gsm8k_flexible, countdown, arithmetic, sort, format, length,
    math_verify, or path.py:function with TRL's or verl's signature; several are weighted by reward_weights."""

    reward_workers: Annotated[NonNegativeInt, Needs("prompts"), Decides.NOTHING] = 4
    """Processes on each rank for reward functions of your own; 0: in the trainer's, without a time-out."""

    reward_timeout: Annotated[PositiveFloat, Needs("prompts"), Decides.NOTHING] = 60.0
    """Seconds that a reward function may take for the completions of one prompt."""

    prompt_column: Annotated[str, Needs("prompts"), Decides.SAMPLES] = "prompt"
    """The key of a record that has the prompt: a text, or a list of messages for the tokenizer's chat template."""

    chat_prompts: Annotated[bool, Needs("prompts"), Decides.SAMPLES] = False
    """Makes a prompt that is text the message of a user."""

    shuffle_dataset: Annotated[bool, Needs("prompts"), Decides.SAMPLES] = True
    """Takes the prompts in another order in each pass, by train.seed; else in the files' order."""

    max_prompt_length: Annotated[PositiveInt | None, Needs("prompts"), Decides.SAMPLES] = None
    """The most tokens of a prompt; absent: what data.seq_length + 1 leaves beside max_completion_length."""

    overlong_prompts: Annotated[Literal["refuse", "drop"], Needs("prompts"), Decides.SAMPLES] = "refuse"
    """What becomes of a longer one; how many were dropped is said at the start."""

    top_p: Annotated[float, Needs("prompts")] = 1.0
    """Stays 1: probabilities of tokens cut off by the engine would not be the trainer's, and the ratio biased."""

    top_k: Annotated[NonNegativeInt, Needs("prompts")] = 0
    """Stays 0, likewise."""

    min_p: Annotated[float, Needs("prompts")] = 0.0
    """Stays 0, likewise."""

    generation_rows: Annotated[PositiveInt, Needs("prompts"), Decides.NOTHING] = 256
    """Completions that a rank generates at a time, at most: the rows of its KV cache."""

    engine: Annotated[Literal["own", "vllm", "sglang"], Needs("prompts")] = "own"
    """Who samples: our engine on the trainer's devices, vLLM there or as a server, or a server of SGLang
    (docs/engines.md)."""

    engine_url: Annotated[str | list[str] | None, Needs("engine", "vllm", "sglang"), Decides.NOTHING] = None
    """The server's address, or several servers', as a list or with commas; absent: vLLM samples in the trainer's
    processes, and SGLang's server is http://127.0.0.1:30000."""

    vllm_gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1), Needs("engine", "vllm"), Decides.NOTHING
    ] = 0.3
    """Share of each device that vLLM in the trainer's processes takes while it samples, weights and KV cache."""

    vllm_sleep_level: Annotated[Literal[0, 1, 2], Needs("engine", "vllm"), Decides.NOTHING] = 2
    """While the trainer trains, vLLM in its processes gives memory back: its KV cache, and weights (1: to the host; 2:
    dropped, for an update brings all). 0: nothing."""

    weight_sync_method: Annotated[
        Literal["nccl", "gloo", "checkpoint", "ipc"], Needs("engine", "vllm", "sglang"), Decides.NOTHING
    ] = "nccl"
    """How weights reach a server: broadcast between GPUs, or by the hosts; in a folder that both see; or as ipc, out of
    the memory of a GPU that both use."""

    weight_sync_timeout: Annotated[PositiveFloat, Needs("engine", "vllm", "sglang"), Decides.NOTHING] = 600.0
    """Seconds that a sync with a server may take in all, waiting for one that starts included."""

    generation_timeout: Annotated[PositiveFloat, Needs("engine", "vllm", "sglang"), Decides.NOTHING] = 1800.0
    """Seconds in which a server has to give all completions of a rollout batch."""

    max_staleness: Annotated[
        NonNegativeInt, Needs("engine", "vllm", "sglang", strict=True), Decides.SAMPLES
    ] = 0
    """So many rollout batches a server samples ahead while one is trained on, piece by piece with the newest weights
    (docs/engines.md). Nothing is sampled that would be older at its training, in syncs of the weights (AReaL's bound);
    tokens that are, as of a checkpoint with more, leave the loss (prime-rl drops their completions). 0: on policy."""

    max_resamples: Annotated[NonNegativeInt, Needs("filter_zero_std", True), Needs("prompts")] = 0
    """How often a rollout batch asks further prompts in the place of those whose rewards are all equal (DAPO)."""

    max_drift: Annotated[PositiveFloat | None, Needs("prompts"), Decides.NOTHING] = None
    """The run stops where the mean of exp|log π_trainer − log π_engine| over a step's tokens is above; absent: 1.002
    in fp32, else 1.1."""

    save_rollouts: Annotated[bool, Needs("prompts"), Decides.NOTHING] = False
    """Keeps every rollout batch as OUTPUT/rollouts/batch_%08d.jsonl.zst, to be trained on again as rl.rollouts."""

    log_completions: Annotated[bool, Needs("prompts"), Decides.NOTHING] = False
    """Logs completions of each rollout batch with their rewards, and writes all into OUTPUT/completions.jsonl."""

    num_completions_to_print: Annotated[PositiveInt, Needs("log_completions", True), Decides.NOTHING] = 2
    """How many of them go to the log."""

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
    """Advantages are divided by the standard deviation of the group or of the rollout batch, + advantage_epsilon."""

    advantage_epsilon: NonNegativeFloat = 1e-4
    """Added to that deviation: 1e-4 in TRL, 1e-6 in verl and NeMo-RL."""

    advantage_deviation: Literal["group", "others"] = "group"
    """With scale_rewards group: the deviation of the whole group, or that of the other completions in it where it is
    not 0, as in NeMo-RL."""

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

    count_masked_sequences: bool | None = None
    """Sequences without a token in the loss count in the divisor of grpo, luspo and dr_grpo, as in TRL and verl; not in
    NeMo-RL. Absent: they do, unless filter_zero_std leaves groups out."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """The ratio of a token, or the geometric mean over its sequence (GSPO)."""

    epsilon: NonNegativeFloat = 0.2
    """The ratio is clipped at 1 − epsilon."""

    epsilon_high: NonNegativeFloat | None = None
    """And at 1 + epsilon_high; absent: epsilon. With cispo the cap of the ratio itself, which has to be set: 5 (TRL),
    or 1.28 (clip_ratio_high 0.28 of verl and NeMo-RL)."""

    cispo_ratio_min: Annotated[NonNegativeFloat | None, Needs("loss_type", "cispo", strict=True)] = None
    """The least ratio with cispo: 1 − clip_ratio_low of verl and NeMo-RL. Absent: none, as in TRL."""

    delta: PositiveFloat | None = None
    """Caps the ratio in the branch without a clip too (INTELLECT-2); above 1 + epsilon_high."""

    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: where the advantage is negative the loss is at most so many times it."""

    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference: the weights that the run began from. 0: there is none."""

    kl_estimator: Annotated[Literal["k1", "k2", "k3"], Needs("beta", above=0)] = "k3"
    """With d = log π_ref − log π: −d, d² / 2, or exp(d) − d − 1."""

    use_bias_correction_kl: Annotated[bool, Needs("beta", above=0)] = True
    """Multiplies the KL by the ratio to the old policy: its gradient is then unbiased."""

    kl_score_gradient: Annotated[bool, Needs("beta", above=0)] = False
    """Multiplies the KL by exp(log π − sg[log π]), which is 1 and has the gradient of the sampling (NeMo-RL)."""

    kl_input_clamp_value: Annotated[PositiveFloat | None, Needs("beta", above=0)] = None
    """log π_ref − log π is clamped to ± this (NeMo-RL; 20 in verl's k3). Absent: it is not, as in TRL."""

    kl_output_clamp_value: Annotated[PositiveFloat | None, Needs("beta", above=0)] = None
    """A token's KL is clamped to ± this (NeMo-RL; 10 in verl's k3). Absent: it is not, as in TRL."""

    entropy_coef: float = 0.0
    """Weight of the mean entropy of tokens, which is taken off the loss."""

    entropy_aggregation: Annotated[Literal["tokens", "loss"], Needs("entropy_coef", but=0)] = "tokens"
    """The mean entropy over the step's tokens, whatever loss_type is (TRL), or aggregated as the loss (verl)."""

    log_entropy: Annotated[bool, Decides.NOTHING] = True
    """Logs the entropy even where the loss does not use it."""

    vllm_importance_sampling_correction: bool = True
    """Weighs losses by exp(log π_old − log π_rollout), where the file has the rollout's log-probabilities."""

    vllm_importance_sampling_mode: Annotated[
        Literal[
            "token_truncate",
            "token_mask",
            "token_unbounded",
            "sequence_truncate",
            "sequence_mask",
            "sequence_unbounded",
            "geometric_mask",
        ],
        Needs("vllm_importance_sampling_correction", True),
    ] = "token_truncate"
    """Of each token or of the whole sequence; beyond the bounds the weight is the bound, or 0, or there are none.
    geometric_mask: each token's, and 0 where the geometric mean over the sequence is beyond the bounds."""

    vllm_importance_sampling_clip_max: Annotated[
        PositiveFloat | None, Needs("vllm_importance_sampling_correction", True)
    ] = None
    """The upper bound of that weight. Absent: token_truncate and sequence_truncate 2, token_mask 5 (IcePop),
    sequence_mask 3 (TRL), geometric_mask 1.002 (NeMo-RL)."""

    vllm_importance_sampling_clip_min: Annotated[
        NonNegativeFloat | None, Needs("vllm_importance_sampling_correction", True)
    ] = None
    """The lower bound of that weight. Absent: none, as in TRL; but where the upper bound is absent too, token_mask 0.5
    and geometric_mask 0.999."""

    use_decoupled_loss: bool = False
    """AReaL's decoupled PPO: clips around a proximal policy, the trainer's before the rollout batch, and weighs each
    token's loss by π_proximal / π_rollout. It takes the place of vllm_importance_sampling_*."""

    behav_imp_weight_cap: Annotated[float | None, Field(gt=1), Needs("use_decoupled_loss", True)] = None
    """AReaL's: a token whose weight is above it is left out. Absent: there is no bound, as published."""

    prox_logp_method: Annotated[Literal["recompute", "loglinear"], Needs("use_decoupled_loss", True)] = (
        "recompute"
    )
    """AReaL's: the proximal policy by passes before the rollout batch, or without, on the line from the engine's
    log-probability to the policy's, as far along as its weights are between theirs by the token's version."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _refuse_bnpo(cls, value: Any) -> Any:
        if value == "bnpo":
            text = (
                "it divides by each micro-batch's tokens, so the run would depend on the layout; choose dapo"
            )
            raise PydanticCustomError("bnpo", text)
        return value

    @field_validator(*OTHER_SPELLINGS, mode="before")
    @classmethod
    def _read_other_spellings(cls, value: Any, info: ValidationInfo) -> Any:
        """What is off is null in TRL and NeMo-RL, and a top_k of −1 in verl; TRL takes truth for scale_rewards."""
        return OTHER_SPELLINGS[info.field_name].get(str(value), value)

    @property
    def prompts_or_rollouts(self) -> str | list[str] | None:
        """rl.prompts or rl.rollouts, what there is to train on."""
        return self.prompts or self.rollouts

    @property
    def is_colocated(self) -> bool:
        """Whether vLLM samples in the trainer's processes."""
        return self.engine == "vllm" and self.engine_url is None

    @property
    def engine_urls(self) -> list[str]:
        """The addresses of the servers that sample."""
        if self.engine == "own" or self.is_colocated:
            return []
        given = self.engine_url if isinstance(self.engine_url, list) else [self.engine_url or SGLANG]
        return [url.strip().rstrip("/") for several in given for url in several.split(",")]

    @property
    def server_seconds(self) -> float:
        """What a step may wait for servers beside its own work: one that starts again, and its completions."""
        waits = self.prompts is not None and self.engine_urls
        return self.weight_sync_timeout + self.generation_timeout if waits else 0.0

    @property
    def prompt_files(self) -> list[str]:
        """The files of prompts."""
        return [self.prompts] if isinstance(self.prompts, str) else list(self.prompts or ())

    @property
    def generations_eval(self) -> int:
        """Completions of a held-out prompt."""
        return self.num_generations_eval or self.num_generations

    @property
    def rewards(self) -> list[str]:
        """The reward functions."""
        return [self.reward_funcs] if isinstance(self.reward_funcs, str) else list(self.reward_funcs or ())

    def drift_limit(self, precision: str) -> float:
        """max_drift, or what it is in this train.precision."""
        return self.max_drift or (1.002 if precision == "fp32" else 1.1)

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
    def counts_masked_sequences(self) -> bool:
        """count_masked_sequences, or what it is where it is absent."""
        given = self.count_masked_sequences
        return not self.filter_zero_std if given is None else given

    @property
    def mismatch_bounds(self) -> tuple[float | None, float]:
        """Lower and upper bound of the mismatch weight, as given or as its mode has them."""
        if self.use_decoupled_loss:
            return None, self.behav_imp_weight_cap or math.inf
        low, high = MISMATCH_BOUNDS[self.vllm_importance_sampling_mode]
        given = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        own = low if given == (None, None) else given[0]
        return own, high if given[1] is None else given[1]

    @property
    def mismatch_mode(self) -> str | None:
        """That of the weight exp(log π_old − log π_rollout); None: there is none."""
        if self.use_decoupled_loss:
            return "token_mask"
        return self.vllm_importance_sampling_mode if self.vllm_importance_sampling_correction else None

    @property
    def interpolates_old(self) -> bool:
        """Whether the old policy of a batch's further steps is found between the rollout's and the policy."""
        return self.use_decoupled_loss and self.prox_logp_method == "loglinear" and self.steps_per_batch > 1

    @property
    def computes_old(self) -> bool:
        """Whether the old log-probabilities need passes of their own: a batch's only step is by what they would be."""
        return self.old_logprobs == "policy" and self.steps_per_batch > 1 and not self.interpolates_old
