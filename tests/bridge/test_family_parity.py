"""Each family trains in several layouts as in one process: losses, gradients, norm, evaluation and greedy tokens.

The parity grid covers every layout with every feature; these tests cover the combinations of features in families.
Adapters of each family merge into a model that transformers runs as Megalith does.
"""

from pathlib import Path

import pytest
import torch
import transformers
from models.reference import CASES, VOCAB

import megalith
from megalith.bridge.adapters.merge_adapters import merge
from megalith.bridge.exporter import export_hf
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
TRIED = ["tp2", "pp2", "tp2-sp-dp2-zero3", "ep2"]
WITH_EXPERTS = [name for name in FAMILIES if CASES[name][1].get("num_experts")]


def run_config(source: Path, layout: str | None) -> RunConfig:
    split = (
        {"decoder_first_pipeline_num_layers": 1} if layout == "pp2" else {}
    )  # the models have three layers
    has_sinks = any(name in (source / "config.json").read_text() for name in ("gpt_oss", "flint", "_swa"))
    dropout = {} if has_sinks else {"attention_dropout": 0.1}  # kernels with sinks have none
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
@pytest.mark.parametrize(
    ("family", "layout"),
    [(name, layout) for name in FAMILIES for layout in TRIED if layout != "ep2" or name in WITH_EXPERTS],
)
def test_a_family_in_a_layout_equals_one_process(pool: Pool, hf_folder, family: str, layout: str) -> None:
    config = run_config(hf_folder(family), layout)
    errors = compare(
        pool.run(run_job, config, size=LAYOUTS[layout].processes),
        run_job(run_config(hf_folder(family), None)),
    )
    assert errors.within(), errors


IDS = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))


WITHOUT_ADAPTERS = (
    "qwen3-next, two heads of values to one of keys",
    "qwen3.5",
    "qwen3.5-moe",
    "afmoe",
)  # rejected: experts, gates in attention


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in WITHOUT_ADAPTERS])
def test_adapters_of_a_family_train_and_merge_into_the_model_that_transformers_runs(
    hf_folder, family: str, tmp_path: Path
) -> None:
    config = run_config(hf_folder(family), None).with_settings(
        {"lora.rank": 2, "lora.targets": lora_targets(family), "optim.lr": 3e-2, "train.eval_iters": 0,
         "train.output_dir": str(tmp_path / "run"), "model.moe_router_bias_update_rate": 0.0}
    )  # fmt: skip
    step = megalith.train(config).checkpoint
    merge(tmp_path / "run", tmp_path / "merged", show_progress=False)
    out = export_hf(tmp_path / "merged", tmp_path / "hf", show_progress=False).path
    with torch.no_grad():
        adapted, base = (megalith.load(path)(IDS) for path in (step, hf_folder(family)))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")(
            IDS
        ).logits
    assert (adapted - base).abs().max() > 1e-4 * base.abs().max()
    assert (adapted - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def lora_targets(family: str) -> list[str]:
    """Return the linear layers of a family that can have adapters."""
    model = CASES[family][1]
    attention = ["linear_proj"] if model.get("multi_latent_attention") else ["linear_qkv", "linear_proj"]
    if "mamba_num_heads" in model:
        attention += ["linear_zxbcdt", "linear_out"]
    if model.get("experimental_attention_variant") == "short_conv":
        attention += ["linear_bcx", "linear_out"]
    if model.get("experimental_attention_variant") == "kimi_delta_attention":
        attention += ["linear_in", "linear_gates", "linear_out"]
    if family == "mamba2":
        return attention[2:]
    return attention if model.get("num_experts") else [*attention, "linear_fc1", "linear_fc2"]
