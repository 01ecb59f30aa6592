"""Chat data as tokens: every sample of the files, encoded, with what of it is learned.

A sample is a sequence of tokens; one of preferences is two, the chosen answer behind its prompt and the rejected one.

A sample that cannot be used is named by file, line and number, and ends the run, or is counted (`skip_bad_samples`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from megalith.config.base import Decides
from megalith.config.rl import ChatConfig, DpoConfig
from megalith.data.chat.chat_files import read_records
from megalith.data.chat.chat_template import ChatTemplate, template_of
from megalith.data.chat.conversations import Said, Text, Tokens, parse_preference, parse_record
from megalith.data.chat.turns import Span
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.io import make_subfolder, open_file, write_file
from megalith.progress import Progress
from megalith.remote import StorePath
from megalith.small_files import read_small_file

AT_ONCE = 1024  # samples that are encoded together
EQUAL = "pairs of two equal answers, which teach nothing"
ENDLESS = (
    "rendered without an end token after any answer, so the model does not learn to stop; let the chat template end "
    "the assistant's turns with one"
)
Encoded = tuple[np.ndarray, np.ndarray]  # int64 ids [tokens], and bool [tokens]: those that are learned


@dataclass(frozen=True)
class Samples:
    """Sequence i is the tokens [starts[i], starts[i + 1]); those of sample k are k · `each` … (k + 1) · `each` − 1."""

    tokens: np.ndarray  # int32 [tokens]
    learned: np.ndarray  # bool [tokens]: whether the token is to be predicted from those before it
    starts: np.ndarray  # int64 [sequences + 1]
    places: Sequence[str]  # of each sample, "chat.jsonl line 3 (sample 2)"
    counts: Counter[str]  # of the records that something befell: what, and how many
    first_bad: str  # of those skipped
    each: int = 1

    def __len__(self) -> int:
        return len(self.places)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 [sequences]."""
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
    chat: ChatConfig,
    longest: int,
    vocab_size: int,
    show_progress: bool = False,
) -> Samples:
    """The samples of `files`, with sequences of at most `longest` tokens, in order.

    DataError: the first bad sample, or no good one. ConfigError: a package is missing, or the template is none.
    """
    reader = _Reader(tokenizer, chat, longest, vocab_size)
    with Progress("tokenize", None, "samples", show=show_progress) as progress:
        for file in files:
            reader.read(file, progress)
    return reader.samples(files)


# Once a run

FORMAT = 2  # of what is written
ARRAYS = {"tokens": np.int32, "learned": np.bool_, "starts": np.int64, "letters": np.uint8, "ends": np.int64}


def cached_samples(
    folder: Path,
    files: Sequence[Path | StorePath],
    tokenizer: Tokenizer | None,
    chat: ChatConfig,
    longest: int,
    vocab_size: int,
    may_write: bool = True,
) -> Samples:
    """`read_samples` by the first process that asks for them, which writes them into `folder`; mapped from there by
    the others, which wait for it. Each process reads for itself what stands in an object store, and where the folder
    cannot be written.

    What is there is found by the files' names, sizes and times, tokenizer, template and settings.
    """
    wanted = (files, tokenizer, chat, longest, vocab_size)
    if not all(isinstance(file, Path) for file in files):
        return read_samples(*wanted)
    path = folder / f"chat-{_key(*wanted)}"
    if not may_write:
        return _stored(path, vocab_size) or read_samples(*wanted)
    try:
        make_subfolder(folder)
        lock = open_file(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError:
        return read_samples(*wanted)
    with open(lock):
        with contextlib.suppress(OSError):  # a filesystem may have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if (found := _stored(path, vocab_size)) is not None:
            return found
        samples = read_samples(*wanted, show_progress=True)
        with contextlib.suppress(OSError):  # nor room
            _store(samples, path)
        return _stored(path, vocab_size) or samples


def _key(
    files: Sequence[Path], tokenizer: Tokenizer | None, chat: ChatConfig, longest: int, vocab_size: int
) -> str:
    inside = [path for file in files for path in (sorted(file.rglob("*")) if file.is_dir() else [file])]
    names = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in inside]
    settings = chat.model_dump_json(include=set(chat.fields_deciding(Decides.SAMPLES)) - {"packing"})
    digest = hashlib.sha256(repr((FORMAT, names, chat.name, settings, longest, vocab_size)).encode())
    if tokenizer is not None:
        digest.update(tokenizer.fingerprint.encode())
        for name, content in sorted(tokenizer.files.items()):
            digest.update(repr((name, len(content))).encode() + content)
    return digest.hexdigest()[:32]


