"""PiSSA and OLoRA: first A and B by PEFT's formulas, exported as plain LoRA, read unconverted, resumed and merged."""

import json
from pathlib import Path

import pytest
import torch
from adapter_runs import check_engine, check_resume, difference, run_config
from default_cases import in_full
from models.reference import CASES, VOCAB, random_reference
from peft_formula import PREFIX, adapt, first_factors, modules_named, random_adapters, save

import megalith
from megalith.bridge.adapters.adapter_folder import export_adapters
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.initial_factors import decompose
from megalith.config import RunConfig
from megalith.errors import CheckpointError, ConfigError
from megalith.parity.job import start
from megalith.planner.layout import build_layout
from megalith.training.build import prepare

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SITES = {
    "q_proj": ("self_attention.linear_qkv", "q"),
    "k_proj": ("self_attention.linear_qkv", "k"),
    "v_proj": ("self_attention.linear_qkv", "v"),
    "o_proj": ("self_attention.linear_proj", "whole"),
    "gate_proj": ("mlp.linear_fc1", "gate"),
    "up_proj": ("mlp.linear_fc1", "up"),
    "down_proj": ("mlp.linear_fc2", "whole"),
}
IDS = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))


def factors_config(base: Path, output: Path, **lora: object) -> RunConfig:
    return run_config(base, output, {"rank": 3, "alpha": 5.0} | lora)


@torch.no_grad()
def adapted_logits(name: str, folder: Path) -> torch.Tensor:
    model = random_reference(CASES[name][0]())
    adapt(model, folder)
    return model(IDS).logits


@pytest.mark.parametrize(("method", "rslora"), [("pissa", False), ("olora", True), in_full("pissa", True)])
def test_a_run_begins_with_factors_of_the_base_as_peft_does_and_exports_plain_lora(
    hf_folder, tmp_path: Path, method: str, rslora: bool
) -> None:
    base, lora = hf_folder("llama"), {"init_lora_weights": method, "use_rslora": rslora, "targets": TARGETS}
    begun = factors_config(base, tmp_path / "begun", **lora)
    begun = megalith.train(begun.with_settings({"optim.lr": 0.0, "train.train_iters": 1})).checkpoint
    state, scale = megalith.load(begun).state_dict(), 5.0 / (3**0.5 if rslora else 3)
    for name, module in modules_named(random_reference(CASES["llama"][0]()), TARGETS).items():
        layer, (site, part) = name.split(".")[2], SITES[name.rpartition(".")[2]]
        for half, theirs in zip("AB", first_factors(method, module.weight.detach(), 3, scale)):
            for kind in ("lora", "initial"):
                ours = state[f"layers.{layer}.{site}.adapter.{kind}_{half}.{part}.weight"]
                assert difference(ours, theirs) < 1e-6
    with torch.no_grad():
        assert difference(megalith.load(begun)(IDS), megalith.load(base)(IDS)) < 1e-6
    run = megalith.train(factors_config(base, tmp_path / "run", **lora)).checkpoint
    with torch.no_grad():
        trained = megalith.load(run)(IDS)
    assert difference(trained, megalith.load(base)(IDS).detach()) > 1e-2
    export_adapters(run, tmp_path / "peft")
    assert difference(adapted_logits("llama", tmp_path / "peft"), trained) < 5e-7
    written = json.loads((tmp_path / "peft/adapter_config.json").read_bytes())
    assert (written["r"], written["init_lora_weights"]) == (6, True)
    merge(run, tmp_path / "merged", show_progress=False)
    with torch.no_grad():
        assert difference(megalith.load(tmp_path / "merged")(IDS), trained) < 1e-6


