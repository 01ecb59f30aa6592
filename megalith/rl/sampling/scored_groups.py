"""Groups of completions during sampling and scoring, and their transfer between ranks.

A completion is sampled at once, or in pieces by successive weight versions. A later request contains the prompt and the
tokens sampled so far. Each token keeps the version number of the weights that sampled it. The engine therefore computes
every log-probability with a single version, starting at the first prompt token, as the trainer does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import zstandard

from megalith.config.rl import RlConfig
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.generation.requests import Completion, Sampling
from megalith.rl.advantages.advantages import total_rewards
from megalith.rl.agents.endpoint_agent import EndpointAgent
from megalith.rl.agents.policy_agent import PolicyAgent, Share
from megalith.rl.agents.trajectory import Trajectory
from megalith.rl.rewards.rewards import Rewards, Turns
from megalith.rl.rollouts.prompts import Prompt
from megalith.rl.rollouts.rollouts import PromptGroup, RatedCompletion, decompress_zstd
from megalith.rl.rollouts.routes import EncodedRoutes, join_routes, new_routes
from megalith.rl.rollouts.segments import sampled_mask

# Sampling keys, all different: positions of a run < held-out prompts < continued completions < canary (drift.py).
HELD_OUT_KEY = 2**44
FIRST_KEY, LAST_KEY = 2**45, 2**46  # continued completions


@dataclass
class Sampled:
    """A completion as JSON values, to be sent from its replica to all ranks."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Version of the sampling weights, one per token."""
    truncated: bool | None = None
    """True if the completion was cut off at the length limit; None while it can continue."""
    rewards: list[float] = field(default_factory=list)
    """Rewards of the completion; empty until the group is scored."""
    extra: dict[str, str] = field(default_factory=dict)  # logged by reward functions
    segments: list[int] | None = None
    """Lengths of sampled and added tokens in turn (segments.py). None: all are sampled."""
    prompt_ids: list[int] | None = None
    """Token ids of the completion's own prompt. None: the group's prompt."""
    messages: list[dict[str, Any]] | None = None
    """Transcript of several turns, without the prompt."""
    environment_reward: float | None = None
    branches: list[list[Any]] = field(default_factory=list)
    """Other conversations of its session, as fields of Sampled."""
    turn_rewards: list[float] = field(default_factory=list)
    """The environment's reward for each step."""
    routes: list[EncodedRoutes] = field(default_factory=list)
    """Experts of consecutive tokens of prompt and completion, in pieces. Empty: not recorded."""

    def extended(self, more: Sampled) -> Sampled:
        ids, logprobs = self.ids + more.ids, self.logprobs + more.logprobs
        versions, routes = self.versions + more.versions, self.routes + more.routes
        return replace(more, ids=ids, logprobs=logprobs, versions=versions, routes=routes)

    @classmethod
    def from_trajectory(cls, one: Trajectory) -> Sampled:
        return cls(
            one.ids,
            one.logprobs,
            one.versions,
            one.is_truncated,
            segments=one.segments,
            prompt_ids=one.prompt_ids if one.has_own_prompt else None,
            messages=one.transcript,
            environment_reward=one.reward,
            branches=[
                [
                    each.ids,
                    each.logprobs,
                    each.versions,
                    each.is_truncated,
                    [],
                    {},
                    each.segments,
                    each.prompt_ids,
                ]
                for each in one.branches
            ],
            turn_rewards=one.turn_rewards,
            routes=one.routes,
        )

    @property
    def sampled_ids(self) -> list[int]:
        """Token ids that the model sampled."""
        return self.ids if self.segments is None else np.array(self.ids)[sampled_mask(self.segments)].tolist()

    @property
    def last_turn(self) -> list[int]:
        """Token ids of the last turn."""
        if self.segments is None:
            return self.ids
        end = sum(self.segments) if len(self.segments) % 2 else sum(self.segments[:-1])
        return self.ids[end - self.segments[::2][-1] : end]

    @property
    def absent_logprobs(self) -> int:
        """Number of sampled tokens without a log-probability."""
        added = 0 if self.segments is None else sum(self.segments[1::2])
        return sum(map(math.isnan, self.logprobs)) - added

    def rated(self) -> RatedCompletion:
        versions = self.versions[:1] if len(set(self.versions)) == 1 else self.versions
        arrays = np.array(self.ids), np.array(self.rewards, dtype=float), np.array(self.logprobs, np.float32)
        return RatedCompletion(
            *arrays,
            np.array(versions),
            bool(self.truncated),
            self.extra,
            None if self.segments is None else tuple(self.segments),
            None if self.prompt_ids is None else np.array(self.prompt_ids),
            self.messages,
            [replace(Sampled(*fields), rewards=self.rewards).rated() for fields in self.branches],
            self.turn_rewards,
            join_routes(self.routes),
        )


