"""Speculative decoding: the completions of plain decoding, the model's own distribution, fewer passes."""

import itertools
from dataclasses import replace

import pytest
import torch
from default_cases import by_default, in_full
from generation.brief_training import LLAMA, VOCAB, chains, scored, trained_model
from generation.engine_job import EXPERTS, speculative_over_tensor_ranks

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.generation.engine import Engine
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.requests import Sampling
from megalith.generation.sampling import complete
from megalith.generation.speculation import NO_DRAFT, Speculation, accepted_tokens, ngram_drafts
from megalith.generation.sync import engine_for
from megalith.models.init import initialize
from megalith.models.model_types import make_model
from megalith.models.transformer import Stack

PROMPTS = [row[:length].tolist() for row, length in zip(chains(9, 40, 99), [1, 2, 5, 8, 13, 21, 34, 4, 40])]
SAMPLINGS = {
    "greedy": Sampling(max_new_tokens=40, temperature=0.0, stop=(3,)),
    "temperature": Sampling(max_new_tokens=40, temperature=0.7, seed=5, stop=(3,)),
    "top_p": Sampling(max_new_tokens=24, temperature=1.2, seed=5, top_p=0.8, top_k=30, min_p=0.01),
}


MTP = dict(mtp_num_layers=1, mtp_loss_scaling_factor=0.01)  # Adam scales it up; the model stays as it is


@pytest.fixture(scope="module")
def model():
    return trained_model(steps=24, **MTP)[0]


@pytest.fixture(scope="module")
def draft_model():
    return trained_model(steps=24, num_layers=1, hidden_size=32)[0]


METHODS = "ngram", "draft_model", "mtp"


@pytest.fixture(params=METHODS)
def speculation(request, draft_model):
    return Speculation(
        request.param,
        num_speculative_tokens=3,
        draft_model=draft_model if request.param == "draft_model" else None,
    )


