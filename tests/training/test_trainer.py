"""Training as a whole, on one process: it learns, goes on bitwise where it stopped, and writes down what it says."""

import itertools
import json
import math
import random
from operator import truediv

import numpy as np
import pytest
import torch
from default_cases import by_default
from trained_runs import comparable, configuration, losses, stored

import megalith
from megalith.cli.main import main
from megalith.config import CheckpointConfig, RunConfig
from megalith.config.run import read_yaml
from megalith.errors import ConfigError
from megalith.parallel.mesh import build_mesh
from megalith.parity.job import start
from megalith.report.metrics import read_records
from megalith.training.build import build_run_tokenizer, open_datasets, prepare
from megalith.training.run_state import Run
from megalith.training.trainer import Trainer, _saves_at_end
from megalith.training.training_job import train

METRICS = ["step", "loss", "grad_norm", "lr", "global_batch_size", "consumed_samples", "step_time_ms",
           "tokens_per_second_per_device", "tflops_per_device", "mfu", "max_memory_gb", "skipped", "nan_iterations",
           "loss_scale"]  # fmt: skip


FAMILIES = {
    "gpt": {},
    "llama": dict(preset="tiny-llama", num_query_groups=1),
    "qwen": dict(preset="tiny-qwen", num_query_groups=1),
}


# Llama's parts are all among Qwen's.
@pytest.mark.parametrize("family", by_default(FAMILIES, "qwen"))
def test_a_small_real_dataset_is_learnt_and_the_validation_loss_falls_with_it(run, tmp_path, family):
    result = run(
        model={"hidden_size": 64, "num_attention_heads": 4, **FAMILIES[family]},
        train=dict(train_iters=120, micro_batch_size=8, eval_interval=60),
        data=dict(seq_length=32),
    )
    history = losses(tmp_path / "run")
    assert history[0] == pytest.approx(math.log(257), abs=0.3)
    assert result.loss < 1.7 and result.validation_loss < 1.7  # below 2.3, the best without context
    assert (result.step, result.consumed_samples, result.ended) == (120, 960, "train_iters")
    model = megalith.load(tmp_path / "run")
    assert model(torch.arange(12)[None]).shape == (1, 12, 257)


def test_the_loaded_model_gives_the_validation_loss_that_the_run_reported(run):
    result = run(train=dict(train_iters=20))
    again = run(
        "again", model=dict(init_from=str(result.checkpoint)), train=dict(train_iters=1), optim=dict(lr=0.0)
    )
    assert again.validation_loss == result.validation_loss


def test_several_micro_batches_are_one_large_one(run, tmp_path):
    for name, size in (("one", 8), ("two", 4), ("eight", 1)):
        run(
            name,
            train=dict(micro_batch_size=size),
            data=dict(eod_mask_loss=True),  # so that micro-batches differ in their valid tokens
            model=dict(hidden_dropout=0.1, attention_dropout=0.1),
        )
    for other in ("two", "eight"):
        assert losses(tmp_path / other) == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.parametrize("per_token", [True, False])
