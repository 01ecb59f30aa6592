"""Muon: torch's numerics, whole matrices in every layout, and optimizers of one's own."""

import functools
from unittest import mock

import pytest
import torch
from optimizer_job import EXPERTS, GATED, LATENT, configuration, losses, outcomes

import megalith
from megalith.config import OptimConfig, RunConfig
from megalith.errors import ConfigError
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step
from megalith.optim.muon import orthogonalized
from megalith.optim.optimizer import Placement, check_optimizer, decay_groups
from megalith.parity.differences import relative_error


def optimizer_of(weights: dict, config: OptimConfig, matrices: dict) -> torch.optim.Optimizer:
    placements = {name: Placement(matrices=sizes) for name, sizes in matrices.items()}
    return build_optimizer(weights.items(), config, placements=placements)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6)])
@pytest.mark.parametrize(("mode", "nesterov"), [("shape_scaling", True), ("spectral", False)])
def test_steps_as_torchs_muon_and_the_rest_as_adamw(shape, mode, nesterov):
    config = OptimConfig(optimizer="muon", lr=0.03, weight_decay=0.1, clip_grad=0, muon_nesterov=nesterov,
                         muon_scale_mode=mode,
                         muon_extra_scale_factor={"spectral": 0.2, "shape_scaling": 1.0}[mode])  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    start = {
        "layers.w": torch.randn(shape, generator=generator),
        "head": torch.randn(5, 4, generator=generator),
    }
    ours, theirs = ({n: torch.nn.Parameter(w.clone()) for n, w in start.items()} for _ in range(2))
    optimizer = optimizer_of(ours, config, {"layers.w": shape[:1]})
    adjust = {"spectral": "match_rms_adamw", "shape_scaling": "original"}[mode]
    settings = dict(lr=0.03, weight_decay=0.1)
    muon = torch.optim.Muon(
        [theirs["layers.w"]], momentum=0.95, nesterov=nesterov, adjust_lr_fn=adjust, **settings
    )
    adamw = torch.optim.AdamW([theirs["head"]], betas=(config.adam_beta1, config.adam_beta2), **settings)
    for _ in range(4):
        for name, weight in start.items():
            gradient = torch.randn(weight.shape, generator=generator)
            ours[name].grad, theirs[name].grad = gradient.clone(), gradient.clone()
        optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # torch's own is in bf16 alone
            muon.step()
        adamw.step()
    for name in start:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5)
    assert (ours["layers.w"] - start["layers.w"]).abs().max() > 0.02


@pytest.mark.parametrize(("shape", "spectral", "unit"), [((8, 2), 2**0.5, 1.0), ((2, 8), 8**0.5, 0.5)])
def test_the_modes_scale_an_update_by_its_matrixs_shape(shape, spectral, unit):
    norms = {}
    for mode in ("spectral", "unit_rms_norm", "shape_scaling"):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        config = OptimConfig(optimizer="muon", lr=0.1, muon_scale_mode=mode)
        optimizer = optimizer_of({"w": weight}, config, {"w": shape[:1]})
        optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
        norms[mode] = weight.norm().item()
    assert norms["spectral"] == pytest.approx(spectral * norms["shape_scaling"])
    assert norms["unit_rms_norm"] == pytest.approx(unit * norms["shape_scaling"])


def test_newton_schulz_is_in_fp32_where_the_run_is_or_where_it_is_asked_for():
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    for precision, asked, dtype in (
        ("fp32", None, torch.float32), ("bf16", None, torch.bfloat16),
        ("fp32", "medium", torch.bfloat16), ("bf16", "highest", torch.float32),
    ):  # fmt: skip
        config = OptimConfig(optimizer="muon", lr=0.1, muon_fp32_matmul_prec=asked)
        placements = {"w": Placement(matrices=(4,))}
        optimizer = build_optimizer([("w", weight)], config, (), placements, precision)
        with mock.patch("megalith.optim.muon.orthogonalized", side_effect=orthogonalized) as made:
            weight.grad = torch.eye(4)
            optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
        assert made.call_args.args[2] == dtype


