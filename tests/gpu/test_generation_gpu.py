"""The generation engine on a GPU: kernels against plain ones, graphs against eager steps, engine against scoring."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from generation.brief_training import chains, scored, trained_model

from megalith.config import ModelConfig, ParallelConfig
from megalith.data.tokenizers.plain import ByteTokenizer
from megalith.generation.engine import Engine
from megalith.generation.engine_model import SlotSizes
from megalith.generation.live_engine import LiveEngine
from megalith.generation.live_request import LiveRequest
from megalith.generation.logits_processing import LogitsProcessing
from megalith.generation.requests import MAX_GENERATIONS, Sampling
from megalith.generation.speculation import Speculation
from megalith.generation.stop_strings import StopStrings
from megalith.generation.sync import engine_for, sync
from megalith.launch.pool import Pool
from megalith.ops.cached_attention import cached_attention, visible_positions
from megalith.ops.gumbel import sample, sample_rows
from megalith.parallel.mesh import build_mesh

PROMPTS = [
    row[:count].tolist() for row, count in zip(chains(12, 40, 99), [1, 2, 3, 5, 8, 13, 21, 34, 4, 4, 40, 9])
]
FAMILIES = {
    "llama": {},
    "wide heads, one group": dict(num_query_groups=1, kv_channels=80),
    "gemma2": dict(
        window_size=[7, 0], window_attn_skip_freq=2, attn_logit_softcapping=20.0, final_logit_softcapping=30.0,
        norm_placement="sandwich", layernorm_zero_centered_gamma=True, scale_embeddings=True,
    ),
    "gpt2": dict(
        position_embedding_type="learned_absolute", normalization="LayerNorm", swiglu=False, add_bias_linear=True,
        num_query_groups=0,
    ),
    "alibi": dict(position_embedding_type="alibi", num_query_groups=0),
    "experts": dict(num_experts=4, moe_ffn_hidden_size=64, moe_router_topk=2),
    "latent": dict(
        multi_latent_attention=True, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
        num_query_groups=0, add_qkv_bias=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "groups", "size", "window", "softcap", "chunk"),
    [
        (64, 12, 2, 128, None, None, None),
        (3, 28, 4, 128, None, None, None),
        (600, 8, 8, 64, None, None, None),
        (5, 6, 1, 80, 33, None, None),
        (7, 4, 2, 256, None, 20.0, None),
        (130, 16, 1, 192, 100, 5.0, None),
        (130, 40, 8, 128, None, None, 128),
        (9, 8, 2, 64, None, 5.0, 33),
    ],
)
def test_decode_attention_equals_the_plain_one(rows, heads, groups, size, window, softcap, chunk, dtype):
    torch.manual_seed(0)
    room = 700
    query = torch.randn(rows, 1, heads, size, device="cuda", dtype=dtype)
    qkv = torch.randn(rows, 1, groups, 3, size, device="cuda", dtype=dtype)
    cache = torch.randn(2, rows, room, groups, size, device="cuda", dtype=dtype)
    places = torch.randint(0, room, (rows,), device="cuda")
    places[0] = 0
    key, value = qkv[..., 1, :], qkv[..., 2, :]
    expected_cache = cache.float().cpu()
    plain = [x.float().cpu() for x in (query, key, value)]
    how = dict(window=window, softcap=softcap, scale=None, chunk=chunk)
    expected = cached_attention(
        *plain, expected_cache, places.cpu(), visible_positions(places.cpu(), room), **how
    )
    column = places[:, None].expand(-1, 3).contiguous()[:, 1]  # as of one of several tokens
    found = cached_attention(query, key, value, cache, column, None, **how)
    assert torch.equal(cache.float().cpu(), expected_cache)
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert (found.float().cpu() - expected).norm() <= bound * expected.norm()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("filters", [(0, 1.0, 0.0), (50, 1.0, 0.0), (50, 0.9, 0.0), (0, 0.8, 0.01)])
def test_the_sampling_kernel_takes_the_plain_ones_tokens(temperature, filters):
    torch.manual_seed(0)
    logits = (3 * torch.randn(37, 152_064)).bfloat16()
    keys = torch.randint(-(2**31), 2**31 - 1, (37,), dtype=torch.int32)
    names = dict(zip(("top_k", "top_p", "min_p"), filters), vocab_size=151_936)
    ids, logprobs = sample(logits.cuda(), keys.cuda(), temperature, **names)
    expected_ids, expected = sample(logits, keys, temperature, **names)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(logprobs.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("has_filters", [False, True])
def test_the_sampling_kernel_takes_a_temperature_per_row(has_filters):
    torch.manual_seed(0)
    logits = (3 * torch.randn(36, 152_064)).bfloat16()
    keys = torch.randint(-(2**31), 2**31 - 1, (36,), dtype=torch.int32)
    rows = [(0.7, 0, 1, 0), (0, 0, 1, 0), (1, 0, 1, 0)]
    rows = [(0.7, 50, 0.9, 0.01), (0, 50, 1, 0), (1.3, 0, 1, 0)] if has_filters else rows
    settings, names = torch.tensor(rows * 12).float().T, dict(vocab_size=151_936)
    ids, logprobs = sample_rows(logits.cuda(), keys.cuda(), settings.cuda(), has_filters, **names)
    expected_ids, expected = sample_rows(logits, keys, settings, has_filters, **names)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(logprobs.cpu(), expected, rtol=1e-5, atol=1e-4)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return trained_model(device="cuda", **FAMILIES[request.param])


def test_a_compiled_graph_gives_what_eager_steps_give(family):
    model, _ = family
    results = []
    for compiled in (True, False):
        engine = engine_for(model, max_rows=8, max_tokens=128, compile=compiled, graphs=compiled and None)
        results.append(
            engine.generate(PROMPTS, Sampling(max_new_tokens=60, stop=(3,), seed=5), num_generations=2)
        )
    same = sum(a.ids == b.ids for a, b in zip(*results))
    assert same >= len(results[0]) - 1  # fp32 rounds otherwise in compiled code: a tie may fall the other way
    for a, b in zip(*results):
        if a.ids == b.ids:
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4)


@pytest.fixture(scope="module")
def with_mtp():
    return trained_model(device="cuda", mtp_num_layers=1, mtp_loss_scaling_factor=1.0)[0]


@pytest.mark.parametrize("graphs", [None, False])
def test_drafts_of_mtp_layers_give_what_plain_steps_give(with_mtp, graphs):
    sampling = Sampling(max_new_tokens=60, temperature=0.5, stop=(3,), seed=5)
    sizes = dict(max_rows=8, max_tokens=128, compile=None if graphs is None else False, graphs=graphs)
    plain = engine_for(with_mtp, **sizes).generate(PROMPTS, sampling, num_generations=2)
    for drafts in (1, 3):
        engine = engine_for(with_mtp, **sizes, speculation=Speculation("mtp", drafts))
        for _ in range(2):
            done = engine.generate(PROMPTS, sampling, num_generations=2)
            assert sum(a.ids == b.ids for a, b in zip(plain, done)) >= len(done) - 1
            assert engine.take_draft_metrics().acceptance_rate > 0.2


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
@pytest.mark.parametrize("graphs", [None, False])
def test_verified_drafts_give_what_plain_steps_give(family, method, graphs):
    """By a captured graph, which runs the draft model too, and eagerly."""
    model, _ = family
    draft = trained_model(steps=24, device="cuda", num_layers=1)[0] if method == "draft_model" else None
    sampling = Sampling(max_new_tokens=60, temperature=0.5, stop=(3,), seed=5)
    sizes = dict(max_rows=8, max_tokens=128, compile=None if graphs is None else False, graphs=graphs)
    plain = engine_for(model, **sizes).generate(PROMPTS, sampling, num_generations=2)
    engine = engine_for(model, **sizes, speculation=Speculation(method, 3, draft_model=draft))
    for _ in range(2):  # the second time with graphs and rows that exist
        done = engine.generate(PROMPTS, sampling, num_generations=2)
        same = sum(a.ids == b.ids for a, b in zip(plain, done))
        assert same >= len(done) - 1  # passes over more tokens round otherwise: a tie may fall the other way
        for a, b in zip(plain, done):
            if a.ids == b.ids:
                torch.testing.assert_close(
                    torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=1e-4
                )
        metrics = engine.take_draft_metrics()
        assert metrics.row_steps + metrics.accepted == sum(len(each.ids) for each in done)
        assert metrics.accepted


def test_logprobs_are_those_of_scoring(family):
    model, loss = family
    assert loss < 4
    bounds = {torch.float32: 1.0001, torch.bfloat16: 1.01}
    for dtype, bound in bounds.items():
        engine = engine_for(model, max_rows=8, max_tokens=128, dtype=dtype, compile=False)
        done = engine.generate(PROMPTS, Sampling(max_new_tokens=60, temperature=0.8, seed=1))
        scorer = model
        if dtype == torch.bfloat16:
            scorer.compute_dtype = dtype
        expected = scored(scorer, PROMPTS, done, 0.8)
        scorer.compute_dtype = torch.float32
        found = torch.tensor([x for c in done for x in c.logprobs])
        assert len(found) >= 512
        drift = (found - expected).abs()
        print(dtype, "mean exp|Δ|", drift.exp().mean().item(), "largest", drift.max().item())
        assert drift.exp().mean() <= bound


def test_a_sync_is_in_place_and_the_graph_stays():
    model, _ = trained_model(device="cuda")
    engine = engine_for(model, max_rows=8, max_tokens=128)
    sampling = Sampling(max_new_tokens=30, seed=2)
    engine.generate(PROMPTS, sampling)
    graphs = list(engine._graphs.values())
    other, _ = trained_model(device="cuda", steps=25)
    with torch.no_grad():
        for own, new in zip(model.parameters(), other.parameters()):
            own.copy_(new)
    report = sync(engine, model)
    assert engine.version == 2 and report.gathered == 0
    again = engine.generate(PROMPTS, sampling)
    assert list(engine._graphs.values()) == graphs
    fresh = engine_for(other, max_rows=8, max_tokens=128).generate(PROMPTS, sampling)
    assert [c.ids for c in again] == [c.ids for c in fresh]


def test_rows_are_released_and_made_anew():
    model, _ = trained_model(device="cuda")
    engine = engine_for(model, max_rows=8, max_tokens=128, compile=False)
    first = engine.generate(PROMPTS, Sampling(max_new_tokens=20))
    engine.release()
    assert engine.memory()["cache"] == 0
    assert engine.generate(PROMPTS, Sampling(max_new_tokens=20)) == first


def in_two(weights: dict[str, torch.Tensor], config: ModelConfig, dtype: torch.dtype) -> list:
    device = torch.device("cuda", torch.cuda.current_device())
    mesh = build_mesh(ParallelConfig(tensor_model_parallel_size=2), 2, "cuda")
    engine = Engine(config, device, dtype, max_rows=8, max_tokens=128, tp=mesh.tp)
    engine.load(weights.items())
    return engine.generate(PROMPTS, Sampling(max_new_tokens=40, seed=5, top_p=0.95), num_generations=2)


def turns(engine: Engine) -> list[tuple[list[int], list[float]]]:
    """Samples of the prompts and of two turns after them, in more rows than there are."""
    prompts = [row[:count].tolist() for row, count in zip(chains(12, 60, 99), range(3, 60, 5))]
    sampling, samples = Sampling(max_new_tokens=20, stop=(3,), seed=5), []
    for turn in range(3):
        keys = [100 * turn + number for number in range(len(prompts))]
        done = engine.generate(prompts, sampling, keys=keys)
        samples += [(one.ids, one.logprobs) for one in done]
        prompts = [[*ids, *one.ids, 7, 8] for ids, one in zip(prompts, done)]
    return samples


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reused_keys_and_values_change_no_bit_of_batch_invariant_engines(dtype, graphs):
    """Idle rows are written to by the steps of a graph, after which their prefixes are used. Five rows do not keep the
    prefixes of twelve sequences."""
    model, _ = trained_model(device="cuda")
    sizes = dict(max_tokens=160, dtype=dtype, batch_invariant=True, graphs=graphs)
    expected = turns(engine_for(model, **sizes, max_rows=5, prefix_reuse=False))
    for rows, budget in ((12, 0), (5, 2**24)):
        engine = engine_for(model, **sizes, max_rows=rows, prefix_cache_bytes=budget)
        assert turns(engine) == expected and engine.reused_tokens > 0


def test_reused_keys_and_values_give_the_tokens_of_engines_that_prefill_everything(family):
    model, _ = family
    sizes = dict(max_rows=5, max_tokens=160)
    engine = engine_for(model, **sizes, prefix_cache_bytes=2**24)
    expected = turns(engine_for(model, **sizes, prefix_reuse=False))
    same = [(a, b) for a, b in zip(turns(engine), expected) if a[0] == b[0]]
    assert len(same) >= len(expected) - 3  # a tie may fall the other way, and the turns after it differ
    for a, b in same:
        torch.testing.assert_close(torch.tensor(a[1]), torch.tensor(b[1]), rtol=0, atol=1e-3)


@pytest.mark.two_gpus
def test_two_tensor_parallel_ranks_sample_the_tokens_of_one():
    model, _ = trained_model(device="cuda")
    alone = engine_for(model, max_rows=8, max_tokens=128).generate(
        PROMPTS, Sampling(max_new_tokens=40, seed=5, top_p=0.95), num_generations=2
    )
    weights = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    pool = Pool(2, timeout=300, device_type="cuda")
    try:
        first, second = pool.run(in_two, weights, model.config, torch.float32)
    finally:
        pool.close()
    assert first == second
    assert sum(a.ids == b.ids for a, b in zip(alone, first)) >= len(alone) - 1


PROCESSING = [
    LogitsProcessing(),
    LogitsProcessing(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    LogitsProcessing(logit_bias=((7, 3.0), (11, -100.0))),
    LogitsProcessing(frequency_penalty=0.4, bad_words=((4,), (23, 62), (9, 23, 62), (89, 81))),
]


@pytest.mark.parametrize("kind", range(1, 4))
def test_processed_logits_in_a_graph_give_what_a_cpu_gives(kind):
    model, _ = trained_model(steps=24, device="cuda")
    sampling = Sampling(40, 0.8, seed=4, stop=(3,), processing=PROCESSING[kind])
    done = engine_for(model, max_rows=5, max_tokens=128).generate(PROMPTS, sampling)
    expected = engine_for(model.cpu(), max_rows=5, max_tokens=128).generate(PROMPTS, sampling)
    same = [(a, b) for a, b in zip(done, expected) if a.ids == b.ids]
    assert len(same) >= len(done) - 1  # a tie may fall the other way
    for a, b in same:
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-3)


def test_requests_with_processed_logits_join_rows_in_use():
    """Graphs with penalties, biases and masks are captured while plain requests run, whose tokens stay the same."""
    model, _ = trained_model(steps=24, device="cuda")
    engine, expected = engine_for(model, max_rows=4, max_tokens=128), []
    for number, prompt in enumerate(PROMPTS):
        sampling = Sampling(40, 0.9, seed=4, stop=(3,), processing=PROCESSING[number % 4])
        (done,) = engine.generate([prompt], sampling, keys=[number])
        expected.append(done.ids)
    engine.release()
    live = LiveEngine(engine, stop=(3,))
    results, left = [[] for _ in PROMPTS], set(range(len(PROMPTS)))

    def callback(number):
        def on_tokens(ids, logprobs, reason):
            if number == 0 and not results[0]:  # the first tokens of a plain request
                for other in (1, 2, 3, *range(5, len(PROMPTS))):
                    submit(other)
            results[number].extend(ids)
            if reason is not None:
                left.remove(number)
                if not left:
                    live.close()

        return on_tokens

    def submit(number):
        request = LiveRequest(
            PROMPTS[number], 40, 0.9, seed=4, key=number * MAX_GENERATIONS, processing=PROCESSING[number % 4]
        )
        live.submit([request], [callback(number)])

    submit(0)
    submit(4)
    live.run()
    assert sum(a == b for a, b in zip(results, expected)) >= len(PROMPTS) - 1


def test_a_stop_string_ends_a_row_between_windows():
    model, _ = trained_model(steps=24, device="cuda")
    tokenizer, sampling = ByteTokenizer(), Sampling(40, 0.9, seed=4, stop=(3,))
    engine = engine_for(model, max_rows=4, max_tokens=128)
    plain = engine.generate(PROMPTS, sampling)
    texts = [tokenizer.decode(one.ids) for one in plain]
    stop = texts[0][4:6]
    done = engine.generate(PROMPTS, replace(sampling, stop_strings=StopStrings(tokenizer, [stop])))
    for one, other, text in zip(done, plain, texts):
        count = text.find(stop) + len(stop) if stop in text else len(other.ids)
        assert one.ids == other.ids[:count]


def test_requests_at_any_time_get_the_tokens_of_a_batch_call():
    """By CUDA graphs with and without filters, with settings per row, and with a request that is cancelled."""
    model, _ = trained_model(steps=24, device="cuda")
    kinds = [(1.0, 0, 1.0, 0.0), (0.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0)]
    settings = [kinds[number % 4] for number in range(len(PROMPTS))]
    engine, expected = engine_for(model, max_rows=4, max_tokens=128), []
    for number, (prompt, one) in enumerate(zip(PROMPTS, settings)):
        (done,) = engine.generate([prompt], Sampling(40, *one, seed=4, stop=(3,)), keys=[number])
        expected.append((done.ids, done.logprobs))
    live = LiveEngine(engine, stop=(3,))
    results, left = [([], []) for _ in PROMPTS], set(range(len(PROMPTS)))

    def callback(number):
        def on_tokens(ids, logprobs, reason):
            results[number][0].extend(ids)
            results[number][1].extend(logprobs)
            if reason is not None:
                left.remove(number)
                if number == 0:
                    submit(range(2, len(PROMPTS)))
                    live.cancel(endless)
                if not left:
                    live.close()

        return on_tokens

    def submit(numbers):
        for number in numbers:
            request = LiveRequest(
                PROMPTS[number], 40, *settings[number], seed=4, key=number * MAX_GENERATIONS
            )
            live.submit([request], [callback(number)])

    (endless,) = live.submit([LiveRequest([5, 6], 120, ignores_stop=True)], [lambda *event: None])
    submit(range(2))
    live.run()
    for (ids, logprobs), (their_ids, their_logprobs) in zip(results, expected, strict=True):
        assert ids == their_ids and logprobs == pytest.approx(their_logprobs, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "experts"])
def test_several_adapters_in_a_graph_equal_eager_steps_and_merged_models(name: str, dtype: torch.dtype):
    """Slots are filled again after the capture. In bf16 only the same engine without graphs is compared."""
    model, _ = trained_model(steps=24, device="cuda", **FAMILIES[name])
    parts = ("experts.linear_fc1", "experts.linear_fc2", "linear_qkv", "linear_proj")
    sites = {
        site: module
        for site, module in model.named_modules()
        if site.endswith(parts) or (name == "llama" and site.endswith(("linear_fc1", "linear_fc2")))
    }
    sizes = SlotSizes(2, dict.fromkeys(sites, 8))
    generator = torch.Generator().manual_seed(1)

    def adapter() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        pairs = {}
        for site, module in sites.items():
            *experts, rows, columns = module.weight.shape
            a = 0.1 * torch.randn(*experts, 4, columns, generator=generator)
            pairs[site] = a, 0.1 * torch.randn(*experts, rows, 4, generator=generator)
        return pairs

    slots = [number % 3 for number in range(len(PROMPTS))]
    sampling, room = Sampling(max_new_tokens=24, seed=5), dict(max_rows=8, max_tokens=128, dtype=dtype)
    graphed = engine_for(model, **room, adapter_slots=sizes)
    eager = engine_for(model, **room, adapter_slots=sizes, graphs=False, compile=False)
    for adapters in ({1: adapter(), 2: adapter()}, {1: adapter(), 2: {}}):
        done = []
        for engine in (graphed, eager):
            for slot, pairs in adapters.items():
                engine.set_adapter(slot, pairs)
            done.append(engine.generate(PROMPTS, sampling, adapters=slots))
        same = sum(a.ids == b.ids for a, b in zip(*done))
        assert same >= len(PROMPTS) - (1 if dtype == torch.float32 else 4)
        if dtype == torch.bfloat16:
            continue
        for slot, pairs in {0: {}, **adapters}.items():
            merged = deepcopy(model)
            with torch.no_grad():
                for site, (a, b) in pairs.items():
                    merged.get_submodule(site).weight += (b @ a).cuda()
            alone = engine_for(merged, **room).generate(PROMPTS, sampling)
            numbers = [number for number in range(len(PROMPTS)) if slots[number] == slot]
            same = sum(done[0][number].ids == alone[number].ids for number in numbers)
            assert same >= len(numbers) - 1
