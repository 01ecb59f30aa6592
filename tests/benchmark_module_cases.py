"""Every `python -m benchmarks.…` runs in small on a CPU, so that a rename elsewhere cannot break it unnoticed."""

import functools
import importlib
import json
import math
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from page_code import small_model

import megalith
from benchmarks import (
    accelerate_overhead,
    async_tp,
    curves,
    data_open,
    exactness,
    grpo_staleness,
    headlines,
    measure_rows,
    megatron_scripts,
    mirrored_rank,
    optimizer_curves,
    oumi_configurations,
    trl_losses,
    trl_objective,
)
from benchmarks.measured_rows import Row

ROOT = Path(__file__).parents[1]
MODULES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py"))
SMALL = ("model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "data.seq_length=16")
SMALLER = (*SMALL, "model.num_query_groups=2", "model.ffn_hidden_size=32", "data.num_workers=0")

forks = pytest.mark.usefixtures("forked_programs")


@pytest.fixture
def program(monkeypatch, capfd):
    """Call a module's main, in this process and in the repository, with words; return what it prints."""

    def call(module, *words: object) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, words)])
        assert not module.main()
        return capfd.readouterr().out

    return call


@pytest.mark.parametrize("name", MODULES)
def test_every_module_is_imported(name):
    importlib.import_module(f"benchmarks.{name}")


def test_a_large_dataset_is_opened(program, tmp_path):
    text = program(data_open, "--documents", 2000, "--seq-length", 64, "--folder", tmp_path)
    assert "2,000 documents" in text


def test_batch_invariant_operators_are_timed_and_compared(program):
    sizes = ("--heads", 2, "--groups", 1, "--head-dim", 16, "--vocab", 70, "--context", 33)
    words = ("--device", "cpu", "--precision", "fp32", "--tokens", 40, "--rows", 3, "--repeats", 1)
    rows = [line for line in program(exactness, *words, *sizes).splitlines()[2:] if line]
    assert len(rows) == 12 and all(row.endswith("| yes |") for row in rows)


def test_the_old_name_of_the_training_benchmark_has_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks.train", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("benchmarks.train", run_name="__main__")
    assert "--layout" in capsys.readouterr().out


@forks
def test_an_accelerate_script_is_compared_with_a_run(program, tmp_path):
    sizes = ("--steps", 4, "--warmup", 1, "--batch", 2, "--micro", 1, "--cache", tmp_path, "--set", *SMALLER)
    assert "dp2: script / megalith train = " in program(
        accelerate_overhead, "tiny", "--layout", "dp2", *sizes
    )


@forks
def test_overlapped_tensor_parallelism_is_measured(program, monkeypatch):
    """PyTorch's variant needs symmetric memory of GPUs; the names that it replaces are looked up."""
    tiny = async_tp.WORKLOADS["tiny"]
    monkeypatch.setitem(async_tp.WORKLOADS, "tiny", {**tiny, "seq_length": 16})
    text = program(async_tp, "tiny", "--variant", "plain", "--batch", 2, "--steps", 2, "--layers", 1)
    assert "plain" in text and "loss" in text and "failed" not in text
    seen = []
    monkeypatch.setattr(megalith, "train", seen.append)
    Path("run.yaml").write_text("model: {preset: tiny-llama}\n")
    async_tp.worker(Path("run.yaml"))
    assert len(seen) == 1


@forks
def test_loss_curves_of_paths_are_compared(program, monkeypatch, corpus):
    monkeypatch.setattr(curves, "build_dataset", lambda folder, vocab_size: (corpus, 1000))
    sizes = ("--steps", 3, "--layers", 1, "--width", 16, "--batch", 2, "--seq-length", 16)
    monkeypatch.setattr(curves, "judge", functools.partial(judge_curves, curves.judge))
    with pytest.raises(SystemExit) as ended:
        program(curves, "--paths", "recomputed", "--layout", "dp2", "--vocab-size", 300, *sizes)
    assert ended.value.code in (0, 1)


def test_optimizers_are_tuned_and_their_curves_drawn(program, tmp_path):
    out = tmp_path / "curves.json"
    words = ["--steps", 20, "--trial-steps", 2, "--only", "muon", "--precision", "fp32", "--out", out]
    sizes = ["train.global_batch_size=2", "train.micro_batch_size=1", "model.ffn_hidden_size=32"]
    heading = program(optimizer_curves, *words, *SMALL, *sizes).splitlines()[0]
    assert heading == "| optimizer | lr | loss on other files | training loss | ms per step |"
    curve = json.loads(out.read_text())["muon"]
    assert len(curve["trials"]) == 3 and curve["lr"] == float(min(curve["trials"], key=curve["trials"].get))
    assert curve["loss"][1] < curve["loss"][0] < math.log(257) + 0.5
    assert curve["held_out"] < math.log(257) + 0.5
    assert (tmp_path / "curves.svg").stat().st_size > 1000


def judge_curves(judge, losses, seeded):
    assert {*losses} == {"plain", "fp32", "split", "recomputed", "dp2"} and not seeded
    assert all(len(each) == 3 for each in losses.values())
    return judge(losses, seeded)


