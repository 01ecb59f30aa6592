"""A chat template: from a conversation to its text, and to the spans of the text that are learned.

The template is Jinja, run in a sandbox (template_renderer.py) with the names that transformers gives it, so a template
made for transformers renders the same text here. What is learned of the text comes from one of two places. A template
may say it itself: what stands between `{% generation %}` and `{% endgeneration %}` is the assistant's. Where it does
not, a turn is found by rendering prefixes of the conversation: the turn of message k is what the text of messages 0…k
has more than that of messages 0…k−1 with the header that asks for an answer. Where these texts are not the beginning of
the whole one, as with templates that drop the reasoning of earlier turns, the turns are found in the whole text
(turns.py). A template that drops part of an answer, or whose turns are found in neither way, is refused.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from megalith.data.chat.conversations import Chat, Message, unicode_text
from megalith.data.chat.template_process import TemplateProcess
from megalith.data.chat.template_renderer import BEGIN, END, FAILURES, template_environment
from megalith.data.chat.turns import (
    Span,
    answer_of,
    common_prefix,
    content_positions,
    find_turns,
    mark_content,
    without_markers,
)
from megalith.data.tokenizers.huggingface import CHAT_TEMPLATE, CONFIG, SPECIAL_TOKENS
from megalith.data.tokenizers.tokenizer import Tokenizer, read_file, read_json
from megalith.errors import ConfigError, DataError

MARKS = re.compile("[\ufdd0-\ufdd4]")  # code points of our own in a text, which no message may have
UNKNOWN_TURNS = (
    "the chat template {}, so the turns of the assistant are not known; put {{% generation %}} and "
    "{{% endgeneration %}} around them in the template"
)


class ChatTemplate:
    """`names`: what the template may use beside the conversation, such as bos_token. ConfigError: not a template."""

    def __init__(self, source: str, names: dict[str, str]):
        self.source, self.names = source, names
        environment = template_environment()
        try:
            self.has_marks = any(
                token == "generation" and kind == "name" for _, kind, token in environment.lex(source)
            )
            environment.parse(source)
        except FAILURES as error:
            raise ConfigError(f"the chat template is not one ({error}); correct it") from error
        self._process = TemplateProcess(source)

    def render(self, messages: list[Message], *, ask: bool = False, **more: Any) -> str:
        """The conversation's text; with `ask`, and an answer's header. ValueError: the reason why there is none."""
        return _plain(self._marked(messages, ask, more))

    def text_and_spans(self, chat: Chat, assistant_only: bool) -> tuple[str, list[Span]]:
        """The text of a conversation and what is learned of it. ValueError: the reason why that cannot be said."""
        marked = self._marked(chat.messages, False, chat.more)
        text = _plain(marked)
        if not assistant_only:
            if any(k >= chat.first for k in chat.unlearned):
                raise ValueError(
                    "a message says that it is not to be learned (weight 0), but every message is learned where "
                    "assistant_only_loss is false; set that to true, or remove the message"
                )
            return text, [(self._completion_begin(chat, text) if chat.first else 0, len(text))]
        assistant = [k for k, message in enumerate(chat.messages) if message["role"] == "assistant"]
        learned = [k for k in assistant if k >= chat.first and k not in chat.unlearned]
        if not self.has_marks:
            return text, self._turns_of(chat, learned, text)
        spans = _marked_spans(marked)
        if len(learned) == len(assistant):
            return text, spans
        if len(spans) == len(assistant):
            return text, [span for k, span in zip(assistant, spans) if k in learned]
        turns = self._turns(chat, text)
        return text, [span for span in spans if any(_is_in(span, turns.get(k)) for k in learned)]

    def _turns_of(self, chat: Chat, learned: list[int], text: str) -> list[Span]:
        """The turns of these messages of the assistant, each from behind its header."""
        try:
            return [(self._prefix(chat, k, text, ask=True), self._prefix(chat, k + 1, text)) for k in learned]
        except ValueError:
            return self._turns_in_whole(chat, learned, text)

    def _completion_begin(self, chat: Chat, text: str) -> int:
        try:
            return self._prefix(chat, chat.first, text, ask=True)
        except ValueError:
            if chat.messages[chat.first]["role"] != "assistant":
                raise
            return self._turns_in_whole(chat, [chat.first], text)[0][0]

    def _prefix(self, chat: Chat, count: int, text: str, ask: bool = False) -> int:
        """The length of the text of the first `count` messages, which `text` has to begin with."""
        found = self.render(chat.messages[:count], ask=ask, **chat.more)
        if not text.startswith(found):
            raise ValueError(
                UNKNOWN_TURNS.format(f"renders its first {count} messages otherwise where others follow")
            )
        return len(found)

    def _turns(self, chat: Chat, text: str) -> dict[int, Span]:
        """Where `text` has each message, the last one to the end of the text."""
        marked = self._with_turns(chat.messages, False, chat.more)
        turns, last = find_turns(marked), len(chat.messages) - 1
        if without_markers(marked) != text or last not in turns:
            raise ValueError(UNKNOWN_TURNS.format("does not write each message in a turn of one loop"))
        return {**turns, last: (turns[last][0], len(text))}

    def _turns_in_whole(self, chat: Chat, learned: list[int], text: str) -> list[Span]:
        """`_turns_of` of the whole text alone, where a message may be rendered otherwise than at the end."""
        turns, spans = self._turns(chat, text), []
        for k in learned:
            if k not in turns or answer_of(chat.messages[k]) not in text[slice(*turns[k])]:
                raise ValueError(
                    UNKNOWN_TURNS.format(f"leaves out a part of message {k + 1}, the assistant's")
                )
            spans.append((self._turn_begin(chat, k, text, turns), turns[k][1]))
        return spans

    def _turn_begin(self, chat: Chat, k: int, text: str, turns: dict[int, Span]) -> int:
        """Where message k begins behind its header: that part of the generation prompt which the text has there."""
        marked = self._with_turns(chat.messages[:k], True, chat.more)
        asked, before = without_markers(marked), find_turns(marked).get(k - 1)
        if before is None or k - 1 not in turns:
            raise ValueError(
                UNKNOWN_TURNS.format(f"does not write message {k} in the loop over the messages")
            )
        here, there = turns[k - 1][0], before[0]
        if not asked[there:].startswith(
            text[slice(*turns[k - 1])]
        ):  # only what follows the content is the same
            content = chat.messages[k - 1]["content"].strip()
            here, there = _behind(content, text, turns[k - 1]), _behind(content, asked, before)
        begin = here + common_prefix(text[here : turns[k][1]], asked[there:])
        is_whole = begin - here == len(asked) - there
        if not is_whole:  # the content may agree with the rest of the prompt by chance
            begin = min([begin, *self._contents(chat, text, turns[k])])
        if begin < turns[k][0] + (not is_whole):
            raise ValueError(
                UNKNOWN_TURNS.format(f"begins message {k + 1} otherwise than its generation prompt")
            )
        return begin

    def _contents(self, chat: Chat, text: str, turn: Span) -> list[int]:
        """Where in a turn of the assistant its content begins, as far as marks in the content show it."""
        messages = [mark_content(one) if one["role"] == "assistant" else one for one in chat.messages]
        marked = _plain(self._render(messages, False, chat.more))
        if without_markers(marked) != text:
            return []
        return [at for at in content_positions(marked) if turn[0] <= at <= turn[1]]

    def _with_turns(self, messages: list[Message], ask: bool, more: dict[str, Any]) -> str:
        return _plain(self._render(messages, ask, more, mark_turns=True))

    def _marked(self, messages: list[Message], ask: bool, more: dict[str, Any]) -> str:
        if any(MARKS.search(message["content"]) for message in messages):
            raise ValueError("a message has one of U+FDD0 to U+FDD4, which are no characters of a text")
        return self._render(messages, ask, more)

    def _render(
        self, messages: list[Message], ask: bool, more: dict[str, Any], *, mark_turns: bool = False
    ) -> str:
        variables = {"tools": None, "documents": None, **self.names, **more}
        variables |= {"messages": messages, "add_generation_prompt": ask}
        return unicode_text(self._process.render(variables, mark_turns=mark_turns))  # of tools, too


def _plain(marked: str) -> str:
    return marked.replace(BEGIN, "").replace(END, "")


def _is_in(span: Span, turn: Span | None) -> bool:
    return turn is not None and turn[0] <= span[0] and span[1] <= turn[1]


def _behind(content: str, text: str, turn: Span) -> int:
    """The position behind the last `content` in a turn; the turn's beginning where it is not there."""
    at = text.rfind(content, *turn) if content else -1
    return turn[0] if at < 0 else at + len(content)


