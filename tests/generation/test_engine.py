"""The engine: log-probabilities of scoring, tokens that depend on keys alone, weights of a trainer in any layout."""

import re
from dataclasses import replace

import pytest
import torch
from default_cases import by_default, in_full
from generation.brief_training import LLAMA, chains, scored, trained_model
from generation.engine_job import (
    EXPERTS,
    PROMPTS,
    SAMPLING,
    changes_travel,
    from_a_trainer,
    in_shares,
    over_tensor_ranks,
)

from megalith.config import ModelConfig
from megalith.errors import ConfigError
from megalith.generation.engine import Engine
from megalith.generation.requests import Sampling
from megalith.generation.sampling import complete
from megalith.generation.static_cache import LayerState, RecurrentStates
from megalith.generation.sync import engine_for
from megalith.models.init import initialize
from megalith.models.model_types import make_model
from megalith.models.transformer import Transformer

GEMMA = dict(
    window_size=[7, 0], window_attn_skip_freq=2, attn_logit_softcapping=20.0, final_logit_softcapping=30.0,
    norm_placement="sandwich", layernorm_zero_centered_gamma=True, qk_layernorm=True,
    add_output_bias=True,
)  # fmt: skip
LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34, 4, 4, 40, 9]
CHAINS = [row[:length].tolist() for row, length in zip(chains(12, 40, 99), LENGTHS)]
DRAWN = Sampling(max_new_tokens=24, temperature=0.8, seed=11, stop=(3,))


@pytest.fixture(scope="module", params=["llama", in_full("gemma")])
def trained(request):
    return trained_model(steps=24, **(GEMMA if request.param == "gemma" else {}))


def test_logprobs_are_those_that_the_model_scores(trained):
    model, loss = trained
    engine = engine_for(model, max_rows=5, max_tokens=96)
    done = engine.generate(CHAINS, Sampling(max_new_tokens=48, temperature=0.8, seed=11))
    expected = scored(model, CHAINS, done, 0.8)
    found = torch.tensor([logprob for each in done for logprob in each.logprobs])
    assert loss < 4 and len(found) >= 512
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(5, 1.0, 0.0), (0, 0.8, 0.0), (20, 0.9, 0.02)])
def test_logprobs_are_over_what_the_filters_keep(trained, top_k, top_p, min_p):
    model, _ = trained
    engine = engine_for(model, max_rows=4, max_tokens=96)
    sampling = Sampling(max_new_tokens=12, temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p)
    for each in engine.generate(CHAINS[:4], sampling):
        tokens = torch.tensor([CHAINS[each.prompt] + each.ids])
        with torch.no_grad():
            logits = model(tokens)[0, len(CHAINS[each.prompt]) - 1 : -1] / 1.5
        for row, token, logprob in zip(logits, each.ids, each.logprobs):
            likely, order = row.softmax(-1).sort(descending=True)
            kept = torch.arange(len(row)) < (top_k or len(row))
            likely = torch.where(kept, likely, 0) / likely[kept].sum()
            kept &= likely.cumsum(0) - likely < top_p
            kept &= likely >= min_p * likely[0]
            support = order[kept].tolist()
            assert token in support
            assert logprob == pytest.approx(
                row[support].log_softmax(0)[support.index(token)].item(), abs=1e-4
            )


def test_tokens_depend_on_the_prompts_keys_and_on_nothing_else(trained):
    model, _ = trained
    keys = [7 * number + 2**40 for number in range(len(CHAINS))]
    drawn = replace(DRAWN, max_new_tokens=12)
    every = engine_for(model, max_rows=24, max_tokens=96).generate(
        CHAINS, drawn, keys=keys, num_generations=2
    )
    assert [(each.prompt, each.generation) for each in every] == [(p, g) for p in range(12) for g in range(2)]
    assert len({tuple(each.ids) for each in every}) > 20
    by_name = {(keys[each.prompt], each.generation): (each.ids, each.truncated) for each in every}
    backwards = list(reversed(range(12)))
    for rows, order in ((1, backwards[:3]), (3, backwards), (5, [4, 0, 9, 2])):
        engine = engine_for(model, max_rows=rows, max_tokens=128)
        again = engine.generate(
            [CHAINS[n] for n in order], drawn, keys=[keys[n] for n in order], num_generations=2
        )
        assert all((e.ids, e.truncated) == by_name[keys[order[e.prompt]], e.generation] for e in again)
    other = engine.generate(CHAINS[5:6], replace(drawn, seed=12), keys=keys[5:6])
    assert other[0].ids != every[10].ids


