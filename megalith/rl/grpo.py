"""GRPO (`megalith grpo`): train a policy on completions that it samples, or on rollouts from files.

Loop, optimizer, checkpoints and report are the same as for pre-training. This file defines the task: data, loss,
metrics and evaluation. Rollouts come from files (rollout_data.py) or are sampled (sampling/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith.checkpoint.read import Checkpoint
from megalith.comm.collectives import Axis
from megalith.config import RlConfig, RunConfig, require_run_config
from megalith.config.distillation import WITHOUT_ADAPTERS, is_served
from megalith.config.rl_tools import FACTORY, FUNCTION
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.parallel.shards import LocalShard
from megalith.report.metrics import ExpertStepMetrics
from megalith.rl.agents.endpoint_agent import EndpointAgent
from megalith.rl.agents.policy_agent import PolicyAgent
from megalith.rl.auxiliary_models.critic import Critic, CriticRolloutData
from megalith.rl.auxiliary_models.reference import LogProbs
from megalith.rl.auxiliary_models.synced_reference import ReferenceTask
from megalith.rl.objectives.adaptive_entropy import EntropyController
from megalith.rl.objectives.policy_loss import PolicyLoss
from megalith.rl.rewards.model_rewards import model_names, reward_model_config
from megalith.rl.rewards.rewards import Rewards, reward_function
from megalith.rl.rollouts.prompts import held_out_prompts, policy_vocab_size, run_prompts
from megalith.rl.rollouts.rollout_data import RolloutData
from megalith.rl.rollouts.rollout_reader import RolloutFiles
from megalith.rl.rollouts.rollout_source import FileRollouts, RolloutSource
from megalith.rl.sampling.drift import LargestDrift, drift_error, largest_drift_of_step, no_comparable_token
from megalith.rl.sampling.live_rollouts import LiveRollouts
from megalith.rl.sampling.scored_groups import prefixed
from megalith.rl.teachers.model_teacher import teacher_config
from megalith.rl.teachers.teacher_advantages import TeacherAdvantages
from megalith.training.run_state import Run
from megalith.training.trainer import TrainingResult
from megalith.training.training_job import train

RewardFunc = Callable[..., Any]


def train_grpo(
    config: RunConfig,
    reward_funcs: str | RewardFunc | Sequence[str | RewardFunc] | None = None,
    train_dataset: Iterable[Mapping[str, Any]] | None = None,
    eval_dataset: Iterable[Mapping[str, Any]] | None = None,
    tools: Sequence[Callable[..., Any]] | None = None,
    environment_factory: Callable[..., Any] | None = None,
    agent: Callable[..., Any] | None = None,
) -> TrainingResult:
    """Train a policy with GRPO. Exported as `megalith.grpo`.

    Args:
        config: run configuration with `rl.prompts` or `rl.rollouts`.
        reward_funcs: reward names or functions (rewards.py) that replace `rl.reward_funcs`.
        train_dataset: records with prompts that replace `rl.prompts`.
        eval_dataset: records with prompts that replace `rl.eval_prompts`.
        tools: functions that replace `rl.tools` (docs/agents.md).
        environment_factory: class or function that creates environments; it replaces `rl.environment`.
        agent: function of (client, row) that replaces `rl.agent`.

    Returns:
        The result, as for `megalith.train`.

    Raises:
        ConfigError: if there are no prompts or rollouts; other errors as for `megalith.train`.
    """
    require_run_config(config, "megalith.grpo")
    if reward_funcs is not None:
        reward_funcs = (
            [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else [*reward_funcs]
        )
        names = [one if isinstance(one, str) else getattr(one, "__name__", "reward") for one in reward_funcs]
        config = config.with_settings({"rl.reward_funcs": names})
    if train_dataset is not None:
        config = config.with_settings({"rl.prompts": "train_dataset"})
    if eval_dataset is not None:
        config = config.with_settings({"rl.eval_prompts": "eval_dataset"})
    if tools:
        config = config.with_settings({"rl.tools": [getattr(one, "__name__", "tool") for one in tools]})
    if environment_factory is not None:
        config = config.with_settings({"rl.environment": FACTORY})
    if agent is not None:
        config = config.with_settings({"rl.agent": FUNCTION})
    require_source(config)
    task = PolicyTask(reward_funcs, train_dataset, eval_dataset, tools or None, environment_factory, agent)
    try:
        return train(config, task)
    finally:
        task.close()


def require_source(config: RunConfig) -> None:
    """Raise ConfigError if the run has neither prompts nor rollouts."""
    if not config.rl.prompts_or_rollouts:
        raise ConfigError(
            "neither rl.prompts nor rl.rollouts is set; set rl.prompts and rl.reward_funcs to "
            "sample completions, or rl.rollouts to read rollout files (docs/grpo.md)"
        )


def check_grpo_data(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Open the run's prompts and rewards, or its rollouts, and raise the errors that a run would raise."""
    if config.rl.prompts:
        agent = open_agent(config.rl, tokenizer)
        schemas = [] if agent is None else agent.schemas
        run_prompts(config, tokenizer, show_progress=True, tools=schemas)
        held_out_prompts(config, tokenizer, show_progress=True, tools=schemas)
        for name in config.rl.rewards:
            reward_function(name)
        for path in config.rl.reward_model_paths:
            if not is_served(path):
                reward_model_config(config, path)
    else:
        open_rollouts(config, tokenizer)
    if config.rl.teacher and not (is_served(config.rl.teacher) or config.rl.teacher == WITHOUT_ADAPTERS):
        teacher_config(config, config.rl.teacher, "rl.teacher")


