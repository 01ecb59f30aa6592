"""FP8 on a GPU: casts to the bit of the CPU's emulation, matmuls against fp64 of their codes, and training runs."""

import math
from unittest import mock

import pytest
import torch

import megalith
from megalith.config import RunConfig
from megalith.models.linear import Linear
from megalith.models.transformer import layers_of
from megalith.ops.fp8 import codes as fp8
from megalith.ops.fp8.codes import E4M3, E5M2
from megalith.ops.fp8.recipes import (
    AmaxTable,
    BlockGemm,
    CurrentScaling,
    DelayedScaling,
    Fp8Gemm,
    Fp8GroupedGemm,
)
from megalith.ops.gemm import linear
from megalith.ops.grouped_gemm import RowGroups
from megalith.parallel import parallel_model
from megalith.parallel.parallel_model import ParallelModel
from megalith.parity.job import Outcome, run_job
from megalith.report.metrics import read_records

ROUNDING = 2**-8  # of one number in bf16, relative
KINDS = ("normal", "wide", "nan", "inf", "zero")


def numbers(rows: int, columns: int, kind: str, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=generator)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-20, 12, x.shape, generator=generator).float())
    elif kind == "blocks":  # of other sizes each
        sizes = torch.exp2(
            torch.randint(-4, 5, (-(-rows // 128), -(-columns // 128)), generator=generator).float()
        )
        x = x * sizes.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    elif kind != "normal":
        x[rows // 2, columns // 3] = {"nan": math.nan, "inf": -math.inf, "zero": 0.0}[kind]
    return (x * 0 if kind == "zero" else x).to(dtype)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit, but that a NaN is any NaN."""
    a, b = found.cpu().float(), expected.float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(-1.5), b.nan_to_num(-1.5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(256, 384), (1, 16), (1003, 77), (4100, 1280)])
def test_codes_and_amax_are_those_of_the_cpu(shape, kind, dtype):
    x = numbers(*shape, kind, dtype)
    for code in (E4M3, E5M2):
        for scale in (1.0, 37.3, 3e4, math.nan):
            given, step_amax = torch.tensor(scale), torch.zeros(2)
            expected = fp8.cast(x, given, step_amax[0], code, True, True)
            found = fp8.cast(x.cuda(), given.cuda(), step_amax.cuda()[1], code, True, True)
            assert all(same(a, b) for a, b in zip(found, expected)), (code, scale)
        on_gpu = torch.zeros((), device="cuda")
        row, none = fp8.cast(x.cuda(), given.cuda(), on_gpu, code, True, False)
        column = fp8.cast(x.cuda(), given.cuda(), None, code, False, True)[1]
        assert same(row, expected[0]) and same(column, expected[1]) and not none.numel()
        assert same(on_gpu, step_amax[0])
    assert same(fp8.amax(x.cuda()), x.abs().amax())
    codes = fp8.quantize(x, torch.tensor(1.0), E4M3)
    assert same(fp8.transpose(codes.cuda()), codes.t())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tiles", [False, True])
def test_blocks_are_those_of_the_cpu(kind, tiles, dtype):
    x = numbers(384, 640, kind, dtype)
    for by_row, by_column in ((True, True), (True, False)):
        for found, expected in zip(
            fp8.cast_blocks(x.cuda(), by_row, by_column, tiles), fp8.cast_blocks(x, by_row, by_column, tiles)
        ):
            assert found.shape == expected.shape and same(found, expected), (by_row, by_column)


def gemm(recipe: str, device: str, saves_weights: bool, dtype: torch.dtype):
    if recipe == "blockwise":
        return BlockGemm(dtype, saves_weights)
    if recipe == "tensorwise":
        return Fp8Gemm(CurrentScaling("hybrid"), dtype, True, saves_weights)
    made = AmaxTable(["linear"], "hybrid", 1, "most_recent", 0, torch.device(device))
    made.step_amax.copy_(torch.tensor([[4.5, 0.4, 4.5]]))
    made.end_step(0.0)
    return Fp8Gemm(DelayedScaling(made, "linear"), dtype, recipe == "delayed", saves_weights)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("saves_weights", [True, False])
@pytest.mark.parametrize("recipe", ["delayed", "wgrad in bf16", "tensorwise", "blockwise"])
def test_matmuls_are_those_of_their_codes_in_fp64(recipe, saves_weights, compiled):
    """The CPU's emulation multiplies the same codes in fp64."""
    x, weight, grad = (
        numbers(*shape, "blocks", torch.bfloat16) * spread
        for shape, spread in (((512, 1280), 1), ((768, 1280), 0.05), ((512, 768), 1))
    )
    results = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        one = gemm(recipe, device, saves_weights, dtype)
        given = [t.to(device, dtype).requires_grad_() for t in (x, weight)]

        def function(x, weight, one=one):
            return linear(x, weight, None, one)

        if compiled and device == "cuda":
            function = torch.compile(function, fullgraph=True)
        y = function(*given)
        results.append([y, *torch.autograd.grad(y, given, grad.to(device, y.dtype))])
    for name, exact, found in zip(("y", "grad of x", "grad of weight"), *results):
        error = (found.cpu().double() - exact.double()).norm() / exact.double().norm()
        print(f"{recipe}, {name}: {error:.1e}")
        assert error < ROUNDING, name


@pytest.mark.parametrize("sizes", [(128, 128, 128), (0, 300, 7, 77)], ids=str)
def test_experts_matmuls_are_those_of_their_codes(sizes):
    rows, groups = sum(sizes), RowGroups(torch.tensor(sizes))
    x, grad = (numbers(rows, width, "normal", torch.bfloat16) for width in (256, 512))
    weight = numbers(len(sizes) * 512, 256, "normal", torch.bfloat16).view(len(sizes), 512, 256) * 0.05
    one = Fp8GroupedGemm(kernel=True)
    exact = one.forward(x, weight, groups), one.dgrad(grad, weight, groups)
    on_gpu = RowGroups(groups.counts.cuda())
    found = one.forward(x.cuda(), weight.cuda(), on_gpu), one.dgrad(grad.cuda(), weight.cuda(), on_gpu)
    for a, b in zip(found, exact):
        assert (a.cpu().double() - b.double()).norm() < 2 * ROUNDING * b.double().norm()


LLAMA = dict(num_layers=2, hidden_size=256, ffn_hidden_size=512, num_attention_heads=4, num_query_groups=2,
             vocab_size=512, max_position_embeddings=128, position_embedding_type="rope", normalization="RMSNorm",
             swiglu=True, add_bias_linear=False, untie_embeddings_and_output_weights=True, hidden_dropout=0.0,
             attention_dropout=0.0)  # fmt: skip
MOE = LLAMA | dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=256, moe_grouped_gemm=True)
SKIPS = {"first_last_layers_bf16": True, "num_layers_at_end_in_bf16": 0}


def configuration(output, model=LLAMA, device="cuda", **settings) -> RunConfig:
    config = RunConfig.from_tree(
        {
            "model": model,
            "data": dict(mock=True, seq_length=128, num_workers=0),
            "optim": dict(lr=1e-3),
            "train": dict(train_iters=10, micro_batch_size=2, global_batch_size=4, eval_iters=0, precision="bf16",
                          fp8_format="hybrid", output_dir=str(output)),
            "runtime": dict(device=device),
        }
    )  # fmt: skip
    return config.with_settings(settings)


RECIPES = {
    "delayed": {},
    "history": {"train.fp8_amax_history_len": 4, "train.fp8_amax_compute_algo": "max"},
    "tensorwise": {"train.fp8_recipe": "tensorwise"},
    "blockwise": {"train.fp8_recipe": "blockwise", "train.fp8_format": "e4m3"},
    "bf16 wgrad": {"train.fp8_wgrad": False},
    "first layer in bf16": {f"train.{name}": value for name, value in SKIPS.items()},
    "recomputed": {"parallel.recompute_granularity": "full", "parallel.recompute_saves_attention": False},
    "attention saved": {"parallel.recompute_granularity": "full", "parallel.recompute_saves_attention": True},
    "lora": {"lora.rank": 8},
}
emulated: dict[str, list[float]] = {}


def losses(config: RunConfig) -> list[float]:
    return run_job(config).losses


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [*RECIPES, "moe"])
def test_ten_steps_are_those_of_the_cpu(tmp_path, recipe, compiled):
    model, settings = (MOE, {}) if recipe == "moe" else (LLAMA, RECIPES[recipe])
    if recipe not in emulated:
        emulated[recipe] = losses(configuration(tmp_path / "cpu", model, "cpu", **settings))
    config = configuration(tmp_path / "gpu", model, **settings, **{"runtime.compile": compiled})
    found = losses(config)
    worst = max(abs(a - b) / b for a, b in zip(found, emulated[recipe], strict=True))
    print(f"{recipe}: {worst:.1e}")
    assert worst < 2e-3 and found[-1] < found[0]  # bf16 rounds attention and norms otherwise on a CPU


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_recomputing_and_resuming_are_bitwise(tmp_path, recipe):
    """A kill is a run that ends after its fifth step's checkpoint."""

    def run(name: str, **settings) -> dict[str, torch.Tensor]:
        config = configuration(
            tmp_path / name, **RECIPES[recipe], **{"train.deterministic": True}, **settings
        )
        megalith.train(config)
        return megalith.load(tmp_path / name).state_dict()

    whole = run("whole")
    full = {"parallel.recompute_granularity": "full"}
    recomputed = run("recomputed", **full, **{"parallel.recompute_saves_attention": False})
    saved = run("saved", **full, **{"parallel.recompute_saves_attention": True})
    parts = {"checkpoint.load": str(tmp_path / "parts")}
    run("parts", **parts, **{"train.exit_interval": 5})
    resumed = run("parts", **parts)
    for name, other in (("recomputed", recomputed), ("saved", saved), ("resumed", resumed)):
        assert all(torch.equal(whole[key], other[key]) for key in whole), name


@pytest.mark.parametrize("recipe", ["delayed", "blockwise"])
def test_counts_in_compiled_layers_change_nothing(tmp_path, recipe):
    found = {}
    for interval in (0, 4):
        settings = RECIPES[recipe] | {"log.log_fp8_interval": interval, "log.log_interval": 1}
        config = configuration(tmp_path / str(interval), **settings)
        megalith.train(config)
        found[interval] = read_records(tmp_path / str(interval) / "metrics.jsonl")
    assert [each["loss"] for each in found[0]] == [each["loss"] for each in found[4]]
    counted = {each["step"]: {k: v for k, v in each.items() if k.startswith("fp8_")} for each in found[4]}
    assert all(bool(figures) == (step in (4, 8)) for step, figures in counted.items())
    assert all(value > 0 for key, value in counted[8].items() if key.startswith("fp8_amax"))


TWO_GPUS = {
    "tp2-sp": {"parallel.tensor_model_parallel_size": 2, "parallel.sequence_parallel": True},
    "zero3": {"parallel.data_parallel_sharding_strategy": "optim_grads_params"},
    "pp2": {"parallel.pipeline_model_parallel_size": 2},
    "cp2, attention saved": {
        "parallel.context_parallel_size": 2,
        "parallel.cp_comm_type": "a2a",
        "parallel.recompute_granularity": "full",
        "parallel.recompute_saves_attention": True,
    },
}


@pytest.mark.parametrize("kind", ["delayed", "tensorwise", "blockwise"])
def test_two_gpus_train_as_one(tmp_path, gpus, kind):
    longer = {
        "data.seq_length": 512,
        "model.max_position_embeddings": 512,
    }  # chunks of 128 tokens on two ranks
    settings = RECIPES[kind] | longer
    expected = losses(configuration(tmp_path, **settings))
    for name, layout in TWO_GPUS.items():
        found = gpus.run(losses, configuration(tmp_path, **settings, **layout))[0]
        worst = max(abs(a - b) / b for a, b in zip(found, expected, strict=True))
        print(f"{kind}, {name}: {worst:.1e}")
        assert worst < 2e-3, name


@pytest.mark.parametrize(
    ("kind", "compiled"), [("delayed", False), ("delayed", True), ("tensorwise", True), ("blockwise", True)]
)
def test_weights_that_are_gathered_are_cast_once_to_the_same_bits(tmp_path, gpus, kind, compiled):
    """Of two micro-batches a step, with an evaluation between the steps."""
    settings = RECIPES[kind] | {"train.global_batch_size": 8, "train.eval_iters": 1}
    settings |= {"train.deterministic": True}
    for layout in (
        {"parallel.data_parallel_sharding_strategy": "optim"},
        {
            "parallel.data_parallel_sharding_strategy": "optim_grads_params",
            "parallel.fsdp_unsharded_layers": 1,
        },
    ):
        once, at_use = (
            gpus.run(
                run_job,
                configuration(
                    tmp_path,
                    **settings,
                    **layout,
                    **{"runtime.compile": compiled, "train.fp8_cache_weights": value},
                ),
            )[0]
            for value in (True, False)
        )
        assert once.losses == at_use.losses and once.evaluation == at_use.evaluation
        assert all(torch.equal(value, at_use.state[name]) for name, value in once.state.items())


def taken(config: RunConfig) -> tuple[Outcome, int, int]:
    """The job; bytes that its last step has taken on the device as its last backward pass begins; and elements of the
    matrices in FP8 of a layer."""
    found = []
    begins, step = parallel_model.prepare_backward, ParallelModel.backward

    def stepping(model, *args, **kwargs) -> torch.Tensor:
        found.append((torch.cuda.memory_allocated(), 0))
        return step(model, *args, **kwargs)

    def beginning(chunks, *args, **kwargs) -> None:
        layer = list(layers_of(chunks[0]).values())[-1]
        elements = sum(module.weight.numel() for module in layer.modules() if isinstance(module, Linear))
        found.append((torch.cuda.memory_allocated(), elements))
        begins(chunks, *args, **kwargs)

    with (
        mock.patch.object(parallel_model, "prepare_backward", beginning),
        mock.patch.object(ParallelModel, "backward", stepping),
    ):
        outcome = run_job(config)
    (before, _), _, (bytes_then, elements) = found[-3:]  # of two micro-batches
    return outcome, bytes_then - before, elements


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_codes_of_a_step_take_the_place_of_what_is_gathered(tmp_path, gpus, compiled):
    """Cast at use, a weight is there in bf16, and a byte of it is saved for the backward pass; or, where layers are
    freed, nothing more."""
    settings = {"train.global_batch_size": 8, "train.deterministic": True, "runtime.compile": compiled}
    for strategy, less in (
        ("optim", 2),
        ("optim_grads_params", 0),
    ):  # bytes by elements of a layer; there are two
        layout = {"parallel.data_parallel_sharding_strategy": strategy}
        if strategy == "optim_grads_params":
            layout["parallel.fsdp_unsharded_layers"] = 1
        (once, cached, elements), (at_use, plain, _) = (
            gpus.run(
                taken, configuration(tmp_path, **settings, **layout, **{"train.fp8_cache_weights": value})
            )[0]
            for value in (True, False)
        )
        assert plain - cached == pytest.approx(less * elements, abs=0.1 * elements), strategy
        assert once.losses == at_use.losses and once.evaluation == at_use.evaluation
        assert all(torch.equal(value, at_use.state[name]) for name, value in once.state.items())
