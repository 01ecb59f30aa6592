"""Settings of post-training: SFT, DPO and GRPO.

Names and defaults are TRL's where TRL has the setting.
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

from megalith.config.base import Decides, RequiresSetting, Section
from megalith.config.extensions import ADVANTAGE_ESTIMATORS, LOSSES, PREFERENCE_LOSSES, is_extension
from megalith.config.reference_sync import ReferenceSync
from megalith.config.rl_models import OtherModels
from megalith.config.rl_speculation import SpeculationSettings
from megalith.config.rl_tools import ToolSettings
from megalith.errors import nearest_of


class ChatConfig(Section):
    """Settings that SFT and DPO share. Names are TRL's."""

    decides: ClassVar[Decides] = Decides.SAMPLES
    requires: ClassVar[RequiresSetting] = RequiresSetting("enabled", True)
    name: ClassVar[str]
    """Name of the section."""
    record_form: ClassVar[str]
    """Form of the records: a key of SAMPLE_FORMS in data/chat/sample_forms.py."""

    enabled: bool = False
    """Read data's paths as chat data (JSONL, parquet, a saved dataset). `megalith sft` and `megalith dpo` set it."""

    chat_template_path: str | None = None
    """A Jinja file, or a folder with chat_template.jinja. Default: the tokenizer's template."""

    truncation_mode: Literal["keep_start", "keep_end", "drop"] | None = None
    """Treatment of samples longer than data.seq_length: cut one end, or drop them. Default: they are errors."""

    skip_bad_samples: bool = False
    """Leave out and count invalid samples. Off: the first one ends the run."""

    num_train_epochs: Annotated[PositiveFloat | None, Decides.UPDATES] = None
    """Passes over the samples, in place of train.train_iters."""

    packing: bool = False


class SftConfig(ChatConfig):
    """Supervised fine-tuning on conversations (`megalith sft`). Names are TRL's."""

    name: ClassVar[str] = "sft"
    record_form: ClassVar[str] = "conversations"

    assistant_only_loss: bool = True
    """Compute the loss on assistant turns only. Off: on the whole conversation."""

    completion_only_loss: bool = True
    """Compute the loss on the completion only. Off: on the prompt too."""

    loss_type: Annotated[Literal["nll", "dft"], Decides.UPDATES] = "nll"
    """nll: cross-entropy. dft: each token's cross-entropy times its probability (dynamic fine-tuning)."""

    packing: bool = True
    """Pack several whole samples into a row, with separate attention. Off: one padded sample per row."""


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
    """Strength of the pull towards the reference: larger stays closer to it."""

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
    """Divergence from the reference that sigmoid, hinge, ipo, robust, sigmoid_norm, exo_pair and discopop bound
    (f-DPO)."""

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
        """True if a loss reads the reference's log-probabilities."""
        return not self.losses.keys() <= REFERENCE_FREE

    @property
    def sorts_pairs(self) -> bool:
        """True if a loss compares the pairs of a step by rank."""
        return not self.losses.keys().isdisjoint(SORTED)

    @property
    def uses_mean_rewards(self) -> bool:
        """True if rewards are β times the mean log-probability over an answer's tokens, as in SimPO and ORPO."""
        return not self.needs_reference and not self.losses.keys().isdisjoint({"simpo", "orpo"})


MISMATCH_BOUNDS: dict[str, tuple[float | None, float]] = {
    "token_truncate": (None, 2.0),  # truncated importance sampling; verl, NeMo-RL
    "token_mask": (0.5, 5.0),  # IcePop
    "sequence_truncate": (None, 2.0),  # verl
    "sequence_mask": (None, 3.0),  # TRL
    "geometric_mask": (0.999, 1.002),  # NeMo-RL's seq-mask-tis
    "token_unbounded": (None, math.inf),  # NeMo-RL without a truncation
    "sequence_unbounded": (None, math.inf),
}


SGLANG = "http://127.0.0.1:30000"  # SGLang's default
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


