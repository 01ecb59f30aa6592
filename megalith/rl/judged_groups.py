"""Groups of completions, sampled by an engine and judged by the rewards, on the way from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.generation.requests import Completion, Sampling
from megalith.rl.prompts import Prompt
from megalith.rl.rewards import Rewards
from megalith.rl.rollouts import PromptGroup, RatedCompletion


@dataclass(frozen=True)
class GroupRecord:
    """A group as a replica gives it to all, of what JSON takes."""

    position: int
    prompt: int  # its index
    samples: list[list[Any]]  # ids, log-probabilities, rewards, versions, truncated, what was logged of it

    def group(self, prompts: Sequence[Prompt]) -> PromptGroup:
        prompt, completions = prompts[self.prompt], []
        for ids, logprobs, rewards, versions, truncated, extra in self.samples:
            arrays = np.array(ids), np.array(rewards, dtype=float), np.array(logprobs, dtype=np.float32)
            completions.append(RatedCompletion(*arrays, np.array(versions), truncated, extra))
        return PromptGroup(np.array(prompt.ids), completions, prompt.where, prompt.id)


class Sampler(Protocol):
    """The part of an engine that samples."""

    generate: Callable[..., list[Completion]]


def sample_groups(
    engine: Sampler,
    prompts: Sequence[Prompt],
    rewards: Rewards | None,
    tokenizer: Tokenizer,
    asked: Sequence[tuple[int, int]],
    sampling: Sampling,
    num_generations: int,
    step: int = 0,
    timed: Callable[[str], AbstractContextManager] = lambda phase: nullcontext(),
) -> tuple[list[GroupRecord], dict[str, list[float]]]:
    """Judged completions of the prompts asked for, (position in the stream, index) each, and what the rewards log.

    Without `rewards`, on the further ranks of a replica, it generates with the others and gives nothing. Raises
    DataError for a reward that fails."""
    G = num_generations
    with timed("generation"):
        ids, keys = [prompts[index].ids for _, index in asked], [position for position, _ in asked]
        found = engine.generate(ids, sampling, keys=keys, num_generations=G) if asked else []
    if rewards is None:
        return [], {}
    with timed("rewards"):
        each = [found[at : at + G] for at in range(0, len(found), G)]
        stop = set(sampling.stop)
        texts = [[tokenizer.decode([t for t in one.ids if t not in stop]) for one in group] for group in each]
        jobs = [(i, t, [list(one.ids) for one in group]) for (_, i), t, group in zip(asked, texts, each)]
        verdicts = rewards(jobs, step)
    records = []
    for (position, index), group, given, extras in zip(asked, each, verdicts.rewards, verdicts.extras):
        samples = [
            [
                list(one.ids),
                list(map(float, one.logprobs)),
                row.tolist(),
                list(one.versions),
                one.truncated,
                extra,
            ]
            for one, row, extra in zip(group, given, extras)
        ]
        records.append(GroupRecord(position, index, samples))
    return records, verdicts.metrics
