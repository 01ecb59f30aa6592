"""Reuse of keys and values changes no sample, and with batch-invariant operators no bit."""

import random
from dataclasses import replace
from threading import Event, Thread

import pytest
import torch
from default_cases import in_full
from generation.brief_training import LLAMA, chains, trained_model
from generation.engine_job import turns_over_tensor_ranks

from megalith.config import ModelConfig
from megalith.generation.engine import Engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.requests import MAX_GENERATIONS, Sampling
from megalith.generation.sync import engine_for
from megalith.models.init import initialize
from megalith.models.model_types import make_model

SAMPLING = Sampling(max_new_tokens=7, temperature=0.9, seed=5, stop=(3,))
PROMPTS = [row[:length].tolist() for row, length in zip(chains(6, 60, 99), (40, 17, 33, 16, 5, 52))]
PLAIN = dict(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=96, make_vocab_size_divisible_by=1,
             max_position_embeddings=256, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3)  # fmt: skip
ROPE = PLAIN | dict(
    position_embedding_type="rope", normalization="RMSNorm", swiglu=True, add_bias_linear=False
)
MODELS = {
    "learned positions": PLAIN,
    "windows": ROPE | dict(window_size=[7, 0], window_attn_skip_freq=2, num_query_groups=2),
    "softcap": ROPE | dict(attn_logit_softcapping=20.0, final_logit_softcapping=30.0, qk_layernorm=True),
    "sinks and experts": ROPE | dict(num_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2,
                                     softmax_type="learnable"),
    "mla": ROPE | dict(multi_latent_attention=True, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8,
                       qk_pos_emb_head_dim=4, v_head_dim=12),
    "alibi": ROPE | dict(position_embedding_type="alibi"),
}  # fmt: skip
WITHOUT = ("alibi",)


def built(settings: dict, seed: int = 1):
    config = ModelConfig(**settings)
    model = make_model(config)
    initialize(model, config, seed=seed)
    return model.eval()


def samples(done) -> list[tuple[list[int], list[float]]]:
    return [(one.ids, one.logprobs) for one in done]


def turns(engine: Engine, count: int = 3, generations: int = 2) -> list[tuple[list[int], list[float]]]:
    """Complete the prompts, then continue each completion with a few tokens of its own, as tools do."""
    done = engine.generate(PROMPTS, SAMPLING, num_generations=generations)
    results = samples(done)
    requests = [[*PROMPTS[one.prompt], *one.ids] for one in done]
    for turn in range(1, count):
        requests = [[*ids, 5 + turn, 9, 11 + number % 3] for number, ids in enumerate(requests)]
        requests = requests[:: 2 if turn > 1 else 1]  # some have ended
        keys = [1000 * turn + number for number in range(len(requests))]
        done = engine.generate(requests, SAMPLING, keys=keys)
        results += samples(done)
        requests = [[*ids, *one.ids] for ids, one in zip(requests, done)]
    return results


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [3, in_full(16)])
def test_turns_have_the_tokens_of_an_engine_that_prefills_everything(name, rows):
    model = built(MODELS[name])
    sizes = dict(max_rows=rows, max_tokens=128)
    engine = engine_for(model, **sizes, prefix_cache_bytes=2**20)
    plain = engine_for(model, **sizes, prefix_reuse=False)
    for (ids, logprobs), (their_ids, their_logprobs) in zip(turns(engine), turns(plain), strict=True):
        assert ids == their_ids and logprobs == pytest.approx(their_logprobs, abs=1e-5)
    assert plain.reused_tokens == 0 and (engine.reused_tokens > 0) == (name not in WITHOUT)
    assert (engine.prefill_tokens < plain.prefill_tokens) == (name not in WITHOUT)


@pytest.mark.parametrize(("rows", "budget"), [in_full(1, 0), (3, 0), (3, 2**13), in_full(3, 2**20), (16, 0)])
def test_with_batch_invariant_operators_no_bit_changes(rows, budget):
    model = built(ROPE | dict(num_query_groups=2, window_size=[20, 0], window_attn_skip_freq=2))
    sizes = dict(max_rows=rows, max_tokens=128, batch_invariant=True)
    engine = engine_for(model, **sizes, prefix_cache_bytes=budget)
    expected = turns(engine_for(model, **sizes, prefix_reuse=False))
    assert turns(engine) == expected and engine.reused_tokens > 0
    used = engine.memory()["cache"]
    first, rows_of = 2 * 2 * rows * 2 * 8 * 4, 2 * 2 * rows * 128 * 2 * 8 * 4  # layers, keys and values …
    assert first + rows_of <= used <= first + rows_of + budget