def test_the_gradient_is_by_tokens_or_micro_batches_and_the_logged_loss_by_tokens(run, tmp_path, per_token):
    length = dict(train_iters=1, micro_batch_size=1, calculate_per_token_loss=per_token)
    run(train=length, data=dict(eod_mask_loss=True), optim=dict(lr=0.0))
    config = read_yaml(tmp_path / "run" / "config.yaml")
    model = megalith.load(tmp_path / "run").requires_grad_()  # lr 0: still the initial weights
    fresh = _run(RunConfig.from_tree(config))
    tokens, losses_by_batch = [], []
    with fresh.data.train_loader(0, 0, torch.device("cpu")) as batches:
        for batch in batches:
            logits = model(batch.input_ids)
            picked = logits.log_softmax(-1).gather(-1, batch.labels[..., None])[..., 0]
            losses_by_batch.append(-(picked * batch.loss_mask).sum())
            tokens.append(batch.loss_mask.sum().item())
    assert min(tokens) < max(tokens)
    total = sum(losses_by_batch) / sum(tokens)
    (total if per_token else sum(map(truediv, losses_by_batch, tokens)) / len(tokens)).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    [record] = read_records(tmp_path / "run" / "metrics.jsonl")
    assert record["loss"] == pytest.approx(total.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


def _run(config: RunConfig) -> Run:
    mesh = build_mesh(config.parallel, 1, "cpu")
    return Run(config, build_run_tokenizer(config), mesh, torch.device("cpu"))


def test_schedules_wait_for_steps_that_fp16_skips_also_after_a_resume(run, tmp_path):
    """As in Megatron-LM, whose scheduler steps after a successful update only; by samples of a growing batch too."""
    settings = dict(
        optim=dict(
            lr=1e-2, lr_warmup_iters=4, schedule_unit="samples", initial_loss_scale=2.0**23, hysteresis=1
        ),
        model=dict(hidden_size=64),
    )
    train_settings = dict(
        precision="fp16", micro_batch_size=2, step_batch_size_schedule=[[0, 4], [32, 8]], eval_iters=0
    )
    run(train=train_settings | dict(train_iters=14), **settings)
    whole = read_records(tmp_path / "run" / "metrics.jsonl")
    skipped = [record["skipped"] for record in whole]
    assert 1 < sum(skipped) < 10 and skipped[0] and not skipped[-1]
    counted = 0
    for record in whole:
        if counted <= 4 * 8:
            assert record["lr"] == pytest.approx(1e-2 * counted / (4 * 8))
        counted += 0 if record["skipped"] else record["global_batch_size"]
    assert max(record["lr"] for record in whole) > 5e-3
    run("parts", train=train_settings | dict(train_iters=14, exit_interval=4), **settings)
    for _ in range(3):
        load = dict(checkpoint=dict(load=str(tmp_path / "parts")))
        run("parts", train=train_settings | dict(train_iters=14, exit_interval=4), **settings, **load)
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "run")


def test_half_precision_learns_as_fp32_does_and_keeps_fp32_weights(run, tmp_path):
    run("fp32", train=dict(train_iters=20))
    full = losses(tmp_path / "fp32")
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        result = run(
            precision,
            train=dict(train_iters=20, precision=precision),
            optim=dict(initial_loss_scale=2.0**10),
        )
        half = losses(tmp_path / precision)
        assert half[0] == pytest.approx(full[0], rel=5e-3)
        assert half[-1] == pytest.approx(full[-1], rel=0.1)
        manifest = json.loads((result.checkpoint / "manifest.json").read_text())
        types = {t["dtype"] for file in manifest["tensors"].values() for t in file.values()}
        assert types == {"F32"}
        model = megalith.load(tmp_path / precision)
        assert model(torch.arange(5)[None]).dtype == dtype


def test_fp16_skips_overflowing_steps_lowers_the_scale_until_it_fits_and_raises_it_again(run, tmp_path):
    run(
        train=dict(train_iters=20, precision="fp16"),
        optim=dict(initial_loss_scale=2.0**30, hysteresis=1, loss_scale_window=4),
    )
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    skipped = [record["skipped"] for record in records]
    scales = [record["loss_scale"] for record in records]
    assert skipped[0] == 1 and skipped[-1] == 0 and 0 < sum(skipped) < 15
    for before, after, skip in zip(scales, scales[1:], skipped):
        assert after == before / 2 if skip else after in (before, 2 * before)
    assert any(after == 2 * before for before, after in itertools.pairwise(scales))
    assert all(record["grad_norm"] is None for record in records if record["skipped"])
    assert all(math.isfinite(record["loss"]) for record in records)
    assert records[-1]["loss"] < records[0]["loss"]


