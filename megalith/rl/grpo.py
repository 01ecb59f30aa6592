"""`megalith grpo`: a policy trained on what it samples, or on rollouts from files, by the trainer's own loop.

The loop, optimizer, checkpoints and report are those of pre-training; what differs is the Task: the data, the loss and
the figures of a step. Where rollouts come from: rollout_data.py (files) and loop.py (prompts).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.config import RunConfig, require_run_config
from megalith.data.tokenizers.open_tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.report.metrics import ExpertStepMetrics
from megalith.rl.drift import Gap, nothing_to_compare, step_gap, stop_for
from megalith.rl.judged_groups import prefixed
from megalith.rl.loop import LiveRollouts
from megalith.rl.objective import PolicyLoss
from megalith.rl.prompts import held_out_prompts, policy_entries, run_prompts
from megalith.rl.reference import reference_logprobs
from megalith.rl.rewards import Rewards, reward_function
from megalith.rl.rollout_data import FileRollouts, RolloutData
from megalith.rl.rollouts import RolloutFiles
from megalith.training.run_state import Run, Task
from megalith.training.trainer import TrainingResult, train

RewardGiven = Callable[..., Any]


def grpo(
    config: RunConfig,
    reward_funcs: str | RewardGiven | Sequence[str | RewardGiven] | None = None,
    train_dataset: Iterable[Mapping[str, Any]] | None = None,
    eval_dataset: Iterable[Mapping[str, Any]] | None = None,
) -> TrainingResult:
    """Trains on the prompts that `rl.prompts` names, or on the files of `rl.rollouts`, as `megalith.train` does on a
    dataset; raises as it does.

    `reward_funcs`: names or functions (rewards.py) in the place of `rl.reward_funcs`. `train_dataset`: records with
    prompts in the place of `rl.prompts`; `eval_dataset`: in that of `rl.eval_prompts`.
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
    require_source(config)
    task = PolicyTask(reward_funcs, train_dataset, eval_dataset)
    try:
        return train(config, task)
    finally:
        task.close()


train_grpo = grpo  # as megalith.rl has it, where the module bears the short name


def require_source(config: RunConfig) -> None:
    """Raises ConfigError for a run that has nothing to train on."""
    if not config.rl.prompts_or_rollouts:
        raise ConfigError(
            "neither rl.prompts nor rl.rollouts is set; name the prompts to sample completions of, with "
            "rl.reward_funcs, or files of rollouts (docs/grpo.md)"
        )


def check_grpo_data(config: RunConfig, tokenizer: Tokenizer | None) -> None:
    """Raises what opening the run's prompts and rewards, or rollouts, would."""
    if config.rl.prompts:
        run_prompts(config, tokenizer, show_progress=True)
        held_out_prompts(config, tokenizer, show_progress=True)
        for name in config.rl.rewards:
            reward_function(name)
    else:
        open_rollouts(config, tokenizer)


def open_rollouts(config: RunConfig, tokenizer: Tokenizer | None, world: Axis = Axis()) -> RolloutFiles:  # noqa: B008 (immutable)
    """The run's rollouts, checked against its model, lengths, groups and tokenizer. Raises DataError."""
    return RolloutFiles(
        config.rl.files,
        world,
        vocab_size=policy_entries(config, tokenizer),
        max_tokens=config.data.seq_length + 1,
        num_generations=config.rl.num_generations,
        version=config.rl.rollout_version,
        tokenizer=tokenizer and tokenizer.fingerprint,
    )


