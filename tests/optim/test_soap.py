"""SOAP against transcriptions of the authors' and NVIDIA's code, its skipped steps, and its sensitivity to rounding."""

import pytest
import torch

from megalith.config import OptimConfig
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step
from megalith.optim.optimizer import Placement

LR, DECAY, BETA1, BETA2, BETA, EPS = 0.03, 0.1, 0.9, 0.95, 0.8, 1e-8
SETTINGS = dict(
    optimizer="soap",
    lr=LR,
    weight_decay=DECAY,
    adam_beta1=BETA1,
    adam_beta2=BETA2,
    soap_shampoo_beta=BETA,
    soap_precondition_frequency=2,
)


def authors(w, grads, max_dim=10000, frequency=2):
    """SOAP.step of github.com/nikhilvyas/SOAP for a matrix, in fp64, with its order of operations."""
    w, m, v = w.double(), torch.zeros(w.shape).double(), torch.zeros(w.shape).double()
    sides = [dim for dim in (0, 1) if w.shape[dim] <= max_dim]
    gg, q = {dim: torch.zeros(w.shape[dim], w.shape[dim]).double() for dim in sides}, {}

    def project(x, back=False):
        x = (q[0] if back else q[0].T) @ x if 0 in q else x
        return x @ (q[1].T if back else q[1]) if 1 in q else x

    for step, g in enumerate(map(torch.Tensor.double, grads)):
        if step > 0:
            m = BETA1 * m + (1 - BETA1) * project(g)
            v = BETA2 * v + (1 - BETA2) * project(g).square()
            size = LR * (1 - BETA2**step) ** 0.5 / (1 - BETA1**step)
            w = w - size * project(m / (v.sqrt() + EPS), back=True)
            w = w - LR * DECAY * w
        m = project(m, back=True)
        for dim in sides:
            gg[dim] = BETA * gg[dim] + (1 - BETA) * (g @ g.T if dim == 0 else g.T @ g)
        if step == 0:
            q = {dim: torch.linalg.eigh(gg[dim]).eigenvectors.flip(1) for dim in sides}
        elif step % frequency == 0:
            for dim in sides:
                order = torch.diag(q[dim].T @ gg[dim] @ q[dim]).argsort(descending=True)
                v = v.index_select(dim, order)
                q[dim] = torch.linalg.qr(gg[dim] @ q[dim][:, order]).Q
        m = project(m)
    return w


def nvidia(w, grads):
    """SOAP.step of emerging-optimizers 0.4 with use_kl_shampoo, for a square matrix, in fp64."""
    n, w = len(w), w.double()
    m, v = torch.zeros(n, n).double(), torch.zeros(n, n).double()
    factors, bases = [torch.zeros(n, n).double()] * 2, [torch.eye(n).double()] * 2
    values = [torch.zeros(n).double()] * 2
    for step, g in enumerate(map(torch.Tensor.double, grads), start=1):
        beta = 1 - (1 - BETA) / (1 - BETA**step)
        inverses = [
            (q * (1 / n * each.clamp_min(EPS) ** -1.0)) @ q.T for q, each in zip(bases, values, strict=True)
        ]
        terms = [g @ inverses[1] @ g.T, g.T @ inverses[0] @ g]
        factors = [torch.lerp(old, new, 1 - beta) for old, new in zip(factors, terms, strict=True)]
        m = bases[0] @ m @ bases[1].T
        for side, factor in enumerate(factors):
            if step == 1:
                values[side], bases[side] = (x.flip(-1) for x in torch.linalg.eigh(factor))
            else:
                q = torch.linalg.qr(factor @ bases[side]).Q
                each = torch.diag(q.T @ factor @ q)
                order = each.argsort(descending=True)
                values[side], bases[side] = each[order], q[:, order]
        m = bases[0].T @ m @ bases[1]
        w = w - LR * DECAY * w
        projected = bases[0].T @ g @ bases[1]
        m = torch.lerp(m, projected, 1 - BETA1)
        v = torch.lerp(v, projected.square(), 1 - BETA2)
        update = m / (1 - BETA1**step) / ((v / (1 - BETA2**step)).sqrt() + EPS)
        w = w - LR * bases[0] @ update @ bases[1].T
    return w


def trained(start, grads, **settings):
    """Return the weight after the steps."""
    config = OptimConfig(**SETTINGS | settings)
    weight = torch.nn.Parameter(start.clone())
    placement = Placement(matrices=(start.shape[-2],))
    optimizer = build_optimizer([("w", weight)], config, placements={"w": placement})
    scale = build_loss_scale("fp16", OptimConfig(lr=0.1, loss_scale=8.0), "cpu")
    for gradient in grads:
        before = weight.detach().clone()
        weight.grad = gradient * 8
        skipped = optimizer_step(optimizer, scale, 0).skipped
        assert skipped == (not gradient.isfinite().all())
        assert not skipped or torch.equal(weight, before)
    return weight.detach()


def drawn(shape, count=8):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(("shape", "max_dim"), [((6, 6), None), ((8, 5), 6), ((2, 6, 6), None)])
def test_soap_is_the_authors(shape, max_dim):
    start, *grads = drawn(shape)
    settings = {} if max_dim is None else {"soap_max_precond_dim": max_dim}
    ours = trained(start, [grads[0], grads[0] / 0, *grads[1:]], **settings)  # the second step is skipped
    parts = zip(start, *grads) if len(shape) == 3 else [(start, *grads)]
    expected = [authors(w, g, max_dim or 10000) for w, *g in parts]
    torch.testing.assert_close(
        ours.double().view(-1, *shape[-2:]), torch.stack(expected), rtol=1e-5, atol=3e-6
    )
    assert (ours - start).abs().max() > LR


def test_with_kl_shampoo_soap_is_nvidias():
    start, *grads = drawn((6, 6))
    ours = trained(start, grads, soap_use_kl_shampoo=True)
    torch.testing.assert_close(ours.double(), nvidia(start, grads), rtol=1e-5, atol=3e-6)


def test_rounding_of_the_gradient_does_not_choose_the_basis_of_a_null_space():
    """The first gradient of a matrix [24, 8] determines 8 of 24 left eigenvectors."""
    start, *grads = drawn((24, 8), 4)
    noise = drawn((24, 8), 4)[1:]
    ours = trained(start, grads)
    other = trained(start, [g * (1 + 1e-7 * e) for g, e in zip(grads, noise, strict=True)])
    assert (other - ours).norm() < 1e-5 * (ours - start).norm()