def _store(samples: Samples, path: Path) -> None:
    """Writes a folder that is there whole or not at all. Raises OSError."""
    places = [place.encode() for place in samples.places]
    letters = np.frombuffer(b"".join(places), dtype=np.uint8)
    ends = np.cumsum([len(place) for place in places], dtype=np.int64)
    arrays = (samples.tokens, samples.learned, samples.starts, letters, ends)
    about = {"counts": samples.counts, "first_bad": samples.first_bad, "each": samples.each}
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, array in zip(ARRAYS, arrays, strict=True):
            with open(partial / f"{name}.npy", "xb") as file:
                np.save(file, array, allow_pickle=False)
        write_file(partial / "about.json", json.dumps(about))
        if path.exists():  # what cannot be read
            shutil.rmtree(path)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _stored(path: Path, vocab_size: int) -> Samples | None:
    """What `_store` has written there, mapped; None where there is nothing, or something else."""
    try:
        about = json.loads(read_small_file(path / "about.json", path))
        found = {name: np.load(path / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
        tokens, learned, starts, letters, ends = found.values()
        each, first_bad = int(about["each"]), str(about["first_bad"])
        counts = Counter({what: int(count) for what, count in about["counts"].items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, EOFError):
        return None
    whole = (
        all(array.dtype == kind and array.ndim == 1 for array, kind in zip(found.values(), ARRAYS.values()))
        and len(tokens) == len(learned) > 0
        and len(starts) == len(ends) * each + 1
        and (starts[0], starts[-1]) == (0, len(tokens))
        and (np.diff(starts) > 0).all()
        and 0 <= tokens.min() <= tokens.max() < vocab_size
    )
    return Samples(tokens, learned, starts, _Texts(letters, ends), counts, first_bad, each) if whole else None


class _Texts(Sequence[str]):
    """Texts that stand one behind the other: UTF-8 uint8 [bytes], and int64 [texts] the end of each."""

    def __init__(self, letters: np.ndarray, ends: np.ndarray):
        self._letters, self._ends = letters, ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> str:
        begin = self._ends[i - 1] if i else 0
        return self._letters[begin : self._ends[i]].tobytes().decode(errors="replace")


class _Reader:
    def __init__(self, tokenizer: Tokenizer | None, chat: ChatConfig, longest: int, vocab_size: int):
        self.tokenizer, self.chat, self.longest, self.vocab_size = tokenizer, chat, longest, vocab_size
        self.of_pairs = isinstance(chat, DpoConfig)
        self.names = ("its chosen answer", "its rejected answer") if self.of_pairs else ("it",)
        self.assistant_only = not self.of_pairs and chat.assistant_only_loss
        self.completion_only = self.of_pairs or chat.completion_only_loss
        self.template: ChatTemplate | None = template_of(tokenizer) if tokenizer is not None else None
        self.specials = tokenizer.special_ids if tokenizer is not None else frozenset()
        self.tokens: list[np.ndarray] = []
        self.learned: list[np.ndarray] = []
        self.places: list[str] = []
        self.counts: Counter[str] = Counter()
        self.first_bad = ""

    def read(self, file: Path | StorePath, progress: Progress) -> None:
        records = enumerate(read_records(file), 1)
        parse = parse_preference if self.of_pairs else parse_record
        while several := list(islice(records, AT_ONCE)):
            parsed = []
            for number, (at, record) in several:
                place = f"{file} {at} (sample {number})"
                try:
                    parsed.append((place, [self._text_or_tokens(said) for said in parse(record)]))
                except DataError as error:
                    raise error.within(place) from None
                except (ValueError, TypeError, AttributeError, RecursionError) as error:
                    self._bad(place, error)
            for place, sequences in self._encoded(parsed):
                try:
                    self._add(place, sequences)
                except ValueError as error:
                    self._bad(place, error)
            progress.add(len(several))

    def _text_or_tokens(self, said: Said) -> Tokens | tuple[str, list[Span], bool]:
        """Tokens; or a text, the spans of it that are learned, and whether it is none that a template has made."""
        if isinstance(said, Tokens):
            return said
        if self.tokenizer is None:
            raise DataError(
                "chat data has text, but data.tokenizer_type is not set; name the model's tokenizer"
            )
        if isinstance(said, Text):
            begin = len(said.prompt) if self.completion_only else 0
            text = said.prompt + said.completion
            return text, [(begin, len(text))], True
        if self.template is None:
            raise DataError(
                "chat data has conversations, but the tokenizer has no chat template (chat_template.jinja beside it, "
                f"or chat_template in its tokenizer_config.json); give one as {self.chat.name}.chat_template_path"
            )
        if not self.completion_only:
            said = replace(said, first=0)
        return *self.template.text_and_spans(said, self.assistant_only), False

    def _encoded(self, parsed: list) -> Iterator[tuple[str, list[Encoded]]]:
        texts = [said for _, sample in parsed for said in sample if not isinstance(said, Tokens)]
        encoded = iter(
            self.tokenizer.encode_marked([t for t, _, _ in texts], [s for _, s, _ in texts]) if texts else ()
        )
        for place, sample in parsed:
            found = [
                said if isinstance(said, Tokens) else self._completed(next(encoded), said[2])
                for said in sample
            ]
            self.counts[ENDLESS] += any(
                not isinstance(said, Tokens) and isinstance(one, Tokens) and not self._has_end(one)
                for said, one in zip(sample, found)
            )
            if reason := next((one for one in found if isinstance(one, str)), None):
                self._bad(place, reason)
                continue
            yield (
                place,
                [(np.array(one.ids, dtype=np.int64), np.array(one.learned, dtype=bool)) for one in found],
            )

    def _completed(self, found: tuple[list[int], list[bool]] | str, is_plain: bool) -> Tokens | str:
        """Tokens of a text. A plain one gets the tokenizer's special tokens and the end of document, which is learned:
        a template writes its own."""
        if isinstance(found, str) or not is_plain:
            return found if isinstance(found, str) else Tokens(*found)
        ids, learned = found
        before, after = self.tokenizer.special_tokens(ids)
        eod = self.tokenizer.eod
        if eod is not None and [*ids, *after][-1:] != [eod]:
            after = [*after, eod]
        return Tokens([*before, *ids, *after], [False] * len(before) + learned + [True] * len(after))

    def _has_end(self, answer: Tokens) -> bool:
        """Whether a stretch of learned tokens ends with a special one, but for spaces after it."""
        ids, learned = answer.ids, answer.learned
        ends = (k for k in range(len(ids)) if learned[k] and not (k + 1 < len(ids) and learned[k + 1]))
        return any(self._ends_at(ids, learned, k) for k in ends)

    def _ends_at(self, ids: list[int], learned: list[bool], k: int) -> bool:
        while k >= 0 and learned[k] and ids[k] not in self.specials:
            if self.tokenizer.decode([ids[k]]).strip():
                return False
            k -= 1
        return k >= 0 and learned[k]

    def _add(self, place: str, sequences: list[Encoded]) -> None:
        for name, (ids, learned) in zip(self.names, sequences, strict=True):
            beyond = (ids < 0) | (ids >= self.vocab_size)
            if beyond.any():
                at = int(beyond.argmax())
                of = f" of {name}" if self.of_pairs else ""
                raise ValueError(f"token {at}{of} is {ids[at]}, but the vocabulary has {self.vocab_size:,}")
            if not learned[1:].any():  # the first token follows nothing
                raise ValueError(f"{name} has no token to learn")
        if self.of_pairs:
            begin = min(
                int(learned.argmax()) for _, learned in sequences
            )  # where a token reaches into the prompt
            sequences = [(ids, np.arange(len(ids)) >= begin) for ids, _ in sequences]
            self.counts[EQUAL] += np.array_equal(sequences[0][0], sequences[1][0])
        if any(len(ids) > self.longest for ids, _ in sequences):
            sequences = self._truncated(sequences)
        for ids, learned in sequences:
            self.tokens.append(ids.astype(np.int32))
            self.learned.append(learned)
        self.places += [place] * bool(sequences)

    def _truncated(self, sequences: list[Encoded]) -> list[Encoded]:
        """Each sequence with at most `longest` tokens; none where the sample is dropped. ValueError: nothing is
        chosen."""
        match self.chat.truncation_mode:
            case None:
                name, length = max(
                    ((name, len(ids)) for name, (ids, _) in zip(self.names, sequences)),
                    key=lambda one: one[1],
                )
                raise ValueError(
                    f"{name} has {length:,} tokens, more than data.seq_length {self.longest:,}; choose what becomes "
                    f"of it: {self.chat.name}.truncation_mode keep_start, keep_end or drop, or raise data.seq_length"
                )
            case "drop":
                self.counts["dropped, longer than data.seq_length"] += 1
                return []
            case "keep_start":
                kept = slice(self.longest)
            case "keep_end":
                kept = slice(-self.longest, None)
        sequences = [(ids[kept], learned[kept]) for ids, learned in sequences]
        if not all(learned[1:].any() for _, learned in sequences):
            self.counts["dropped, with nothing to learn after truncation"] += 1
            return []
        self.counts[f"truncated ({self.chat.truncation_mode})"] += 1
        return sequences

    def _bad(self, place: str, reason: Exception | str) -> None:
        if not self.chat.skip_bad_samples:
            raise DataError(
                f"{place} is unusable: {reason}; correct or remove it, or set {self.chat.name}.skip_bad_samples"
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
        counts = +self.counts
        return Samples(tokens, learned, starts, self.places, counts, self.first_bad, len(self.names))