def test_a_lost_loss_is_counted_its_update_skipped_and_the_log_stays_json(run, tmp_path):
    result = run(optim=dict(lr=1e30, clip_grad=0.0, lr_decay_style="constant"), train=dict(train_iters=5))
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    lost = [record for record in records if record["nan_iterations"]]
    assert len(lost) >= 3 and lost == records[-len(lost) :]
    assert all(record["loss"] is record["grad_norm"] is None and record["skipped"] == 1 for record in lost)
    assert result.step == 5 and not math.isfinite(result.loss)


def test_metrics_have_the_documented_keys_and_true_values(run, tmp_path):
    run(optim=dict(lr=1e-2, lr_warmup_iters=4), train=dict(train_iters=6))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [list(record) for record in records] == [METRICS] * 6
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["consumed_samples"] for record in records] == [8, 16, 24, 32, 40, 48]
    assert [record["lr"] for record in records[:5]] == pytest.approx([0, 2.5e-3, 5e-3, 7.5e-3, 1e-2])
    for record in records:
        assert record["global_batch_size"] == 8 and record["skipped"] == record["nan_iterations"] == 0
        assert record["mfu"] is None and record["max_memory_gb"] is None and record["loss_scale"] is None
        speed = 8 * 16 / (record["step_time_ms"] / 1e3)
        assert record["tokens_per_second_per_device"] == pytest.approx(speed)
        assert record["tflops_per_device"] > 0 and record["grad_norm"] > 0


def test_evaluations_come_at_their_interval_and_at_the_end_and_use_the_same_samples(run, tmp_path):
    run(train=dict(train_iters=6, eval_interval=2), optim=dict(lr=0.0))
    records = read_records(tmp_path / "run" / "evaluations.jsonl")
    assert [record["step"] for record in records] == [2, 4, 6]
    assert len({record["validation_loss"] for record in records}) == 1
    assert records[0]["validation_perplexity"] == pytest.approx(math.exp(records[0]["validation_loss"]))
    run("uneven", train=dict(train_iters=5, eval_interval=2))
    assert [r["step"] for r in read_records(tmp_path / "uneven" / "evaluations.jsonl")] == [2, 4, 5]


def evaluated_alone(tree: dict) -> tuple[float, float]:
    result = Trainer(start(RunConfig.from_tree(tree))).train()
    return result.validation_loss, result.test_loss