@forks
def test_training_ahead_of_generation_is_measured_with_our_server(program, monkeypatch, tmp_path):
    """The server and the weights that it takes over gloo are benchmarks.engine_server's."""
    monkeypatch.chdir(ROOT)
    settings = (
        "rl.num_generations=2",
        "train.global_batch_size=4",
        "train.micro_batch_size=2",
        "model.num_layers=1",
    )
    words = ("--small", "--steps", 2, "--tuning", 2, "--ahead", 1, "--least", 0.0, "--folder", tmp_path)
    result = json.loads(program(grpo_staleness, *words, "--set", *settings))
    assert result["runs"]["split, 1 ahead"]["step_s"] > 0


def test_the_table_and_the_picture_of_the_results_are_written(program, monkeypatch, tmp_path):
    results = tmp_path / "RESULTS.md"
    results.write_text(headlines.RESULTS.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(headlines, "RESULTS", results)
    compared = tmp_path / "compared.md"
    compared.write_text(headlines.COMPARED.read_text("utf-8"), "utf-8")
    monkeypatch.setattr(headlines, "COMPARED", compared)
    monkeypatch.setattr(headlines, "PICTURE", tmp_path / "images" / "benchmarks.svg")
    assert "| Megalith |" in program(headlines) or results.read_text("utf-8")
    assert (tmp_path / "images" / "benchmarks.svg").read_text("utf-8").startswith("<?xml")


@forks
def test_a_row_of_the_measured_ones_is_measured(program, monkeypatch):
    model = {"preset": "tiny-llama", "vocab_size": 64, "num_layers": 1, "hidden_size": 32, "num_attention_heads": 2,
             "num_query_groups": 2, "ffn_hidden_size": 32}  # fmt: skip
    row = Row("small", "told", 1, model, (1, 2, 16), {}, None, None, {"data": {"num_workers": 0}})
    monkeypatch.setattr(measure_rows, "ROWS", [row])
    result = json.loads(program(measure_rows, "--rows", "small", "--steps", 2, "--warmup", 1))
    assert result["ms"] > 0 and result["expected_ms"] > 0


def test_flags_of_scripts_are_counted(program, tmp_path):
    (tmp_path / "model_config.yaml").write_text("MODEL_ARGS:\n  --num-layers: 2\n  --no-such-flag: true\n")
    (tmp_path / "train.sh").write_text("torchrun pretrain_gpt.py \\\n  --num-layers $LAYERS \\\n  --bf16\n")
    text = program(megatron_scripts, tmp_path)
    assert text.startswith("1 of 2 scripts pass whole") and "--no-such-flag" in text


@forks
def test_a_rank_is_mirrored(program):
    experts = ("model.num_experts=4", "model.moe_router_topk=2", "model.moe_ffn_hidden_size=16")
    sizes = ("--batch", 2, "--steps", 2, "--warmup", 1, "--variant", "static")
    words = (
        "qwen3-30b-a3b",
        *sizes,
        "--set",
        *SMALLER,
        *experts,
        "model.vocab_size=64",
        "model.kv_channels=8",
    )
    with pytest.raises(SystemExit) as ended:
        program(mirrored_rank, *words)
    assert ended.value.code == 0


def test_configurations_of_oumi_are_counted_and_trained(program, tmp_path):
    small_model("model")
    Path("model/chat_template.jinja").write_text(trl_losses.TEMPLATE)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    Path("chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    model, data = "model: {model_name: some/model}", "data: {train: {datasets: [{dataset_name: some/data}]}}"
    for name, training in (("taken", "TRL_SFT"), ("refused", "TRL_KTO")):
        text = f"{model}\n{data}\ntraining: {{trainer_type: {training}, output_dir: out}}\n"
        (checkout / f"{name}.yaml").write_text(text)
    words = ("--train", "model", "--chat", "chat.jsonl", "--pairs", "chat.jsonl")
    text = program(oumi_configurations, checkout, *words)
    assert "all               1 of 2" in text and "trained two steps, shrunk: {'TRL_SFT': 1}" in text, text
    assert json.loads(program(oumi_configurations, checkout, "--json"))["taken"] == {"TRL_SFT": 1}


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed")
@pytest.mark.parametrize("module", [trl_losses, trl_objective])
def test_comparisons_with_trl_name_what_they_need(module, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare"])
    with pytest.raises(SystemExit, match=r"TRL is not installed here; .* makes an environment"):
        module.main()


def test_our_side_of_the_comparisons_with_trl_has_gradients(tmp_path):
    trl_losses.make(tmp_path)
    for name, *settings in (("sft", {"packing": False}), ("dpo", {"loss_type": "sigmoid"})):
        records = trl_losses.CHATS if name == "sft" else trl_losses.PAIRS
        sequences, loss, gradients = trl_losses.ours(tmp_path, name, records, settings[0])
        assert len(sequences) >= len(records) and loss > 0 and has_gradients(gradients)
    batch = trl_objective.tensors()
    batch["old"], batch["reference"] = batch["noise"] - 4
    for settings in (trl_objective.OBJECTIVES[name] for name in ("grpo", "luspo beta .04")):
        loss, gradients = trl_objective.ours(tmp_path, batch, settings)
        assert math.isfinite(loss) and has_gradients(gradients)


def has_gradients(gradients: dict[str, torch.Tensor]) -> bool:
    return all(gradient.isfinite().all() for gradient in gradients.values()) and any(
        map(torch.any, gradients.values())
    )