def test_ngram_drafts_follow_the_longest_and_most_recent_match():
    history = torch.tensor(
        [
            [5, 6, 7, 9, 6, 7, 8, 5, 6, 7, 0, 0],  # of 5 6 7, not of 6 7
            [1, 2, 3, 1, 2, 4, 1, 2, 9, 9, 9, 9],  # the later of two; what follows the newest does not count
            [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0],  # no match
            [4, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # a period of 1
            [4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # nothing before it
        ]
    )
    last = torch.tensor([9, 7, 7, 2, 0])
    drafts = ngram_drafts(history, last, 3, 1, 4)
    assert drafts.tolist() == [[9, 6, 7], [4, 1, 2], [NO_DRAFT] * 3, [4, 4, 4], [NO_DRAFT] * 3]
    assert ngram_drafts(history, last, 3, 3, 4)[1].tolist() == [NO_DRAFT] * 3
    assert ngram_drafts(history, last, 2, 1, 1).tolist()[0] == [8, 5]


def test_samples_count_up_to_the_first_that_differs_or_ends_the_completion():
    ids = torch.tensor([[4, 5, 6, 7]] * 5)
    drafts = torch.tensor([[4, 5, 6], [4, 0, 6], [NO_DRAFT] * 3, [4, 5, 6], [4, 5, 6]])
    stops = torch.zeros(5, 4, dtype=torch.bool)
    stops[3, 1] = stops[4, 3] = True
    assert accepted_tokens(ids, drafts, stops).tolist() == [4, 2, 1, 2, 4]


@pytest.mark.parametrize(
    ("speculation", "kind"),
    by_default(
        itertools.product(METHODS, SAMPLINGS),
        *(("ngram", kind) for kind in SAMPLINGS), ("draft_model", "temperature"), ("mtp", "greedy"),
    ),
    indirect=["speculation"],
)  # fmt: skip
def test_completions_are_those_of_plain_decoding_in_fewer_passes(model, speculation, kind):
    sampling = SAMPLINGS[kind]
    plain = engine_for(model, max_rows=4, max_tokens=80)
    engine = engine_for(model, max_rows=4, max_tokens=80, speculation=speculation)
    expected = plain.generate(PROMPTS, sampling)
    done = engine.generate(PROMPTS, sampling)
    assert [(each.ids, each.truncated) for each in done] == [(each.ids, each.truncated) for each in expected]
    for each, other in zip(done, expected):
        assert each.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    metrics = engine.take_draft_metrics()
    tokens = sum(len(each.ids) for each in done)
    assert metrics.row_steps + metrics.accepted == tokens and 0 < metrics.accepted < metrics.drafted
    assert engine.take_draft_metrics().row_steps == 0
    assert metrics.tokens_per_step > (1.5 if kind == "greedy" else 1.0)


@torch.no_grad()
def predicted(model, tokens: list[int]) -> list[list[int]]:
    """The most likely tokens of each MTP layer for a known sequence, by the position of the input."""
    ids, found = torch.tensor([tokens]), []
    context = model.context(ids, trains=False)
    x = Stack.forward(model, model.embed(ids, context), context)
    for ahead, number in enumerate(model.config.mtp_layers, start=1):
        context.mtp_embeddings = model.embed(ids.roll(-ahead, 1), context)
        x = model.runner([model.layers[str(number)]], x, context)
        found.append(model.vocabulary_logits(x, context)[0, :, :VOCAB].argmax(-1).tolist())
    return found


@pytest.mark.parametrize("layers", [1, in_full(2)])
def test_the_mtp_layers_draft_what_they_predict_of_a_known_sequence(layers):
    """The second layer has read rejected drafts, so of two drafts per step nearly all are the same."""
    model, _ = trained_model(steps=24, **MTP | dict(mtp_num_layers=layers))
    engine = engine_for(model, max_rows=9, max_tokens=80, speculation=Speculation("mtp", layers))
    done = engine.generate(PROMPTS, SAMPLINGS["greedy"])
    accepted, drafted = 0, 0
    for each in done:
        prompt = PROMPTS[each.prompt]
        tokens = [*prompt, *each.ids]
        found, at = predicted(model, tokens), len(prompt)  # of the next token to sample
        while at < len(tokens):
            drafts = [row[at - 2] for row in found] if at > 1 else []
            drafted += len(drafts)
            right = 0
            while (
                right < len(drafts) and at + right < len(tokens) - 1 and drafts[right] == tokens[at + right]
            ):
                right += 1
            accepted, at = accepted + right, at + right + 1
    metrics = engine.take_draft_metrics()
    if layers == 1:
        assert (metrics.accepted, metrics.drafted) == (accepted, drafted)
    assert metrics.accepted == pytest.approx(accepted, rel=0.1) and accepted > 50


def test_logprobs_are_those_that_the_model_scores(model, speculation):
    engine = engine_for(model, max_rows=4, max_tokens=80, speculation=speculation)
    done = engine.generate(PROMPTS, replace(SAMPLINGS["temperature"], stop=()))
    found = torch.tensor([logprob for each in done for logprob in each.logprobs])
    assert (found - scored(model, PROMPTS, done, 0.7)).abs().max() <= 1e-4


DISTRIBUTIONS = {
    "plain": Sampling(max_new_tokens=3, temperature=1.0, seed=21),
    "top_p": Sampling(max_new_tokens=3, temperature=1.3, top_p=0.7, seed=21),
    "cold": Sampling(max_new_tokens=3, temperature=0.6, seed=21),
}


@pytest.mark.parametrize(
    ("speculation", "sampling"),
    by_default(
        itertools.product(METHODS, DISTRIBUTIONS),
        ("ngram", "plain"),
        ("draft_model", "top_p"),
        ("mtp", "plain"),
    ),
    indirect=["speculation"],
)
def test_samples_have_the_models_distribution(speculation, sampling, model, joint_of):
    """A chi-square test of the joint distribution of three tokens, whose prompt is one that n-grams can continue."""
    sampling = DISTRIBUTIONS[sampling]
    prompt, count = [*PROMPTS[4][:7], *PROMPTS[4][:4]], 4000
    engine = engine_for(model, max_rows=1000, max_tokens=40, speculation=speculation)
    done = engine.generate([prompt], sampling, num_generations=count)
    assert engine.take_draft_metrics().accepted > 100
    expected = joint_of(prompt, sampling) * count
    seen = torch.zeros_like(expected)
    seen.index_put_(
        torch.tensor([each.ids for each in done]).unbind(1), torch.ones(count).double(), accumulate=True
    )
    assert not seen[expected == 0].any()
    for summed in ((), (0,), (1,), (2,)):  # all three tokens, and each two of them
        cells, means = (x.sum(summed) if summed else x for x in (seen, expected))
        frequent = means >= 5
        cells, means = (torch.cat([x[frequent], x[~frequent].sum()[None]]) for x in (cells, means))
        statistic, freedom = ((cells - means) ** 2 / means).sum().item(), len(cells) - 1
        # Wilson and Hilferty's normal approximation: the bound has a probability of 0.0005
        deviation = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
        assert freedom > (40 if summed else 8) and deviation < 3.3, summed


@pytest.fixture(scope="module")
def joint_of(model):
    """Return `probabilities` of the model, computed once per sampling, all of one prompt."""
    joints = {}

    def joint(prompt, sampling):
        if repr(sampling) not in joints:
            joints[repr(sampling)] = probabilities(model, prompt, sampling)
        return joints[repr(sampling)]

    return joint


@torch.no_grad()
def probabilities(model, prompt, sampling) -> torch.Tensor:
    """Probabilities of all continuations of three tokens, by scoring them: float64 [VOCAB, VOCAB, VOCAB]."""
    joint, prefixes = torch.ones(1, dtype=torch.float64), torch.tensor([prompt])
    for _ in range(sampling.max_new_tokens):
        logits = torch.cat([model(part)[:, -1, :VOCAB] for part in prefixes.split(1024)]).double()
        rows = (logits / sampling.temperature).softmax(-1)
        if sampling.top_p < 1:
            likely, order = rows.sort(-1, descending=True)
            likely = likely * (likely.cumsum(-1) - likely < sampling.top_p)
            rows = torch.zeros_like(rows).scatter(-1, order, likely / likely.sum(-1, keepdim=True))
        joint = (joint[:, None] * rows).flatten()
        tokens = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, 0), tokens], 1)
    return joint.view([VOCAB] * sampling.max_new_tokens)


