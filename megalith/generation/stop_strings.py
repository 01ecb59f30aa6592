"""Texts that end a completion, found in the decoded tokens."""

from __future__ import annotations

from collections.abc import Sequence

from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.generation.choice_text import ChoiceText


class StopStrings:
    """Stop strings of a tokenizer's completions."""

    def __init__(self, tokenizer: Tokenizer, texts: Sequence[str]):
        """Raise ConfigError if a text is empty."""
        if not all(texts):
            raise ConfigError("a stop string is empty; each must have at least one character")
        self._tokenizer, self.texts = tokenizer, tuple(texts)

    def watch(self) -> StopWatch:
        """Return a StopWatch for a new completion."""
        return StopWatch(ChoiceText(self._tokenizer, self.texts, frozenset(), False))

    def cut(self, text: str) -> str:
        """Return the part of a text before its first stop string, or the whole text if it has none."""
        return text[: min((at for at in map(text.find, self.texts) if at >= 0), default=len(text))]


class StopWatch:
    """Looks for stop strings in a completion while it is sampled."""

    def __init__(self, text: ChoiceText):
        self._text = text

    @property
    def has_stopped(self) -> bool:
        return self._text.reason == "stop"

    def count(self, ids: Sequence[int]) -> int:
        """Add new ids. Return how many of them belong to the completion, which ends with the first stop string."""
        before = len(self._text.ids)
        self._text.add(ids, [0.0] * len(ids), None)
        self._text.take()  # its search for stop strings begins there
        return len(self._text.ids) - before
