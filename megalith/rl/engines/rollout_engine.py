"""The interface of rollout engines, and Megalith's own engine.

update(version)   load the policy's current weights, on every rank; later tokens carry `version`
generate(…)       completions as token ids, with log-probabilities under softmax(logits / temperature)
release, close    free memory for the trainer; shut down
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from megalith.config import RunConfig
from megalith.errors import TrainingError
from megalith.generation.engine import Engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.requests import Completion, Sampling
from megalith.generation.speculation import DraftMetrics, Speculation
from megalith.generation.stop_strings import StopStrings
from megalith.generation.sync import SyncReport, engine_for, sync
from megalith.rl.rollouts.prompts import Prompt, max_sequence_tokens, policy_vocab_size
from megalith.training.open_speculation import open_speculation
from megalith.training.run_state import Run

WeightPair = tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


class RolloutEngine(Protocol):
    """Samples the completions of a run. Every rank has one."""

    version: int
    """Step of the engine's weights."""
    shared: bool
    """True if all ranks use the same servers."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        keys: Sequence[int] | None = None,
        num_generations: int = 1,
        max_new_tokens: Sequence[int] | None = None,
    ) -> list[Completion]:
        """Return `num_generations` completions per prompt, ordered by prompt and then by the completion's index.

        Args:
            prompts: token ids of each prompt. Ranks along tensor parallelism pass the same prompts; a shared engine
                samples on the first of them and returns nothing on the others.
            sampling: sampling parameters.
            keys: seeds of the sampling noise, one per prompt.
            num_generations: completions per prompt.
            max_new_tokens: maximum tokens of the completions of each prompt. Default: sampling.max_new_tokens.
        """

    def update(self, version: int) -> SyncReport:
        """Load the policy's weights of step `version` into the engine. Collective over all ranks, which all raise if it
        fails.
        """

    def weights_to_compare(self) -> WeightPair | None:
        """Return this engine's tensors and those of a newly built engine, to locate differences.

        None if they are inaccessible.
        """

    def memory(self) -> int:
        """Return the number of bytes that the engine uses on this rank's device."""

    def take_prefill_tokens(self) -> tuple[int, int] | None:
        """Return the numbers of prefilled and of reused prompt tokens since the last call, or None if they are
        unknown.
        """

    def release(self) -> None:
        """Free memory that is needed only during generation."""

    def close(self) -> None:
        """Shut down. Called once, also after an error."""


MIN_LOGPROB, MAX_LOGPROB = -1e30, 1e-2  # valid range; slightly above 0 because of rounding


@dataclass(frozen=True)
class Answer:
    """A completion from an external engine, not yet validated."""

    ids: Any
    logprobs: Any
    truncated: bool
    version: str | None = None  # the engine's name of its weights; None: unknown
    routes: Sequence[Any] = ()  # the response's experts of consecutive tokens (rl/rollouts/routes.py)

    def completion(
        self, name: str, number: int, generation: int, sampling: Sampling, vocab_size: int, version: int
    ) -> Completion:
        """Validate the answer and return it as a Completion. Raise TrainingError, beginning with `name`, if it is
        invalid.
        """
        ids, logprobs = self.ids, self.logprobs
        if not isinstance(ids, list) or not ids or not all(type(value) is int for value in ids):
            raise TrainingError(
                f"{name}: the completion has no token ids, which training needs; update the server"
            )
        if len(ids) > sampling.max_new_tokens:
            raise TrainingError(
                f"{name}: the completion has {len(ids)} tokens, but at most {sampling.max_new_tokens} were requested "
                "(rl.max_completion_length); check the server's log and version"
            )
        if not isinstance(logprobs, list) or all(value is None or value != value for value in logprobs):
            raise TrainingError(
                f"{name}: the completion has no log-probabilities, which the correction of drift and staleness "
                "needs; start the server so that it returns log-probabilities"
            )
        if len(logprobs) != len(ids):
            raise TrainingError(
                f"{name}: the completion has {len(ids)} tokens but {len(logprobs)} log-probabilities; look at the "
                "server's log"
            )
        entries = sampling.vocab_size or vocab_size
        if not 0 <= min(ids) <= max(ids) < entries:
            outside = next(value for value in ids if not 0 <= value < entries)
            raise TrainingError(
                f"{name}: the completion has token {outside}, but the vocabulary has {entries} entries; serve the "
                "run's own model"
            )
        values = [math.nan if value is None else value for value in logprobs]
        if invalid := [value for value in values if not _is_logprob_or_nan(value)]:
            raise TrainingError(
                f"{name}: the completion has the log-probability {invalid[0]!r:.40}, but log-probabilities are "
                "finite and at most 0; look at the server's log"
            )
        return Completion(number, generation, ids, [*map(float, values)], self.truncated, (version,))