class RlConfig(ToolSettings, OtherModels, SpeculationSettings, ReferenceSync):
    """GRPO and related methods: rollouts, advantages, objective (docs/grpo.md, docs/grpo_objective.md)."""

    decides: ClassVar[Decides] = Decides.UPDATES
    requires: ClassVar[RequiresSetting] = RequiresSetting("prompts_or_rollouts")

    prompts: Annotated[str | list[str] | None, Decides.SAMPLES] = None
    """Prompts to sample completions for (`megalith grpo`): JSONL, parquet or save_to_disk folders, several or
    with a glob."""

    eval_prompts: Annotated[
        str | list[str] | None, RequiresSetting("prompts", strict=True), Decides.NOTHING
    ] = None
    """Held-out prompts, in the format of prompts. The current policy is evaluated on them every
    train.eval_interval steps and after the last step."""

    num_generations_eval: Annotated[PositiveInt | None, RequiresSetting("eval_prompts"), Decides.NOTHING] = (
        None
    )
    """Completions per held-out prompt. Default: num_generations."""

    eval_temperature: Annotated[NonNegativeFloat | None, RequiresSetting("eval_prompts"), Decides.NOTHING] = (
        None
    )
    """Sampling temperature of evaluations; 0: greedy. Default: temperature."""

    max_eval_prompts: Annotated[PositiveInt | None, RequiresSetting("eval_prompts"), Decides.NOTHING] = None
    """Evaluate only the first prompts, up to this number. Default: all."""

    rollouts: Annotated[str | list[str] | None, Decides.SAMPLES] = None
    """Rollout files to train on instead of prompts, JSONL or .jsonl.zst, read in this order."""

    reward_funcs: Annotated[str | list[str] | None, RequiresSetting("prompts", strict=True)] = None
    """Rewards: gsm8k, gsm8k_flexible, countdown, arithmetic, sort, format, length, math_verify, or
    path.py:function with TRL's or verl's signature. Several are weighted by reward_weights."""

    reward_workers: Annotated[NonNegativeInt, RequiresSetting("prompts"), Decides.NOTHING] = 4
    """Processes per rank for custom reward functions. 0: call them in the trainer's process, without a timeout."""

    reward_timeout: Annotated[PositiveFloat, RequiresSetting("prompts"), Decides.NOTHING] = 60.0
    """Time limit of a reward function for the completions of one prompt, in seconds."""

    prompt_column: Annotated[str, RequiresSetting("prompts"), Decides.SAMPLES] = "prompt"
    """Key of the prompt in a record: text, or a list of messages for the tokenizer's chat template."""

    chat_prompts: Annotated[bool, RequiresSetting("prompts"), Decides.SAMPLES] = False
    """Treat a prompt that is text as a user message."""

    shuffle_dataset: Annotated[bool, RequiresSetting("prompts"), Decides.SAMPLES] = True
    """Shuffle the prompts in each pass, by train.seed. Off: file order."""

    max_prompt_length: Annotated[PositiveInt | None, RequiresSetting("prompts"), Decides.SAMPLES] = None
    """Maximum number of prompt tokens. Default: data.seq_length + 1 − max_completion_length."""

    overlong_prompts: Annotated[Literal["refuse", "drop"], RequiresSetting("prompts"), Decides.SAMPLES] = (
        "refuse"
    )
    """For prompts that are too long: end the run, or drop them and print their count."""

    top_p: Annotated[float, RequiresSetting("prompts")] = 1.0
    """Must be 1: the trainer computes probabilities over all tokens, so the ratio would be biased."""

    top_k: Annotated[NonNegativeInt, RequiresSetting("prompts")] = 0
    """Must be 0, for the same reason as top_p."""

    min_p: Annotated[float, RequiresSetting("prompts")] = 0.0
    """Must be 0, for the same reason as top_p."""

    repetition_penalty: Annotated[float, RequiresSetting("prompts")] = 1.0
    """Must be 1: the trainer's probabilities have no penalties, so the ratio would be biased."""

    presence_penalty: Annotated[float, RequiresSetting("prompts")] = 0.0
    """Must be 0, for the same reason as repetition_penalty."""

    frequency_penalty: Annotated[float, RequiresSetting("prompts")] = 0.0
    """Must be 0, for the same reason as repetition_penalty."""

    stop_strings: Annotated[str | list[str] | None, RequiresSetting("prompts"), Decides.SAMPLES] = None
    """Texts that end a completion, in addition to the tokenizer's end of sequence. The token that completes one is
    the completion's last."""

    generation_rows: Annotated[PositiveInt, RequiresSetting("prompts"), Decides.NOTHING] = 256
    """Maximum number of completions that a rank generates at a time: the rows of its KV cache."""

    prefix_reuse: Annotated[
        bool, RequiresSetting("prompts"), RequiresSetting("engine", "own"), Decides.NOTHING
    ] = True
    """Reuse keys and values between the turns of a completion and between completions of a prompt (engine own)."""

    prefix_cache_gb: Annotated[
        NonNegativeFloat,
        RequiresSetting("prefix_reuse", True),
        RequiresSetting("engine", "own"),
        Decides.NOTHING,
    ] = 0.0
    """Memory per rank, in GB, for keys and values of completions whose row of the KV cache was given to others, as
    while a tool runs. Without it, such completions are prefilled again."""

    engine: Annotated[Literal["own", "vllm", "sglang"], RequiresSetting("prompts")] = "own"
    """Sampling engine: Megalith's own on the trainer's devices, vLLM there or as a server, or an SGLang
    server (docs/engines.md)."""

    engine_url: Annotated[
        str | list[str] | None, RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = None
    """Address of the server, or several as a list or comma-separated. Default: vLLM samples in the trainer's
    processes; SGLang is at http://127.0.0.1:30000."""

    vllm_gpu_memory_utilization: Annotated[
        float, Field(gt=0, le=1), RequiresSetting("engine", "vllm"), Decides.NOTHING
    ] = 0.3
    """Fraction of each GPU that vLLM in the trainer's processes uses while sampling: weights, KV cache and
    workspace."""

    vllm_sleep_level: Annotated[Literal[0, 1, 2], RequiresSetting("engine", "vllm"), Decides.NOTHING] = 2
    """GPU memory that vLLM in the trainer's processes frees during training: 1: KV cache, and weights moved
    to the host. 2: KV cache and weights. 0: none."""

    weight_sync_method: Annotated[
        Literal["nccl", "gloo", "checkpoint", "ipc", "lora"],
        RequiresSetting("engine", "vllm", "sglang"),
        Decides.NOTHING,
    ] = "nccl"
    """Transfer of weights to a server: broadcast between GPUs (nccl) or through the hosts (gloo), a folder
    that both see (checkpoint), shared memory of one GPU (ipc), or a folder with the adapters alone, which the server
    loads on its own base (lora)."""

    weight_sync_timeout: Annotated[
        PositiveFloat, RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = 600.0
    """Time limit of a weight sync in seconds, including the wait for a server that is starting."""

    weight_sync_delta: Annotated[
        bool, RequiresSetting("engine", "vllm", "sglang", strict=True), Decides.NOTHING
    ] = False
    """Send only the parts of layers whose bits have changed since the last sync, such as those with adapters. Keeps a
    copy of the sent weights in the host's memory of rank 0."""

    generation_timeout: Annotated[
        PositiveFloat, RequiresSetting("engine", "vllm", "sglang"), Decides.NOTHING
    ] = 1800.0
    """Time limit of a server for the completions of a rollout batch, in seconds."""

    max_staleness: Annotated[
        NonNegativeInt, RequiresSetting("engine", "vllm", "sglang", strict=True), Decides.SAMPLES
    ] = 0
    """Rollout batches that a server samples ahead of training (docs/engines.md). It bounds the age of tokens
    in weight syncs, like AReaL's max_head_offpolicyness; older tokens, as from a checkpoint with a larger
    value, are excluded from the loss. 0: on policy."""

    max_resamples: Annotated[
        NonNegativeInt, RequiresSetting("filter_zero_std", True), RequiresSetting("prompts")
    ] = 0
    """Times that a rollout batch samples other prompts in place of groups with identical rewards (DAPO's
    dynamic sampling)."""

    max_drift: Annotated[PositiveFloat | None, RequiresSetting("prompts"), Decides.NOTHING] = None
    """End the run if the mean of exp|log π_trainer − log π_engine| over a step's tokens exceeds this. Absent:
    1.002 in fp32, otherwise 1.1."""

    save_rollouts: Annotated[bool, RequiresSetting("prompts"), Decides.NOTHING] = False
    """Write each rollout batch to OUTPUT/rollouts/batch_%08d.jsonl.zst, which rl.rollouts can read."""

    log_completions: Annotated[bool, RequiresSetting("prompts"), Decides.NOTHING] = False
    """Log completions of each rollout batch with their rewards, and write all of them to OUTPUT/completions.jsonl."""

    num_completions_to_print: Annotated[
        PositiveInt, RequiresSetting("log_completions", True), Decides.NOTHING
    ] = 2
    """Completions to log per rollout batch."""

    rollout_version: Annotated[NonNegativeInt | None, Decides.NOTHING] = None
    """Required step of the weights that sampled the rollouts; others are errors. Default: any."""

    packing: bool = False
    """Pack several completions with their prompts into a row of data.seq_length tokens, with separate attention."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature of the rollouts. Log-probabilities are those of logits / temperature."""

    num_generations: PositiveInt = 8
    """Completions per prompt (the group size). A rollout batch has whole groups."""

    num_iterations: PositiveInt = 1
    """Times that each rollout batch is trained on."""

    mini_batches: PositiveInt = 1
    """Optimizer steps per pass over a rollout batch, each of train.global_batch_size completions."""

    exact: Annotated[bool, RequiresSetting("prompts"), Decides.NOTHING] = False
    """Use the same batch-invariant operators in the trainer and in Megalith's own engine, so that both have the same
    log-probabilities bit for bit, and end the run if any differs (docs/exactness.md). Slower."""

    old_logprobs: Literal["policy", "rollout"] = "policy"
    """Denominator of the ratio: the policy before the rollout batch, or the rollouts' log-probabilities."""

    router_replay: Literal["none", "policy", "all"] = "none"
    """Forward passes whose routers use the experts that the engine chose while sampling: those of the policy, or
    `all`, also those of the reference model. For models with experts."""

    reward_weights: list[float] | None = None
    """Weight of each reward, in order. Default: 1 each. Advantages are computed from the weighted sum."""

    advantage_estimator: str = "group"
    """Advantages from the rewards: group (relative to the group, by the settings below), rloo,
    reinforce_plus_plus, reinforce_plus_plus_baseline, opo, gpg, grpo_passk (with scale_rewards), gdpo, or
    path.py:function."""

    advantage_baseline: Literal["group", "leave_one_out"] = "group"
    """Baseline of the advantage: the mean of the group, or of the other completions in the group."""

    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group or of the rollout batch, + advantage_epsilon."""

    advantage_epsilon: NonNegativeFloat = 1e-4
    """Added to that standard deviation: 1e-4 in TRL, 1e-6 in verl and NeMo-RL."""

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

    loss_type: str = "dapo"
    """Aggregation: mean over tokens (dapo, cispo), mean of the sequences' means (grpo) or sums (luspo), a
    constant divisor (dr_grpo), or the sum over tokens (token_sum). In place of PPO's clip, cispo weights
    log-probabilities by a capped ratio, vespo by a smooth function of the sequence's ratio, and gpg not at all;
    kl_cov and clip_cov treat tokens with a high covariance differently (all means over tokens). reinforce
    weights them by the bounded ratio to the rollout's policy. sapo has a sigmoid, and gmpo the geometric mean of a
    sequence's clipped ratios (means of sequences). online_dpo and online_ipo are preferences between the two
    completions of a prompt. Or path.py:object, your own loss."""

    count_masked_sequences: bool | None = None
    """Count sequences without a token in the loss in the divisor of grpo, luspo and dr_grpo, as TRL and verl
    do and NeMo-RL does not. Default: on, unless filter_zero_std is set."""

    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per token, or the geometric mean over the sequence (GSPO)."""

    epsilon: NonNegativeFloat = 0.2
    """The ratio is clipped at 1 − epsilon."""

    epsilon_high: NonNegativeFloat | None = None
    """The ratio is clipped at 1 + epsilon_high. Default: epsilon. With cispo it is the cap itself and is
    required: 5 (TRL), or 1.28 (clip_ratio_high 0.28 of verl and NeMo-RL)."""

    cispo_ratio_min: Annotated[
        NonNegativeFloat | None, RequiresSetting("loss_type", "cispo", strict=True)
    ] = None
    """Minimum ratio with cispo: 1 − clip_ratio_low of verl and NeMo-RL. Default: none, as in TRL."""

    sapo_temperature_pos: Annotated[PositiveFloat, RequiresSetting("loss_type", "sapo")] = 1.0
    """τ of sapo for positive advantages: the larger it is, the faster the gate falls as the ratio departs from 1."""

    sapo_temperature_neg: Annotated[PositiveFloat, RequiresSetting("loss_type", "sapo")] = 1.05
    """τ of sapo for the other advantages."""

    vespo_k_pos: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "vespo")] = 2.0
    """k in vespo's weight w^k · exp(λ · (1 − w)) for advantages of at least 0."""

    vespo_lambda_pos: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "vespo")] = 3.0
    """λ in vespo's weight for advantages of at least 0."""

    vespo_k_neg: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "vespo")] = 3.0
    """k in vespo's weight for negative advantages."""

    vespo_lambda_neg: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "vespo")] = 2.0
    """λ in vespo's weight for negative advantages."""

    kl_cov_ratio: Annotated[float, Field(gt=0, le=1), RequiresSetting("loss_type", "kl_cov")] = 0.0002
    """Fraction of the step's tokens, those with the largest covariance of advantage and log-probability, that
    kl_cov penalizes."""

    ppo_kl_coef: Annotated[NonNegativeFloat, RequiresSetting("loss_type", "kl_cov")] = 0.1
    """Weight of |log ratio| for the tokens that kl_cov penalizes."""

    clip_cov_ratio: Annotated[float, Field(gt=0, le=1), RequiresSetting("loss_type", "clip_cov")] = 0.0002
    """Fraction of the step's tokens that clip_cov excludes from the loss, at random among those with a covariance
    between clip_cov_lb and clip_cov_ub."""

    clip_cov_lb: Annotated[float, RequiresSetting("loss_type", "clip_cov")] = 1.0
    """Lower bound of the covariance of tokens that clip_cov may exclude."""

    clip_cov_ub: Annotated[float, RequiresSetting("loss_type", "clip_cov")] = 5.0
    """Upper bound of the covariance of tokens that clip_cov may exclude."""

    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Compute the policy loss and the entropy bonus only on this fraction of the step's tokens, those with the
    highest entropy. 1: all."""

    off_policy_mask_threshold: NonNegativeFloat | None = None
    """Exclude sequences with a negative advantage from the policy loss if the mean over their tokens of log π_rollout
    − log π exceeds this (DeepSeek-V3.2). Default: none."""

    delta: PositiveFloat | None = None
    """Cap of the ratio in the unclipped branch (INTELLECT-2). It must exceed 1 + epsilon_high."""

    clip_ratio_c: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: for negative advantages, the loss is at most this times their magnitude."""

    beta: NonNegativeFloat = 0.0
    """Weight of the KL divergence from the reference, the run's initial weights. 0: no KL. With online_dpo and
    online_ipo, β of the preference loss."""

    kl_estimator: Annotated[Literal["k1", "k2", "k3"], RequiresSetting("beta", greater_than=0)] = "k3"
    """With d = log π_ref − log π: −d (k1), d² / 2 (k2), or exp(d) − d − 1 (k3)."""

    use_bias_correction_kl: Annotated[bool, RequiresSetting("beta", greater_than=0)] = True
    """Multiply the KL by the ratio to the old policy, which makes its gradient unbiased."""

    kl_score_gradient: Annotated[bool, RequiresSetting("beta", greater_than=0)] = False
    """Multiply the KL by exp(log π − sg[log π]), which adds the gradient of the sampling distribution (NeMo-RL)."""

    kl_input_clamp_value: Annotated[PositiveFloat | None, RequiresSetting("beta", greater_than=0)] = None
    """Clamp log π_ref − log π to ± this (NeMo-RL; 20 in verl's k3). Default: no clamp, as in TRL."""

    kl_output_clamp_value: Annotated[PositiveFloat | None, RequiresSetting("beta", greater_than=0)] = None
    """Clamp the KL of a token to ± this (NeMo-RL; 10 in verl's k3). Default: no clamp, as in TRL."""

    entropy_coef: float = 0.0
    """Weight of the entropy bonus, subtracted from the loss."""

    use_adaptive_entropy: bool = False
    """Change the weight of the entropy bonus by entropy_coef_delta per step, from entropy_coef on: up if the mean
    entropy is at most entropy_target, otherwise down. A step after a higher entropy has no bonus."""

    entropy_coef_min: Annotated[float, RequiresSetting("use_adaptive_entropy", True)] = 0.0
    """Lower bound of the adaptive weight."""

    entropy_coef_max: Annotated[float, RequiresSetting("use_adaptive_entropy", True)] = 1.0
    """Upper bound of the adaptive weight."""

    entropy_coef_delta: Annotated[NonNegativeFloat, RequiresSetting("use_adaptive_entropy", True)] = 0.005
    """Change of the adaptive weight per step."""

    entropy_target: Annotated[NonNegativeFloat, RequiresSetting("use_adaptive_entropy", True)] = 0.2
    """Mean entropy per token below which the adaptive weight grows."""

    entropy_aggregation: Annotated[Literal["tokens", "loss"], RequiresSetting("has_entropy_bonus", True)] = (
        "tokens"
    )
    """Average the entropy over the step's tokens for every loss_type (TRL), or aggregate it like the loss (verl)."""

    log_entropy: Annotated[bool, Decides.NOTHING] = True
    """Log the entropy even if the loss does not use it."""

    vllm_importance_sampling_correction: bool = True
    """Weight the loss by exp(log π_old − log π_rollout), if the rollouts have log-probabilities."""

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
        RequiresSetting("vllm_importance_sampling_correction", True),
    ] = "token_truncate"
    """Weight per token or per sequence; outside the bounds it is capped (truncate), 0 (mask) or unbounded.
    geometric_mask: per token, and 0 if the geometric mean over the sequence is outside the bounds."""

    vllm_importance_sampling_clip_max: Annotated[
        PositiveFloat | None, RequiresSetting("vllm_importance_sampling_correction", True)
    ] = None
    """Upper bound of that weight. Default: 2 for token_truncate and sequence_truncate, 5 for token_mask
    (IcePop), 3 for sequence_mask (TRL), 1.002 for geometric_mask (NeMo-RL)."""

    vllm_importance_sampling_clip_min: Annotated[
        NonNegativeFloat | None, RequiresSetting("vllm_importance_sampling_correction", True)
    ] = None
    """Lower bound of that weight. Default: none, as in TRL; if the upper bound is absent too, 0.5 for
    token_mask and 0.999 for geometric_mask."""

    rollout_is_batch_normalize: Annotated[
        bool, RequiresSetting("vllm_importance_sampling_correction", True)
    ] = False
    """Divide that weight by its mean over the rollout batch (verl)."""

    rollout_rs: str | None = None
    """Reject tokens or sequences by how far the trainer's probabilities are from the engine's (verl): token_k1 to k3,
    seq_sum_k1 to k3, seq_mean_k1 to k3, seq_max_k2, seq_max_k3, or several separated by commas. With
    old_logprobs policy they leave the loss and its divisor, with rollout only the loss."""

    rollout_rs_threshold: Annotated[float | str | None, RequiresSetting("rollout_rs", strict=True)] = None
    """Largest divergence that is kept, or one per criterion separated by commas. For k1 the bounds of the ratio as
    lower_upper; an upper bound alone has its inverse as lower bound."""

    use_decoupled_loss: bool = False
    """AReaL's decoupled PPO: clip around a proximal policy (the trainer's before the rollout batch) and
    weight each token's loss by π_proximal / π_rollout. Replaces vllm_importance_sampling_*."""

    behav_imp_weight_cap: Annotated[
        float | None, Field(gt=1), RequiresSetting("use_decoupled_loss", True)
    ] = None
    """Exclude tokens whose weight exceeds this (AReaL). Default: no bound, as published."""

    prox_logp_method: Annotated[
        Literal["recompute", "loglinear"], RequiresSetting("use_decoupled_loss", True)
    ] = "recompute"
    """Proximal policy (AReaL): recompute it with forward passes before the rollout batch, or interpolate
    between the engine's and the policy's log-probabilities by weight version (loglinear)."""

    @field_validator("loss_type", mode="before")
    @classmethod
    def _refuse_bnpo(cls, value: Any) -> Any:
        if value == "bnpo":
            text = (
                "it divides by each micro-batch's tokens, so the run would depend on the layout; choose dapo"
            )
            raise PydanticCustomError("bnpo", text)
        return value

    @field_validator("reward_clip_range")
    @classmethod
    def _check_range(cls, value: list[float] | None) -> list[float] | None:
        if value is not None and (len(value) != 2 or value[0] > value[1]):
            raise PydanticCustomError("range", "write a minimum and a maximum, such as [-1, 1]")
        return value

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
    def prompts_or_rollouts(self) -> str | list[str] | None:
        """Source of the run's samples: rl.prompts if set, otherwise rl.rollouts."""
        return self.prompts or self.rollouts

    @property
    def is_colocated(self) -> bool:
        """True if vLLM samples in the trainer's processes."""
        return self.engine == "vllm" and self.engine_url is None

    @property
    def engine_urls(self) -> list[str]:
        """Addresses of the sampling servers."""
        if self.engine == "own" or self.is_colocated:
            return []
        entries = self.engine_url if isinstance(self.engine_url, list) else [self.engine_url or SGLANG]
        return [url.strip().rstrip("/") for entry in entries for url in entry.split(",")]

    @property
    def server_timeout(self) -> float:
        """Additional time that a step may wait for servers, in seconds."""
        waits = self.prompts is not None and self.engine_urls
        return self.weight_sync_timeout + self.generation_timeout if waits else 0.0

    @property
    def prompt_files(self) -> list[str]:
        """The prompt files."""
        return [self.prompts] if isinstance(self.prompts, str) else list(self.prompts or ())

    @property
    def num_eval_generations(self) -> int:
        """Completions per held-out prompt."""
        return self.num_generations_eval or self.num_generations

    @property
    def rewards(self) -> list[str]:
        """The reward functions."""
        return [self.reward_funcs] if isinstance(self.reward_funcs, str) else list(self.reward_funcs or ())

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings or ())

    def drift_limit(self, precision: str) -> float:
        """Return max_drift, or its default for this train.precision; 1, no drift at all, with `exact`."""
        if self.exact:
            return 1.0
        return self.max_drift or (1.002 if precision == "fp32" else 1.1)

    @property
    def files(self) -> list[str]:
        """The rollout files."""
        return [self.rollouts] if isinstance(self.rollouts, str) else list(self.rollouts or ())

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps per rollout batch."""
        return self.num_iterations * self.mini_batches

    @property
    def has_entropy_bonus(self) -> bool:
        """True if the loss has an entropy bonus."""
        return self.entropy_coef != 0 or self.use_adaptive_entropy

    @property
    def loss_beta(self) -> float:
        """Weight of the KL in the loss."""
        return 0.0 if self.use_kl_in_reward or self.compares_completions else self.beta

    @property
    def compares_completions(self) -> bool:
        """True if the loss compares the two completions of a prompt."""
        return self.loss_type in ("online_dpo", "online_ipo")

    @property
    def upper_epsilon(self) -> float:
        """Distance above 1 at which the ratio is clipped; with cispo, the cap itself."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def counts_masked_sequences(self) -> bool:
        """Value of count_masked_sequences. Default: true unless filter_zero_std is set."""
        if self.count_masked_sequences is None:
            return not self.filter_zero_std
        return self.count_masked_sequences

    @property
    def mismatch_bounds(self) -> tuple[float | None, float]:
        """Lower and upper bound of the mismatch weight, as set or the mode's defaults."""
        if self.use_decoupled_loss:
            return None, self.behav_imp_weight_cap or math.inf
        low, high = MISMATCH_BOUNDS[self.vllm_importance_sampling_mode]
        clip_min, clip_max = self.vllm_importance_sampling_clip_min, self.vllm_importance_sampling_clip_max
        if clip_min is None and clip_max is None:
            return low, high
        return clip_min, high if clip_max is None else clip_max

    @property
    def mismatch_mode(self) -> str | None:
        """Mode of the weight exp(log π_old − log π_rollout). None: no weight."""
        if self.use_decoupled_loss:
            return "token_mask"
        return self.vllm_importance_sampling_mode if self.vllm_importance_sampling_correction else None

    @property
    def normalizes_mismatch(self) -> bool:
        """True if the mismatch weights are divided by their mean."""
        return self.rollout_is_batch_normalize and self.mismatch_mode is not None

    @property
    def rejects_in_loss(self) -> bool:
        """True if rollout_rs compares the policy that trains, in the loss (verl's bypass mode)."""
        return self.rollout_rs is not None and self.old_logprobs == "rollout"

    @property
    def corrects_batches(self) -> bool:
        """True if rollout_rs or rollout_is_batch_normalize compares the old policy, before the rollout batch."""
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
        """True if the old log-probabilities need forward passes of their own."""
        return (
            self.old_logprobs == "policy"
            and (self.steps_per_batch > 1 or self.use_kl_in_reward or self.corrects_batches)
            and not self.interpolates_old_logprobs
        )
