"""Rollout batches that are sampled during training.

    weight sync ─▶ canary ─▶ prompts ─▶ completions ─▶ rewards ─▶ RolloutData: advantages, log-probabilities of the old
    policy and of the reference, packed mini-batches over the ranks ─▶ training steps ─▶ the next rollout batch

weight_sync.py sends weights to the engine, rollout_sampler.py samples and computes rewards, and rollout_queue.py holds
batches sampled ahead. This file calls them in order, and logs and saves the batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from megalith.report.line_writer import LineWriter
from megalith.report.metrics import finite, truncate_after_step
from megalith.rl.agents.endpoint_agent import EndpointAgent
from megalith.rl.agents.policy_agent import PolicyAgent
from megalith.rl.rewards.rewards import Rewards
from megalith.rl.rollouts.prompts import Prompt, Prompts, policy_vocab_size
from megalith.rl.rollouts.rollout_reader import load_rollouts
from megalith.rl.rollouts.rollouts import PromptGroup, Rollouts, encode_rollouts, save_rollouts
from megalith.rl.sampling.phase_timer import PhaseTimer
from megalith.rl.sampling.rollout_queue import RolloutQueue
from megalith.rl.sampling.rollout_sampler import CONSUMED, LOGGED, RolloutSampler
from megalith.rl.sampling.scored_groups import prefixed
from megalith.rl.sampling.weight_sync import WeightSync
from megalith.tables import counted
from megalith.training.run_state import Run

CURRENT = "batch_{:08d}.jsonl.zst"  # file name of a rollout batch


class LiveRollouts:
    """A RolloutSource that samples with the policy. It is created before the run's model."""

    can_prefetch = False

    def __init__(
        self,
        run: Run,
        prompts: Prompts,
        rewards: Rewards,
        held_out: Sequence[Prompt] = (),
        agent: PolicyAgent | EndpointAgent | None = None,
    ):
        """Prepare to sample. `held_out` are the prompts of evaluations; `rewards` numbers them after the training
        prompts. `agent` samples completions of several turns.
        """
        self._agent = agent
        self._run, self._rl, self._prompts, self._rewards = run, run.config.rl, prompts, rewards
        self._timer = PhaseTimer(run.device)
        canary_prompts = [prompts.prompts[n] for n in range(min(4, len(prompts)))]
        self._weights = WeightSync(run, [*prompts.prompts, *held_out], canary_prompts, self._timer)
        self._sampler = RolloutSampler(run, prompts, held_out, rewards, self._weights, self._timer, agent)
        self._queue = RolloutQueue(run, prompts, self._sampler, self._weights, self._timer)
        self._metrics: dict[str, Any] = {}  # of the rollout batch in progress
        self._current: tuple[int, list[PromptGroup]] | None = None  # number and groups of that batch
        self.is_stale = False
        """True if any token of the batch was sampled by weights older than the batch's first step."""
        self._completions: LineWriter | None = None
        self.rewards = rewards.names
        self.notes = [f"{counted(len(prompts), 'prompt')}; rewards: {', '.join(rewards.names)}"]
        self.notes += prompts.notes() + ([] if agent is None else agent.notes())
        if held_out:
            self.notes.append(f"{len(held_out):,} held-out prompts")
            trained = {tuple(prompt.ids) for prompt in prompts.prompts}
            if repeats := sum(tuple(prompt.ids) in trained for prompt in held_out):
                self.notes.append(f"{repeats:,} of the held-out prompts are also training prompts")

    def files(self) -> dict[str, dict[str, int | str]]:
        """Return the fields of a DataRecord for the prompts: their number and SHA-256."""
        return {"prompts": {"rows": len(self._prompts), "samples_sha256": self._prompts.identity()}}

    def timed(self, phase: str) -> AbstractContextManager:
        """Time a phase of the step."""
        return self._timer(phase)

    def take_metrics(self) -> tuple[dict[str, float], dict[str, Any], dict[str, float]]:
        """Return what has accumulated since the last call: seconds by phase, the batch's metrics, and the metrics
        logged by rewards.
        """
        metrics = {name: value for name, value in self._metrics.items() if name != LOGGED}
        return self._timer.take(), metrics, self._metrics.get(LOGGED, {})

    def batch(self, number: int, groups: int) -> list[PromptGroup]:
        """Return rollout batch `number`: the checkpoint's, the one sampled ahead, or a new one."""
        run, rl = self._run, self._rl
        is_inside, first_step = run.step % rl.steps_per_batch, number * rl.steps_per_batch
        run.totals.setdefault(CONSUMED, number * groups)
        current, current_groups = self._current or (-1, [])
        if is_inside and current == number and len(current_groups) == groups:
            batch = current_groups
            run.log(
                f"resuming inside the checkpoint's rollout batch, after {run.step - first_step} of its steps"
            )
        else:
            batch = self._new_batch(number, groups)
        self.is_stale = any((one.version != first_step).any() for group in batch for one in group.completions)
        if rl.max_staleness:
            self._metrics["queue_length"] = len(self._queue)
        return batch

    def _new_batch(self, number: int, groups: int) -> list[PromptGroup]:
        run, rl = self._run, self._rl
        if run.step % rl.steps_per_batch:
            run.log(
                f"step {run.step} is inside a rollout batch that the checkpoint does not have: "
                "the batch is sampled again with the current weights"
            )
        with self._timer("sync"):
            self._metrics = self._weights.sync()
        queued = self._queue.take(number)
        batch, metrics = (
            self._sampler.sample_batch(groups) if queued is None else self._sampler.finish(queued)
        )
        self._metrics |= metrics
        for problem in () if self._agent is None else self._agent.take_problems():
            run.log(f"warning: step {run.step + 1}: {problem}")
        run.totals[CONSUMED] = max(int(run.totals[CONSUMED]), (number + 1) * groups)
        self._weights.engine.release()
        if rl.max_staleness:
            self._queue.start(number, groups)
        if rl.save_rollouts and run.mesh.world.rank == 0:
            self._save(number, batch)
        if rl.log_completions and run.mesh.world.rank == 0:
            self._log_completions(batch)
        self._current = number, batch
        return batch

    def settle(self) -> None:
        """Wait for the batches sampled ahead. Collective over all ranks, in the last step of a rollout batch."""
        self._queue.settle()

    def evaluate(
        self, before: Callable[[int, int], None], stops: Callable[[], str | None]
    ) -> dict[str, float] | None:
        """Return the metrics of the held-out prompts; see RolloutSampler.evaluate."""
        return self._sampler.evaluate(before, stops)

    # Checkpoints

    def state_files(self) -> dict[str, bytes]:
        """Return the queue and the rollout batch in progress, by file name. Collective over all ranks."""
        self.settle()
        if self._run.mesh.world.rank:
            return {}
        files = self._queue.files()
        if self._current is not None and self._run.step % self._rl.steps_per_batch:
            number, groups = self._current
            name = CURRENT.format(number)
            files[name] = encode_rollouts(name, self._rollouts(groups))
        return files

    def load_state(self, step: int, files: Mapping[str, Path]) -> None:
        """Restore what `state_files` returned at this step."""
        config, rl = self._run.config, self._rl
        number, self._current = step // rl.steps_per_batch, None
        if (path := files.get(CURRENT.format(number))) is not None:
            rollouts = load_rollouts(
                path,
                vocab_size=policy_vocab_size(config, self._run.tokenizer),
                max_tokens=config.data.seq_length + 1,
                num_generations=rl.num_generations,
            )
            self._current = number, rollouts.groups
        self._queue.load(files)

    # Files of a run

    def _save(self, number: int, groups: list[PromptGroup]) -> None:
        path = Path(self._run.output) / "rollouts" / CURRENT.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_rollouts(path, self._rollouts(groups))

    def _rollouts(self, groups: list[PromptGroup]) -> Rollouts:
        return Rollouts(groups, self._rewards.names, self._run.tokenizer.fingerprint)

    def _log_completions(self, groups: list[PromptGroup]) -> None:
        run, decode = self._run, self._run.tokenizer.decode
        if self._completions is None:
            path = Path(run.output) / "completions.jsonl"
            truncate_after_step(path, run.step)
            self._completions = LineWriter(path)
        to_print = self._rl.num_completions_to_print
        for group in groups:
            for one in group.completions:
                rewards = [finite(value) for value in one.rewards.tolist()]
                line = {
                    "step": run.step + 1,
                    "prompt_id": group.id,
                    "prompt": decode(group.prompt_of(one).tolist()),
                    "completion": decode(one.ids.tolist()),
                    "rewards": dict(zip(self._rewards.names, rewards)),
                    "truncated": one.truncated,
                }
                if one.messages is not None:
                    line |= {"messages": one.messages, "segments": list(one.segments or ())}
                    line |= {"turn_rewards": list(one.turn_rewards)} if one.turn_rewards else {}
                line |= {prefixed(name, line): value for name, value in one.extra.items()}
                self._completions.write(json.dumps(line))
                if to_print > 0:
                    to_print -= 1
                    run.log(
                        f"prompt {group.id}: {line['prompt']!r} → {line['completion']!r}, rewards {line['rewards']}"
                    )

    def close(self) -> None:
        self._rewards.close()
        if self._agent is not None:
            self._agent.close()
        self._weights.close()
