"""Requests to the engine, their results, and completions in progress."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.generation.logits_processing import OFF, LogitsProcessing, TokenMask
from megalith.generation.stop_strings import StopStrings, StopWatch

MAX_GENERATIONS, MAX_KEYS = 2**16, 2**47


@dataclass(frozen=True)
class Sampling:
    """Sampling settings and stopping conditions."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    """0: greedy."""
    top_k: int = 0
    """Sample from the k most likely tokens. 0: all."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together have this probability (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the most likely token's probability."""
    seed: int = 0
    stop: tuple[int, ...] = ()
    """Token ids that end a completion; they are part of it."""
    forced_lengths: Sequence[int] | None = None
    """Length of each completion, counted over prompts and generations, regardless of stop tokens. For benchmarks."""
    vocab_size: int | None = None
    """Sample only smaller ids, if the model has more rows than its tokenizer has entries. None: all ids."""
    forced_bos_token_id: int | None = None
    """First token of an encoder-decoder's completions, as in transformers: mBART's target language. Its
    log-probability is 0."""
    by_row: bool = False
    """Each sequence has its own temperature, top_k, top_p and min_p (RowSequence.sampling)."""
    processing: LogitsProcessing = OFF
    """Penalties, biases, bad words and grammar."""
    stop_strings: StopStrings | None = None
    """Texts that end a completion; the token that completes one is its last."""

    def check(self) -> None:
        """Raise ConfigError for a value out of range."""
        for name, fits, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
        ):
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {rule}")


@dataclass(frozen=True)
class Completion:
    """A completion of a prompt."""

    prompt: int
    """Index of the prompt in the call of `generate`."""
    generation: int
    ids: list[int]
    logprobs: list[float]
    """Log-probability of each id under softmax(logits / temperature) over the tokens kept by top_k, top_p and min_p, or
    over all tokens in a batch-invariant engine; at temperature 0 under softmax(logits). The logits are those after
    Sampling.processing, or in a batch-invariant engine those before it."""
    truncated: bool
    """True if the completion did not end with a stop id, a stop string or the end of the grammar."""
    versions: Sequence[int] = (0,)
    """Version of the weights that sampled it: one, or one per id."""
    routes: np.ndarray | None = None
    """Experts of each token of prompt and completion but the last, int16 [tokens - 1, layers with experts, topk]; None:
    not recorded."""
    ends_with_stop_id: bool | None = None
    """Default: True unless truncated."""

    @property
    def content(self) -> list[int]:
        """The ids without the stop id at the end."""
        has_stop_id = not self.truncated if self.ends_with_stop_id is None else self.ends_with_stop_id
        return self.ids[:-1] if has_stop_id else self.ids


@dataclass
class RowSequence:
    """A completion in progress."""

    number: int
    prompt: Sequence[int]
    prompt_index: int
    generation: int
    limit: int  # maximum length of the completion
    stop: frozenset[int]
    pause_at: int = 0  # length of the completion at which its row is prefilled again
    launched: int = 0  # length after the steps launched so far, without accepted drafts
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each id
    routes: list[np.ndarray] = field(default_factory=list)  # pieces of `all_routes`
    noise: int = 0  # key of its random numbers, from `noise_keys`
    sampling: tuple[float, float, float, float] | None = (
        None  # temperature, top_k, top_p and min_p, by_row only
    )
    processing: LogitsProcessing = OFF
    masks: list[TokenMask] = field(default_factory=list)
    stop_watch: StopWatch | None = None
    adapter: int = 0  # slot of its adapter, 0 for none
    reports_once: bool = False  # see LiveRequest
    is_cancelled: bool = False

    def append(self, ids: Sequence[int], logprobs: Sequence[float]) -> int:
        """Append sampled tokens up to the end of the completion. Returns the number of appended tokens."""
        count = len(ids) if self.stop_watch is None else self.stop_watch.count(ids)
        for at, token in enumerate(ids[:count] if self.masks else ()):
            for mask in self.masks:
                mask.advance(token)
            if any(mask.has_failed for mask in self.masks):  # no token was allowed
                count = at
                break
        self.ids += ids[:count]
        self.logprobs += logprobs[:count]
        return count

    @property
    def all_routes(self) -> np.ndarray | None:
        """Expert routing of all tokens except the last, int16 [tokens - 1, layers with experts, topk].

        None if it was not recorded.
        """
        return np.concatenate(self.routes) if self.routes else None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def ended(self) -> bool:
        ids = self.ids  # asked several times per window and row, so the common case calls nothing else
        if len(ids) >= self.limit or self.is_cancelled or (ids and ids[-1] in self.stop):
            return True
        if self.stop_watch is None and not self.masks:
            return False
        return self.stopped or any(mask.has_failed for mask in self.masks)

    @property
    def stopped(self) -> bool:
        """True if a stop id, a stop string or the end of the grammar ended the completion."""
        if self.ends_with_stop_id or self.found_stop_string:
            return True
        return bool(self.masks) and any(mask.is_finished for mask in self.masks)

    @property
    def ends_with_stop_id(self) -> bool:
        return bool(self.ids and self.ids[-1] in self.stop)

    @property
    def ended_on_host(self) -> bool:
        """True if the completion has ended by a rule that only the host applies. The device would continue the row."""
        return self.ended and not self.ends_with_stop_id and len(self.ids) < self.limit

    @property
    def found_stop_string(self) -> bool:
        return self.stop_watch is not None and self.stop_watch.has_stopped


