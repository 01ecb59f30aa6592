"""Sample formats of the fine-tuning methods, and the conversion of records to them.

| form | sequences of a sample | value |
|---|---|---|
| conversations | one | – |
| pairs | chosen, rejected | `weight`, 1 by default |
| pairs with a margin | chosen, rejected | `margin`, 0 by default |
| pairs with a preference | chosen, rejected | `preference` for the first, from 0 to 1; 1 by default |
| marked answers | an answer after its prompt | `label`, 1 or 0 |
| marked answers with another | also another record's answer after this prompt | `label` |
| scored answers | an answer after its prompt, or its steps | `label`, a number, or one per step |

Marked answers may also come as pairs, each of which is two samples with the labels 1 and 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megalith.config.fine_tuning import ChatConfig
from megalith.config.preferences import RewardConfig
from megalith.data.chat.conversations import (
    ParsedSequence,
    Record,
    Tokens,
    parse_preference,
    parse_record,
    require_ids,
    unicode_text,
)
from megalith.data.chat.turns import Span


@dataclass(frozen=True)
class MarkedText:
    """A text with the spans that are in the loss, and without an end-of-document token."""

    text: str
    spans: list[Span]


class ParsedSample(NamedTuple):
    """The sequences of a sample, and its value: a number, one number per span in the loss, or None."""

    sequences: list[ParsedSequence | MarkedText]
    value: float | list[float] | None = None


@dataclass(frozen=True)
class SampleForm:
    """A format of samples: the conversion of records to samples, and the sequences in each."""

    parse: Callable[[Record, ChatConfig], list[ParsedSample]]
    """Returns the samples of a record. Raises ValueError with the reason if it is unusable."""
    names: tuple[str, ...] = ("it",)
    """Names, in error messages, of the sequences that a record provides for a sample."""
    is_preference: bool = False
    """The sequences are two answers to compare, which start at the same token."""
    completion_only: bool = True
    """The loss covers everything after the prompt and nothing else. False: the settings of the section `chat` decide.
    """
    default: float = 0.0
    """Value of a sample whose record gives none."""
    adds_mismatched: bool = False
    """Each sample gets a second sequence: its prompt with the answer of the preceding record."""


def _conversations(record: Record, chat: ChatConfig) -> list[ParsedSample]:
    return [ParsedSample(parse_record(record))]


def _weighted_pairs(record: Record, chat: ChatConfig) -> list[ParsedSample]:
    value = _number(record, "weight") if record.get("weight") is not None else None
    if value is not None and value < 0:
        raise ValueError(f"weight is {value:g}, but weights must be at least 0; correct the weight")
    return [ParsedSample(parse_preference(_without(record, "weight")), value)]


def _pairs_with_margin(record: Record, chat: ChatConfig) -> list[ParsedSample]:
    value = _number(record, "margin") if record.get("margin") is not None else None
    return [ParsedSample(parse_preference(_without(record, "margin")), value)]


def _pairs_with_preference(record: Record, chat: ChatConfig) -> list[ParsedSample]:
    value = _number(record, "preference") if record.get("preference") is not None else None
    if value is not None and not 0 <= value <= 1:
        raise ValueError(
            f"its preference is {value:g}, but must be a number from 0 (the rejected answer is better) "
            "to 1 (the chosen answer is better)"
        )
    return [ParsedSample(parse_preference(_without(record, "preference")), value)]


def _marked_answers(record: Record, chat: ChatConfig) -> list[ParsedSample]:
    if record.get("chosen") is not None or record.get("chosen_ids") is not None:
        return [ParsedSample([answer], label) for answer, label in zip(parse_preference(record), (1.0, 0.0))]
    label = record.get("label")
    if label not in (0, 1):
        raise ValueError(
            f"its label is {label!r:.60}; it must be true (desirable answer) or false (undesirable answer); "
            "alternatively, use a record with chosen and rejected"
        )
    return [ParsedSample([_answer(_without(record, "label"))], float(label))]


def _scored_answers(record: Record, chat: ChatConfig) -> list[ParsedSample]:
    assert isinstance(chat, RewardConfig)
    if record.get("completions") is not None:
        sample = _steps(record, chat.step_separator)
    else:
        sample = ParsedSample([_answer(_without(record, "label"))], _number(record, "label"))
    values = sample.value if isinstance(sample.value, list) else [sample.value]
    if chat.loss_type == "bce" and not all(0 <= value <= 1 for value in values):
        raise ValueError(
            f"its label is {values}, but reward.loss_type bce needs labels from 0 to 1; change the labels, or set "
            "reward.loss_type to mse"
        )
    return [sample]


def _steps(record: Record, separator: str) -> ParsedSample:
    """Return the sample of a prompt with steps (TRL's stepwise supervision)."""
    prompt, steps, labels = (record.get(key) for key in ("prompt", "completions", "labels"))
    if not isinstance(prompt, str) or not isinstance(steps, Sequence) or isinstance(steps, str) or not steps:
        raise ValueError(
            f"its prompt is {prompt!r:.60} and its completions are {steps!r:.60}; for labels per step, write "
            "text and a list of texts"
        )
    if wrong := [number for number, step in enumerate(steps) if not isinstance(step, str) or not step]:
        raise ValueError(f"completion {wrong[0]} is {steps[wrong[0]]!r:.60}; a step must be non-empty text")
    if not isinstance(labels, Sequence) or len(labels) != len(steps):
        raise ValueError(
            f"it has {len(steps)} completions, and its labels are {labels!r:.60}; write one label per "
            "completion"
        )
    values = [_number({"label": label}, "label") for label in labels]
    parts = [unicode_text(prompt)]
    spans = []
    for step in steps:
        parts.append(unicode_text(step))
        start = sum(map(len, parts))
        parts.append(separator)
        spans.append((start, start + len(separator)))
    return ParsedSample([MarkedText("".join(parts), spans)], values)


def _answer(record: Record) -> ParsedSequence:
    """Return the answer of a prompt-completion record, as text, messages or token ids."""
    if record.get("completion_ids") is not None and record.get("prompt_ids") is not None:
        prompt, completion = record["prompt_ids"], record["completion_ids"]
        require_ids("prompt_ids", prompt)
        require_ids("completion_ids", completion)
        return Tokens([*prompt, *completion], [False] * len(prompt) + [True] * len(completion))
    if record.get("completion") is None or record.get("prompt") is None:
        raise ValueError(
            f"its keys are {', '.join(map(repr, record)) or 'none'}, but it needs prompt and completion, or prompt_ids "
            "and completion_ids, besides its label"
        )
    (answer,) = parse_record(record)
    return answer


def _number(record: Record, key: str) -> float:
    value = record.get(key)
    if not isinstance(value, bool | int | float) or not math.isfinite(value):
        raise ValueError(f"its {key} is {value!r:.60}, but must be a finite number")
    return float(value)


def _without(record: Record, key: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != key}


SAMPLE_FORMS: dict[str, SampleForm] = {  # by ChatConfig.record_form
    "conversations": SampleForm(_conversations, completion_only=False),
    "pairs": SampleForm(
        _weighted_pairs, ("its chosen answer", "its rejected answer"), is_preference=True, default=1.0
    ),
    "pairs with a margin": SampleForm(
        _pairs_with_margin, ("its chosen answer", "its rejected answer"), is_preference=True
    ),
    "pairs with a preference": SampleForm(
        _pairs_with_preference,
        ("its chosen answer", "its rejected answer"),
        is_preference=True,
        default=1.0,
    ),
    "marked answers": SampleForm(_marked_answers),
    "marked answers with another": SampleForm(_marked_answers, adds_mismatched=True),
    "scored answers": SampleForm(_scored_answers),
}


def token_values(value: float | list[float] | None, learned: np.ndarray, default: float) -> np.ndarray:
    """Return the sample's value for each of its tokens, float32 [tokens], or `default` if the sample has no value.

    A list has one value per stretch of tokens in the loss. Raise ValueError if the tokens have fewer stretches, which
    happens if the tokenizer merges two.
    """
    if not isinstance(value, list):
        return np.full(len(learned), default if value is None else value, np.float32)
    stretch = np.cumsum(np.diff(learned.astype(np.int8), prepend=0) == 1)  # from 1 on
    if stretch[-1] != len(value):
        raise ValueError(
            f"its {len(value)} steps have only {stretch[-1]} separate end tokens; choose a "
            "reward.step_separator that the tokenizer does not merge with the steps"
        )
    return np.concatenate([[0.0], np.array(value)])[stretch].astype(np.float32)
