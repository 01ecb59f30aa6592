"""Schedule-free AdamW and moving averages of the weights: references, evaluation, export, averaged checkpoints."""

import math

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import megalith
from megalith.bridge.exporter import export_hf
from megalith.checkpoint import open_checkpoint
from megalith.checkpoint.averaged_checkpoint import with_average
from megalith.cli.main import main
from megalith.config import OptimConfig, RunConfig
from megalith.config.rules.optim_rules import check_averages
from megalith.errors import ConfigError
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step
from megalith.optim.averages import averaged_weights, update_ema

LR, DECAY, STEPS = 0.03, 0.2, 5


def schedule_free(w, grads, rates, decay):
    """Equations 21 to 26 of Defazio et al. 2024 with the weights of their package: γ_t² with the highest rate."""
    x, y, z, v = w.double(), w.double(), w.double(), torch.zeros_like(w).double()
    highest = total = 0.0
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        g = g.double()
        v = 0.999 * v + 0.001 * g * g
        rate = rate * math.sqrt(1 - 0.999**t)
        z = z - rate * (g / (v.sqrt() + 1e-8) + decay * y)
        highest = max(highest, rate)
        total += highest**2
        share = highest**2 / total if total else 0.0
        x = (1 - share) * x + share * z
        y = 0.1 * z + 0.9 * x
    return x.float(), y.float()


def test_schedule_free_adamw_follows_the_published_recursion_of_x_y_and_z():
    config = OptimConfig(
        optimizer="schedule_free_adamw", lr=LR, weight_decay=DECAY, lr_decay_style="constant"
    )
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(6, 5, generator=generator) for _ in range(STEPS + 1))
    weight = torch.nn.Parameter(start.clone())
    optimizer = build_optimizer([("w", weight)], config)
    scale = build_loss_scale("fp16", OptimConfig(lr=0.1, loss_scale=8.0), "cpu")
    with averaged_weights(optimizer, config):
        assert torch.equal(weight, start)  # before the first step
    rates = [0.0, LR / 2, LR, LR, LR / 4]  # a warm-up from 0, and a lower rate
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        if step == 2:
            weight.grad = torch.full_like(weight, torch.inf)
            before = weight.detach().clone()
            assert optimizer_step(optimizer, scale, 1.0).skipped == 1 and torch.equal(weight, before)
        weight.grad = grads[step] * 8
        optimizer_step(optimizer, scale, 0)
    x, y = schedule_free(start, grads, rates, DECAY)
    torch.testing.assert_close(weight.detach(), y, rtol=1e-5, atol=1e-6)
    trained = weight.detach().clone()
    with averaged_weights(optimizer, config):
        torch.testing.assert_close(weight.detach(), x, rtol=1e-5, atol=1e-6)
    assert torch.equal(weight, trained)


def test_the_moving_average_is_torchs_and_leaves_the_weights_as_they_were():
    config = OptimConfig(lr=LR, ema_decay=0.9)
    model = torch.nn.Linear(4, 3)
    optimizer = build_optimizer(model.named_parameters(), config)
    reference, state = (
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
        optimizer.state[model.weight],
    )
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
        result = optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
        update_ema(optimizer, 0.9, result.skipped)
        reference.update_parameters(model)
    before = state["ema"].clone()
    update_ema(optimizer, 0.9, torch.ones(()))  # skipped
    assert torch.equal(state["ema"], before) and state["ema_step"] == 4
    trained = [p.detach().clone() for p in model.parameters()]
    with averaged_weights(optimizer, config):
        for parameter, expected in zip(model.parameters(), reference.module.parameters(), strict=True):
            torch.testing.assert_close(parameter, expected)
    assert all(torch.equal(p, was) for p, was in zip(model.parameters(), trained, strict=True))
    assert torch.equal(state["ema"], before)


