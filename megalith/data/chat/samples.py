"""Tokenized chat data: all samples of the files, with a mask of the tokens in the loss.

A sample is a sequence of tokens, or two, such as a chosen and a rejected answer, each after its prompt
(sample_forms.py). An unusable sample ends the run with file, line and number, or is counted (`skip_bad_samples`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from megalith.config.fine_tuning import ChatConfig, SftConfig
from megalith.data.chat.chat_template import ChatTemplate, template_of
from megalith.data.chat.conversations import ParsedSequence, Text, Tokens
from megalith.data.chat.sample_forms import SAMPLE_FORMS, MarkedText, token_values
from megalith.data.chat.turns import Span
from megalith.data.inputs.hub_dataset import Source
from megalith.data.inputs.sources import read_records
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.progress import Progress

BATCH = 1024  # samples per call of the tokenizer
EQUAL = "with two equal answers, which have no effect"
ENDLESS = (
    "rendered without an end token after any answer, so the model does not learn to stop; change the chat template to "
    "end the assistant's turns with one"
)
Encoded = tuple[np.ndarray, np.ndarray]  # int64 ids [tokens], and bool [tokens], True for those in the loss


@dataclass(frozen=True)
class Samples:
    """Sequences of samples. Sequence i is tokens [starts[i], starts[i + 1]).

    Sample k has the sequences k · `sequences_per_sample` … (k + 1) · `sequences_per_sample` − 1.
    """

    tokens: np.ndarray  # int32 [tokens]
    learned: np.ndarray  # bool [tokens], True if the token's prediction counts in the loss
    starts: np.ndarray  # int64 [sequences + 1]
    sources: Sequence[str]  # per sample, such as "chat.jsonl line 3 (sample 2)"
    counts: Counter[str]  # dropped, truncated or otherwise notable records, by description
    first_bad: str  # the first skipped record
    sequences_per_sample: int = 1
    values: np.ndarray | None = None  # float32 [tokens]: the sample's value at its tokens (sample_forms.py)

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 [sequences]."""
        return np.diff(self.starts)

    def identity(self) -> str:
        """Return the SHA-256 of tokens, lengths and loss masks, in hexadecimal."""
        digest = hashlib.sha256()
        for array in (
            self.tokens,
            self.learned,
            self.starts,
            *([] if self.values is None else [self.values]),
        ):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def read_samples(
    files: Sequence[Source],
    tokenizer: Tokenizer | None,
    chat: ChatConfig,
    max_tokens: int,
    vocab_size: int,
    show_progress: bool = False,
) -> Samples:
    """Read and tokenize the samples of `files`, with sequences of at most `max_tokens` tokens.

    Raises:
        DataError: for the first unusable sample, or if there is no usable one.
        ConfigError: if a package is missing or the template is invalid.
    """
    reader = _Reader(tokenizer, chat, max_tokens, vocab_size)
    with Progress("tokenize", None, "samples", show=show_progress) as progress:
        for file in files:
            reader.read(file, progress)
    return reader.samples(files)


# Cache


class _Texts(Sequence[str]):
    """Concatenated texts: UTF-8 bytes, uint8 [bytes], and the end offset of each text, int64 [texts]."""

    def __init__(self, letters: np.ndarray, ends: np.ndarray):
        self._letters, self._ends = letters, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> str:
        begin = self._ends[i - 1] if i else 0
        return self._letters[begin : self._ends[i]].tobytes().decode(errors="replace")