def test_a_completion_ends_with_its_stop_id_and_tells_otherwise_that_it_is_cut(trained):
    model, _ = trained
    engine = engine_for(model, max_rows=4, max_tokens=96)
    done = engine.generate(CHAINS, replace(DRAWN, max_new_tokens=48))
    assert {each.truncated for each in done} == {True, False}
    for each in done:
        assert (3 in each.ids[:-1], each.ids[-1] == 3) == (False, not each.truncated)
        assert len(each.ids) == len(each.logprobs) and (not each.truncated or len(each.ids) == 48)
    lengths = [1 + 3 * number for number in range(12)]
    forced = engine.generate(CHAINS, Sampling(forced_lengths=lengths, seed=11, stop=(3,), temperature=0.8))
    assert [len(each.ids) for each in forced] == lengths
    assert all(each.ids[: len(other.ids)] == other.ids[: len(each.ids)] for each, other in zip(forced, done))


def test_on_token_is_told_of_every_token_in_order(trained):
    model, _ = trained
    seen: dict[tuple[int, int], list[int]] = {}
    engine = engine_for(model, max_rows=2, max_tokens=96)
    done = engine.generate(
        CHAINS[:3],
        DRAWN,
        num_generations=2,
        on_token=lambda p, g, token: seen.setdefault((p, g), []).append(token),
    )
    assert seen == {(each.prompt, each.generation): each.ids for each in done}


