"""Training on preferences is one run, however its pairs are laid out and over however many processes."""

import runpy
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from default_cases import in_full
from trained_runs import comparable
from transformers import AutoModelForCausalLM
from tuning_runs import config_of, token_pairs, tuning_tree

from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.errors import ConfigError
from megalith.parallel.shards import LocalParameters
from megalith.parity.check import LAYOUTS
from megalith.parity.differences import compare, gradient_errors
from megalith.parity.job import Outcome, gradients_by_name, run_job, start
from megalith.report.metrics import read_records
from megalith.rl.auxiliary_models import frozen_model, reference
from megalith.rl.dpo import PreferenceTask

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "dpo"
SEQ = 32


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """A run of two steps from a tiny Llama of transformers, over 16 pairs of tokens."""
    folder = tmp_path_factory.mktemp("dpo")
    files = {"train_data_path": token_pairs(16), "valid_data_path": token_pairs(5)}
    return tuning_tree(folder, files, seq=SEQ, micro=2, batch=4) | {
        "dpo": {"enabled": True, "label_smoothing": 0.1}
    }


def job(config: RunConfig) -> Outcome:
    return run_job(config, task=PreferenceTask())


# By default adapters show tensor parallelism and interleaved stages show pipelines.
@pytest.mark.parametrize("plain", [("dp2-zero2",), in_full(("tp2-sp", "pp2"))], ids="+".join)
def test_every_layout_equals_one_process(pool, tree: dict, plain: tuple[str, ...]):
    cases, ones = {}, {"": job(config_of(tree))}
    for name in plain:
        parallel = dict(LAYOUTS[name].parallel)
        if name == "pp2":
            parallel["decoder_first_pipeline_num_layers"] = 1  # the model has 3 layers
        cases[name] = (config_of(tree, parallel=parallel),)
    packed = {"dpo": {"packing": True, "loss_type": "ipo", "label_smoothing": 0.0}}
    for name, more, layout in (
        ("packed", packed, "cp2"),
        ("lora", {"lora": {"rank": 2, "alpha": 64}}, "tp2-sp"),
        ("weighted", {"dpo": {"use_weighting": True, "ld_alpha": 0.5, "label_smoothing": 0.0}}, "tp2-sp"),
    ):
        cases[f"{name}, {layout}"] = (config_of(tree, parallel=LAYOUTS[layout].parallel, **more),)
        ones[f"{name}, {layout}"] = job(config_of(tree, **more))
    if "pp2" in plain:
        interleaved = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|L"}
        cases["packed, interleaved"] = (config_of(tree, parallel=interleaved, **packed),)
        ones["packed, interleaved"] = ones["packed, cp2"]
    found = pool.run_cases(job, cases, size=2)
    for name, ranks in found.items():
        errors = compare(ranks, ones.get(name, ones[""]))
        assert errors.within(), (name, errors)
    lora = ones["lora, tp2-sp"]
    assert all("lora" in name for name in lora.gradients)
    for one in (ones[""], lora):  # the policy has left the reference, which stays
        assert one.losses[0] == pytest.approx(0.6931472, rel=1e-6) and abs(one.losses[-1] - 0.6931472) > 2e-6


class Kept(NamedTuple):
    outcome: Outcome
    reference: set[torch.dtype]  # of its matrices


def with_dtypes(config: RunConfig, in_fp32: bool = False) -> Kept:
    """Train, and say which dtypes the reference's matrices have. `in_fp32` keeps them in fp32."""
    models, load = [], reference.load_frozen

    def and_look(*args):
        models.append(load(*args))
        return models[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "load_frozen", and_look)
        if in_fp32:
            patch.setattr(frozen_model, "stored_dtypes", lambda _: {})
            patch.setattr(LocalParameters, "store_frozen", lambda *_: None)
        outcome = job(config)
    return Kept(outcome, {x.dtype for _, x in models[0].parameters.named if x.ndim > 1})


