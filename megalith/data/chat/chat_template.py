"""Renders conversations with chat templates. Returns the text and its spans in the loss.

The template is Jinja, run in a sandbox (template_renderer.py) with the names that transformers provides, so templates
for transformers render the same text. The spans in the loss are determined in one of three ways. A template may mark
the assistant's text with `{% generation %}` and `{% endgeneration %}`. Otherwise prefixes of the conversation are
rendered: the turn of message k is what messages 0…k add to messages 0…k−1 with a generation prompt. Templates that drop
the reasoning of earlier turns render texts that are not prefixes of the full text; then the turns are located in the
full text (turns.py). A template that drops part of an answer, or whose turns cannot be located, is rejected.
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
from megalith.data.tokenizers.huggingface import CHAT_TEMPLATE, CONFIG, SPECIAL_TOKENS, TOOL_TEMPLATE
from megalith.data.tokenizers.tokenizer import Tokenizer, read_file, side_table
from megalith.errors import ConfigError, DataError

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message's reasoning, of which templates read one."""
MARKERS = re.compile("[\ufdd0-\ufdd4]")  # code points used as markers, which no message may contain
UNKNOWN_TURNS = (
    "the chat template {}, so the assistant's turns cannot be located; put {{% generation %}} and "
    "{{% endgeneration %}} around them in the template"
)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja template.
        names: further variables of the template, such as bos_token.
        tool_use: template of conversations with tools. Default: this one.

    Raises:
        ConfigError: if `source` is not a template.
    """

    def __init__(self, source: str, names: dict[str, str], tool_use: ChatTemplate | None = None):
        self.source, self.names, self.tool_use = source, names, tool_use
        environment = template_environment()
        try:
            self.has_generation_blocks = any(
                token == "generation" and kind == "name" for _, kind, token in environment.lex(source)
            )
            environment.parse(source)
        except FAILURES as error:
            raise ConfigError(f"the chat template is invalid ({error}); correct the template") from error
        self._process = TemplateProcess(source)

    @property
    def tool_source(self) -> str:
        """Source of the template of conversations with tools."""
        return self.source if self.tool_use is None else self.tool_use.source

    def render(
        self, messages: list[Message], *, add_generation_prompt: bool = False, **arguments: Any
    ) -> str:
        """Return the conversation's text, with a generation prompt if `add_generation_prompt`.

        Raises:
            ValueError: with the reason, if the template rejects it.
        """
        if self.tool_use is not None and arguments.get("tools"):
            return self.tool_use.render(messages, add_generation_prompt=add_generation_prompt, **arguments)
        return _plain(self._marked(messages, add_generation_prompt, arguments))

    def text_and_spans(self, chat: Chat, assistant_only: bool) -> tuple[str, list[Span]]:
        """Return the text of a conversation and its spans in the loss. Raise ValueError with the reason if they cannot
        be determined."""
        if self.tool_use is not None and chat.arguments.get("tools"):
            return self.tool_use.text_and_spans(chat, assistant_only)
        marked = self._marked(chat.messages, False, chat.arguments)
        text = _plain(marked)
        if not assistant_only:
            if any(k >= chat.first for k in chat.unlearned):
                raise ValueError(
                    "a message has weight 0 (not in the loss), but every message is in the loss if "
                    "assistant_only_loss is false; set assistant_only_loss to true, or remove the message"
                )
            return text, [(self._completion_begin(chat, text) if chat.first else 0, len(text))]
        assistant = [k for k, message in enumerate(chat.messages) if message["role"] == "assistant"]
        learned = [k for k in assistant if k >= chat.first and k not in chat.unlearned]
        if not self.has_generation_blocks:
            return text, self._turns_of(chat, learned, text)
        spans = _marked_spans(marked)
        if len(learned) == len(assistant):
            return text, spans
        if len(spans) == len(assistant):
            return text, [span for k, span in zip(assistant, spans) if k in learned]
        turns = self._turns(chat, text)
        return text, [span for span in spans if any(_is_in(span, turns.get(k)) for k in learned)]

    def _turns_of(self, chat: Chat, learned: list[int], text: str) -> list[Span]:
        """Return the turn of each assistant message in the loss, without its header."""
        try:
            return [
                (self._prefix(chat, k, text, add_generation_prompt=True), self._prefix(chat, k + 1, text))
                for k in learned
            ]
        except ValueError:
            return self._turns_of_full_text(chat, learned, text)

    def _completion_begin(self, chat: Chat, text: str) -> int:
        try:
            return self._prefix(chat, chat.first, text, add_generation_prompt=True)
        except ValueError:
            if chat.messages[chat.first]["role"] != "assistant":
                raise
            return self._turns_of_full_text(chat, [chat.first], text)[0][0]

    def _prefix(self, chat: Chat, count: int, text: str, add_generation_prompt: bool = False) -> int:
        """Return the length of the rendered first `count` messages, which must be a prefix of `text`."""
        prefix = self.render(
            chat.messages[:count], add_generation_prompt=add_generation_prompt, **chat.arguments
        )
        if not text.startswith(prefix):
            raise ValueError(
                UNKNOWN_TURNS.format(f"renders the first {count} messages differently if others follow")
            )
        return len(prefix)

    def _turns(self, chat: Chat, text: str) -> dict[int, Span]:
        """Return the span of each message in `text`. The last span ends with the text."""
        marked = self._with_turns(chat.messages, False, chat.arguments)
        turns, last = find_turns(marked), len(chat.messages) - 1
        if without_markers(marked) != text or last not in turns:
            raise ValueError(UNKNOWN_TURNS.format("does not write each message in a turn of one loop"))
        return {**turns, last: (turns[last][0], len(text))}

    def _turns_of_full_text(self, chat: Chat, learned: list[int], text: str) -> list[Span]:
        """Locate the turns in the full text, where a message may be rendered differently than at the end of a
        conversation.
        """
        turns, spans = self._turns(chat, text), []
        for k in learned:
            if k not in turns or answer_of(chat.messages[k]) not in text[slice(*turns[k])]:
                raise ValueError(UNKNOWN_TURNS.format(f"drops a part of message {k + 1}, the assistant's"))
            spans.append((self._turn_begin(chat, k, text, turns), turns[k][1]))
        return spans

    def _turn_begin(self, chat: Chat, k: int, text: str, turns: dict[int, Span]) -> int:
        """Return the position in `text` of message k after its header.

        The header is the text before the message that equals the generation prompt.
        """
        marked = self._with_turns(chat.messages[:k], True, chat.arguments)
        prompted, before = without_markers(marked), find_turns(marked).get(k - 1)
        if before is None or k - 1 not in turns:
            raise ValueError(
                UNKNOWN_TURNS.format(f"does not write message {k} in the loop over the messages")
            )
        position, prompted_position = turns[k - 1][0], before[0]
        if not prompted[prompted_position:].startswith(
            text[slice(*turns[k - 1])]
        ):  # only the text after the content is the same
            content = (chat.messages[k - 1].get("content") or "").strip()
            position, prompted_position = (
                _end_of(content, text, turns[k - 1]),
                _end_of(content, prompted, before),
            )
        begin = position + common_prefix(text[position : turns[k][1]], prompted[prompted_position:])
        has_full_prompt = begin - position == len(prompted) - prompted_position
        if not has_full_prompt:  # the content may start like the rest of the prompt by chance
            begin = min([begin, *self._contents(chat, text, turns[k])])
        if begin < turns[k][0] + (not has_full_prompt):
            raise ValueError(
                UNKNOWN_TURNS.format(f"starts message {k + 1} differently from its generation prompt")
            )
        return begin

    def _contents(self, chat: Chat, text: str, turn: Span) -> list[int]:
        """Return the positions at which the content of an assistant turn may start. They are found by rendering content
        with markers.
        """
        messages = [mark_content(one) if one["role"] == "assistant" else one for one in chat.messages]
        marked = _plain(self._render(messages, False, chat.arguments))
        if without_markers(marked) != text:
            return []
        return [at for at in content_positions(marked) if turn[0] <= at <= turn[1]]

    def _with_turns(
        self, messages: list[Message], add_generation_prompt: bool, arguments: dict[str, Any]
    ) -> str:
        return _plain(self._render(messages, add_generation_prompt, arguments, mark_turns=True))

    def _marked(self, messages: list[Message], add_generation_prompt: bool, arguments: dict[str, Any]) -> str:
        if any(MARKERS.search(message.get("content") or "") for message in messages):
            raise ValueError("a message contains one of U+FDD0 to U+FDD4, which are not characters")
        return self._render(messages, add_generation_prompt, arguments)

    def _render(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        arguments: dict[str, Any],
        *,
        mark_turns: bool = False,
    ) -> str:
        variables = {"tools": None, "documents": None, **self.names, **arguments}
        named = [_with_reasoning_names(message) for message in messages]
        variables |= {"messages": named, "add_generation_prompt": add_generation_prompt}
        return unicode_text(
            self._process.render(variables, mark_turns=mark_turns)
        )  # also checks the text of tools


def _with_reasoning_names(message: Message) -> Message:
    """Return the message with its reasoning under both names that templates read, as in transformers."""
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(marked: str) -> str:
    return marked.replace(BEGIN, "").replace(END, "")


def _is_in(span: Span, turn: Span | None) -> bool:
    return turn is not None and turn[0] <= span[0] and span[1] <= turn[1]


def _end_of(content: str, text: str, turn: Span) -> int:
    """Return the end of the last occurrence of `content` in a turn, or the turn's start if there is none."""
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


