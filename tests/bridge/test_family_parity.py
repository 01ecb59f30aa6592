"""A family's weights in several layouts: losses, every gradient, the norm, evaluation and greedy tokens of one process.

Parity's grid shows every layout with every feature; here the features stand as families have them together.
"""

from pathlib import Path

import pytest

from megalith.config import RunConfig
from megalith.launch.pool import Pool
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import run_job

FAMILIES = [
    "gemma",
    "qwen2-moe, a dense layer",
    "starcoder2",
    "stablelm",
    "stablelm, side by side",
    "phi",
    "phi, tied",
    "gpt-j",
    "gpt-neox",
    "falcon, multi-query",
    "opt",
    "smollm3",
    "granite",
    "granite-moe",
    "cohere",
    "cohere2",
    "qwen3-moe, a dense layer",
    "deepseek-v3",
    "gpt-oss",
    "qwen3-next, two heads of values to one of keys",
]
TRIED = ["tp2", "pp2", "tp2-sp-dp2-zero3"]


def run_config(source: Path, layout: str | None) -> RunConfig:
    split = (
        {"decoder_first_pipeline_num_layers": 1} if layout == "pp2" else {}
    )  # the models have three layers
    dropout = {} if "gpt_oss" in (source / "config.json").read_text() else {"attention_dropout": 0.1}
    return RunConfig.from_tree(
        {
            "model": {"init_from": str(source), "hidden_dropout": 0.1} | dropout,
            "parallel": LAYOUTS[layout].parallel | split if layout else {},
            "data": {"mock": True, "seq_length": 16, "num_workers": 0},
            "optim": {"lr": 3e-3, "clip_grad": 0.5},
            "train": {"train_iters": 2, "micro_batch_size": 2, "global_batch_size": 4, "eval_iters": 1},
            "runtime": {"device": "cpu", "compile": False},
        }
    )


@pytest.mark.full
@pytest.mark.parametrize("layout", TRIED)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_a_layout_equals_one_process(pool: Pool, hf_folder, family: str, layout: str) -> None:
    config = run_config(hf_folder(family), layout)
    errors = compare(
        pool.run(run_job, config, size=LAYOUTS[layout].processes),
        run_job(run_config(hf_folder(family), None)),
    )
    assert errors.within(), errors
