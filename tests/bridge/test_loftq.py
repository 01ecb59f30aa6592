"""LoftQ: A and B begin as what quantizing the base loses, by the published algorithm, in every layout."""

import json
from pathlib import Path

import pytest
import torch
from adapter_runs import check_resume, difference, run_config
from default_cases import by_default, in_full
from models.reference import CASES, VOCAB, random_reference
from peft_formula import modules_named

import megalith
from megalith.bridge.adapters.adapter_folder import export_adapters
from megalith.bridge.adapters.merge_adapters import merge
from megalith.config import RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.generation.sync import engine_for
from megalith.ops.weight_codes import assemble, decode, encode
from megalith.parity.differences import compare
from megalith.parity.job import run_job, start
from megalith.planner.layout import build_layout
from megalith.training.build import prepare

TARGETS = {
    "q_proj": ("self_attention.linear_qkv", "q"),
    "v_proj": ("self_attention.linear_qkv", "v"),
    "o_proj": ("self_attention.linear_proj", "whole"),
    "gate_proj": ("mlp.linear_fc1", "gate"),
}
RANK, SCALE = 3, 2.0
IDS = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def reference() -> torch.nn.Module:
    """A Llama whose matrices have multiples of 64 columns."""
    config = CASES["llama"][0]()
    config.intermediate_size = 128
    return random_reference(config)


@pytest.fixture
def base(reference: torch.nn.Module, tmp_path: Path) -> Path:
    reference.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


LOFTQ = {"rank": RANK, "alpha": RANK * SCALE, "targets": [*TARGETS], "init_lora_weights": "loftq"}
LOFTQ |= {"quantize_base": "nf4"}


def loftq_config(base: Path, output: Path, settings: dict | None = None, **lora: object) -> RunConfig:
    return run_config(base, output, LOFTQ | lora, settings)


def int8(weight: torch.Tensor) -> torch.Tensor:
    """The rows of a matrix in whole multiples of a 127th of their largest value."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


def nf4(weight: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(weight))
    return decode("nf4", assemble("nf4", weight.shape, [encode("nf4", weight, rows)]), torch.float32)


def loftq(weight: torch.Tensor, quantize, iterations: int) -> tuple[torch.Tensor, torch.Tensor]:
    """PEFT's loftq_init: the quantized matrix, and B · A. PEFT disregards the scale, which is part of B · A here."""
    product = torch.zeros_like(weight)
    for _ in range(iterations):
        quantized = quantize(weight - product)
        left, values, right = torch.linalg.svd(weight - quantized, full_matrices=False)
        product = left[:, :RANK] @ torch.diag(values[:RANK]) @ right[:RANK]
    return quantized, product


@pytest.mark.parametrize(
    ("form", "iterations"), [("int8", 1), ("int8", 3), ("nf4", 3), in_full("nf4", 1), in_full("int8", 5)]
)
def test_a_run_begins_with_what_the_algorithm_gives(
    reference, base: Path, tmp_path: Path, form: str, iterations: int
) -> None:
    still = {"optim.lr": 0.0, "train.train_iters": 1}
    lora = {"quantize_base": form, "loftq_iter": iterations}
    step = megalith.train(loftq_config(base, tmp_path / "run", still, **lora)).checkpoint
    state, quantize = megalith.load(step).state_dict(), {"int8": int8, "nf4": nf4}[form]
    matrices = [name for name in state if ".linear_" in name and ".adapter." not in name]
    assert matrices
    adapted = modules_named(reference, [*TARGETS])
    with torch.no_grad():
        for name, module in reference.named_modules():
            if name in adapted:
                quantized, product = loftq(module.weight, quantize, iterations)
                layer, (site, part) = name.split(".")[2], TARGETS[name.rpartition(".")[2]]
                a, b = (state[f"layers.{layer}.{site}.adapter.lora_{half}.{part}.weight"] for half in "AB")
                assert difference(SCALE * b @ a, product) < 1e-4
                assert (module.weight - quantized - product).norm() < 0.999 * (
                    module.weight - quantize(module.weight)
                ).norm()
                module.weight.copy_(quantized + product)
            elif name.endswith("_proj"):
                module.weight.copy_(quantize(module.weight))
        assert difference(megalith.load(step)(IDS), reference(IDS).logits) < 1e-5


def test_a_run_resumes_bitwise_and_merges_as_it_computes(base: Path, tmp_path: Path) -> None:
    lora, message = LOFTQ | {"loftq_iter": 2, "dropout": 0.1}, r"lora\.loftq_iter 2, but this run has 1"
    whole = check_resume(base, lora, {"lora.loftq_iter": 1}, message, tmp_path)
    merge(whole, tmp_path / "merged", show_progress=False)
    with torch.no_grad():
        assert difference(megalith.load(tmp_path / "merged")(IDS), megalith.load(whole)(IDS)) < 1e-6


LAYOUTS = {
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 1}),
    "dp2-zero3": (2, {"data_parallel_sharding_strategy": "optim_grads_params"}),
}


@pytest.mark.parametrize("layout", by_default(LAYOUTS, "tp2-sp"))
def test_every_layout_begins_and_trains_alike(pool, base: Path, tmp_path: Path, layout: str) -> None:
    size, parallel = LAYOUTS[layout]
    config = loftq_config(base, tmp_path / "run", loftq_iter=2, quantize_base="int8")
    alone, settings = run_job(config), {f"parallel.{name}": value for name, value in parallel.items()}
    errors = compare(pool.run(run_job, config.with_settings(settings), size=size), alone)
    assert errors.within(), errors
    assert all(gradient.norm() > 0 for gradient in alone.gradients.values())


def test_an_engine_and_the_plan_have_the_base_and_its_factors(base: Path, tmp_path: Path) -> None:
    run = start(loftq_config(base, tmp_path / "run", loftq_iter=2))
    engine = engine_for(run.model, max_rows=1, max_tokens=24)
    with torch.no_grad():
        logits = run.model.eval()(IDS)
    assert difference(engine.model(IDS), logits) < 1e-5
    factors = [each for name, each in run.model.chunks[0].named_parameters() if ".initial_" in name]
    weights = [
        build_layout(config, 1).stages[0].memory.weights
        for config in (run.config, run.config.with_settings({"lora.loftq_iter": 1}))
    ]
    assert factors and weights[0] - weights[1] == sum(each.nbytes for each in factors)


def test_what_loftq_cannot_do_is_named(base: Path, tmp_path: Path) -> None:
    for lora, message in (
        ({"quantize_base": "none"}, "but lora.quantize_base is none, so there is no quantization error"),
        ({"use_dora": True}, "which is not supported with lora.use_dora"),
        (
            {"init_lora_weights": "pissa", "quantize_base": "none", "loftq_iter": 2},
            "lora.loftq_iter is 2, but",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(loftq_config(base, tmp_path / "run", **lora), 1)


def test_an_export_of_several_iterations_is_refused(base: Path, tmp_path: Path) -> None:
    once = megalith.train(loftq_config(base, tmp_path / "once")).checkpoint
    export_adapters(once, tmp_path / "peft", show_progress=False)
    assert json.loads((tmp_path / "peft/adapter_config.json").read_bytes())["init_lora_weights"] is True
    twice = megalith.train(loftq_config(base, tmp_path / "twice", loftq_iter=2)).checkpoint
    with pytest.raises(CheckpointError, match=r"loftq_iter 2 .* merge the adapters"):
        export_adapters(twice, tmp_path / "no", show_progress=False)
