"""Prompts: what a policy is asked, from JSONL, parquet, a saved dataset or records in memory.

A record has a prompt in the column that rl.prompt_column names: a text, or a list of messages that goes through the
tokenizer's chat template with the header that asks for an answer. What else the record has are its columns, which
rewards are given. Position p of the run's stream is prompt order(p), by the data loader's orders: with shuffling each
pass in a permutation of its own, made of the seed. So a prompt follows from the seed and how many were consumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalith.config import RunConfig
from megalith.config.rl import RlConfig
from megalith.data.chat.chat_files import chat_files, read_records
from megalith.data.chat.chat_template import ChatTemplate, template_of
from megalith.data.chat.conversations import Message, prompt_messages, template_arguments, unicode_text
from megalith.data.order import CyclicOrder, SampleOrder, SingleOrder
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.progress import Progress

REPEATS_SHOWN = 3


@dataclass(frozen=True)
class Prompt:
    """A question, as tokens and as it was given."""

    id: str | int
    ids: list[int]
    text: str  # after the chat template, where there is one
    messages: list[Message] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = ""  # file and line, for errors


@dataclass(frozen=True)
class Prompts:
    """All prompts of a run that are short enough, in the files' order."""

    prompts: list[Prompt]
    dropped: int  # those that were too long
    order: SampleOrder

    def notes(self) -> list[str]:
        """What a reader of the run's log should know of them."""
        notes = []
        if self.dropped:
            notes.append(
                f"{self.dropped:,} prompts were dropped, longer than they may be (rl.overlong_prompts)"
            )
        first: dict[str | int, str] = {}
        pairs = ((p, first.setdefault(p.id, p.where)) for p in self.prompts)
        if again := [f"{p.id!r} of {p.where} is that of {where}" for p, where in pairs if where != p.where]:
            notes.append(
                f"{len(again):,} prompts have the id of an earlier one, and messages and files name them alike: "
                + "; ".join(again[:REPEATS_SHOWN])
                + "; …" * (len(again) > REPEATS_SHOWN)
            )
        return notes

    def __len__(self) -> int:
        return len(self.prompts)

    def index(self, position: int) -> int:
        """Which prompt stands at a position of the run's stream."""
        return self.order(position)

    def identity(self) -> str:
        """SHA-256 of ids and tokens, in hexadecimal."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(f"{prompt.id}\0{prompt.ids}\n".encode())
        return digest.hexdigest()


def row_tokens(config: RunConfig) -> int:
    """Of a prompt with its completion, at most: what a row of the trainer holds, its last token being a label alone."""
    return min(config.data.seq_length + 1, config.model.max_position_embeddings)


def policy_entries(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """Entries of the vocabulary that a policy chooses among, in the engine and in the trainer: the tokenizer's, where
    the model's table has more rows. A server chooses among all of the table's."""
    if config.rl.engine != "own":
        return config.model.vocab_size
    return min(config.model.vocab_size, tokenizer.vocab_size if tokenizer else config.model.vocab_size)


def run_prompts(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    records: Iterable[Mapping[str, Any]] | None = None,
    show_progress: bool = False,
) -> Prompts:
    """Those of a run, which leave room for their completions."""
    rl, room = config.rl, row_tokens(config) - config.rl.max_completion_length
    longest = min(room, rl.max_prompt_length or room)
    vocabulary, seed = policy_entries(config, tokenizer), config.train.seed
    return open_prompts(
        rl,
        tokenizer,
        longest=longest,
        vocab_size=vocabulary,
        seed=seed,
        records=records,
        show_progress=show_progress,
    )


def held_out_prompts(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    records: Iterable[Mapping[str, Any]] | None = None,
    show_progress: bool = False,
) -> list[Prompt]:
    """Those of `rl.eval_prompts`, or of `records`, that an evaluation asks; none where there is no evaluation."""
    rl = config.rl
    if not rl.eval_prompts or not config.train.eval_iters:
        return []
    asked = config.with_settings({"rl.prompts": rl.eval_prompts})
    return run_prompts(asked, tokenizer, records, show_progress).prompts[: rl.max_eval_prompts]


def open_prompts(
    rl: RlConfig,
    tokenizer: Tokenizer | None,
    *,
    longest: int,
    vocab_size: int,
    seed: int,
    records: Iterable[Mapping[str, Any]] | None = None,
    show_progress: bool = False,
) -> Prompts:
    """The prompts that `rl.prompts` names, or of `records`, of at most `longest` tokens each. Raises DataError for one
    that cannot be used, and ConfigError for files that are not there."""
    reader = _PromptReader(rl, tokenizer, vocab_size)
    made: list[Prompt] = []
    dropped = 0
    for number, (where, record) in enumerate(_counted(_records(rl.prompt_files, records), show_progress)):
        try:
            prompt = reader.prompt(record, where, number)
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{where} has no usable prompt: {error}; correct or remove it") from None
        if len(prompt.ids) > longest:
            if rl.overlong_prompts == "refuse":
                raise DataError(
                    f"{where} has a prompt of {len(prompt.ids):,} tokens, but at most {longest:,} fit "
                    "(rl.max_prompt_length, and data.seq_length + 1 less rl.max_completion_length); raise them, or set "
                    "rl.overlong_prompts to drop"
                )
            dropped += 1
            continue
        made.append(prompt)
    if not made:
        raise DataError(
            f"there is no prompt in {', '.join(rl.prompt_files) or 'the records'}"
            + f" ({dropped:,} were longer than {longest:,} tokens)" * bool(dropped)
            + "; give some"
        )
    order = CyclicOrder(len(made), seed) if rl.shuffle_dataset else SingleOrder(len(made), wrap=True)
    return Prompts(made, dropped, order)


def _records(
    paths: Sequence[str], records: Iterable[Mapping[str, Any]] | None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if records is not None:
        for number, record in enumerate(records, 1):
            yield f"record {number}", record
        return
    for path in chat_files(list(paths)):
        for where, record in read_records(Path(path) if isinstance(path, str) else path):
            yield f"{path}, {where}", record


def _counted(
    records: Iterator[tuple[str, Mapping[str, Any]]], show_progress: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with Progress("tokenize", None, "prompts", show=show_progress) as progress:
        for record in records:
            yield record
            progress.add()


class _PromptReader:
    def __init__(self, rl: RlConfig, tokenizer: Tokenizer | None, vocab_size: int):
        self.column, self.chat = rl.prompt_column, rl.chat_prompts
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.template: ChatTemplate | None = template_of(tokenizer) if tokenizer is not None else None

    def prompt(self, record: Mapping[str, Any], where: str, number: int) -> Prompt:
        """ValueError: the reason why there is none."""
        said = record.get(self.column)
        if said is None:
            raise ValueError(
                f"it has no {self.column!r} (rl.prompt_column), only {', '.join(map(repr, record))}"
            )
        columns = {name: value for name, value in record.items() if name != self.column}
        info = columns.get("extra_info")
        id = columns.get("id", info.get("index") if isinstance(info, Mapping) else None)
        id = number if id is None else id if isinstance(id, str | int) else str(id)
        if self.tokenizer is None:
            raise DataError(
                "prompts are text, but data.tokenizer_type is not set; name the model's tokenizer"
            )
        if isinstance(said, str) and not self.chat:
            unicode_text(said)
            return Prompt(id, self._ids(said, self.tokenizer.encode_prompt(said)), said, None, columns, where)
        messages = prompt_messages([{"role": "user", "content": said}] if isinstance(said, str) else said)
        if self.template is None:
            raise DataError(
                f"{where} has messages, but the tokenizer has no chat template (chat_template.jinja beside it, or "
                "chat_template in its tokenizer_config.json); add one, or give prompts as text"
            )
        text = self.template.render(messages, ask=True, **template_arguments(columns))
        found = self.tokenizer.encode_marked([text], [[(0, len(text))]])[0]
        if isinstance(found, str):
            raise ValueError(found)
        return Prompt(id, self._ids(text, list(found[0])), text, messages, columns, where)

    def _ids(self, text: str, ids: list[int]) -> list[int]:
        if not ids:
            raise ValueError(f"{text!r:.40} has no token")
        if max(ids) >= self.vocab_size:
            raise ValueError(f"it has token {max(ids)}, but the vocabulary has {self.vocab_size:,}")
        return [int(one) for one in ids]
