"""Weights that change over a run, caps on epochs, temperature, and the plan of sources."""

import json

import numpy as np
import pytest
import torch

from megalith.cli.main import main
from megalith.comm.collectives import Axis
from megalith.config import RunConfig
from megalith.config.rules.run_rules import check_training
from megalith.config.train import BatchSizeSchedule
from megalith.data import greedy
from megalith.data.blend import BlendedDataset, build_datasets
from megalith.data.indexed import IndexedWriter
from megalith.data.mixture import (
    BlendWeights,
    Mixture,
    MixtureSettings,
    normalize,
    parse_schedule,
    scheduled,
    tempered,
)
from megalith.data.source_plan import source_notes, source_plan
from megalith.errors import ConfigError
from megalith.training.run_datasets import Data

PHASES = [
    {"samples": 0, "weights": [8, 2, 0]},
    {"samples": 150, "weights": [1, 1, 2]},
    {"samples": 390, "weights": [0, 0, 1], "interpolation": "linear"},
]


def write(folder, name, documents, length=20):
    with IndexedWriter(folder / name, np.uint16) as writer:
        for d in range(documents):
            writer.add_document(np.arange(length) + 10_000 * (name == "b") + length * d)
    return str(folder / name)


def greedy_loop(weights, num_samples):
    """The rule, one sample after another, from each point of the schedule."""
    choices = []
    for segment, length in weights.segments(num_samples):
        counts, end = np.zeros(segment.first.shape[1]), segment.first[0] + segment.last[0]
        for n in range(length):
            behind = np.where(end > 0, segment.due(np.array([max(n, 1.0)]))[0] - counts, -1)
            choices.append(int(behind.argmax()))
            counts[choices[-1]] += 1
    return choices


@pytest.mark.parametrize("block, warm_up", [(4096, 8), (64, 0), (50, 8)])
def test_the_order_of_changing_weights_equals_the_plain_loop(monkeypatch, block, warm_up):
    monkeypatch.setattr(greedy, "BLOCK", block)
    monkeypatch.setattr(greedy, "WARM_UP", warm_up)
    weights = scheduled([1, 1, 1], parse_schedule(PHASES, 16))
    choices, _ = greedy.scheduled_order(weights, 500)
    expected = greedy_loop(weights, 500)
    assert choices.tolist() == expected
    assert 2 not in expected[:150] and set(expected[395:]) == {2}
    for n in (1, 150, 151, 300, 390, 500):  # the integral of the weights
        middles = np.arange(0.5, n)
        np.testing.assert_allclose(weights.totals(n), np.sum([weights.at(x) for x in middles], 0), atol=1e-9)
    counts = np.bincount(choices, minlength=3)
    np.testing.assert_allclose(counts, weights.totals(500), atol=2)
    np.testing.assert_allclose(weights.totals(500), [120 + 30, 30 + 30, 180 + 110], atol=1e-9)


def test_each_phase_of_constant_weights_has_the_order_of_a_constant_blend():
    phases = [{"samples": 0, "weights": [5, 3, 2]}, {"samples": 700, "weights": [1, 0, 2]}]
    choices, _ = greedy.scheduled_order(scheduled([1, 1, 1], parse_schedule(phases, 8)), 1500)
    first, _ = greedy.greedy_order(normalize([5, 3, 2]), 700)
    second, _ = greedy.greedy_order(normalize([1, 2]), 800)
    assert choices.tolist() == first.tolist() + [(0, 2)[i] for i in second]
    blend = BlendedDataset([range(10**6)] * 3, Mixture(scheduled([1, 1, 1], parse_schedule(phases, 8))), 9000)
    read = [blend.locate(i) for i in range(9000)]
    assert all(
        [k for d, k in read if d == number] == [*range(count)]
        for number, count in enumerate(blend.sample_counts())
    )


def test_the_order_does_not_depend_on_the_length_of_the_run():
    weights = scheduled([1, 1, 1], parse_schedule(PHASES, 16))
    short, long = greedy.scheduled_order(weights, 450)[0], greedy.scheduled_order(weights, 5000)[0]
    assert short.tolist() == long[:450].tolist()


def test_points_in_tokens_are_points_in_samples_rounded_up():
    in_tokens = parse_schedule([{"tokens": 1e3, "weights": [1]}, {"tokens": 1601, "weights": [2]}], 16)
    assert [point.start for point in in_tokens] == [63, 101]