@dataclass
class GroupRecord:
    """A prompt's completions, or continuations of them."""

    position: int
    prompt: int  # index of the prompt
    samples: list[Sampled] = field(default_factory=list)  # empty before sampling begins

    @classmethod
    def from_fields(cls, position: int, prompt: int, samples: Sequence[Sequence[Any]]) -> GroupRecord:
        """Return the record from its `dataclasses.astuple` fields after a round trip through JSON."""
        return cls(position, prompt, [Sampled(*fields) for fields in samples])

    @property
    def is_complete(self) -> bool:
        """True if every completion has ended."""
        return bool(self.samples) and all(one.truncated is not None for one in self.samples)

    @property
    def is_scored(self) -> bool:
        return self.is_complete and bool(self.samples[0].rewards)

    def extended(self, more: GroupRecord) -> GroupRecord:
        samples = self.samples or [Sampled() for _ in more.samples]
        both = [one.extended(piece) for one, piece in zip(samples, more.samples, strict=True)]
        return GroupRecord(self.position, self.prompt, both)

    def group(self, prompts: Sequence[Prompt]) -> PromptGroup:
        prompt = prompts[self.prompt]
        return PromptGroup(
            np.array(prompt.ids), [one.rated() for one in self.samples], prompt.where, prompt.id
        )


LoggedMetrics = dict[str, list[float]]  # values that rewards log, by metric


@dataclass
class QueuedBatch:
    """A rollout batch that is sampled ahead of its use."""

    records: list[GroupRecord]
    logged: LoggedMetrics = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        return all(record.is_scored for record in self.records)

    @property
    def sampled_tokens(self) -> int:
        return _sampled_tokens(self.records)

    def add(self, pieces: Sequence[GroupRecord], logged: LoggedMetrics) -> None:
        """Append sampled continuations to the completions of their groups."""
        by_position = {piece.position: piece for piece in pieces}
        self.records = [
            record.extended(by_position[record.position]) if record.position in by_position else record
            for record in self.records
        ]
        for name, values in logged.items():
            self.logged.setdefault(name, []).extend(values)