def test_any_requests_in_any_order_have_the_bits_of_requests_on_their_own():
    """Random trees of prefixes over a few rows, some equal to a prefix of others."""
    rng, model = random.Random(3), built(ROPE)
    sizes = dict(max_tokens=96, batch_invariant=True)
    engine = engine_for(model, max_rows=4, **sizes, prefix_cache_bytes=40_000)
    alone = engine_for(model, max_rows=1, **sizes, prefix_reuse=False)
    known = [[rng.randrange(96) for _ in range(40)]]
    for call in range(8):
        requests = []
        for _ in range(rng.randrange(1, 9)):
            base = rng.choice(known)
            kept = base[: rng.randrange(len(base) * 2 // 3, len(base) + 1)]
            requests.append((kept + [rng.randrange(96) for _ in range(rng.randrange(12))])[:80])
        limits = [rng.randrange(1, 13) for _ in requests]
        keys = [100 * call + number for number in range(len(requests))]
        done = engine.generate(requests, SAMPLING, keys=keys, max_new_tokens=limits)
        for ids, limit, key, one in zip(requests, limits, keys, done):
            (other,) = alone.generate([ids], replace(SAMPLING, max_new_tokens=limit), keys=[key])
            assert (one.ids, one.logprobs) == (other.ids, other.logprobs)
            known.append([*ids, *one.ids])
    assert engine.reused_tokens > 300


@pytest.mark.parametrize("rows", [1, 3])
def test_the_prompt_of_a_group_is_prefilled_once(rows):
    engine = engine_for(built(ROPE), max_rows=rows, max_tokens=96)
    prompts = [PROMPTS[0], PROMPTS[5]]
    engine.generate(prompts, SAMPLING, num_generations=7)
    assert engine.prefill_tokens == sum(len(prompt) - 1 for prompt in prompts)
    refilled = {1: 12, 3: 12 - 2}[rows]  # completions that begin when the prompt is in a row
    assert engine.reused_tokens >= refilled * min(len(prompt) - 1 for prompt in prompts) // 2


def test_a_turn_prefills_only_what_came_after_the_turn_before():
    engine = engine_for(built(ROPE), max_rows=4, max_tokens=128)
    (one,) = engine.generate([PROMPTS[0]], replace(SAMPLING, stop=()))
    assert engine.prefill_tokens == len(PROMPTS[0]) - 1 and engine.reused_tokens == 0
    engine.generate([[*PROMPTS[0], *one.ids, 8, 9]], SAMPLING)
    # The last sampled token and the first added one; the last one is the first step's.
    assert engine.prefill_tokens == len(PROMPTS[0]) - 1 + 2
    assert engine.reused_tokens == len(PROMPTS[0]) + len(one.ids) - 1


def test_new_weights_and_a_released_cache_forget_everything():
    models = [built(ROPE, seed) for seed in (1, 2)]
    engine = engine_for(models[0], max_rows=4, max_tokens=128)
    plain = engine_for(models[1], max_rows=4, max_tokens=128, prefix_reuse=False)
    turns(engine)
    reused = engine.reused_tokens
    engine.load(models[1].state_dict().items())
    assert samples(engine.generate(PROMPTS, SAMPLING)) == samples(plain.generate(PROMPTS, SAMPLING))
    assert engine.reused_tokens == reused
    engine.release()
    assert engine.memory()["cache"] == 0
    assert samples(engine.generate(PROMPTS, SAMPLING)) == samples(plain.generate(PROMPTS, SAMPLING))
    assert engine.reused_tokens == reused


def test_a_model_that_its_owner_trains_is_prefilled_in_each_call():
    model = built(ROPE)
    engine = Engine(model.config, "cpu", torch.float32, max_rows=4, max_tokens=96, model=model)
    engine.generate(PROMPTS, SAMPLING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    plain = engine_for(model, max_rows=4, max_tokens=96, prefix_reuse=False)
    assert samples(engine.generate(PROMPTS, SAMPLING)) == samples(plain.generate(PROMPTS, SAMPLING))


def test_tensor_parallel_ranks_reuse_alike(pool):
    model = built(LLAMA | dict(init_method_std=0.3))
    alone = turns(engine_for(model, max_rows=3, max_tokens=128, prefix_reuse=False))
    ranks = pool.run(turns_over_tensor_ranks, model.config, dict(model.state_dict()), turns)
    assert len({reused for _, reused in ranks}) == 1 and ranks[0][1] > 0
    for results, _ in ranks:
        for (ids, logprobs), (their_ids, their_logprobs) in zip(results, alone, strict=True):
            assert ids == their_ids and logprobs == pytest.approx(their_logprobs, abs=1e-4)


def test_requests_at_any_time_reuse_the_turns_of_their_conversation():
    model = trained_model(steps=8)[0]
    engine = engine_for(model, max_rows=2, max_tokens=128, batch_invariant=True, prefix_cache_bytes=2**20)
    live = LiveEngine(engine, stop=(3,))
    thread = Thread(target=live.run)
    thread.start()
    conversations = [list(prompt) for prompt in PROMPTS]
    asked = []
    for turn in range(3):
        results, ended = [([], []) for _ in conversations], [Event() for _ in conversations]

        def callback(number, results=results, ended=ended):
            def on_tokens(ids, logprobs, reason):
                results[number][0].extend(ids)
                results[number][1].extend(logprobs)
                if reason is not None:
                    ended[number].set()

            return on_tokens

        for number, prompt in enumerate(conversations):
            request = LiveRequest(list(prompt), 6, seed=2, key=(10 * turn + number) * MAX_GENERATIONS)
            live.submit([request], [callback(number)])
        assert all(event.wait(60) for event in ended)
        for number, (prompt, result) in enumerate(zip(conversations, results)):
            asked.append((list(prompt), 10 * turn + number, result))
            prompt += [*result[0], 7, 8]
    live.close()
    thread.join()
    alone = engine_for(model, max_rows=1, max_tokens=128, batch_invariant=True, prefix_reuse=False)
    for prompt, key, result in asked:
        (one,) = alone.generate([prompt], Sampling(6, seed=2, stop=(3,)), keys=[key])
        assert (one.ids, one.logprobs) == result
    assert engine.reused_tokens > 300