def test_a_fast_decomposition_is_that_of_torch_and_depends_on_the_seed_alone() -> None:
    weight = torch.randn(24, 3) @ torch.randn(3, 40) + 0.01 * torch.randn(24, 40)
    a, b = decompose("pissa_niter_8", weight, 3, 2.0, seed=5)
    torch.manual_seed(5)
    left, values, right = torch.svd_lowrank(weight, 3, niter=8)
    assert torch.equal(b, left * (values / 2.0).sqrt()) and torch.equal(a, (right * (values / 2.0).sqrt()).T)
    exact_a, exact_b = decompose("pissa", weight, 3, 2.0)
    assert difference(b @ a, exact_b @ exact_a) < 1e-5


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_a_folder_that_peft_did_not_convert_is_read_on_the_base_that_peft_would_make(
    hf_folder, tmp_path: Path, method: str
) -> None:
    tensors = random_adapters(random_reference(CASES["llama"][0]()), ["q_proj", "down_proj"], rank=3)
    given = save(tensors, tmp_path / "given", 5.0, init_lora_weights=method)
    theirs = adapted_logits("llama", given)
    base = hf_folder("llama")
    merge(given, tmp_path / "merged", base=str(base), show_progress=False)
    config = factors_config(base, tmp_path / "run", load=str(given), rank=None, alpha=32.0)
    step = megalith.train(config.with_settings({"optim.lr": 0.0, "train.train_iters": 1})).checkpoint
    export_adapters(step, tmp_path / "peft")
    with torch.no_grad():
        for folder in (tmp_path / "merged", step):
            assert difference(megalith.load(folder)(IDS), theirs) < 1e-6
    assert difference(adapted_logits("llama", tmp_path / "peft"), theirs) < 1e-6


def test_a_run_resumes_bitwise_with_the_factors_that_it_began_with(hf_folder, tmp_path: Path) -> None:
    lora = {
        "init_lora_weights": "pissa",
        "dropout": 0.1,
        "use_dora": False,
        "targets": ["q_proj", "linear_fc2"],
    }
    message = r"lora.init_lora_weights pissa, but this run has olora"
    lora |= {"rank": 3, "alpha": 5.0}
    check_resume(hf_folder("llama"), lora, {"lora.init_lora_weights": "olora"}, message, tmp_path)


def test_dora_begins_with_the_norms_of_the_whole_base(hf_folder, tmp_path: Path) -> None:
    lora = {"init_lora_weights": "pissa", "use_dora": True, "targets": ["q_proj", "o_proj"]}
    step = megalith.train(factors_config(hf_folder("llama"), tmp_path / "run", **lora)).checkpoint
    export_adapters(step, tmp_path / "peft")
    with torch.no_grad():
        assert difference(megalith.load(step)(IDS), adapted_logits("llama", tmp_path / "peft")) < 1e-6


def test_an_engine_receives_a_and_b_alone_and_generates_as_the_model(hf_folder, tmp_path: Path) -> None:
    check_engine(factors_config(hf_folder("llama"), tmp_path / "run", init_lora_weights="pissa"))


def test_the_plan_counts_the_frozen_factors(hf_folder, tmp_path: Path) -> None:
    run = start(factors_config(hf_folder("llama"), tmp_path / "run", init_lora_weights="olora"))
    held = sum(parameter.nbytes for parameter in run.model.chunks[0].parameters())
    assert build_layout(run.config, 1).stages[0].memory.weights == pytest.approx(held, rel=1e-4)


def test_what_cannot_be_decomposed_or_read_is_named(hf_folder, tmp_path: Path) -> None:
    base = hf_folder("llama")
    for lora, message in (
        ({"init_lora_weights": "eva"}, "'eva' is not supported; choose default, pissa"),
        (
            {"init_lora_weights": "pissa", "quantize_base": "int8"},
            "not supported with lora.quantize_base int8",
        ),
        (
            {"init_lora_weights": "pissa", "rank": 1000},
            "linear_qkv has rank 1000, more than .*lower lora.rank to 64",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            megalith.train(factors_config(base, tmp_path / "run", **lora))
    with pytest.raises(ConfigError, match="is pissa, which is not supported on experts, as in PEFT"):
        prepare(factors_config(hf_folder("mixtral"), tmp_path / "run", init_lora_weights="pissa"), 1)
    assert factors_config(base, tmp_path / "run", init_lora_weights=True).lora.init_lora_weights == "default"
    tensors = random_adapters(random_reference(CASES["llama"][0]()), ["q_proj"], rank=3)
    given = save(tensors, tmp_path / "given", 5.0, init_lora_weights="pissa_niter_4")
    assert any(name.startswith(PREFIX) for name in tensors)
    with pytest.raises(
        CheckpointError, match="with which PEFT changes the base weights; save the adapters again"
    ):
        merge(given, tmp_path / "merged", base=str(base), show_progress=False)
