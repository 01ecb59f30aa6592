"""Parses chat records: conversations, prompts with completions, token ids, or preferences between two answers.

| form | keys of a record |
|---|---|
| conversation | `messages`: [{role, content}]; optional `tools`, `chat_template_kwargs` |
| prompt and completion | `prompt`, `completion`: two texts, or two lists of messages |
| ShareGPT | `conversations`: [{from, value}]; optional `system`, `tools` |
| Alpaca | `instruction`, `output`; optional `input`, `system`, `history` |
| tokens | `input_ids`; optional `labels` (−100: not in the loss) or a mask of the tokens in the loss |
| preference: prompt and answers | `prompt`, `chosen`, `rejected`: three texts, or three lists of messages |
| preference: full answers | `chosen`, `rejected`: two texts or conversations; the prompt is their common prefix |
| preference: tokens | `prompt_ids`, `chosen_ids`, `rejected_ids` |

A record that has none of these forms or is malformed raises ValueError. The reader (samples.py) adds the file, line and
sample to the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.data.chat.record_columns import MASKS, ROLES, Record, reject_media, reject_unread_columns
from megalith.data.input_hints import record_hint

Message = dict[str, Any]

IGNORED = -100  # label that transformers and TRL exclude from the loss
LEARNED_KEYS = ("weight", "train", "training", "train_on_turn", "loss")
"""Keys of a message that say if the loss includes it: OpenAI's, axolotl's three, and ms-swift's."""
UNSUPPORTED_KEYS = ("train_detail", "training_detail", "loss_mask", "loss_scale", "mask")
"""Unsupported keys: they would exclude part of a message from the loss."""
MASKED = "masked"
"""torchtune's key of a message that is not in the loss."""
SUSPICIOUS = re.compile(r"mask|train|learn|loss|weight", re.IGNORECASE)
"""Names of keys that may exclude something from the loss. A record with such a key is rejected unless the key is
supported."""
FOLLOWS = {  # roles that may follow a role
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


@dataclass(frozen=True)
class Chat:
    """A conversation. Messages before `first` are a prompt and have no loss."""

    messages: list[Message]
    first: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)  # further arguments of the chat template
    unlearned: frozenset[int] = frozenset()  # indices of messages marked as not learned


@dataclass(frozen=True)
class Text:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    ids: list[int]
    learned: list[bool]


ParsedSequence = Chat | Text | Tokens


def parse_record(record: Record) -> list[ParsedSequence]:
    """Parse a record into one sequence. Raise ValueError with the reason if it is unusable."""
    for key in ("label", "kto_tag"):
        if isinstance(label := record.get(key), bool | int | float) and label != 1:
            raise ValueError(
                f"{key} is {label!r}, which marks an undesirable answer in KTO data, but SFT trains on every answer; "
                f"use `megalith kto`, or remove {key} if it means something else"
            )
    return [_parse(record, FORMS)]


def parse_preference(record: Record) -> list[ParsedSequence]:
    """Parse a record into its chosen and its rejected answer, each after the prompt. Raise ValueError like
    parse_record."""
    return _parse(record, PREFERENCES)


def _parse(record: Record, all_forms: dict[tuple[str, ...], Callable[[Record], Any]]) -> Any:
    reject_media(record)
    for keys, parse in all_forms.items():
        if all(record.get(key) is not None for key in keys):
            reject_unread_columns(record, keys)
            return parse(record)
    forms = "; ".join(" and ".join(keys) for keys in all_forms)
    raise ValueError(
        f"its keys are {', '.join(map(repr, record)) or 'none'}, which match none of these "
        f"formats: {forms}{record_hint(record)}"
    )


def _tokens(record: Record) -> Tokens:
    ids, labels = record["input_ids"], record.get("labels")
    masks = {name: record[name] for name in MASKS if record.get(name) is not None}
    padding = record.get("attention_mask")
    for name, values in {"input_ids": ids, "labels": labels, "attention_mask": padding, **masks}.items():
        if values is not None:
            require_ids(name, values)
        if values is not None and len(values) != len(ids):
            raise ValueError(f"{name} has {len(values)} entries and input_ids has {len(ids)}")
    if padding is not None and 0 in padding:
        raise ValueError(
            "its attention_mask has zeros; remove the padding from input_ids and the other lists"
        )
    learned = [all(values) for values in zip(*masks.values())] if masks else [True] * len(ids)
    if labels is None:
        return Tokens(list(ids), learned)
    for at, (token, label) in enumerate(zip(ids, labels)):
        if label not in (token, IGNORED):
            raise ValueError(f"label {at} is {label}, neither its token {token} nor {IGNORED}")
    return Tokens(list(ids), [label != IGNORED and one for label, one in zip(labels, learned)])


def require_ids(name: str, values: Any) -> None:
    """Raise ValueError unless `values` is a list of integers."""
    if not isinstance(values, Sequence) or any(
        type(value) is not int or abs(value) >= 2**63 for value in values
    ):
        raise ValueError(f"{name} is not a list of whole numbers of 64 bits")