@pytest.mark.parametrize(("settings", "text"), [
    ({"lr_decay_style": "cosine"}, "lr_decay_style is cosine, but schedule_free_adamw needs a constant rate"),
    ({"adam_beta1": 0.0}, "adam_beta1 is 0"),
    ({"ema_decay": 0.9}, "ema_decay is 0.9, but schedule_free_adamw averages the weights"),
])  # fmt: skip
def test_what_schedule_free_adamw_does_not_support_is_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        check_averages(
            OptimConfig(optimizer="schedule_free_adamw", lr=0.1, **{"lr_decay_style": "constant"} | settings)
        )


def run_of(folder, **optim) -> RunConfig:
    return RunConfig.from_tree({
        "model": {"preset": "tiny-gpt", "num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 61,
                  "ffn_hidden_size": 16, "make_vocab_size_divisible_by": 64},
        "data": {"seq_length": 8, "mock": True, "num_workers": 0},
        "optim": {"lr": 0.01, "lr_decay_style": "constant", **optim},
        "train": {"train_iters": 3, "global_batch_size": 2, "eval_iters": 1, "output_dir": str(folder)},
        "checkpoint": {"save_interval": 1},
        "runtime": {"device": "cpu", "compile": False},
        "log": {"layout_report": False},
    })  # fmt: skip


def weights(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("optim", [{"ema_decay": 0.5}, {"optimizer": "schedule_free_adamw"}])
def test_averaged_weights_are_evaluated_and_exported(tmp_path, capsys, optim):
    result = megalith.train(run_of(tmp_path / "run", **optim))
    exported = export_hf(tmp_path / "run", tmp_path / "averaged", show_progress=False)
    assert "these are the averaged weights" in "\n".join(exported.notes)
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "trained"), "--weights", "trained"]) == 0
    average, trained = weights(tmp_path / "averaged"), weights(tmp_path / "trained")
    assert average.keys() == trained.keys()
    assert all(not torch.equal(average[name], trained[name]) for name in average)
    evaluated = []
    for name in ("averaged", "trained"):
        config = run_of(tmp_path / name / "again", **optim).with_settings(
            {"model.init_from": str(tmp_path / name), "train.skip_train": True, "optim.ema_decay": None}
        )
        evaluated.append(megalith.train(config).validation_loss)
    assert evaluated[0] == pytest.approx(result.validation_loss, rel=1e-6)
    assert evaluated[1] != pytest.approx(result.validation_loss, rel=1e-6)


def test_checkpoint_average_writes_the_mean_of_the_weights(tmp_path, capsys):
    megalith.train(run_of(tmp_path / "run"))
    steps = [str(tmp_path / "run" / "checkpoints" / f"step_{step:08d}") for step in (1, 2, 3)]
    assert main(["checkpoint", "average", *steps, "--out", str(tmp_path / "mean")]) == 0
    assert "the mean of 3 checkpoints" in capsys.readouterr().out
    mean, parts = open_checkpoint(tmp_path / "mean", ("model",)), [open_checkpoint(step) for step in steps]
    assert mean.manifest.step == 3 and list(mean.manifest.tensors) == ["model"]
    for name, values in mean.tensors("model"):
        expected = sum(part.read("model", name).double() for part in parts) / 3
        torch.testing.assert_close(values, expected.float(), rtol=0, atol=0)
    config = run_of(tmp_path / "next").with_settings({"model.init_from": str(tmp_path / "mean")})
    assert math.isfinite(megalith.train(config.with_settings({"train.train_iters": 1})).loss)
    assert with_average(parts[0]) == (parts[0], False)
    other = run_of(tmp_path / "other").with_settings({"model.num_layers": 2, "train.train_iters": 1})
    megalith.train(other)
    for arguments, text in (
        ([steps[0], str(tmp_path / "other")], "do not have the same tensors"),
        ([steps[0]], "needs at least two checkpoints"),
        (steps, "already exists"),
    ):
        assert main(["checkpoint", "average", *arguments, "--out", str(tmp_path / "mean")]) != 0
        assert text in capsys.readouterr().err