def open_agent(
    rl: RlConfig,
    tokenizer: Tokenizer | None,
    tools: Sequence[Callable] | None = None,
    environment: Callable[..., Any] | None = None,
    agent: Callable[..., Any] | None = None,
) -> PolicyAgent | EndpointAgent | None:
    """Return the run's agent: `rl.agent`, or the policy with its tools and environment, or None if the run has
    neither.
    """
    if rl.agent:
        return EndpointAgent(rl, tokenizer, agent)
    return PolicyAgent(rl, tokenizer, tools, environment) if rl.uses_turns else None


def open_rollouts(config: RunConfig, tokenizer: Tokenizer | None, world: Axis = Axis()) -> RolloutFiles:  # noqa: B008 (immutable)
    """Open the run's rollouts. Raise DataError if they do not fit its model, lengths, groups or tokenizer."""
    return RolloutFiles(
        config.rl.files,
        world,
        vocab_size=policy_vocab_size(config, tokenizer),
        max_tokens=config.data.seq_length + 1,
        num_generations=config.rl.num_generations,
        version=config.rl.rollout_version,
        tokenizer=tokenizer and tokenizer.fingerprint,
        routed_model=config.model if config.rl.replays_routes else None,
    )


class PolicyTask(ReferenceTask):
    """Task of GRPO: its data, loss, metrics and evaluation."""

    restarts_in_process = False
    console_metrics = ("rewards_mean", "entropy", "completion_length")
    loss_name = "policy loss"

    def __init__(
        self,
        reward_funcs: Sequence[str | RewardFunc] | None = None,
        records: Iterable[Mapping[str, Any]] | None = None,
        held_out: Iterable[Mapping[str, Any]] | None = None,
        tools: Sequence[Callable] | None = None,
        environment: Callable[..., Any] | None = None,
        agent: Callable[..., Any] | None = None,
    ):
        """Take replacements for `rl.reward_funcs`, `rl.prompts`, `rl.eval_prompts`, `rl.tools`, `rl.environment` and
        `rl.agent`."""
        self._tools, self._environment, self._agent = tools, environment, agent
        self._reward_funcs, self._records, self._held_out = reward_funcs, records, held_out
        self._live: LiveRollouts | None = None
        self._critic: Critic | None = None
        self._teacher: TeacherAdvantages | None = None
        self._metric_names = {one.name for one in fields(ExpertStepMetrics)}  # the run's, not the rewards'
        self._renamed: set[str] = set()  # metrics of rewards that had such a name

    def build_data(self, run: Run) -> RolloutData:
        config = run.config
        self.loss = PolicyLoss(config.rl, policy_vocab_size(config, run.tokenizer))
        reference = (
            self.open_reference(run, config.rl, config.rl.temperature, self.loss.vocab_size)
            if config.rl.beta
            else None
        )
        if config.rl.use_adaptive_entropy:
            self.loss.entropy_coef = 0.0  # no entropy is known before the first step
        self._critic = Critic(run) if config.rl.uses_critic else None
        self._teacher = TeacherAdvantages(run, self.loss.vocab_size) if config.rl.teacher else None
        if not config.rl.prompts:
            source = FileRollouts(run, open_rollouts(config, run.tokenizer, run.mesh.world))
            return self._rollout_data(run, source, reference)
        is_first, rl = run.mesh.world.rank == 0, config.rl
        agent = open_agent(config.rl, run.tokenizer, self._tools, self._environment, self._agent)
        schemas = [] if agent is None else agent.schemas
        prompts = run_prompts(config, run.tokenizer, self._records, is_first, schemas)
        held_out = held_out_prompts(config, run.tokenizer, self._held_out, is_first, schemas)
        if agent is not None:
            agent.open([*prompts.prompts, *held_out])
        rewards = Rewards(
            self._reward_funcs or rl.rewards,
            [*prompts.prompts, *held_out],
            max_tokens=rl.max_completion_length,
            workers=rl.reward_workers if run.mesh.tp.rank == 0 else 0,
            timeout=rl.reward_timeout,
            environment=None if agent is None else agent.reward_name,
            models=model_names(rl.reward_model_paths),
            max_steps=run.total_steps,
        )
        self._live = LiveRollouts(run, prompts, rewards, held_out, agent)
        self._step_start = time.perf_counter()
        return self._rollout_data(run, self._live, reference)

    def _rollout_data(self, run: Run, source: RolloutSource, reference: LogProbs | None) -> RolloutData:
        if self._critic is None:
            return RolloutData(run, source, reference, self._teacher)
        return CriticRolloutData(run, source, reference, self._critic)

    def parts(self, run: Run) -> dict[str, Mapping[str, LocalShard]]:
        critic = {} if self._critic is None else self._critic.parts()
        return super().parts(run) | critic

    def load_parts(self, run: Run, checkpoint: Checkpoint, with_optimizer: bool) -> None:
        super().load_parts(run, checkpoint, with_optimizer)
        if self._critic is not None:
            self._critic.load(checkpoint, with_optimizer)

    def state_files(self, run: Run) -> dict[str, bytes]:
        return run.data.state_files() | ({} if self._live is None else self._live.state_files())

    def load_state(self, run: Run, files: Mapping[str, Path]) -> None:
        run.data.load_state(files)
        if run.config.rl.use_adaptive_entropy:
            self.loss.entropy_coef = EntropyController(run.config.rl, run.totals).coefficient
        if self._live is not None:
            self._live.load_state(run.step, files)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()

    def console_line(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        return None if self._live is None else step_line(step, metrics)

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the current step's metrics. Collective over all ranks.

        Raises:
            TrainingError: if engine and trainer differ too much.
        """
        if self._live is not None and (run.step + 1) % run.config.rl.steps_per_batch == 0:
            self._live.settle()
        sums = self.loss.reduce_sums(run.mesh, run.device)
        entropy_metrics = self._adapt_entropy(run, sums)
        critic = dict if self._critic is None else self._critic.train_step(run.data.ready_batches(run.step))
        largest_drift = largest_drift_of_step(run, self.loss.take_largest_drifts())
        step = run.data.step(run.step)
        metrics = (
            step.metrics | entropy_metrics | ({"drift_largest": largest_drift.size} if largest_drift else {})
        )
        if run.config.rl.use_kl_in_reward:
            metrics["reward_kl"] = run.data.reward_kl
        if run.config.rl.corrects_batches:
            metrics["rollout_rejected"] = run.data.rejected
        if self._teacher is not None:
            metrics["teacher_kl"] = self._teacher.mean_divergence.item()
        if self._live is None:
            return lambda: {**self._read(sums), **critic(), **metrics}
        ratio = self._read(sums)["mismatch"]
        if ratio is None and sums[0] > 0:
            raise no_comparable_token(f"of step {run.step + 1}")
        self._check_drift(run, ratio, largest_drift)
        tokens = sum(len(s.prompt_ids) + len(s.completion.ids) for row in step.rows for s in row)
        times, logged = self._times(run, tokens)
        metrics |= times

        def read() -> dict[str, Any]:
            return self._with_reward_metrics(run, {**self._read(sums), **critic(), **metrics}, logged)

        return read

    def _adapt_entropy(self, run: Run, sums: Tensor) -> dict[str, float]:
        """Set the entropy coefficient of the next step. Return this step's coefficient as a metric; empty if it is not
        adaptive.
        """
        if not run.config.rl.use_adaptive_entropy:
            return {}
        controller, used = EntropyController(run.config.rl, run.totals), self.loss.entropy_coef
        controller.update(self.loss.means(sums)["entropy"])
        self.loss.entropy_coef = controller.coefficient
        return {"entropy_coef": used}

    def evaluate(
        self, run: Run, before: Callable[[int, int], None], stops: Callable[[], str | None]
    ) -> dict[str, float] | None:
        """Evaluate the held-out prompts. Return None if the run samples no completions or is to stop.

        The evaluation does not count toward the time of a step.
        """
        if self._live is None:
            return None
        self._live.settle()
        start = time.perf_counter()
        metrics = self._live.evaluate(before, stops)
        seconds = time.perf_counter() - start
        self._step_start += seconds
        return metrics and metrics | {"seconds": seconds}

    def _check_drift(self, run: Run, ratio: float | None, largest_drift: LargestDrift | None) -> None:
        """Raise TrainingError if the drift is too large. Skipped if older weights sampled the batch."""
        rl, limit = run.config.rl, run.config.rl.drift_limit(run.config.train.precision)
        comparable = (
            rl.needs_old_logprobs_pass or run.step % rl.steps_per_batch == 0
        ) and not self._live.is_stale
        if comparable and ratio is not None and largest_drift is not None and not ratio <= limit:
            version = run.step - run.step % rl.steps_per_batch
            raise drift_error(
                ratio,
                limit,
                f"over the tokens of step {run.step + 1}",
                largest_drift,
                (version, version),
                STEP_CAUSE,
            )

    def _with_reward_metrics(
        self, run: Run, metrics: dict[str, Any], logged: Mapping[str, float]
    ) -> dict[str, Any]:
        """Return a step's metrics together with those that rewards logged. A reward's metric is renamed if a metric of
        that name exists.
        """
        self._metric_names |= metrics.keys()
        names = {name: prefixed(name, self._metric_names) for name in logged}
        for name, other in names.items():
            if name != other and name not in self._renamed:
                run.log(
                    f"a reward logs the metric {name}, but the run has a metric of that name, so the metric of "
                    f"the reward is logged as {other}"
                )
                self._renamed.add(name)
        return metrics | {names[name]: value for name, value in logged.items()}

    def _times(self, run: Run, tokens: int) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the seconds of the step's phases with the throughput, and the metrics logged by rewards.

        A step starts when the previous one has finished its backward passes.
        """
        now = time.perf_counter()
        step_seconds, self._step_start = now - self._step_start, now
        seconds, metrics, logged = self._live.take_metrics()
        seconds["training"] = max(0.0, step_seconds - sum(seconds.values()))
        times = {f"time_{phase}": value for phase, value in seconds.items()}
        rate = tokens / step_seconds / run.mesh.world.size
        return {**metrics, **times, "tokens_per_second_per_device": rate}, logged

    def _read(self, sums: Tensor) -> dict[str, float | None]:
        means = self.loss.means(sums)
        means["kl"] = means["kl"] if self.loss.rl.loss_beta else None
        means["entropy"] = means["entropy"] if self.loss.needs_entropy else None
        return means


STEP_CAUSE = (
    "the canary agreed, so the weights are the same and the difference depends on the sequence length or the batch: "
    "kernels, precision, or tokens that are routed to other experts"
)


def step_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Return the log line of a step; an unknown metric is a dash."""

    def text(name: str, format_spec: str) -> str:
        return "–" if metrics.get(name) is None else format(metrics[name], format_spec)

    asynchrony = (
        f"staleness {text('staleness', '.2f')}, at most {text('staleness_max', 'd')}, "
        f"dropped {text('tokens_dropped', ',d')} tokens, queue {text('queue_length', 'd')}"
    )
    seconds = ", ".join(
        f"{name.removeprefix('time_')} {metrics[name]:.2f}" for name in metrics if name.startswith("time_")
    )
    parts = [
        f"step {step}",
        f"reward {text('rewards_mean', '.4f')} ± {text('rewards_std', '.4f')}",
        f"without spread {text('groups_without_spread', '.0%')}",
        f"length {text('completion_length', '.1f')}, truncated {text('completions_truncated', '.0%')}",
        f"entropy {text('entropy', '.3f')}",
        f"KL {text('kl', '.2e')}",
        f"clipped {text('clip_low', '.1%')} / {text('clip_high', '.1%')}",
        f"drift {text('mismatch', '.6f')}, largest {text('drift_largest', '.1e')}",
        *[asynchrony] * ("staleness" in metrics),
        f"seconds: {seconds}",
        f"{text('tokens_per_second_per_device', ',.0f')} tok/s/GPU",
    ]
    return " | ".join(parts)
