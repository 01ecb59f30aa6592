"""Reading of rollout files (rollouts.py), as a whole or on demand.

Every value is checked, and errors name file, line and sample.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megalith.comm.collectives import Axis, gather_json
from megalith.config import ModelConfig
from megalith.data.inputs.jsonl import read_blocks
from megalith.errors import DataError, short_repr
from megalith.remote import open_location
from megalith.rl.rollouts.rollouts import FORMAT, VERSION, PromptGroup, RatedCompletion, Rollouts
from megalith.rl.rollouts.routes import check_routes, decode_routes
from megalith.rl.rollouts.segments import check_segments
from megalith.tables import counted

MAX_LINE_BYTES = 256 << 20  # enough for a group of a thousand completions of ten thousand tokens


def load_rollouts(
    paths: str | Path | Sequence[str | Path],
    *,
    vocab_size: int | None = None,
    max_tokens: int | None = None,
    num_generations: int | None = None,
    tokenizer: str | None = None,
    version: int | None = None,
    routed_model: ModelConfig | None = None,
) -> Rollouts:
    """Read all groups of rollout files.

    Args:
        paths: a file or several, which are read in order.
        vocab_size: upper bound of token ids; None means not checked.
        max_tokens: maximum length of prompt plus completion, in tokens.
        num_generations: required number of completions per group.
        tokenizer: fingerprint of the required tokenizer.
        version: step whose weights must have sampled every token.
        routed_model: model for which every sample must contain the experts of its tokens. Default: not checked.

    Raises:
        DataError: with file, line and sample number, if the content is malformed or violates one of these limits.
    """
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    reader = _Reader(vocab_size, max_tokens, num_generations, version, routed_model)
    header: dict[str, Any] = {}
    groups = [group for *_, group in reader.groups(paths, tokenizer, header)]
    _require_groups(groups, paths)
    return Rollouts(groups, **header)


def _require_groups(groups: Sequence[Any], paths: Sequence[str | Path]) -> None:
    if not groups:
        raise DataError(
            f"rl.rollouts ({', '.join(map(str, paths)) or 'no file'}) has no group of rollouts; "
            "pass a file written by save_rollouts"
        )


class RolloutFiles:
    """Rollout files whose tokens are read on demand.

    At the start, each rank of `world` parses its share of the lines and sends lengths and rewards to the others, which
    suffice to plan a step. Later, a rank reads the lines of a rollout batch and parses only the groups in its own rows.
    """

    def __init__(
        self,
        paths: Sequence[str],
        world: Axis = Axis(),  # noqa: B008 (immutable)
        *,
        vocab_size: int | None = None,
        max_tokens: int | None = None,
        num_generations: int | None = None,
        tokenizer: str | None = None,
        version: int | None = None,
        routed_model: ModelConfig | None = None,
    ):
        """Index the files. Collective over `world`. Arguments and errors are those of `load_rollouts`."""
        self._paths, header, local, error = list(paths), {}, [], None
        self._reader = _Reader(vocab_size, max_tokens, num_generations, version, routed_model)
        try:
            for file, line, group in self._reader.groups(paths, tokenizer, header, world):
                samples = [_sample_entry(one) for one in group.completions]
                local.append([file, line, len(group.prompt_ids), group.id, samples])
        except DataError as raised:
            error = raised
        shares = gather_json([local, error and str(error)], world)
        for _, reason in shares:
            if reason:
                raise error or DataError(reason)
        self.entries: list[list[Any]] = sorted(entry for share, _ in shares for entry in share)
        """Entries of the groups, in order. An entry has the file index, line number, number of prompt tokens and prompt
        id, and for each completion: its number of tokens, its rewards, whether it is truncated, whether it has
        log-probabilities, its segments, the number of tokens of its own prompt, the same fields of its branches, its
        rewards by turn, and the number of tokens that have routes.
        """
        _require_groups(self.entries, paths)
        self.rewards: list[str] = header["rewards"]
        """Names of the rewards."""
        self._lines, self._last = iter(()), (len(paths), 0)

    def group(self, entry: Sequence[Any], line: bytes = b"") -> PromptGroup:
        """Return the rollout group of an entry. Its arrays are parsed from `line` when they are first used."""
        file, number, prompt, prompt_id, samples = entry
        where, parsed = f"{self._paths[file]}, line {number}", []

        def parse() -> PromptGroup:
            if not parsed:
                group = self._reader.group(where, _object(where, line), len(self.rewards))
                if [len(one.ids) for one in group.completions] != [tokens for tokens, *_ in samples]:
                    raise DataError(f"{where} has changed since the run began; restore the file")
                parsed.append(group)
            return parsed[0]

        def completion(
            fields: Sequence[Any], find: Callable[[PromptGroup], RatedCompletion]
        ) -> RatedCompletion:
            tokens, rewards, truncated, has_logprobs, segments, own_prompt, branches, turn_rewards, routed = (
                fields
            )

            def lazy(length: int, array: str) -> LazyArray:
                return LazyArray(length, lambda: getattr(find(parse()), array))

            return RatedCompletion(
                lazy(tokens, "ids"),
                np.array(rewards),
                lazy(tokens, "logprobs") if has_logprobs else None,
                truncated=truncated,
                segments=segments and tuple(segments),
                prompt_ids=None if own_prompt is None else lazy(own_prompt, "prompt_ids"),
                turn_rewards=turn_rewards,
                routes=lazy(routed, "routes") if routed else None,
                branches=[
                    completion(one, lambda group, n=n: find(group).branches[n])
                    for n, one in enumerate(branches)
                ],
            )

        completions = [
            completion(fields, lambda group, k=k: group.completions[k]) for k, fields in enumerate(samples)
        ]
        return PromptGroup(LazyArray(prompt, lambda: parse().prompt_ids), completions, where, prompt_id)

    def read(self, entries: Iterable[Sequence[Any]]) -> list[PromptGroup]:
        """Return the groups of entries. Entries in file order are read fastest."""
        return [self.group(entry, self._line(entry[0], entry[1])) for entry in entries]

    def _line(self, file: int, number: int) -> bytes:
        """Read forward to a line; restart at the beginning of the files if the line precedes the last one read."""
        if (file, number) <= self._last:
            self._lines = (((at, n), line) for at, path in enumerate(self._paths) for n, line in _lines(path))
        for at, line in self._lines:
            self._last = at
            if at == (file, number):
                return line
        self._last = (len(self._paths), 0)
        raise DataError(
            f"{self._paths[file]} has no line {number} any more; do not change the file while a run reads it"
        )


def _sample_entry(one: RatedCompletion) -> list[Any]:
    own_prompt = None if one.prompt_ids is None else len(one.prompt_ids)
    return [
        len(one.ids),
        one.rewards.tolist(),
        one.truncated,
        one.logprobs is not None,
        one.segments,
        own_prompt,
        list(map(_sample_entry, one.branches)),
        list(one.turn_rewards),
        0 if one.routes is None else len(one.routes),
    ]


class LazyArray:
    """An array of known length whose values are computed on first use."""

    def __init__(self, length: int, make: Callable[[], np.ndarray]):
        self._length, self._make = length, make

    def __len__(self) -> int:
        return self._length

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._make(), dtype)


@dataclass(frozen=True)
class _Reader:
    vocab_size: int | None
    max_tokens: int | None
    num_generations: int | None
    version: int | None
    routed_model: ModelConfig | None = None

    def groups(
        self,
        paths: Sequence[str | Path],
        tokenizer: str | None,
        header: dict[str, Any],
        world: Axis = Axis(),  # noqa: B008 (immutable)
    ) -> Iterator[tuple[int, int, PromptGroup]]:
        """Yield this rank's share of the groups, each with its file index and line number; fill in `header`."""
        for file, path in enumerate(paths):
            lines = _lines(path)
            current = self._header(path, next(lines, None))
            if None not in (tokenizer, current["tokenizer"]) and tokenizer != current["tokenizer"]:
                raise DataError(
                    f"{path} has token ids of another tokenizer (fingerprint {current['tokenizer'][:12]}) than the "
                    f"run's ({tokenizer[:12]}); use the tokenizer that the file was sampled with, or sample again"
                )
            if header and current != header:
                raise DataError(
                    f"{path} has rewards {current['rewards']} and tokenizer {current['tokenizer']}, but the files "
                    f"before it have {header['rewards']} and {header['tokenizer']}; use files with the same rewards "
                    "and tokenizer"
                )
            header.update(current)
            for index, (number, line) in enumerate(lines):
                if index % world.size == world.rank:
                    where = f"{path}, line {number}"
                    yield file, number, self.group(where, _object(where, line), len(current["rewards"]))

    def _header(self, path: str | Path, first: tuple[int, bytes] | None) -> dict[str, Any]:
        where = f"{path}, line 1"
        header = _object(where, first[1]) if first else {}
        if header.get("format") != FORMAT:
            raise DataError(
                f'{where} is not the header of a file of rollouts, {{"format": "{FORMAT}", …}}; pass a file that '
                "save_rollouts wrote"
            )
        if header.get("version") != VERSION or isinstance(header["version"], bool):
            raise DataError(
                f"{where} has format version {header.get('version')!r}, but this Megalith reads version {VERSION}; "
                "write the file again, or read it with the version of Megalith that wrote it"
            )
        names, made_by = header.get("rewards"), header.get("tokenizer")
        if not _is_list(names, str) or not names or len(set(names)) < len(names):
            raise DataError(
                f"{where} has rewards {names!r}; they must be a list of at least one name, all different"
            )
        if made_by is not None and not isinstance(made_by, str):
            raise DataError(f"{where} has tokenizer {made_by!r}; it must be a fingerprint or null")
        return {"rewards": names, "tokenizer": made_by}

    def group(self, where: str, record: dict[str, Any], kinds: int) -> PromptGroup:
        prompt = self._ids(where, "prompt_ids", record.get("prompt_ids"))
        samples = record.get("samples")
        if not isinstance(samples, list) or not samples:
            raise DataError(f"{where} has no list of samples; a group must have at least one completion")
        if self.num_generations not in (None, len(samples)):
            raise DataError(
                f"{where} has {counted(len(samples), 'sample')}, but rl.num_generations is {self.num_generations}, so "
                "the group is incomplete; set rl.num_generations to the size of the groups, or remove incomplete groups"
            )
        completions = []
        for number, sample in enumerate(samples):
            at = f"{where}, sample {number}"
            if not isinstance(sample, dict):
                raise DataError(
                    f"{at} is {short_repr(sample)}, not an object; pass a file written by save_rollouts"
                )
            completions.append(self._completion(at, sample, kinds, len(prompt)))
        id = record.get("prompt_id")
        if id is not None and type(id) not in (int, str):
            raise DataError(
                f"{where} has prompt_id {short_repr(id)}; it must be text or a number, or missing"
            )
        return PromptGroup(prompt, completions, where, id)

    def _completion(self, at: str, sample: dict[str, Any], kinds: int, prompt_tokens: int) -> RatedCompletion:
        ids = self._ids(at, "completion_ids", sample.get("completion_ids"))
        own_prompt = sample.get("prompt_ids")
        if own_prompt is not None:
            own_prompt = self._ids(at, "prompt_ids", own_prompt)
            prompt_tokens = len(own_prompt)
        if self.max_tokens is not None and prompt_tokens + len(ids) > self.max_tokens:
            raise DataError(
                f"{at} has {prompt_tokens} tokens of prompt and {len(ids)} of completion, but at most "
                f"{self.max_tokens} (data.seq_length + 1) fit; raise data.seq_length, or sample shorter completions"
            )
        truncated = sample.get("truncated", False)
        if not isinstance(truncated, bool):
            raise DataError(f"{at} has truncated {short_repr(truncated)}; it must be true or false")
        logprobs = sample.get("logprobs")
        if logprobs is not None:
            logprobs = _floats(at, "logprobs", logprobs, len(ids)).astype(np.float32)
            if (logprobs > 1e-3).any():
                raise DataError(
                    f"{at} has a log-probability of {logprobs[~np.isnan(logprobs)].max():.4g}, but a log-probability "
                    "is at most 0; write natural logarithms of probabilities"
                )
            if np.isnan(logprobs).all():
                logprobs = None
        rewards = _floats(at, "rewards", sample.get("rewards"), kinds)
        branches = self._branches(at, sample, prompt_tokens)
        version = _version(at, sample.get("version"), len(ids))
        if self.version is not None and (version is None or (version != self.version).any()):
            origin = (
                "of unknown version" if version is None else f"of version {short_repr(sample['version'])}"
            )
            raise DataError(
                f"{at} is {origin}, but rl.rollout_version is {self.version}, so other weights sampled it; sample "
                "again, or leave rl.rollout_version out to train on rollouts of any version"
            )
        segments, messages = check_segments(at, sample.get("segments"), len(ids)), sample.get("messages")
        if messages is not None and not _is_list(messages, dict):
            raise DataError(
                f"{at} has messages {short_repr(messages)}; they must be a list of objects, or missing"
            )
        return RatedCompletion(
            ids,
            rewards,
            logprobs,
            version,
            truncated,
            segments=segments,
            prompt_ids=own_prompt,
            messages=messages,
            branches=branches,
            turn_rewards=_turn_rewards(at, sample.get("turn_rewards")),
            routes=self._routes(at, sample.get("routes"), prompt_tokens + len(ids) - 1),
        )

    def _routes(self, at: str, value: Any, tokens: int) -> np.ndarray | None:
        routes, model = decode_routes(at, value), self.routed_model
        if model is not None:
            if routes is None:
                raise DataError(
                    f"{at} has no expert choices (routes), which rl.router_replay needs; sample with an engine that "
                    "returns them, or set rl.router_replay to none"
                )
            check_routes(at, routes, tokens, model)
        return routes

    def _branches(self, at: str, sample: dict[str, Any], prompt_tokens: int) -> list[RatedCompletion]:
        """Return the other conversations of an agent's session. They get the sample's rewards."""
        branches = sample.get("branches")
        if branches is None:
            return []
        if not _is_list(branches, dict) or any("branches" in one for one in branches):
            raise DataError(
                f"{at} has branches {short_repr(branches)}; they must be a list of samples without branches"
            )
        rewards = sample.get("rewards")
        return [
            self._completion(f"{at}, branch {n}", one | {"rewards": rewards}, len(rewards), prompt_tokens)
            for n, one in enumerate(branches)
        ]

    def _ids(self, at: str, key: str, value: Any) -> np.ndarray:
        if not _is_list(value, int) or not value:
            raise DataError(f"{at} has {key} {short_repr(value)}; it must be a list of at least one token id")
        low, high = min(value), max(value)
        size = 2**62 if self.vocab_size is None else self.vocab_size
        if low < 0 or high >= size:
            wrong = low if low < 0 else high
            raise DataError(
                f"{at} has token id {wrong} at position {value.index(wrong)} of {key}, but the vocabulary has "
                f"{self.vocab_size or 'no such'} entries; use the model and tokenizer that sampled it"
            )
        return np.array(value, dtype=np.int64)


