"""What a run logs where it is asked to: the weights' norm, the gradient's zeros, the phases' times."""

import json
import re

import pytest
import torch

from megalith.config import RunConfig
from megalith.parity.job import start
from megalith.report.clock import format_timers
from megalith.training.gradient_noise import noise_scale
from megalith.training.trainer import Trainer

ASKED = {"log_params_norm": True, "log_num_zeros_in_grad": True, "log_interval": 1}
TREE = {
    # without biases: a key's has no gradient, and whether rounding leaves 0 or 1e-9 of it is the processor's choice
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "vocab_size": 60,
        "add_bias_linear": False,
    },
    "data": {"mock": True, "seq_length": 16, "num_workers": 0},
    "optim": {"lr": 1e-2},
    "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 4, "eval_iters": 0},
    "runtime": {"device": "cpu"},
    "log": ASKED,
}
LAYOUTS = {
    "tensor": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pipeline, of a tied embedding": {"pipeline_model_parallel_size": 2},
    "sharded": {"data_parallel_sharding_strategy": "optim_grads_params"},
    "replicated": {},
    "experts": {"expert_model_parallel_size": 2},
}


def with_layout(name: str, untied: bool) -> dict:
    experts = {"num_experts": 4} if name == "experts" else {}
    model = TREE["model"] | {"untie_embeddings_and_output_weights": untied} | experts
    return TREE | {"parallel": LAYOUTS.get(name, {}), "model": model}


def figures(tree: dict, output: str) -> list[tuple[float, float]]:
    """Zeros of the gradient and norm of the weights, of each step."""
    run = start(RunConfig.from_tree(tree | {"train": tree["train"] | {"output_dir": output}}))
    with run.data.train_loader(0, 0, run.device) as batches:
        read = [run.train_step(batches).read() for _ in range(2)]
    return [(step.num_zeros, step.params_norm) for step in read]


def test_norms_and_zeros_count_each_logical_weight_once_in_every_layout(pool, tmp_path):
    cases = {
        name: (with_layout(name, untied="tied" not in name), str(tmp_path / str(number)))
        for number, name in enumerate(LAYOUTS)
    }
    for name, ranks in pool.run_cases(figures, cases, size=2).items():
        tree = with_layout(name, untied="tied" not in name) | {"parallel": {}}
        alone = figures(tree, str(tmp_path / "alone"))
        for rank in ranks:
            assert [zeros for zeros, _ in rank] == [zeros for zeros, _ in alone], name
            assert [norm for _, norm in rank] == pytest.approx([norm for _, norm in alone], rel=1e-6), name


def test_the_figures_of_one_process_are_those_of_its_tensors(tmp_path):
    run = start(
        RunConfig.from_tree(with_layout("one", True) | {"train": TREE["train"] | {"output_dir": "one"}})
    )
    zeros, step = [], run.updates.step
    run.updates.step = lambda *rates: (
        zeros.append(sum((weight.grad == 0).sum().item() for weight in run.model.chunks[0].parameters()))
        or step(*rates)
    )
    with run.data.train_loader(0, 0, run.device) as batches:
        read = run.train_step(batches).read()
    squares = sum(weight.detach().double().square().sum() for weight in run.model.chunks[0].parameters())
    assert read.params_norm == pytest.approx(squares.sqrt().item(), rel=1e-6)
    assert [read.num_zeros] == zeros and zeros[
        0
    ] > 32 * 60  # rows of tokens that are in no sample, and padding