def held_out_metrics(rl: RlConfig, names: Sequence[str], batch: QueuedBatch) -> dict[str, float]:
    """Return the evaluation metrics of held-out prompts.

    `accuracy` is the fraction of completions whose first reward is at least 1. `prompts_solved` is the fraction of
    prompts with such a completion. `rewards_*` are statistics of the weighted sums. `names` are the rewards' names.
    """
    samples = [record.samples for record in batch.records]
    rewards = np.array([[one.rewards for one in group] for group in samples], float)  # [prompts, G, kinds]
    lengths = np.array([[len(one.sampled_ids) for one in group] for group in samples])  # [prompts, G]
    total, solved = total_rewards(rl, rewards, lengths), rewards[..., 0] >= 1
    present = total[~np.isnan(total)]
    values_or_nan = present if present.size else np.array([np.nan])
    metrics = {
        "rewards_mean": float(values_or_nan.mean()),
        "rewards_std": float(present.std(ddof=1)) if present.size > 1 else 0.0,
        "rewards_min": float(values_or_nan.min()),
        "rewards_max": float(values_or_nan.max()),
        "rewards_median": float(np.median(values_or_nan)),
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
    means |= {prefixed(name, metrics): np.array(values) for name, values in batch.logged.items()}
    return metrics | {name: float(values.mean()) if values.size else np.nan for name, values in means.items()}


def prefixed(name: str, taken: Collection[str]) -> str:
    """Return a reward's metric name for the log: `name`, with a prefix if it is in `taken`."""
    return f"reward/{name}" if name in taken else name


def encode_queue(queue: dict[int, QueuedBatch], shape: Mapping[str, Any]) -> bytes:
    """Return the queued batches, by number, as a checkpoint file. `shape` has the settings that a resumed run must
    share."""
    batches = {
        number: [[astuple(record) for record in batch.records], batch.logged]
        for number, batch in queue.items()
    }
    return zstandard.compress(json.dumps({"shape": dict(shape), "batches": batches}).encode())


def decode_queue(content: bytes) -> tuple[dict[int, QueuedBatch], dict[str, Any]]:
    """Return the batches and the settings (`shape`) from the content that `encode_queue` has returned."""
    tree = json.loads(decompress_zstd(content))
    queue = {
        int(number): QueuedBatch([GroupRecord.from_fields(*fields) for fields in records], logged)
        for number, (records, logged) in tree["batches"].items()
    }
    return queue, tree["shape"]


class Sampler(Protocol):
    """Interface of an engine that samples completions."""

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
    max_tokens: int | None = None,
    agent: PolicyAgent | EndpointAgent | None = None,
    share: Share = lambda value: value,
    max_prompt_tokens: int = 0,
) -> tuple[list[GroupRecord], LoggedMetrics]:
    """Sample the next tokens of `records` and score the groups that are complete.

    Args:
        engine: samples completions.
        prompts: all prompts, by index.
        rewards: scores the groups; None on all ranks of a replica but the first, which sample too but return nothing.
        tokenizer: decodes completions for the rewards.
        records: the groups, either all new or all begun.
        sampling: sampling parameters; `max_new_tokens` of this call.
        num_generations: completions per group.
        step: training step, passed to the rewards.
        timed: function that returns a context manager, which times a phase.
        max_tokens: maximum tokens of a completion over all calls; None means this call samples all of them.
        agent: samples completions of several turns, all of their tokens in this call.
        share: function that sends a value of a replica's first rank to its other ranks. Used by the agent.
        max_prompt_tokens: maximum tokens of a prompt that the agent's environment extends.

    Returns:
        The new pieces, and the metrics that rewards logged.

    Raises:
        DataError: if a reward fails.
    """
    if agent is not None:
        trajectories, logged = agent.sample(
            engine, [(one.position, one.prompt) for one in records], sampling, num_generations, max_prompt_tokens,
            is_first=rewards is not None, share=share, timed=timed,
            request_key=partial(request_key, num_generations, sampling.max_new_tokens),
        )  # fmt: skip
        if rewards is None:
            return [], {}
        samples = map(Sampled.from_trajectory, trajectories)
        pieces = [replace(one, samples=list(islice(samples, num_generations))) for one in records]
        with timed("rewards"):
            return pieces, logged | _score(records, pieces, rewards, tokenizer, sampling.stop, step)
    is_continuation, generations = bool(records and records[0].samples), num_generations
    with timed("generation"):
        if is_continuation:
            completions = _continued(engine, prompts, records, sampling, max_tokens or 1, generations)
        else:
            ids, keys = [prompts[one.prompt].ids for one in records], [one.position for one in records]
            completions = (
                engine.generate(ids, sampling, keys=keys, num_generations=generations) if records else []
            )
    if rewards is None:
        return [], {}
    new = iter(completions)
    can_continue = max_tokens is not None and _sampled_tokens(records) + sampling.max_new_tokens < max_tokens
    pieces = [
        GroupRecord(one.position, one.prompt, [
            _piece(next(new), sampling.max_new_tokens if can_continue else 0, len(sample.ids))
            if sample.truncated is None
            else Sampled(truncated=sample.truncated)
            for sample in one.samples or generations * [Sampled()]
        ])
        for one in records
    ]  # fmt: skip
    with timed("rewards"):
        return pieces, _score(records, pieces, rewards, tokenizer, sampling.stop, step)


