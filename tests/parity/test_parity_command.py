"""megalith parity: a configuration of one's own made small, compared, and told in a table."""

import pytest

from megalith.cli.main import main
from megalith.config import RunConfig
from megalith.config.presets import PRESETS
from megalith.config.rules.run_rules import check_training
from megalith.errors import ConfigError
from megalith.parity import check
from megalith.parity.check import LAYOUTS, choose
from megalith.parity.differences import Errors
from megalith.parity.sizes import SECTION_RULES, SIZES, shrink


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {preset: qwen3-0.6b}\n"
        "data: {data_path: there/is/none, seq_length: 4096, reset_attention_mask: true}\n"
        "optim: {lr: 6.0e-4}\n"
        "train: {train_iters: 100000, global_batch_size: 512, precision: bf16}\n"
        "parallel: {tensor_model_parallel_size: 8, recompute_granularity: selective}\n"
    )
    return str(path)


def test_every_setting_has_a_size_or_the_rule_of_its_section():
    sections = RunConfig.model_fields
    assert SECTION_RULES.keys() == sections.keys()
    assert SIZES.keys() <= {
        f"{name}.{key}" for name in sections for key in sections[name].annotation.model_fields
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_made_small_with_its_features(preset):
    given = RunConfig.from_tree({"model": {"preset": preset}, "optim": {"lr": 6e-4}})
    small = shrink(given, steps=10)
    check_training(small)
    assert small.model.hidden_size <= 128
    for name in (
        "normalization",
        "swiglu",
        "qk_layernorm",
        "hidden_dropout",
        "rope_scaling",
        "add_bias_linear",
        "multi_latent_attention",
        "moe_router_score_function",
    ):
        assert getattr(small.model, name) == getattr(given.model, name)
    for model in (small.model, given.model):
        assert (model.query_groups < model.num_attention_heads) == (given.model.num_query_groups > 0)


def test_all_layouts_that_fit_are_chosen_and_the_others_told(run_file):
    chosen, refused = choose(shrink(RunConfig.load(run_file), steps=10), [], most_processes=4)
    small = {n for n, layout in LAYOUTS.items() if layout.processes <= 4 and not layout.has_experts}
    assert chosen.keys() | refused.keys() == small
    assert not refused
    ramp = RunConfig.load(run_file, ["train.rampup_batch_size=[32, 32, 10000]"])
    single = {name for name, layout in chosen.items() if "tp_comm_overlap" not in layout.parallel}
    assert (
        choose(shrink(ramp, steps=10), [], most_processes=4)[0].keys() == single
    )  # single sequences have no halves
    full = RunConfig.load(run_file, ["parallel.recompute_granularity=full"])
    _, refused = choose(shrink(full, steps=10), [], most_processes=2)
    assert list(refused) == ["pp2-zero_bubble"] and "recompute_granularity full" in refused["pp2-zero_bubble"]


def test_layouts_that_are_not_or_are_too_large_are_refused(run_file):
    config = shrink(RunConfig.load(run_file), steps=10)
    with pytest.raises(ConfigError, match="unknown layout 'tp2-spp'; did you mean 'tp2-sp"):
        choose(config, ["tp2-spp"], most_processes=4)
    with pytest.raises(ConfigError, match="tp4-sp-pp2 needs 8 processes, but --nproc-max is 4"):
        choose(config, ["tp4-sp-pp2"], most_processes=4)


@pytest.mark.processes
def test_a_table_of_the_errors_ends_the_command(run_file, capsys):
    assert main(["parity", run_file, "train.seed=7", "--layouts", "tp2-sp", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if line.split()[:1] == ["tp2-sp"])
    assert row[1] == "2" and row[-1] == "equal"
    assert all(float(error) < 1e-5 for error in row[2:7])
    assert lines[-1] == "1 layout agrees with one process to 1e-05"


def test_a_layout_that_differs_is_named_and_the_exit_code_is_5(run_file, capsys, monkeypatch):
    errors = Errors(
        gradient=2e-5, worst_gradient="layers.0.mlp.linear_fc1.weight", different=["generated tokens"]
    )
    monkeypatch.setattr(check, "run_job", dict)
    monkeypatch.setattr(check, "compare", lambda ranks, one: errors)
    assert main(["parity", run_file, "--layouts", "tp2", "--steps", "2"]) == 5
    output = capsys.readouterr()
    assert "tp2 differs: worst gradient layers.0.mlp.linear_fc1.weight; generated tokens" in output.out
    assert "2.0e-05" in output.out
    assert "1 of 1 layouts differ from the run on one process by more than 1e-05: tp2" in output.err
