"""Penalties, biases, bad words and stop strings: by transformers and vLLM's formula, in any batch and layout."""

import itertools
from dataclasses import replace
from threading import Event, Thread

import pytest
import torch
from default_cases import by_default
from generation.brief_training import chains, trained_model
from generation.engine_job import live_tokens, over_tensor_ranks
from models.reference import reference_and_ours

from megalith.config import ModelConfig
from megalith.data.pairs import DECODER_START
from megalith.data.tokenizers.plain import ByteTokenizer
from megalith.errors import ConfigError
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.logits_processing import LogitsProcessing, bad_word_ids
from megalith.generation.requests import MAX_GENERATIONS, Sampling
from megalith.generation.sampling import complete
from megalith.generation.speculation import Speculation
from megalith.generation.stop_strings import StopStrings
from megalith.generation.sync import engine_for
from megalith.models.init import initialize
from megalith.models.model_types import make_model
from megalith.ops.gumbel import sample

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 4, 9, 17]
CHAINS = [row[:length].tolist() for row, length in zip(chains(10, 40, 99), LENGTHS)]
KINDS = [
    LogitsProcessing(),
    LogitsProcessing(repetition_penalty=1.4),
    LogitsProcessing(presence_penalty=0.9, frequency_penalty=0.6),
    LogitsProcessing(repetition_penalty=0.8, frequency_penalty=-0.4, logit_bias=((7, 3.0), (11, -100.0))),
    LogitsProcessing(presence_penalty=1.5, bad_words=((4,), (23, 62), (9, 23, 62), (89, 81))),
]


@pytest.fixture(scope="module")
def model():
    return trained_model(steps=24)[0]


def by_formula(
    logits: torch.Tensor, prompt: list[int], ids: list[int], settings: LogitsProcessing
) -> torch.Tensor:
    """The processed logits, [vocabulary]. The penalties are transcribed from vllm/model_executor/layers/utils.py."""
    logits = logits.float().clone()[None]
    for token, bias in settings.logit_bias:
        logits[0, token] += bias
    bins, prompt_bins = (
        torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=logits.shape[1])[None]
        for tokens in (ids, prompt)
    )
    penalties = torch.where((bins > 0) | (prompt_bins > 0), settings.repetition_penalty, 1.0)
    logits *= torch.where(logits > 0, 1.0 / penalties, penalties)
    logits -= settings.frequency_penalty * bins
    logits -= settings.presence_penalty * (bins > 0)
    for *before, last in settings.bad_words:
        if ids[len(ids) - len(before) :] == before:
            logits[0, last] = -torch.inf
    return logits[0]


@torch.no_grad()
def check(model, prompt: list[int], done, settings: LogitsProcessing, temperature: float) -> None:
    """Compare a completion's log-probabilities, and its tokens if it is greedy, with the formula."""
    logits = model(torch.tensor([[*prompt, *done.ids]]))[0, len(prompt) - 1 : -1]
    for at, (token, logprob) in enumerate(zip(done.ids, done.logprobs, strict=True)):
        expected = by_formula(logits[at], prompt, done.ids[:at], settings)
        assert temperature or int(expected.argmax()) == token
        assert logprob == pytest.approx(
            (expected / (temperature or 1)).log_softmax(0)[token].item(), abs=1e-4
        )


@pytest.mark.parametrize(
    ("temperature", "kind"),
    by_default(itertools.product((0.0, 0.8), range(1, 5)), (0.8, 1), (0.0, 2), (0.8, 3), (0.0, 4), (0.8, 4)),
)
def test_tokens_and_log_probabilities_follow_the_formula(model, kind, temperature):
    sampling = Sampling(24, temperature, seed=3, processing=KINDS[kind])
    plain = complete(model, CHAINS, replace(sampling, processing=LogitsProcessing()))
    done = engine_for(model, max_rows=4, max_tokens=96).generate(CHAINS, sampling)
    assert sum(one.ids != other.ids for one, other in zip(done, plain)) >= 5
    for one in done:
        check(model, CHAINS[one.prompt], one, KINDS[kind], temperature)


