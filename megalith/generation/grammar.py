"""Grammars of completions: JSON, and JSON that follows a schema. They need llguidance, an optional dependency.

A grammar is compiled once per tokenizer. Each completion has a matcher of its own, which determines the tokens that may
follow and ends the completion when nothing can follow.
"""

from __future__ import annotations

import json
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from megalith.data.tokenizers.huggingface import RustTokenizer
from megalith.data.tokenizers.plain import ByteTokenizer
from megalith.data.tokenizers.tiktoken import TikTokenizer
from megalith.data.tokenizers.tokenizer import Tokenizer
from megalith.errors import ConfigError, install_line

ANY_OBJECT = {"type": "object"}
CACHED_GRAMMARS = 64


def json_grammar(schema: dict[str, Any]) -> str:
    """Return the source of a grammar for JSON values that follow a schema.

    Raises:
        ConfigError: if llguidance is not installed, or the schema is not valid.
    """
    matcher = _llguidance().LLMatcher
    try:
        return matcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError as error:
        raise ConfigError(f"the JSON schema is not valid ({error}); correct it") from None


def call_grammar(before: str, schema: dict[str, Any], after: str) -> str:
    """Return the source of a grammar, in llguidance's Lark syntax, for a JSON value between two texts.

    The value follows `schema`. `before` and `after` are special tokens, written `<name>`, quoted texts, or sequences of
    these.
    """
    return _llguidance().LLMatcher.grammar_from_lark(
        f"start: {before} call {after}\ncall: %json {json.dumps(schema)}"
    )


class GrammarCompiler:
    """Compiles grammars into masks of a tokenizer's tokens."""

    def __init__(self, tokenizer: Tokenizer):
        """Prepare to compile grammars for a tokenizer. The tokenizer is loaded when the first grammar is compiled."""
        self._tokenizer = tokenizer
        self._cached = lru_cache(CACHED_GRAMMARS)(self._compile)

    def compile(self, source: str) -> CompiledGrammar:
        """Compile a grammar from its source, such as a result of `json_grammar`.

        Raises:
            ConfigError: if the source is not valid or uses a feature that llguidance does not support, if llguidance is
                not installed, or if llguidance does not support this kind of tokenizer.
        """
        return self._cached(source)

    @cached_property
    def _tokens(self) -> Any:
        return _tokens_of(self._tokenizer)

    def _compile(self, source: str) -> CompiledGrammar:
        matcher = _llguidance().LLMatcher(self._tokens, source, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().splitlines()[0]
            raise ConfigError(f"the grammar is not supported ({reason}); change the JSON schema")
        return CompiledGrammar(source, matcher, self._tokenizer.vocab_size)


class CompiledGrammar:
    """A grammar compiled for a tokenizer. Each completion gets its own `matcher`."""

    def __init__(self, source: str, matcher: Any, vocab_size: int):
        self.source, self._matcher, self._vocab_size = source, matcher, vocab_size

    def matcher(self) -> GrammarMatcher:
        """Return a matcher for a new completion."""
        return GrammarMatcher(self._matcher.deep_copy(), self._vocab_size)


class GrammarMatcher:
    """Tracks the tokens that may follow in one completion."""

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._allowed = np.zeros(-(-vocab_size // 32), dtype=np.int32)

    def restrict(self, words: np.ndarray) -> None:
        """Clear the bits in `words` of tokens that the grammar does not allow next."""
        self._matcher.unsafe_compute_mask_ptr(self._allowed.ctypes.data, self._allowed.nbytes)
        count = len(self._allowed)
        words[:count] &= self._allowed[: len(words)]
        words[count:] = 0

    def advance(self, token: int) -> None:
        """Record the token that was sampled."""
        self._matcher.consume_token(token)

    @property
    def is_finished(self) -> bool:
        """True if the grammar allows no further token."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def has_failed(self) -> bool:
        """True if no token is allowed although the grammar is not finished, for example after reaching a limit of
        llguidance.
        """
        return self._matcher.is_error()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            f"grammars and JSON schemas need the llguidance package, which is not installed; run: "
            f"{install_line('grammar')}"
        ) from error
    return llguidance


def _tokens_of(tokenizer: Tokenizer) -> Any:
    """Return the tokenizer in llguidance's format."""
    llguidance, sizes = _llguidance(), dict(n_vocab=tokenizer.vocab_size, eos_token=tokenizer.eod)
    if isinstance(tokenizer, RustTokenizer):
        return llguidance.LLTokenizer(tokenizer.to_json(), **sizes)
    if isinstance(tokenizer, TikTokenizer):
        from llguidance.tiktoken import lltokenizer_from_encoding

        return lltokenizer_from_encoding(tokenizer.encoding, **sizes)
    if isinstance(tokenizer, ByteTokenizer):
        return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(tokenizer)), **sizes)
    raise ConfigError(
        f"grammars do not support {tokenizer.tokenizer_type}; use HuggingFaceTokenizer, a tiktoken tokenizer or "
        "ByteTokenizer"
    )


class _Bytes:
    """Adapts a ByteTokenizer to the interface of llguidance's TokenizerWrapper."""

    def __init__(self, tokenizer: ByteTokenizer):
        self.eos_token_id, self.bos_token_id = tokenizer.eod, None
        self.tokens = [bytes([value]) for value in range(256)] + [b"<eod>"]
        self.special_token_ids = [tokenizer.eod]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