# Sources


def read_template(path: str) -> bytes:
    """Read the Jinja file at `path`, or chat_template.jinja in the folder `path`.

    Raise DataError if it cannot be read.
    """
    folder = Path(path) if Path(path).is_dir() else None
    return read_file(path if folder is None else folder / CHAT_TEMPLATE, "chat template", folder)


def template_of(tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template in the tokenizer's files, or None if there is none."""
    tables = [side_table(tokenizer.files, name) for name in (SPECIAL_TOKENS, CONFIG)]
    source: Any = tables[1].get("chat_template")
    tool_source: Any = None
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source, tool_source = named.get("default"), named.get("tool_use")
    if CHAT_TEMPLATE in tokenizer.files:
        source, tool_source = (_template_file(tokenizer, name) for name in (CHAT_TEMPLATE, TOOL_TEMPLATE))
    if not isinstance(source, str):
        return None
    names = {} if tokenizer.eod is None else {"eos_token": tokenizer.decode([tokenizer.eod])}
    for key, token in [item for table in tables for item in table.items()]:
        token = token.get("content") if isinstance(token, dict) else token
        if key.endswith("_token") and isinstance(token, str):
            names[key] = token
    tool_use = ChatTemplate(tool_source, names) if isinstance(tool_source, str) else None
    return ChatTemplate(source, names, tool_use)


def _template_file(tokenizer: Tokenizer, name: str) -> str | None:
    try:
        return tokenizer.files[name].decode("utf-8") if name in tokenizer.files else None
    except UnicodeDecodeError as error:
        raise DataError(f"the chat template {name} is not UTF-8 ({error}); it is damaged") from error


def rendered_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of rendered text. Texts of special tokens become these tokens.

    Raises ValueError if the text cannot be encoded.
    """
    ids = tokenizer.encode_marked([text], [[(0, len(text))]])[0]
    if isinstance(ids, str):
        raise ValueError(ids)
    return [int(each) for each in ids[0]]
