"""Generation: the cache changes nothing, greedy is transformers' greedy, rows are alone, samples follow the seed."""

import math

import pytest
import torch
from default_cases import by_default
from models.reference import CASES, MECHANISMS, VOCAB, reference_and_ours

from megalith.errors import ConfigError
from megalith.generation.requests import Sampling
from megalith.generation.sampling import complete, generate
from megalith.ops.gumbel import sample

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [42]]


@pytest.fixture(scope="module")
def model():
    return reference_and_ours("qwen3")[1]


@pytest.mark.parametrize("name", by_default(CASES, *MECHANISMS[1::2]))
def test_greedy_tokens_and_their_log_probabilities_are_those_of_transformers(name):
    reference, ours = reference_and_ours(name)
    # The families' windows are of 11: the first leaves them behind as it goes, the second at once.
    for prompt, count in zip(PROMPTS[:2], (12, 3), strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
        [done] = complete(ours, [prompt], Sampling(max_new_tokens=count, temperature=0))
        assert [[*prompt, *done.ids]] == expected.tolist()
        with torch.no_grad():
            logprobs = reference(expected).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        taken = logprobs.gather(1, expected[0, len(prompt) :, None])[:, 0]
        assert (torch.tensor(done.logprobs) - taken).abs().max() <= 2e-5


def test_prompts_of_any_lengths_in_a_batch_give_what_each_gives_alone(model):
    together = generate(model, PROMPTS, max_new_tokens=20, temperature=0)
    assert together == [generate(model, [p], max_new_tokens=20, temperature=0)[0] for p in PROMPTS]
    sampled = generate(model, PROMPTS, max_new_tokens=20, seed=5)
    assert sampled[0] == generate(model, PROMPTS[:1], max_new_tokens=20, seed=5)[0]


def test_a_seed_gives_the_same_text_again_and_another_seed_or_row_another_text(model):
    first, again, other = (generate(model, [PROMPTS[0]] * 3, max_new_tokens=20, seed=s) for s in (1, 1, 2))
    assert first == again
    assert len({tuple(row) for row in first + other}) == 6


def test_nothing_is_drawn_from_the_global_random_state(model):
    before = torch.random.get_rng_state()
    generate(model, PROMPTS, max_new_tokens=4)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_row_ends_before_its_end_of_document_and_the_others_go_on(model):
    free = generate(model, PROMPTS, max_new_tokens=20, temperature=0)
    eod = free[0][len(PROMPTS[0]) + 3]
    rows = generate(model, PROMPTS, max_new_tokens=20, temperature=0, eod=eod)
    for prompt, row, whole in zip(PROMPTS, rows, free):
        tail = whole[len(prompt) :]
        end = tail.index(eod) if eod in tail else len(tail)
        assert row == prompt + tail[:end]
    assert len(rows[0]) <= len(PROMPTS[0]) + 3


def allowed_by_hand(logits, temperature, top_k, top_p):
    """Probabilities after top-k and top-p, one token at a time."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: top_k or len(order)]
    weights = [math.exp((logits[i] - max(logits)) / temperature) for i in order]
    probabilities = [w / sum(weights) for w in weights]
    kept, reached = {}, 0.0
    for token, probability in zip(order, probabilities):
        if reached >= top_p:
            break
        kept[token] = probability
        reached += probability
    total = sum(kept.values())
    return {token: probability / total for token, probability in kept.items()}


def draw(logits: torch.Tensor, count: int, temperature: float, **options) -> torch.Tensor:
    """So many samples of the same logits, each with noise of its own."""
    keys = torch.randint(
        -(2**31), 2**31 - 1, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(1)
    )
    return sample(logits.expand(count, -1), keys, temperature, vocab_size=len(logits), **options)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (1, 1.0), (5, 1.0), (0, 0.6), (7, 0.8), (99, 0.001)])
def test_samples_have_the_frequencies_of_a_plain_reference(temperature, top_k, top_p):
    logits, draws = torch.randn(12, generator=torch.Generator().manual_seed(0)), 3000
    tokens, logprobs = draw(logits, draws, temperature, top_k=top_k, top_p=top_p)
    counts = tokens.bincount(minlength=12).tolist()
    expected = allowed_by_hand(logits.tolist(), temperature, top_k, top_p)
    for token, count in enumerate(counts):
        probability = expected.get(token, 0.0)
        assert abs(count - draws * probability) <= 5 * math.sqrt(draws * probability * (1 - probability))
    by_hand = torch.tensor([math.log(expected[token]) for token in tokens.tolist()])
    torch.testing.assert_close(logprobs, by_hand, rtol=1e-5, atol=1e-5)


def test_min_p_keeps_what_has_that_share_of_the_likeliest():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    tokens, logprobs = draw(logits, 500, 0.5, min_p=math.exp(-2.1))  # a logit less by 1.05 has that share
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, (logits[:2] / 0.5).log_softmax(-1)[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_temperature_near_zero_takes_the_likeliest_token(temperature):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 100
    assert set(draw(logits, 50, temperature, top_p=0.9)[0].tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        ([], {}, "number of prompts is 0"),
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[1, VOCAB]], {}, f"token {VOCAB}, but the model's vocabulary has {VOCAB}"),
        ([[5, -1]], {}, "token -1"),
        ([[1] * 250], {"max_new_tokens": 7}, "257 in all, but the model has 256 positions"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[1]], {"temperature": -0.1}, "temperature is -0.1"),
        ([[1]], {"temperature": math.nan}, "temperature is nan"),
        ([[1]], {"top_k": -1}, "top_k is -1"),
        ([[1]], {"top_p": 0.0}, "top_p is 0"),
        ([[1]], {"top_p": 1.1}, "top_p is 1.1"),
        ([[1]], {"seed": -1}, "seed is -1"),
        ([[1]], {"seed": 2**60}, "seed is 1152921504606846976"),
    ],
)
def test_impossible_requests_are_refused_in_a_sentence(model, prompts, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        generate(model, prompts, **{"max_new_tokens": 1, **options})


def test_the_last_position_of_the_model_can_be_filled(model):
    assert len(generate(model, [[1] * 250], max_new_tokens=6)[0]) == 256


@pytest.mark.parametrize("options", [dict(temperature=0), dict(temperature=50.0, seed=3), dict(top_p=0.99)])
def test_rows_that_pad_a_vocabulary_are_never_sampled(options):
    """A published model may have more rows than its tokenizer has entries; what they are trained to is anything."""
    logits = torch.arange(12.0)  # the last row is the likeliest
    keys = torch.arange(200, dtype=torch.int32)
    options = dict(temperature=options.get("temperature", 1.0), top_p=options.get("top_p", 1.0))
    everything, real = (sample(logits.expand(200, -1), keys, vocab_size=n, **options)[0] for n in (12, 10))
    assert everything.max() == 11 and real.max() == 9