def test_tokens_do_not_depend_on_the_other_rows(model, speculation):
    sampling = replace(SAMPLINGS["temperature"], max_new_tokens=20)
    keys = [7 * n + 2**40 for n in range(len(PROMPTS))]
    every = engine_for(model, max_rows=9, max_tokens=96, speculation=speculation).generate(
        PROMPTS, sampling, keys=keys
    )
    for rows, order in ((1, [8, 0, 3]), (2, [4, 8, 1, 5])):
        engine = engine_for(model, max_rows=rows, max_tokens=80, speculation=speculation)
        again = engine.generate([PROMPTS[n] for n in order], sampling, keys=[keys[n] for n in order])
        assert [each.ids for each in again] == [every[n].ids for n in order]


VARIANTS = {
    "learned": dict(position_embedding_type="learned_absolute", max_position_embeddings=64),
    "windows": dict(window_size=[7, 0], window_attn_skip_freq=2, attn_logit_softcapping=20.0),
    "sinks": dict(softmax_type="learnable"),
    "latent": dict(
        multi_latent_attention=True, q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8,
        v_head_dim=16, num_query_groups=0, add_qkv_bias=False,
    ),
    "longrope": dict(
        rope_scaling=dict(
            type="longrope", original_max_position_embeddings=20, factor=4.0, short_factor=[1.0] * 8,
            long_factor=[2.0 + 0.3 * j for j in range(8)],
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ["learned", "longrope", *map(in_full, ["windows", "sinks", "latent"])])
def test_every_kind_of_attention_verifies_drafts(name, draft_model):
    model, _ = trained_model(steps=8, **VARIANTS[name] | MTP)
    sizes = dict(max_rows=3, max_tokens=64)
    sampling = Sampling(max_new_tokens=24, temperature=0.5, seed=1)
    expected = engine_for(model, **sizes).generate(PROMPTS, sampling)
    methods = (
        Speculation("ngram"),
        Speculation("draft_model", 2, draft_model=draft_model),
        Speculation("mtp", 2),
    )
    for settings in methods:
        engine = engine_for(model, **sizes, speculation=settings)
        assert [each.ids for each in engine.generate(PROMPTS, sampling)] == [each.ids for each in expected]
        assert engine.take_draft_metrics().accepted


def test_experts_are_recorded_for_the_tokens_that_are_kept(speculation):
    model = make_model(ModelConfig(**LLAMA | EXPERTS | MTP))
    initialize(model, model.config, seed=1)
    engines = (
        engine_for(model, max_rows=3, max_tokens=80, records_routes=True, speculation=drafts)
        for drafts in (None, speculation)
    )
    sampling = replace(SAMPLINGS["greedy"], max_new_tokens=16)
    plain, done = (engine.generate(PROMPTS[-4:], sampling) for engine in engines)
    for one, other in zip(plain, done):
        assert one.ids == other.ids and (one.routes == other.routes).all()
        assert len(other.routes) == len(PROMPTS[-4:][other.prompt]) + len(other.ids) - 1


def test_exact_logprobs_are_those_without_drafts_to_the_bit(model, speculation):
    sizes = dict(max_rows=4, max_tokens=80, batch_invariant=True)
    sampling = replace(SAMPLINGS["temperature"], max_new_tokens=16)
    expected = engine_for(model, **sizes).generate(PROMPTS[-5:], sampling)
    done = engine_for(model, **sizes, speculation=speculation).generate(PROMPTS[-5:], sampling)
    assert done == expected


def test_requests_with_settings_of_their_own_get_the_same_tokens(model, speculation):
    requests = [
        LiveRequest(prompt, 12, temperature=0.2 * (n % 4), top_k=5 * (n % 2), top_p=1 - 0.1 * (n % 3), key=n)
        for n, prompt in enumerate(PROMPTS)
    ]
    found = []
    for drafts in (None, speculation):
        live = LiveEngine(engine_for(model, max_rows=3, max_tokens=80, speculation=drafts), stop=(3,))
        results, ended = [[] for _ in requests], []

        def callback(number, results=results, ended=ended, live=live):
            def on_tokens(ids, logprobs, reason):
                results[number] += ids
                assert len(ids) == len(logprobs)
                if reason is not None:
                    ended.append(reason)
                if len(ended) == len(requests):
                    live.close()

            return on_tokens

        for number, request in enumerate(requests):
            live.submit([request], [callback(number)])
        live.run()
        found.append(results)
    assert found[0] == found[1] and all(found[0])


def test_tensor_parallel_ranks_verify_drafts(pool, model, draft_model):
    sampling = Sampling(max_new_tokens=12, temperature=0.3, top_p=0.95, seed=2)
    expected = engine_for(model, max_rows=5, max_tokens=96).generate(PROMPTS[:5], sampling)
    weights, draft = dict(model.state_dict()), dict(draft_model.state_dict())
    jobs = pool.run(
        speculative_over_tensor_ranks,
        model.config,
        weights,
        draft_model.config,
        draft,
        PROMPTS[:5],
        sampling,
        size=2,
    )
    for by_method in jobs:
        for done, accepted in by_method:
            assert done == [each.ids for each in expected] and accepted


def test_the_drafters_memory_is_counted_and_released(model, speculation):
    plain = engine_for(model, max_rows=2, max_tokens=64)
    engine = engine_for(model, max_rows=2, max_tokens=64, speculation=speculation)
    first = engine.generate(PROMPTS[:3], SAMPLINGS["greedy"], max_new_tokens=[9] * 3)
    plain.generate(PROMPTS[:3], SAMPLINGS["greedy"], max_new_tokens=[9] * 3)
    assert engine.memory()["cache"] > plain.memory()["cache"]
    engine.release()
    assert engine.memory()["cache"] == 0
    assert engine.generate(PROMPTS[:3], SAMPLINGS["greedy"], max_new_tokens=[9] * 3) == first


def test_what_cannot_be_combined_is_refused_by_name(model, draft_model):
    def refused(config, match, **settings):
        with pytest.raises(ConfigError, match=match):
            Engine(
                ModelConfig(**config), "cpu", torch.float32, max_rows=1, max_tokens=8,
                speculation=Speculation(**settings),
            )  # fmt: skip

    refused(LLAMA, "speculative_method is medusa; choose ngram, draft_model or mtp", method="medusa")
    refused(LLAMA, "num_speculative_tokens is 0", method="ngram", num_speculative_tokens=0)
    refused(LLAMA, "prompt_lookup_min is 5 and prompt_lookup_max 4", method="ngram", prompt_lookup_min=5)
    refused(LLAMA, "no draft model is given", method="draft_model")
    refused(LLAMA, "a draft model is given", method="ngram", draft_model=draft_model)
    refused(LLAMA, "speculative_method is mtp, but model.mtp_num_layers is not set", method="mtp")
    recurrent = LLAMA | dict(
        experimental_attention_variant="gated_delta_net", linear_attention_freq=2, linear_num_value_heads=4,
        linear_num_key_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    )  # fmt: skip
    refused(recurrent, "recurrent mixer gated_delta_net, whose state cannot be rewound", method="ngram")
    capacity = LLAMA | EXPERTS | dict(moe_expert_capacity_factor=1.0)
    refused(capacity, "drafts could displace other tokens", method="ngram")
    t5 = ModelConfig(
        model_type="t5", num_layers=2, encoder_num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=97,
        position_embedding_type="relative",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="only decoders can verify"):
        complete(make_model(t5), [[1]], Sampling(max_new_tokens=1), speculation=Speculation("ngram"))
