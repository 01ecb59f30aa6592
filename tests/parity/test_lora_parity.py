"""Adapters that are no longer zero, on a published model's weights: every gradient of A and of B in any layout."""

import pytest
from bridge.peft_formula import random_adapters, save
from models.reference import CASES, random_reference
from parity_cases import BASE, DROPOUT

from megalith.config import RunConfig
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import Outcome, run_job

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run from a Hugging Face folder and a folder of adapters in PEFT's format."""
    folder = tmp_path_factory.mktemp("published")
    reference = random_reference(CASES["qwen3"][0]())
    reference.save_pretrained(folder / "base")
    adapters = save(
        random_adapters(reference, TARGETS, rank=3), folder / "adapters", 5.0, target_modules=TARGETS
    )
    train = BASE["train"] | {"train_iters": 2}
    return BASE | {
        "model": {"init_from": str(folder / "base")} | DROPOUT,
        "lora": {"load": str(adapters), "dropout": 0.2},
        "train": train,
    }


@pytest.fixture(scope="module")
def alone(tree: dict) -> Outcome:
    return run_job(RunConfig.from_tree(tree))


# Parity shows adapters that begin at zero in other layouts too.
MORE = [pytest.param(layout, marks=pytest.mark.full) for layout in ("tp4", "cp2", "dp2-zero3")]


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", *MORE])
def test_gradients_of_both_halves_equal_one_process(pool, tree: dict, alone: Outcome, layout: str) -> None:
    split = {"decoder_first_pipeline_num_layers": 1} if layout == "pp2" else {}  # the model has 3 layers
    config = RunConfig.from_tree(tree | {"parallel": {**LAYOUTS[layout].parallel, **split}})
    errors = compare(pool.run(run_job, config, size=LAYOUTS[layout].processes), alone)
    assert errors.within(), errors
    halves = [sum(half in name for name in alone.gradients) for half in ("lora_A", "lora_B")]
    assert halves == [3 * 7, 3 * 7] and len(alone.gradients) == sum(halves)
    assert all(gradient.norm() > 0 for gradient in alone.gradients.values())