def _lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines with their numbers from 1, except blank ones."""
    for block in read_blocks(open_location(str(path)), MAX_LINE_BYTES):
        for number, line in enumerate(block.data.split(b"\n"), block.first_line):
            if len(line) > MAX_LINE_BYTES:
                raise DataError(
                    f"{path}, line {number} is longer than {MAX_LINE_BYTES:,} bytes; write smaller groups"
                )
            if line.strip():
                yield number, line


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON ({error}), so the file is damaged or truncated; write it again"
        ) from None
    if not isinstance(value, dict):
        raise DataError(
            f"{where} is {short_repr(value)}, not an object; pass a file written by save_rollouts"
        )
    return value


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(each) is kind for each in value)


def _floats(at: str, key: str, value: Any, count: int) -> np.ndarray:
    """Return float64 [count] from a list of numbers and nulls. Nulls become NaN."""
    fits = isinstance(value, list) and all(each is None or type(each) in (int, float) for each in value)
    if not fits or len(value) != count:
        description = f"{len(value)} values" if isinstance(value, list) else short_repr(value)
        raise DataError(f"{at} has {description} for {key}; it must be {count} numbers or nulls")
    try:
        array = np.array([math.nan if each is None else float(each) for each in value])
    except OverflowError:
        array = np.array([math.inf])
    if np.isinf(array).any():
        raise DataError(f"{at} has an infinite number in {key}; use null for a missing value")
    return array


def _turn_rewards(at: str, value: Any) -> list[float]:
    if value is None:
        return []
    rewards = _floats(at, "turn_rewards", value, len(value) if isinstance(value, list) else 0)
    if np.isnan(rewards).any():
        raise DataError(f"{at} has a null among its turn_rewards; there must be one number per turn")
    return rewards.tolist()


def _version(at: str, value: Any, tokens: int) -> np.ndarray | None:
    if value is None:
        return None
    value = value if isinstance(value, list) else [value]
    if not _is_list(value, int) or len(value) not in (1, tokens) or not all(0 <= v < 2**62 for v in value):
        raise DataError(
            f"{at} has version {short_repr(value)}; it must be a step, or one step for each of its {tokens} "
            "tokens"
        )
    return np.array(value, dtype=np.int64)
