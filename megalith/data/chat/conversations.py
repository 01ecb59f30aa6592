"""Records of chat data: a conversation, a prompt with its completion, tokens, or a preference between two answers.

| form | keys of a record |
|---|---|
| conversation | `messages`: [{role, content}], and perhaps `tools`, `chat_template_kwargs` |
| prompt and completion | `prompt`, `completion`: two texts, or two lists of messages |
| ShareGPT | `conversations`: [{from, value}], and perhaps `system`, `tools` |
| Alpaca | `instruction`, `output`, and perhaps `input`, `system` |
| tokens | `input_ids`, and perhaps `labels` (−100: not learned) or a mask of what is learned |
| preference: prompt and answers | `prompt`, `chosen`, `rejected`: three texts, or three lists of messages |
| preference: whole answers | `chosen`, `rejected`: two texts or conversations; the prompt is their common beginning |
| preference: tokens | `prompt_ids`, `chosen_ids`, `rejected_ids` |

A record in no form, or a malformed one, is a ValueError; the reader (samples.py) adds file, line and sample.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalith.data.doors import of_records

Record = Mapping[str, Any]
Message = dict[str, Any]

IGNORED = -100  # the label that transformers and TRL leave out of the loss
MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # of tokens: 0 where one is not learned
LEARNED = ("weight", "train", "training", "train_on_turn", "loss")
"""Keys of a message that say whether it is learned: OpenAI's, axolotl's by three names, and ms-swift's."""
PARTLY_LEARNED = ("train_detail", "training_detail", "loss_mask", "loss_scale", "mask")
"""Keys of a message that leave out a part of it, which is not supported."""
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
}
FOLLOWS = {  # who may speak after whom
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


@dataclass(frozen=True)
class Chat:
    """A conversation. What stands before message `first` is a prompt, of which no turn is learned."""

    messages: list[Message]
    first: int = 0
    more: dict[str, Any] = field(default_factory=dict)  # what else the chat template is given
    unlearned: frozenset[int] = frozenset()  # messages that say that they are not to be learned


@dataclass(frozen=True)
class Text:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Tokens:
    ids: list[int]
    learned: list[bool]


Said = Chat | Text | Tokens


def parse_record(record: Record) -> list[Said]:
    """What a record says, as one sequence. ValueError: the reason why it cannot be used."""
    if isinstance(label := record.get("label"), bool | int | float) and label != 1:
        raise ValueError(
            f"its label is {label!r}, which marks an undesirable answer in KTO's data, and all answers here are "
            "learned as good ones; leave such records out, or remove the key if it means something else"
        )
    return [_parsed(record, FORMS)]


def parse_preference(record: Record) -> list[Said]:
    """The chosen and the rejected answer of a record, each behind its prompt. ValueError as above."""
    return _parsed(record, PREFERENCES)


def _parsed(record: Record, all_forms: dict[tuple[str, ...], Callable[[Record], Any]]) -> Any:
    if record.get("weight") not in (None, 1):
        raise ValueError(
            f"its weight is {record['weight']!r}, but each sample counts once; repeat the record, or leave it out"
        )
    for keys, parse in all_forms.items():
        if all(record.get(key) is not None for key in keys):
            return parse(record)
    forms = "; ".join(" and ".join(keys) for keys in all_forms)
    raise ValueError(
        f"its keys are {', '.join(map(repr, record)) or 'none'}, and none of the forms: {forms}{of_records(record)}"
    )


def _tokens(record: Record) -> Tokens:
    ids, labels = record["input_ids"], record.get("labels")
    masks = {name: record[name] for name in MASKS if record.get(name) is not None}
    padding = record.get("attention_mask")
    for name, values in {"input_ids": ids, "labels": labels, "attention_mask": padding, **masks}.items():
        if values is not None:
            _require_ids(name, values)
        if values is not None and len(values) != len(ids):
            raise ValueError(f"{name} has {len(values)} entries and input_ids has {len(ids)}")
    if padding is not None and 0 in padding:
        raise ValueError(
            "its attention_mask has zeros; leave the padding out of input_ids and the other lists"
        )
    learned = [all(values) for values in zip(*masks.values())] if masks else [True] * len(ids)
    if labels is None:
        return Tokens(list(ids), learned)
    for at, (token, label) in enumerate(zip(ids, labels)):
        if label not in (token, IGNORED):
            raise ValueError(f"label {at} is {label}, neither its token {token} nor {IGNORED}")
    return Tokens(list(ids), [label != IGNORED and one for label, one in zip(labels, learned)])


def _require_ids(name: str, values: Any) -> None:
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
    asked = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": record["output"]}]
    if record.get("system"):
        turns.insert(0, {"role": "system", "content": record["system"]})
    return _chat(turns, "role", "content", {})


FORMS: dict[tuple[str, ...], Callable[[Record], Said]] = {
    ("input_ids",): _tokens,
    ("messages",): _messages,
    ("prompt", "completion"): _prompt_completion,
    ("conversations",): _sharegpt,
    ("instruction", "output"): _alpaca,
}


def _token_answers(record: Record) -> list[Said]:
    for name in ("prompt_ids", "chosen_ids", "rejected_ids"):
        _require_ids(name, record[name])
    prompt = list(record["prompt_ids"])
    answers = (list(record[name]) for name in ("chosen_ids", "rejected_ids"))
    return [Tokens(prompt + ids, [False] * len(prompt) + [True] * len(ids)) for ids in answers]


def _prompted_answers(record: Record) -> list[Said]:
    prompt = record["prompt"]
    of_text = [isinstance(record[name], str) for name in ("prompt", "chosen", "rejected")]
    if any(of_text) and not all(of_text):
        raise ValueError(
            "some of prompt, chosen and rejected are text and others lists of messages; where these are whole "
            "conversations, leave the prompt out"
        )
    if not any(of_text):
        _require_messages(prompt=prompt, chosen=record["chosen"], rejected=record["rejected"])
    return [_answer(name, prompt, record[name], record) for name in ("chosen", "rejected")]


def _whole_answers(record: Record) -> list[Said]:
    chosen, rejected = record["chosen"], record["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError("one of chosen and rejected is text and the other a list of messages")
    if not isinstance(chosen, str):
        _require_messages(chosen=chosen, rejected=rejected)
    if chosen == rejected:
        raise ValueError(
            "chosen and rejected are equal, so where their answers begin is not known; give the prompt"
        )
    first = next(
        (at for at, (one, other) in enumerate(zip(chosen, rejected)) if one != other),
        min(len(chosen), len(rejected)),
    )
    if (
        isinstance(chosen, str) and chosen[first - 1 : first] == " "
    ):  # the space goes with the word, as in TRL
        first -= 1
    if not first:
        raise ValueError(
            "chosen and rejected have no common beginning, which would be their prompt; give the prompt"
        )
    prompt = chosen[:first]
    return [
        _answer(name, prompt, whole[first:], record)
        for name, whole in (("chosen", chosen), ("rejected", rejected))
    ]


def _answer(name: str, prompt: Any, answer: Any, record: Record) -> Chat | Text:
    if not answer or (isinstance(answer, str) and not answer.strip()):
        raise ValueError(f"its {name} answer is empty")
    if isinstance(answer, str):
        return Text(unicode_text(prompt), unicode_text(answer))
    try:
        chat = _chat([*prompt, *answer], "role", "content", record, first=len(prompt))
    except ValueError as error:
        raise ValueError(f"of the {name} conversation {error}") from None
    if left_out := [k for k in chat.unlearned if k >= chat.first]:
        raise ValueError(
            f"message {min(left_out) + 1} of the {name} conversation says that it is not to be learned, but a "
            "preference is one between whole answers; put the message into the prompt, or leave it out"
        )
    return chat


PREFERENCES: dict[tuple[str, ...], Callable[[Record], list[Said]]] = {
    ("prompt_ids", "chosen_ids", "rejected_ids"): _token_answers,
    ("prompt", "chosen", "rejected"): _prompted_answers,
    ("chosen", "rejected"): _whole_answers,
}


def _require_messages(**lists: Any) -> None:
    for name, value in lists.items():
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ValueError(f"its {name} is {value!r:.60}, not a list of messages")


def template_arguments(record: Record) -> dict[str, Any]:
    """What the chat template is given beside the messages."""
    more, tools = record.get("chat_template_kwargs") or {}, record.get("tools")
    if not isinstance(more, Mapping):
        raise ValueError(f"its chat_template_kwargs is {more!r:.60}, not an object")
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"its tools are text that is not JSON ({error})") from None
    if tools and (not isinstance(tools, Sequence) or isinstance(tools, str)):
        raise ValueError(f"its tools are {tools!r:.60}, not a list")
    return dict(more) | ({"tools": tools} if tools else {})


def prompt_messages(turns: Any) -> list[Message]:
    """The messages that an answer is asked to: the last one is not the assistant's. ValueError: the reason why not."""
    messages = _checked(turns, "role", "content", answered=False)
    if messages[-1]["role"] == "assistant":
        raise ValueError("its last message is the assistant's, so there is nothing to answer")
    return messages


def _chat(turns: Any, role_key: str, content_key: str, record: Record, first: int = 0) -> Chat:
    messages = _checked(turns, role_key, content_key)
    unlearned = frozenset(
        k
        for k, (turn, message) in enumerate(zip(turns, messages))
        if message["role"] == "assistant" and not all(turn.get(key) in (None, 1) for key in LEARNED)
    )
    return Chat(messages, first=first, more=template_arguments(record), unlearned=unlearned)


def _checked(turns: Any, role_key: str, content_key: str, answered: bool = True) -> list[Message]:
    """The turns as {role, content, …}, in an order that a conversation can have and none of them empty."""
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise ValueError("its conversation is not a list of messages, or has none")
    messages, before = [], None
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, Mapping) or role_key not in turn:
            raise ValueError(f"message {number} is not an object with {role_key!r} and {content_key!r}")
        role = ROLES.get(turn[role_key]) if isinstance(turn[role_key], str) else None
        if role is None:
            raise ValueError(
                f"message {number} is of the role {turn[role_key]!r}; there are {', '.join(ROLES)}"
            )
        if role not in FOLLOWS[before]:
            raise ValueError(
                f"message {number} is the {role}'s {f'after the {before}' if before else 'at the start'}, where it has "
                f"to be the {' or '.join(FOLLOWS[before])}'s"
            )
        left_out = (role_key, content_key, *LEARNED, *PARTLY_LEARNED)
        rest = {key: value for key, value in turn.items() if key not in left_out and value is not None}
        if answered:
            _check_learned(number, role, turn)
        content = _content(turn.get(content_key))
        if not content.strip() and not rest.get("tool_calls"):
            raise ValueError(f"message {number}, the {role}'s, is empty")
        messages.append({"role": role, "content": content, **rest})
        before = role
    if answered and all(message["role"] != "assistant" for message in messages):
        raise ValueError("the assistant says nothing in it")
    return messages


def _check_learned(number: int, role: str, turn: Mapping[str, Any]) -> None:
    """Raises ValueError where a message says of itself that it is learned in a way that it cannot be."""
    for key in PARTLY_LEARNED:
        if turn.get(key) is not None:
            raise ValueError(
                f"message {number} has {key}, but a message is learned whole or not at all: say that by its weight, 1 "
                "or 0, or give tokens with a mask"
            )
    for key in LEARNED:
        value = turn.get(key)
        if value not in (None, 0, 1):
            raise ValueError(f"message {number} has {key} {value!r}; give 1 (learned) or 0 (not learned)")
        if value and role != "assistant":
            raise ValueError(
                f"message {number}, the {role}'s, has {key} {value!r}, but only the assistant's messages can be "
                "learned that way; remove the key"
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
    """`text`; a ValueError where it is none that a tokenizer takes: JSON may escape half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("it has half of a surrogate pair, which is no character") from None
    return text