def _continued(
    engine: Sampler,
    prompts: Sequence[Prompt],
    records: Sequence[GroupRecord],
    sampling: Sampling,
    max_tokens: int,
    num_generations: int,
) -> list[Completion]:
    """Sample more tokens for each unfinished completion of `records`, in order."""
    requests, keys = [], []
    for record in records:
        for number, sample in enumerate(record.samples):
            if sample.truncated is None:
                requests.append([*prompts[record.prompt].ids, *sample.ids])
                keys.append(
                    request_key(num_generations, max_tokens, record.position, number, len(sample.ids))
                )
    return engine.generate(requests, sampling, keys=keys)


def request_key(num_generations: int, max_tokens: int, position: int, generation: int, tokens: int) -> int:
    """Return the sampling key of a request that continues a completion of `tokens` tokens."""
    offset = (position * num_generations + generation) * max_tokens + tokens
    return FIRST_KEY + offset % (LAST_KEY - FIRST_KEY)


def _sampled_tokens(records: Sequence[GroupRecord]) -> int:
    """Return the number of tokens of the longest open completion so far, or 0 if all completions have ended."""
    lengths = (len(one.ids) for record in records for one in record.samples if one.truncated is None)
    return max(lengths, default=0)


def _piece(one: Completion, continues_at: int, earlier: int) -> Sampled:
    """Convert a completion of the engine to a piece of a sample.

    Args:
        one: the completion.
        continues_at: a completion truncated at this number of tokens stays open, to be continued. 0: every completion
            ends.
        earlier: largest number of tokens that earlier calls sampled for a completion; 0 in the first call. The expert
            ids of earlier tokens are already recorded.
    """
    ids, versions = list(one.ids), list(map(int, one.versions))
    versions = versions if len(versions) == len(ids) else versions * len(ids)
    truncated = None if one.truncated and len(ids) == continues_at else one.truncated
    piece = Sampled(ids, list(map(float, one.logprobs)), versions, truncated)
    recorded = 0 if not earlier or one.routes is None else len(one.routes) - len(ids)
    return replace(piece, routes=new_routes(one.routes, recorded))


def _score(
    records: Sequence[GroupRecord],
    pieces: Sequence[GroupRecord],
    rewards: Rewards,
    tokenizer: Tokenizer,
    stop: Sequence[int],
    step: int,
) -> LoggedMetrics:
    """Score the groups that these continuations complete. Returns the rewards' metrics."""
    extended_groups = [(record.extended(piece), piece) for record, piece in zip(records, pieces)]
    complete = [(group, piece) for group, piece in extended_groups if group.is_complete]
    if not complete:
        return {}
    jobs, turns = [], []
    for group, _ in complete:
        texts = [tokenizer.decode([t for t in one.last_turn if t not in stop]) for one in group.samples]
        jobs.append((group.prompt, texts, [one.ids for one in group.samples]))
        turns.append([_turns(one, tokenizer) for one in group.samples if one.messages is not None])
    results = rewards(jobs, step, turns if turns[0] else None)
    for (_, piece), rewards_of_group, extras in zip(complete, results.rewards, results.extras):
        for one, row, extra in zip(piece.samples, rewards_of_group, extras):
            one.rewards, one.extra = row.tolist(), extra
    return results.metrics


def _turns(one: Sampled, tokenizer: Tokenizer) -> Turns:
    """Convert a multi-turn completion to the `Turns` that reward functions receive."""
    return {
        "messages": one.messages,
        "text": tokenizer.decode(one.ids),
        "sampled_ids": one.sampled_ids,
        "environment_reward": one.environment_reward,
    }