def _marked_spans(marked: str) -> list[Span]:
    spans, at, begin = [], 0, 0
    for one in marked:
        if one == BEGIN:
            begin = at
        elif one == END:
            spans.append((begin, at))
        else:
            at += 1
    return [span for span in spans if span[0] < span[1]]


# Where it comes from


def read_template(path: str) -> bytes:
    """The Jinja file at `path`, or chat_template.jinja in the folder there. DataError: it cannot be read."""
    folder = Path(path) if Path(path).is_dir() else None
    return read_file(path if folder is None else folder / CHAT_TEMPLATE, "chat template", folder)


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template in the tokenizer's files, if there is one."""
    tables = [_table(tokenizer, name) for name in (SPECIAL_TOKENS, CONFIG)]
    source: Any = tables[1].get("chat_template")
    if isinstance(source, list):  # several with names
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if CHAT_TEMPLATE in tokenizer.files:
        try:
            source = tokenizer.files[CHAT_TEMPLATE].decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"the chat template is not UTF-8 ({error}); it is damaged") from error
    if not isinstance(source, str):
        return None
    names = {} if tokenizer.eod is None else {"eos_token": tokenizer.decode([tokenizer.eod])}
    for key, token in [item for table in tables for item in table.items()]:
        token = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and isinstance(token, str):
            names[key] = token
    return ChatTemplate(source, names)


def _table(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    table = read_json(tokenizer.files[name], name) if name in tokenizer.files else {}
    return table if isinstance(table, dict) else {}
