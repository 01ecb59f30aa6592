"""Files of rollouts come back as they were; what is wrong in one is named by file, line and sample."""

import json
from threading import Event, current_thread, main_thread
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_files import VOCAB, configuration, rollouts
from test_grpo_layouts import run_of

import megalith.cli.main
from megalith.comm.collectives import Axis
from megalith.errors import ConfigError, DataError
from megalith.report.metrics import read_records
from megalith.rl.grpo import open_rollouts, train_grpo
from megalith.rl.rollouts import rollout_reader as rollout_files
from megalith.rl.rollouts.rollout_data import RolloutData
from megalith.rl.rollouts.rollout_reader import RolloutFiles, load_rollouts
from megalith.rl.rollouts.rollout_rows import Sample, make_batch, pack_rows
from megalith.rl.rollouts.rollout_source import FileRollouts
from megalith.rl.rollouts.rollouts import save_rollouts
from megalith.rl.sampling.drift import largest_drift_of_step


@pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.jsonl.zst", "rollouts.jsonl.gz"])
def test_what_is_saved_is_loaded(tmp_path, name):
    whole = rollouts()
    save_rollouts(tmp_path / name, whole)
    back = load_rollouts(tmp_path / name, vocab_size=VOCAB, max_tokens=33, num_generations=4)
    assert back.rewards == whole.rewards
    for ours, theirs in zip(back.groups, whole.groups, strict=True):
        assert np.array_equal(ours.prompt_ids, theirs.prompt_ids)
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            assert np.array_equal(a.ids, b.ids) and np.array_equal(a.logprobs, b.logprobs)
            assert np.array_equal(a.rewards, b.rewards, equal_nan=True)
            assert np.array_equal(a.version, b.version) and a.truncated == b.truncated


HEADER = {"format": "megalith-rollouts", "version": 1, "tokenizer": "abc", "rewards": ["right"]}
SAMPLE = {"completion_ids": [3, 4], "logprobs": [-1.0, None], "rewards": [1.0], "version": [3, 4]}
HOSTILE = [  # header, group, the sentence
    ({"format": "text"}, {}, "line 1 is not the header"),
    ({"version": 2}, {}, "format version 2, but this Megalith reads version 1"),
    ({"version": True}, {}, "format version True"),
    ({"rewards": []}, {}, "has rewards \\[\\]"),
    ({"tokenizer": "other"}, {}, r"has token ids of another tokenizer \(fingerprint other\)"),
    ({}, {"prompt_ids": []}, "line 2 has prompt_ids \\[\\]"),
    ({}, {"prompt_ids": [1, True]}, "line 2 has prompt_ids"),
    ({}, {"samples": []}, "line 2 has no list of samples"),
    ({}, {"samples": [SAMPLE]}, "line 2 has 1 sample, but rl.num_generations is 2, so the group is incomplete"),
    ({}, {"samples": [SAMPLE, 3]}, "line 2, sample 1 is 3, not an object"),
    ({}, {"completion_ids": []}, "sample 1 has completion_ids \\[\\]"),
    ({}, {"completion_ids": [3, VOCAB]}, f"sample 1 has token id {VOCAB} at position 1 of completion_ids"),
    ({}, {"completion_ids": [-1, 3]}, "sample 1 has token id -1 at position 0"),
    ({}, {"completion_ids": [3] * 20, "logprobs": None}, "has 2 tokens of prompt and 20 of completion, but at most 12"),
    ({}, {"completion_ids": [10**400, 1]}, "sample 1 has token id 1000"),
    ({}, {"logprobs": [-1.0]}, "sample 1 has 1 values for logprobs; it must be 2 numbers or nulls"),
    ({}, {"logprobs": [-1.0, 0.5]}, "log-probability of 0.5, but"),
    ({}, {"logprobs": [-1.0, -(10**400)]}, "infinite number in logprobs"),
    ({}, {"rewards": {}}, "sample 1 has {} for rewards; it must be 1 numbers"),
    ({}, {"rewards": [float("inf")]}, "infinite number in rewards"),
    ({}, {"version": [1]*3}, "sample 1 has version \\[1, 1, 1\\]; it must be a step, or one step for each of its 2"),
    ({}, {"truncated": "no"}, "sample 1 has truncated 'no'"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "wrong", "sentence"), HOSTILE)
