"""Muon: torch's numerics, whole matrices in every layout, and optimizers of one's own."""

import functools
from unittest import mock

import pytest
import torch
from optimizer_job import EXPERTS, GATED, LATENT, configuration, losses, orthogonalized_shapes, outcomes

import megalith
from megalith.config import OptimConfig, RunConfig
from megalith.errors import ConfigError
from megalith.optim import build_loss_scale, build_optimizer, newton_schulz, optimizer_step
from megalith.optim.newton_schulz import COEFFICIENTS, iterations, orthogonalize_all, orthogonalized
from megalith.optim.optimizer import Placement, check_optimizer, decay_groups
from megalith.parallel.owners import assign
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
        with mock.patch("megalith.optim.muon.orthogonalize_all", side_effect=orthogonalize_all) as made:
            weight.grad = torch.eye(4)
            optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
        assert made.call_args.args[2] == dtype


# Amsel et al. 2025, algorithm 1: the published polynomials, before their safety factor.
POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)  # fmt: skip


def test_polar_express_is_the_published_one_and_its_last_step_repeats():
    for ours, published in zip(COEFFICIENTS["polar_express"][:-1], POLAR_EXPRESS):
        assert ours == pytest.approx([c / 1.01**power for c, power in zip(published, (1, 3, 5))], abs=1e-4)
    assert iterations("polar_express", 9)[6:] == [COEFFICIENTS["polar_express"][6], *[POLAR_EXPRESS[-1]] * 2]
    assert iterations("aol", 8) == [*COEFFICIENTS["aol"]] * 2 and len(set(iterations("simple", 5))) == 1


@pytest.mark.parametrize(("kind", "steps", "bounds"), [
    ("simple", 5, (0.6, 1.25)), ("quintic", 5, (0.8, 1.2)), ("aol", 4, (0.2, 1.3)), ("polar_express", 8, (0.98, 1.02)),
])  # fmt: skip
def test_each_set_of_coefficients_orthogonalizes(kind, steps, bounds):
    u, _, v = torch.linalg.svd(torch.randn(8, 12, generator=torch.Generator().manual_seed(0)).double(), False)
    x = u @ torch.diag(torch.logspace(-1, 0, 8).double()) @ v
    values = torch.linalg.svdvals(orthogonalized(x, steps, torch.float64, kind))
    assert bounds[0] < values.min() and values.max() < bounds[1]


def test_batches_of_matrices_change_nothing_but_rounding(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(13, 20), (20, 13), (3, 13, 20), (13, 20), (4, 30), (2, 2, 9, 9), (13, 20)]
    matrices = [torch.randn(shape, generator=generator).double() for shape in shapes]
    expected = [orthogonalized(matrix, 5, torch.float64) for matrix in matrices]
    monkeypatch.setattr(newton_schulz, "BATCH_ELEMENTS", 800)
    with mock.patch.object(newton_schulz, "orthogonalized", wraps=orthogonalized) as made:
        results = newton_schulz.orthogonalize_all(matrices, 5, torch.float64)
        sizes = [tuple(call.args[0].shape) for call in made.call_args_list]
    assert sizes == [(1, 13, 20), (3, 13, 20), (1, 20, 13), (2, 13, 20), (1, 4, 30), (4, 9, 9)]
    for result, value in zip(results, expected, strict=True):
        torch.testing.assert_close(result, value, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("settings", "fused", "parts"), [
    ({}, "qkv", [(slice(0, 4), slice(8, 12)), (slice(4, 6), slice(12, 14)), (slice(6, 8), slice(14, 16))]),
    ({"muon_split_heads": True}, "qkv", [(slice(start, start + 2),) for start in range(0, 16, 2)]),
    ({"muon_split_qkv": False}, "qkv", [(slice(0, 16),)]),
    ({"muon_split_gate_up": False}, "qkv", [(slice(0, 4), slice(8, 12)), (slice(4, 6), slice(12, 14)),
                                            (slice(6, 8), slice(14, 16))]),
    ({"muon_split_gate_up": False}, "gate_up", [(slice(0, 16),)]),
])  # fmt: skip
def test_fused_weights_are_split_by_matrix_or_head_or_not_at_all(settings, fused, parts):
    config = OptimConfig(
        optimizer="muon", lr=1.0, weight_decay=0.0, muon_coefficient_type="quintic", **settings
    )
    weight = torch.nn.Parameter(torch.zeros(16, 5))
    weight.grad = torch.randn(16, 5, generator=torch.Generator().manual_seed(3))
    placement = Placement(matrices=(4, 2, 2), fused=fused, heads=(2, 2, 2))
    optimizer = build_optimizer([("w", weight)], config, placements={"w": placement})
    update = weight.grad.clone()
    optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
    for rows in parts:
        matrix = torch.cat([update[each] for each in rows]) * (
            0.05 * 1.95
        )  # momentum of the first step, Nesterov
        expected = orthogonalized(matrix, 5, torch.float32, "quintic") * (0.2 * max(matrix.shape) ** 0.5)
        actual = torch.cat([weight.detach()[each] for each in rows])
        torch.testing.assert_close(actual, -expected, rtol=1e-4, atol=1e-5)


