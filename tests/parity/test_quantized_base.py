"""Adapters on a base in codes train as on the base that the codes stand for, in every layout and from every folder."""

from pathlib import Path

import pytest
import torch
import transformers
from bridge.peft_formula import random_adapters, save
from default_cases import by_default
from models.reference import random_reference
from parity_cases import BASE
from torch import nn

from megalith.config import RunConfig
from megalith.ops.weight_codes import assemble, decode, encode
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job

FORMS = ("int8", "fp8", "nf4", "mxfp4")
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def published() -> nn.Module:
    """A model with a dense layer and one of experts, whose matrices have whole blocks of 64 also on two ranks."""
    return random_reference(
        transformers.Qwen3MoeConfig(
            hidden_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_experts=4,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
            decoder_sparse_step=1,
            vocab_size=131,
            max_position_embeddings=64,
            tie_word_embeddings=False,
        )
    )


def coded(form: str, matrix: torch.Tensor) -> torch.Tensor:
    """The matrix after coding, in float32."""
    rows = torch.arange(len(matrix))
    return decode(form, assemble(form, matrix.shape, [encode(form, matrix, rows)]), torch.float32)


@torch.no_grad()
def twin(reference: nn.Module, form: str) -> nn.Module:
    """The model with every matrix of its layers replaced by what its codes are."""
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(tuple(TARGETS)):
            module.weight.copy_(coded(form, module.weight))
        if name.endswith("mlp.experts"):
            for up, down in zip(module.gate_up_proj, module.down_proj):
                for matrix in (*up.chunk(2), down):
                    matrix.copy_(coded(form, matrix))
    return reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    reference = published()
    reference.save_pretrained(folder / "base")
    save(random_adapters(reference, TARGETS, 2, experts=True), folder / "adapters", 4.0)
    return folder


def config(folder: Path, base: str = "base", quantize_base: str = "none", **sections: dict) -> RunConfig:
    tree = {
        "model": {"init_from": str(folder / base)},
        "lora": {"load": str(folder / "adapters"), "quantize_base": quantize_base},
        "train": BASE["train"] | {"train_iters": 2},
    }
    return RunConfig.from_tree(BASE | tree | sections)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Outcome:
    return run_job(config(folder, quantize_base="nf4"))


@pytest.mark.parametrize("form", by_default(FORMS, "nf4"))
def test_a_base_in_codes_trains_bitwise_as_the_base_that_they_are(
    folder: Path, tmp_path: Path, alone: Outcome, form: str
) -> None:
    twin(published(), form).save_pretrained(tmp_path / "twin")
    (tmp_path / "adapters").symlink_to(folder / "adapters")
    ours = alone if form == "nf4" else run_job(config(folder, quantize_base=form))
    theirs = run_job(config(tmp_path, "twin"))
    assert ours.losses == theirs.losses and ours.evaluation == theirs.evaluation
    assert ours.generated == theirs.generated and ours.gradients.keys() == theirs.gradients.keys()
    assert all(torch.equal(gradient, theirs.gradients[name]) for name, gradient in ours.gradients.items())
    assert all(gradient.norm() > 0 for gradient in ours.gradients.values())


MORE = {
    "ep2": (2, {"expert_model_parallel_size": 2}),
    "ep2-zero3": (4, {"expert_model_parallel_size": 2, **LAYOUTS["dp2-zero3"].parallel}),
}


@pytest.mark.parametrize(
    "layout", by_default(["tp2-sp", "pp2", "dp2-zero3", "dp2-zero1", *MORE], "tp2-sp", "ep2-zero3")
)
def test_every_layout_has_the_same_codes(pool, folder: Path, alone: Outcome, layout: str) -> None:
    size, parallel = MORE[layout] if layout in MORE else (LAYOUTS[layout].processes, LAYOUTS[layout].parallel)
    errors = compare(
        pool.run(run_job, config(folder, quantize_base="nf4", parallel=parallel), size=size), alone
    )
    assert errors.within(), errors