def test_what_is_wrong_is_named_by_file_line_and_sample(tmp_path, header, wrong, sentence):
    of_sample = wrong.keys() <= SAMPLE.keys() | {"truncated"} and bool(wrong)
    group = {"prompt_ids": [1, 2], "samples": [SAMPLE, SAMPLE | wrong if of_sample else SAMPLE]}
    group |= {} if of_sample else wrong
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(HEADER | header) + "\n" + json.dumps(group) + "\n")
    with pytest.raises(DataError, match=sentence) as error:
        load_rollouts(path, vocab_size=VOCAB, max_tokens=12, num_generations=2, tokenizer="abc")
    assert str(path) in str(error.value)


def test_rollouts_of_other_weights_are_refused_where_a_version_is_asked_for(tmp_path):
    path = tmp_path / "r.jsonl"

    def write(*versions) -> None:
        samples = [SAMPLE | {"version": version} for version in versions]
        group = {"prompt_ids": [1, 2], "samples": samples}
        path.write_text(json.dumps(HEADER) + "\n" + json.dumps(group) + "\n")

    write(4, [4, 4])
    assert len(load_rollouts(path, version=4).groups) == 1
    for version, found in (
        (5, "of version 5"),
        ([3, 4], r"of version \[3, 4\]"),
        (None, "of unknown version"),
    ):
        write(4, version)
        with pytest.raises(
            DataError, match=rf"r\.jsonl, line 2, sample 1 is {found}.*rl\.rollout_version is 4"
        ):
            load_rollouts(path, version=4)


@pytest.mark.parametrize(
    "content", ["", "{", "[1]\n", json.dumps(HEADER), json.dumps(HEADER) + '\n{"prompt_ids": [1']
)
def test_a_file_that_is_none_or_cut_short_is_refused(tmp_path, content):
    path = tmp_path / "r.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"r\.jsonl"):
        load_rollouts(path)
    path.with_suffix(".jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd" + content.encode())
    with pytest.raises(DataError, match=r"not a complete \.zst file"):
        load_rollouts(path.with_suffix(".jsonl.zst"))


def test_rows_are_packed_best_fit_and_every_token_of_a_completion_is_in_one(tmp_path):
    config = configuration(tmp_path, packing=True)
    samples = [Sample(g.prompt_ids, c, 1.0, True) for g in rollouts(8).groups for c in g.completions]
    rows = pack_rows(samples, config.data.seq_length)
    assert sum(map(len, rows)) == len(samples) > 1.5 * len(rows)
    assert all(sum(sample.tokens for sample in row) <= config.data.seq_length for row in rows)
    batch = make_batch(config, rows, 0)
    assert batch.loss_mask.sum() == batch.sequence_tokens.sum() == sum(len(s.completion.ids) for s in samples)
    flat = [sample for row in rows for sample in row]
    for number, sample in enumerate(flat):
        where = (batch.sequence_ids == number) & (batch.loss_mask > 0)
        assert batch.labels[where].tolist() == sample.completion.ids.tolist()
        assert torch_equal(batch.rollout_logprobs[where], sample.completion.logprobs)
        assert batch.position_ids[where].tolist() == list(range(len(sample.prompt_ids) - 1, sample.tokens))


def torch_equal(tensor, array) -> bool:
    return np.array_equal(tensor.numpy(), array)


def test_the_command_trains_from_a_file_alone_goes_on_bitwise_and_writes_its_figures(tmp_path):
    config = configuration(tmp_path, train=dict(train_iters=4), mini_batches=2)
    result = train_grpo(config)
    lines = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and result.ended == "train_iters"
    first = lines[0]
    assert first["ratio"] == 1.0 and first["kl"] is None and first["groups_without_spread"] == 0.25
    assert first["completion_length_max"] <= 20 and first["entropy"] > 3 and first["rewards_absent"] == 1
    assert lines[1]["ratio"] != 1.0

    half = configuration(
        tmp_path, train=dict(train_iters=2, output_dir=str(tmp_path / "half")), mini_batches=2
    )
    train_grpo(half)
    more = {"train.train_iters": 4, "checkpoint.load": str(tmp_path / "half")}
    train_grpo(half.with_settings(more))
    again = read_records(tmp_path / "half" / "metrics.jsonl")
    for name in ("loss", "grad_norm", "entropy", "ratio"):
        assert [line[name] for line in again] == [line[name] for line in lines]


def test_groups_without_spread_can_be_left_out_and_are_counted(tmp_path, capsys):
    train_grpo(configuration(tmp_path, train=dict(train_iters=1, global_batch_size=4), filter_zero_std=True))
    assert "rl.filter_zero_std removes 1 of 4 groups" in capsys.readouterr().out


