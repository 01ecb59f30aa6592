"""The stream of micro-batches that a run of GRPO reads out of its rollouts.

Rollout batch b is the b-th run of `global_batch_size` × `mini_batches` completions, in whole groups: of files, in their
order and again from their beginning, or sampled when they are asked for (loop.py). It is trained on for
`steps_per_batch` steps: step s of it takes its mini-batch s mod `mini_batches`. Advantages are made of the whole
rollout batch on every rank; log-probabilities of the old policy and of the reference by passes of the model before
its first step.

A row of data.seq_length tokens holds one completion behind its prompt, or with packing as many as fit, with attention
kept apart. Rows are dealt out to the data-parallel ranks; those that are missing to as many for each are empty.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megalith.config import RlConfig, RunConfig
from megalith.data.batch import document_ends
from megalith.errors import DataError
from megalith.parallel.pipeline.stages import padded_micro_batches
from megalith.remote import open_location
from megalith.report.report import TokenCounts
from megalith.rl.advantages import NO_SPREAD, Advantages, advantages
from megalith.rl.objective import RolloutBatch, entropy_weight
from megalith.rl.prompts import policy_entries
from megalith.rl.reference import LogProbs, Place, Rows, kept_logprobs, logprobs_file, read_logprobs
from megalith.rl.rollouts import PromptGroup, RatedCompletion, RolloutFiles
from megalith.training.run_state import Run

OLD_LOGPROBS = "old_logprobs.json.zst"  # of a checkpoint's files


@dataclass(frozen=True)
class Sample:
    """A completion behind its prompt, as a row holds it."""

    prompt_ids: np.ndarray
    completion: RatedCompletion
    advantage: float
    in_loss: bool | np.ndarray  # or of each token
    where: str = ""  # prompt and number, for errors

    @property
    def tokens(self) -> int:
        """What it takes of a row: the last token is a label alone."""
        return len(self.prompt_ids) + len(self.completion.ids) - 1

    @property
    def tokens_in_loss(self) -> int:
        return int(np.broadcast_to(self.in_loss, len(self.completion.ids)).sum())


@dataclass(frozen=True)
class RolloutStep:
    """A mini-batch: its rows, the same in every layout, and what is known of it without a pass."""

    rows: list[list[Sample]]
    figures: dict[str, float]


class RolloutSource(Protocol):
    """Where rollout batches come from."""

    notes: list[str]
    rewards: list[str]
    """The names of the kinds of reward."""
    reads_ahead: bool
    """Whether a thread may ask for the next batch while the model is trained on this one."""

    def batch(self, number: int, groups: int) -> list[PromptGroup]:
        """The groups of a rollout batch. Every rank calls it, and gets the same."""

    def files(self) -> dict[str, dict[str, int | str]]:
        """Of each file what tells whether it is the same."""

    def timed(self, phase: str) -> AbstractContextManager:
        """Around a phase of the step."""


class FileRollouts:
    """Rollout batches out of files."""

    reads_ahead = True

    def __init__(self, run: Run, rollouts: RolloutFiles):
        rl, self.notes, self.rewards = run.config.rl, [], rollouts.rewards
        self._rollouts, self._entries, self._paths = rollouts, rollouts.entries, rl.files
        if rl.old_logprobs == "rollout" or rl.use_decoupled_loss:
            of = "old_logprobs is rollout" if rl.old_logprobs == "rollout" else "use_decoupled_loss is set"
            _require_logprobs(map(rollouts.group, self._entries), of)
        if rl.filter_zero_std:
            self._leave_out_without_spread(rl)
        completions = len(self._entries) * rl.num_generations
        again = run.total_steps // rl.num_iterations * run.config.train.global_batch_size / completions
        if again > 1:
            self.notes.append(
                f"the run goes over the rollouts {again:.1f} times: they are of {len(self._entries):,} prompts"
            )

    def _leave_out_without_spread(self, rl: RlConfig) -> None:
        spread = advantages_of(rl, [*map(self._rollouts.group, self._entries)]).spread
        kept = [entry for entry, deviation in zip(self._entries, spread) if deviation > NO_SPREAD]
        left_out = len(self._entries) - len(kept)
        if left_out:
            self.notes.append(
                f"rl.filter_zero_std leaves out {left_out:,} of {len(self._entries):,} groups, whose rewards are equal"
            )
        self._entries = kept or self._entries

    def batch(self, number: int, groups: int) -> list[PromptGroup]:
        wanted = range(number * groups, (number + 1) * groups)
        return self._rollouts.read(self._entries[at % len(self._entries)] for at in wanted)

    def files(self) -> dict[str, dict[str, int | str]]:
        return {path: _identity(path) for path in self._paths}

    def timed(self, phase: str) -> AbstractContextManager:
        return nullcontext()


class RolloutData:
    """In the place of pre-training's Data: the rollouts of a run, and micro-batches out of them."""

    train = valid = test = None

    def __init__(self, run: Run, source: RolloutSource, reference: LogProbs | None):
        """`reference` gives the log-probabilities of micro-batches by the reference; None without one."""
        config = run.config
        self._run, self._rl, self._reference = run, config.rl, reference
        self._size = config.train.global_batch_size
        self._made: dict[int, list[RolloutStep]] = {}  # the rollout batches last asked for
        self._absent: dict[
            str, int
        ] = {}  # of each reward, for how many rollout batches on end it has been absent
        self._making = Lock()
        self._ready: list[list[RolloutBatch]] = []  # of the rollout batch in progress, by mini-batch
        self._kept: tuple[int, Rows] = -1, {}  # a rollout batch's number, and its old log-probabilities
        self.source, self.notes, self.files = source, source.notes, source.files

    def train_loader(
        self, step: int, consumed_samples: int, device: torch.device, left_out: Sequence[Sequence[int]] = ()
    ) -> closing:
        """Micro-batches from after `step` steps to the end of the run. Every rank iterates alike."""
        return closing(self._from(step))

    def micro_batches(self, consumed_samples: int) -> int:
        """Of the step that begins after `consumed_samples`, on each data-parallel rank."""
        rows = len(self.step(consumed_samples // self._size).rows)
        together = self._run.config.train.micro_batch_size * self._run.mesh.dp.size
        return padded_micro_batches(self._run.config.parallel, -(-rows // together))

    def work(self, consumed_samples: int, batch_size: int) -> TokenCounts:
        """What the step that begins after `consumed_samples` trains on."""
        lengths = [one.tokens for row in self.step(consumed_samples // self._size).rows for one in row]
        return TokenCounts(sum(lengths), sum(length * length for length in lengths))

    def preserves_order(self, num_samples: int) -> bool:
        """Whether a run of so many samples takes the same ones, as far as both go."""
        return True

    def step(self, step: int) -> RolloutStep:
        """What the step after `step` steps is made of."""
        batch, within = divmod(step, self._rl.steps_per_batch)
        if (steps := self._made.get(batch)) is None:  # else nobody waits for a thread that makes another
            with self._making:
                if (steps := self._made.get(batch)) is None:
                    self._made = {number: self._made[number] for number in self._made if number == batch - 1}
                    steps = self._made[batch] = self._batch(batch)
        return steps[within % self._rl.mini_batches]

    def _batch(self, number: int) -> list[RolloutStep]:
        rl = self._rl
        count = self._size * rl.mini_batches // rl.num_generations
        groups = self.source.batch(number, count)
        found, first_step = advantages_of(rl, groups), number * rl.steps_per_batch
        figures = _figures(groups, found) | _staleness_figures(rl, groups, first_step)
        self._log_absent(number * rl.steps_per_batch + 1, groups)
        samples = []
        for group, values, spread in zip(groups, found.values.tolist(), found.spread.tolist()):
            teaches = spread > NO_SPREAD or not (rl.filter_zero_std and rl.prompts)
            for n, (one, advantage) in enumerate(zip(group.completions, values)):
                in_loss = teaches and not (rl.mask_truncated_completions and one.truncated)
                if in_loss and (stale := too_old(rl, one, first_step)).any():
                    in_loss = ~stale
                name = group.where if group.id is None else f"prompt {group.id}"
                samples.append(Sample(group.prompt_ids, one, advantage, in_loss, f"{name}, completion {n}"))
        longest = self._run.config.data.seq_length if rl.packing else 0
        cuts = range(0, len(samples), self._size)
        packed = [rows_of(samples[cut : cut + self._size], longest) for cut in cuts]
        return [RolloutStep(rows, figures | _packing_figures(rows, longest)) for rows in packed]

    def _log_absent(self, step: int, groups: Sequence[PromptGroup]) -> None:
        absent = absent_rewards(self.source.rewards, groups)
        self._absent = {name: self._absent.get(name, 0) + 1 for name in absent}
        for name, times in self._absent.items():
            again = f" ({times:,} rollout batches in a row)" * (times > 1)
            self._run.log(f"warning: step {step}: {absent_text(name, groups, again)}")

    def _from(self, step: int) -> Iterator[RolloutBatch]:
        rl, coming, is_first = self._rl, None, True
        if step % rl.steps_per_batch and rl.computes_old and self._kept[0] != step // rl.steps_per_batch:
            self._run.log(
                f"step {step} stands inside of a rollout batch of {rl.steps_per_batch} steps: for the rest of it the "
                "old log-probabilities are those of the weights now"
            )
        with ThreadPoolExecutor(1) as reader:
            while step < self._run.total_steps:
                batch, within = divmod(step, rl.steps_per_batch)
                if is_first or within == 0:
                    made = coming.result() if coming else self._all_own(batch)
                    self._ready, is_first = self._with_logprobs(batch, made), False
                    more = (
                        self.source.reads_ahead and (batch + 1) * rl.steps_per_batch < self._run.total_steps
                    )
                    coming = reader.submit(self._all_own, batch + 1) if more else None
                yield from self._with_proximal(step, self._ready[within % rl.mini_batches])
                step += 1

    def _all_own(self, batch: int) -> list[list[RolloutBatch]]:
        """This data-parallel rank's micro-batches of each mini-batch of a rollout batch."""
        first = batch * self._rl.steps_per_batch
        return [self._own(first + number) for number in range(self._rl.mini_batches)]

    def _own(self, step: int) -> list[RolloutBatch]:
        """This data-parallel rank's micro-batches of a step."""
        config, rows = self._run.config, self.own_rows(step)
        batches = [make_batch(config, some, step * self._size + at) for at, some in rows]
        if not self._rl.entropy_coef or self._rl.entropy_aggregation == "loss":
            return batches
        samples = [sample for row in self.step(step).rows for sample in row]
        weight = entropy_weight(
            self._rl, torch.tensor([float(sample.tokens_in_loss) for sample in samples])
        ).float()
        return [replace(one, entropy_weights=weight.expand(one.labels.shape)) for one in batches]

    def own_rows(self, step: int) -> list[tuple[int, list[list[Sample]]]]:
        """Of each of these micro-batches the number of its first row in the step, and its rows."""
        dp, rows, size = self._run.mesh.dp, self.step(step).rows, self._run.config.train.micro_batch_size
        together = size * dp.size
        count = self.micro_batches(step * self._size)
        rows = rows + [[] for _ in range(count * together - len(rows))]
        return [(at, rows[at : at + size]) for at in range(dp.rank * size, len(rows), together)]

    def _with_logprobs(self, number: int, steps: list[list[RolloutBatch]]) -> list[list[RolloutBatch]]:
        """The micro-batches of a rollout batch with the log-probabilities that the loss reads."""
        flat, more = [batch for step in steps for batch in step], {}
        if self._kept[0] == number:
            more["old_logprobs"] = [
                kept_logprobs(self._kept[1], rows, batch.labels)
                for rows, batch in zip(self._places(number), flat)
            ]
        elif self._rl.computes_old:
            with self.source.timed("old_logprobs"):
                entries = policy_entries(self._run.config, self._run.tokenizer)
                more["old_logprobs"] = self._run.model.all_logprobs(flat, self._rl.temperature, entries)
        if self._reference is not None:
            with self.source.timed("reference_logprobs"):
                more["reference_logprobs"] = self._reference(flat)
        flat = [
            replace(batch, **{name: found[number] for name, found in more.items()})
            for number, batch in enumerate(flat)
        ]
        each = iter(flat)
        return [[next(each) for _ in step] for step in steps]

    def _with_proximal(self, step: int, batches: list[RolloutBatch]) -> list[RolloutBatch]:
        """With the old policy's place between the rollout's and ours, where that is what stands for it."""
        within = step % self._rl.steps_per_batch
        if not (self._rl.interpolates_old and within):
            return batches
        first, rows = step - within, [rows for _, rows in self.own_rows(step)]
        return [
            replace(batch, proximal=proximal_places(some, first, step, batch.labels))
            for some, batch in zip(rows, batches, strict=True)
        ]

    # Inside of a rollout batch

    def state_files(self) -> dict[str, bytes]:
        """The old policy's log-probabilities, which later weights do not give. Every rank calls it."""
        run, rl = self._run, self._rl
        number, inside = divmod(run.step, rl.steps_per_batch)
        if not (rl.computes_old and inside):
            return {}
        flat = [batch.old_logprobs for batches in self._ready for batch in batches]
        return {OLD_LOGPROBS: logprobs_file(run.mesh, number, self._places(number), flat)}

    def load_state(self, files: Mapping[str, Path]) -> None:
        """Takes what `state_files` gave."""
        kept = self._rl.computes_old and OLD_LOGPROBS in files
        self._kept = read_logprobs(files[OLD_LOGPROBS]) if kept else (-1, {})

    def _places(self, number: int) -> list[list[Place]]:
        """Of each of this rank's micro-batches of a rollout batch, its rows."""
        first = number * self._rl.steps_per_batch
        return [
            [(mini, at + n, sum(sample.tokens for sample in row)) for n, row in enumerate(rows)]
            for mini in range(self._rl.mini_batches)
            for at, rows in self.own_rows(first + mini)
        ]


def rows_of(samples: Sequence[Sample], longest: int) -> list[list[Sample]]:
    """The samples in rows, the longest ones first: one each, or best fit decreasing into rows of `longest` tokens."""
    by_length = sorted(samples, key=lambda sample: -sample.tokens)
    if not longest:
        return [[sample] for sample in by_length]
    rows: list[list[Sample]] = []
    room: list[int] = []
    for sample in by_length:
        fits = [(space, at) for at, space in enumerate(room) if space >= sample.tokens]
        if fits:
            space, at = min(fits)
            rows[at].append(sample)
            room[at] = space - sample.tokens
        else:
            rows.append([sample])
            room.append(longest - sample.tokens)
    return rows


def _packing_figures(rows: Sequence[Sequence[Sample]], longest: int) -> dict[str, float]:
    """How many rows a mini-batch takes, and the share of their tokens that is no padding; none without packing."""
    if not longest:
        return {}
    tokens = sum(sample.tokens for row in rows for sample in row)
    return {"packing_rows": len(rows), "packing_filled": tokens / (len(rows) * longest)}


def proximal_places(rows: Sequence[Sequence[Sample]], first: int, step: int, like: Tensor) -> Tensor:
    """α = (first − v) / (step − v) of each token that the weights of step v sampled, float32 like `like` [batch, seq]:
    where the weights before the rollout batch's `first` step stand between those and the ones of now. 1 elsewhere."""
    found = np.ones(like.shape, dtype=np.float32)
    for at, row in enumerate(rows):
        begin = 0
        for sample in row:
            end = begin + sample.tokens
            lag = np.maximum(first - sample.completion.version, 0)
            found[at, begin + len(sample.prompt_ids) - 1 : end] = lag / (lag + step - first)
            begin = end
    return torch.from_numpy(found).to(like.device)


def make_batch(config: RunConfig, rows: Sequence[Sequence[Sample]], first_row: int) -> RolloutBatch:
    """A micro-batch of rows of data.seq_length tokens; a row without samples has no token in the loss.

    `first_row`: the number of its first row in the run, the key of dropout.
    """
    shape = (len(rows), config.data.seq_length)
    ids, labels, positions, numbers = (np.zeros(shape, dtype=np.int64) for _ in range(4))
    mask, advantage, logprobs = (np.zeros(shape, dtype=np.float32) for _ in range(3))
    begins = np.zeros(shape, dtype=bool)
    tokens: list[float] = []
    for at, row in enumerate(rows):
        begin = 0
        for sample in row:
            whole = np.concatenate([sample.prompt_ids, sample.completion.ids])
            end = begin + sample.tokens
            of_completion = slice(begin + len(sample.prompt_ids) - 1, end)
            ids[at, begin:end], labels[at, begin:end] = whole[:-1], whole[1:]
            positions[at, begin:end] = np.arange(sample.tokens)
            begins[at, begin] = True
            numbers[at, begin:end] = len(tokens)
            mask[at, of_completion] = sample.in_loss
            advantage[at, begin:end] = sample.advantage
            given = sample.completion.logprobs
            logprobs[at, of_completion] = np.nan if given is None else given
            tokens.append(float(mask[at, begin:end].sum()))
            begin = end
        begins[at, begin : begin + 1] = True  # of the padding
    tensors = map(torch.from_numpy, (ids, labels, mask, positions, advantage, numbers, logprobs))
    ids, labels, mask, positions, advantage, numbers, logprobs = tensors
    return RolloutBatch(
        ids,
        labels,
        mask,
        positions,
        document_ends(begins)
        if config.rl.packing
        else None,  # a single sample cannot see the padding behind it
        torch.arange(first_row, first_row + len(rows)),
        advantage,
        numbers,
        torch.tensor(tokens),
        None if logprobs[mask > 0].isnan().all() else logprobs,
    )


def any_logprobs(rows: Sequence[Sequence[Sample]]) -> bool:
    """Whether a token of these rows that is in the loss has a log-probability of the engine's."""
    given = [
        np.asarray(sample.completion.logprobs)[np.broadcast_to(sample.in_loss, len(sample.completion.ids))]
        for row in rows
        for sample in row
        if sample.completion.logprobs is not None
    ]
    return not all(np.isnan(one).all() for one in given)


def _require_logprobs(groups: Iterable[PromptGroup], setting: str) -> None:
    for group in groups:
        for number, completion in enumerate(group.completions):
            if completion.logprobs is None:
                raise DataError(
                    f"{group.where}, sample {number} has no logprobs, but rl.{setting}; sample with log-probabilities, "
                    "or leave that out"
                )


def advantages_of(rl: RlConfig, groups: Sequence[PromptGroup]) -> Advantages:
    rewards = np.array([[completion.rewards for completion in group.completions] for group in groups])
    lengths = np.array([[len(completion.ids) for completion in group.completions] for group in groups])
    return advantages(rl, rewards, lengths)


def absent_rewards(names: Sequence[str], groups: Sequence[PromptGroup]) -> list[str]:
    """The rewards, of these names, that none of the completions has."""
    absent = np.isnan([one.rewards for group in groups for one in group.completions]).all(0)
    return [name for name, nowhere in zip(names, absent) if nowhere]


def absent_text(name: str, groups: Sequence[PromptGroup], more: str = "") -> str:
    count = sum(len(group.completions) for group in groups)
    return (
        f"the reward {name} is None or NaN for all {count:,} completions{more} and teaches nothing; correct the "
        "function, or take it out of the rewards"
    )


def too_old(rl: RlConfig, one: RatedCompletion, first_step: int) -> np.ndarray:
    """bool [tokens]: which tokens leave the loss of a rollout batch with this first step, for weights sampled them that
    are older than rl.max_staleness allows."""
    if not rl.max_staleness or one.version is None:
        return np.zeros(len(one.ids), dtype=bool)
    oldest = first_step - rl.max_staleness * rl.steps_per_batch
    return np.broadcast_to(one.version < oldest, len(one.ids))


def _staleness_figures(rl: RlConfig, groups: Sequence[PromptGroup], first_step: int) -> dict[str, float]:
    """Over all tokens, in steps; with rl.max_staleness."""
    if not rl.max_staleness:
        return {}
    each = [one for group in groups for one in group.completions]
    lags = first_step - np.concatenate([np.broadcast_to(one.version, len(one.ids)) for one in each])
    dropped = sum(int(too_old(rl, one, first_step).sum()) for one in each)
    return {"staleness": float(lags.mean()), "staleness_max": int(lags.max()), "tokens_dropped": dropped}


def _figures(groups: Sequence[PromptGroup], found: Advantages) -> dict[str, float]:
    """What metrics.jsonl says of a rollout batch."""
    completions = [completion for group in groups for completion in group.completions]
    rewards, lengths = found.rewards[~np.isnan(found.rewards)], [len(one.ids) for one in completions]
    return {
        "rewards_mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "rewards_std": float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0,
        "rewards_absent": int(np.isnan(found.rewards).sum()),
        "advantages_mean": float(found.values.mean()),
        "advantages_std": float(found.values.std(ddof=1)) if found.values.size > 1 else 0.0,
        "groups_without_spread": float((found.spread <= NO_SPREAD).mean()),
        "completion_length": float(np.mean(lengths)),
        "completion_length_max": max(lengths),
        "completions_truncated": float(np.mean([one.truncated for one in completions])),
    }


def _identity(path: str) -> dict[str, int | str]:
    """As a DataRecord has it, which counts an index of no bytes."""
    digest, size = hashlib.sha256(), 0
    with open_location(path).open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
            size += len(piece)
    return {"bin_bytes": size, "idx_bytes": 0, "idx_sha256": digest.hexdigest()}