def make_sequences(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    num_generations: int,
    config: ModelConfig,
    max_tokens: int,
    max_new_tokens: Sequence[int] | None = None,
) -> list[RowSequence]:
    """Return the requested completions, not yet begun, ordered by prompt, then by the completion's index.

    A prompt and its completion must fit into `max_tokens` tokens. `max_new_tokens` has a limit per prompt. Default:
    sampling.max_new_tokens.
    """
    sampling.check()
    sampling.processing.check(config.vocab_size)
    _check_forced_bos(sampling.forced_bos_token_id, config)
    count, forced = len(prompts) * num_generations, sampling.forced_lengths
    if forced is not None and len(forced) != count:
        raise ConfigError(
            f"forced_lengths has {len(forced)} lengths for {count} completions; pass one length per completion"
        )
    if forced is not None and min(forced, default=1) < 1:
        raise ConfigError(f"forced_lengths has {min(forced)}; every completion has at least 1 token")
    stop = frozenset() if forced is not None else frozenset(sampling.stop)
    sequences = []
    for index, prompt in enumerate(prompts):
        for generation in range(num_generations):
            most = sampling.max_new_tokens if max_new_tokens is None else max_new_tokens[index]
            limit = most if forced is None else forced[len(sequences)]
            if generation == 0 or forced is not None:
                check_prompt(index, prompt, limit, config, max_tokens)
            sequence = RowSequence(len(sequences), prompt, index, generation, limit, stop)
            sequence.processing, sequence.masks = sampling.processing, sampling.processing.masks()
            if sampling.stop_strings is not None and sampling.stop_strings.texts and forced is None:
                sequence.stop_watch = sampling.stop_strings.watch()
            sequences.append(sequence)
    return sequences


def _check_forced_bos(token: int | None, config: ModelConfig) -> None:
    if token is None:
        return
    if not config.encoder_layers:
        raise ConfigError(
            f"forced_bos_token_id is {token}, but the model is a decoder, whose completions continue the "
            "prompt; append the token to the prompt instead"
        )
    if not 0 <= token < config.vocab_size:
        raise ConfigError(
            f"forced_bos_token_id is {token}, but the model has the tokens 0 to {config.vocab_size - 1}; choose one of "
            "them"
        )


def check_prompt(
    number: int, prompt: Sequence[int], new_tokens: int, config: ModelConfig, max_tokens: int
) -> None:
    if not len(prompt):
        raise ConfigError(f"prompt {number} has no tokens; pass at least one")
    if not (min(prompt) >= 0 and max(prompt) < config.vocab_size):
        token = next(token for token in prompt if not 0 <= token < config.vocab_size)
        raise ConfigError(
            f"prompt {number} has token {token}, but the model's vocabulary has {config.vocab_size} entries; "
            "use the tokenizer that the model was trained with"
        )
    longest = len(prompt) + new_tokens
    for limit, text in (
        (config.max_position_embeddings, "the model has {} positions"),
        (max_tokens, "a row of the engine has room for {}"),
    ):
        if longest > limit:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens and up to {new_tokens} follow, {longest} in all, but "
                f"{text.format(limit)}; lower max_new_tokens, or shorten the prompt"
            )


def check_keys(keys: Sequence[int], prompts: int, num_generations: int) -> None:
    if len(keys) != prompts or any(not 0 <= key < MAX_KEYS for key in keys):
        raise ConfigError(
            f"there are {len(keys)} keys for {prompts} prompts; pass one per prompt, from 0 to 2^47 - 1"
        )
    if not 1 <= num_generations <= MAX_GENERATIONS:
        raise ConfigError(f"num_generations is {num_generations}; it must be from 1 to {MAX_GENERATIONS}")