@pytest.mark.parametrize("layout", ["", in_full("dp2-zero3"), in_full("tp2-sp")])
def test_a_reference_in_bf16_gives_the_bits_of_one_in_fp32(pool, tree: dict, tmp_path, layout: str):
    base = AutoModelForCausalLM.from_pretrained(tree["model"]["init_from"], dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    parallel = LAYOUTS[layout].parallel if layout else {}
    more = {"model": {"init_from": str(tmp_path / "base")}, "train": {"precision": "bf16"}}
    config = config_of(tree, parallel=parallel, **more)
    run = partial(pool.run, size=2) if layout else lambda job, config: [job(config)]
    for short, long in zip(run(with_dtypes, config), run(partial(with_dtypes, in_fp32=True), config)):
        assert short.reference == {torch.bfloat16} and long.reference == {torch.float32}
        assert short.outcome.losses == long.outcome.losses
        gradients = short.outcome.gradients
        assert all(torch.equal(gradients[name], grad) for name, grad in long.outcome.gradients.items())


def test_losses_without_a_reference_train_and_average_the_likelihood_over_the_step(tree: dict):
    """TRL averages it over each micro-batch. The step's loss and gradients do not depend on micro_batch_size."""
    dpo = {"loss_type": ["orpo", "cpo"], "loss_weights": [1.0, 0.5], "label_smoothing": 0.0}
    several, one = (job(config_of(tree, dpo=dpo, train={"micro_batch_size": size})) for size in (1, 4))
    errors = compare([several], one)
    assert errors.within(), errors
    assert one.losses[0] > 1  # likelihood of random weights


def whole_step(config: RunConfig):
    """The loss and gradients of all rows in one step, by another reference than the policy; and the figures."""
    run = start(config, PreferenceTask())
    with torch.no_grad():
        for _, plain in run.model.parameters.named:
            plain.mul_(1.1)
    with run.data.train_loader(0, 0, run.device) as batches:
        loss = run.gradients([next(batches) for _ in range(run.batch_sizes.micro_batches(0))])
    return run, loss.item(), gradients_by_name(run), run.task.step_metrics(run)()


def test_packed_is_padded_and_the_work_is_that_without_padding(tree: dict):
    run, loss, gradients, figures = whole_step(config_of(tree, train={"global_batch_size": 16}))
    lengths = [
        len(one["prompt_ids"]) + len(one[side])
        for one in token_pairs(16)
        for side in ("chosen_ids", "rejected_ids")
    ]
    assert run.data.work(0, 16) == (sum(lengths), sum(n * n for n in lengths))
    rows = len(start(config_of(tree, dpo={"packing": True}), PreferenceTask()).data.train)
    assert rows < 10
    packed = config_of(tree, dpo={"packing": True}, train={"global_batch_size": rows, "micro_batch_size": 1})
    run, packed_loss, packed_gradients, packed_figures = whole_step(packed)
    assert run.data.work(0, rows) == (sum(lengths), sum(n * n for n in lengths))
    assert packed_loss == pytest.approx(loss, rel=1e-5) and packed_figures == pytest.approx(figures, rel=1e-4)
    assert max(gradient_errors(packed_gradients, gradients).values()) < 1e-5
    assert figures["rewards/margins"] == pytest.approx(
        figures["rewards/chosen"] - figures["rewards/rejected"]
    )
    assert figures["logps/chosen"] < -1 and 0 < figures["rewards/accuracies"] < 1


def test_an_evaluation_takes_each_pair_once(tree: dict):
    first, other = (
        start(config_of(tree, train={"global_batch_size": size}), PreferenceTask()) for size in (4, 2)
    )
    with torch.no_grad():
        for run in (first, other):
            for _, plain in run.model.parameters.named:
                plain.mul_(1.1)
    losses = [(run.mean_loss(run.data.valid), run.task.evaluation_metrics(run)) for run in (first, other)]
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-5)
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-5) and losses[0][1]["rewards/margins"] != 0
    assert losses[0][1]["rewards/accuracies"] * 5 == pytest.approx(
        round(losses[0][1]["rewards/accuracies"] * 5)
    )


def test_a_run_that_trains_otherwise_is_refused(tree: dict):
    with pytest.raises(ConfigError, match="megalith dpo"):
        start(config_of(tree))
    with pytest.raises(ConfigError, match=r"sft\.enabled and dpo\.enabled are both on"):
        start(config_of(tree, sft={"enabled": True}), PreferenceTask())
    with pytest.raises(ConfigError, match=r"dpo\.num_train_epochs is 1\.0 and train\.train_iters is 2"):
        start(config_of(tree, dpo={"num_train_epochs": 1}), PreferenceTask())


@pytest.fixture
def prepared(tmp_path, monkeypatch) -> list[str]:
    """The example's data and tokenizer, as docs/preference.md makes them; the command, shortened."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr("sys.argv", ["make_preferences.py", "data", "60"])
    runpy.run_path(str(EXAMPLE / "make_preferences.py"), run_name="__main__")
    trained = [
        "tokenizer",
        "train",
        "--input",
        "data/preference_text.jsonl",
        "--vocab-size",
        "300",
        "--output",
    ]
    assert main([*trained, "data/dpo_tokenizer"]) == 0
    small = ["--model.num_layers", "1", "--model.hidden_size", "32", "--data.num_workers", "0",
             "--dpo.num_train_epochs", "1", "--train.eval_interval", "4"]  # fmt: skip
    return ["dpo", "examples/dpo/run.yaml", *small]


def test_the_example_trains_evaluates_resumes_and_exports(prepared, capsys):
    deterministic = [*prepared, "--train.deterministic", "true", "--checkpoint.save_interval", "3"]
    assert main([*deterministic, "--train.output_dir", "whole", "--checkpoint.export_hf", "true"]) == 0
    out = capsys.readouterr().out
    assert "train: 57 samples in 2 × 57 rows of 80" in out and "rewards/accuracies: " in out
    assert out.endswith("wrote whole/hf_model (LlamaForCausalLM)\n")
    records = read_records("whole/metrics.jsonl")
    assert records[0]["loss"] == pytest.approx(0.6931472) and records[0]["rewards/margins"] == 0
    for one in records:  # what is trained on, of 16 rows: not the padding, which is two thirds
        tokens = one["tokens_per_second_per_device"] * one["step_time_ms"] / 1e3
        assert 0.2 * 16 * 80 < tokens < 0.5 * 16 * 80
    assert records[-1]["rewards/margins"] > 0 and records[-1]["rewards/accuracies"] > 0.6
    evaluations = read_records("whole/evaluations.jsonl")
    assert evaluations[-1]["validation_rewards/margins"] > 0
    assert "validation_perplexity" not in evaluations[-1]
    assert Path("whole/hf_model/chat_template.jinja").is_file()

    assert main([*deterministic, "--train.output_dir", "parts", "--train.exit_interval", "3"]) == 20
    assert main([*deterministic, "--train.output_dir", "parts", "--checkpoint.load", "parts"]) == 0
    assert comparable(Path("parts")) == comparable(Path("whole"))
    torch.use_deterministic_algorithms(False)
    capsys.readouterr()
    assert main(["evaluate", "whole"]) == 0
    assert "rewards/accuracies: " in capsys.readouterr().out
