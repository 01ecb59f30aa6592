"""Generation with an encoder-decoder. The encoder processes the prompt once; the decoder generates token by token.

The decoder starts with `model.decoder_start_token_id`. The decoder's keys and values are cached; the keys and values of
the encoder's output are recomputed in each pass. With tensor parallelism, every rank has its heads and samples from the
logits of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.comm.collectives import Axis
from megalith.errors import ConfigError
from megalith.generation.engine import OnToken
from megalith.generation.logits_state import LogitsState, UsedParts, token_masks
from megalith.generation.requests import (
    MAX_GENERATIONS,
    Completion,
    RowSequence,
    Sampling,
    check_keys,
    make_sequences,
)
from megalith.models.encoders.t5 import T5
from megalith.models.inputs import TokenInputs
from megalith.models.pass_context import Context, Encoded, PassLayout
from megalith.models.rope import rotary_tables
from megalith.models.transformer import Stack
from megalith.ops.dropout import column_keys, mix, token_keys
from megalith.ops.gumbel import sample
from megalith.parallel.shards import named_shards, to_local_parameters
from megalith.parallel.tensor.apply_tensor import apply_tensor

MAX_ROWS = 64  # concurrent sequences


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
def generate_t5(
    model: T5,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    keys: Sequence[int] | None = None,
    num_generations: int = 1,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """Return `num_generations` completions per prompt, ordered by prompt and then by the completion's index, as
    `Engine.generate` does.

    Sampling in a row depends only on the seed, the prompt's key and the completion's index among those of the prompt.
    The model must be in evaluation mode.

    Raises:
        ConfigError: empty prompt, token outside the vocabulary, more tokens than learned positions, or a setting out of
            range.
    """
    longest, learned = sampling.max_new_tokens, model.config.learns_positions
    if learned and longest > model.config.max_position_embeddings:
        raise ConfigError(
            f"max_new_tokens {longest} exceeds the model's {model.config.max_position_embeddings} learned positions "
            "(model.max_position_embeddings); lower max_new_tokens"
        )
    # Prompt and completion have separate positions.
    room = max(map(len, prompts), default=0) + longest
    config = model.config.model_copy(update={"max_position_embeddings": room})
    sequences = make_sequences(prompts, sampling, num_generations, config, room)
    keys = range(len(prompts)) if keys is None else keys
    check_keys(keys, len(prompts), num_generations)
    for first in range(0, len(sequences), MAX_ROWS):
        _generate_rows(model, sequences[first : first + MAX_ROWS], keys, sampling, on_token)
    return [
        Completion(
            s.prompt_index,
            s.generation,
            s.ids,
            s.logprobs,
            not s.stopped,
            ends_with_stop_id=s.ends_with_stop_id,
        )
        for s in sequences
    ]


def shard_t5(model: T5, tp: Axis, device: torch.device) -> T5:
    """Return this tensor-parallel rank's shard, on `device`, of a complete model that every process holds.

    The shard is in evaluation mode.
    """
    sharded = T5(model.config, compute_dtype=model.compute_dtype, device="meta")
    apply_tensor(sharded, tp, sequence_parallel=False)
    sharded.to_empty(device=device)
    to_local_parameters(sharded)
    sharded.requires_grad_(False)
    weights = model.state_dict()
    for name, shard in named_shards([sharded]).items():
        shard.values.copy_(shard.slice_of(weights[name]))
    return sharded.eval()


def _generate_rows(
    model: T5,
    rows: Sequence[RowSequence],
    keys: Sequence[int],
    sampling: Sampling,
    on_token: OnToken | None,
) -> None:
    """Generate completions for `rows`, all in one batch."""
    device, vocabulary = model.device, model.config.vocab_size
    encoded = _encode(model, [row.prompt for row in rows])
    stream_keys = torch.tensor([keys[row.prompt_index] * MAX_GENERATIONS + row.generation for row in rows])
    noise = token_keys(sampling.seed, stream_keys, torch.zeros(1, dtype=torch.int64))[:, 0].to(device)
    limit = max(row.limit for row in rows)
    position_keys, cache = column_keys(limit, device), GrowingCache()
    start = model.config.decoder_start_token_id
    tokens = torch.full((len(rows),), start, device=device)
    used, state = UsedParts.of(sampling.processing), None
    for position in range(limit):
        hidden = _hidden(model, tokens, position, encoded, cache)
        logits = model.vocabulary_logits(hidden, encoded.context)[:, 0]
        if any(used):
            if state is None:
                entries = logits.shape[1]
                state = LogitsState(len(rows), 0, entries, entries, device)
                state.begin(list(enumerate(rows)), lambda sequence: [start])
            if used.masks:
                state.set_masks(token_masks(rows, entries))
            logits = state.process(logits, used)
        tokens, logprobs = sample(
            logits,
            mix(noise.to(torch.int32) ^ position_keys[position]),
            sampling.temperature,
            vocab_size=min(sampling.vocab_size or vocabulary, vocabulary),
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        if position == 0 and sampling.forced_bos_token_id is not None:
            tokens, logprobs = tokens.fill_(sampling.forced_bos_token_id), logprobs.zero_()
        if state is not None:
            state.count(tokens[:, None], torch.ones_like(tokens, dtype=torch.bool)[:, None], used)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist()):
            if not row.ended:
                row.append([token], [logprob])
                if on_token is not None:
                    on_token(row.prompt_index, row.generation, token)
        if all(row.ended for row in rows):
            return


def _encode(model: T5, prompts: Sequence[Sequence[int]]) -> Encoded:
    """Encode prompts, padded to the longest."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts])
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    real = torch.arange(longest) < lengths[:, None]
    return model.encode(ids.to(model.device), TokenInputs(padding_mask=real.to(model.device)), trains=False)


def _hidden(model: T5, tokens: Tensor, position: int, encoded: Encoded, cache: GrowingCache) -> Tensor:
    """Return the decoder's last hidden states [rows, 1, hidden] for tokens, int64 [rows], at `position`."""
    position_ids = torch.full((len(tokens), 1), position, device=tokens.device)
    context = Context(len(tokens), PassLayout(), position_ids=position_ids, cache=cache, encoded=encoded)
    if model.config.position_embedding_type == "rope":
        context.rotary = rotary_tables(model.config, position_ids, position + 1)
    context.token_index = torch.arange(position + 1, device=tokens.device)
    if model.relative_attention_bias is not None:
        context.bias = model.relative_attention_bias(context.token_index, context.layout)[:, :, -1:]
    return Stack.forward(model, model.embed(tokens[:, None], context), context)
