"""Steps of a GRPO run: the micro-batches of each, made from its rollouts.

Rollout batch b is the b-th range of `global_batch_size` × `mini_batches` completions in complete groups, either read
from files in order (starting over at the end) or sampled on demand (sampling/). It is trained on for `steps_per_batch`
steps; step s uses mini-batch s mod `mini_batches`. Every rank computes advantages from the full rollout batch. Forward
passes before the first step on a rollout batch compute log-probabilities of the old policy and the reference. Rows
(rollout_rows.py) are distributed over the data-parallel ranks and padded with empty rows to the same number on each
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from megalith.parallel.pipeline.stages import padded_micro_batches
from megalith.report.report import TokenCounts
from megalith.rl.advantages.advantages import ZERO_STD
from megalith.rl.advantages.reward_kl import BatchRewards, with_reward_kl
from megalith.rl.auxiliary_models.reference import LogProbs
from megalith.rl.objectives.online_pairs import with_pairs
from megalith.rl.objectives.policy_loss import RolloutBatch, entropy_weight, without_routes
from megalith.rl.objectives.rollout_correction import correct_batches
from megalith.rl.objectives.token_selection import select_tokens, selects_tokens
from megalith.rl.rollouts.prompts import policy_vocab_size
from megalith.rl.rollouts.rollout_metrics import (
    absent_message,
    absent_rewards,
    batch_advantages,
    batch_token_advantages,
    reward_metrics,
    stale_tokens,
    staleness_metrics,
)
from megalith.rl.rollouts.rollout_rows import Sample, make_batch, pack_rows, packing_metrics, proximal_weights
from megalith.rl.rollouts.rollout_source import RolloutSource
from megalith.rl.rollouts.rollouts import PromptGroup, RatedCompletion
from megalith.rl.rollouts.row_logprobs import (
    RowKey,
    RowLogprobs,
    decode_row_logprobs,
    encode_row_logprobs,
    restore_row_logprobs,
)
from megalith.rl.teachers.teacher_advantages import TeacherAdvantages
from megalith.training.run_state import Run

OLD_LOGPROBS = "old_logprobs.json.zst"  # file name within a checkpoint


@dataclass(frozen=True)
class RolloutStep:
    """A mini-batch: its rows, which are the same in every layout, and the metrics known without a forward pass."""

    rows: list[list[Sample]]
    metrics: dict[str, float]
    rewards: BatchRewards  # of the rollout batch


class RolloutData:
    """The data of a GRPO run: rollouts, and the micro-batches made from them. It takes the place of pre-training's
    `Data`.
    """

    train = valid = test = None

    def __init__(
        self,
        run: Run,
        source: RolloutSource,
        reference: LogProbs | None,
        teacher: TeacherAdvantages | None = None,
    ):
        """Prepare the stream. `reference` computes the reference's log-probabilities of micro-batches, and `teacher`
        adds to their advantages. None means the run does not need them.
        """
        config = run.config
        self._teacher = teacher
        self.reward_kl = 0.0  # mean over the tokens of the rollout batch
        self.rejected = 0.0  # fraction of the tokens of the rollout batch
        self._run, self._rl, self._reference = run, config.rl, reference
        self._size = config.train.global_batch_size
        self._steps: dict[int, list[RolloutStep]] = {}  # of the most recent rollout batches, by number
        self._absent: dict[str, int] = {}  # by reward: consecutive rollout batches without a value
        self._lock = Lock()
        self._ready: list[list[RolloutBatch]] = []  # the rollout batch in progress, by mini-batch
        self._restored: tuple[int, RowLogprobs] = (
            -1,
            {},
        )  # number and old log-probabilities of a rollout batch
        self.source, self.notes, self.files = source, source.notes, source.files

    def train_loader(
        self, step: int, consumed_samples: int, device: torch.device, left_out: Sequence[Sequence[int]] = ()
    ) -> closing:
        """Return an iterator over the micro-batches from `step` to the end of the run. Every rank iterates in step."""
        return closing(self._micro_batches_from(step))

    def micro_batches(self, consumed_samples: int) -> int:
        """Return the number of micro-batches per data-parallel rank in the next step, which begins after
        `consumed_samples` samples.
        """
        rows = len(self.step(consumed_samples // self._size).rows)
        rows_per_micro_batch = self._run.config.train.micro_batch_size * self._run.mesh.dp.size
        return padded_micro_batches(self._run.config.parallel, -(-rows // rows_per_micro_batch))

    def work(self, consumed_samples: int, batch_size: int) -> TokenCounts:
        """Return the number of tokens and of attended (query, key) pairs in the next step, which begins after
        `consumed_samples` samples.
        """
        lengths = [one.tokens for row in self.step(consumed_samples // self._size).rows for one in row]
        return TokenCounts(sum(lengths), sum(length * length for length in lengths))

    def preserves_order(self, num_samples: int) -> bool:
        """Return True: the order of samples does not depend on the length of the run."""
        return True

    def step(self, step: int) -> RolloutStep:
        """Return the mini-batch for the step that follows `step` completed steps."""
        batch, within = divmod(step, self._rl.steps_per_batch)
        if (steps := self._steps.get(batch)) is None:  # checked without the lock, which a prefetch may hold
            with self._lock:
                if (steps := self._steps.get(batch)) is None:
                    self._steps = {
                        number: self._steps[number] for number in self._steps if number == batch - 1
                    }
                    steps = self._steps[batch] = self._make_steps(batch)
        return steps[within % self._rl.mini_batches]

    def _make_steps(self, number: int) -> list[RolloutStep]:
        rl = self._rl
        count = self._size * rl.mini_batches // rl.num_generations
        groups = self.source.batch(number, count)
        advantages, first_step = batch_advantages(rl, groups), number * rl.steps_per_batch
        metrics = reward_metrics(groups, advantages) | staleness_metrics(rl, groups, first_step)
        self._log_absent(number * rl.steps_per_batch + 1, groups)
        samples: list[list[Sample]] = []  # of each completion: one, and one for each of its branches
        values_of_groups = batch_token_advantages(rl, groups, advantages)
        lengths = np.array([[len(one.ids) for one in group.completions] for group in groups])
        rewards = BatchRewards(advantages.rewards, lengths)
        for group, values, std in zip(groups, values_of_groups, advantages.group_std.tolist()):
            is_used = std > ZERO_STD or not (rl.filter_zero_std and rl.prompts)
            name = group.where if group.id is None else f"prompt {group.id}"
            for n, (one, advantage) in enumerate(zip(group.completions, values)):
                samples.append(
                    [
                        Sample(
                            group.prompt_of(part),
                            part,
                            advantage,
                            is_used and self._tokens_in_loss(part, first_step),
                            f"{name}, completion {n}" + (f", branch {at}" if at else ""),
                            len(samples),
                        )
                        for at, part in enumerate([one, *one.branches])
                    ]
                )
        row_length = self._run.config.data.seq_length if rl.packing else 0
        cuts = range(0, len(samples), self._size)
        packed = [
            pack_rows([one for parts in samples[cut : cut + self._size] for one in parts], row_length)
            for cut in cuts
        ]
        return [RolloutStep(rows, metrics | packing_metrics(rows, row_length), rewards) for rows in packed]

    def _tokens_in_loss(self, one: RatedCompletion, first_step: int) -> bool | np.ndarray:
        """Return a mask of the completion's tokens that are in the loss: bool [tokens], or a single bool for all
        tokens.
        """
        rl = self._rl
        if rl.mask_truncated_completions and one.truncated:
            return False
        stale = stale_tokens(rl, one, first_step)
        in_loss = ~stale if stale.any() else True
        return in_loss if one.segments is None else in_loss & one.sampled

    def _log_absent(self, step: int, groups: Sequence[PromptGroup]) -> None:
        absent = absent_rewards(self.source.rewards, groups)
        self._absent = {name: self._absent.get(name, 0) + 1 for name in absent}
        for name, count in self._absent.items():
            streak = f" ({count:,} rollout batches in a row)" * (count > 1)
            self._run.log(f"warning: step {step}: {absent_message(name, groups, streak)}")

    def _micro_batches_from(self, step: int) -> Iterator[RolloutBatch]:
        rl, next_batch, is_first = self._rl, None, True
        if (
            step % rl.steps_per_batch
            and rl.needs_old_logprobs_pass
            and self._restored[0] != step // rl.steps_per_batch
        ):
            self._run.log(
                f"step {step} is inside a rollout batch of {rl.steps_per_batch} steps whose old log-probabilities "
                "are not in the checkpoint; the rest of the batch uses those of the current weights"
            )
        with ThreadPoolExecutor(1) as reader:
            while step < self._run.total_steps:
                batch, within = divmod(step, rl.steps_per_batch)
                if is_first or within == 0:
                    local = next_batch.result() if next_batch else self._local_mini_batches(batch)
                    self._ready, is_first = self._with_logprobs(batch, local), False
                    has_next = (batch + 1) * rl.steps_per_batch < self._run.total_steps
                    prefetch = self.source.can_prefetch and has_next
                    next_batch = reader.submit(self._local_mini_batches, batch + 1) if prefetch else None
                batches = self._with_proximal(step, self._ready[within % rl.mini_batches])
                yield from self._with_selection(step, self._with_pairs(step, batches))
                step += 1

    def _local_mini_batches(self, batch: int) -> list[list[RolloutBatch]]:
        """Return this data-parallel rank's micro-batches for each mini-batch of a rollout batch."""
        first = batch * self._rl.steps_per_batch
        return [self._local_micro_batches(first + number) for number in range(self._rl.mini_batches)]

    def _local_micro_batches(self, step: int) -> list[RolloutBatch]:
        """Return this data-parallel rank's micro-batches of a step."""
        config, rows = self._run.config, self.local_rows(step)
        batches = [make_batch(config, chunk, step * self._size + first) for first, chunk in rows]
        if not self._rl.has_entropy_bonus or self._rl.entropy_aggregation == "loss":
            return batches
        samples = [sample for row in self.step(step).rows for sample in row]
        weight = entropy_weight(
            self._rl, torch.tensor([float(sample.tokens_in_loss) for sample in samples])
        ).float()
        return [replace(one, entropy_weights=weight.expand(one.labels.shape)) for one in batches]

    def local_rows(self, step: int) -> list[tuple[int, list[list[Sample]]]]:
        """Return the index, within the step, of the first of this rank's rows, and the rows themselves."""
        dp, rows, size = self._run.mesh.dp, self.step(step).rows, self._run.config.train.micro_batch_size
        rows_per_micro_batch = size * dp.size
        count = self.micro_batches(step * self._size)
        rows = rows + [[] for _ in range(count * rows_per_micro_batch - len(rows))]
        return [(at, rows[at : at + size]) for at in range(dp.rank * size, len(rows), rows_per_micro_batch)]

    def _with_logprobs(self, number: int, steps: list[list[RolloutBatch]]) -> list[list[RolloutBatch]]:
        """Add the log-probabilities that the loss needs to the micro-batches of a rollout batch."""
        flat, logprobs = [batch for step in steps for batch in step], {}
        if self._restored[0] == number:
            logprobs["old_logprobs"] = [
                restore_row_logprobs(self._restored[1], rows, batch.labels)
                for rows, batch in zip(self._row_keys(number), flat)
            ]
        elif self._rl.needs_old_logprobs_pass:
            with self.source.timed("old_logprobs"):
                entries = policy_vocab_size(self._run.config, self._run.tokenizer)
                logprobs["old_logprobs"] = self._run.model.all_logprobs(flat, self._rl.temperature, entries)
        if self._reference is not None:
            with self.source.timed("reference_logprobs"):
                scored = flat if self._rl.router_replay == "all" else without_routes(flat)
                logprobs["reference_logprobs"] = self._reference(scored)
        flat = [
            replace(batch, **{name: values[index] for name, values in logprobs.items()})
            for index, batch in enumerate(flat)
        ]
        if self._rl.use_kl_in_reward:
            first = number * self._rl.steps_per_batch
            owners = [
                each
                for mini_batch in range(self._rl.mini_batches)
                for each in self._owners(first + mini_batch)
            ]
            flat, self.reward_kl = with_reward_kl(self._run, flat, owners, self.step(first).rewards)
        if self._teacher is not None:
            with self.source.timed("teacher_logprobs"):
                flat = self._teacher.add(flat)
        if self._rl.corrects_batches:
            batches = iter(flat)
            by_step, mesh = [[next(batches) for _ in step] for step in steps], self._run.mesh
            flat, self.rejected = correct_batches(self._rl, by_step, mesh.dp, self._run.device)
        batches = iter(flat)
        return [[next(batches) for _ in step] for step in steps]

    def _with_proximal(self, step: int, batches: list[RolloutBatch]) -> list[RolloutBatch]:
        """Add the weights that interpolate the old policy, if the run uses them."""
        within = step % self._rl.steps_per_batch
        if not (self._rl.interpolates_old_logprobs and within):
            return batches
        first, rows = step - within, [rows for _, rows in self.local_rows(step)]
        return [
            replace(batch, proximal_weight=proximal_weights(chunk, first, step, batch.labels))
            for chunk, batch in zip(rows, batches, strict=True)
        ]

    def _owners(self, step: int) -> list[list[int]]:
        """Return the completion of each sequence of this rank's micro-batches, counted over the rollout batch."""
        return [[sample.number for row in rows for sample in row] for _, rows in self.local_rows(step)]

    def _with_pairs(self, step: int, batches: list[RolloutBatch]) -> list[RolloutBatch]:
        """Add the fields that a completion-pair loss needs, if the run has such a loss. Collective over all ranks."""
        if not self._rl.compares_completions:
            return batches
        run, rl = self._run, self._rl
        entries = policy_vocab_size(run.config, run.tokenizer)
        with self.source.timed("pairs"):
            logprobs = run.model.all_logprobs(batches, rl.temperature, entries)
            return with_pairs(run, batches, self._owners(step), logprobs, self.step(step).rewards.total)

    def _with_selection(self, step: int, batches: list[RolloutBatch]) -> list[RolloutBatch]:
        """Add the masks of the tokens that the loss treats differently, if there are any. Collective over all ranks."""
        if not selects_tokens(self._rl):
            return batches
        run, rl = self._run, self._rl
        entries = policy_vocab_size(run.config, run.tokenizer)
        with self.source.timed("token_selection"):
            logprobs, entropies = run.model.all_logprobs_and_entropies(batches, rl.temperature, entries)
            seed = run.config.train.seed + step
            return select_tokens(rl, batches, logprobs, entropies, seed, run.mesh.dp)

    # Checkpoints inside a rollout batch

    def state_files(self) -> dict[str, bytes]:
        """Return the old policy's log-probabilities as checkpoint files. They cannot be recomputed later, when the
        weights have changed.

        Collective over all ranks.
        """
        run, rl = self._run, self._rl
        number, inside = divmod(run.step, rl.steps_per_batch)
        if not (rl.needs_old_logprobs_pass and inside):
            return {}
        flat = [batch.old_logprobs for batches in self._ready for batch in batches]
        return {OLD_LOGPROBS: encode_row_logprobs(run.mesh, number, self._row_keys(number), flat)}

    def load_state(self, files: Mapping[str, Path]) -> None:
        """Restore the state that `state_files` returned."""
        has_file = self._rl.needs_old_logprobs_pass and OLD_LOGPROBS in files
        self._restored = decode_row_logprobs(files[OLD_LOGPROBS]) if has_file else (-1, {})

    def _row_keys(self, number: int) -> list[list[RowKey]]:
        """Return the row keys of each of this rank's micro-batches of a rollout batch."""
        first = number * self._rl.steps_per_batch
        return [
            [(mini, at + n, sum(sample.tokens for sample in row)) for n, row in enumerate(rows)]
            for mini in range(self._rl.mini_batches)
            for at, rows in self.local_rows(first + mini)
        ]
