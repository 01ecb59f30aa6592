"""Batch-invariant kernels against fp32, and engine and trainer with the same bits in bf16."""

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from megalith.config import RunConfig
from megalith.generation.requests import Sampling
from megalith.generation.sync import engine_for
from megalith.launch.pool import Pool
from megalith.ops.attention_core import attention as ordinary_attention
from megalith.ops.batch_invariant import matmul as matmuls
from megalith.ops.batch_invariant import norms
from megalith.ops.batch_invariant.elementwise import sum_by_pairs
from megalith.ops.batch_invariant.invariant_attention import attend, attention, cached_attention, first_keys
from megalith.ops.batch_invariant.matmul import matmul, sum_of_parts
from megalith.ops.batch_invariant.token_logprobs import statistics
from megalith.ops.documents import padding_attention_mask
from megalith.parallel.mesh import build_mesh
from megalith.rl.rollouts.rollout_rows import Sample, make_batch, pack_rows
from megalith.rl.rollouts.rollouts import RatedCompletion
from megalith.training.build import build_model
from megalith.training.training_job import train

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def rand(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, bound: float) -> bool:
    return bool((ours.float() - theirs.float()).norm() <= bound * theirs.float().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "out"), [(64, 96), (2048, 8192), (250, 1000), (8192, 2048)])
def test_a_matmul_is_right_and_a_row_has_the_same_bits_in_every_batch(inner, out, dtype):
    torch.manual_seed(0)
    x, weight = rand(777, inner, dtype=dtype), rand(out, inner, dtype=dtype)
    every = matmul(x, weight)
    assert close(every, x.double() @ weight.double().T, DTYPES[dtype])
    for rows in (1, 2, 16, 100, 128, 129):
        assert torch.equal(matmul(x[:rows], weight), every[:rows])
    for position in (1, 17, 63, 127, 128, 500):
        assert torch.equal(matmul(x.roll(position, 0), weight)[position], every[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "out"), [(64, 96), (4096, 2048), (1000, 250), (14_336, 512)])
