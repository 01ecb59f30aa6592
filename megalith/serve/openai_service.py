"""The API service: routes, keys, prompts, and completions from a live engine.

| route | |
|---|---|
| GET /health | 200 while requests are served |
| GET /v1/models | the served model and its adapters |
| POST /v1/chat/completions | conversations, with tools |
| POST /v1/completions | texts or token ids |
| POST /v1/load_lora_adapter, /v1/unload_lora_adapter | changes the adapters, if the server allows it |
"""

from __future__ import annotations

import asyncio
import hmac
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from megalith.data.chat.call_formats import ParsedTurn
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError
from megalith.generation.choice_text import ChoiceText
from megalith.generation.grammar import GrammarCompiler, json_grammar
from megalith.generation.live_request import LiveRequest, OnTokens
from megalith.generation.logits_processing import OFF, LogitsProcessing, bad_word_ids
from megalith.generation.requests import MAX_GENERATIONS, MAX_KEYS
from megalith.serve.chat_format import ChatFormat
from megalith.serve.event_relay import EventRelay, merged
from megalith.serve.http_server import HttpError, HttpRequest, HttpResponse
from megalith.serve.openai_requests import CompletionRequest, parse_request, read_json
from megalith.serve.openai_responses import DONE, ResponseWriter
from megalith.serve.remote_engine import ServedEngine
from megalith.serve.served_adapters import ServedAdapters

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


class Conversation(Protocol):
    """Interface between the server and the code that answers its requests (PlainConversation; rl/agents): makes prompts
    and engine requests from a client's request, and is called with each complete choice.
    """

    def open_prompts(self, request: CompletionRequest) -> list[Any]:
        """Return one object per prompt, with its tokens in `ids`. Raise ValueError for a prompt that cannot be
        sampled."""

    def live_request(self, request: CompletionRequest, prompt: Any, choice: int, limit: int) -> LiveRequest:
        """Return the engine's request for a choice of a prompt, of at most `limit` tokens."""

    def end_choice(self, prompt: Any, choice: ChoiceText, turn: ParsedTurn | None) -> None:
        """Handle a complete choice."""


@dataclass(frozen=True)
class PlainPrompt:
    """Tokens of a prompt, and how the logits of its completions are processed."""

    ids: list[int]
    processing: LogitsProcessing = OFF


class PlainConversation:
    """Answers each request independently of the others."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat | None, grammars: GrammarCompiler):
        self._tokenizer, self._chat, self._grammars = tokenizer, chat, grammars
        self._random = random.Random()  # of seeds; a system call for each would wait for the engine's thread

    def open_prompts(self, request: CompletionRequest) -> list[PlainPrompt]:
        """Return the tokens of each prompt."""
        processing = self._processing(request)
        if request.is_chat:
            arguments = request.template_arguments | ({"tools": request.tools} if request.tools else {})
            return [PlainPrompt(self._chat.prompt_ids(request.messages, arguments), processing)]
        encode = self._tokenizer.encode_prompt
        prompts = [encode(one) if isinstance(one, str) else list(one) for one in request.prompts]
        return [PlainPrompt(ids, processing) for ids in prompts]

    def _processing(self, request: CompletionRequest) -> LogitsProcessing:
        """Return the processing of the logits. Raise ConfigError if its grammar is not supported."""
        if not request.processes_logits:
            return OFF
        source = None
        if request.required_tools:
            source = self._chat.call_grammar(request.tools, request.required_tools)
        elif request.json_schema is not None:
            source = json_grammar(request.json_schema)
        return LogitsProcessing(
            request.repetition_penalty,
            request.presence_penalty,
            request.frequency_penalty,
            request.logit_bias,
            bad_word_ids(self._tokenizer, request.bad_words),
            None if source is None else self._grammars.compile(source),
        )

    def live_request(
        self, request: CompletionRequest, prompt: PlainPrompt, choice: int, limit: int
    ) -> LiveRequest:
        """Return the request to the live engine.

        Its samples depend on the request's seed and the index of the choice.
        """
        seed = self._random.getrandbits(64) if request.seed is None else request.seed
        key = (seed >> 32) % (MAX_KEYS // MAX_GENERATIONS) * MAX_GENERATIONS + choice % MAX_GENERATIONS
        sampling = request.temperature, request.top_k, request.top_p, request.min_p
        return LiveRequest(
            prompt.ids, limit, *sampling, seed % 2**32, key, request.ignore_eos, prompt.processing
        )

    def end_choice(self, prompt: PlainPrompt, choice: ChoiceText, turn: ParsedTurn | None) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Access:
    """Rules that determine which clients are admitted."""

    key: str | None = None
    """Required as `Authorization: Bearer KEY`, except for /health."""
    hosts: tuple[str, ...] | None = LOOPBACK
    """Accepted host names in the Host header, so that web pages cannot use this machine's server; None: all."""
    max_requests: int = 256
    """Maximum number of completions in progress or waiting; further requests are refused with 429."""