@pytest.mark.parametrize("kind", range(1, 5))
def test_drafts_count_like_the_samples_that_they_equal(model, kind):
    """N-grams, and a draft model that is the model itself, whose drafts are unprocessed samples."""
    sampling = Sampling(16, 0.8, seed=3, stop=(3,), processing=KINDS[kind])
    expected = engine_for(model, max_rows=4, max_tokens=96).generate(CHAINS, sampling)
    for speculation in (Speculation("ngram", 3), Speculation("draft_model", 3, draft_model=model)):
        engine = engine_for(model, max_rows=4, max_tokens=96, speculation=speculation)
        done = engine.generate(CHAINS, sampling)
        assert [one.ids for one in done] == [one.ids for one in expected]
        for one, other in zip(done, expected):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        accepted = engine.take_draft_metrics().accepted
        assert accepted > 5 or speculation.draft_model is None or KINDS[kind].needs_masks


def test_greedy_tokens_are_those_of_transformers():
    reference, ours = reference_and_ours("qwen3")
    prompt = [3, 1, 4, 1, 5]
    plain = complete(ours, [prompt], Sampling(16, 0))[0].ids
    words = [[plain[2]], plain[5:7]]
    settings = dict(repetition_penalty=1.5, bad_words_ids=words, sequence_bias=[[[plain[0]], -1.0]])
    expected = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 5, dtype=torch.int64), do_sample=False,
        max_new_tokens=16, eos_token_id=None, pad_token_id=0, **settings,
    )  # fmt: skip
    processing = LogitsProcessing(1.5, logit_bias=((plain[0], -1.0),), bad_words=tuple(map(tuple, words)))
    (done,) = complete(ours, [prompt], Sampling(16, 0, processing=processing))
    assert [*prompt, *done.ids] == expected[0].tolist() and done.ids != plain


def test_an_encoder_decoder_counts_its_decoders_tokens():
    config = ModelConfig(
        model_type="t5", num_layers=2, encoder_num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=97,
        make_vocab_size_divisible_by=1, position_embedding_type="relative", normalization="RMSNorm",
        add_bias_linear=False, init_method_std=0.3,
    )  # fmt: skip
    model = make_model(config)
    initialize(model, config, seed=1)
    settings = replace(KINDS[3], bad_words=((5, 6), (3,)), presence_penalty=0.5)
    for done in complete(model, CHAINS[:3], Sampling(12, 0, processing=settings)):
        decoder = torch.tensor([[DECODER_START, *done.ids[:-1]]])
        logits = model.eval()(decoder, encoder_input_ids=torch.tensor([CHAINS[done.prompt]]))[0]
        for at, token in enumerate(done.ids):
            expected = by_formula(logits[at], [DECODER_START], done.ids[:at], settings)
            assert int(expected.argmax()) == token


def test_a_row_that_is_filled_again_keeps_its_counts():
    """LongRoPE pauses a sequence at its original length."""
    scaling = dict(type="longrope", original_max_position_embeddings=20, factor=4.0,
                   short_factor=[1.0] * 8, long_factor=[2.0 + 0.3 * j for j in range(8)])  # fmt: skip
    model, _ = trained_model(steps=8, rope_scaling=scaling)
    settings = KINDS[4]
    engine = engine_for(model, max_rows=3, max_tokens=96)
    for done in engine.generate(CHAINS[:5], Sampling(24, 0, processing=settings)):
        for at, token in enumerate(done.ids):
            with torch.no_grad():
                logits = model(torch.tensor([[*CHAINS[done.prompt], *done.ids[:at]]]))[0, -1]
            expected = by_formula(logits, CHAINS[done.prompt], done.ids[:at], settings)
            assert int(expected.argmax()) == token


def requests() -> list[LiveRequest]:
    return [
        LiveRequest(
            prompt, 12, 0.9, seed=4, key=number * MAX_GENERATIONS, processing=KINDS[number % len(KINDS)]
        )
        for number, prompt in enumerate(CHAINS)
    ]


@pytest.fixture(scope="module")
def expected(model) -> list[list[int]]:
    """By the batch call, each alone."""
    engine, done = engine_for(model, max_rows=1, max_tokens=96), []
    for number, prompt in enumerate(CHAINS):
        sampling = Sampling(12, 0.9, seed=4, stop=(3,), processing=KINDS[number % len(KINDS)])
        done += engine.generate([prompt], sampling, keys=[number])
    return [one.ids for one in done]


