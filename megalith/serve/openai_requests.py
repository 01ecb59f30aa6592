"""Requests of OpenAI's API: chat completions and completions.

Fields of vLLM's server are accepted too: top_k, min_p, repetition_penalty, bad_words, structured_outputs, ignore_eos,
stop_token_ids, return_token_ids, chat_template_kwargs. An unsupported field is rejected with an error that names it,
unless its value changes nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalith.data.chat.chat_template import REASONING_KEYS
from megalith.data.chat.conversations import unicode_text
from megalith.errors import short_repr
from megalith.serve.http_server import HttpError

MAX_DEPTH = 64  # nested lists and objects of a request
MAX_CHOICES, MAX_STOPS, MAX_PROMPTS, MAX_BIASES = 128, 16, 1024, 1024
MIN_TEMPERATURE = 1e-3  # below, sampling is greedy
CONTAINERS = {dict, list}
SURROGATE = re.compile(rb"\\u[dD]|\xed[\xa0-\xbf]|\x00")
"""Bytes of which a body with an unpaired surrogate contains at least one. Zeros occur in UTF-16 and UTF-32."""

Message = dict[str, Any]


@dataclass(frozen=True)
class CompletionRequest:
    """A request for completions."""

    model: str | None
    messages: list[Message] | None
    """Conversation of a chat completion."""
    prompts: list[str | list[int]]
    """Texts or token ids of a completion."""
    max_tokens: int | None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    json_schema: dict[str, Any] | None = None
    """JSON schema that the texts must follow, from response_format or structured_outputs."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    required_tools: tuple[str, ...] = ()
    """Names of tools, one of which must be called, from tool_choice."""
    template_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def processes_logits(self) -> bool:
        """True if a field changes the logits."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        is_constrained = self.json_schema is not None or bool(self.required_tools)
        return penalties != (1, 0, 0) or bool(self.logit_bias or self.bad_words) or is_constrained

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    @property
    def has_ids_only(self) -> bool:
        """True if all prompts are token ids."""
        return not self.is_chat and not any(isinstance(one, str) for one in self.prompts)


def read_json(body: bytes) -> dict[str, Any]:
    """Return a body's JSON object. Raise HttpError for anything else, and for deep nesting."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HttpError(400, f"the body is not JSON ({type(error).__name__}); send an object") from None
    if not isinstance(value, dict):
        raise HttpError(400, f"the body is a JSON {type(value).__name__}; send an object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        values = (one.values() if isinstance(one, dict) else one for one in level)
        level = [
            each
            for one in values
            if not CONTAINERS.isdisjoint(map(type, one))
            for each in one
            if type(each) in CONTAINERS
        ]
        if not level:
            _check_unicode(body, value)
            return value
    raise HttpError(400, f"the body has more than {MAX_DEPTH} levels of nested lists and objects; send fewer")


def _check_unicode(body: bytes, value: Any) -> None:
    """Raise HttpError if a text of a body has an unpaired surrogate."""
    if SURROGATE.search(body) is None:
        return
    try:
        unicode_text(json.dumps(value, ensure_ascii=False))
    except ValueError as error:
        raise HttpError(400, f"the request is not Unicode text: {error}") from None


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_object_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _is_stop(value: Any) -> bool:
    values = [value] if isinstance(value, str) else value
    return (
        isinstance(values, list)
        and len(values) <= MAX_STOPS
        and all(isinstance(v, str) and v for v in values)
    )


def _is_id_list(value: Any) -> bool:
    return isinstance(value, list) and {int}.issuperset(map(type, value))


def _is_bias(value: Any) -> bool:
    """Return True if a value is a valid `logit_bias` of OpenAI's API: {"token id": number from -100 to 100}."""
    return (
        isinstance(value, dict)
        and len(value) <= MAX_BIASES
        and all(re.fullmatch(r"\d{1,9}", one) for one in value)
        and all(_is_number(bias) and -100 <= bias <= 100 for bias in value.values())
    )


def _is_tool_choice(value: Any) -> bool:
    return value in ("auto", "none", "required") or (
        isinstance(value, dict)
        and value.get("type") == "function"
        and isinstance(value.get("function"), dict)
        and isinstance(value["function"].get("name"), str)
    )


def _is_response_format(value: Any) -> bool:
    kind = value.get("type") if isinstance(value, dict) else None
    schema = value.get("json_schema") if kind == "json_schema" else None
    is_schema = isinstance(schema, dict) and isinstance(schema.get("schema"), dict)
    return kind in ("text", "json_object") or is_schema


def _is_json_output(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"json"} and isinstance(value["json"], dict)


Rule = tuple[Callable[[Any], bool], str]
POSITIVE: Rule = (lambda v: _is_int(v) and 1 <= v < 2**31, "a whole number from 1")
BOOLEAN: Rule = (lambda v: isinstance(v, bool), "true or false")
COMMON: dict[str, Rule] = {
    "model": (lambda v: isinstance(v, str), "text"),
    "max_tokens": POSITIVE,
    "temperature": (lambda v: _is_number(v) and 0 <= v <= 100, "a number from 0 to 100"),
    "top_p": (lambda v: _is_number(v) and 0 < v <= 1, "a number above 0 and at most 1"),
    "top_k": (lambda v: _is_int(v) and -1 <= v < 2**24, "a whole number; 0 or -1 means all tokens"),
    "min_p": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "repetition_penalty": (lambda v: _is_number(v) and 0 < v <= 100, "a number above 0; 1 means off"),
    "presence_penalty": (lambda v: _is_number(v) and -2 <= v <= 2, "a number from -2 to 2"),
    "frequency_penalty": (lambda v: _is_number(v) and -2 <= v <= 2, "a number from -2 to 2"),
    "logit_bias": (_is_bias, f"an object of up to {MAX_BIASES} token ids with biases from -100 to 100"),
    "bad_words": (_is_stop, f"a text or a list of up to {MAX_STOPS} texts, none of them empty"),
    "response_format": (
        _is_response_format,
        'of type text, json_object, or json_schema with {"json_schema": {"name": …, "schema": {…}}}',
    ),
    "structured_outputs": (_is_json_output, '{"json": schema}'),
    "n": (lambda v: _is_int(v) and 1 <= v <= MAX_CHOICES, f"a whole number from 1 to {MAX_CHOICES}"),
    "seed": (lambda v: _is_int(v) and -(2**63) <= v < 2**63, "a whole number of 64 bits"),
    "stop": (_is_stop, f"a text or a list of up to {MAX_STOPS} texts, none of them empty"),
    "stop_token_ids": (_is_id_list, "a list of token ids"),
    "ignore_eos": BOOLEAN,
    "stream": BOOLEAN,
    "stream_options": (lambda v: isinstance(v, dict) and set(v) <= {"include_usage"}, "{include_usage: …}"),
    "return_token_ids": BOOLEAN,
}
CHAT: dict[str, Rule] = COMMON | {
    "messages": (lambda v: _is_object_list(v) and bool(v), "a list of messages"),
    "max_completion_tokens": POSITIVE,
    "logprobs": BOOLEAN,
    "tools": (_is_object_list, "a list of tools"),
    "tool_choice": (
        _is_tool_choice,
        'auto, none, required, or {"type": "function", "function": {"name": …}}',
    ),
    "chat_template_kwargs": (lambda v: isinstance(v, dict), "an object"),
    "parallel_tool_calls": BOOLEAN,
}
TEXT: dict[str, Rule] = COMMON | {
    "prompt": (
        lambda v: bool(_prompts(v)),
        "a text, a list of texts, token ids, or a list of lists of token ids",
    ),
    "logprobs": (
        lambda v: _is_int(v) and v in (0, 1),
        "0 or 1: log-probabilities of other tokens are not returned",
    ),
}
# fields that the server does not support, with the only values that it accepts
FIXED: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "store": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True, False),
}
WITHOUT_EFFECT = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key")