class _Reader:
    def __init__(self, tokenizer: Tokenizer | None, chat: ChatConfig, max_tokens: int, vocab_size: int):
        self.tokenizer, self.chat, self.max_tokens, self.vocab_size = tokenizer, chat, max_tokens, vocab_size
        self.form = SAMPLE_FORMS[chat.record_form]
        self.names, self.is_preference = self.form.names, self.form.is_preference
        self.assistant_only = isinstance(chat, SftConfig) and chat.assistant_only_loss
        self.completion_only = self.form.completion_only or chat.completion_only_loss
        self.template: ChatTemplate | None = template_of(tokenizer) if tokenizer is not None else None
        self.specials = tokenizer.special_ids if tokenizer is not None else frozenset()
        self.tokens: list[np.ndarray] = []
        self.learned: list[np.ndarray] = []
        self.values: list[np.ndarray] = []  # per sequence
        self.has_values = False
        self.sources: list[str] = []
        self.counts: Counter[str] = Counter()
        self.first_bad = ""

    def read(self, file: Source, progress: Progress) -> None:
        records = enumerate(read_records(file), 1)
        while batch := list(islice(records, BATCH)):
            parsed = []
            for number, (position, record) in batch:
                source = f"{file} {position} (sample {number})"
                try:
                    for sample in self.form.parse(record, self.chat):
                        sequences = [self._text_or_tokens(sequence) for sequence in sample.sequences]
                        parsed.append((source, sample.value, sequences))
                except DataError as error:
                    raise error.within(source) from None
                except (ValueError, TypeError, AttributeError, RecursionError) as error:
                    self._bad(source, error)
            for source, value, sequences in self._encoded(parsed):
                try:
                    self._add(source, value, sequences)
                except ValueError as error:
                    self._bad(source, error)
            progress.add(len(batch))

    def _text_or_tokens(self, sequence: ParsedSequence | MarkedText) -> Tokens | tuple[str, list[Span], bool]:
        """Return the sequence's tokens. For text, return the text, its spans in the loss, and False if a template has
        rendered it, otherwise True.
        """
        if isinstance(sequence, Tokens):
            return sequence
        if self.tokenizer is None:
            raise DataError(
                "data.tokenizer_type is not set, but the chat data has text to tokenize; set data.tokenizer_type to "
                "that of the model's tokenizer"
            )
        if isinstance(sequence, Text):
            start = len(sequence.prompt) if self.completion_only else 0
            text = sequence.prompt + sequence.completion
            return text, [(start, len(text))], True
        if isinstance(sequence, MarkedText):
            return sequence.text, sequence.spans, False
        if self.template is None:
            raise DataError(
                "chat data has conversations, but the tokenizer has no chat template (chat_template.jinja in its "
                f"folder, or chat_template in its tokenizer_config.json); set {self.chat.name}.chat_template_path"
            )
        if not self.completion_only:
            sequence = replace(sequence, first=0)
        return *self.template.text_and_spans(sequence, self.assistant_only), False

    def _encoded(self, parsed: list) -> Iterator[tuple[str, float | list[float] | None, list[Encoded]]]:
        texts = [
            sequence for _, _, sample in parsed for sequence in sample if not isinstance(sequence, Tokens)
        ]
        encoded = iter(
            self.tokenizer.encode_marked([t for t, _, _ in texts], [s for _, s, _ in texts]) if texts else ()
        )
        for source, value, sample in parsed:
            results = [
                sequence
                if isinstance(sequence, Tokens)
                else self._with_special_tokens(next(encoded), sequence[2])
                for sequence in sample
            ]
            self.counts[ENDLESS] += any(
                not isinstance(sequence, Tokens) and isinstance(result, Tokens) and not self._has_end(result)
                for sequence, result in zip(sample, results)
            )
            if reason := next((result for result in results if isinstance(result, str)), None):
                self._bad(source, reason)
                continue
            yield (
                source,
                value,
                [
                    (np.array(result.ids, dtype=np.int64), np.array(result.learned, dtype=bool))
                    for result in results
                ],
            )

    def _with_special_tokens(
        self, encoding: tuple[list[int], list[bool]] | str, is_plain: bool
    ) -> Tokens | str:
        """Return the tokens of a text. For plain text, add special tokens and an end-of-document token that is in the
        loss.

        Nothing is added to text from a template, because templates write their own special tokens.
        """
        if isinstance(encoding, str) or not is_plain:
            return encoding if isinstance(encoding, str) else Tokens(*encoding)
        ids, learned = encoding
        before, after = self.tokenizer.special_tokens(ids)
        eod = self.tokenizer.eod
        if eod is not None and [*ids, *after][-1:] != [eod]:
            after = [*after, eod]
        return Tokens([*before, *ids, *after], [False] * len(before) + learned + [True] * len(after))

    def _has_end(self, answer: Tokens) -> bool:
        """Return True if a stretch of tokens in the loss ends with a special token, ignoring spaces after it."""
        ids, learned = answer.ids, answer.learned
        ends = (k for k in range(len(ids)) if learned[k] and not (k + 1 < len(ids) and learned[k + 1]))
        return any(self._ends_at(ids, learned, k) for k in ends)

    def _ends_at(self, ids: list[int], learned: list[bool], k: int) -> bool:
        while k >= 0 and learned[k] and ids[k] not in self.specials:
            if self.tokenizer.decode([ids[k]]).strip():
                return False
            k -= 1
        return k >= 0 and learned[k]

    def _add(self, source: str, value: float | list[float] | None, sequences: list[Encoded]) -> None:
        for name, (ids, learned) in zip(self.names, sequences, strict=True):
            out_of_range = (ids < 0) | (ids >= self.vocab_size)
            if out_of_range.any():
                index = int(out_of_range.argmax())
                suffix = f" of {name}" if self.is_preference else ""
                raise ValueError(
                    f"token {index}{suffix} is {ids[index]}, but the vocabulary has {self.vocab_size:,} entries"
                )
            if not learned[1:].any():  # the first token follows nothing
                raise ValueError(f"{name} has no token in the loss")
        if self.is_preference:
            # A token may extend into the prompt, so both answers start at the earlier one.
            start = min(int(learned.argmax()) for _, learned in sequences)
            sequences = [(ids, np.arange(len(ids)) >= start) for ids, _ in sequences]
            self.counts[EQUAL] += np.array_equal(sequences[0][0], sequences[1][0])
        self.has_values |= value is not None
        values = [token_values(value, learned, self.form.default) for _, learned in sequences]
        if any(len(ids) > self.max_tokens for ids, _ in sequences):
            values = [self._kept(one) for one in values]
            sequences = self._truncated(sequences)
        for (ids, learned), one in zip(sequences, values):
            self.tokens.append(ids.astype(np.int32))
            self.learned.append(learned)
            self.values.append(one)
        self.sources += [source] * bool(sequences)

    def _kept(self, values: np.ndarray) -> np.ndarray:
        """Return the elements of `values`, one per token, for the tokens that `_truncated` keeps."""
        return (
            values[-self.max_tokens :]
            if self.chat.truncation_mode == "keep_end"
            else values[: self.max_tokens]
        )

    def _truncated(self, sequences: list[Encoded]) -> list[Encoded]:
        """Truncate each sequence to `max_tokens` tokens. Returns an empty list if the sample is dropped.

        Raises ValueError if no truncation mode is set.
        """
        match self.chat.truncation_mode:
            case None:
                name, length = max(
                    ((name, len(ids)) for name, (ids, _) in zip(self.names, sequences)),
                    key=lambda one: one[1],
                )
                raise ValueError(
                    f"{name} has {length:,} tokens, more than data.seq_length {self.max_tokens:,}; set "
                    f"{self.chat.name}.truncation_mode to keep_start, keep_end or drop, or raise data.seq_length"
                )
            case "drop":
                self.counts["dropped, longer than data.seq_length"] += 1
                return []
            case "keep_start":
                kept = slice(self.max_tokens)
            case "keep_end":
                kept = slice(-self.max_tokens, None)
        sequences = [(ids[kept], learned[kept]) for ids, learned in sequences]
        if not all(learned[1:].any() for _, learned in sequences):
            self.counts["dropped, with no token in the loss after truncation"] += 1
            return []
        self.counts[f"truncated ({self.chat.truncation_mode})"] += 1
        return sequences

    def _bad(self, source: str, reason: Exception | str) -> None:
        if not self.chat.skip_bad_samples:
            raise DataError(
                f"{source} is unusable: {reason}; correct or remove the record, or set "
                f"{self.chat.name}.skip_bad_samples"
            ) from None
        self.first_bad = self.first_bad or f"{source}: {reason}"
        self.counts["skipped as unusable"] += 1

    def samples(self, files: Sequence[Source]) -> Samples:
        if not self.sources:
            details = ", ".join(
                f"{count:,} {description}" for description, count in self.counts.items() if count
            )
            raise DataError(
                f"{', '.join(map(str, files))} has no sample to train on{details and f' ({details})'}; add data"
            )
        count = len(self.names)
        if self.form.adds_mismatched:
            self._add_mismatched()
            count += 1
        starts = np.zeros(len(self.tokens) + 1, dtype=np.int64)
        np.cumsum([len(one) for one in self.tokens], out=starts[1:])
        tokens, learned = np.concatenate(self.tokens), np.concatenate(self.learned)
        counts = +self.counts
        values = np.concatenate(self.values) if self.has_values else None
        return Samples(tokens, learned, starts, self.sources, counts, self.first_bad, count, values)

    def _add_mismatched(self) -> None:
        """Add a second sequence to each sample: its prompt with the answer of the preceding record.

        The first sample gets an answer of the last record. Sequences are cut to `max_tokens`.
        """
        prompts = [int(learned.argmax()) for learned in self.learned]
        answers = list(zip(self.tokens, prompts))
        tokens, learned, values = [], [], []
        for i, first in enumerate(prompts):
            is_same_record = self.sources[i - 1] == self.sources[i]
            other, start = answers[i - 2 if is_same_record else i - 1]
            mismatched = np.concatenate([self.tokens[i][:first], other[start:]])[: self.max_tokens]
            tokens += [self.tokens[i], mismatched]
            learned += [self.learned[i], np.arange(len(mismatched)) >= first]
            values += [self.values[i], np.full(len(mismatched), self.values[i][0], np.float32)]
        self.tokens, self.learned, self.values = tokens, learned, values