def test_requests_of_different_settings_do_not_touch_each_other(model, expected):
    live = LiveEngine(engine_for(model, max_rows=3, max_tokens=96), stop=(3,))
    results, ended = [[] for _ in CHAINS], [Event() for _ in CHAINS]

    def callback(number: int):
        def on_tokens(ids, logprobs, reason):
            results[number].extend(ids)
            if reason is not None:
                ended[number].set()

        return on_tokens

    thread = Thread(target=live.run)
    thread.start()
    asked = requests()
    for number in (9, 4, 0, 1, 8, 3, 2, 7, 6, 5):
        live.submit([asked[number]], [callback(number)])
    assert all(event.wait(60) for event in ended)
    live.close()
    thread.join()
    assert results == expected


def test_replicas_of_tensor_ranks_give_the_same_tokens(pool, model, expected):
    first, *_ = pool.run(live_tokens, model.config, dict(model.state_dict()), requests(), 2, size=4)
    assert [ids for ids, _ in first] == expected
    sampling = Sampling(8, 0.9, seed=4, processing=KINDS[3])
    alone = engine_for(model, max_rows=5, max_tokens=96).generate(CHAINS[:4], sampling)
    for ranks in pool.run(over_tensor_ranks, model.config, dict(model.state_dict()), CHAINS[:4], sampling):
        assert [one.ids for one in ranks] == [one.ids for one in alone]


def test_nothing_is_allocated_for_settings_that_are_off(model):
    engine = engine_for(model, max_rows=4, max_tokens=96)
    engine.generate(CHAINS[:2], Sampling(4))
    before = engine.memory()["cache"]
    engine.generate(CHAINS[:2], Sampling(4, processing=KINDS[1]))
    rows = 4 * engine.vocabulary_entries
    assert engine.memory()["cache"] == before + rows * (4 + 1) + 3 * 4 * 4  # counts, prompts, settings
    engine.release()
    engine.generate(CHAINS[:2], Sampling(4))
    assert engine.memory()["cache"] == before


def test_a_masked_entry_is_never_sampled():
    logits = torch.full((4, 50), -torch.inf)
    logits[:, 30:] = torch.randn(4, 20)
    keys = torch.randint(-(2**31), 2**31 - 1, (4,), dtype=torch.int32)
    for temperature, filters in (
        (0.0, {}),
        (1.0, {}),
        (1.0, dict(top_p=0.9)),
        (0.7, dict(top_k=3, min_p=0.1)),
    ):
        ids, logprobs = sample(logits, keys, temperature, vocab_size=50, **filters)
        assert (ids >= 30).all() and logprobs.isfinite().all()


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(model):
    tokenizer, sampling = ByteTokenizer(), Sampling(40, 0.9, seed=4, stop=(3,))
    plain = complete(model, CHAINS, sampling)
    texts = [tokenizer.decode(one.ids) for one in plain]
    stops = [texts[0][3:5], texts[5][6:9], "never"]
    watched = replace(sampling, stop_strings=StopStrings(tokenizer, stops))
    seen: dict[int, list[int]] = {}
    done = engine_for(model, max_rows=3, max_tokens=96).generate(
        CHAINS, watched, on_token=lambda prompt, generation, token: seen.setdefault(prompt, []).append(token)
    )
    assert [seen[number] for number in range(10)] == [one.ids for one in done]
    stopped = 0
    for one, other, text in zip(done, plain, texts):
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if not ends:
            assert (one.ids, one.truncated) == (other.ids, other.truncated)
            continue
        stopped += 1
        assert not one.truncated and one.content == one.ids == other.ids[: min(ends)]  # a byte per token
        assert len(one.logprobs) == len(one.ids)
        assert not any(stop in watched.stop_strings.cut(text) for stop in stops)
    assert 2 <= stopped < 10


def test_values_out_of_range_are_refused(model):
    for settings, message in (
        (dict(repetition_penalty=0), "repetition_penalty is 0; it must be above 0"),
        (dict(presence_penalty=3), "presence_penalty is 3; it must be from -2 to 2"),
        (dict(frequency_penalty=float("nan")), "frequency_penalty is nan"),
        (dict(logit_bias=((3, 101.0),)), "logit_bias of token 3 is 101.0"),
        (dict(logit_bias=((96, 1.0),)), "has token 96, but the model's vocabulary has 96 entries"),
        (dict(bad_words=((),)), "a bad word has no tokens"),
    ):
        with pytest.raises(ConfigError, match=message):
            complete(model, CHAINS[:1], Sampling(4, processing=LogitsProcessing(**settings)))
    with pytest.raises(ConfigError, match="a stop string is empty"):
        StopStrings(ByteTokenizer(), [""])
    assert bad_word_ids(ByteTokenizer(), ["ab", " c"]) == ((97, 98), (99,))
