"""Text from a model: one token at a time, with a cache of the keys and values already computed.

Prompts of different lengths go side by side without padding. The batch starts at the shortest prompt's length; where
a longer prompt still has a token, that token stands in place of the sampled one. So positions and the cache are the
same for every row, and a row's result does not depend on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.models.pass_context import KVCache
from megalith.models.rope import changes_frequencies


class LanguageModel(Protocol):
    """What generation needs of a model: a Transformer has it, and so has the ParallelModel of any layout."""

    config: ModelConfig

    @property
    def device(self) -> torch.device: ...

    def eval(self) -> Any: ...

    def __call__(self, input_ids: Tensor, *, cache: KVCache | None) -> Tensor:
        """Logits [batch, seq, vocab] of int64 [batch, seq]."""


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eod: int | None = None,
    vocab_size: int | None = None,
    use_cache: bool = True,
) -> list[list[int]]:
    """Each prompt with up to `max_new_tokens` tokens behind it; a row ends before its first `eod`.

    temperature 0 takes the likeliest token. top_k keeps the k likeliest tokens (0: all); top_p keeps the likeliest
    ones that together reach this probability (Holtzman et al. 2020). Row i draws from a generator of its own, made of
    (seed, i). Only the first `vocab_size` ids are sampled, where a model has more rows than its tokenizer has entries
    (default: all of the model's). Every rank of a parallel model calls it alike and gets every row. The model is left
    in evaluation mode.
    Raises ConfigError for an empty prompt, a token outside the vocabulary, more tokens than the model has positions,
    or sampling settings out of range.
    """
    _check(model, prompts, max_new_tokens, temperature, top_k, top_p, seed)
    model.eval()
    ends = [len(prompt) + max_new_tokens for prompt in prompts]
    tokens = torch.zeros(len(prompts), max(ends), dtype=torch.int64, device=model.device)  # [batch, longest]
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    generators = [torch.Generator().manual_seed(seed * 2**20 + row) for row in range(len(prompts))]
    cache = KVCache(max(ends)) if use_cache else None
    finished = [False] * len(prompts)
    seen = 0
    for length in range(min(map(len, prompts)), max(ends)):
        if cache is not None and changes_frequencies(model.config, seen, length):
            seen = cache.length = 0  # the keys that are there were turned by other angles
        logits = (
            model(tokens[:, seen:length], cache=cache)[:, -1, :vocab_size].float().cpu()
        )  # [batch, vocab]
        seen = length if use_cache else 0
        for row, prompt in enumerate(prompts):
            if length < len(prompt) or length >= ends[row] or finished[row]:
                continue
            token = sample(logits[row], temperature, top_k, top_p, generators[row])
            if token == eod:
                finished[row], ends[row] = True, length
            else:
                tokens[row, length] = token
        if all(done or length + 1 >= end for done, end in zip(finished, ends)):
            break
    return [tokens[row, :end].tolist() for row, end in enumerate(ends)]


def sample(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token from float32 logits [vocab]."""
    if temperature == 0:
        return int(logits.argmax())
    logits, tokens = logits.double().sort(descending=True, stable=True)
    logits = (logits - logits[0]) / temperature  # at most 0, so that no temperature is too low
    if top_k:
        logits = logits[:top_k]
    probabilities = logits.softmax(-1)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities  # of all likelier tokens
        probabilities = torch.where(before < top_p, probabilities, 0.0)
    return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


def _check(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
) -> None:
    config = model.config
    for name, value, fits, rule in (
        ("max_new_tokens", max_new_tokens, max_new_tokens >= 1, "at least 1"),
        ("temperature", temperature, temperature >= 0, "0 (the likeliest token) or more"),
        ("top_k", top_k, top_k >= 0, "0 (all tokens) or more"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1"),
        ("seed", seed, 0 <= seed < 2**32, "from 0 to 2^32 - 1"),
        ("the number of prompts", len(prompts), len(prompts) > 0, "at least 1"),
    ):
        if not fits:
            raise ConfigError(f"{name} is {value}; it has to be {rule}")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {number} has no tokens; give it at least one")
        for token in prompt:
            if not 0 <= token < config.vocab_size:
                raise ConfigError(
                    f"prompt {number} has token {token}, but the model's vocabulary has {config.vocab_size}; "
                    "use the tokenizer that the model was trained with"
                )
        longest = len(prompt) + max_new_tokens
        if longest > config.max_position_embeddings:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens and {max_new_tokens} are to follow, {longest} in all, but "
                f"the model has {config.max_position_embeddings} positions; lower max_new_tokens or shorten it"
            )
