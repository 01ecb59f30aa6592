"""Samples and scores prompt groups, distributed over the ranks.

The ranks that generate together (along tensor parallelism, if the engine has that axis) are a generation replica. Each
replica samples its share of the groups and scores them; then every rank gets all groups. A completion depends only on
the weights and on (seed, position of the prompt in the run's stream, its number in the group), so a run that is
restarted after a kill samples the same completions again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import astuple, replace
from threading import Lock
from typing import Any

import numpy as np

from megalith.comm.collectives import gather_json
from megalith.generation.requests import Sampling
from megalith.generation.speculation import DraftMetrics
from megalith.rl.advantages.advantages import ZERO_STD
from megalith.rl.agents.endpoint_agent import EndpointAgent
from megalith.rl.agents.policy_agent import PolicyAgent
from megalith.rl.engines.rollout_engine import run_sampling
from megalith.rl.rewards.model_rewards import ModelRewards
from megalith.rl.rewards.rewards import Rewards
from megalith.rl.rewards.scored_text import ScoredText
from megalith.rl.rollouts.prompts import Prompt, Prompts, max_sequence_tokens
from megalith.rl.rollouts.rollout_metrics import batch_advantages, prefill_metrics
from megalith.rl.rollouts.rollouts import PromptGroup
from megalith.rl.sampling.phase_timer import PhaseTimer
from megalith.rl.sampling.scored_groups import (
    HELD_OUT_KEY,
    GroupRecord,
    QueuedBatch,
    held_out_metrics,
    sample_groups,
)
from megalith.rl.sampling.weight_sync import WeightSync
from megalith.training.run_state import Run

CONSUMED = "prompts"  # counter of a checkpoint
LOGGED = "logged"  # among a batch's metrics: means of the values that rewards logged


class RolloutSampler:
    """Samples the groups of a run with the engine's current weights."""

    def __init__(
        self,
        run: Run,
        prompts: Prompts,
        held_out: Sequence[Prompt],
        rewards: Rewards,
        weights: WeightSync,
        timed: PhaseTimer,
        agent: PolicyAgent | EndpointAgent | None = None,
    ):
        """Prepare to sample.

        `rewards` numbers the held-out prompts after the training prompts. With `agent`, completions have several
        turns.
        """
        self._agent = agent
        self._run, self._rl, self._prompts, self._rewards = run, run.config.rl, prompts, rewards
        self._weights, self._timed = weights, timed
        self._all_prompts = [*prompts.prompts, *held_out]
        self._models = ModelRewards(run) if self._rl.reward_models else None
        self._agent_lock = Lock()  # its processes serve one batch at a time

    def sample_batch(self, groups: int) -> tuple[list[PromptGroup], dict[str, Any]]:
        """Sample and score the next groups of the stream. Collective over all ranks.

        Groups whose rewards are all equal are replaced by the next ones, up to rl.max_resamples times.

        Returns:
            The groups, and the batch's metrics.
        """
        rl, totals, kept, equal = self._rl, self._run.totals, [], []
        sampled, metrics = 0, {LOGGED: {}}
        for _ in range(rl.max_resamples + 1):
            first, missing = int(totals[CONSUMED]), groups - len(kept)
            totals[CONSUMED] = first + missing
            candidates, round_metrics = self._sample(range(first, first + missing))
            metrics |= round_metrics | {LOGGED: metrics[LOGGED] | round_metrics[LOGGED]}
            sampled += missing
            group_std = batch_advantages(rl, candidates).group_std
            kept += [
                group for group, std in zip(candidates, group_std) if std > ZERO_STD or not rl.max_resamples
            ]
            equal = [group for group, std in zip(candidates, group_std) if std <= ZERO_STD]
            if len(kept) == groups:
                break
        metrics |= {"prompts_asked": sampled, "prompts_consumed": totals[CONSUMED]}
        return kept + equal[: groups - len(kept)], metrics

    def _sample(self, positions: Sequence[int]) -> tuple[list[PromptGroup], dict[str, Any]]:
        """Return the scored groups at these positions of the stream, on every rank, and their metrics."""
        batch = self.new_batch(positions)
        records, step = batch.records, self._run.step
        sampling = run_sampling(self._run, self._rl.max_completion_length)
        share = lambda: self.sample_share(records, sampling, step, self._timed)  # noqa: E731
        for pieces, logged in self._weights.request(share, "rewards"):
            batch.add([GroupRecord.from_fields(*fields) for fields in pieces], logged)
        return self.finish(batch)

    def new_batch(self, positions: Sequence[int]) -> QueuedBatch:
        """Return the unsampled batch at these positions of the stream."""
        return QueuedBatch([GroupRecord(position, self._prompts.index(position)) for position in positions])

    def finish(self, batch: QueuedBatch) -> tuple[list[PromptGroup], dict[str, Any]]:
        """Return the groups of a scored batch, and its metrics."""
        self._score_by_models(batch.records)
        samples = [one for record in batch.records for one in record.samples]
        metrics = {
            LOGGED: {name: float(np.mean(values)) for name, values in batch.logged.items()},
            "memory_engine_gb": self._weights.engine.memory() / 1e9,
            "logprobs_absent": sum(one.absent_logprobs for one in samples),
        }
        if self._rl.speculative_method != "none":
            metrics |= self._draft_metrics()
        return [record.group(self._prompts.prompts) for record in batch.records], metrics

    def _draft_metrics(self) -> dict[str, float]:
        """Return the metrics of speculative decoding over all replicas. Collective over all ranks."""
        mine = astuple(self._weights.engine.take_draft_metrics())
        ranks = gather_json(list(mine) if self._run.mesh.tp.rank == 0 else [0, 0, 0], self._run.mesh.world)
        return DraftMetrics(*map(sum, zip(*ranks))).metrics

    def _score_by_models(self, records: Sequence[GroupRecord]) -> None:
        """Score the groups with the reward models and set these rewards.

        Collective over all ranks, which pass all groups.
        """
        if self._models is None or not records:
            return
        decode, columns = self._run.tokenizer.decode_without_special, self._rewards.model_columns
        texts = [
            ScoredText(
                self._all_prompts[record.prompt], one.ids, decode(one.ids), not one.truncated, one.messages
            )
            for record in records
            for one in record.samples
        ]
        with self._timed("reward_models"):
            scores = iter(self._models(texts).tolist())
        for record in records:
            for one in record.samples:
                one.rewards[columns] = next(scores)

    def prepare(self, records: Sequence[GroupRecord]) -> None:
        """Start the agent's processes for this rank's share of the groups.

        Call it before `sample_share` runs in another thread.
        """
        if self._agent is not None and self._run.mesh.tp.rank == 0:
            self._agent.prepare(len(self._local(records)) * self._rl.num_generations)

    def _local(self, records: Sequence[GroupRecord]) -> Sequence[GroupRecord]:
        """Return the groups of this rank's replica."""
        run, world = self._run, self._run.mesh.world
        return records[world.rank // run.mesh.tp.size :: world.size // run.mesh.tp.size]

    def sample_share(
        self,
        records: list[GroupRecord],
        sampling: Sampling,
        step: int,
        timed: Callable,
        num_generations: int | None = None,
    ) -> list[Any]:
        """Sample this rank's share of the groups, at most `sampling.max_new_tokens` per completion.

        Returns:
            The fields of the new GroupRecords, and logged values by name, as JSON values.
        """
        run, rl, local = self._run, self._rl, self._local(records)
        rewards, engine = self._rewards if run.mesh.tp.rank == 0 else None, self._weights.engine
        if self._agent is not None and engine.shared and rewards is None:
            return [[], {}]
        with nullcontext() if self._agent is None else self._agent_lock:
            pieces, logged = sample_groups(
                engine, self._all_prompts, rewards, run.tokenizer, local, sampling,
                num_generations or rl.num_generations, step, timed, rl.max_completion_length, self._agent,
                self._share, max_sequence_tokens(run.config) - rl.max_completion_length,
            )  # fmt: skip
        if rewards is not None and (tokens := engine.take_prefill_tokens()) is not None:
            logged = logged | prefill_metrics(*tokens)
        return [[astuple(piece) for piece in pieces], logged]

    def _share(self, value: Any) -> Any:
        """Return the first tensor-parallel rank's value. With an engine shared by all ranks, return `value`
        unchanged.
        """
        tp = self._run.mesh.tp
        return value if tp.size == 1 or self._weights.engine.shared else gather_json(value, tp)[0]

    def evaluate(
        self, before: Callable[[int, int], None], stops: Callable[[], str | None]
    ) -> dict[str, float] | None:
        """Sample the held-out prompts with the current weights and return their metrics. Collective over all ranks.

        Sampling keys differ from training's and no counter moves, so that training is not affected.

        Args:
            before: called before each chunk of prompts, with the number of finished chunks and the total number.
            stops: called after each chunk; ends the evaluation if it returns a reason.

        Returns:
            The metrics, or None if there are no held-out prompts or `stops` ended the evaluation.
        """
        rl, first = self._rl, len(self._prompts)
        batch = QueuedBatch([GroupRecord(HELD_OUT_KEY + n, n) for n in range(first, len(self._all_prompts))])
        if not batch.records:
            return None
        self._weights.update()
        sampling = run_sampling(self._run, rl.max_completion_length)
        if rl.eval_temperature is not None:
            sampling = replace(sampling, temperature=rl.eval_temperature)
        size = max(1, self._run.config.train.global_batch_size // rl.num_eval_generations)
        parts = [batch.records[start : start + size] for start in range(0, len(batch.records), size)]
        untimed = lambda phase: nullcontext()  # noqa: E731
        for done, records in enumerate(parts):
            before(done, len(parts))
            arguments = records, sampling, self._run.step, untimed, rl.num_eval_generations
            share = lambda arguments=arguments: self.sample_share(*arguments)  # noqa: E731
            for pieces, logged in self._weights.request(share):
                batch.add([GroupRecord.from_fields(*fields) for fields in pieces], logged)
            if stops():
                break
        self._weights.engine.release()
        if not batch.is_scored:
            return None
        self._score_by_models(batch.records)
        return held_out_metrics(rl, self._rewards.names, batch)