def _is_logprob_or_nan(value: Any) -> bool:
    return type(value) in (int, float) and (value != value or MIN_LOGPROB < value < MAX_LOGPROB)


def request_seed(seed: int, key: int) -> int:
    """Return the 31-bit seed of the request that samples for the prompt with sampling key `key`."""
    digest = hashlib.blake2b(f"{seed} {key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def request_samplings(
    sampling: Sampling, prompts: int, max_new_tokens: Sequence[int] | None
) -> list[Sampling]:
    """Return the sampling parameters of each prompt's request. `max_new_tokens` replaces the limit per prompt."""
    if max_new_tokens is None:
        return [sampling] * prompts
    return [replace(sampling, max_new_tokens=limit) for limit in max_new_tokens]


def engine_sizes(config: RunConfig, prompts: Sequence[Prompt], replicas: int) -> tuple[int, int]:
    """Return the number of cache rows of a replica's engine, and the tokens per row: a multiple of 16, or the run's
    maximum.
    """
    rl = config.rl
    groups = config.train.global_batch_size * rl.mini_batches // rl.num_generations
    rows = -(-groups // replicas) * rl.num_generations
    tokens = max(len(prompt.ids) for prompt in prompts) + rl.max_completion_length
    if rl.environment or rl.agent:  # which may extend the prompts
        tokens = max_sequence_tokens(config)
    return min(rl.generation_rows, rows), min(max_sequence_tokens(config), -(-tokens // 16) * 16)


def run_sampling(run: Run, max_new_tokens: int) -> Sampling:
    """Return the run's sampling parameters. `max_new_tokens` is the maximum number of new tokens."""
    tokenizer = run.tokenizer
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=run.config.rl.temperature,
        seed=run.config.train.seed,
        stop=tokenizer.stop_ids,
        vocab_size=policy_vocab_size(run.config, tokenizer),
        stop_strings=StopStrings(tokenizer, texts) if (texts := run.config.rl.stop_texts) else None,
    )


class OwnEngine:
    """Megalith's engine (generation/engine.py), which samples on the trainer's devices.

    The ranks of a tensor-parallel group generate together.
    """

    shared = False

    def __init__(self, run: Run, prompts: Sequence[Prompt]):
        """Allocate KV-cache rows for a replica's completions of a rollout batch, sized by `engine_sizes`."""
        self._run, self._sizes = (
            run,
            engine_sizes(run.config, prompts, run.mesh.world.size // run.mesh.tp.size),
        )
        rl = run.config.rl
        drafts = rl.speculative_method, rl.num_speculative_tokens, rl.prompt_lookup_max, rl.prompt_lookup_min
        self._engine = self._build(open_speculation(*drafts, rl.draft_model, run.tokenizer))
        self.release = self._engine.release

    def _build(self, speculation: Speculation | None = None) -> Engine:
        rows, tokens = self._sizes
        rl = self._run.config.rl
        options = dict(records_routes=rl.replays_routes, prefix_reuse=rl.prefix_reuse)
        options |= dict(prefix_cache_bytes=int(rl.prefix_cache_gb * 1e9), speculation=speculation)
        return engine_for(self._run.model, max_rows=rows, max_tokens=tokens, **options)

    @property
    def version(self) -> int:
        return self._engine.version

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, **options: Any
    ) -> list[Completion]:
        return self._engine.generate(prompts, sampling, **options)

    def live_engine(self, sampling: Sampling) -> LiveEngine:
        """Return an engine for the ranks that generate together. It accepts requests at any time."""
        return LiveEngine(self._engine, sampling.stop, sampling.vocab_size, self._run.mesh.tp)

    def update(self, version: int) -> SyncReport:
        return sync(self._engine, self._run.model, version=version)

    def weights_to_compare(self) -> WeightPair:
        engines = self._engine, self._build()
        return tuple({name: shard.values for name, shard in engine.shards.items()} for engine in engines)

    def take_draft_metrics(self) -> DraftMetrics:
        """Return and clear the counts of speculative decoding; zeros if it is off."""
        return self._engine.take_draft_metrics() or DraftMetrics(0, 0, 0)

    def memory(self) -> int:
        return sum(self._engine.memory().values())

    def take_prefill_tokens(self) -> tuple[int, int]:
        return self._engine.take_prefill_tokens()

    def close(self) -> None:
        self.release()
