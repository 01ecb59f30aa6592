"""Responses of OpenAI's API: complete choices, and chunks of a stream."""

from __future__ import annotations

import json
import math
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

from megalith.data.chat.call_formats import ParsedTurn
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.generation.choice_text import ChoiceText
from megalith.serve.openai_requests import CompletionRequest

DONE = b"data: [DONE]\n\n"


class ResponseWriter:
    """Writes the objects of one request."""

    def __init__(
        self, request: CompletionRequest, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]
    ):
        """Take the request, the served model's name, and the tokens of its prompts."""
        self._request, self._tokenizer, self._prompts = request, tokenizer, prompts
        kind, prefix = ("chat.completion", "chatcmpl-") if request.is_chat else ("text_completion", "cmpl-")
        self._kind = kind
        self._chunk_head: str | None = None
        self._head = {
            "id": prefix + f"{random.getrandbits(128):032x}",
            "created": int(time.time()),
            "model": model,
        }

    def usage(self, choices: Sequence[ChoiceText]) -> dict[str, int]:
        """Return the token counts."""
        prompt, completion = sum(map(len, self._prompts)), sum(len(one.ids) for one in choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def whole(self, choices: Sequence[ChoiceText], turns: Sequence[ParsedTurn]) -> dict[str, Any]:
        """Return the response to a request without streaming, as a JSON object.

        Args:
            choices: complete choices.
            turns: their parsed turns, for chat completions.
        """
        listed = []
        for index, choice in enumerate(choices):
            one: dict[str, Any] = {"index": index, "finish_reason": choice.reason}
            if self._request.is_chat:
                one["message"] = message_of(turns[index])
                if one["message"].get("tool_calls"):
                    one["finish_reason"] = "tool_calls"
            else:
                one["text"] = choice.text
            one["logprobs"] = self._logprobs(choice, 0)
            if self._request.return_token_ids:
                one["token_ids"] = choice.ids
                if not self._request.is_chat:
                    one["prompt_token_ids"] = list(self._prompts[index // self._request.n])
            listed.append(one)
        value = {**self._head, "object": self._kind, "choices": listed, "usage": self.usage(choices)}
        if self._request.return_token_ids and self._request.is_chat:
            value["prompt_token_ids"] = list(self._prompts[0])
        return value

    def first_chunk(self, index: int) -> bytes:
        """Return the chunk that begins a choice of a chat completion."""
        return self._chunk(
            [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
        )

    def text_chunk(self, index: int, choice: ChoiceText, text: str, first_token: int) -> bytes:
        """Return a chunk with new text, and with the fields of the tokens starting at index `first_token`."""
        one: dict[str, Any] = {"index": index, "finish_reason": None}
        one |= {"delta": {"content": text}} if self._request.is_chat else {"text": text}
        one["logprobs"] = self._logprobs(choice, first_token)
        if self._request.return_token_ids:
            one["token_ids"] = choice.ids[first_token:]
        return self._chunk([one])

    def last_chunk(self, index: int, choice: ChoiceText, turn: ParsedTurn | None) -> bytes:
        """Return the chunk that ends a choice, with its calls of tools."""
        calls = [] if turn is None else message_of(turn).get("tool_calls", [])
        delta = {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]} if calls else {}
        one: dict[str, Any] = {"index": index, "finish_reason": "tool_calls" if calls else choice.reason}
        return self._chunk([one | ({"delta": delta} if self._request.is_chat else {"text": ""})])

    def usage_chunk(self, choices: Sequence[ChoiceText]) -> bytes:
        """Return the chunk with the token counts."""
        return self._chunk([], usage=self.usage(choices))

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = f"{self._kind}.chunk" if self._request.is_chat else self._kind
        if self._chunk_head is None:  # the same for all chunks
            self._chunk_head = json.dumps({**self._head, "object": kind})[:-1]
        rest = json.dumps({"choices": choices, **more})
        return f"data: {self._chunk_head}, {rest[1:]}\n\n".encode()

    def _logprobs(self, choice: ChoiceText, first: int) -> dict[str, Any] | None:
        """Return the log-probabilities of the tokens starting at index `first`, in the form of the endpoint."""
        if not self._request.logprobs:
            return None
        texts = [self._tokenizer.decode([token]) for token in choice.ids[first:]]
        values = [value if math.isfinite(value) else -9999.0 for value in choice.logprobs[first:]]
        if self._request.is_chat:
            entries = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, value in zip(texts, values)
            ]
            return {"content": entries, "refusal": None}
        offsets, position = [], 0
        for text in texts:
            offsets.append(position)
            position += len(text)
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": None, "text_offset": offsets}


def message_of(turn: ParsedTurn) -> dict[str, Any]:
    """Return a turn as an API message. Its tool calls have ids, and arguments as JSON text."""
    message = {"role": "assistant", "content": turn.message.get("content") or None}
    for name in ("reasoning_content",):
        if turn.message.get(name):
            message[name] = turn.message[name]
    calls = [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in turn.calls
    ]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message
