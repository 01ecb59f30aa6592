"""Answers of an encoder-decoder: the encoder reads a prompt once, and the decoder writes a token at a time.

The decoder begins with BEGIN, as T5's do. Its keys and values are kept from token to token; those of the encoder's
tokens are made anew in each pass. Of a model over a tensor-parallel axis every rank has its heads and samples from the
logits of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.data.pairs import BEGIN
from megalith.errors import ConfigError
from megalith.generation.engine import OnToken, named_shards
from megalith.generation.requests import (
    MOST_GENERATIONS,
    Completion,
    RowSequence,
    Sampling,
    check_keys,
    sequences_of,
)
from megalith.models.encoders.t5 import T5
from megalith.models.pass_context import Context, Encoded, PassLayout
from megalith.models.rope import rotary_tables
from megalith.models.transformer import Stack
from megalith.ops.dropout import column_keys, mix, token_keys
from megalith.ops.gumbel import sample
from megalith.parallel.shards import to_local_parameters
from megalith.parallel.tensor.tensor_parallel import apply_tensor

MOST_ROWS = 64  # sequences under way at a time


@dataclass
class GrowingCache:
    """Keys and values [rows, seq, groups, head_dim] of all tokens so far, by layer."""

    layers: dict[int, list[Tensor]] = field(default_factory=dict)
    number: int = 0

    def at_layer(self, number: int) -> GrowingCache:
        return GrowingCache(self.layers, number)

    def attend(self, core: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, **how) -> Tensor:
        before = self.layers.get(self.number)
        if before is not None:
            key, value = (torch.cat(both, dim=1) for both in zip(before, (key, value)))
        self.layers[self.number] = [key, value]
        return core(query, key, value, **how)


@torch.no_grad()
def answers(
    model: T5,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    keys: Sequence[int] | None = None,
    num_generations: int = 1,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """As Engine.generate: `num_generations` answers to each prompt, ordered by prompt, then generation. A row's choices
    follow from the seed, its prompt's key and its number alone. The model is in evaluation mode.

    Raises ConfigError for an empty prompt, a token outside the vocabulary, more tokens than the model has learned
    positions, or settings out of range.
    """
    longest, learned = sampling.max_new_tokens, model.config.learns_positions
    if learned and longest > model.config.max_position_embeddings:
        raise ConfigError(
            f"max_new_tokens {longest} are more than the {model.config.max_position_embeddings} learned positions of "
            "the model (model.max_position_embeddings); lower it"
        )
    room = max(map(len, prompts), default=0) + longest
    apart = model.config.model_copy(
        update={"max_position_embeddings": room}
    )  # prompt and answer have each their own
    sequences = sequences_of(prompts, sampling, num_generations, apart, room)
    keys = range(len(prompts)) if keys is None else keys
    check_keys(keys, len(prompts), num_generations)
    for first in range(0, len(sequences), MOST_ROWS):
        _answer(model, sequences[first : first + MOST_ROWS], keys, sampling, on_token)
    return [Completion(s.prompt_index, s.generation, s.ids, s.logprobs, not s.stopped) for s in sequences]


def rank_copy(model: T5, tp: Axis, device: torch.device) -> T5:
    """A tensor-parallel rank's part of a model that every process has whole, on `device`, in evaluation mode."""
    part = T5(model.config, compute_dtype=model.compute_dtype, device="meta")
    apply_tensor(part, tp, sequence_parallel=False)
    part.to_empty(device=device)
    to_local_parameters(part)
    part.requires_grad_(False)
    whole = model.state_dict()
    for name, shard in named_shards([part]).items():
        shard.values.copy_(shard.slice_of(whole[name]))
    return part.eval()


def _answer(
    model: T5,
    rows: Sequence[RowSequence],
    keys: Sequence[int],
    sampling: Sampling,
    on_token: OnToken | None,
) -> None:
    """Fills these sequences, all at once."""
    device, vocabulary = model.device, model.config.vocab_size
    encoded = _encoded(model, [row.prompt for row in rows])
    numbers = torch.tensor([keys[row.prompt_index] * MOST_GENERATIONS + row.generation for row in rows])
    noise = token_keys(sampling.seed, numbers, torch.zeros(1, dtype=torch.int64))[:, 0].to(device)
    limit = max(row.limit for row in rows)
    places, cache = column_keys(limit, device), GrowingCache()
    tokens = torch.full((len(rows),), BEGIN, device=device)
    for place in range(limit):
        hidden = _hidden(model, tokens, place, encoded, cache)
        tokens, logprobs = sample(
            model.vocabulary_logits(hidden, encoded.context)[:, 0],
            mix(noise.to(torch.int32) ^ places[place]),
            sampling.temperature,
            vocab_size=min(sampling.vocab_size or vocabulary, vocabulary),
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist()):
            if not row.ended:
                row.ids.append(token)
                row.logprobs.append(logprob)
                if on_token is not None:
                    on_token(row.prompt_index, row.generation, token)
        if all(row.ended for row in rows):
            return


def _encoded(model: T5, prompts: Sequence[Sequence[int]]) -> Encoded:
    """What the encoder makes of these prompts, filled up to the longest."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[BEGIN] * (longest - len(prompt))] for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    real = torch.arange(longest) < lengths[:, None]
    return model.encode(ids.to(model.device), real.to(model.device), trains=False)


def _hidden(model: T5, tokens: Tensor, place: int, encoded: Encoded, cache: GrowingCache) -> Tensor:
    """The decoder's last hidden states [rows, 1, hidden] of tokens int64 [rows] that stand at `place`."""
    position_ids = torch.full((len(tokens), 1), place, device=tokens.device)
    context = Context(len(tokens), PassLayout(), position_ids=position_ids, cache=cache, encoded=encoded)
    if model.config.position_embedding_type == "rope":
        context.rotary = rotary_tables(model.config, position_ids, place + 1)
    if model.relative_attention_bias is not None:
        before = torch.arange(place + 1, device=tokens.device)
        context.bias = model.relative_attention_bias(before, context.layout)[:, :, -1:]
    return Stack.forward(model, model.embed(tokens[:, None], context), context)
