"""A run that goes on from a checkpoint: bitwise as if it had never stopped, told where it cannot be, or refused."""

import pytest
from trained_runs import comparable, losses, stored

from megalith.errors import CheckpointError
from megalith.runtime.metrics import read_records

CASES = {
    "plain": dict(),
    "dropout, accumulation and ramp-up": dict(
        model=dict(hidden_dropout=0.1, attention_dropout=0.1),
        train=dict(micro_batch_size=2, rampup_batch_size=[2, 2, 30]),
        optim=dict(lr_warmup_iters=3, weight_decay=0.1, clip_grad=0.5),
    ),
    "counted in samples, in order": dict(
        train=dict(train_iters=None, train_samples=72), data=dict(dataloader_type="single", num_workers=1)
    ),
    "documents apart": dict(
        model=dict(preset="tiny-llama", num_query_groups=1),
        data=dict(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True),
    ),
    "fp16": dict(
        train=dict(precision="fp16"),
        optim=dict(initial_loss_scale=2.0**34, loss_scale_window=3, hysteresis=1),
    ),
    "bf16, sgd": dict(train=dict(precision="bf16"), optim=dict(optimizer="sgd", lr=0.1)),
    "mock, adam": dict(data=dict(data_path=None, mock=True), optim=dict(optimizer="adam")),
    "blend": dict(data=dict(data_path="BLEND")),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.fault(9)
def test_going_on_from_a_checkpoint_is_bitwise_going_straight_on(run, corpus, tmp_path, case):
    sections = {section: dict(values) for section, values in CASES[case].items()}
    if sections.get("data", {}).get("data_path") == "BLEND":
        sections["data"]["data_path"] = ["0.7", corpus, "0.3", corpus]
    sections["train"] = {"deterministic": True, "train_iters": 9, **sections.get("train", {})}
    straight = run("straight", **sections)
    folder = str(tmp_path / "stopped")
    first = {**sections["train"], "exit_interval": 5}
    stopped = run("stopped", **{**sections, "train": first}, checkpoint=dict(load=folder))
    assert (stopped.step, stopped.ended) == (5, "exit_interval")
    resumed = run("stopped", **sections, checkpoint=dict(load=folder))
    assert (resumed.step, resumed.consumed_samples) == (straight.step, straight.consumed_samples)
    assert comparable(tmp_path / "stopped") == comparable(tmp_path / "straight")
    assert stored(resumed.checkpoint) == stored(straight.checkpoint)
    last = [read_records(tmp_path / n / "evaluations.jsonl")[-1] for n in ("straight", "stopped")]
    assert last[0] == last[1]


def test_going_back_to_an_earlier_step_of_the_same_folder_repeats_the_same_steps(run, tmp_path):
    whole = run(checkpoint=dict(save_interval=3), train=dict(deterministic=True))
    before, weights = comparable(tmp_path / "run"), stored(whole.checkpoint)
    early = tmp_path / "run" / "checkpoints" / "step_00000003"
    again = run(checkpoint=dict(load=str(early)), train=dict(deterministic=True))
    assert comparable(tmp_path / "run") == before
    assert stored(again.checkpoint) == weights


def test_without_the_optimizers_state_the_weights_go_on_and_the_moments_start_anew(run, tmp_path):
    first = run("first", checkpoint=dict(save_optim=False), train=dict(train_iters=4))
    assert not (first.checkpoint / "optimizer-00000-000.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"optimizer.*load_optim"):
        run("second", checkpoint=dict(load=str(tmp_path / "first")))
    second = run("second", checkpoint=dict(load=str(tmp_path / "first"), load_optim=False))
    assert second.step == 8 and len(losses(tmp_path / "second")) == 4


def test_a_finished_run_that_is_started_again_changes_nothing(run, tmp_path):
    first = run(train=dict(deterministic=True))
    weights, metrics = stored(first.checkpoint), comparable(tmp_path / "run")
    again = run(train=dict(deterministic=True), checkpoint=dict(load=str(tmp_path / "run")))
    assert again.step == 8 and stored(again.checkpoint) == weights and comparable(tmp_path / "run") == metrics


def test_a_finished_run_that_is_started_again_says_what_would_let_it_go_on(run, capsys):
    first = run(train=dict(train_iters=2))
    assert "nothing is left to train" not in capsys.readouterr().out
    again = run("again", train=dict(train_iters=2), checkpoint=dict(load=str(first.checkpoint)))
    assert (
        "nothing is left to train: the run's length is 2 steps; to go on, raise it" in capsys.readouterr().out
    )
    assert (again.step, again.ended) == (2, "train_iters")


@pytest.mark.parametrize(
    ("data", "steps", "told"), [({}, 9, False), ({}, 400, True), ({"mock": True}, 9, True)]
)
def test_a_run_made_longer_is_told_where_its_samples_come_in_another_order(run, capsys, data, steps, told):
    """Of the corpus while it takes no more epochs; made-up samples are permuted all together."""
    data = dict(data, data_path=None, split="1") if data else data
    first = run(data=data, train=dict(train_iters=8, exit_interval=2))
    capsys.readouterr()
    again = dict(train_iters=steps, exit_interval=4)
    run("again", data=data, train=again, checkpoint=dict(load=str(first.checkpoint)))
    printed = " ".join(capsys.readouterr().out.split())
    sentence = f"the run is {8 * steps:,} samples long, and that of {first.checkpoint} was 64"
    assert (sentence in printed) == told


def test_a_run_that_goes_on_with_other_data_says_which_settings_differ_and_how_to_begin_anew(run, capsys):
    first = run(train=dict(train_iters=4, exit_interval=2))
    capsys.readouterr()
    other = dict(train=dict(train_iters=4, seed=77), data=dict(dataloader_type="single"))
    run("again", **other, checkpoint=dict(load=str(first.checkpoint)))
    printed = " ".join(capsys.readouterr().out.split())
    assert "train.seed was 1234 and is 77; data.dataloader_type was 'cyclic' and is 'single'" in printed
    assert "training goes on behind the first 16 of what is set now" in printed
    anew = run("anew", **other, model=dict(init_from=str(first.checkpoint)))
    assert (anew.step, anew.consumed_samples) == (4, 32)
    assert "samples need not be" not in capsys.readouterr().out


def test_load_of_the_own_empty_folder_is_a_first_start_and_any_other_without_a_checkpoint_is_refused(
    run, tmp_path
):
    for number, named in enumerate(("", "checkpoints")):
        folder = tmp_path / f"run{number}"
        assert run(f"run{number}", checkpoint=dict(load=str(folder / named))).step == 8
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*elsewhere.*correct the path"):
        run("other", checkpoint=dict(load=str(tmp_path / "elsewhere")))
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_of_another_model_or_tokenizer_is_refused(run, tmp_path):
    run("first", train=dict(train_iters=1))
    load = dict(load=str(tmp_path / "first"))
    with pytest.raises(CheckpointError, match=r"does not fit the model.*linear_fc1"):
        run("wider", model=dict(ffn_hidden_size=64), checkpoint=load)
    with pytest.raises(
        CheckpointError, match="trained with num_attention_heads 2, but this run's model has 4"
    ):
        run("heads", model=dict(num_attention_heads=4), checkpoint=load)
    with pytest.raises(CheckpointError, match="activation gelu_tanh, but this run's model has relu"):
        run("activation", model=dict(activation="relu"), checkpoint=load)
    null = dict(data_path=None, mock=True, tokenizer_type="NullTokenizer")
    with pytest.raises(
        CheckpointError, match=r"trained with another tokenizer .*257 entries.*use the one in"
    ):
        run("tokenizer", model=dict(vocab_size=257), data=null, checkpoint=load)
    with pytest.raises(CheckpointError, match="does not fit the optimizer"):
        run("sgd", optim=dict(optimizer="sgd"), checkpoint=load)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
