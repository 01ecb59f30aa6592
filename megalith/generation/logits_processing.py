"""Settings that modify the logits before sampling: penalties, biases, bad words and a grammar.

     logits + bias ─▶ repetition, frequency and presence penalties ─▶ masks of bad words and grammar ─▶ sampling

The order is vLLM's. Penalties and biases stay on the device. Bad words of several tokens and grammars are evaluated on
the host, which reads each token before the next step and sends a mask (running_batch.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError


class TokenMask(Protocol):
    """Tokens that one sequence may sample next."""

    def restrict(self, words: np.ndarray) -> None:
        """Clear the bits of forbidden tokens in int32 [words], 32 tokens per word."""

    def advance(self, token: int) -> None:
        """Record the token that was sampled."""

    @property
    def is_finished(self) -> bool:
        """True if the sequence may sample no further token."""

    @property
    def has_failed(self) -> bool:
        """True if the completion has to end unfinished, because no token was allowed."""


class Grammar(Protocol):
    """A grammar that completions must follow (grammar.py). `source` is its text."""

    source: str

    def matcher(self) -> TokenMask:
        """Return the mask of a new completion."""


@dataclass(frozen=True)
class LogitsProcessing:
    """Changes of the logits before temperature, top_k, top_p and min_p."""

    repetition_penalty: float = 1.0
    """Divides positive logits and multiplies negative ones of tokens in the prompt or the completion. 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the completion."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it is in the completion."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token ids, and the biases that are added to their logits."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that no completion contains."""
    grammar: Grammar | None = None
    """Grammar that completions follow. None: any text."""

    @property
    def penalties(self) -> tuple[float, float, float]:
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def has_penalties(self) -> bool:
        return self.penalties != (1.0, 0.0, 0.0)

    @property
    def biases(self) -> dict[int, float]:
        """Logit biases by token. Single-token bad words have −inf."""
        banned = {word[0]: -math.inf for word in self.bad_words if len(word) == 1}
        return dict(self.logit_bias) | banned

    @property
    def needs_masks(self) -> bool:
        return self.grammar is not None or any(len(word) > 1 for word in self.bad_words)

    @property
    def is_off(self) -> bool:
        return not (self.has_penalties or self.biases or self.needs_masks)

    def masks(self) -> list[TokenMask]:
        """Return new masks for one completion."""
        words = [word for word in self.bad_words if len(word) > 1]
        masks: list[TokenMask] = [BadWords(words)] if words else []
        return masks if self.grammar is None else [*masks, self.grammar.matcher()]

    def check(self, vocab_size: int) -> None:
        """Raise ConfigError for a value out of range or a token outside the vocabulary."""
        for name, fits, rule in (
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 is off"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2; 0 is off"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2; 0 is off"),
        ):
            if not fits:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {rule}")
        for token, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise ConfigError(f"logit_bias of token {token} is {bias}; it must be from -100 to 100")
        if any(not word for word in self.bad_words):
            raise ConfigError("a bad word has no tokens; each must have at least one")
        tokens = [token for token, _ in self.logit_bias] + [each for word in self.bad_words for each in word]
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise ConfigError(
                    f"logit_bias or bad_words has token {token}, but the model's vocabulary has {vocab_size} entries; "
                    "use ids of the model's tokenizer"
                )

    def to_json(self) -> list[Any]:
        """Return the settings as JSON values to send to another rank, with the grammar as source text."""
        source = None if self.grammar is None else self.grammar.source
        return [*self.penalties, list(map(list, self.logit_bias)), list(map(list, self.bad_words)), source]

    @classmethod
    def from_json(
        cls, values: Sequence[Any], compile_grammar: Callable[[str], Grammar] | None
    ) -> LogitsProcessing:
        """Return the settings from the values of `to_json`, or OFF if they change nothing."""
        *penalties, biases, words, source = values
        grammar = None if source is None else compile_grammar(source)
        settings = cls(*penalties, tuple(map(tuple, biases)), tuple(map(tuple, words)), grammar)
        return OFF if settings.is_off else settings


class BadWords:
    """Forbids the last token of a bad word when the completion ends with the word's other tokens."""

    is_finished = has_failed = False

    def __init__(self, words: Sequence[Sequence[int]]):
        self._words = [tuple(word) for word in words]
        self._longest = max(map(len, words)) - 1
        self._last: tuple[int, ...] = ()

    def restrict(self, words: np.ndarray) -> None:
        for *before, last in self._words:
            if self._last[len(self._last) - len(before) :] == tuple(before) and len(self._last) >= len(
                before
            ):
                words.view(np.uint32)[last >> 5] &= np.uint32(~(1 << (last & 31)) & 0xFFFFFFFF)

    def advance(self, token: int) -> None:
        self._last = (*self._last, token)[-self._longest :]


OFF = LogitsProcessing()


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Tokenize bad words as vLLM does. Raises ConfigError for a word without tokens.

    Each word is encoded as it is, and also after a space if that gives as many tokens and another first token.
    """
    results: dict[tuple[int, ...], None] = {}
    for word in words:
        plain, spaced = (tuple(map(int, tokenizer.encode(prefix + word.lstrip()))) for prefix in ("", " "))
        if not plain:
            raise ConfigError(f"the bad word {word!r} has no tokens; leave it out")
        results[plain] = None
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            results[spaced] = None
    return tuple(results)
