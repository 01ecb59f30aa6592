"""The fused step against the plain formulas in float64, and its skip of non-finite gradients."""

import copy
import math

import pytest
import torch

from megalith.config import OptimConfig
from megalith.errors import ConfigError
from megalith.optim import (
    build_loss_scale,
    build_optimizer,
    optimizer_step,
    set_learning_rate,
    sum_of_squares,
)

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
SHAPES = {"embedding.weight": (31, 8), "mlp.weight": (17, 5), "mlp.bias": (17,), "norm.weight": (8,)}


def make_parameters(device):
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        for name, shape in SHAPES.items()
    }


def make_gradients(step, device):
    generator = torch.Generator().manual_seed(100 + step)
    size = 10.0 if step % 2 else 0.01  # clipped in every second step
    return {
        name: (size * torch.randn(shape, generator=generator)).to(device) for name, shape in SHAPES.items()
    }


class PlainOptimizer:
    """The textbook formulas in float64, one parameter at a time."""

    def __init__(self, parameters, config):
        self.values = {name: p.detach().double().cpu() for name, p in parameters.items()}
        self.first = {name: torch.zeros_like(v) for name, v in self.values.items()}
        self.second = {name: torch.zeros_like(v) for name, v in self.values.items()}
        self.config = config
        self.time = 0

    def step(self, gradients, lr, weight_decay):
        gradients = {name: g.double().cpu() for name, g in gradients.items()}
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        clip = min(1.0, self.config.clip_grad / (norm + 1e-6)) if self.config.clip_grad else 1.0
        self.time += 1
        for name, value in self.values.items():
            decay = 0.0 if name.endswith("bias") or value.dim() == 1 else weight_decay
            self.values[name] = self.update(name, value, gradients[name] * clip, lr, decay)
        return norm

    def update(self, name, value, gradient, lr, decay):
        if self.config.optimizer == "adamw":
            value = value - lr * decay * value
        else:
            gradient = gradient + decay * value
        if self.config.optimizer == "sgd":
            self.first[name] = self.config.sgd_momentum * self.first[name] + gradient
            return value - lr * self.first[name]
        beta1, beta2 = self.config.adam_beta1, self.config.adam_beta2
        self.first[name] = beta1 * self.first[name] + (1 - beta1) * gradient
        self.second[name] = beta2 * self.second[name] + (1 - beta2) * gradient**2
        mean = self.first[name] / (1 - beta1**self.time)
        variance = self.second[name] / (1 - beta2**self.time)
        return value - lr * mean / (variance.sqrt() + self.config.adam_eps)


def test_what_is_not_set_is_as_in_megatron():
    config = OptimConfig()
    assert (config.optimizer, config.weight_decay, config.clip_grad) == ("adamw", 0.01, 1.0)
    (group, _) = build_optimizer(make_parameters("cpu").items(), OptimConfig(lr=0.1)).param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-8, 0.01)
    sgd = build_optimizer(make_parameters("cpu").items(), OptimConfig(lr=0.1, optimizer="sgd"))
    assert sgd.param_groups[0]["momentum"] == 0.9
    still = OptimConfig(lr=0.1, optimizer="sgd", sgd_momentum=0.0)
    assert not any(build_optimizer(make_parameters("cpu").items(), still).state.values())
    assert (config.loss_scale, config.initial_loss_scale, config.min_loss_scale) == (None, 2**16, 1.0)
    assert (config.loss_scale_window, config.hysteresis) == (1000, 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("clip_grad", [0.0, 1.0])
@pytest.mark.parametrize("loss_scale", [1.0, 4096.0])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("adamw", {"adam_beta2": 0.95}),
        ("adamw", {"adam_beta1": 0.0}),  # 0.999 for the other
        ("adam", {"adam_beta2": 0.95}),
        ("sgd", {"sgd_momentum": 0.8}),
    ],
)
def test_steps_follow_the_plain_formulas(name, settings, loss_scale, clip_grad, device):
    config = OptimConfig(optimizer=name, lr=0.1, clip_grad=clip_grad, loss_scale=loss_scale, **settings)
    parameters = make_parameters(device)
    plain = PlainOptimizer(parameters, config)
    optimizer = build_optimizer(parameters.items(), config)
    scale = build_loss_scale("fp16", config, device)
    for step in range(6):
        lr, weight_decay = 0.1 / (step + 1), 0.05 * step
        set_learning_rate(optimizer, lr, weight_decay)
        gradients = make_gradients(step, device)
        for key, parameter in parameters.items():
            parameter.grad = gradients[key] * loss_scale
        result = optimizer_step(optimizer, scale, config.clip_grad)
        norm = plain.step(gradients, lr, weight_decay)
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-6)
        assert (result.skipped.item(), result.loss_scale.item()) == (0.0, loss_scale)
        for key, parameter in parameters.items():
            torch.testing.assert_close(
                parameter.detach().cpu().double(), plain.values[key], rtol=2e-5, atol=2e-6
            )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_nonfinite_gradient_changes_nothing_and_the_next_step_is_as_if_it_had_not_been(
    name, steps_before, bad, device
):
    config = OptimConfig(optimizer=name, lr=0.1, weight_decay=0.1)
    parameters, undisturbed = make_parameters(device), make_parameters(device)
    optimizers = [build_optimizer(p.items(), config) for p in (parameters, undisturbed)]
    scale = build_loss_scale("bf16", config, device)

    def step(index, spoil=False):
        for which, optimizer in zip((parameters, undisturbed), optimizers):
            if spoil and which is undisturbed:
                continue
            for key, gradient in make_gradients(index, device).items():
                which[key].grad = gradient
            if spoil:
                which["mlp.weight"].grad[3, 2] = bad
            result = optimizer_step(optimizer, scale, config.clip_grad)
        return result

    for index in range(steps_before):
        step(index)
    before = copy.deepcopy([p.detach() for p in parameters.values()])
    state_before = copy.deepcopy([optimizers[0].state[p] for p in parameters.values()])
    result = step(5, spoil=True)
    assert result.skipped.item() == 1.0
    assert not math.isfinite(result.grad_norm.item())
    for value, parameter in zip(before, parameters.values()):
        assert torch.equal(value, parameter)
    for saved, parameter in zip(state_before, parameters.values()):
        assert saved.keys() == optimizers[0].state[parameter].keys()
        assert all(torch.equal(saved[key], optimizers[0].state[parameter][key]) for key in saved)
    step(6)
    for one, other in zip(parameters.values(), undisturbed.values()):
        assert torch.equal(one, other)


