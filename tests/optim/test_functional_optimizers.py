"""Lion, AdEMAMix and Adafactor against torch's class or the published formula, and their skipped steps."""

import math

import pytest
import torch

from megalith.config import OptimConfig
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step

SHAPES = {"layers.0.weight": (6, 5), "experts.weight": (2, 4, 3), "norm.weight": (5,)}
LR, DECAY, STEPS = 0.03, 0.2, 6


def lion(w, grads, decay):
    m = torch.zeros_like(w)
    for g in grads:
        w = w - LR * ((0.95 * m + 0.05 * g).sign() + decay * w)
        m = 0.98 * m + 0.02 * g
    return w


def ademamix(w, grads, decay, warmup=4, alpha_end=5.0, beta3_end=0.9999):
    """Algorithm 1 and the schedulers of appendix A.1 (Pagliardini et al. 2024), with numbers in Python."""
    m1, m2, v = torch.zeros_like(w), torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(grads, start=1):
        alpha, beta3 = alpha_end, beta3_end
        if t < warmup:
            alpha = alpha_end * t / warmup
            lives = [math.log(0.5) / math.log(beta + 1e-8) - 1 for beta in (0.9, beta3_end)]
            beta3 = 0.5 ** (1 / ((1 - t / warmup) * lives[0] + t / warmup * lives[1] + 1))
        m1, m2, v = 0.9 * m1 + 0.1 * g, beta3 * m2 + (1 - beta3) * g, 0.999 * v + 0.001 * g * g
        update = (m1 / (1 - 0.9**t) + alpha * m2) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        w = w - LR * (update + decay * w)
    return w


def adafactor(w, grads, decay):
    parameter = torch.nn.Parameter(w.clone())
    optimizer = torch.optim.Adafactor([parameter], lr=LR, weight_decay=decay)
    for g in grads:
        parameter.grad = g.clone()
        optimizer.step()
    return parameter.detach()


REFERENCES = {
    "lion": (lion, {}),
    "ademamix": (ademamix, {"ademamix_warmup_iters": 4}),
    "adafactor": (adafactor, {}),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_steps_equal_the_reference_and_a_bad_step_changes_nothing(name):
    reference, settings = REFERENCES[name]
    config = OptimConfig(optimizer=name, lr=LR, weight_decay=DECAY, **settings)
    generator = torch.Generator().manual_seed(0)
    start = {key: torch.randn(shape, generator=generator) for key, shape in SHAPES.items()}
    grads = {
        key: [torch.randn(shape, generator=generator) for _ in range(STEPS)] for key, shape in SHAPES.items()
    }
    ours = {key: torch.nn.Parameter(w.clone()) for key, w in start.items()}
    optimizer = build_optimizer(ours.items(), config)
    scale = build_loss_scale("fp16", OptimConfig(lr=0.1, loss_scale=8.0), "cpu")
    for step in range(STEPS):
        if step == 2:
            before = [w.detach().clone() for w in ours.values()]
            states = {
                (p, key): value.clone()
                for p, state in optimizer.state.items()
                for key, value in state.items()
            }
            for parameter in ours.values():
                parameter.grad = torch.full_like(parameter, torch.nan)
            assert optimizer_step(optimizer, scale, 1.0).skipped == 1
            assert all(torch.equal(w, was) for w, was in zip(ours.values(), before, strict=True))
            assert all(torch.equal(optimizer.state[p][key], was) for (p, key), was in states.items())
        for key, parameter in ours.items():
            parameter.grad = grads[key][step] * 8
        optimizer_step(optimizer, scale, 0)
    for key, parameter in ours.items():
        expected = reference(start[key], grads[key], DECAY if len(SHAPES[key]) > 1 else 0.0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=2e-5, atol=2e-6)
        assert (parameter - start[key]).abs().max() > LR