def normuon(w, grads, lr, decay):
    """Algorithm 1 of Li et al. 2025."""
    m, v = torch.zeros_like(w), torch.zeros(len(w), 1)
    for g in grads:
        m = 0.95 * m + 0.05 * g
        o = orthogonalized(g + 0.95 * (m - g), 5, torch.float32)
        v = 0.9 * v + 0.1 * o.square().mean(-1, keepdim=True)
        o = o / (v + 1e-7).sqrt()
        w = w - lr * decay * w - 0.2 * lr * w.numel() ** 0.5 / o.norm() * o
    return w


def test_normuon_normalizes_rows_as_published():
    config = OptimConfig(
        optimizer="muon", lr=0.03, weight_decay=0.1, muon_moment2_method="normuon", muon_beta2=0.9
    )
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(6, 10, generator=generator) for _ in range(4))
    weight = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of({"w": weight}, config, {"w": (6,)})
    for gradient in grads:
        weight.grad = gradient.clone()
        optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
    torch.testing.assert_close(weight.detach(), normuon(start, grads, 0.03, 0.1), rtol=1e-5, atol=1e-6)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def adaptive_muon(w, grads, lr, decay, parts):
    """NVIDIA's AdaptiveMuon of emerging-optimizers 0.4, moment2_method adamuon, for each of `parts`, rows of `w`."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for g in grads:
        w = w * (1 - lr * decay)
        m = torch.lerp(m, g, 1 - 0.95)
        update = torch.lerp(g, m, 0.95)
        for rows in parts:
            o = orthogonalized(update[rows], 5, torch.float32)
            v[rows] = torch.lerp(v[rows], o.square(), 1 - 0.9)
            o = o / (v[rows].sqrt() + 1e-8)
            w[rows] -= lr * o * max(o.shape) ** 0.5 * 0.2
    return w


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_adamuon_equals_nvidias_and_its_state_can_be_rounded(dtype):
    """With rounded state, the update is close to that with fp32 state."""
    config = OptimConfig(optimizer="muon", lr=0.01, weight_decay=0.1, muon_moment2_method="adamuon", muon_beta2=0.9,
                         muon_state_dtype=dtype)  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(64, 128, generator=generator) for _ in range(5))
    weight = torch.nn.Parameter(start.clone())
    optimizer = optimizer_of({"w": weight}, config, {"w": (2, 1, 1)})
    for number, gradient in enumerate((*grads[:2], grads[0] / 0, *grads[2:])):
        weight.grad = gradient.clone()
        before = weight.detach().clone()
        skipped = optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0).skipped
        assert skipped == (number == 2) and torch.equal(weight, before) == (number == 2)
    rows = torch.arange(64)
    parts = [rows[rows % 4 < 2], rows[rows % 4 == 2], rows[rows % 4 == 3]]
    expected = adaptive_muon(start.clone(), grads, 0.01, 0.1, parts)
    bound = {"fp32": 1e-5, "bf16": 2e-2, "fp8": 0.15}[dtype]
    assert _difference(weight.detach() - start, expected - start) < bound
    state = optimizer.state[weight]
    bytes_each = {"fp32": 4, "bf16": 2, "fp8": 1 + 4 / 16}[dtype]
    assert [state[key].nbytes for key in ("momentum_buffer", "exp_avg_sq")] == [bytes_each * 64 * 128] * 2


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_shards_of_a_rounded_momentum_round_as_the_whole(dtype):
    config = OptimConfig(optimizer="muon", lr=0.1, muon_state_dtype=dtype)
    gradient = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))

    def momentum(offset: tuple[int, int], size: tuple[int, int]) -> torch.Tensor:
        rows, columns = (slice(at, at + length) for at, length in zip(offset, size))
        weight = torch.nn.Parameter(torch.zeros(size))
        placement = Placement(matrices=(size[0],), shape=(24, 512), offset=offset, seed=3)
        optimizer = build_optimizer([("w", weight)], config, placements={"w": placement})
        for _ in range(2):
            weight.grad = gradient[rows, columns].clone()
            optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
        return optimizer.state[weight]["momentum_buffer"].float()

    whole = momentum((0, 0), (24, 512))
    assert 0 < _difference(whole, gradient * (1 - 0.95**2)) < {"bf16": 1e-2, "fp8": 6e-2}[dtype]
    for offset, size in [((0, 256), (10, 256)), ((10, 64), (14, 448))]:
        rows, columns = (slice(at, at + length) for at, length in zip(offset, size))
        assert torch.equal(momentum(offset, size), whole[rows, columns])


@pytest.mark.parametrize(("settings", "text"), [
    ({"muon_coefficient_type": "quintic", "muon_num_ns_steps": 6}, "coefficients for 5 steps; choose a multiple of 5"),
    ({"muon_split_heads": True, "muon_split_qkv": False}, "muon_split_qkv is false, but heads can be split only after"),
    ({"muon_scalar_optimizer": "muon"}, "updates matrices only; choose adamw or lion"),
    ({"muon_scalar_optimizer": "lino"}, "optim.muon_scalar_optimizer 'lino' is not known"),
])  # fmt: skip
def test_settings_of_muon_that_contradict_are_refused(settings, text):
    with pytest.raises(ConfigError, match=text):
        check_optimizer(OptimConfig(optimizer="muon", lr=0.1, **settings))
    check_optimizer(OptimConfig(lr=0.1, **settings))  # not read


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


CASES = [
    ("experts", ["tp2-sp-etp2-ep2"]),
    ("gated", ["tp2-sp-pp2", "dp4-zero3-hybrid", "tp4", "tp2-dp2-zero2", "cp2-dp2-zero2"]),
    ("experts", ["ep2-dp4-zero3", "tp2-dp2"]),
    ("latent", ["tp2-sp-dp2-zero3"]),
]


@pytest.mark.full  # test_optimizer_layouts.py has a layout of Muon by default
@pytest.mark.parametrize(("kind", "layouts"), CASES)
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


@pytest.mark.parametrize("dtypes", [("fp32", "bf16"), ("bf16", "fp32")])
def test_a_run_resumes_with_the_momentum_in_another_dtype(tmp_path, dtypes):
    wide = GATED | dict(hidden_size=128, ffn_hidden_size=128)
    first, second = (
        configuration("", wide, optimizer="muon", muon_state_dtype=dtype, lr=3e-2) for dtype in dtypes
    )
    expected = losses(first, save=str(tmp_path / "first"))[1:]
    found = losses(second, load=str(tmp_path / "first"))
    assert found == pytest.approx(expected, rel=1e-2) and found != expected


def test_ranks_that_share_matrices_orthogonalize_each_once_and_about_equally(pool):
    (one,) = orthogonalized_shapes(configuration("", GATED, optimizer="muon"))
    for by_rank in pool.run(orthogonalized_shapes, configuration("tp2-dp2-zero2", GATED, optimizer="muon")):
        shapes = [tuple(shape) for rank in by_rank for shape in rank]
        assert sorted(shapes) == sorted(one)
        assert [len(rank) for rank in by_rank] == pytest.approx([len(one) / 4] * 4, abs=2)


def test_the_momentum_grows_over_its_warm_up_and_not_in_a_skipped_step():
    config = OptimConfig(optimizer="muon", lr=0.1, clip_grad=0, muon_momentum_warmup_iters=2)
    weight, expected = torch.nn.Parameter(torch.zeros(3, 4)), torch.zeros(3, 4)
    optimizer = optimizer_of({"w": weight}, config, {"w": (3,)})
    decays = iter((0.85, 0.90, 0.95, 0.95))
    for step, finite in enumerate((True, False, True, True, True)):
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        weight.grad = gradient if finite else gradient / 0
        optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), 0)
        if finite:
            decay = next(decays)
            expected = decay * expected + (1 - decay) * gradient
        torch.testing.assert_close(optimizer.state[weight]["momentum_buffer"], expected)


def test_owners_have_about_equal_costs():
    assert assign([1, 8, 4, 3, 2], 2) == [0, 0, 1, 1, 1]
    assert assign([], 3) == []


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