def parse_request(body: Mapping[str, Any], is_chat: bool) -> CompletionRequest:
    """Parse the JSON body of a request.

    Raises:
        HttpError: naming the field that is absent, malformed or not supported.
    """
    rules, values = CHAT if is_chat else TEXT, {}
    for name, value in body.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in FIXED:
            if value not in FIXED[name]:
                raise HttpError(400, f"{name} {short_repr(value)} is not supported; leave {name} out")
            continue
        if name not in rules:
            raise HttpError(400, f"{name!r:.60} is not a field of this request; remove it")
        is_valid, rule = rules[name]
        if not is_valid(value):
            raise HttpError(400, f"{name} is {short_repr(value)}; it must be {rule}")
        values[name] = value
    needed = "messages" if is_chat else "prompt"
    if needed not in values:
        raise HttpError(400, f"{needed} is missing; add {needed}")
    temperature = float(values.get("temperature", 1.0))
    texts = {name: values.get(name, ()) for name in ("stop", "bad_words")}
    texts = {name: (value,) if isinstance(value, str) else tuple(value) for name, value in texts.items()}
    tools, choice = values.get("tools", []), values.get("tool_choice", "auto")
    schema = _json_schema(values)
    required = _required_tools(tools, choice)
    if required and schema is not None:
        raise HttpError(
            400, "tool_choice requires a call, but response_format requires JSON; leave one of them out"
        )
    return CompletionRequest(
        model=values.get("model"),
        messages=[_message(number, one) for number, one in enumerate(values["messages"])]
        if is_chat
        else None,
        prompts=[] if is_chat else _prompts(values["prompt"]),
        max_tokens=values.get("max_completion_tokens", values.get("max_tokens")),
        temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
        top_k=max(0, values.get("top_k", 0)),
        top_p=values.get("top_p", 1.0),
        min_p=values.get("min_p", 0.0),
        n=values.get("n", 1),
        seed=values.get("seed"),
        **texts,
        repetition_penalty=float(values.get("repetition_penalty", 1.0)),
        presence_penalty=float(values.get("presence_penalty", 0.0)),
        frequency_penalty=float(values.get("frequency_penalty", 0.0)),
        logit_bias=tuple((int(token), float(bias)) for token, bias in values.get("logit_bias", {}).items()),
        json_schema=schema,
        stop_token_ids=frozenset(values.get("stop_token_ids", ())),
        ignore_eos=values.get("ignore_eos", False),
        stream=values.get("stream", False),
        include_usage=bool(values.get("stream_options", {}).get("include_usage")),
        logprobs=values.get("logprobs", False) is not False,
        return_token_ids=values.get("return_token_ids", False),
        tools=[] if choice == "none" else tools,
        required_tools=required,
        template_arguments=values.get("chat_template_kwargs", {}),
    )