@pytest.mark.parametrize(
    "points, message",
    [
        (["web"], "does not have the form"),
        ([{"samples": 1, "tokens": 1, "weights": [1]}], "does not have the form"),
        ([{"samples": 1}], "does not have the form"),
        ([{"samples": 1, "weights": [1], "shape": "cosine"}], "does not have the form"),
        ([{"samples": -1, "weights": [1]}], "whole number of at least 0"),
        ([{"samples": 1.5, "weights": [1]}], "whole number of at least 0"),
        ([{"samples": 0, "weights": [0, 0]}], "not all 0"),
        ([{"samples": 0, "weights": [1, -1]}], "at least 0"),
        ([{"samples": 0, "weights": "half"}], "must be a list"),
        ([{"samples": 4, "weights": [1]}, {"samples": 4, "weights": [1]}], "ascending order"),
        ([{"samples": 0, "weights": [1], "interpolation": "linear"}], "no point before it"),
        ([{"samples": 4, "weights": [1], "interpolation": "cosine"}], "step or linear"),
    ],
)
def test_malformed_schedules_are_refused(points, message):
    with pytest.raises(ConfigError, match=message):
        parse_schedule(points, 16)
    with pytest.raises(ConfigError, match="one weight per source"):
        scheduled([1, 1], parse_schedule([{"samples": 0, "weights": [1]}], 16))


def test_caps_lower_weights_and_the_others_take_over_in_proportion():
    mixture = Mixture(BlendWeights.constant([0.6, 0.3, 0.1]), np.array([101.001, np.inf, np.inf]), "abc")
    np.testing.assert_allclose(mixture.weights(1000).totals(1000), [100, 675, 225], atol=1e-3)
    assert mixture.weights(100) is mixture.uncapped
    changing = scheduled([1, 1, 1], parse_schedule(PHASES, 16))
    capped = Mixture(changing, np.array([100.0, np.inf, 260.0]), "abc")
    totals = capped.weights(500).totals(500)
    np.testing.assert_allclose(totals[[0, 2]], [97, 257], atol=0.02)
    with pytest.raises(ConfigError, match=r"takes 500 samples, but .* permit 247; raise"):
        Mixture(BlendWeights.constant([1, 1]), np.array([100.0, 150.0]), "ab").weights(500)
    with pytest.raises(
        ConfigError, match=r"c would provide 230 of .* but its maximum number of epochs allows 100"
    ):
        Mixture(changing, np.array([np.inf, np.inf, 100.0]), "abc").weights(500)


def test_no_source_exceeds_its_maximum_number_of_epochs(tmp_path):
    a, b = write(tmp_path, "a", 30), write(tmp_path, "b", 400)
    settings = MixtureSettings((), None, 1.5)
    blend = build_datasets(f"0.7 {a} 0.3 {b}", "1", 16, (300, 0, 0), 1, mixture=settings)[0]
    counts = blend.sample_counts()
    assert counts[0] in (54, 55) and sum(counts) == 300  # 1.5 epochs are 55 samples
    paths = [{"path": a, "weight": 7, "max_epochs": 1}, {"path": b, "weight": 3}]
    one = build_datasets(paths, "1", 16, (300, 0, 0), 1)[0]
    assert one.epochs() == {a: 1, b: 1} and one.sample_counts()[0] in (35, 36)
    read = [one[i] for i in range(300)]
    firsts = [int(sample[0]) for sample in read if sample[0] < 10_000]
    assert len(set(firsts)) == len(firsts)
    with pytest.raises(ConfigError, match=r"takes 100 samples, but .* permit 37"):
        build_datasets([{"path": a, "max_epochs": 1}], "1", 16, (100, 0, 0), 1)
    assert not one.preserves_order(200) and one.preserves_order(300) and not one.preserves_order(10**6)


def test_temperature_weights_sources_by_a_power_of_their_tokens(tmp_path):
    a, b = write(tmp_path, "a", 10), write(tmp_path, "b", 160)
    blend = build_datasets([a, b], "1", 8, (100, 0, 0), 1, mixture=MixtureSettings(temperature=2.0))[0]
    assert blend.sample_counts() == [20, 80]
    assert tempered([3.0, 1.0], 1.0) == [1.0, 1 / 3]
    with pytest.raises(ConfigError, match="has weights; leave one"):
        build_datasets([1, a, 2, b], "1", 8, (100, 0, 0), 1, mixture=MixtureSettings(temperature=2.0))


