"""Small models in many layouts on one, two and four GPUs, as users run them: compiled, in bf16 and in FP8.

Each case trains six steps; its losses and gradient norms are those of one GPU within the noise of bf16. That noise is
measured: it is how far one GPU in bf16 is from one GPU in fp32 for the same model and data.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from megalith.config import RunConfig
from megalith.launch.pool import Pool
from megalith.parity.check import (
    A2A,
    A2A_P2P,
    CP2,
    CP4,
    EP2,
    EP4,
    ETP2,
    GATHER,
    PING_PONG,
    PP2,
    PP4,
    SP,
    STATIC,
    TOKENS_GATHERED,
    TP2,
    TP4,
    TWO_COPIES,
    VIRTUAL,
    ZERO1,
    ZERO2,
    ZERO3,
    ZERO_BUBBLE,
)
from megalith.parity.differences import relative_error
from megalith.parity.job import start
from megalith.training.trainer import Trainer

STEPS = 6
Curve = tuple[list[float], list[float]]  # the losses and the gradient norms of the steps
LOSS_BOUND, NORM_BOUND = 2e-3, 2e-2  # where the noise of a model is less than half of these

GPT = dict(num_layers=4, hidden_size=256, num_attention_heads=8, vocab_size=1000, max_position_embeddings=256,
           hidden_dropout=0.1, attention_dropout=0.0)  # fmt: skip
LLAMA = dict(GPT, hidden_dropout=0.0, num_query_groups=4, ffn_hidden_size=512, swiglu=True, normalization="RMSNorm",
             add_bias_linear=False, position_embedding_type="rope",
             untie_embeddings_and_output_weights=True)  # fmt: skip
MOE = dict(LLAMA, num_experts=8, moe_ffn_hidden_size=128, moe_aux_loss_coeff=0.01)
MODELS = {
    "gpt": GPT,
    "llama": LLAMA,
    "moe": MOE,
    "deepseek": dict(
        MOE, multi_latent_attention=True, num_query_groups=0, q_lora_rank=64, kv_lora_rank=64, qk_head_dim=32,
        qk_pos_emb_head_dim=32, v_head_dim=32, moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True, moe_shared_expert_intermediate_size=128,
    ),
    "gpt-oss": dict(
        MOE, softmax_type="learnable", window_size=[64, 0], window_attn_skip_freq=2, swiglu=False,
        gated_linear_unit=True, activation="quick_gelu", activation_func_clamp_value=7.0, glu_linear_offset=1.0,
        add_qkv_bias=True, add_proj_bias=True, add_mlp_bias=True, add_router_bias=True,
    ),
    "hybrid": dict(
        MOE, experimental_attention_variant="gated_delta_net", linear_attention_freq=2, linear_num_key_heads=4,
        linear_num_value_heads=8, linear_key_head_dim=32, linear_value_head_dim=32, attention_output_gate=True,
        layernorm_zero_centered_gamma=True,
    ),
    "bert": dict(GPT, model_type="bert", hidden_dropout=0.0),
    "t5": dict(GPT, model_type="t5", position_embedding_type="relative", normalization="RMSNorm",
               add_bias_linear=False, hidden_dropout=0.0),
}  # fmt: skip
DOCUMENTS = dict(
    tokenizer_type="NullTokenizer", reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True
)
FP8 = {"train": dict(fp8_format="hybrid")}
BLOCKWISE = {"train": dict(fp8_format="e4m3", fp8_recipe="blockwise")}
LORA = {"lora": dict(rank=8)}
RECOMPUTED = dict(recompute_granularity="full")
SOME_RECOMPUTED = dict(recompute_granularity="selective", recompute_modules=["layernorm", "mlp"])
OFFLOADED = dict(cpu_offloading_num_layers=2)
COPY_ENGINES = dict(symmetric_memory_groups=["tp", "cp"])

# (model, GPUs): name → settings of `parallel`, and further sections.
CASES: dict[tuple[str, int], dict[str, tuple[dict, dict]]] = {
    ("llama", 1): {
        "recomputed": (RECOMPUTED, {}),
        "some recomputed": (SOME_RECOMPUTED, {}),
        "activations offloaded": (OFFLOADED, {}),
        "moments in bf16": ({}, {"optim": dict(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")}),
    },
    ("moe", 1): {
        "recomputed": (RECOMPUTED, {}),
        "looped experts": ({}, {"model": dict(moe_grouped_gemm=False)}),
    },
    ("gpt", 2): {
        "tp2": (TP2, {}),
        "tp2-sp-overlap": (TP2 | SP | PING_PONG, {}),
        "pp2-interleaved": (PP2 | VIRTUAL, {}),
        "dp2-zero3": (ZERO3, {}),
    },
    ("llama", 2): {
        "tp2-sp": (TP2 | SP, {}),
        "tp2-sp copy engines": (TP2 | SP | PING_PONG | COPY_ENGINES, {}),
        "tp2-sp fp8": (TP2 | SP, FP8),
        "cp2 ring, documents": (CP2, {"data": DOCUMENTS}),
        "cp2-a2a copy engines": (CP2 | A2A | COPY_ENGINES, {}),
        "cp2-all_gather": (CP2 | GATHER, {}),
        "pp2-zero_bubble": (PP2 | ZERO_BUBBLE, {}),
        "pp2 recomputed": (PP2 | RECOMPUTED, {}),
        "dp2-zero1": (ZERO1, {}),
        "dp2-zero2, documents": (ZERO2, {"data": DOCUMENTS}),
        "dp2-zero3 fp8": (ZERO3, FP8),
        "dp2-zero3 blockwise": (ZERO3, BLOCKWISE),
        "tp2-sp lora": (TP2 | SP, LORA),
        "dp2-zero3 lora": (ZERO3, LORA),
    },
    ("moe", 2): {
        "ep2": (EP2, {}),
        "ep2-static": (EP2 | STATIC, {}),
        "ep2-allgather": (EP2 | TOKENS_GATHERED, {}),
        "ep2-zero3 fp8": (EP2 | ZERO3, FP8),
        "tp2-sp-ep2": (TP2 | SP | EP2, {}),
        "tp2-sp-etp2": (TP2 | SP | ETP2, {}),
    },
    ("deepseek", 2): {"ep2-zero1": (EP2 | ZERO1, {}), "tp2-sp-ep2": (TP2 | SP | EP2, {})},
    ("gpt-oss", 2): {"ep2": (EP2, {}), "tp2-sp": (TP2 | SP, {}), "cp2-a2a": (CP2 | A2A, {})},
    ("hybrid", 2): {"tp2": (TP2, {}), "tp2-sp-ep2": (TP2 | SP | EP2, {}), "dp2-zero3": (ZERO3, {})},
    ("bert", 2): {"tp2-sp": (TP2 | SP, {}), "cp2-a2a": (CP2 | A2A, {}), "pp2": (PP2, {})},
    ("t5", 2): {"tp2-sp": (TP2 | SP, {}), "dp2-zero3": (ZERO3, {})},
    ("gpt", 4): {"tp2-pp2": (TP2 | PP2, {}), "dp4-zero2-hybrid": (ZERO2 | TWO_COPIES, {})},
    ("llama", 4): {
        "tp2-sp-dp2-zero3": (TP2 | SP | ZERO3, {}),
        "tp2-sp-dp2-zero3 fp8": (TP2 | SP | ZERO3, FP8),
        "tp2-sp-cp2": (TP2 | SP | CP2, {}),
        "tp2-sp-cp2-a2a copy engines": (TP2 | SP | CP2 | A2A | PING_PONG | COPY_ENGINES, {}),
        "tp2-sp-pp2-interleaved": (TP2 | SP | PP2 | VIRTUAL, {}),
        "tp2-sp-pp2-zero_bubble": (TP2 | SP | PP2 | ZERO_BUBBLE, {}),
        "tp4-sp": (TP4 | SP, {}),
        "cp4, documents": (CP4, {"data": DOCUMENTS}),
        "cp4-a2a+p2p": (CP4 | A2A_P2P, {}),
        "cp2-dp2-zero3": (CP2 | ZERO3, {}),
        "pp2-dp2-zero2": (PP2 | ZERO2, {}),
        "pp4-zero_bubble": (PP4 | ZERO_BUBBLE, {}),
        "dp4-zero3-hybrid lora": (ZERO3 | TWO_COPIES, LORA),
    },
    ("moe", 4): {
        "ep4": (EP4, {}),
        "ep4-zero3-static": (EP4 | ZERO3 | STATIC, {}),
        "ep2-dp4-zero2": (EP2 | ZERO2, {}),
        "tp2-sp-etp2-ep2": (TP2 | SP | ETP2 | EP2, {}),
        "pp2-ep2 recomputed": (PP2 | EP2 | RECOMPUTED, {}),
    },
    ("deepseek", 4): {"tp2-sp-cp2-a2a-ep4": (TP2 | SP | CP2 | A2A | EP4, {}), "ep4-zero3": (EP4 | ZERO3, {})},
    ("gpt-oss", 4): {"tp2-sp-etp2-ep2": (TP2 | SP | ETP2 | EP2, {}), "pp2-ep2": (PP2 | EP2, {})},
    ("hybrid", 4): {"tp2-sp-ep2-zero3": (TP2 | SP | EP2 | ZERO3, {}), "pp2-ep2": (PP2 | EP2, {})},
}
MARKS = {1: (), 2: pytest.mark.two_gpus, 4: pytest.mark.four_gpus}
AT_ONCE = 4  # cases of a test, which share a process group and the runs on one GPU
SAVED = [  # a model, the layout that saves, the layout that goes on, and how many GPUs both take
    pytest.param("moe", TP2 | SP | EP2, EP2 | ZERO3, 2, marks=pytest.mark.two_gpus, id="moe"),
    pytest.param("llama", ZERO3, PP2 | ZERO1, 2, marks=pytest.mark.two_gpus, id="llama-2"),
    pytest.param("llama", TP2 | SP | PP2, CP2 | ZERO3, 4, marks=pytest.mark.four_gpus, id="llama-4"),
]


def groups() -> Iterator[ParameterSet]:
    """Yield (model, GPUs, names of cases) for each test."""
    for (model, size), layouts in CASES.items():
        for names in batched(layouts, AT_ONCE):
            yield pytest.param(model, size, names, marks=MARKS[size], id=f"{model}-{size}-{names[0]}")


def batched(names: Iterable[str], count: int) -> Iterator[list[str]]:
    names = list(names)
    for first in range(0, len(names), count):
        yield names[first : first + count]


def config_of(model: str, parallel: dict, sections: dict, output: str = "", **train) -> RunConfig:
    tree = {
        "model": dict(MODELS[model]),
        "parallel": dict(parallel),
        "data": dict(mock=True, seq_length=256, num_workers=0),
        "optim": dict(lr=1e-3, clip_grad=1.0),
        "train": dict(train_iters=STEPS, micro_batch_size=2, global_batch_size=16, eval_iters=0, precision="bf16",
                      output_dir=output, **train),
        "log": dict(layout_report=False),
        "runtime": dict(device="cuda"),
    }  # fmt: skip
    if model == "t5":
        tree["data"]["decoder_seq_length"] = 128
    for section, settings in sections.items():
        tree[section] = tree.get(section, {}) | settings
    return RunConfig.from_tree(tree)


def losses_and_norms(config: RunConfig) -> Curve:
    torch._dynamo.reset()  # code of the case before does not count against this one's limit
    run = start(config)
    with run.data.train_loader(0, 0, run.device) as batches:
        steps = [run.train_step(batches) for _ in range(STEPS)]
    return [step.loss.item() for step in steps], [step.grad_norm.item() for step in steps]


def train_to_end(config: RunConfig) -> list[float]:
    """Train through the command's own loop, with its checkpoints; return the losses of the steps it ran."""
    losses, run = [], start(config)
    step = run.train_step
    run.train_step = lambda *given: losses.append(step(*given)) or losses[-1]
    Trainer(run).train()
    return [each.loss.item() for each in losses]


