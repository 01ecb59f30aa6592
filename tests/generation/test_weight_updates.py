"""Weights that change between two steps: versions of tokens, and keys and values that are kept or computed again."""

from types import SimpleNamespace

import pytest
import torch
from generation.brief_training import chains, scored, trained_model
from generation.engine_job import updated_over_ranks

from megalith.errors import ConfigError
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.requests import Sampling
from megalith.generation.speculation import Speculation
from megalith.generation.sync import engine_for, sync
from megalith.models.mixers.attention import Attention
from megalith.ops.attention_core import attention
from megalith.parallel.seams import plug

PROMPTS = [row[:length].tolist() for row, length in zip(chains(5, 40, 99), [1, 4, 9, 30, 17])]
TEMPERATURE, TOKENS = 0.7, 20


@pytest.fixture(scope="module")
def models():
    return trained_model(steps=24)[0], trained_model(steps=12)[0]


def completions_with_an_update(models, kv_cache: str, **options) -> list[SimpleNamespace]:
    """Of every prompt by three rows, whose weights are the second model's after the first prompt has seven tokens."""
    engine = engine_for(models[0], max_rows=3, max_tokens=80, **options)
    assert engine.version == 1
    live = LiveEngine(
        engine, load_weights=lambda version: engine.load(models[version - 1].state_dict().items())
    )
    done = [SimpleNamespace(prompt=n, ids=[], logprobs=[], versions=[]) for n in range(len(PROMPTS))]
    still_open = set(range(len(PROMPTS)))

    def callback(number: int):
        def on_tokens(ids, logprobs, reason):
            one = done[number]
            one.ids += ids
            one.logprobs += logprobs
            one.versions += [live.sampled_version] * len(ids)
            if number == 0 and len(one.ids) >= 7 and one.versions[-1] == 1:
                live.update_weights(2, kv_cache)
            if reason is not None:
                still_open.remove(number)
            if not still_open:
                live.close()

        return on_tokens

    for number, prompt in enumerate(PROMPTS):
        live.submit([LiveRequest(prompt, TOKENS, TEMPERATURE, seed=4, key=number)], [callback(number)])
    live.run()
    assert engine.version == 2
    return done


@torch.no_grad()
def mixed_logprobs(models, prompt: list[int], ids: list[int], count: int) -> torch.Tensor:
    """The second model's log-probabilities of all ids, if the first one's keys and values of the first `count` tokens
    are in place of its own."""
    recorded: list = []

    def record(query, key, value, **how):
        recorded.append((key[:, :count], value[:, :count]))
        return attention(query, key, value, **how)

    def replace(query, key, value, **how):
        old_key, old_value = recorded.pop(0)
        key, value = torch.cat([old_key, key[:, count:]], 1), torch.cat([old_value, value[:, count:]], 1)
        return attention(query, key, value, **how)

    tokens = torch.tensor([[*prompt, *ids]])
    for model, core in zip(models, (record, replace)):
        mixers = [module for module in model.modules() if isinstance(module, Attention)]
        for mixer in mixers:
            plug(mixer, "core", core)
        logits = model(tokens)
        for mixer in mixers:
            plug(mixer, "core", attention)
    logprobs = (logits[0, len(prompt) - 1 : -1, : model.config.vocab_size].float() / TEMPERATURE).log_softmax(
        -1
    )
    return logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0]


@pytest.mark.parametrize("options", [{}, dict(speculation=Speculation("ngram", 2))], ids=["plain", "drafts"])
@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_tokens_after_an_update_are_the_new_models(models, kv_cache, options):
    done = completions_with_an_update(models, kv_cache, **options)
    before = engine_for(models[0], max_rows=3, max_tokens=80).generate(
        PROMPTS, Sampling(TOKENS, TEMPERATURE, seed=4)
    )
    switched = 0
    for one, other in zip(done, before):
        count = one.versions.count(1)
        assert one.versions == [1] * count + [2] * (TOKENS - count)
        switched += 0 < count < TOKENS
        if one.prompt == 0:  # the only one whose key is that of the batch call
            assert one.ids[:count] == other.ids[:count]
        found, prompt = torch.tensor(one.logprobs), PROMPTS[one.prompt]
        first = scored(models[0], PROMPTS, [one], TEMPERATURE)
        assert (found[:count] - first[:count]).abs().max() <= 1e-4 if count else True
        kept = len(prompt) + count - 1 if count and kv_cache == "keep" else 0
        second = mixed_logprobs(models, prompt, one.ids, kept)
        assert (found[count:] - second[count:]).abs().max() <= 1e-4
    assert switched >= 3


def test_kept_keys_and_values_give_other_tokens_than_those_computed_again(models):
    kept, again = (completions_with_an_update(models, kv_cache) for kv_cache in ("keep", "recompute"))
    assert [one.versions for one in kept] == [one.versions for one in again]
    assert any(a.logprobs[-5:] != b.logprobs[-5:] for a, b in zip(kept, again))


def test_a_sync_between_the_tokens_of_a_batch_call_is_seen_in_the_versions(models):
    model = trained_model(steps=4)[0]
    model.load_state_dict(models[0].state_dict())
    engine, seen = engine_for(model, max_rows=1, max_tokens=80), []

    def on_token(prompt, generation, token):
        seen.append(token)
        if len(seen) == 5:
            model.load_state_dict(models[1].state_dict())
            sync(engine, model, version=9)

    (done,) = engine.generate(PROMPTS[:1], Sampling(12, TEMPERATURE), on_token=on_token)
    assert list(done.versions) == [1] * 5 + [9] * 7
    (done,) = engine.generate(PROMPTS[:1], Sampling(12, TEMPERATURE))
    assert list(done.versions) == [9]


def test_all_ranks_load_the_weights_between_the_same_windows(pool, models):
    weights = [dict(model.state_dict()) for model in models]
    requests = [LiveRequest(prompt, TOKENS, TEMPERATURE, seed=4, key=n) for n, prompt in enumerate(PROMPTS)]
    for tp in (2, 1):  # of two ranks: one replica, or two
        first, other = pool.run(updated_over_ranks, models[0].config, weights, requests, tp, size=2)
        assert other is None
        for (ids, versions), prompt in zip(first, PROMPTS):
            count = versions.count(1)
            assert versions == [1] * count + [2] * (TOKENS - count)
            if tp == 2:
                alone = engine_for(models[0], max_rows=1, max_tokens=80)
                live_ids = alone.generate([prompt], Sampling(TOKENS, TEMPERATURE, seed=4))[0].ids
                assert prompt != PROMPTS[0] or ids[:count] == live_ids[:count]


def test_updates_that_cannot_be_are_refused(models):
    engine = engine_for(models[0], max_rows=1, max_tokens=8)
    with pytest.raises(ConfigError, match="cannot load other weights; pass it `load_weights`"):
        LiveEngine(engine).update_weights(2)
    with pytest.raises(ConfigError, match="kv_cache is drop; choose keep or recompute"):
        LiveEngine(engine, load_weights=print).update_weights(2, "drop")
