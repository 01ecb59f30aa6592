"""Prompts of a GRPO run from JSONL, Parquet, a saved dataset or records in memory.

The column `rl.prompt_column` holds the prompt: a text, or messages, which the tokenizer's chat template renders with a
generation prompt. The other columns are passed to the rewards. Prompts are ordered like samples in pre-training: with
shuffling, each epoch is a permutation derived from the seed. The next prompt therefore depends only on the seed and the
number of consumed prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.config import RunConfig
from megalith.config.rl import RlConfig
from megalith.data.chat.chat_files import chat_files
from megalith.data.chat.chat_template import ChatTemplate, template_of
from megalith.data.chat.conversations import (
    Message,
    prompt_messages,
    template_arguments,
    unicode_text,
)
from megalith.data.chat.record_columns import reject_media
from megalith.data.inputs.sources import read_records
from megalith.data.order import CyclicOrder, SampleOrder, SingleOrder
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import DataError
from megalith.progress import Progress
from megalith.tables import counted

REPEATS_SHOWN = 3


@dataclass(frozen=True)
class Prompt:
    """A prompt as token ids and as text or messages."""

    id: str | int
    ids: list[int]
    text: str  # after the chat template, if there is one
    messages: list[Message] | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    where: str = ""  # file and line number, for errors


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run that are short enough, in file order."""

    prompts: list[Prompt]
    dropped: int  # number of prompts that were too long
    order: SampleOrder

    def notes(self) -> list[str]:
        """Return notes to be printed in the run's log."""
        notes = []
        if self.dropped:
            notes.append(f"{counted(self.dropped, 'prompt')} dropped as too long (rl.overlong_prompts)")
        first: dict[str | int, str] = {}
        pairs = ((p, first.setdefault(p.id, p.where)) for p in self.prompts)
        if repeats := [f"{p.id!r} of {p.where} is also in {where}" for p, where in pairs if where != p.where]:
            notes.append(
                f"{len(repeats):,} prompts have the id of an earlier one, so logs and files cannot tell them apart: "
                + "; ".join(repeats[:REPEATS_SHOWN])
                + "; …" * (len(repeats) > REPEATS_SHOWN)
            )
        return notes

    def __len__(self) -> int:
        return len(self.prompts)

    def index(self, position: int) -> int:
        """Return the index of the prompt at a position of the run's stream."""
        return self.order(position)

    def identity(self) -> str:
        """Return the SHA-256 of all ids and tokens, in hexadecimal."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(f"{prompt.id}\0{prompt.ids}\n".encode())
        return digest.hexdigest()


def max_sequence_tokens(config: RunConfig) -> int:
    """Return the maximum number of tokens of a prompt with its completion: one more than a trainer's row, because the
    last token is only a label.
    """
    return min(config.data.seq_length + 1, config.model.max_position_embeddings)


def policy_vocab_size(config: RunConfig, tokenizer: Tokenizer | None) -> int:
    """Return the number of vocabulary entries over which engine and trainer normalize, and from which the policy
    samples.

    Megalith's own engine leaves out rows of the embedding beyond the tokenizer's vocabulary; a server samples from all
    rows.
    """
    if config.rl.engine != "own":
        return config.model.vocab_size
    return min(config.model.vocab_size, tokenizer.vocab_size if tokenizer else config.model.vocab_size)


def run_prompts(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    records: Iterable[Mapping[str, Any]] | None = None,
    show_progress: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prompts:
    """Return the run's prompts: those that leave room for their completions.

    Args:
        config: run configuration.
        tokenizer: the model's tokenizer.
        records: records that replace the files of `rl.prompts`.
        show_progress: show a progress bar.
        tools: JSON schemas of the policy's tools, for the chat template.

    Raises:
        DataError: if a prompt is unusable or none is left.
    """
    rl, room = config.rl, max_sequence_tokens(config) - config.rl.max_completion_length
    max_tokens = min(room, rl.max_prompt_length or room)
    vocabulary, seed = policy_vocab_size(config, tokenizer), config.train.seed
    return open_prompts(
        rl,
        tokenizer,
        max_tokens=max_tokens,
        vocab_size=vocabulary,
        seed=seed,
        records=records,
        show_progress=show_progress,
        tools=tools,
    )


def held_out_prompts(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    records: Iterable[Mapping[str, Any]] | None = None,
    show_progress: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Prompt]:
    """Return the prompts of `rl.eval_prompts`, or of `records`, for evaluation; empty without evaluation."""
    rl = config.rl
    if not rl.eval_prompts or not config.train.eval_iters:
        return []
    eval_config = config.with_settings({"rl.prompts": rl.eval_prompts})
    return run_prompts(eval_config, tokenizer, records, show_progress, tools).prompts[: rl.max_eval_prompts]


def open_prompts(
    rl: RlConfig,
    tokenizer: Tokenizer | None,
    *,
    max_tokens: int,
    vocab_size: int,
    seed: int,
    records: Iterable[Mapping[str, Any]] | None = None,
    show_progress: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Prompts:
    """Read and tokenize the prompts of `rl.prompts`, or of `records`.

    A prompt of more than `max_tokens` tokens raises an error, or is dropped if rl.overlong_prompts is "drop".

    Raises:
        DataError: if a prompt is unusable or too long, or none is left.
        ConfigError: if a file does not exist.
    """
    reader = _PromptReader(rl, tokenizer, vocab_size, tools)
    made: list[Prompt] = []
    dropped = 0
    for number, (where, record) in enumerate(_counted(_records(rl.prompt_files, records), show_progress)):
        try:
            prompt = reader.prompt(record, where, number)
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{where} has no usable prompt: {error}; correct or remove the record") from None
        if len(prompt.ids) > max_tokens:
            if rl.overlong_prompts == "refuse":
                raise DataError(
                    f"{where} has a prompt of {len(prompt.ids):,} tokens, but at most "
                    f"{max_tokens:,} fit (rl.max_prompt_length, and data.seq_length + 1 − "
                    "rl.max_completion_length); raise rl.max_prompt_length or data.seq_length, "
                    "or set rl.overlong_prompts to drop"
                )
            dropped += 1
            continue
        made.append(prompt)
    if not made:
        raise DataError(
            f"there is no prompt in {', '.join(rl.prompt_files) or 'the records'}"
            + f" ({dropped:,} were longer than {max_tokens:,} tokens)" * bool(dropped)
            + "; add some"
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
        for where, record in read_records(path):
            yield f"{path}, {where}", record


def _counted(
    records: Iterator[tuple[str, Mapping[str, Any]]], show_progress: bool
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with Progress("tokenize", None, "prompts", show=show_progress) as progress:
        for record in records:
            yield record
            progress.add()


class _PromptReader:
    def __init__(
        self,
        rl: RlConfig,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        self.column, self.chat = rl.prompt_column, rl.chat_prompts or rl.uses_turns
        self.tools = [dict(one) for one in tools]
        self.tokenizer, self.vocab_size = tokenizer, vocab_size
        self.template: ChatTemplate | None = template_of(tokenizer) if tokenizer is not None else None

    def prompt(self, record: Mapping[str, Any], where: str, number: int) -> Prompt:
        """Return the prompt of a record.

        Raises ValueError, with the reason, for an invalid record, and DataError if the run has no tokenizer, or no chat
        template for a prompt that needs one.
        """
        reject_media(record)
        content = record.get(self.column)
        if content is None:
            raise ValueError(
                f"it has no {self.column!r} (rl.prompt_column), only {', '.join(map(repr, record))}"
            )
        columns = {name: value for name, value in record.items() if name != self.column}
        info = columns.get("extra_info")
        id = columns.get("id", info.get("index") if isinstance(info, Mapping) else None)
        id = number if id is None else id if isinstance(id, str | int) else str(id)
        if self.tokenizer is None:
            raise DataError(
                "prompts are text, but data.tokenizer_type is not set; set it to the model's tokenizer"
            )
        if isinstance(content, str) and not self.chat:
            unicode_text(content)
            return Prompt(
                id, self._ids(content, self.tokenizer.encode_prompt(content)), content, None, columns, where
            )
        messages = prompt_messages(
            [{"role": "user", "content": content}] if isinstance(content, str) else content
        )
        if self.template is None:
            raise DataError(
                f"{where} has messages, but the tokenizer has no chat template (chat_template.jinja in its folder, or "
                "chat_template in its tokenizer_config.json); add one, or write prompts as text"
            )
        arguments = template_arguments(columns)
        if self.tools and arguments.get("tools"):
            raise ValueError(
                "it has a tools column, which cannot be combined with rl.tools or rl.environment; remove one of them"
            )
        if self.tools:
            arguments["tools"] = self.tools
        text = self.template.render(messages, add_generation_prompt=True, **arguments)
        ids = self.tokenizer.encode_marked([text], [[(0, len(text))]])[0]
        if isinstance(ids, str):
            raise ValueError(ids)
        return Prompt(id, self._ids(text, list(ids[0])), text, messages, columns, where)

    def _ids(self, text: str, ids: list[int]) -> list[int]:
        if not ids:
            raise ValueError(f"{text!r:.40} has no token")
        if max(ids) >= self.vocab_size:
            raise ValueError(f"it has token {max(ids)}, but the vocabulary has {self.vocab_size:,} entries")
        return [int(one) for one in ids]