def test_a_run_without_rollouts_and_pre_training_with_them_are_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"neither rl\.prompts nor rl\.rollouts is set"):
        train_grpo(configuration(tmp_path).with_settings({"rl.rollouts": None}))
    path = tmp_path / "run.yaml"
    path.write_text(configuration(tmp_path).to_yaml())
    assert megalith.cli.main.main(["train", str(path)]) == 2
    assert "rl.rollouts requires `megalith grpo`" in capsys.readouterr().err
    assert megalith.cli.main.main(["grpo", str(path), "--data.mock"]) == 2
    assert "rl.rollouts is the training data, but data.mock is set too" in capsys.readouterr().err


def test_a_run_stopped_inside_of_a_rollout_batch_goes_on_as_it_was_or_says_what_is_not(tmp_path, capsys):
    def run(folder: str, load: str | None = None, **rl) -> list[float]:
        train = dict(train_iters=4, output_dir=str(tmp_path / folder), exit_interval=None if load else 1)
        config = configuration(tmp_path, train=train, **dict(mini_batches=2) | rl)
        train_grpo(config.with_settings({"checkpoint.load": load and str(tmp_path / load)}))
        return [step["loss"] for step in read_records(tmp_path / folder / "metrics.jsonl")]

    first = run("first")
    again = run("again", "first")
    assert "stands inside" not in capsys.readouterr().out
    whole = configuration(
        tmp_path, train=dict(train_iters=4, output_dir=str(tmp_path / "whole")), mini_batches=2
    )
    train_grpo(whole)
    assert first + again == [step["loss"] for step in read_records(tmp_path / "whole" / "metrics.jsonl")]
    with pytest.raises(
        DataError, match=r"row 0 of its mini-batch 2 had 0 tokens then but has \d+ now; keep rl\.packing"
    ):
        run("other", "first", mini_batches=4)
    run("older", old_logprobs="rollout")
    run("newer", "older")
    assert "step 1 is inside a rollout batch of 2 steps" in capsys.readouterr().out