class PolicyTask(Task):
    """What the trainer's loop needs to know of GRPO."""

    console_metrics = ("rewards_mean",)

    def __init__(
        self,
        reward_funcs: Sequence[str | RewardGiven] | None = None,
        records: Iterable[Mapping[str, Any]] | None = None,
        held_out: Iterable[Mapping[str, Any]] | None = None,
    ):
        """In the place of `rl.reward_funcs` and of the files of `rl.prompts` and `rl.eval_prompts`."""
        self._reward_funcs, self._records, self._held_out = reward_funcs, records, held_out
        self._live: LiveRollouts | None = None
        self._own = {one.name for one in fields(ExpertStepMetrics)}  # names of the run's own figures
        self._renamed: set[str] = set()  # figures of rewards that had such a name

    def build_data(self, run: Run) -> RolloutData:
        config = run.config
        self.loss = PolicyLoss(config.rl, policy_entries(config, run.tokenizer))
        reference = (
            reference_logprobs(run, config.rl.temperature, self.loss.vocab_size) if config.rl.beta else None
        )
        if not config.rl.prompts:
            return RolloutData(
                run, FileRollouts(run, open_rollouts(config, run.tokenizer, run.mesh.world)), reference
            )
        is_first, rl = run.mesh.world.rank == 0, config.rl
        prompts = run_prompts(config, run.tokenizer, self._records, is_first)
        held_out = held_out_prompts(config, run.tokenizer, self._held_out, is_first)
        rewards = Rewards(
            self._reward_funcs or rl.rewards,
            [*prompts.prompts, *held_out],
            longest=rl.max_completion_length,
            workers=rl.reward_workers if run.mesh.tp.rank == 0 else 0,
            timeout=rl.reward_timeout,
        )
        self._live = LiveRollouts(run, prompts, rewards, held_out)
        self._began = time.perf_counter()
        return RolloutData(run, self._live, reference)

    def state_files(self, run: Run) -> dict[str, bytes]:
        return run.data.state_files() | ({} if self._live is None else self._live.state_files())

    def load_state(self, run: Run, files: Mapping[str, Path]) -> None:
        run.data.load_state(files)
        if self._live is not None:
            self._live.load_state(run.step, files)

    def close(self) -> None:
        if self._live is not None:
            self._live.close()

    def step_metrics(self, run: Run) -> Callable[[], dict[str, Any]]:
        """Of the step that `run` is about to count. Every rank calls it. Raises TrainingError for drift."""
        if self._live is not None and (run.step + 1) % run.config.rl.steps_per_batch == 0:
            self._live.settle()
        sums = self.loss.take_all_sums(run.mesh, run.device)
        gap = step_gap(run, self.loss.take_largest())
        step = run.data.step(run.step)
        known = step.figures | ({"drift_largest": gap.size} if gap else {})
        if self._live is None:
            return lambda: {**self._read(sums), **known}
        ratio = self._read(sums)["mismatch"]
        if ratio is None and sums[0] > 0:
            raise nothing_to_compare(f"of step {run.step + 1}")
        self._check_drift(run, ratio, gap)
        number = run.step + 1  # figures may be read when later steps are counted
        tokens = sum(len(s.prompt_ids) + len(s.completion.ids) for row in step.rows for s in row)
        times, logged = self._times(run, tokens)
        known |= times

        def read() -> dict[str, Any]:
            found = {**self._read(sums), **known}
            run.log(step_line(number, found))
            return self._with_logged(run, found, logged)

        return read

    def evaluate(
        self, run: Run, before: Callable[[int, int], None], stops: Callable[[], str | None]
    ) -> dict[str, float] | None:
        """Of the held-out prompts. The seconds are none of a step's."""
        if self._live is None:
            return None
        self._live.settle()
        began = time.perf_counter()
        figures = self._live.judge_held_out(before, stops)
        seconds = time.perf_counter() - began
        self._began += seconds
        return figures and figures | {"seconds": seconds}

    def _check_drift(self, run: Run, ratio: float | None, gap: Gap | None) -> None:
        """Where the old policy is the one that sampled."""
        rl, limit = run.config.rl, run.config.rl.drift_limit(run.config.train.precision)
        comparable = (rl.computes_old or run.step % rl.steps_per_batch == 0) and not self._live.is_stale
        if comparable and ratio is not None and gap is not None and not ratio <= limit:
            version = run.step - run.step % rl.steps_per_batch
            raise stop_for(
                ratio, limit, f"over the tokens of step {run.step + 1}", gap, (version, version), STEP_CAUSE
            )

    def _with_logged(self, run: Run, found: dict[str, Any], logged: Mapping[str, float]) -> dict[str, Any]:
        """The figures of a step with what rewards logged, none of which takes the place of the run's own."""
        self._own |= found.keys()
        named = {name: prefixed(name, self._own) for name in logged}
        for name, other in named.items():
            if name != other and name not in self._renamed:
                run.log(
                    f"a reward logs a metric {name}, which is a figure of the run's own: it is logged as {other}"
                )
                self._renamed.add(name)
        return found | {named[name]: value for name, value in logged.items()}

    def _times(self, run: Run, tokens: int) -> tuple[dict[str, Any], dict[str, float]]:
        """Seconds of the step by phase, and tokens a second over all of it; and what the rewards logged. A step is
        timed from the moment that the one before has its gradients."""
        now = time.perf_counter()
        whole, self._began = now - self._began, now
        seconds, found, logged = self._live.take_figures()
        seconds["training"] = max(0.0, whole - sum(seconds.values()))
        times = {f"time_{phase}": value for phase, value in seconds.items()}
        rate = tokens / whole / run.mesh.world.size
        return {**found, **times, "tokens_per_second_per_device": rate}, logged

    def _read(self, sums: Tensor) -> dict[str, float | None]:
        found = self.loss.means(sums)
        found["kl"] = found["kl"] if self.loss.rl.beta else None
        found["entropy"] = found["entropy"] if self.loss.needs_entropy else None
        return found


STEP_CAUSE = (
    "the canary agreed, so the weights are the same; log-probabilities differ with the length or the batch: kernels, "
    "precision, or routes of experts that flip"
)


def step_line(step: int, found: Mapping[str, Any]) -> str:
    """What a reader of the log sees of a step; a figure that is not known is a dash."""

    def of(name: str, form: str) -> str:
        return "–" if found.get(name) is None else format(found[name], form)

    asynchrony = (
        f"staleness {of('staleness', '.2f')}, at most {of('staleness_max', 'd')}, "
        f"dropped {of('tokens_dropped', ',d')} tokens, queue {of('queue_length', 'd')}"
    )
    seconds = ", ".join(
        f"{name.removeprefix('time_')} {found[name]:.2f}" for name in found if name.startswith("time_")
    )
    parts = [
        f"step {step}",
        f"reward {of('rewards_mean', '.4f')} ± {of('rewards_std', '.4f')}",
        f"without spread {of('groups_without_spread', '.0%')}",
        f"length {of('completion_length', '.1f')}, truncated {of('completions_truncated', '.0%')}",
        f"entropy {of('entropy', '.3f')}",
        f"KL {of('kl', '.2e')}",
        f"clipped {of('clip_low', '.1%')} / {of('clip_high', '.1%')}",
        f"drift {of('mismatch', '.6f')}, largest {of('drift_largest', '.1e')}",
        *[asynchrony] * ("staleness" in found),
        f"seconds: {seconds}",
        f"{of('tokens_per_second_per_device', ',.0f')} tok/s/GPU",
    ]
    return " | ".join(parts)
