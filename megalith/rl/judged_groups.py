"""Groups of completions, sampled by an engine and judged by the rewards, on the way from one rank to all.

A completion is sampled at once, or piece by piece with other weights in between: what it has so far then stands behind
its prompt in the next request, and each token keeps the version of the weights that sampled it. So an engine computes
every token's log-probability by one version from the first token of the prompt on, as the trainer would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol

import numpy as np
import zstandard

from megalith.config.rl import RlConfig
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.generation.requests import Completion, Sampling
from megalith.rl.advantages import total_rewards
from megalith.rl.prompts import Prompt
from megalith.rl.rewards import Rewards
from megalith.rl.rollouts import PromptGroup, RatedCompletion, unzstd

HELD_OUT_KEY = (
    2**44
)  # of an evaluation's prompts: behind all positions of a run, before the continued completions
FIRST_KEY, LAST_KEY = 2**45, 2**46  # of continued completions, before the canary


@dataclass
class Sampled:
    """A completion as a replica gives it to all, of what JSON takes."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """One for each id."""
    truncated: bool | None = None
    """None: it may go on."""
    rewards: list[float] = field(default_factory=list)
    """Empty until its group is judged."""
    extra: dict[str, str] = field(default_factory=dict)  # what was logged of it

    def followed_by(self, more: Sampled) -> Sampled:
        ids, logprobs = self.ids + more.ids, self.logprobs + more.logprobs
        return Sampled(ids, logprobs, self.versions + more.versions, more.truncated, more.rewards, more.extra)

    def rated(self) -> RatedCompletion:
        versions = self.versions[:1] if len(set(self.versions)) == 1 else self.versions
        arrays = np.array(self.ids), np.array(self.rewards, dtype=float), np.array(self.logprobs, np.float32)
        return RatedCompletion(*arrays, np.array(versions), bool(self.truncated), self.extra)


@dataclass
class GroupRecord:
    """A prompt's completions, or the pieces that are to follow what they have."""

    position: int
    prompt: int  # its index
    samples: list[Sampled] = field(default_factory=list)  # none: it is not begun

    @classmethod
    def of(cls, position: int, prompt: int, samples: Sequence[Sequence[Any]]) -> GroupRecord:
        """That of which JSON has had `astuple`."""
        return cls(position, prompt, [Sampled(*fields) for fields in samples])

    @property
    def is_whole(self) -> bool:
        """Whether every completion has ended."""
        return bool(self.samples) and all(one.truncated is not None for one in self.samples)

    @property
    def is_judged(self) -> bool:
        return self.is_whole and bool(self.samples[0].rewards)

    def followed_by(self, more: GroupRecord) -> GroupRecord:
        samples = self.samples or [Sampled() for _ in more.samples]
        both = [one.followed_by(piece) for one, piece in zip(samples, more.samples, strict=True)]
        return GroupRecord(self.position, self.prompt, both)

    def group(self, prompts: Sequence[Prompt]) -> PromptGroup:
        prompt = prompts[self.prompt]
        return PromptGroup(
            np.array(prompt.ids), [one.rated() for one in self.samples], prompt.where, prompt.id
        )


Logged = dict[str, list[float]]  # by name, what rewards log


@dataclass
class QueuedBatch:
    """A rollout batch that is sampled ahead."""

    records: list[GroupRecord]
    logged: Logged = field(default_factory=dict)

    @property
    def is_judged(self) -> bool:
        return all(record.is_judged for record in self.records)

    @property
    def sampled(self) -> int:
        return _most_so_far(self.records)

    def add(self, pieces: Sequence[GroupRecord], logged: Logged) -> None:
        """Takes what was sampled of its groups; the others stay as they are."""
        found = {piece.position: piece for piece in pieces}
        self.records = [
            record.followed_by(found[record.position]) if record.position in found else record
            for record in self.records
        ]
        for name, values in logged.items():
            self.logged.setdefault(name, []).extend(values)


def held_out_figures(rl: RlConfig, names: Sequence[str], batch: QueuedBatch) -> dict[str, float]:
    """What an evaluation says of held-out prompts; `names` are those of the rewards.

    accuracy is the share of completions to which the first reward gives 1 or more, prompts_solved that of prompts which
    have one, and rewards_* are of the weighted sums.
    """
    samples = [record.samples for record in batch.records]
    rewards = np.array([[one.rewards for one in group] for group in samples], float)  # [prompts, G, kinds]
    lengths = np.array([[len(one.ids) for one in group] for group in samples])  # [prompts, G]
    total, solved = total_rewards(rl, rewards, lengths), rewards[..., 0] >= 1
    there = total[~np.isnan(total)]
    known = there if there.size else np.array([np.nan])
    found = {
        "rewards_mean": float(known.mean()),
        "rewards_std": float(there.std(ddof=1)) if there.size > 1 else 0.0,
        "rewards_min": float(known.min()),
        "rewards_max": float(known.max()),
        "rewards_median": float(np.median(known)),
        "rewards_absent": int(np.isnan(total).sum()),
        "accuracy": float(solved.mean()),
        "prompts_solved": float(solved.any(-1).mean()),
        "prompts": len(samples),
        "completion_length": float(lengths.mean()),
        "completion_length_max": int(lengths.max()),
        "completions_truncated": float(np.mean([one.truncated for group in samples for one in group])),
    }
    means = {
        name: values[~np.isnan(values)] for name, values in zip(names, rewards.reshape(-1, len(names)).T)
    }
    means = {f"rewards/{name}": values for name, values in means.items() if len(names) > 1}
    means |= {prefixed(name, found): np.array(values) for name, values in batch.logged.items()}
    return found | {name: float(values.mean()) if values.size else np.nan for name, values in means.items()}