def run_config(a, b, tmp_path, **data):
    return RunConfig.from_tree(
        {
            "model": {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "vocab_size": 20_000},
            "data": {"data_path": [a, b], "split": "90,10", "seq_length": 16, "dataloader_type": "single"} | data,
            "train": {
                "micro_batch_size": 2, "global_batch_size": 4, "train_iters": 30, "eval_iters": 1,
                "output_dir": str(tmp_path / "run"),
            },
            "optim": {"lr": 1e-3},
        }
    )  # fmt: skip


SCHEDULE = [
    {"samples": 0, "weights": [1, 0]},
    {"tokens": 16 * 100, "weights": [1, 3], "interpolation": "linear"},
]


def test_a_resumed_run_in_another_data_parallel_size_reads_the_rest_of_the_schedule(tmp_path):
    a, b = write(tmp_path, "a", 60), write(tmp_path, "b", 60)
    config = run_config(a, b, tmp_path, blend_schedule=SCHEDULE)
    sizes = BatchSizeSchedule(4, 2, 1)

    def read(axis, step):
        data = Data(config, sizes, 30, None, axis)
        with data.train_loader(step, 4 * step, torch.device("cpu")) as loader:
            rows = [
                (int(n), row.tolist())
                for batch in loader
                for n, row in zip(batch.sample_numbers, batch.input_ids)
            ]
        return dict(rows)

    whole = read(Axis(), 0)
    resumed = [read(Axis(size=2, rank=rank), 11) for rank in range(2)]
    assert {**resumed[0], **resumed[1]} == {n: row for n, row in whole.items() if n >= 44}
    of_b = [row[0] >= 10_000 for _, row in sorted(whole.items())]
    assert not any(of_b[:1]) and 12 <= sum(of_b[40:80]) <= 22 and 13 <= sum(of_b[100:]) <= 16


def test_plan_prints_tokens_and_epochs_of_each_source_and_notes_name_upsampled_ones(tmp_path, capsys):
    a, b = write(tmp_path, "a", 10), write(tmp_path, "b", 400)
    config = run_config(a, b, tmp_path, blend_schedule=SCHEDULE)
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(config.model_dump(exclude_unset=True)))
    assert main(["data", "plan", str(path), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["steps"], plan["samples"], plan["tokens"]) == (30, 120, 120 * 16)
    first, second = plan["sources"]
    due = scheduled([1, 1], parse_schedule(SCHEDULE, 16)).totals(120)
    assert abs(first["samples"] - due[0]) <= 1 and first["samples"] + second["samples"] == 120
    assert first["epochs"] == pytest.approx(first["samples"] * 16 / (9 * 20))
    assert (first["weight"], second["last_weight"]) == (1.0, 0.75)
    assert [sum(phase["tokens"].values()) for phase in plan["phases"]] == [1600, 320]
    assert sum(phase["tokens"][a] for phase in plan["phases"]) == first["tokens"]
    assert main(["data", "plan", str(path)]) == 0
    text = capsys.readouterr().out
    assert "100.0 % to 25.0 %" in text and f"tokens of {b}" in text and "30 steps, 120 samples" in text
    notes = Data(config, BatchSizeSchedule(4, 2, 1), 30, None, Axis()).notes
    assert notes == [f"upsampled sources, read more than once in this run: {a} {first['epochs']:.2f} epochs"]
    capped = BlendedDataset([], Mixture(BlendWeights.constant([1, 1]), np.array([9.0, np.inf])), 40)
    capped.datasets = [None, None]
    assert source_notes(source_plan(capped, 40, 8)) == [
        "the maximum number of epochs lowers the weights of: source 0"
    ]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"blend_schedule": SCHEDULE, "dataloader_type": "cyclic"}, "requires data.dataloader_type single"),
        ({"max_epochs_per_source": 2, "data_path": None, "mock": True}, "data.mock is set"),
        ({"blend_temperature": 2.0, "data_path": None, "dataset": "x.py:f"}, "data.dataset is set"),
    ],
)
def test_settings_of_mixtures_are_refused_where_nothing_reads_them(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        check_training(run_config("a", "b", tmp_path, **settings))