def _messages(record: Record) -> Chat:
    return _chat(record["messages"], "role", "content", record)


def _prompt_completion(record: Record) -> Chat | Text:
    prompt, completion = record["prompt"], record["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise ValueError("its completion is empty")
        return Text(unicode_text(prompt), unicode_text(completion))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("one of prompt and completion is text and the other a list of messages")
    _require_messages(prompt=prompt, completion=completion)
    return _chat([*prompt, *completion], "role", "content", record, first=len(prompt))


def _sharegpt(record: Record) -> Chat:
    _require_messages(conversations=record["conversations"])
    turns = list(record["conversations"])
    if record.get("system"):
        turns.insert(0, {"from": "system", "value": record["system"]})
    return _chat(turns, "from", "value", record)


def _alpaca(record: Record) -> Chat:
    for name in ("instruction", "input", "output"):
        if not isinstance(record.get(name), str | None):
            raise ValueError(f"its {name} is {record[name]!r:.60}, not text")
    question = "\n".join(part for part in (record["instruction"], record.get("input")) if part)
    pairs = [*_history(record), (question, record["output"])]
    turns = [turn for pair in pairs for turn in _exchange(*pair)]
    if record.get("system"):
        turns.insert(0, {"role": "system", "content": record["system"]})
    return _chat(turns, "role", "content", record)


def _history(record: Record) -> Sequence[Sequence[str]]:
    """Return the earlier questions and answers in LLaMA-Factory's `history`. These answers are in the loss too."""
    pairs = record.get("history") or []
    if not isinstance(pairs, Sequence) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in pairs
    ):
        raise ValueError(f"its history is {pairs!r:.60}, not a list of pairs of question and answer")
    return pairs


