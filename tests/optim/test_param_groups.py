"""Parameter groups by pattern: their rates, decay and optimizers, and what is refused by name."""

import pytest
import torch

from megalith.config import OptimConfig, RunConfig
from megalith.config.rules.optim_rules import check_schedule
from megalith.errors import ConfigError
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step, set_learning_rate
from megalith.optim.patterns import matches

NAMES = {
    "embedding.weight": (6, 4),
    "layers.0.mlp.weight": (4, 4),
    "layers.1.mlp.weight": (4, 4),
    "norm.weight": (4,),
}


def parameters() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in NAMES.items()
    }


def rates(optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    return {
        name: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


def test_a_group_has_its_rate_and_decay_and_the_first_pattern_applies():
    groups = [
        {"pattern": "embedding.*", "lr": 0.05},
        {"pattern": r"re:layers\.[1-9]", "lr_mult": 0.5, "weight_decay": 0.3},
        {"pattern": "layers.*", "lr_mult": 2.0},
        {"pattern": "norm.weight", "weight_decay": 0.2},
    ]
    optimizer = build_optimizer(
        parameters().items(), OptimConfig(lr=0.1, weight_decay=0.7, param_groups=groups)
    )
    expected = {
        "embedding.weight": (0.05, 0.7), "layers.0.mlp.weight": (0.2, 0.7),
        "layers.1.mlp.weight": (0.05, 0.3), "norm.weight": (0.1, 0.2),
    }  # fmt: skip
    assert rates(optimizer) == {name: pytest.approx(pair) for name, pair in expected.items()}
    set_learning_rate(
        optimizer, 0.01, 0.07
    )  # later in the schedules: rates are scaled, a group's decay is constant
    expected = {
        "embedding.weight": (0.005, 0.07), "layers.0.mlp.weight": (0.02, 0.07),
        "layers.1.mlp.weight": (0.005, 0.3), "norm.weight": (0.01, 0.2),
    }  # fmt: skip
    assert rates(optimizer) == {name: pytest.approx(pair) for name, pair in expected.items()}


def test_a_groups_own_rate_replaces_the_decoupled_one():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    for group, rate in (({"lr": 0.03}, 0.03), ({"lr_mult": 0.5}, 0.01)):
        config = OptimConfig(lr=0.1, decoupled_lr=0.02, param_groups=[{"pattern": "output_layer.*", **group}])
        optimizer = build_optimizer([("output_layer.weight", weight)], config)
        assert rates(optimizer)["output_layer.weight"][0] == pytest.approx(rate)


def test_optimizers_of_groups_step_as_each_alone_does():
    config = OptimConfig(lr=0.1, weight_decay=0.1, clip_grad=0,
                         param_groups=[{"pattern": "layers.*", "optimizer": "sgd"}])  # fmt: skip
    mixed, apart = parameters(), parameters()
    optimizers = [build_optimizer(mixed.items(), config)]
    for name in ("adamw", "sgd"):
        part = [item for item in apart.items() if item[0].startswith("layers") == (name == "sgd")]
        optimizers.append(
            build_optimizer(part, config.model_copy(update={"optimizer": name, "param_groups": []}))
        )
    generator = torch.Generator().manual_seed(1)
    for bad in (False, True, False):
        for name in mixed:
            gradient = torch.randn(mixed[name].shape, generator=generator) * (torch.inf if bad else 8.0)
            mixed[name].grad, apart[name].grad = gradient.clone(), gradient.clone()
        scale = build_loss_scale("fp16", OptimConfig(lr=0.1, loss_scale=8.0), "cpu")
        assert [optimizer_step(each, scale, 0).skipped.item() for each in optimizers] == [bad] * 3
    for name in mixed:
        assert torch.equal(mixed[name], apart[name])
    assert {key for name in mixed for key in optimizers[0].state[mixed[name]]} == {
        "step", "exp_avg", "exp_avg_sq", "momentum_buffer",
    }  # fmt: skip


@pytest.mark.parametrize(("groups", "text"), [
    ([{"pattern": "layer.*", "lr_mult": 2}], r"'layer.\*' matches none of the model's 4 trained parameters"),
    ([{"pattern": "layers.*", "lr_mult": 2}, {"pattern": "re:mlp", "lr_mult": 3}],
     r"'re:mlp' matches only layers.0.mlp.weight, layers.1.mlp.weight, to which an earlier pattern applies"),
    ([{"pattern": "*", "lr": 1, "lr_mult": 2}], r"the group '\*' sets lr 1.0 and lr_mult 2.0; keep one"),
    ([{"pattern": "*"}], r"the group '\*' changes nothing; set lr"),
    ([{"pattern": "*", "optimizer": "sdg"}], r"the optimizer of the group '\*', 'sdg' is not known.*'sgd'"),
])  # fmt: skip
def test_groups_are_refused_by_name(groups, text):
    with pytest.raises(ConfigError, match=text):
        build_optimizer(parameters().items(), OptimConfig(lr=0.1, param_groups=groups))


def test_groups_are_checked_before_a_run_starts():
    train = {"train.train_iters": 2, "train.global_batch_size": 2}
    for settings, text in (
        ({"optim.lr": 0.0, "optim.param_groups": [{"pattern": "*", "lr": 0.1}]}, "is 0.0; set optim.lr above 0"),
        ({"optim.optimizer_cpu_offload": True, "optim.param_groups": [{"pattern": "*", "optimizer": "sgd"}]},
         "supports only one optimizer"),
    ):  # fmt: skip
        config = RunConfig.load(None, []).with_settings(train | {"optim.lr": 0.1} | settings)
        with pytest.raises(ConfigError, match=text):
            check_schedule(config.optim, config.train)
    with pytest.raises(ConfigError, match=r"pattern is 're:\(': not a regular expression"):
        RunConfig.load(None, ["--optim.param_groups", "[{pattern: 're:('}]"])


def test_groups_come_from_run_files_and_the_command_line_and_stay_in_checkpoints():
    line = ["--optim.param_groups", "[{pattern: 'embedding.*', lr_mult: 0.5}]", "--optim.lr", "1e-3"]
    config = RunConfig.load(None, line)
    assert config.optim.param_groups[0].lr_mult == 0.5
    again = RunConfig.from_tree(config.to_tree())
    assert again == config == config.with_settings({"optim.lr": 1e-3})
    with pytest.raises(ConfigError, match=r"param_groups.0.lr_mul.*there is no such setting"):
        RunConfig.load(None, ["--optim.param_groups", "[{pattern: a, lr_mul: 1}]"])


def test_settings_of_a_groups_optimizer_are_read():
    settings = ["--optim.param_groups", "[{pattern: a, optimizer: lion}]", "--optim.lion_beta1", "0.8"]
    assert "lion_beta1" not in RunConfig.load(None, settings).optim.unread()
    assert "lion_beta1" in RunConfig.load(None, settings[2:]).optim.unread()


def test_a_glob_matches_full_names_and_a_regular_expression_any_part():
    assert matches("layers.*.weight", "layers.0.mlp.weight") and not matches("mlp", "layers.0.mlp.weight")
    assert matches("re:mlp", "layers.0.mlp.weight") and not matches("re:^mlp", "layers.0.mlp.weight")