@pytest.mark.parametrize("settings", [
    dict(qk_layernorm=True, qk_layernorm_per_head=True),
    dict(num_experts=8, add_router_bias=True, softmax_type="learnable"),
])  # fmt: skip
def test_in_bf16_an_engine_computes_what_the_trained_model_does_to_the_bit(settings):
    config = ModelConfig(**LLAMA | settings | {"attention_dropout": 0.0})
    model = make_model(config, device="cpu", compute_dtype=torch.bfloat16)
    initialize(model, config, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
        engine = Engine(config, "cpu", torch.bfloat16, max_rows=2, max_tokens=64)
        engine.load(model.state_dict().items())
        ids = torch.randint(0, config.vocab_size, (4, 40))
        assert torch.equal(model.eval()(ids), engine.model(ids))


def test_the_cache_is_released_and_made_anew(trained):
    model, _ = trained
    engine = engine_for(model, max_rows=2, max_tokens=96)
    first = engine.generate(CHAINS[:3], DRAWN)
    assert (
        engine.memory()["cache"] == 2 * 2 * 2 * (96 + 1) * 2 * 16 * 4
    )  # layers, keys and values, rows, room and a copy of the first token, groups, head
    engine.release()
    assert engine.memory()["cache"] == 0 and engine.generate(CHAINS[:3], DRAWN) == first


def test_longrope_fills_a_row_anew_where_the_angles_change():
    """Rows cross the original length at different steps, while others of the batch are beyond it or short of it."""
    scaling = dict(type="longrope", original_max_position_embeddings=20, factor=4.0,
                   short_factor=[1.0] * 8, long_factor=[2.0 + 0.3 * j for j in range(8)])  # fmt: skip
    model, _ = trained_model(steps=8, rope_scaling=scaling)
    engine = engine_for(model, max_rows=4, max_tokens=96)
    for each in engine.generate(CHAINS, Sampling(max_new_tokens=30, temperature=0)):
        tokens = list(CHAINS[each.prompt])
        for token in each.ids:
            with torch.no_grad():
                assert int(model(torch.tensor([tokens]))[0, -1].argmax()) == token
            tokens.append(token)


def test_impossible_engines_weights_and_keys_are_refused(trained):
    model, _ = trained
    engine = engine_for(model, max_rows=2, max_tokens=16)
    weights = dict(model.state_dict())
    name = next(iter(weights))
    for tensors, sentence in (
        ({"x": torch.zeros(1)}, "no tensor x"),
        ({name: torch.zeros(3)}, r"is \[3\]"),
        ({name: weights[name]}, r"the weights lack .+ and \d+ more; pass all tensors"),
        (
            {other: tensor for other, tensor in weights.items() if other != name},
            f"^the weights lack {re.escape(name)}; pass",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            engine.load(tensors.items())
    with pytest.raises(ConfigError, match="room for 16"):
        engine.generate([[1] * 10], Sampling(max_new_tokens=7))
    with pytest.raises(ConfigError, match="1 keys for 2 prompts"):
        engine.generate([[1], [2]], Sampling(max_new_tokens=1), keys=[2])
    with pytest.raises(ConfigError, match="2 lengths for 1 completions"):
        engine.generate([[1]], Sampling(forced_lengths=[1, 2]))
    with pytest.raises(ConfigError, match="num_generations is 0"):
        engine.generate([[1]], Sampling(max_new_tokens=1), num_generations=0)
    with pytest.raises(ConfigError, match="0 rows"):
        Engine(model.config, "cpu", torch.float32, max_rows=0, max_tokens=8)


def test_tensor_parallel_ranks_sample_the_tokens_of_one_process(pool, trained):
    model, _ = trained
    sampling = Sampling(max_new_tokens=6, temperature=0.9, top_p=0.95, top_k=40, seed=2)
    alone = engine_for(model, max_rows=5, max_tokens=96).generate(CHAINS[:6], sampling)
    given = (model.config, dict(model.state_dict()), CHAINS[:6], sampling)
    for ranks in pool.run(over_tensor_ranks, *given):  # with 4 ranks two share a key and value head
        assert [each.ids for each in ranks] == [each.ids for each in alone]
        for each, other in zip(ranks, alone):
            assert each.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("prompts", [5, 1])  # of one the second replica has none
def test_replicas_share_out_prompts_and_the_first_rank_has_all(pool, trained, prompts):
    model, _ = trained
    sampling, asked = Sampling(max_new_tokens=4, seed=2), CHAINS[:prompts]
    alone = complete(model, asked, sampling, num_generations=2)
    first, *others = pool.run(in_shares, model.config, dict(model.state_dict()), asked, sampling, 2, size=4)
    assert [(e.prompt, e.generation, e.ids, e.truncated) for e in first] == [
        (e.prompt, e.generation, e.ids, e.truncated) for e in alone
    ]
    assert others == [[]] * 3


T5 = dict(
    position_embedding_type="relative", normalization="RMSNorm", add_bias_linear=False, query_pre_attn_scalar=1,
    scale_decoder_outputs=True,
)  # fmt: skip
BART = dict(
    separate_encoder_positions=True, embedding_layernorm=True, apply_residual_connection_post_layernorm=True,
    add_first_input_layernorm=False, add_output_bias=True, train_output_bias=False, max_position_embeddings=64,
    decoder_start_token_id=2,
)  # fmt: skip


@pytest.mark.parametrize(
    "kind", [T5, in_full(T5 | {"relative_attention_per_layer": True}), BART], ids=["t5", "umt5", "bart"]
)
def test_an_encoder_decoder_answers_over_tensor_ranks_as_one_process(pool, kind):
    config = ModelConfig(
        model_type="t5", num_layers=3, encoder_num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=97,
        make_vocab_size_divisible_by=1, init_method_std=0.3, **kind,
    )  # fmt: skip
    model = make_model(config)
    initialize(model, config, seed=1)
    sampling = Sampling(max_new_tokens=9, temperature=0.8, top_p=0.95, seed=2)
    alone = complete(model, CHAINS[:5], sampling, num_generations=2)
    assert len({tuple(each.ids) for each in alone}) == len(alone)
    first, *others = pool.run(in_shares, config, dict(model.state_dict()), CHAINS[:5], sampling, 2, size=4)
    assert [(e.prompt, e.generation, e.ids) for e in first] == [
        (e.prompt, e.generation, e.ids) for e in alone
    ]
    for each, other in zip(first, alone):
        assert each.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert others == [[]] * 3


LAYOUTS = {  # settings of model and parallel, and whether tensors travel
    "tp2-sp": ({}, dict(tensor_model_parallel_size=2, sequence_parallel=True), False),
    "tp2-pp2": ({}, dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), True),
    "zero3": ({}, dict(data_parallel_sharding_strategy="optim_grads_params"), True),
    "tp2-zero1": ({}, dict(tensor_model_parallel_size=2, data_parallel_sharding_strategy="optim"), True),
    "ep2": (EXPERTS, dict(expert_model_parallel_size=2), True),
    "tp2-etp2": (EXPERTS, dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=2), True),
    "cp2": ({}, dict(context_parallel_size=2), False),
    "mtp": (dict(mtp_num_layers=1), dict(tensor_model_parallel_size=2), False),
}


@pytest.mark.parametrize(
    "names",
    [["tp2-pp2", "ep2", "zero3"], in_full(["tp2-sp", "tp2-zero1", "tp2-etp2", "cp2", "mtp"])],
    ids="+".join,
)
def test_an_engine_has_a_trainers_weights_to_the_bit_whatever_its_layout(pool, names):
    cases = {name: (LLAMA | LAYOUTS[name][0], LAYOUTS[name][1]) for name in names}
    expected: dict[bool, list[list[int]]] = {}
    for name, ranks in pool.run_cases(from_a_trainer, cases).items():
        _, _, travels = LAYOUTS[name]
        assert all(right and (gathered > 0) == travels for right, gathered, _ in ranks), name
        has_experts = "num_experts" in LAYOUTS[name][0]
        config = ModelConfig(**(LLAMA | (EXPERTS if has_experts else {})))
        if has_experts not in expected:
            model = Transformer(config, device="meta")
            model.to_empty(device="cpu")
            initialize(model, config, seed=1234)
            engine = engine_for(model, max_rows=3, max_tokens=32)
            expected[has_experts] = [each.ids for each in engine.generate(PROMPTS, SAMPLING)]
        assert all(tokens == expected[has_experts] for _, _, tokens in ranks), name


@pytest.mark.parametrize("dtype", by_default([torch.float32, torch.bfloat16], torch.bfloat16))
@pytest.mark.parametrize("name", ["tp2-pp2", "ep2", *map(in_full, ["zero3", "tp2-zero1", "tp2-etp2"])])
def test_only_changed_elements_travel_to_an_engine_which_gets_the_bits_of_a_full_sync(pool, name, dtype):
    model, parallel, _ = LAYOUTS[name]
    for results in pool.run(changes_travel, model, parallel, dtype, size=4):
        assert all(is_equal for is_equal, _ in results)
        first, unchanged, some, everything = (sent for _, sent in results)
        assert first == everything == 1 and unchanged == 0
        if name != "tp2-etp2":  # there the engine of a part's rank does not have it, so it is sent whole
            assert 0 < some < (0.15 if dtype == torch.float32 else 0.06)


def test_a_sequence_that_moves_to_another_row_keeps_its_state():
    layers = {
        0: LayerState(torch.randn(4, 3, 5), torch.randn(4, 2, 3, 3)),
        2: LayerState(torch.randn(4, 3, 5), None),
    }
    before = [x.clone() for layer in layers.values() for x in (layer.tokens, layer.matrices) if x is not None]
    RecurrentStates(layers).move(3, 1)
    moved = [x for layer in layers.values() for x in (layer.tokens, layer.matrices) if x is not None]
    assert len(moved) == 3 and all(torch.equal(x, old[[0, 3, 2, 3]]) for x, old in zip(moved, before))
