"""A chat template: from a conversation to its text, and to the spans of the text that are learned.

The template is Jinja, run in a sandbox (template_renderer.py) with the names that transformers gives it, so a template
made for transformers renders the same text here. What is learned of the text comes from one of two places. A template
may say it itself: what stands between `{% generation %}` and `{% endgeneration %}` is the assistant's. Where it does
not, a turn is found by rendering prefixes of the conversation: the turn of message k is what the text of messages 0…k
has more than that of messages 0…k−1 with the header that asks for an answer. That holds only where each of these texts
is the beginning of the whole one; a template that rewrites earlier turns (as those do that take out earlier reasoning)
is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalith.data.chat.conversations import Chat, Message, unicode_text
from megalith.data.chat.template_process import TemplateProcess
from megalith.data.chat.template_renderer import BEGIN, END, FAILURES, template_environment
from megalith.data.tokenizers.huggingface import CHAT_TEMPLATE, CONFIG, SPECIAL_TOKENS
from megalith.data.tokenizers.tokenizer import Tokenizer, read_file, read_json
from megalith.errors import ConfigError, DataError

Span = tuple[int, int]  # characters [start, end)


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
        return self._marked(messages, ask, more).replace(BEGIN, "").replace(END, "")

    def text_and_spans(self, chat: Chat, assistant_only: bool) -> tuple[str, list[Span]]:
        """The text of a conversation and what is learned of it. ValueError: the reason why that cannot be said."""
        marked = self._marked(chat.messages, False, chat.more)
        text = marked.replace(BEGIN, "").replace(END, "")
        if not assistant_only:
            return text, [(self._prefix(chat, chat.first, text, ask=True) if chat.first else 0, len(text))]
        assistant = [k for k, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not self.has_marks:
            learned = [k for k in assistant if k >= chat.first]
            return text, [
                (self._prefix(chat, k, text, ask=True), self._prefix(chat, k + 1, text)) for k in learned
            ]
        spans = _marked_spans(marked)
        if chat.first and len(spans) != len(assistant):
            raise ValueError(
                f"the chat template marks {len(spans)} generations in {len(assistant)} turns of the assistant, so "
                "those of the completion are not known; correct the template"
            )
        return text, spans[sum(k < chat.first for k in assistant) :] if chat.first else spans

    def _prefix(self, chat: Chat, count: int, text: str, ask: bool = False) -> int:
        """The length of the text of the first `count` messages, which `text` has to begin with."""
        found = self.render(chat.messages[:count], ask=ask, **chat.more)
        if not text.startswith(found):
            raise ValueError(
                f"the chat template renders its first {count} messages otherwise where others follow, so the turns of "
                "the assistant are not known; put {% generation %} and {% endgeneration %} around them in the template"
            )
        return len(found)

    def _marked(self, messages: list[Message], ask: bool, more: dict[str, Any]) -> str:
        for message in messages:
            if BEGIN in message["content"] or END in message["content"]:
                raise ValueError("a message has U+FDD0 or U+FDD1, which are no characters of a text")
        variables = {"tools": None, "documents": None, **self.names, **more}
        variables |= {"messages": messages, "add_generation_prompt": ask}
        return unicode_text(self._process.render(variables))  # of tools, too


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
    return read_file(Path(path) / CHAT_TEMPLATE if Path(path).is_dir() else path, "chat template")


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
