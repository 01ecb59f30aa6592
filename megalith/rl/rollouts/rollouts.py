"""Rollout files: sampled completions with their rewards, to train on.

The format is JSONL, plain or compressed (.jsonl.zst, .jsonl.gz). The first line is a header; every other line is a
group: a prompt with its completions.

    {"format": "megalith-rollouts", "version": 1, "tokenizer": fingerprint or null, "rewards": ["gsm8k", …]}
    {"prompt_ids": [5, 17], "samples": [{"completion_ids": [3, 2], "logprobs": [-0.1, -1.2], "rewards": [1.0],
                                         "version": 40, "truncated": false}, …]}

`logprobs` (optional) are the engine's log-probabilities at its temperature, one per token; null for a token without
one. A missing reward is null. `version` (optional) is the step of the weights that sampled the completion: one number,
or one per token. A group may have a `prompt_id`, a string or a number. Training reads token ids and no text, which
could be tokenized differently.

A sample of several turns also has `segments` (segments.py), `messages`, its transcript for readers, and `prompt_ids` if
its prompt differs from the group's. Log-probabilities of tokens that the model did not sample are null. A session of an
agent may have `branches`: other samples, without rewards of their own, which get the sample's advantage. `turn_rewards`
are the environment's rewards for each step; their discounted sum is the last of the `rewards`. `routes` are the experts
chosen for each token (routes.py).
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from megalith.errors import DataError
from megalith.io import atomic_file
from megalith.rl.rollouts.routes import encode_routes
from megalith.rl.rollouts.segments import Segments, sampled_mask

FORMAT, VERSION = "megalith-rollouts", 1
COMPRESS = {".zst": zstandard.compress, ".gz": gzip.compress}
MAX_DECOMPRESSED_BYTES = 2**32  # of a rollout batch's file in a checkpoint


@dataclass(frozen=True)
class RatedCompletion:
    """A completion with its rewards."""

    ids: np.ndarray  # int64 [tokens], at least one
    rewards: np.ndarray  # float64 [kinds], NaN where absent
    logprobs: np.ndarray | None = None  # float32 [tokens], from the engine; NaN where absent
    version: np.ndarray | None = None  # int64 [1] or [tokens]: the step of the weights that sampled it
    truncated: bool = False  # reached the maximum length
    extra: dict[str, str] = field(default_factory=dict)  # logged by reward functions; not saved
    segments: Segments | None = None  # None: the model sampled every token
    prompt_ids: np.ndarray | None = None  # int64 [tokens]; None: the group's
    messages: list[dict[str, Any]] | None = None  # transcript of several turns, for readers
    branches: Sequence[
        RatedCompletion
    ] = ()  # other conversations of an agent's session, with the same advantage
    turn_rewards: Sequence[float] = ()  # an environment's reward for each step, which its reward sums up
    routes: np.ndarray | None = None  # int16 [tokens of prompt and completion - 1, layers with experts, topk]

    @property
    def sampled(self) -> np.ndarray | bool:
        """Mask of the tokens that the model sampled, bool [tokens], or True for all of them."""
        return True if self.segments is None else sampled_mask(self.segments)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the model sampled."""
        return len(self.ids) if self.segments is None else sum(self.segments[::2])


@dataclass(frozen=True)
class PromptGroup:
    """A prompt with its completions."""

    prompt_ids: np.ndarray  # int64 [tokens], at least one
    completions: list[RatedCompletion]
    where: str = ""  # file and line, for errors
    id: str | int | None = None  # the prompt's id

    def prompt_of(self, completion: RatedCompletion) -> np.ndarray:
        """Return the prompt of a completion of this group, int64 [tokens]."""
        return self.prompt_ids if completion.prompt_ids is None else completion.prompt_ids


@dataclass(frozen=True)
class Rollouts:
    """The groups of one or more files, in order."""

    groups: list[PromptGroup]
    rewards: list[str]
    """Names of the rewards."""
    tokenizer: str | None = None
    """Fingerprint of the tokenizer that the ids belong to."""


def save_rollouts(path: str | Path, rollouts: Rollouts) -> None:
    """Write a rollout file, compressed if its name ends in .zst or .gz.

    Args:
        path: file to write.
        rollouts: groups to save.

    Raises:
        DataError: if the file cannot be written.
    """
    content = encode_rollouts(path, rollouts)
    with atomic_file(path) as file:
        file.write(content)


def decompress_zstd(content: bytes, max_bytes: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """Return decompressed zstd content. Raise DataError for more than `max_bytes`."""
    pieces, size = [], 0
    with zstandard.ZstdDecompressor().stream_reader(content) as reader:
        while piece := reader.read(2**24):
            pieces.append(piece)
            size += len(piece)
            if size > max_bytes:
                raise DataError(
                    f"a compressed file of a rollout batch unpacks to more than {max_bytes:,} bytes, the "
                    "maximum; sample smaller batches"
                )
    return b"".join(pieces)


def encode_rollouts(path: str | Path, rollouts: Rollouts) -> bytes:
    """Return the content of a rollout file with this name."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": rollouts.tokenizer,
        "rewards": rollouts.rewards,
    }
    lines = [header, *map(_group_record, rollouts.groups)]
    content = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
    return COMPRESS.get(Path(path).suffix, bytes)(content)


def _group_record(group: PromptGroup) -> dict[str, Any]:
    identity = {} if group.id is None else {"prompt_id": group.id}
    samples = []
    for completion in group.completions:
        sample = _sample_record(completion) | {"rewards": _or_null(completion.rewards)}
        if completion.branches:
            sample["branches"] = list(map(_sample_record, completion.branches))
        samples.append(sample)
    return {**identity, "prompt_ids": group.prompt_ids.tolist(), "samples": samples}


def _sample_record(completion: RatedCompletion) -> dict[str, Any]:
    sample = {"completion_ids": completion.ids.tolist(), "truncated": completion.truncated}
    if completion.logprobs is not None:
        sample["logprobs"] = _or_null(completion.logprobs)
    if completion.version is not None:
        version = completion.version.tolist()
        sample["version"] = version[0] if len(version) == 1 else version
    if completion.segments is not None:
        sample["segments"] = list(completion.segments)
    if completion.prompt_ids is not None:
        sample["prompt_ids"] = completion.prompt_ids.tolist()
    if completion.messages is not None:
        sample["messages"] = completion.messages
    if completion.routes is not None:
        sample["routes"] = encode_routes(np.asarray(completion.routes))
    if completion.turn_rewards:
        sample["turn_rewards"] = list(completion.turn_rewards)
    return sample


def _or_null(values: np.ndarray) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]