def test_they_stand_in_the_line_the_file_and_the_trackers_at_each_log_interval(tmp_path, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = ASKED | {"log_interval": 2, "console": "lines", "timing_log_level": 2, "tensorboard": True}
    tree = TREE | {"log": log, "train": TREE["train"] | {"train_iters": 4}}
    Trainer(start(RunConfig.from_tree(tree))).train()
    out = capsys.readouterr().out
    line = r"grad norm: \d+\.\d{3} \| num zeros: \d+\.0 \| params norm: \d+\.\d{3} \| number of skipped"
    assert len(re.findall(line, out)) == 2
    phases = ["forward-backward", "optimizer", "batch-generator"]
    shown = "".join(rf"\n    {name} \.+: \(\d+\.\d\d, \d+\.\d\d\)" for name in phases)
    assert len(re.findall(rf"\(min, max\) time across ranks \(ms\):{shown}", out)) == 2
    records = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    assert ["params_norm" in record and "num_zeros" in record for record in records] == [False, True] * 2
    events = EventAccumulator(str(tmp_path / "output" / "tensorboard"))
    events.Reload()
    for tag in ("train/num_zeros", "train/params_norm", *(f"timers/{name}" for name in phases)):
        assert [event.step for event in events.Scalars(tag)] == [2, 4]


def test_times_are_written_as_megatron_writes_them():
    ranks = [{"optimizer": 1.0, "forward-backward": 20.0}, {"optimizer": 2.5, "forward-backward": 10.0}]
    dots = "." * (48 - len("optimizer "))
    assert format_timers(ranks, "minmax").splitlines()[:2] == [
        "(min, max) time across ranks (ms):",
        f"    optimizer {dots}: (1.00, 2.50)",
    ]
    assert format_timers(ranks, "max").endswith("forward-backward " + "." * 31 + ": 20.00")
    assert format_timers(ranks, "all").splitlines()[1:4] == [
        "  optimizer:",
        "     rank  0: 1.00",
        "     rank  1: 2.50",
    ]


def test_without_being_asked_nothing_is_counted(tmp_path):
    tree = with_layout("one", True)
    assert figures(tree | {"log": {"log_interval": 1}}, "one") == [(None, None)] * 2
    (none, _), (zeros, norm) = figures(tree | {"log": ASKED | {"log_interval": 2}}, "two")
    assert none is None and zeros > 0 and torch.tensor(norm).isfinite()


def layer_norms(tree: dict, output: str) -> list[dict[str, float]]:
    """The metrics of two steps, of which the second logs its norms."""
    log = {"log_norms_interval": 2, "log_gradient_noise_interval": 2}
    tree = tree | {"train": tree["train"] | {"output_dir": output}, "log": log}
    run = start(RunConfig.from_tree(tree))
    metrics = []
    with run.data.train_loader(0, 0, run.device) as batches:
        for _ in range(2):
            before = {name: plain.detach().clone() for name, plain in run.model.parameters.named}
            step = run.train_step(batches)
            metrics.append((step.extra_metrics or dict)() | {"grad_norm": step.grad_norm.item()})
    changes = {name: (plain - before[name]).norm().item() for name, plain in run.model.parameters.named}
    return [*metrics, changes]


def test_norms_per_layer_are_those_of_its_parameters_in_every_layout(pool, tmp_path):
    tree = with_layout("replicated", untied=False)
    first, second, changes = layer_norms(tree, str(tmp_path / "alone"))
    assert first.keys() == {"grad_norm"}
    gradients = {name: value for name, value in second.items() if name.startswith("gradient_norm/")}
    assert [name.partition("/")[2] for name in gradients][:3] == ["embedding", "final_layernorm", "layers.0"]
    assert sum(value**2 for value in gradients.values()) ** 0.5 == pytest.approx(
        second["grad_norm"], rel=1e-5
    )
    expected = sum(value**2 for name, value in changes.items() if name.startswith("layers.1.")) ** 0.5
    assert second["update_norm/layers.1"] == pytest.approx(expected, rel=1e-5)
    cases = {
        name: (with_layout(name, untied=False), str(tmp_path / str(number)))
        for number, name in enumerate(("tensor", "pipeline, of a tied embedding", "sharded"))
    }
    for name, ranks in pool.run_cases(layer_norms, cases, size=2).items():
        for _, metrics, _ in ranks:
            assert list(metrics) == list(second), name
            noise = [key for key in metrics if key.startswith("gradient_noise/")]
            assert len(noise) == 3
            if name != "sharded":  # there the smaller batch is two samples
                assert [metrics[key] for key in noise] == pytest.approx(
                    [second[key] for key in noise], rel=1e-3
                )
            layers = metrics.keys() - noise
            assert {key: metrics[key] for key in layers} == pytest.approx(
                {key: second[key] for key in layers}, rel=1e-4
            ), name


def test_the_noise_scale_is_that_of_gradients_of_two_batch_sizes_and_changes_no_update(tmp_path):
    tree = with_layout("replicated", untied=False)
    measured, plain = [], []
    for interval, results in ((1, measured), (0, plain)):
        config = tree | {
            "train": tree["train"] | {"output_dir": str(tmp_path / str(interval))},
            "log": {"log_gradient_noise_interval": interval},
        }
        run = start(RunConfig.from_tree(config))
        with run.data.train_loader(0, 0, run.device) as batches:
            micro_batches = [next(batches) for _ in range(4)]
            squares = []
            for count in (1, 4):
                run.gradients(micro_batches[:count])
                squares.append(sum(x.grad.square().sum().item() for _, x in run.model.parameters.named))
                run.model.parameters.clear_gradients()
            step = run.train_step(iter(micro_batches))
        weights = [weight.detach().clone() for _, weight in run.model.parameters.named]
        results += [(step.extra_metrics or dict)(), squares, weights]
    metrics, (small, large), weights = measured
    assert metrics["gradient_noise/trace"] == pytest.approx((small - large) / (1 - 1 / 4), rel=1e-4)
    assert metrics["gradient_noise/squared_norm"] == pytest.approx((4 * large - small) / 3, rel=1e-4)
    assert metrics["gradient_noise/scale"] == pytest.approx(
        metrics["gradient_noise/trace"] / metrics["gradient_noise/squared_norm"]
    )
    assert plain[0] == {} and all(torch.equal(a, b) for a, b in zip(weights, plain[2], strict=True))


def test_the_estimates_are_those_of_known_noise():
    generator = torch.Generator().manual_seed(0)
    gradient, sigma = torch.full((50,), 0.2), 0.7
    trace = norm = 0.0
    for _ in range(4000):
        samples = gradient + sigma * torch.randn(16, 50, generator=generator)
        small, large = (samples[:count].mean(0).square().sum().item() for count in (4, 16))
        estimate = noise_scale(small, large, 4, 16)
        trace, norm = (
            trace + estimate["gradient_noise/trace"] / 4000,
            norm + estimate["gradient_noise/squared_norm"] / 4000,
        )
    assert trace == pytest.approx(50 * 0.7**2, rel=0.05) and norm == pytest.approx(50 * 0.2**2, rel=0.05)


def test_norms_per_layer_are_without_the_loss_scale(tmp_path):
    tree = with_layout("replicated", untied=False)
    settings = {"train": {"precision": "fp16"}, "optim": {"loss_scale": 64.0}}
    tree |= {name: tree.get(name, {}) | changes for name, changes in settings.items()}
    _, second, _ = layer_norms(tree, str(tmp_path))
    squares = (value**2 for name, value in second.items() if name.startswith("gradient_norm/"))
    assert sum(squares) ** 0.5 == pytest.approx(second["grad_norm"], rel=1e-5)
