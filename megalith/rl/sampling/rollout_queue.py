"""Queue of rollout batches that a server samples while earlier ones are trained on (rl.max_staleness).

Sampling of batch b + n begins while batch b is trained on and must be complete n syncs later. Between two syncs, every
open completion of a queued batch is extended by an equal share of its maximum length; after a sync it continues with
the new weights. Completions of several turns, whose environments have state, are sampled whole instead: between two
syncs, an equal share of a batch's groups. The version that samples a token thus depends on the settings and not on
timing. Checkpoints contain the queue, so a resumed run continues as if it had not stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import TIMEOUT_MAX, Lock
from typing import Any

from megalith.generation.requests import Sampling
from megalith.rl.engines.deadline import InThread
from megalith.rl.engines.rollout_engine import run_sampling
from megalith.rl.rollouts.prompts import Prompts
from megalith.rl.sampling.phase_timer import PhaseTimer
from megalith.rl.sampling.rollout_sampler import RolloutSampler
from megalith.rl.sampling.scored_groups import GroupRecord, QueuedBatch, decode_queue, encode_queue
from megalith.rl.sampling.weight_sync import WeightSync
from megalith.training.run_state import Run

QUEUE = "queue.json.zst"  # file name within a checkpoint


class RolloutQueue:
    """Rollout batches sampled ahead, by number. Empty unless rl.max_staleness is set."""

    def __init__(
        self, run: Run, prompts: Prompts, sampler: RolloutSampler, weights: WeightSync, timed: PhaseTimer
    ):
        self._run, self._rl, self._prompts = run, run.config.rl, prompts
        self._sampler, self._weights, self._timed = sampler, weights, timed
        self._batches: dict[int, QueuedBatch] = {}
        self._pieces: list[
            tuple[int, Callable[[], list[Any]], InThread]
        ] = []  # in progress: batch number, work
        self._reward_lock = Lock()  # reward workers serve one thread at a time

    def __len__(self) -> int:
        return len(self._batches)

    def take(self, number: int) -> QueuedBatch | None:
        """Remove and return a batch, or return None if it was not sampled ahead."""
        return self._batches.pop(number, None)

    def start(self, number: int, groups: int) -> None:
        """Start threads that sample, for the batches after `number`, the tokens due before the next weight sync."""
        rl, step, batches = self._rl, self._run.step, self._batches
        last = min(number + rl.max_staleness, (self._run.total_steps - 1) // rl.steps_per_batch)
        for ahead in range(number + 1, last + 1):
            if ahead not in batches:
                batches[ahead] = self._sampler.new_batch(range(ahead * groups, (ahead + 1) * groups))
        due: list[tuple[int, list[GroupRecord], int]] = []  # batch, groups and tokens per completion
        for ahead, batch in sorted(batches.items()):
            if not batch.is_scored:
                records = [record for record in batch.records if not record.is_scored]
                if rl.uses_turns:
                    records = records[: -(-len(records) // (ahead - number))]
                    tokens = rl.max_completion_length
                else:
                    tokens = -(-(rl.max_completion_length - batch.sampled_tokens) // (ahead - number))
                due.append((ahead, records, tokens))
        for _, records, _ in due:
            self._sampler.prepare(records)
        for ahead, records, tokens in due:
            sample = self._share_of(records, run_sampling(self._run, tokens), step)
            self._pieces.append((ahead, sample, InThread(sample)))

    def _share_of(self, records: list[GroupRecord], sampling: Sampling, step: int) -> Callable[[], list[Any]]:
        def timed(phase: str) -> AbstractContextManager:
            return self._reward_lock if phase == "rewards" else nullcontext()

        return lambda: self._sampler.sample_share(records, sampling, step, timed)

    def settle(self) -> None:
        """Wait for the threads and distribute their results to every rank.

        Collective over all ranks, in the last step of a rollout batch and before a checkpoint is saved.
        """
        if not self._pieces:
            return
        pieces, self._pieces = self._pieces, []

        def wait() -> list[list[Any]]:
            with self._timed("generation"):
                for *_, thread in pieces:  # all, before one of them raises, so that none is left running
                    thread.wait(TIMEOUT_MAX)
            return [[ahead, *thread.result()] for ahead, _, thread in pieces]

        retry = lambda: [[ahead, *sample()] for ahead, sample, _ in pieces]  # noqa: E731
        ranks = self._weights.request(wait, "generation", retry)
        for ahead, records, logged in (share for shares in ranks for share in shares):
            self._batches[ahead].add([GroupRecord.from_fields(*fields) for fields in records], logged)

    def files(self) -> dict[str, bytes]:
        """Return the checkpoint file of the settled queue. Returns no file if the queue has no batches."""
        return {QUEUE: encode_queue(self._batches, self._shape())} if self._batches else {}

    def load(self, files: Mapping[str, Path]) -> None:
        """Restore the queue from a checkpoint's files, unless settings that determine its batches have changed."""
        self._batches = {}
        if QUEUE not in files or not self._rl.max_staleness:
            return
        batches, saved_shape = decode_queue(files[QUEUE].read_bytes())
        changed = [name for name, value in self._shape().items() if saved_shape.get(name) != value]
        if changed:
            self._run.notes.append(
                f"the checkpoint's {len(batches)} rollout batches ahead are discarded and sampled again, because "
                f"these settings changed: {', '.join(changed)}"
            )
        else:
            self._batches = batches

    def _shape(self) -> dict[str, Any]:
        """Return the settings that determine the batches."""
        rl, size = self._rl, self._run.config.train.global_batch_size
        names = "num_generations", "mini_batches", "num_iterations", "max_completion_length"
        settings = {f"rl.{name}": getattr(rl, name) for name in names}
        if rl.uses_turns:
            names = "tools", "environment", "agent", "max_turns", "max_tool_calls"
            settings |= {f"rl.{name}": getattr(rl, name) for name in names}
        return settings | {"rl.prompts": self._prompts.identity(), "train.global_batch_size": size}