class OpenAiService:
    """Answers the requests of clients."""

    def __init__(
        self,
        live: ServedEngine,
        tokenizer: Tokenizer,
        chat: ChatFormat | None,
        name: str,
        access: Access = Access(),
        conversation: Callable[[str], Conversation | None] | None = None,
        grammars: GrammarCompiler | None = None,
        adapters: ServedAdapters | None = None,
    ):
        """Prepare to answer.

        Args:
            live: the engine that samples completions.
            tokenizer: the model's tokenizer.
            chat: the chat template; None rejects chat completions.
            name: name of the served model.
            access: clients that are admitted.
            conversation: function that maps the first part of a path, `/PART/v1/…`, to its conversation, or to None if
                there is none. Default: requests are independent of each other, and paths have no such part.
            grammars: compiles the grammars of requests, as the engine's compiler does. Default: a new one.
            adapters: adapters that requests can name as their model. Default: none.
        """
        self._live, self._tokenizer, self._chat, self._name, self._access = (
            live,
            tokenizer,
            chat,
            name,
            access,
        )
        self._conversation = conversation
        self._adapters = adapters or ServedAdapters(live, name)
        self._plain = PlainConversation(tokenizer, chat, grammars or GrammarCompiler(tokenizer))
        self._open = 0
        self._relay = EventRelay()

    async def __call__(self, request: HttpRequest) -> HttpResponse:
        """Return the response. Raise HttpError if the request is invalid or not allowed."""
        self._check_access(request)
        path, conversation = request.path, self._plain
        if self._conversation is not None and "/v1/" in path:
            part, _, rest = path.partition("/v1/")
            conversation, path = self._conversation(part.strip("/")), f"/v1/{rest}"
            if conversation is None:
                raise HttpError(404, "there is no such session: it has ended, or its address is wrong")
        routes = {
            ("GET", "/health"): self._health,
            ("GET", "/v1/models"): self._models,
            ("POST", "/v1/chat/completions"): lambda: self._complete(request, conversation, is_chat=True),
            ("POST", "/v1/completions"): lambda: self._complete(request, conversation, is_chat=False),
        }
        if self._adapters.may_change:
            for verb, change in (("load", self._adapters.load), ("unload", self._adapters.unload)):
                routes["POST", f"/v1/{verb}_lora_adapter"] = partial(self._change, request, change)
        if (route := routes.get((request.method, path))) is not None:
            return await route()
        if any(path == other for _, other in routes):
            raise HttpError(405, f"{request.method} is not supported for {path}")
        raise HttpError(
            404, f"there is no {path}; the routes are {', '.join(sorted({p for _, p in routes}))}"
        )

    def _check_access(self, request: HttpRequest) -> None:
        hosts = self._access.hosts
        host = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
        if hosts is not None and host.lower() not in hosts:
            raise HttpError(403, f"the server does not serve the host {host!r:.60}, only {', '.join(hosts)}")
        if self._access.key is not None and request.path != "/health":
            expected = f"Bearer {self._access.key}".encode()
            if not hmac.compare_digest(request.headers.get("authorization", "").encode(), expected):
                raise HttpError(
                    401, "the API key is missing or wrong; send the header Authorization: Bearer KEY"
                )

    async def _health(self) -> HttpResponse:
        engine = self._live.engine
        tokens = {"prefill_tokens": engine.prefill_tokens, "prefill_tokens_reused": engine.reused_tokens}
        return HttpResponse({"status": "ok", "requests": self._open, **tokens})

    async def _models(self) -> HttpResponse:
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "megalith"}
        model["max_model_len"] = self._live.engine.max_tokens
        return HttpResponse({"object": "list", "data": [model, *self._adapters.cards()]})

    async def _change(self, http: HttpRequest, change: Callable[[dict], Awaitable[str]]) -> HttpResponse:
        self._check_json(http)
        return HttpResponse(await change(read_json(http.body)))

    def _check_json(self, http: HttpRequest) -> None:
        content_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type != "application/json":
            raise HttpError(415, f"the content type is {content_type!r:.60}; send application/json")

    async def _complete(self, http: HttpRequest, conversation: Any, is_chat: bool) -> HttpResponse:
        self._check_json(http)
        request = parse_request(read_json(http.body), is_chat)
        self._check(request, conversation)
        self._check_room(request.n)
        try:
            if request.has_ids_only and conversation is self._plain:
                prompts = conversation.open_prompts(request)
            else:
                prompts = await asyncio.to_thread(conversation.open_prompts, request)
        except (ValueError, ConfigError) as error:
            raise HttpError(400, str(error)) from None
        slot, name = self._model(request, conversation)  # again: it may have been unloaded since
        writer = ResponseWriter(request, name, self._tokenizer, [prompt.ids for prompt in prompts])
        arguments = self._live, self._tokenizer, self._chat, conversation, request, prompts
        sampler = _Choices(*arguments, self._relay)
        self._check_room(len(sampler))
        try:
            sampler.submit(slot)
        except ConfigError as error:
            raise HttpError(400, str(error)) from None
        if request.stream:
            parts = self._counted(sampler, self._stream(sampler, writer, request))
            return HttpResponse(first=await anext(parts), parts=parts)
        async for _, choice in self._counted(sampler, aiter(sampler)):
            choice.take()  # the search for stop texts begins there
        return HttpResponse(writer.whole(sampler.choices, sampler.turns))

    def _check_room(self, completions: int) -> None:
        """Raise HttpError if a request of this many completions exceeds `max_requests`, alone (400) or now (429)."""
        most = self._access.max_requests
        if completions > most:
            raise HttpError(
                400,
                f"the request needs {completions} completions, but the server allows {most}; request fewer",
            )
        if self._open + completions > most:
            raise HttpError(
                429,
                f"the request needs {completions} completions, but {self._open} of at most {most} are in progress; try "
                "again later",
            )

    def _check(self, request: CompletionRequest, conversation: Any) -> None:
        self._model(request, conversation)
        if request.is_chat and self._chat is None:
            raise HttpError(400, "the tokenizer has no chat template; use /v1/completions")
        if request.tools and not self._chat.supports_tools:
            raise HttpError(
                400,
                "the chat template uses no tool call format that is built in; start the "
                "server with --tool-call-format",
            )

    def _model(self, request: CompletionRequest, conversation: Any) -> tuple[int, str]:
        """Return the adapter slot and the name of a request's model. Raise HttpError if no model has this name."""
        if conversation is not self._plain:
            return 0, self._name
        slot = self._adapters.slot(request.model)
        if slot is None:
            names = ", ".join([self._name, *self._adapters.names])
            raise HttpError(404, f"there is no model {request.model!r:.60}; the server has {names}")
        return slot, request.model or self._name

    async def _counted(self, sampler: _Choices, parts: AsyncIterator[Any]) -> AsyncGenerator[Any]:
        """Count the choices while they are open. Cancel them if the client disconnects."""
        self._open += len(sampler)
        try:
            async for part in parts:
                yield part
        finally:
            self._open -= len(sampler)
            sampler.cancel()

    async def _stream(
        self, sampler: _Choices, writer: ResponseWriter, request: CompletionRequest
    ) -> AsyncIterator[bytes]:
        """Yield chunks of the choices during sampling. A turn that may call tools is one chunk."""
        count, sent = len(sampler), [0] * len(sampler)
        if request.is_chat:
            for index in range(count):
                yield writer.first_chunk(index)
        async for index, choice in sampler:
            turn = sampler.turns[index]
            if not request.tools:
                text = choice.take()
            else:
                text = "" if turn is None else turn.message.get("content") or ""
            if text:
                yield writer.text_chunk(index, choice, text, sent[index])
                sent[index] = len(choice.ids)
            if choice.reason is not None:
                yield writer.last_chunk(index, choice, turn)
        if request.include_usage:
            yield writer.usage_chunk(sampler.choices)
        yield DONE


