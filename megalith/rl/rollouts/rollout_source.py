"""Sources of rollout batches: the interface, and files that are read in order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from megalith.config import RlConfig
from megalith.errors import DataError
from megalith.remote import open_location
from megalith.rl.advantages.advantages import ZERO_STD
from megalith.rl.rollouts.rollout_metrics import batch_advantages
from megalith.rl.rollouts.rollout_reader import RolloutFiles
from megalith.rl.rollouts.rollouts import PromptGroup
from megalith.training.run_state import Run


class RolloutSource(Protocol):
    """A source of rollout batches."""

    notes: list[str]
    rewards: list[str]
    """Names of the rewards."""
    can_prefetch: bool
    """True if a thread may request the next batch while the model trains on this one."""

    def batch(self, number: int, groups: int) -> list[PromptGroup]:
        """Return the groups of a rollout batch, the same on every rank. Collective over all ranks."""

    def files(self) -> dict[str, dict[str, int | str]]:
        """Return checksums and sizes by file name, to detect changed data."""

    def timed(self, phase: str) -> AbstractContextManager:
        """Time a phase of the step."""


class FileRollouts:
    """Rollout batches from files."""

    can_prefetch = True

    def __init__(self, run: Run, rollouts: RolloutFiles):
        rl, self.notes, self.rewards = run.config.rl, [], rollouts.rewards
        self._rollouts, self._entries, self._paths = rollouts, rollouts.entries, rl.files
        if rl.old_logprobs == "rollout" or rl.use_decoupled_loss:
            setting = (
                "old_logprobs is rollout" if rl.old_logprobs == "rollout" else "use_decoupled_loss is set"
            )
            _require_logprobs(map(rollouts.group, self._entries), setting)
        if rl.filter_zero_std:
            self._drop_zero_std_groups(rl)
        completions = len(self._entries) * rl.num_generations
        epochs = run.total_steps // rl.num_iterations * run.config.train.global_batch_size / completions
        if epochs > 1:
            self.notes.append(
                f"the run reads the rollouts {epochs:.1f} times ({len(self._entries):,} prompts)"
            )

    def _drop_zero_std_groups(self, rl: RlConfig) -> None:
        group_std = batch_advantages(rl, [*map(self._rollouts.group, self._entries)]).group_std
        kept = [entry for entry, deviation in zip(self._entries, group_std) if deviation > ZERO_STD]
        dropped = len(self._entries) - len(kept)
        if dropped:
            self.notes.append(
                f"rl.filter_zero_std removes {dropped:,} of {len(self._entries):,} groups, whose rewards are equal"
            )
        self._entries = kept or self._entries

    def batch(self, number: int, groups: int) -> list[PromptGroup]:
        positions = range(number * groups, (number + 1) * groups)
        return self._rollouts.read(self._entries[at % len(self._entries)] for at in positions)

    def files(self) -> dict[str, dict[str, int | str]]:
        return {path: _identity(path) for path in self._paths}

    def timed(self, phase: str) -> AbstractContextManager:
        return nullcontext()


def _require_logprobs(groups: Iterable[PromptGroup], setting: str) -> None:
    for group in groups:
        for number, completion in enumerate(group.completions):
            if completion.logprobs is None:
                raise DataError(
                    f"{group.where}, sample {number} has no logprobs, but rl.{setting}, which needs them; sample "
                    f"with log-probabilities, or change rl.{setting.split()[0]}"
                )


def _identity(path: str) -> dict[str, int | str]:
    """Return a file's size and SHA-256 under the names of a DataRecord's fields."""
    digest, size = hashlib.sha256(), 0
    with open_location(path).open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return {"bin_bytes": size, "idx_bytes": 0, "idx_sha256": digest.hexdigest()}
