"""Settings of prompts and rollouts (docs/grpo.md). Names and defaults are TRL's where TRL has the setting."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from megalith.config.base import Decides, RequiresSetting, Section


class RolloutSettings(Section):
    """Prompts, rewards, sampling and rollout files. Part of section `rl`."""

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
    """Maximum number of completions that a rank generates at a time, which is the number of rows of its KV cache."""

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
    """Memory per rank, in GB, for keys and values of completions whose row of the KV cache was given to another one,
    for example while a tool runs. Without it, such completions are prefilled again."""

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

    @property
    def prompts_or_rollouts(self) -> str | list[str] | None:
        """Source of the run's samples: rl.prompts if set, otherwise rl.rollouts."""
        return self.prompts or self.rollouts

    @property
    def prompt_files(self) -> list[str]:
        """Files of `rl.prompts` as a list."""
        return [self.prompts] if isinstance(self.prompts, str) else list(self.prompts or ())

    @property
    def rewards(self) -> list[str]:
        """Reward functions of `rl.reward_funcs` as a list."""
        return [self.reward_funcs] if isinstance(self.reward_funcs, str) else list(self.reward_funcs or ())

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """Stop strings of `rl.stop_strings` as a tuple."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else tuple(self.stop_strings or ())

    @property
    def files(self) -> list[str]:
        """Files of `rl.rollouts` as a list."""
        return [self.rollouts] if isinstance(self.rollouts, str) else list(self.rollouts or ())