class _Choices:
    """The choices of a request in progress. An iterator over (index, choice), with an item per change."""

    def __init__(
        self,
        live: ServedEngine,
        tokenizer: Tokenizer,
        chat: ChatFormat | None,
        conversation: Any,
        request: CompletionRequest,
        prompts: Sequence[Any],
        relay: EventRelay,
    ):
        self._live, self._chat, self._conversation = live, chat, conversation
        self._request, self._prompts = request, prompts
        ends = frozenset() if request.ignore_eos else frozenset(tokenizer.stop_ids)
        stop = request.stop, request.stop_token_ids | ends
        count = len(prompts) * request.n
        self.choices = [ChoiceText(tokenizer, *stop, not request.ignore_eos) for _ in range(count)]
        self.turns: list[ParsedTurn | None] = [None] * count
        is_plain = isinstance(conversation, PlainConversation) and not request.tools
        self._ends_in_thread = not is_plain  # parsing calls, or waiting for a session's lock, may take time
        self._request_ids: list[int] = []
        self._mailbox = relay.mailbox()

    def __len__(self) -> int:
        return len(self.choices)

    def submit(self, adapter: int) -> None:
        """Send the requests to the engine, for the adapter in this slot. Raise ConfigError if a request does
        not fit.
        """
        request, room = self._request, self._live.engine.max_tokens

        # Without a stream and stops of its own, a choice is of interest when it has ended.
        reports_once = not (request.stream or request.stop or request.stop_token_ids)

        def callback(index: int) -> OnTokens:
            return lambda ids, logprobs, reason: self._mailbox.put((index, ids, logprobs, reason))

        for at, prompt in enumerate(self._prompts):
            limit = request.max_tokens or max(1, room - len(prompt.ids))
            indices = range(at * request.n, (at + 1) * request.n)
            requests = [
                replace(
                    self._conversation.live_request(request, prompt, index, limit),
                    adapter=adapter,
                    reports_once=reports_once,
                )
                for index in indices
            ]
            self._request_ids += self._live.submit(requests, list(map(callback, indices)))

    def cancel(self) -> None:
        """Stop sampling the choices that are not finished."""
        for number, choice in zip(self._request_ids, self.choices):
            if choice.reason is None:
                self._live.cancel(number)

    async def __aiter__(self) -> AsyncIterator[tuple[int, ChoiceText]]:
        while any(choice.reason is None for choice in self.choices):
            changed: dict[int, str | None] = {}  # reason of the last event of each choice
            for index, ids, logprobs, reason in merged(await self._mailbox.take()):
                choice = self.choices[index]
                if choice.reason is not None:
                    continue
                if reason == "closed":
                    raise HttpError(503, "the server is shutting down")
                choice.add(ids, logprobs, reason)
                changed[index] = reason
            for index, reason in changed.items():
                choice = self.choices[index]
                if choice.reason is not None:
                    if reason is None:  # a stop of its own, which the engine does not know
                        self._live.cancel(self._request_ids[index])
                    if self._ends_in_thread:
                        await asyncio.to_thread(self._end, index)
                    else:
                        self._end(index)
                yield index, choice

    def _end(self, index: int) -> None:
        choice, prompt = self.choices[index], self._prompts[index // self._request.n]
        if self._chat is not None and self._request.is_chat:
            self.turns[index] = self._chat.parse(choice.text, choice.ids, prompt.ids, self._request.tools)
        self._conversation.end_choice(prompt, choice, self.turns[index])