def test_a_checkpoint_is_evaluated_alone_in_any_layout_and_nothing_is_written(run, pool, tmp_path, capsys):
    trained = run(train=dict(train_iters=4))
    folder = tmp_path / "run"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    expected = pytest.approx((trained.validation_loss, trained.test_loss), rel=1e-5)
    tree = read_yaml(folder / "config.yaml")
    tree["train"]["skip_train"], tree["checkpoint"] = True, {"load": str(folder)}
    for parallel in ({"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}, {}):
        for found in pool.run(evaluated_alone, tree | {"parallel": parallel}, size=2):
            assert found == expected
    capsys.readouterr()
    assert main(["evaluate", str(folder), "--json", "--train.micro_batch_size", "2"]) == 0
    printed = capsys.readouterr()
    *_, valid, test = (line for line in printed.err.splitlines() if "lm loss" in line)
    assert valid.startswith(" validation loss at iteration 4 on validation set | lm loss value: ")
    assert " on test set | lm loss value: " in test and "lm loss PPL: " in test
    figures = json.loads(printed.out)
    assert (figures["validation_loss"], figures["test_loss"]) == expected and figures["step"] == 4
    assert figures["test_perplexity"] == pytest.approx(math.exp(figures["test_loss"]))
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="there are no weights to evaluate"):
        train(RunConfig.from_tree(tree | {"checkpoint": {}}))


def test_made_up_samples_are_others_in_each_split(tmp_path):
    config = configuration("", tmp_path, model=dict(vocab_size=64), data=dict(mock=True, data_path=None))
    train, valid, test = open_datasets(config, (8, 8, 8), tokenizer=None)
    assert len({bytes(samples[i]) for samples in (train, valid, test) for i in range(8)}) == 24


def test_evaluation_leaves_the_training_as_it_is(run, tmp_path):
    dropout = dict(hidden_dropout=0.1, attention_dropout=0.1)
    often = run("often", train=dict(eval_interval=1, deterministic=True), model=dropout)
    never = run("never", train=dict(eval_iters=0, deterministic=True), model=dropout)
    assert never.validation_loss is None
    assert stored(often.checkpoint) == stored(never.checkpoint)


def test_a_split_without_validation_trains_without_evaluations(run, tmp_path):
    assert run(data=dict(split="1")).validation_loss is None
    assert read_records(tmp_path / "run" / "evaluations.jsonl") == []


@pytest.mark.parametrize(
    ("given", "iters"),
    [
        (dict(train_iters=50), 5),
        (dict(train_iters=3), 1),
        (dict(train_iters=5000), 100),
        (dict(train_iters=50, eval_iters=100), 100),
        (dict(train_iters=50, eval_iters=0), 0),
        (dict(train_iters=None, train_samples=240), 3),
    ],
)
def test_an_evaluation_of_no_set_length_takes_at_most_a_tenth_of_the_runs_steps(
    corpus, tmp_path, given, iters
):
    config = configuration(corpus, tmp_path / "run", train=given)
    if "eval_iters" not in given:
        tree = config.to_tree()
        del tree["train"]["eval_iters"]
        config = RunConfig.from_tree(tree)
    prepared = prepare(config, 1).config
    again = prepare(RunConfig.from_tree(prepared.to_tree()), 1).config
    assert prepared.train.eval_iters == again.train.eval_iters == iters


def test_without_save_at_end_only_intervals_and_early_stops_save(run):
    unsaved = dict(save_at_end=False)
    assert run("through", checkpoint=unsaved).checkpoint is None
    stopped = run("stopped", checkpoint=unsaved, train=dict(exit_interval=3))
    assert (stopped.ended, stopped.checkpoint.name) == ("exit_interval", "step_00000003")
    never = run("never", checkpoint=dict(unsaved, save_when_stopped="never"), train=dict(exit_interval=3))
    assert (never.ended, never.checkpoint) == ("exit_interval", None)
    between = run("between", checkpoint=dict(unsaved, save_interval=4), train=dict(train_iters=6))
    assert (between.step, between.checkpoint.name) == (6, "step_00000004")


def test_a_signal_saves_only_where_that_is_asked_for():
    saves = {
        when: [
            _saves_at_end(ended, CheckpointConfig(save_when_stopped=when))
            for ended in ("SIGINT", "exit_interval")
        ]
        for when in ("always", "at_exits", "never")
    }
    assert saves == {"always": [True, True], "at_exits": [False, True], "never": [False, False]}


def test_exit_interval_and_duration_end_the_run_with_a_checkpoint(run, tmp_path):
    result = run("interval", train=dict(exit_interval=3))
    assert (result.step, result.ended, result.checkpoint.name) == (3, "exit_interval", "step_00000003")
    result = run("time", train=dict(exit_duration_in_mins=1e-6), log=dict(log_interval=1))
    assert (result.step, result.ended, result.checkpoint.name) == (
        1,
        "exit_duration_in_mins",
        "step_00000001",
    )


@pytest.mark.parametrize(
    ("section", "values", "told"),
    [
        ("optim", {"lr_warmup_iters": 8}, "the warm-up .8 iters. must be shorter than the decay"),
        ("optim", {"weight_decay_incr_style": "linear"}, "set both, with the end at or above the start"),
        ("optim", {"min_lr": 1.0}, "optim.min_lr .1.0. is above optim.lr"),
        (
            "data",
            {"tokenizer_type": None, "reset_position_ids": True},
            "reset_position_ids needs the ends of documents",
        ),
        ("data", {"split": "0,0,0"}, "split"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_or_data_are_made(corpus, tmp_path, section, values, told):
    config = configuration(corpus, tmp_path / "run", model={"vocab_size": 257}, **{section: values})
    with pytest.raises(ConfigError, match=told):
        prepare(config, 1)


def test_an_exit_interval_that_falls_on_the_last_step_is_the_end_of_the_run(run):
    assert run(train=dict(exit_interval=8)).ended == "train_iters"


def test_checkpoints_come_at_their_interval_and_only_the_last_ones_are_kept(run, tmp_path):
    run("all", checkpoint=dict(save_interval=2), train=dict(train_iters=7))
    run("last", checkpoint=dict(save_interval=2, keep_last=1), train=dict(train_iters=7))
    run("every", checkpoint=dict(save_interval=1, keep_last=1, keep_every=3), train=dict(train_iters=7))
    found = {
        name: [int(p.name[-2:]) for p in sorted((tmp_path / name / "checkpoints").glob("step_*"))]
        for name in ("all", "last", "every")
    }
    assert found == {"all": [2, 4, 6, 7], "last": [7], "every": [3, 6, 7]}


def test_the_saved_configuration_is_resolved_and_gives_the_same_run_again(run, tmp_path):
    first = run(train=dict(deterministic=True))
    saved = RunConfig.load(tmp_path / "run" / "config.yaml")
    assert (saved.model.vocab_size, saved.model.max_position_embeddings) == (257, 16)
    again = megalith.train(saved.with_settings({"train.output_dir": str(tmp_path / "again")}))
    assert stored(again.checkpoint) == stored(first.checkpoint)
    texts = [(tmp_path / name / "config.yaml").read_text() for name in ("run", "again")]
    assert texts[0].replace(str(tmp_path / "run"), str(tmp_path / "again")) == texts[1]


def test_a_null_tokenizer_resolves_to_the_same_vocabulary_each_time(run, tmp_path):
    null = dict(data_path=None, mock=True, tokenizer_type="NullTokenizer")
    run(model=dict(vocab_size=50), data=null)
    saved = RunConfig.load(tmp_path / "run" / "config.yaml")
    assert saved.model.vocab_size == 50
    megalith.train(saved.with_settings({"train.output_dir": str(tmp_path / "again")}))
    assert RunConfig.load(tmp_path / "again" / "config.yaml").model.vocab_size == 50


def test_a_run_draws_from_no_global_random_state(run):
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    run(
        model=dict(hidden_dropout=0.1, attention_dropout=0.1),
        data=dict(num_workers=1),
        train=dict(train_iters=3),
    )
    after = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_the_seed_decides_the_run_and_worker_processes_do_not(run):
    deterministic = dict(train_iters=4, deterministic=True)
    first = run("first", train=deterministic)
    workers = run("workers", train=deterministic, data=dict(num_workers=2))
    other = run("other", train={**deterministic, "seed": 1})
    assert stored(first.checkpoint) == stored(workers.checkpoint)
    assert stored(first.checkpoint) != stored(other.checkpoint)


def test_recomputation_and_logging_change_no_weights(run):
    dropout = dict(hidden_dropout=0.1, attention_dropout=0.1)
    plain = run("plain", train=dict(deterministic=True), model=dropout)
    other = run(
        "other",
        train=dict(deterministic=True),
        model=dropout,
        parallel=dict(recompute_activations=True),
        log=dict(tensorboard=True, log_interval=3),
    )
    assert stored(plain.checkpoint) == stored(other.checkpoint)


def test_profile_window_and_tensorboard_events_are_written(run, tmp_path):
    run(log=dict(profile=True, profile_step_start=2, profile_step_end=4, tensorboard=True))
    trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())
    steps = {e["name"] for e in trace["traceEvents"] if str(e.get("name", "")).startswith("step ")}
    assert steps == {"step 2", "step 3"}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    shown = [event.value for event in events.Scalars("train/loss")]
    assert shown == pytest.approx(losses(tmp_path / "run"), rel=1e-6)
    assert [event.step for event in events.Scalars("validation/loss")] == [4, 8]


def test_a_sink_that_cannot_be_opened_leaves_nothing_behind(run, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"log\.wandb needs Weights .*pip install"):
        run(log=dict(wandb=True))
    assert not (tmp_path / "run").exists()
