"""What the loop asks of an engine, whoever has made it, and our own engine behind that.

    update(version)   the policy's weights of now, on every rank; what is sampled from then on carries `version`
    generate(…)       completions as ids, with the log-probability of each under softmax(logits / temperature)
    release, close    memory for the trainer; the end

The log-probabilities are *processed*: after the temperature, as the trainer computes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megalith.config import RunConfig
from megalith.errors import TrainingError
from megalith.generation.engine import Engine
from megalith.generation.requests import Completion, Sampling
from megalith.generation.sync import SyncReport, engine_for, sync
from megalith.rl.prompts import Prompt, row_tokens
from megalith.training.run_state import Run

WeightPair = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


class RolloutEngine(Protocol):
    """Samples the completions of a run; every rank has one."""

    version: int
    """The step of its weights."""
    shared: bool
    """Whether the ranks' engines are one and the same, behind a server."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
        num_generations: int = 1,
    ) -> list[Completion]:
        """`num_generations` completions of each prompt, ordered by prompt, then generation.

        `keys`: a number of each prompt of which its noise depends. The ranks of a tensor-parallel axis call it with the
        same prompts; a shared engine samples on the first of them and gives the others nothing."""

    def update(self, version: int) -> SyncReport:
        """The policy's present weights, of step `version`, into the engine. Every rank calls it, and all raise where it
        fails."""

    def weights_to_compare(self) -> WeightPair | None:
        """The tensors it has, and those that it would have if made anew; None: they cannot be looked at."""

    def memory(self) -> int:
        """Bytes that it has of this rank's device."""

    def release(self) -> None:
        """Gives memory back that it needs only while it generates."""

    def close(self) -> None:
        """Ends what it has begun; called once, also after an error."""


LEAST, MOST = -1e30, 1e-2  # between which a log-probability is, the latter for its rounding


@dataclass(frozen=True)
class Answer:
    """One completion as another engine gives it, not yet checked."""

    ids: Any
    logprobs: Any
    truncated: bool
    version: str | None = None  # what the engine calls its weights; None: it does not say

    def completion(
        self, of: str, number: int, generation: int, sampling: Sampling, vocabulary: int, version: int
    ) -> Completion:
        """Raises TrainingError for what is none, `of` which the sentence is."""
        ids, logprobs = self.ids, self.logprobs
        if not isinstance(ids, list) or not ids or not all(type(one) is int for one in ids):
            raise TrainingError(f"{of}: it has no token ids; ids are asked for, text is not enough")
        if len(ids) > sampling.max_new_tokens:
            raise TrainingError(
                f"{of}: it has {len(ids)} tokens where at most {sampling.max_new_tokens} were asked for "
                "(rl.max_completion_length)"
            )
        if not isinstance(logprobs, list) or all(one is None or one != one for one in logprobs):
            raise TrainingError(
                f"{of}: it has no log-probabilities, without which neither drift nor staleness can be corrected; start "
                "the server so that it gives them"
            )
        if len(logprobs) != len(ids):
            raise TrainingError(
                f"{of}: it has {len(ids)} tokens but {len(logprobs)} log-probabilities; look at the server's log"
            )
        entries = sampling.vocab_size or vocabulary
        if not 0 <= min(ids) <= max(ids) < entries:
            outside = next(one for one in ids if not 0 <= one < entries)
            raise TrainingError(
                f"{of}: it has token {outside}, but the vocabulary has {entries}; serve the run's own model"
            )
        values = [math.nan if one is None else one for one in logprobs]
        if wrong := [
            one for one in values if type(one) not in (int, float) or not (one != one or LEAST < one < MOST)
        ]:
            raise TrainingError(
                f"{of}: it has the log-probability {wrong[0]!r:.40}, no finite number up to 0; look at the server's log"
            )
        return Completion(number, generation, ids, [*map(float, values)], self.truncated, (version,))


def request_seed(seed: int, key: int) -> int:
    """Of a prompt's request: 31 bits."""
    digest = hashlib.blake2b(f"{seed} {key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def engine_sizes(config: RunConfig, prompts: Sequence[Prompt], replicas: int) -> tuple[int, int]:
    """Rows of a replica's engine, and the tokens that each has room for, a multiple of 16."""
    rl = config.rl
    groups = config.train.global_batch_size * rl.mini_batches // rl.num_generations
    rows = -(-groups // replicas) * rl.num_generations
    tokens = max(len(prompt.ids) for prompt in prompts) + rl.max_completion_length
    return min(rl.generation_rows, rows), min(row_tokens(config), -(-tokens // 16) * 16)


class OwnEngine:
    """Ours (generation/engine.py), on the trainer's devices; ranks of a tensor-parallel axis generate together."""

    shared = False

    def __init__(self, run: Run, prompts: Sequence[Prompt]):
        """With rows for what a replica samples at most, of as many tokens as the longest prompt and its completion."""
        self._run, self._sizes = (
            run,
            engine_sizes(run.config, prompts, run.mesh.world.size // run.mesh.tp.size),
        )
        self._engine = self._made()
        self.release = self._engine.release

    def _made(self) -> Engine:
        rows, tokens = self._sizes
        return engine_for(self._run.model, max_rows=rows, max_tokens=tokens)

    @property
    def version(self) -> int:
        return self._engine.version

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, **more: Any) -> list[Completion]:
        return self._engine.generate(prompts, sampling, **more)

    def update(self, version: int) -> SyncReport:
        return sync(self._engine, self._run.model, version=version)

    def weights_to_compare(self) -> WeightPair:
        engines = self._engine, self._made()
        return tuple({name: shard.values for name, shard in engine.shards.items()} for engine in engines)

    def memory(self) -> int:
        return sum(self._engine.memory().values())

    def close(self) -> None:
        self.release()