def _exchange(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


FORMS: dict[tuple[str, ...], Callable[[Record], ParsedSequence]] = {
    ("input_ids",): _tokens,
    ("messages",): _messages,
    ("prompt", "completion"): _prompt_completion,
    ("conversations",): _sharegpt,
    ("instruction", "output"): _alpaca,
}


def _token_answers(record: Record) -> list[ParsedSequence]:
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        require_ids(name, record[name])
    prompt = list(record["prompt_ids"])
    answers = (list(record[name]) for name in ("chosen_ids", "rejected_ids"))
    return [Tokens(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for ids in answers]


def _prompted_answers(record: Record) -> list[ParsedSequence]:
    prompt = record["prompt"]
    are_text = [isinstance(record[name], str) for name in ("prompt", "chosen", "rejected")]
    if any(are_text) and not all(are_text):
        raise ValueError(
            "prompt, chosen and rejected are partly text and partly lists of messages; use one "
            "kind, or if chosen and rejected are full conversations, remove the prompt"
        )
    if not any(are_text):
        _require_messages(prompt=prompt, chosen=record["chosen"], rejected=record["rejected"])
    return [_answer(name, prompt, record[name], record) for name in ("chosen", "rejected")]


def _full_answers(record: Record) -> list[ParsedSequence]:
    chosen, rejected = record["chosen"], record["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("one of chosen and rejected is text and the other a list of messages")
    if not isinstance(chosen, str):
        _require_messages(chosen=chosen, rejected=rejected)
    if chosen == rejected:
        raise ValueError(
            "chosen and rejected are equal, so the start of the answers is unknown; add the prompt"
        )
    first = next(
        (at for at, (one, other) in enumerate(zip(chosen, rejected)) if one != other),
        min(len(chosen), len(rejected)),
    )
    if isinstance(chosen, str) and chosen[first - 1 : first] == " ":
        first -= 1  # as in TRL, the space belongs to the word
    if not first:
        raise ValueError(
            "chosen and rejected have no common prefix, which would be their prompt; add the prompt"
        )
    prompt = chosen[:first]
    return [
        _answer(name, prompt, full_answer[first:], record)
        for name, full_answer in (("chosen", chosen), ("rejected", rejected))
    ]


def _answer(name: str, prompt: Any, answer: Any, record: Record) -> Chat | Text:
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise ValueError(f"its {name} answer is empty")
    if isinstance(answer, str):
        return Text(unicode_text(prompt), unicode_text(answer))
    try:
        chat = _chat([*prompt, *answer], "role", "content", record, first=len(prompt))
    except ValueError as error:
        raise ValueError(f"in the {name} conversation, {error}") from None
    if unlearned := [k for k in chat.unlearned if k >= chat.first]:
        raise ValueError(
            f"message {min(unlearned) + 1} of the {name} conversation is excluded from the loss, but preferences "
            "compare full answers; move the message to the prompt, or remove it"
        )
    return chat


PREFERENCES: dict[tuple[str, ...], Callable[[Record], list[ParsedSequence]]] = {
    ("prompt_ids", "chosen_ids", "rejected_ids"): _token_answers,
    ("prompt", "chosen", "rejected"): _prompted_answers,
    ("chosen", "rejected"): _full_answers,
}


def _require_messages(**lists: Any) -> None:
    for name, value in lists.items():
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"{name!r} must be a list of messages, not {value!r:.60}")


def template_arguments(record: Record) -> dict[str, Any]:
    """Return the record's additional arguments for the chat template."""
    arguments, tools = record.get("chat_template_kwargs") or {}, record.get("tools")
    if not isinstance(arguments, Mapping):
        raise ValueError(f"its chat_template_kwargs is {arguments!r:.60}, not an object")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"its tools are text that is not JSON ({error})") from None
    if tools and (not isinstance(tools, Sequence) or isinstance(tools, str)):
        raise ValueError(f"its tools are {tools!r:.60}, not a list")
    return dict(arguments) | ({"tools": tools} if tools else {})


def prompt_messages(turns: Any) -> list[Message]:
    """Return the messages of a prompt. Raise ValueError with the reason if they are malformed or the assistant wrote
    the last one.
    """
    messages = _check_messages(turns, "role", "content", needs_answer=False)
    if messages[-1]["role"] == "assistant":
        raise ValueError("its last message is the assistant's, so there is nothing to answer")
    return messages


def _chat(turns: Any, role_key: str, content_key: str, record: Record, first: int = 0) -> Chat:
    messages = _check_messages(turns, role_key, content_key)
    unlearned = frozenset(
        k
        for k, (turn, message) in enumerate(zip(turns, messages))
        if message["role"] == "assistant"
        and (turn.get(MASKED) or not all(turn.get(key) in (None, 1) for key in LEARNED_KEYS))
    )
    return Chat(messages, first=first, arguments=template_arguments(record), unlearned=unlearned)


def _check_messages(turns: Any, role_key: str, content_key: str, needs_answer: bool = True) -> list[Message]:
    """Return the turns as {role, content, …}. Raise ValueError if the order of roles is invalid or a message is empty.

    A message with tool calls may lack content.
    """
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError("the conversation must be a list of at least one message")
    messages, before = [], None
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or role_key not in turn:
            raise ValueError(f"message {number} is not an object with {role_key!r} and {content_key!r}")
        role = ROLES.get(turn[role_key]) if isinstance(turn[role_key], str) else None
        if role is None:
            raise ValueError(
                f"message {number} has the role {turn[role_key]!r}; supported are {', '.join(ROLES)}"
            )
        if role not in FOLLOWS[before]:
            raise ValueError(
                f"message {number} has role {role} {f'after role {before}' if before else 'at the start'}; expected "
                f"{' or '.join(FOLLOWS[before])}"
            )
        excluded = (role_key, content_key, MASKED, *LEARNED_KEYS, *UNSUPPORTED_KEYS)
        rest = {key: value for key, value in turn.items() if key not in excluded and value is not None}
        if needs_answer:
            _check_learned(number, role, turn)
        content = _content(turn.get(content_key))
        if not content.strip() and not rest.get("tool_calls"):
            raise ValueError(f"message {number} ({role}) is empty")
        # As in transformers, a message of tool calls without content has no such key: templates may test it.
        stated = {} if turn.get(content_key) is None else {"content": content}
        messages.append({"role": role, **stated, **rest})
        before = role
    if needs_answer and all(message["role"] != "assistant" for message in messages):
        raise ValueError("it has no assistant message")
    return messages


def _check_learned(number: int, role: str, turn: Mapping[str, Any]) -> None:
    """Raise ValueError if a key that excludes the message from the loss is unsupported or has a wrong value."""
    for key in UNSUPPORTED_KEYS:
        if turn.get(key) is not None:
            raise ValueError(
                f"message {number} has {key}, but a message is in the loss as a whole or not at all; "
                "set its weight to 1 or 0, or use input_ids with a loss_mask"
            )
    for key in (*LEARNED_KEYS, MASKED):
        value = turn.get(key)
        if value not in (None, 0, 1):
            learned, other = (0, 1) if key == MASKED else (1, 0)
            raise ValueError(
                f"message {number} has {key} {value!r}; use {learned} (in the loss) or {other} (not in the loss)"
            )
        is_learned = value is not None and bool(value) != (key == MASKED)
        if is_learned and role != "assistant":
            raise ValueError(
                f"message {number} ({role}) has {key} {value!r}, but only assistant messages can be in the loss; "
                f"remove {key}"
            )
    for key, value in turn.items():
        is_read = key in (*LEARNED_KEYS, MASKED)
        if not is_read and SUSPICIOUS.search(key) and isinstance(value, bool | int | float | list):
            raise ValueError(
                f"message {number} has {key} {value!r:.60}, which is not a supported key; set the message's weight to "
                f"1 (in the loss) or 0 (not in the loss), or remove {key}"
            )


def _content(content: Any) -> str:
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("a message has a part that is not text")
        content = "".join(parts)
    if not isinstance(content, str | None):
        raise ValueError(f"a message's content is {content!r}, not text")
    return unicode_text(content or "")


def unicode_text(text: str) -> str:
    """Return `text`. Raise ValueError if it is not Unicode: JSON escapes can spell an unpaired surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("the text has an unpaired surrogate; correct its JSON escape") from None
    return text
