"""Chat data as tokens: every sample of the files, encoded, with what of it is learned.

A sample that cannot be used is named by file, line and number, and ends the run, or is counted (`skip_bad_samples`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from megalith.config.sft import SftConfig
from megalith.data.chat.chat_template import ChatTemplate, Span, template_of
from megalith.data.chat.conversations import Chat, Text, Tokens, parse_record, read_records
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.remote import StorePath

AT_ONCE = 1024  # samples that are encoded together


@dataclass(frozen=True)
class Samples:
    """Sample i is the tokens [starts[i], starts[i + 1])."""

    tokens: np.ndarray  # int32 [tokens]
    learned: np.ndarray  # bool [tokens]: whether the token is to be predicted from those before it
    starts: np.ndarray  # int64 [samples + 1]
    places: list[str]  # of each sample, "chat.jsonl line 3 (sample 2)"
    counts: Counter[str]  # of the records that are not in it whole: what befell how many
    first_bad: str  # of those skipped

    def __len__(self) -> int:
        return len(self.places)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sample, int64 [samples]."""
        return np.diff(self.starts)

    def identity(self) -> str:
        """SHA-256 of tokens, lengths and what is learned, in hexadecimal."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.learned, self.starts):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def read_samples(
    files: Sequence[Path | StorePath],
    tokenizer: Tokenizer | None,
    sft: SftConfig,
    longest: int,
    vocab_size: int,
) -> Samples:
    """The samples of `files`, of at most `longest` tokens each, in order.

    DataError: the first bad sample, or no good one. ConfigError: a package is missing, or the template is none.
    """
    reader = _Reader(tokenizer, sft, longest, vocab_size)
    for file in files:
        reader.read(file)
    return reader.samples(files)


class _Reader:
    def __init__(self, tokenizer: Tokenizer | None, sft: SftConfig, longest: int, vocab_size: int):
        self.tokenizer, self.sft, self.longest, self.vocab_size = tokenizer, sft, longest, vocab_size
        self.template: ChatTemplate | None = template_of(tokenizer) if tokenizer is not None else None
        self.tokens: list[np.ndarray] = []
        self.learned: list[np.ndarray] = []
        self.places: list[str] = []
        self.counts: Counter[str] = Counter()
        self.first_bad = ""

    def read(self, file: Path | StorePath) -> None:
        records = enumerate(read_records(file), 1)
        while several := list(islice(records, AT_ONCE)):
            parsed = []
            for number, (at, record) in several:
                place = f"{file} {at} (sample {number})"
                try:
                    parsed.append((place, self._text_or_tokens(parse_record(record))))
                except DataError as error:
                    raise error.within(place) from None
                except (ValueError, TypeError, AttributeError, RecursionError) as error:
                    self._bad(place, error)
            for place, ids, learned in self._encoded(parsed):
                try:
                    self._add(place, ids, learned)
                except ValueError as error:
                    self._bad(place, error)

    def _text_or_tokens(self, said: Chat | Text | Tokens) -> Tokens | tuple[str, list[Span], bool]:
        """Tokens; or a text, the spans of it that are learned, and whether the end of document follows it."""
        if isinstance(said, Tokens):
            return said
        if self.tokenizer is None:
            raise DataError(
                "chat data has text, but data.tokenizer_type is not set; name the model's tokenizer"
            )
        if isinstance(said, Text):
            begin = len(said.prompt) if self.sft.completion_only_loss else 0
            text = said.prompt + said.completion
            return text, [(begin, len(text))], self.tokenizer.eod is not None
        if self.template is None:
            raise DataError(
                "chat data has conversations, but the tokenizer has no chat template (chat_template.jinja beside it, "
                "or chat_template in its tokenizer_config.json); give one as sft.chat_template_path"
            )
        if not self.sft.completion_only_loss:
            said = Chat(said.messages, more=said.more)
        return *self.template.text_and_spans(said, self.sft.assistant_only_loss), False

    def _encoded(self, parsed: list) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        texts = [said for _, said in parsed if not isinstance(said, Tokens)]
        encoded = iter(
            self.tokenizer.encode_marked([t for t, _, _ in texts], [s for _, s, _ in texts]) if texts else ()
        )
        for place, said in parsed:
            if isinstance(said, Tokens):
                yield place, np.array(said.ids, dtype=np.int64), np.array(said.learned, dtype=bool)
                continue
            found = next(encoded)
            if isinstance(found, str):
                self._bad(place, found)
                continue
            ids, learned = found
            if said[2]:  # the end is learned with the completion
                ids, learned = [*ids, self.tokenizer.eod], [*learned, True]
            yield place, np.array(ids, dtype=np.int64), np.array(learned, dtype=bool)

    def _add(self, place: str, ids: np.ndarray, learned: np.ndarray) -> None:
        beyond = (ids < 0) | (ids >= self.vocab_size)
        if beyond.any():
            at = int(beyond.argmax())
            raise ValueError(f"token {at} is {ids[at]}, but the vocabulary has {self.vocab_size:,}")
        if not learned[1:].any():  # the first token follows nothing
            raise ValueError("it has no token to learn")
        if len(ids) > self.longest:
            match self.sft.truncation_mode:
                case None:
                    raise ValueError(
                        f"it has {len(ids):,} tokens, more than data.seq_length {self.longest:,}; choose what becomes "
                        "of it: sft.truncation_mode keep_start, keep_end or drop, or raise data.seq_length"
                    )
                case "drop":
                    self.counts["dropped, longer than data.seq_length"] += 1
                    return
                case "keep_start":
                    ids, learned = ids[: self.longest], learned[: self.longest]
                case "keep_end":
                    ids, learned = ids[-self.longest :], learned[-self.longest :]
            if not learned[1:].any():
                self.counts["dropped, with nothing to learn after truncation"] += 1
                return
            self.counts[f"truncated ({self.sft.truncation_mode})"] += 1
        self.tokens.append(ids.astype(np.int32))
        self.learned.append(learned)
        self.places.append(place)

    def _bad(self, place: str, reason: Exception | str) -> None:
        if isinstance(reason, UnicodeEncodeError):
            reason = "it has half of a surrogate pair, which is no character"
        if not self.sft.skip_bad_samples:
            raise DataError(
                f"{place} is unusable: {reason}; correct or remove it, or set sft.skip_bad_samples"
            ) from None
        self.first_bad = self.first_bad or f"{place}: {reason}"
        self.counts["skipped as unusable"] += 1

    def samples(self, files: Sequence[Path | StorePath]) -> Samples:
        if not self.places:
            told = ", ".join(f"{count:,} {what}" for what, count in self.counts.items())
            raise DataError(
                f"{', '.join(map(str, files))} has no sample to train on{told and f' ({told})'}; add data"
            )
        starts = np.zeros(len(self.tokens) + 1, dtype=np.int64)
        np.cumsum([len(one) for one in self.tokens], out=starts[1:])
        tokens, learned = np.concatenate(self.tokens), np.concatenate(self.learned)
        return Samples(tokens, learned, starts, self.places, self.counts, self.first_bad)