@pytest.fixture(scope="module")
def pool():
    pool = Pool(max(1, min(4, torch.cuda.device_count())), timeout=400.0, device_type="cuda")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> Path:
    """Folder of the curves of one GPU, which the workers of pytest-xdist share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if os.environ.get("PYTEST_XDIST_WORKER") else folder


def on_one_gpu(
    pool: Pool, references: Path, model: str, names: Sequence[str], size: int
) -> dict[str, Sequence[list[float]]]:
    """Return the curves of one GPU: the model in fp32 and bf16, and in bf16 with the sections of these cases.

    Curves that no test has needed yet are trained, and kept in `references`.
    """
    sections = [{}, *(CASES[model, size][name][1] for name in names)]
    cases = {repr(each): (config_of(model, {}, each),) for each in sections}
    cases["fp32"] = (config_of(model, {}, {"train": dict(precision="fp32")}),)
    path = references / f"{model}.json"
    with open(references / f"{model}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        curves = json.loads(path.read_text()) if path.exists() else {}
        missing = {name: case for name, case in cases.items() if name not in curves}
        if missing:
            trained = pool.run_cases(losses_and_norms, missing, size=1)
            curves |= {name: ranks[0] for name, ranks in trained.items()}
            path.write_text(json.dumps(curves))
    return curves


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("model", "size", "names"), list(groups()))
def test_layouts_give_the_losses_of_one_gpu(pool, references, model, size, names):
    alone, wrong = on_one_gpu(pool, references, model, names, size), {}
    loss_noise, norm_noise = (relative_error(*pair) for pair in zip(alone[repr({})], alone["fp32"]))
    layouts = {name: CASES[model, size][name] for name in names}
    cases = {name: (config_of(model, parallel, sections),) for name, (parallel, sections) in layouts.items()}
    for name, ranks in pool.run_cases(losses_and_norms, cases, size=size).items():
        expected = alone[repr(layouts[name][1])]
        loss_error, norm_error = (relative_error(*pair) for pair in zip(ranks[0], expected))
        print(f"{model} on {size}, {name}: losses {loss_error:.1e}, norms {norm_error:.1e}")
        assert all(rank == ranks[0] for rank in ranks), name
        if loss_error > max(LOSS_BOUND, 2 * loss_noise) or norm_error > max(NORM_BOUND, 2 * norm_noise):
            wrong[name] = loss_error, norm_error
    assert not wrong, (wrong, loss_noise, norm_noise)


@pytest.mark.parametrize(("model", "first", "second", "size"), SAVED)
def test_a_run_goes_on_in_another_layout(pool, references, tmp_path: Path, model, first, second, size):
    saved = {"checkpoint": dict(load=str(tmp_path))}
    half = config_of(model, first, saved, str(tmp_path), exit_interval=STEPS // 2)
    rest = config_of(model, second, saved, str(tmp_path))
    losses = pool.run(train_to_end, half, size=size)[0] + pool.run(train_to_end, rest, size=size)[0]
    alone = on_one_gpu(pool, references, model, (), size)
    noise = relative_error(alone[repr({})][0], alone["fp32"][0])
    assert relative_error(losses, alone[repr({})][0]) <= max(LOSS_BOUND, 2 * noise)


def test_there_are_enough_cases_and_every_model_has_some():
    assert sum(len(layouts) for layouts in CASES.values()) >= 60
    assert {model for model, _ in CASES} == set(MODELS)
    assert all(any((model, size) in CASES for size in (2, 4)) for model, size in product(MODELS, [2]))