def test_fused_weights_are_several_matrices_and_a_skipped_step_changes_nothing():
    config = OptimConfig(optimizer="muon", lr=0.1, weight_decay=0.0, muon_num_ns_steps=30)
    weight = torch.nn.Parameter(torch.zeros(12, 5))
    gradient = torch.randn(12, 5, generator=torch.Generator().manual_seed(1))
    optimizer = optimizer_of({"w": weight}, config, {"w": (2, 1, 1)})
    scale = build_loss_scale("fp16", OptimConfig(lr=0.1, loss_scale=8.0), "cpu")
    weight.grad = gradient * torch.inf
    assert optimizer_step(optimizer, scale, 1.0).skipped == 1
    assert not weight.any() and not optimizer.state[weight]["momentum_buffer"].any()
    weight.grad = gradient * 8
    optimizer_step(optimizer, scale, 0)
    momentum = optimizer.state[weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, 0.05 * gradient)  # without the loss scale
    units = weight.detach().view(3, 4, 5) / -0.1 / 0.2
    for part in (units[:, :2].reshape(6, 5), units[:, 2], units[:, 3]):
        singular = torch.linalg.svdvals(part / max(part.shape) ** 0.5)
        assert singular.min() > 0.6 and singular.max() < 1.3
    assert torch.linalg.svdvals(weight.detach()).max() > 0.1 * 0.2 * 12**0.5  # it is not one matrix
    x = torch.randn(3, 8, 4, dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    cosine = (orthogonalized(x, 5, torch.float64) * (u @ v)).sum((-2, -1)) / 4
    assert (cosine > 0.7).all()


@functools.cache
def alone(kind: str) -> RunConfig:
    return configuration("", {"gated": GATED, "experts": EXPERTS, "latent": LATENT}[kind], optimizer="muon")


CASES = {
    "gated": ["tp2-sp-pp2"],
    "experts": ["tp2-sp-etp2-ep2"],
}
MORE = {
    "gated": ["dp4-zero3-hybrid", "tp4", "tp2-dp2-zero2", "cp2-dp2-zero2"],
    "experts": ["ep2-dp4-zero3", "tp2-dp2"],
    "latent": ["tp2-sp-dp2-zero3"],
}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [*CASES.items(), *(pytest.param(*case, marks=pytest.mark.full) for case in MORE.items())],
)
def test_muon_equals_one_process_in_every_layout_and_goes_on_in_any_other(pool, tmp_path, kind, layouts):
    config = alone(kind)
    one = losses(config, save=str(tmp_path / "one"))
    assert one[2] < one[0]
    configs = [configuration(layout, config.to_tree()["model"], optimizer="muon") for layout in layouts]
    saves = [str(tmp_path / str(number)) for number in range(len(layouts))]
    for rank in pool.run(outcomes, configs, saves, [str(tmp_path / "one")] * len(layouts)):
        for layout, (whole, resumed) in zip(layouts, rank, strict=True):
            assert relative_error(whole, one) < 1e-5, layout
            assert relative_error(resumed, one[1:]) < 1e-5, layout
    for number, layout in enumerate(layouts):
        assert relative_error(losses(config, load=str(tmp_path / str(number))), one[1:]) < 1e-5, layout


def test_an_optimizer_of_ones_own_is_named_in_the_configuration():
    @megalith.register_optimizer("sign")
    def build(parameters, config, precision):
        return Sign(decay_groups(parameters, config), {"lr": config.lr})

    class Sign(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * parameter.grad.sign() * (parameter.grad.abs() > 1))

    config = OptimConfig(optimizer="sign", lr=0.5)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = build_optimizer([("w", weight)], config)
    scale = build_loss_scale("fp16", OptimConfig(lr=0.1, loss_scale=8.0), "cpu")
    for gradient in (
        [torch.inf, 8.0, 8.0],
        [-16.0, 4.0, 16.0],
    ):  # the first is skipped; the second is divided by 8
        weight.grad = torch.tensor(gradient)
        optimizer_step(optimizer, scale, 0)
    assert weight.tolist() == [0.5, 0.0, -0.5]
    with pytest.raises(ConfigError, match=r"optim.optimizer 'muom' is not known.*'muon'.*register_optimizer"):
        build_optimizer([("w", weight)], OptimConfig(optimizer="muom", lr=0.5))
    with pytest.raises(ConfigError, match="optimizer_cpu_offload supports adamw, adam, sgd"):
        build_optimizer([("w", weight)], OptimConfig(optimizer="muon", lr=0.5, optimizer_cpu_offload=True))


def test_a_custom_optimizer_declares_support_for_offloading():
    def build(parameters, config, precision):
        return torch.optim.SGD(decay_groups(parameters, config), lr=config.lr)

    megalith.register_optimizer("plain")(build)
    megalith.register_optimizer("offloadable", supports_offload=True)(build)
    check_optimizer(OptimConfig(optimizer="offloadable", lr=0.5, optimizer_cpu_offload=True))
    with pytest.raises(ConfigError, match=r"supports adamw, adam, sgd, offloadable, but .* is plain"):
        check_optimizer(OptimConfig(optimizer="plain", lr=0.5, optimizer_cpu_offload=True))
