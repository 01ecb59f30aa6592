"""What is asked of the engine, what it gives, and a completion under way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megalith.config import ModelConfig
from megalith.errors import ConfigError

MOST_GENERATIONS, MOST_KEYS = 2**16, 2**47


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, and when a completion ends."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    """0: the likeliest token."""
    top_k: int = 0
    """Only the k likeliest; 0: all."""
    top_p: float = 1.0
    """Only the likeliest that together reach this probability (Holtzman et al. 2020)."""
    min_p: float = 0.0
    """Only those with at least this share of the likeliest's probability."""
    seed: int = 0
    stop: tuple[int, ...] = ()
    """Ids that end a completion, and stay in it."""
    forced_lengths: Sequence[int] | None = None
    """Completion i, counted over prompts and generations, ends after so many tokens, whatever they are: benchmarks."""
    vocab_size: int | None = None
    """Only ids below are sampled, where a model has more rows than its tokenizer entries. None: all of the model's."""

    def check(self) -> None:
        """Raises ConfigError for a value out of range."""
        for name, fits, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (the likeliest token) or more"),
            ("top_k", self.top_k >= 0, "0 (all tokens) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 (off) to 1"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 2^32 - 1"),
        ):
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)}; it has to be {rule}")


@dataclass(frozen=True)
class Completion:
    """What follows a prompt."""

    prompt: int
    """Its index in what `generate` was given."""
    generation: int
    ids: list[int]
    logprobs: list[float]
    """Of each id, under softmax(logits / temperature) over what top_k, top_p and min_p keep; at temperature 0 under
    softmax(logits)."""
    truncated: bool
    """It ends with no stop id."""
    versions: Sequence[int] = (0,)
    """Of the weights that sampled it: one, or one for each id."""


@dataclass
class RowSequence:
    """A completion under way."""

    number: int
    prompt: Sequence[int]
    prompt_index: int
    generation: int
    limit: int  # tokens of the completion at most
    stop: frozenset[int]
    pause: int = 0  # so many tokens its row may give before it is filled anew
    launched: int = 0  # tokens that the steps launched so far give at most
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.ids)

    @property
    def ended(self) -> bool:
        return len(self.ids) >= self.limit or self.stopped

    @property
    def stopped(self) -> bool:
        return bool(self.ids and self.ids[-1] in self.stop)


def sequences_of(
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    num_generations: int,
    config: ModelConfig,
    max_tokens: int,
) -> list[RowSequence]:
    """The completions that are asked for, by prompt, then generation, for rows with room for `max_tokens`."""
    sampling.check()
    count, forced = len(prompts) * num_generations, sampling.forced_lengths
    if forced is not None and len(forced) != count:
        raise ConfigError(
            f"forced_lengths has {len(forced)} lengths for {count} completions; give one for each"
        )
    if forced is not None and min(forced, default=1) < 1:
        raise ConfigError(f"forced_lengths has {min(forced)}; every completion has at least 1 token")
    stop = frozenset() if forced is not None else frozenset(sampling.stop)
    made = []
    for index, prompt in enumerate(prompts):
        for generation in range(num_generations):
            limit = sampling.max_new_tokens if forced is None else forced[len(made)]
            if generation == 0 or forced is not None:
                _check_prompt(index, prompt, limit, config, max_tokens)
            made.append(RowSequence(len(made), prompt, index, generation, limit, stop))
    return made


def _check_prompt(
    number: int, prompt: Sequence[int], new_tokens: int, config: ModelConfig, max_tokens: int
) -> None:
    if not len(prompt):
        raise ConfigError(f"prompt {number} has no tokens; give it at least one")
    if not (min(prompt) >= 0 and max(prompt) < config.vocab_size):
        token = next(token for token in prompt if not 0 <= token < config.vocab_size)
        raise ConfigError(
            f"prompt {number} has token {token}, but the model's vocabulary has {config.vocab_size}; "
            "use the tokenizer that the model was trained with"
        )
    longest = len(prompt) + new_tokens
    for most, of in (
        (config.max_position_embeddings, "the model has {} positions"),
        (max_tokens, "a row of the engine has room for {}"),
    ):
        if longest > most:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens and {new_tokens} are to follow, {longest} in all, but "
                f"{of.format(most)}; lower max_new_tokens or shorten it"
            )


def check_keys(keys: Sequence[int], prompts: int, num_generations: int) -> None:
    if len(keys) != prompts or any(not 0 <= key < MOST_KEYS for key in keys):
        raise ConfigError(
            f"there are {len(keys)} keys for {prompts} prompts; give each one from 0 to 2^47 - 1"
        )
    if not 1 <= num_generations <= MOST_GENERATIONS:
        raise ConfigError(f"num_generations is {num_generations}; it has to be from 1 to {MOST_GENERATIONS}")
