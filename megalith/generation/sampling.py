"""Generation from a model in any layout in one call.

An engine (engine.py) runs a Transformer in place. If the model has another layout, or fp32 weights and a lower compute
precision, the engine gets a copy of the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from megalith.comm.collectives import gather_json
from megalith.errors import ConfigError
from megalith.generation.encoder_decoder import MAX_ROWS, generate_t5, shard_t5
from megalith.generation.engine import Engine, OnToken
from megalith.generation.logits_processing import LogitsProcessing
from megalith.generation.requests import Completion, Sampling
from megalith.generation.speculation import DraftMetrics, Speculation
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
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    forced_bos_token_id: int | None = None,
) -> list[list[int]]:
    """Generate a completion for each prompt.

    The completion of prompt i depends only on `seed` and i. With a parallel model, every rank must make the same call
    and gets all results. The model is left in evaluation mode.

    Args:
        model: a decoder or an encoder-decoder, on one device or parallel.
        prompts: token ids of each prompt.
        max_new_tokens: maximum length of a completion.
        temperature: divisor of the logits. 0 always takes the most likely token.
        top_k: sample from the k most likely tokens. 0 turns it off.
        top_p: sample from the most likely tokens that together have this probability (Holtzman et al. 2020).
        seed: seed of the samples.
        eod: token that ends a completion. It is not included in the result.
        vocab_size: sample only ids below this. Set it if the embedding has more rows than the tokenizer has entries.
            Default: all ids.
        repetition_penalty: divides positive logits of tokens in the prompt or completion, and multiplies negative ones.
            1 turns it off.
        presence_penalty: subtracted from the logits of tokens in the completion.
        frequency_penalty: multiplied by a token's number of occurrences in the completion, and subtracted from its
            logit.
        forced_bos_token_id: first token of an encoder-decoder's completions, such as mBART's target language. Default:
            the model chooses it.

    Returns:
        Token ids of each prompt with its completion; for an encoder-decoder the completion only.

    Raises:
        ConfigError: a prompt is empty, a token is outside the vocabulary, there are more tokens than the model has
            positions, or a setting is out of range.
    """
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=() if eod is None else (eod,),
        vocab_size=vocab_size,
        processing=LogitsProcessing(repetition_penalty, presence_penalty, frequency_penalty),
        forced_bos_token_id=forced_bos_token_id,
    )
    prefixes = [()] * len(prompts) if isinstance(model, T5) else prompts
    return [[*prefixes[done.prompt], *done.content] for done in complete(model, prompts, sampling)]


def complete(
    model: Transformer | ParallelModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    num_generations: int = 1,
    on_token: OnToken | None = None,
    speculation: Speculation | None = None,
    on_draft_metrics: Callable[[DraftMetrics], None] | None = None,
) -> list[Completion]:
    """Complete prompts as `Engine.generate` does, with an uncompiled engine that is built for this call.

    `on_draft_metrics` is called with the counts of speculative decoding, if it is on.
    """
    sampling.check()
    _check_speculation(model, speculation)
    if not prompts:
        raise ConfigError("the number of prompts is 0; it must be at least 1")
    rows = min(len(prompts) * num_generations, MAX_ROWS)
    room = dict(max_rows=rows, max_tokens=max(map(len, prompts)) + sampling.max_new_tokens)
    model.eval()
    if isinstance(model, T5):
        return generate_t5(model, prompts, sampling, num_generations=num_generations, on_token=on_token)
    if isinstance(model, Transformer) and (model.compute_dtype == torch.float32 or model.has_adapters):
        engine = Engine(
            model.config,
            model.device,
            model.compute_dtype,
            **room,
            model=model,
            graphs=False,
            speculation=speculation,
        )
    else:
        engine = engine_for(model, **room, compile=False, speculation=speculation)
    done = engine.generate(prompts, sampling, num_generations=num_generations, on_token=on_token)
    if speculation is not None and on_draft_metrics is not None:
        on_draft_metrics(engine.take_draft_metrics())
    return done


def _check_speculation(model: Transformer | ParallelModel, speculation: Speculation | None) -> None:
    if isinstance(model, T5) and speculation is not None:
        raise ConfigError(
            f"speculative_method is {speculation.method}, but the model is an encoder-decoder, and only decoders can "
            "verify drafts; set speculative_method to none"
        )


def complete_data_parallel(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    mesh: Mesh,
    device: torch.device,
    num_generations: int = 1,
    on_token: OnToken | None = None,
    speculation: Speculation | None = None,
) -> list[Completion]:
    """Complete prompts as `complete` does, with tensor and data parallelism over the processes' devices.

    Every process holds the model in host memory.

    Each replica completes a share of the prompts. Rank 0 returns all completions, other ranks none.
    """
    if model.has_adapters:
        raise ConfigError(
            "models with adapters generate only in a single process; merge the adapters first (megalith lora merge)"
        )
    _check_speculation(model, speculation)
    local = range(mesh.dp.rank, len(prompts), mesh.dp.size)
    if isinstance(model, T5):
        run = partial(generate_t5, shard_t5(model, mesh.tp, device))
    else:
        room = max(map(len, prompts)) + sampling.max_new_tokens
        rows = max(1, min(len(local) * num_generations, MAX_ROWS))
        options = dict(max_rows=rows, max_tokens=room, tp=mesh.tp, compile=False, speculation=speculation)
        engine = Engine(model.config, device, model.compute_dtype, **options)
        engine.load(model.state_dict().items())
        run = engine.generate
    done = run(
        [prompts[number] for number in local],
        sampling,
        keys=local,
        num_generations=num_generations,
        on_token=on_token,
    )
    records = [
        [local[each.prompt], each.generation, each.ids, each.logprobs, each.truncated, each.ends_with_stop_id]
        for each in done
    ]
    shares = gather_json(records if mesh.tp.rank == 0 else [], mesh.world, to_first=True)
    return [
        Completion(*fields, ends_with_stop_id=ends_with_stop_id)
        for *fields, ends_with_stop_id in sorted(fields for share in shares for fields in share)
    ]