def test_the_rollouts_own_logprobs_can_be_the_old_ones_and_have_to_be_there(tmp_path):
    settings = dict(old_logprobs="rollout", packing=True)
    train_grpo(configuration(tmp_path, train=dict(train_iters=1, micro_batch_size=8), **settings))
    (line,) = read_records(tmp_path / "run" / "metrics.jsonl")
    assert (
        line["ratio"] != 1.0 and line["drift"] > 0.0
    )  # the old policy is the rollouts', which others sampled
    config = configuration(tmp_path, **settings)
    size, longest = config.train.global_batch_size, config.data.seq_length
    each = [(group, one) for group in load_rollouts(config.rl.rollouts).groups for one in group.completions]
    tokens = sum(len(group.prompt_ids) + len(one.ids) - 1 for group, one in each[:size])
    assert -(-tokens // longest) <= line["packing_rows"] < size
    assert line["packing_filled"] == pytest.approx(tokens / (line["packing_rows"] * longest))
    save_rollouts(tmp_path / "none.jsonl", rollouts(logprobs=False))
    other = {"rl.rollouts": str(tmp_path / "none.jsonl"), "train.output_dir": str(tmp_path / "other")}
    config = configuration(tmp_path, **settings).with_settings(other)
    with pytest.raises(DataError, match=r"line 2, sample 0 has no logprobs, but rl\.old_logprobs is rollout"):
        train_grpo(config)


def test_where_the_engine_differs_most_is_found_behind_rows_without_log_probabilities(tmp_path):
    """The longest completion is the first micro-batch, and has none: null for each token is none."""
    ids = [list(range(9)), [1, 2, 3]]
    samples = [SAMPLE | {"completion_ids": one, "logprobs": [None] * len(one), "version": 3} for one in ids]
    samples[1]["logprobs"] = [-1.0, -4.0, None]
    path = tmp_path / "rollouts.jsonl"
    group = {"prompt_ids": [1, 2], "samples": samples}
    path.write_text(json.dumps(HEADER | {"tokenizer": None}) + "\n" + json.dumps(group) + "\n")
    assert load_rollouts(path).groups[0].completions[0].logprobs is None
    train = dict(train_iters=1, micro_batch_size=1, global_batch_size=2)
    run = run_of(configuration(tmp_path, train=train, num_generations=2))
    largest = torch.tensor([[2.0, -1.5, -4.0]], dtype=torch.float64)
    assert vars(largest_drift_of_step(run, largest)) == dict(
        where=f"{path}, line 2, completion 1", position=1, trainer=-1.5, engine=-4.0
    )


@pytest.mark.parametrize("name", ["rollouts.jsonl", "rollouts.jsonl.zst", "rollouts.jsonl.gz"])
def test_a_rank_parses_its_share_of_the_lines_and_of_a_batch_what_it_asks_for(tmp_path, name, monkeypatch):
    whole, path = rollouts(9), tmp_path / name
    save_rollouts(path, whole)
    parsed = []
    monkeypatch.setattr(
        rollout_files, "_object", lambda where, line: parsed.append(where) or json.loads(line)
    )

    def all_shares(value, axis):
        others = [axis.rank == 1 or RolloutFiles([str(path)], Axis(axis.size, 1), vocab_size=VOCAB)]
        return [value] if axis.rank == 1 else [value, [others[0].entries, None]]

    monkeypatch.setattr(rollout_files, "gather_json", all_shares)
    files = RolloutFiles([str(path)], Axis(2, 0), vocab_size=VOCAB)
    assert len(files.entries) == 9 and len(parsed) == len(set(parsed)) + 1 == 9 + 2  # the header by both
    parsed.clear()
    for first in (0, 4, 2):  # on, and back
        groups = files.read(files.entries[first : first + 4])
        for group, there in zip(groups, whole.groups[first:], strict=False):
            assert len(group.prompt_ids) == len(there.prompt_ids) and group.where.startswith(str(path))
            assert [len(one.ids) for one in group.completions] == [len(one.ids) for one in there.completions]
        assert not parsed
        last = groups[1].completions[2]
        assert np.array_equal(np.asarray(last.ids), whole.groups[first + 1].completions[2].ids)
        assert np.array_equal(np.asarray(groups[1].prompt_ids), whole.groups[first + 1].prompt_ids)
        assert parsed == [groups[1].where]
        parsed.clear()
    save_rollouts(path, rollouts(9, seed=4))
    with pytest.raises(DataError, match="line 2 has changed since the run began"):
        np.asarray(files.read(files.entries[:1])[0].prompt_ids)
    save_rollouts(path, rollouts(3))
    files.read(files.entries[:1])
    with pytest.raises(DataError, match="has no line 9 any more"):
        files.read(files.entries[7:])


def test_a_thread_makes_the_next_step_while_one_is_trained_on_and_samples_nothing(tmp_path):
    config = configuration(tmp_path)
    run = SimpleNamespace(
        config=config, mesh=SimpleNamespace(dp=Axis()), total_steps=3, log=print, model=None, tokenizer=None
    )

    def micro_batches(can_prefetch: bool) -> tuple[list, list]:
        source, asked, third = FileRollouts(run, open_rollouts(config, None)), [], Event()
        source.can_prefetch, read = can_prefetch, source.batch

        def batch(number: int, groups: int) -> list:
            asked.append((number, current_thread() is main_thread()))
            (third.set() if number == 2 else None)
            return read(number, groups)

        source.batch, found = batch, []
        with RolloutData(run, source, None).train_loader(0, 0, "cpu") as batches:
            for at, one in enumerate(batches):
                found.append(one)
                if at == 4 and can_prefetch:  # the first of the second step
                    assert third.wait(60)
        return found, asked

    (one, asked), (other, in_turn) = micro_batches(True), micro_batches(False)
    assert asked == [(0, True), (1, False), (2, False)] and in_turn == [(0, True), (1, True), (2, True)]
    assert len(one) == len(other) == 12
    for ours, theirs in zip(one, other):
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(
            ours.advantages, theirs.advantages
        )


def test_a_step_waits_for_no_thread_that_reads_the_next_one(tmp_path):
    config = configuration(tmp_path)
    run = SimpleNamespace(
        config=config, mesh=SimpleNamespace(dp=Axis()), total_steps=2, log=print, model=None, tokenizer=None
    )
    source, reading, asked, in_time = FileRollouts(run, open_rollouts(config, None)), Event(), Event(), []
    read = source.batch

    def batch(number: int, groups: int) -> list:
        if number:
            reading.set()
            in_time.append(asked.wait(60))
        return read(number, groups)

    source.batch = batch
    data = RolloutData(run, source, None)
    with data.train_loader(0, 0, "cpu") as batches:
        next(batches)
        assert reading.wait(60) and data.step(0).rows
        asked.set()
    assert in_time == [True]
