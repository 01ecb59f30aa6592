"""Prompts continued by a model as it stands: one call, in whatever layout the model is.

An engine (engine.py) runs a Transformer as it is. Of another layout, or where weights are fp32 and the arithmetic is
not, it gets a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from megalith.comm.collectives import gather_json
from megalith.errors import ConfigError
from megalith.generation.answers import MOST_ROWS, answers, rank_copy
from megalith.generation.engine import Engine, OnToken
from megalith.generation.requests import Completion, Sampling
from megalith.generation.sync import engine_for
from megalith.models.encoders.t5 import T5
from megalith.models.transformer import Transformer
from megalith.parallel.mesh import Mesh
from megalith.parallel.parallel_model import ParallelModel


def generate(
    model: Transformer | ParallelModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eod: int | None = None,
    vocab_size: int | None = None,
) -> list[list[int]]:
    """Each prompt with up to `max_new_tokens` tokens behind it; a row ends before its first `eod`. Of an
    encoder-decoder the answers to the prompts alone.

    temperature 0 takes the likeliest token. top_k keeps the k likeliest tokens (0: all); top_p keeps the likeliest
    ones that together reach this probability (Holtzman et al. 2020). Row i's choices follow from (seed, i) alone. Only
    the first `vocab_size` ids are sampled, where a model has more rows than its tokenizer has entries (default: all of
    the model's). Every rank of a parallel model calls it alike and gets every row. The model is left in evaluation
    mode.
    Raises ConfigError for an empty prompt, a token outside the vocabulary, more tokens than the model has positions,
    or sampling settings out of range.
    """
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=() if eod is None else (eod,),
        vocab_size=vocab_size,
    )
    shown = [()] * len(prompts) if isinstance(model, T5) else prompts
    return [
        [*shown[done.prompt], *(done.ids if done.truncated else done.ids[:-1])]
        for done in complete(model, prompts, sampling)
    ]


def complete(
    model: Transformer | ParallelModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_generations: int = 1,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """As Engine.generate, by an engine that is made for this call and that compiles nothing."""
    sampling.check()
    if not prompts:
        raise ConfigError("the number of prompts is 0; it has to be at least 1")
    rows = min(len(prompts) * num_generations, MOST_ROWS)
    room = dict(max_rows=rows, max_tokens=max(map(len, prompts)) + sampling.max_new_tokens)
    model.eval()
    if isinstance(model, T5):
        return answers(model, prompts, sampling, num_generations=num_generations, on_token=on_token)
    if isinstance(model, Transformer) and (model.compute_dtype == torch.float32 or model.has_adapters):
        engine = Engine(model.config, model.device, model.compute_dtype, **room, model=model, graphs=False)
    else:
        engine = engine_for(model, **room, compile=False)
    return engine.generate(prompts, sampling, num_generations=num_generations, on_token=on_token)


def complete_in_shares(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    mesh: Mesh,
    device: torch.device,
    num_generations: int = 1,
    on_token: OnToken | None = None,
) -> list[Completion]:
    """As `complete`, of a model that every process has whole on the host, on `device`s over a mesh of tensor and data
    parallelism: each replica takes its share of the prompts. All completions on the first rank, nothing on the others.
    """
    if model.has_adapters:
        raise ConfigError(
            "the model has adapters, which one process runs alone; merge them (megalith lora merge)"
        )
    replica = mesh.dp.rank
    own = range(replica, len(prompts), mesh.dp.size)
    if isinstance(model, T5):
        completes = partial(answers, rank_copy(model, mesh.tp, device))
    else:
        room = max(map(len, prompts)) + sampling.max_new_tokens
        rows = max(1, min(len(own) * num_generations, MOST_ROWS))
        options = dict(max_rows=rows, max_tokens=room, tp=mesh.tp, compile=False)
        engine = Engine(model.config, device, model.compute_dtype, **options)
        engine.load(model.state_dict().items())
        completes = engine.generate
    done = completes(
        [prompts[number] for number in own],
        sampling,
        keys=own,
        num_generations=num_generations,
        on_token=on_token,
    )
    found = [[own[each.prompt], each.generation, each.ids, each.logprobs, each.truncated] for each in done]
    shares = gather_json(found if mesh.tp.rank == 0 else [], mesh.world, to_first=True)
    return [Completion(*fields) for fields in sorted(fields for share in shares for fields in share)]