def prefixed(name: str, own: Collection[str]) -> str:
    """What a figure of a reward function is called beside the run's own: its `name`, where that is free."""
    return f"reward/{name}" if name in own else name


def queue_file(queue: dict[int, QueuedBatch], shape: Mapping[str, Any]) -> bytes:
    """The batches by their numbers, as a checkpoint has them. `shape`: what has to be as it was for them to fit."""
    batches = {
        number: [[astuple(record) for record in batch.records], batch.logged]
        for number, batch in queue.items()
    }
    return zstandard.compress(json.dumps({"shape": dict(shape), "batches": batches}).encode())


def read_queue(content: bytes) -> tuple[dict[int, QueuedBatch], dict[str, Any]]:
    """What `queue_file` was given."""
    tree = json.loads(unzstd(content))
    queue = {
        int(number): QueuedBatch([GroupRecord.of(*fields) for fields in records], logged)
        for number, (records, logged) in tree["batches"].items()
    }
    return queue, tree["shape"]


class Sampler(Protocol):
    """The part of an engine that samples."""

    generate: Callable[..., list[Completion]]


def sample_groups(
    engine: Sampler,
    prompts: Sequence[Prompt],
    rewards: Rewards | None,
    tokenizer: Tokenizer,
    records: Sequence[GroupRecord],
    sampling: Sampling,
    num_generations: int,
    step: int = 0,
    timed: Callable[[str], AbstractContextManager] = lambda phase: nullcontext(),
    longest: int | None = None,
) -> tuple[list[GroupRecord], Logged]:
    """What follows the completions of `records`, which are all begun or all not, and what the rewards log.

    `sampling.max_new_tokens` are sampled now, of `longest` in all (absent: these are all). A group is judged once all
    its completions have ended. Without `rewards`, on the further ranks of a replica, it generates with the others and
    gives nothing. Raises DataError for a reward that fails."""
    begun, G = bool(records and records[0].samples), num_generations
    with timed("generation"):
        if begun:
            found = _continued(engine, prompts, records, sampling, longest or 1, G)
        else:
            ids, keys = [prompts[one.prompt].ids for one in records], [one.position for one in records]
            found = engine.generate(ids, sampling, keys=keys, num_generations=G) if records else []
    if rewards is None:
        return [], {}
    new = iter(found)
    goes_on = longest is not None and _most_so_far(records) + sampling.max_new_tokens < longest
    pieces = [
        GroupRecord(one.position, one.prompt, [
            _piece(next(new), sampling.max_new_tokens if goes_on else 0)
            if sample.truncated is None
            else Sampled(truncated=sample.truncated)
            for sample in one.samples or G * [Sampled()]
        ])
        for one in records
    ]  # fmt: skip
    with timed("rewards"):
        return pieces, _judge(records, pieces, rewards, tokenizer, sampling.stop, step)


def _continued(
    engine: Sampler,
    prompts: Sequence[Prompt],
    records: Sequence[GroupRecord],
    sampling: Sampling,
    longest: int,
    num_generations: int,
) -> list[Completion]:
    """What follows each open completion, in order."""
    asked, keys = [], []
    for record in records:
        for number, one in enumerate(record.samples):
            if one.truncated is None:
                asked.append([*prompts[record.prompt].ids, *one.ids])
                place = (record.position * num_generations + number) * longest + len(one.ids)
                keys.append(FIRST_KEY + place % (LAST_KEY - FIRST_KEY))
    return engine.generate(asked, sampling, keys=keys)


def _most_so_far(records: Sequence[GroupRecord]) -> int:
    """Tokens that open completions have, each as many."""
    each = (len(one.ids) for record in records for one in record.samples if one.truncated is None)
    return max(each, default=0)


def _piece(one: Completion, goes_on_at: int) -> Sampled:
    """`goes_on_at`: so many tokens without an end are not the last ones; 0: all are."""
    ids, versions = list(one.ids), list(map(int, one.versions))
    versions = versions if len(versions) == len(ids) else versions * len(ids)
    truncated = None if one.truncated and len(ids) == goes_on_at else one.truncated
    return Sampled(ids, list(map(float, one.logprobs)), versions, truncated)


def _judge(
    records: Sequence[GroupRecord],
    pieces: Sequence[GroupRecord],
    rewards: Rewards,
    tokenizer: Tokenizer,
    stop: Sequence[int],
    step: int,
) -> Logged:
    """Gives rewards to the pieces that end their groups; returns what the rewards log."""
    wholes = [(record.followed_by(piece), piece) for record, piece in zip(records, pieces)]
    ended = [(whole, piece) for whole, piece in wholes if whole.is_whole]
    if not ended:
        return {}
    jobs = []
    for whole, _ in ended:
        texts = [tokenizer.decode([t for t in one.ids if t not in stop]) for one in whole.samples]
        jobs.append((whole.prompt, texts, [one.ids for one in whole.samples]))
    verdicts = rewards(jobs, step)
    for (_, piece), given, extras in zip(ended, verdicts.rewards, verdicts.extras):
        for one, row, extra in zip(piece.samples, given, extras):
            one.rewards, one.extra = row.tolist(), extra
    return verdicts.metrics