def _json_schema(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the JSON schema that the texts must follow, or None for any text."""
    wanted, outputs = values.get("response_format", {"type": "text"}), values.get("structured_outputs")
    if outputs is not None and wanted["type"] != "text":
        raise HttpError(400, "response_format and structured_outputs are both given; leave one of them out")
    if outputs is not None:
        return outputs["json"]
    return (
        {"type": "object"} if wanted["type"] == "json_object" else wanted.get("json_schema", {}).get("schema")
    )


def _required_tools(tools: list[dict[str, Any]], choice: Any) -> tuple[str, ...]:
    """Return the names of the tools of which `tool_choice` requires a call, or none if no call is required."""
    if choice in ("auto", "none"):
        return ()
    functions = [tool.get("function") for tool in tools]
    names = [one.get("name") for one in functions if isinstance(one, dict)]
    wanted = names if choice == "required" else [choice["function"]["name"]]
    if not wanted or not all(isinstance(name, str) and name in names for name in wanted):
        raise HttpError(
            400,
            f"tool_choice is {short_repr(choice)}, but tools has no such function; add the function, or change "
            "tool_choice",
        )
    return tuple(wanted)


def _prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts in a field `prompt`, or an empty list if it is malformed."""
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id_list(value)):
        return [value] if value else []
    if not isinstance(value, list) or len(value) > MAX_PROMPTS:
        return []
    return value if all(bool(v) and (isinstance(v, str) or _is_id_list(v)) for v in value) else []


def _message(number: int, value: Message) -> Message:
    """Return a message for the chat template, with content as text and tool call arguments as objects."""
    where = f"messages[{number}]"
    role = value.get("role")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise HttpError(
            400, f"{where}.role is {short_repr(role)}; it must be system, user, assistant or tool"
        )
    content = value.get("content")
    if isinstance(content, list):
        parts = [
            one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None
            for one in content
        ]
        if None in parts:
            raise HttpError(
                400, f"{where}.content has a part that is not text, which the model cannot read; send text"
            )
        content = "".join(parts)
    if not isinstance(content, str | None):
        raise HttpError(400, f"{where}.content is {short_repr(content)}; it must be text")
    message = {"role": "system" if role == "developer" else role, "content": content or ""}
    for name in ("name", "tool_call_id", *REASONING_KEYS):
        if isinstance(value.get(name), str):
            message[name] = value[name]
    if value.get("tool_calls"):
        message["tool_calls"] = [_tool_call(where, one) for one in _list(where, value["tool_calls"])]
    return message


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise HttpError(400, f"{where}.tool_calls is {short_repr(value)}; it must be a list")
    return value


def _tool_call(where: str, value: Any) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise HttpError(
            400, f"{where}.tool_calls has {short_repr(value)}; it must have a function with a name"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise HttpError(
                400, f"{where}.tool_calls has arguments that are not JSON: {short_repr(arguments)}"
            ) from None
    return {
        "id": value.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
