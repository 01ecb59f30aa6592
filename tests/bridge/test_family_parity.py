"""Each family trains in several layouts as in one process: losses, gradients, norm, evaluation and greedy tokens.

The parity grid covers every layout with every feature; these tests cover the combinations of features in families.
"""

from pathlib import Path

import pytest
from models.reference import CASES

from megalith.config import RunConfig
from megalith.launch.pool import Pool
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare
from megalith.parity.job import run_job

COVERED_BY_THE_GRID = (
    "gpt2", "gpt2, untied", "llama", "llama3 rope", "yarn rope", "linear rope", "llama, longrope", "llama, biases",
    "llama, biases in attention", "mistral", "mistral, window", "qwen2, tied", "qwen3", "gemma2", "gemma3", "olmo2",
    "bloom", "phi3, window", "phi3, short of longrope", "phi3, long of longrope", "starcoder2, window, no biases",
    "opt, no biases, untied", "mixtral", "olmoe", "qwen2-moe, weights of a sum of 1", "deepseek-v2, as lite",
    "deepseek-v2, a latent for queries, groups", "gpt-neox, one behind the other, other positions",
    "falcon, new decoder", "falcon, new decoder, one norm, biases",
)  # fmt: skip
FAMILIES = [name for name in CASES if name not in COVERED_BY_THE_GRID]
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
