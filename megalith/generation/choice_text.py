"""The text of a choice while it is sampled: complete characters, up to a stop text or stop id."""

from __future__ import annotations

from collections.abc import Sequence

from megalith.data.tokenizers.tokenizer import Tokenizer

WINDOW = 16  # ids after which a new window begins
UNFINISHED = "\ufffd"  # at the end of a text: the bytes of a character are not complete


class ChoiceText:
    """Decodes the ids of a choice as they arrive.

    The text of an id depends on the ids before it, so each new id is decoded together with some preceding ids.
    They begin where the text before them consists of complete characters.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], stop_ids: frozenset[int], ends_with_eod: bool
    ):
        """Begin without ids.

        Args:
            tokenizer: decodes ids.
            stop: texts that end the choice; a stop text is not part of the choice's text.
            stop_ids: ids that end the choice and have no text.
            ends_with_eod: the engine ends the choice at the tokenizer's end-of-document id, which has no text either.
        """
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._silent = stop_ids | (frozenset({tokenizer.eod}) if ends_with_eod else frozenset())
        self._stop_ids = stop_ids
        self._held_back = max((len(one) for one in stop), default=1) - 1
        self._shown: list[int] = []  # ids with text
        self._begin, self._end = (
            0,
            0,
        )  # of the window: its first id, and the end of the ids whose text is in `_text`
        self._window_text: str | None = None  # text of the window's ids up to `_end`
        self._text, self._emitted = "", 0
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.reason: str | None = None
        """Reason of the end, "stop" or "length"; None before the end."""

    def add(self, ids: Sequence[int], logprobs: Sequence[float], reason: str | None) -> None:
        """Append sampled ids, and the reason if the choice has ended.

        Ids after a stop text or stop id are dropped, and the choice's reason is then "stop" whatever `reason` is.
        """
        if self.reason is None and not self._stop and self._silent.isdisjoint(ids):
            self.ids += ids
            self.logprobs += logprobs
            self._shown += ids
            if ids:
                self._decode(reason is not None)
            self.reason = reason
            return
        for at, (token, logprob) in enumerate(zip(ids, logprobs)):
            if self.reason is not None:
                break
            self.ids.append(token)
            self.logprobs.append(logprob)
            is_last = reason is not None and at == len(ids) - 1
            if token in self._stop_ids:
                self.reason = "stop"
            elif not (token in self._silent and is_last and reason == "stop"):
                self._shown.append(token)
                if self._stop:  # which decides after each id; otherwise all new ids are decoded together
                    self._decode(is_last)
        if not self._stop and len(self._shown) > self._end:
            self._decode((self.reason or reason) is not None)
        if self.reason is None and reason is not None:
            self.reason = reason

    def _decode(self, is_last: bool) -> None:
        if self._window_text is None:
            self._window_text = self._tokenizer.decode(self._shown[self._begin : self._end])
        text = self._tokenizer.decode(self._shown[self._begin :])
        if text.endswith(UNFINISHED) and not is_last:
            return
        self._text += text[len(self._window_text) :]
        previous, self._end = self._end, len(self._shown)
        self._window_text = text
        if self._end - self._begin > WINDOW:
            self._begin, self._window_text = previous, None
        positions = [at for at in (self._text.find(one, self._emitted) for one in self._stop) if at >= 0]
        if positions:
            self._text, self.reason = self._text[: min(positions)], "stop"

    @property
    def text(self) -> str:
        """All text so far, including text that `take` holds back."""
        return self._text

    def take(self) -> str:
        """Return the new text since the last call. Text at the end that may begin a stop text is held back."""
        end = len(self._text) - (self._held_back if self.reason is None else 0)
        part = self._text[self._emitted : max(end, self._emitted)]
        self._emitted += len(part)
        return part