def test_clipping_divides_by_the_norm_and_a_millionth_as_in_megatron():
    config = OptimConfig(optimizer="sgd", lr=1.0, sgd_momentum=0.0, weight_decay=0.0)
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = build_optimizer([("norm.weight", weight)], config)
    weight.grad = torch.full((4,), 1e-6)  # a norm of 2e-6
    optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), clip_grad=1e-6)
    torch.testing.assert_close(weight.detach(), torch.full((4,), -1e-6 / 3), rtol=1e-4, atol=0)


def test_parameters_without_a_gradient_are_left_alone():
    config = OptimConfig(lr=0.1)
    parameters = make_parameters("cpu")
    optimizer = build_optimizer(parameters.items(), config)
    before = parameters["mlp.weight"].detach().clone()
    parameters["norm.weight"].grad = torch.full((8,), 2.0)
    result = optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), clip_grad=1.0)
    assert result.grad_norm.item() == pytest.approx(math.sqrt(32), rel=1e-6)
    assert torch.equal(parameters["mlp.weight"], before)
    assert optimizer.state[parameters["mlp.weight"]]["step"].item() == 0
    assert optimizer.state[parameters["norm.weight"]]["step"].item() == 1


def test_a_parallel_run_can_replace_the_sum_of_squares():
    config = OptimConfig(lr=0.1)
    parameters = make_parameters("cpu")
    optimizer = build_optimizer(parameters.items(), config)
    for key, gradient in make_gradients(0, "cpu").items():
        parameters[key].grad = gradient
    result = optimizer_step(
        optimizer, build_loss_scale("fp32", config, "cpu"), 1.0, total_squares=lambda given: torch.tensor(9.0)
    )
    assert result.grad_norm.item() == 3.0


@pytest.mark.parametrize("values", [lambda n: torch.full((n,), 1e-3), lambda n: torch.randn(n) * 1e-3])
def test_sum_of_squares_of_a_large_tensor_is_accurate(values):
    tensor = values(3_000_001)
    exact = (tensor.double() ** 2).sum().item()
    assert sum_of_squares([tensor]).item() == pytest.approx(exact, rel=6e-6)
    cut = [tensor[:1_000_000].view(1000, 1000), torch.empty(0), tensor[1_000_000:]]
    assert sum_of_squares(cut).item() == pytest.approx(exact, rel=6e-6)


def test_only_matrices_decay_and_groups_carry_the_names():
    parameters = make_parameters("cpu")
    parameters["mlp.bias"] = torch.nn.Parameter(torch.zeros(2, 3))  # an expert's biases are 2-D
    parameters["q_layernorm.weight"] = torch.nn.Parameter(torch.ones(4, 2))  # a norm of each head
    parameters["frozen.weight"] = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    optimizer = build_optimizer(parameters.items(), OptimConfig(lr=0.1, weight_decay=0.3))
    names = {group["weight_decay"]: group["param_names"] for group in optimizer.param_groups}
    assert names == {
        0.3: ["embedding.weight", "mlp.weight"],
        0.0: ["mlp.bias", "norm.weight", "q_layernorm.weight"],
    }
    set_learning_rate(optimizer, 0.5, 0.7)
    assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.5, 0.7), (0.5, 0.0)]


def test_optimizer_refuses_an_absent_learning_rate_and_half_precision_parameters():
    with pytest.raises(ConfigError, match=r"optim\.lr is not set"):
        build_optimizer(make_parameters("cpu").items(), OptimConfig())
    half = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"norm is torch\.bfloat16"):
        build_optimizer([("norm", half)], OptimConfig(lr=0.1))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_a_step_never_waits_for_the_device(name):
    config = OptimConfig(optimizer=name, lr=0.1)
    parameters = make_parameters("cuda")
    optimizer = build_optimizer(parameters.items(), config)
    scale = build_loss_scale("fp16", config, "cuda")
    for key, gradient in make_gradients(1, "cuda").items():
        parameters[key].grad = gradient
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            optimizer_step(optimizer, scale, config.clip_grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_word_embedding_and_the_output_matrix_can_have_a_learning_rate_of_their_own():
    names = ("embedding.word_embeddings.weight", "layers.0.mlp.linear_fc1.weight", "output_layer.weight")
    parameters = [(name, torch.nn.Parameter(torch.zeros(2, 2))) for name in names]
    optimizer = build_optimizer(parameters, OptimConfig(lr=1e-3, decoupled_lr=1e-2))
    set_learning_rate(optimizer, 0.5, 0.1, 0.25)
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rates == dict(zip(names, (0.25, 0.5, 0.25)))
    assert len(build_optimizer(parameters, OptimConfig(lr=1e-3)).param_groups) == 1