def test_a_matmul_in_parts_is_right_and_ranks_add_the_same_bits(inner, out, dtype):
    torch.manual_seed(0)
    x, weight = rand(300, inner, dtype=dtype), rand(out, inner, dtype=dtype)
    every = sum_of_parts(x, weight, 8, torch.float32)
    assert close(every, x.double() @ weight.double().T, 1e-5)
    assert close(sum_of_parts(x, weight, 8, dtype), every, DTYPES[dtype])
    for rows in (1, 16, 129):
        assert torch.equal(sum_of_parts(x[:rows], weight, 8, torch.float32), every[:rows])
    for ranks in (2, 4, 8):
        shards = zip(x.chunk(ranks, 1), weight.chunk(ranks, 1))
        sums = [sum_of_parts(*shard, 8 // ranks, torch.float32) for shard in shards]
        assert torch.equal(sum_by_pairs(torch.stack(sums)), every)
    for ranks in (2, 8):  # of a column-parallel linear
        shards = weight.chunk(ranks)
        assert torch.equal(torch.cat([matmul(x, shard) for shard in shards], 1), matmul(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_parts", [False, True])
def test_a_grouped_matmul_is_the_matmul_of_each_expert(in_parts, dtype):
    torch.manual_seed(0)
    multiply = partial(matmuls.matmul_in_parts, parts=8) if in_parts else matmuls.tiled_matmul
    sizes = [0, 300, 1, 0, 128, 77, 0]
    x, weight = rand(sum(sizes) + 40, 512, dtype=dtype), rand(len(sizes), 640, 512, dtype=dtype)
    ends = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    y, first = multiply(x, weight, dtype, ends=ends), 0
    for expert, size in enumerate(sizes):
        rows = x[first : first + size]
        assert (
            close(y[first : first + size], rows.double() @ weight[expert].double().T, DTYPES[dtype])
            or not size
        )
        if size:  # the same expert with fewer rows, elsewhere in the buffer
            counts = torch.zeros(len(sizes), dtype=torch.int64)
            counts[expert] = 1
            alone = multiply(
                rows[-1:].contiguous(), weight, dtype, ends=counts.cumsum(0).to("cuda", torch.int32)
            )
            assert torch.equal(alone[0], y[first + size - 1])
        first += size


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("groups", [1, 3])
def test_the_bits_of_a_matmul_do_not_depend_on_its_tiles(groups, parts):
    from megalith.ops.kernels import invariant_matmul as kernel

    torch.manual_seed(0)
    x, weight = rand(700, 1024, dtype=torch.bfloat16), rand(groups, 650, 1024, dtype=torch.bfloat16)
    ends = torch.tensor([300, 300, 700], device="cuda", dtype=torch.int32) if groups > 1 else None
    matrices = weight if groups > 1 else weight[0]
    assert kernel.has_descriptors(x, matrices, parts) == (torch.cuda.get_device_capability()[0] >= 9)
    every = kernel.matmul_in_parts(x, matrices, torch.float32, parts, ends)
    assert close(every[:300], x[:300].double() @ weight[0].double().T, 1e-5)
    tiles = {kernel.NARROW, kernel.MIDDLE, kernel.WIDE_IN_PARTS if parts > 1 else kernel.WIDE}
    spread = {False, parts > 1 and groups == 1}
    for tile, described, each in product(tiles, {False, kernel.has_descriptors(x, matrices, parts)}, spread):
        if described or tile is not kernel.WIDE:  # which `matmul_in_parts` reads only by descriptors
            y = kernel.multiply(x, matrices, torch.float32, parts, ends, tile, described, each)
            assert torch.equal(y, every), (tile, described, each)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("width", [64, 1000, 4096])
def test_a_norm_and_its_gradient_are_the_ordinary_ones(width, centred, dtype):
    torch.manual_seed(0)
    x, weight = rand(300, width, dtype=dtype).requires_grad_(), rand(width).requires_grad_()
    bias = rand(width).requires_grad_() if centred else None
    y = norms.norm(x, weight, bias, 1e-5, False)
    wide = x.detach().float().requires_grad_()
    expected = (
        F.layer_norm(wide, (width,), weight, bias, 1e-5)
        if centred
        else F.rms_norm(wide, (width,), weight, 1e-5)
    )
    assert close(y, expected, DTYPES[dtype])
    assert torch.equal(norms.norm(x[7:8], weight, bias, 1e-5, False), y[7:8])
    grad = torch.randn_like(y)
    parameters = [weight] if bias is None else [weight, bias]
    ours = torch.autograd.grad(y, [x, *parameters], grad)
    theirs = torch.autograd.grad(expected, [wide, *parameters], grad.float())
    assert all(close(a, b, DTYPES[dtype]) for a, b in zip(ours, theirs))


EVERY = torch.ones(1, dtype=torch.bool)


@pytest.mark.parametrize("vocab", [100, 4096, 50_257])
def test_softmax_statistics_are_those_of_fp64(vocab):
    torch.manual_seed(0)
    logits, ids = 3 * rand(100, vocab), torch.randint(vocab, (100,), device="cuda")
    log_p = (logits.double() / 0.7).log_softmax(-1)
    log_sum, logit, entropy = statistics(logits, ids[:, None], EVERY.cuda(), 0.7, True)
    expected = log_p.gather(1, ids[:, None])[:, 0]
    assert (logit[:, 0] - log_sum - expected).abs().max() < 1e-5
    assert (entropy + (log_p.exp() * log_p).sum(-1)).abs().max() < 1e-4
    assert torch.equal(statistics(logits[9:10], ids[9:10, None], EVERY.cuda(), 0.7, False)[0], log_sum[9:10])


BATCH, SEQ = 3, 300
DOCUMENTS = torch.tensor([[300, 300, 300], [1, 133, 300], [200, 264, 300]], dtype=torch.int32)
PADDING = torch.arange(SEQ) < torch.tensor([[0], [9], [133]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "groups", "size"), [(8, 2, 64), (6, 6, 80), (28, 4, 128), (4, 4, 192)])
def test_attention_is_right_and_has_the_same_bits_in_prefill_decode_and_packed_rows(
    heads, groups, size, window, dtype
):
    torch.manual_seed(0)
    inputs = [rand(BATCH, SEQ, n, size, dtype=dtype).requires_grad_() for n in (heads, groups, groups)]
    documents, mask = DOCUMENTS.cuda(), padding_attention_mask(PADDING).cuda()
    grad = rand(BATCH, SEQ, heads, size, dtype=dtype)
    for seen in ({}, {"documents": documents}, {"mask": mask}):
        out = attention(*inputs, window=window, **seen)
        wide = [x.detach().float().requires_grad_() for x in inputs]
        expected = ordinary_attention(*wide, window=window, **seen)
        both = zip(
            (out, *torch.autograd.grad(out, inputs, grad)),
            (expected, *torch.autograd.grad(expected, wide, grad.float())),
        )
        assert all(close(a, b, 2 * DTYPES[dtype]) for a, b in both)
    query, key, value = (x.detach() for x in inputs)
    whole = attention(query, key, value, window=window)
    packed = attention(query, key, value, window=window, documents=documents)
    for length in (1, 63, 65, 200):
        part = (x[1:2, :length] for x in (query, key, value))
        assert torch.equal(attention(*part, window=window), whole[1:2, :length])
    for row, first, last in ((1, 1, 133), (2, 200, 264), (2, 264, 300)):
        alone = (x[row : row + 1, first:last] for x in (query, key, value))
        assert torch.equal(packed[row : row + 1, first:last], attention(*alone, window=window))
    chunks = torch.cat([torch.arange(75), torch.arange(225, 300)]).cuda()  # a context-parallel rank's queries
    starts = first_keys(SEQ, None, documents)[:, chunks]
    local, _ = attend(query[:, chunks], key, value, chunks.expand(BATCH, -1), starts, window, size**-0.5)
    assert torch.equal(local, packed[:, chunks])
    cache, each = torch.stack([key, value]).clone(), torch.arange(BATCH, device="cuda")
    positions = torch.tensor([0, 299, 133], device="cuda")
    new = (x[each, positions][:, None] for x in (query, key, value))
    decoded = cached_attention(*new, cache, positions, None, window=window, scale=None)
    assert torch.equal(decoded[:, 0], whole[each, positions])
    odd = cache.new_empty(*cache.shape[:-1], size + 3)[..., :size].copy_(
        cache
    )  # rows at any multiple of 2 or 4 bytes
    assert torch.equal(attention(query, *odd, window=window), attention(query, *cache, window=window))
    last = torch.full((BATCH, 1), SEQ - 1, device="cuda")
    one = (attend(query[:, -1:], *keys, last, None, window, size**-0.5)[0] for keys in (odd, cache))
    assert torch.equal(*one)


LLAMA = dict(
    num_layers=2, hidden_size=256, num_attention_heads=8, num_query_groups=2, ffn_hidden_size=512, vocab_size=1000,
    make_vocab_size_divisible_by=8, max_position_embeddings=512, position_embedding_type="rope", init_method_std=0.1,
    normalization="RMSNorm", swiglu=True, add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
MODELS = {
    "dense": dict(qk_layernorm=True),
    "windows": dict(window_size=[31, 0], window_attn_skip_freq=2),
    "latent attention": dict(
        multi_latent_attention=True,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_head_dim=128,
        qk_pos_emb_head_dim=64,
        v_head_dim=128,
        num_query_groups=0,
    ),
    "experts": dict(num_experts=8, moe_ffn_hidden_size=128, moe_router_topk=3),
    "multi-token prediction": dict(mtp_num_layers=1),
}
LAYOUTS = {
    "tp": dict(tensor_model_parallel_size=2),
    "tp sp": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "ep": dict(expert_model_parallel_size=2),
    "ep static": dict(expert_model_parallel_size=2, moe_static_dispatch=True),
    "ep allgather": dict(expert_model_parallel_size=2, moe_token_dispatcher_type="allgather"),
    "etp": dict(expert_tensor_parallel_size=2),
    "ep tp sp": dict(expert_model_parallel_size=2, tensor_model_parallel_size=2, sequence_parallel=True),
    "cp all_gather": dict(context_parallel_size=2, cp_comm_type="all_gather"),
    "cp a2a": dict(context_parallel_size=2, cp_comm_type="a2a"),
}
IN_TWO = [
    (name, layout)
    for name, layout in product(MODELS, LAYOUTS)
    if name == "experts" or not ("ep" in layout or "etp" in layout)
]
PROMPTS = [[5, 9, 2], [7, 1, 4, 4, 11, 80], [3], list(range(20, 155)), [9] * 64]


def run_config(folder, model: dict, **sections) -> RunConfig:
    tree = dict(
        model=LLAMA | model,
        data=dict(seq_length=256),
        optim=dict(lr=1e-3),
        train=dict(
            train_iters=3, micro_batch_size=1, global_batch_size=8, precision="bf16", output_dir=str(folder),
            eval_iters=0,
        ),
        log=dict(layout_report=False),
        checkpoint=dict(save_at_end=False),
    )  # fmt: skip
    return RunConfig.from_tree(
        {name: tree.get(name, {}) | sections.get(name, {}) for name in tree | sections}
    )


def exact_config(folder, name: str, parallel: dict) -> RunConfig:
    (folder / "prompts.jsonl").write_text('{"prompt": "1"}\n')
    rl = dict(prompts=str(folder / "prompts.jsonl"), reward_funcs="length", exact=True, num_generations=4)
    return run_config(folder, MODELS[name], rl=rl, parallel=parallel)


def exact_model(config: RunConfig, size: int = 1):
    has_experts = config.model.num_experts is not None
    device = torch.device("cuda", torch.cuda.current_device())
    return build_model(config, build_mesh(config.parallel, size, "cuda", has_experts=has_experts), device)


def completions(model, rows: int, graphs: bool, count: int = 3) -> dict[tuple[int, int], tuple]:
    """Token ids and log-probabilities by prompt and generation."""
    engine = engine_for(model, max_rows=rows, max_tokens=256, graphs=graphs)
    sampling = Sampling(max_new_tokens=60, temperature=0.7, seed=3)
    done = engine.generate(PROMPTS, sampling, num_generations=count)
    return {(each.prompt, each.generation): (each.ids, each.logprobs) for each in done}


def assert_scored_alike(config: RunConfig, model, done: dict[tuple[int, int], tuple]) -> None:
    """Assert that the trainer gives completions the engine's log-probabilities, however they are batched."""
    samples = [
        Sample(
            np.array(PROMPTS[prompt]),
            RatedCompletion(np.array(ids), np.zeros(1), logprobs=np.array(logprobs, np.float32)),
            1.0,
            True,
        )
        for (prompt, _), (ids, logprobs) in done.items()
    ]
    for packing, micro in ((False, 1), (False, 5), (True, 1), (True, 3)):
        changed = config.with_settings({"rl.packing": packing, "train.micro_batch_size": micro})
        rows = pack_rows(samples, 256 * packing)
        rows += [[]] * (-len(rows) % micro)
        batches = [make_batch(changed, rows[at : at + micro], 0) for at in range(0, len(rows), micro)]
        for ours, batch in zip(model.all_logprobs(batches, 0.7, 1000), batches):
            if batch.rollout_logprobs is not None:
                counted = batch.loss_mask > 0
                assert torch.equal(ours.cpu()[counted], batch.rollout_logprobs[counted]), (packing, micro)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_engine_and_trainer_have_the_same_bits_in_bf16(tmp_path, name, graphs):
    config = exact_config(tmp_path, name, {})
    model = exact_model(config)
    results = [completions(model, rows, graphs, 3 if rows > 1 else 1) for rows in (16, 3, 1)]
    assert results[1] == results[0]
    assert all(results[0][which] == found for which, found in results[2].items())
    assert_scored_alike(config, model, results[0])


def exact_in_two(config: RunConfig) -> dict[tuple[int, int], tuple]:
    model = exact_model(config, 2)
    done = completions(model, 3, graphs=False)
    assert_scored_alike(config, model, done)
    return done


@pytest.mark.two_gpus
@pytest.mark.parametrize(("name", "layout"), IN_TWO)
def test_two_ranks_have_the_bits_of_one(tmp_path, name, layout):
    alone = completions(exact_model(exact_config(tmp_path, name, {})), 16, graphs=False)
    pool = Pool(2, timeout=300, device_type="cuda")
    try:
        first, second = pool.run(exact_in_two, exact_config(tmp_path, name, LAYOUTS[layout]))
    finally:
        pool.close()
    assert first == second == alone


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_losses_have_the_same_bits_for_every_micro_batch_size(tmp_path, name):
    losses = []
    for micro in (1, 2, 8):
        settings = dict(micro_batch_size=micro, batch_invariant=True, deterministic=True)
        base = run_config(tmp_path / str(micro), MODELS[name], data=dict(seq_length=256, mock=True))
        config = base.with_settings({f"train.{key}": value for key, value in settings.items()})
        try:
            train(config)
        finally:
            torch.use_deterministic_algorithms(False)
        lines = (tmp_path / str(micro) / "metrics.jsonl").read_text().splitlines()
        losses.append([line.partition('"loss": ')[2].partition(",")[0] for line in lines])
    assert losses[0] == losses[1] == losses[2] and len(set(losses[0])) == 3
