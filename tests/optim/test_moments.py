"""Adam's moments in bf16 and in 8 bits: what they hold, rounding without drift, shards that round as the whole."""

import math

import pytest
import torch

from megalith.config import OptimConfig
from megalith.errors import ConfigError
from megalith.optim import build_loss_scale, build_optimizer, optimizer_step
from megalith.optim.moments import (
    MAX_BLOCK,
    Moment,
    _random_bits,
    _shard_position,
    block_size_for,
    dynamic_code,
)
from megalith.optim.optimizer import Placement, TrainedParameter, state_bytes

NAME, SHAPE = "layers.0.weight", (24, 512)
WHOLE = [((0, 0), SHAPE)]
CUT = [((0, 0), (10, 256)), ((0, 256), (10, 256)), ((10, 0), (14, 64)), ((10, 64), (14, 448))]
REDUCED = ["bf16", "fp8"]


def config_for(dtype: str, **more) -> OptimConfig:
    return OptimConfig(**{"lr": 1e-2, "exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, **more})


def trained(config: OptimConfig, parts=WHOLE, steps: int = 6, seed: int = 3):
    """The updates' sum and the moments, in fp32, of a matrix that is stepped in these shards; the shards' states."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=draw)
    gradients = [
        torch.randn(SHAPE, generator=draw) * torch.rand(SHAPE, generator=draw) ** 4 for _ in range(steps)
    ]
    whole = {key: torch.empty(SHAPE) for key in ("update", "exp_avg", "exp_avg_sq")}
    states = []
    for offset, size in parts:
        here = tuple(slice(at, at + length) for at, length in zip(offset, size))
        weight = torch.nn.Parameter(start[here].clone())
        places = {NAME: Placement(shape=SHAPE, offset=offset, seed=seed)}
        optimizer = build_optimizer([(NAME, weight)], config, placements=places)
        for gradient in gradients:
            weight.grad = gradient[here].clone()
            optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), clip_grad=0.0)
        states.append(optimizer.state[weight])
        whole["update"][here] = weight.detach() - start[here]
        for key in ("exp_avg", "exp_avg_sq"):
            whole[key][here] = states[-1][key].float()
    return whole, states


def test_the_code_has_the_largest_and_nothing_of_both_signs_and_seven_decades():
    signed, unsigned = dynamic_code(True), dynamic_code(False)
    assert (len(signed), len(unsigned)) == (255, 256)
    assert torch.equal(signed, -signed.flip(0)) and 0.0 in signed and 0.0 in unsigned
    assert signed[-1] == unsigned[-1] == 1.0 and 0 < unsigned[1] < 1e-6
    assert (unsigned.diff() > 0).all() and (unsigned[200:].diff() < 0.0071).all()


def test_blocks_are_those_that_eight_ranks_leave_whole_and_small_tensors_have_none():
    assert [block_size_for((1024, width)) for width in (4096, 14336, 11008, 5120, 64)] == [
        MAX_BLOCK,
        MAX_BLOCK,
        172,
        160,
        8,
    ]
    assert all(width // 8 % block_size_for((1024, width)) == 0 for width in (4096, 14336, 11008, 5120, 64))
    assert [block_size_for(shape) for shape in ((4096,), (8, 511), (1024, 32), (1024, 509))] == [None] * 4


@pytest.mark.parametrize("dtype", REDUCED)
@pytest.mark.parametrize("optimizer", ["adamw", "adam"])
def test_moments_and_weights_are_near_fp32s_and_shards_round_as_the_whole(dtype, optimizer):
    exact, _ = trained(config_for("fp32", optimizer=optimizer))
    found, [state] = trained(config_for(dtype, optimizer=optimizer))
    cut, _ = trained(config_for(dtype, optimizer=optimizer), CUT)
    assert all(torch.equal(found[key], cut[key]) for key in found)
    other, _ = trained(config_for(dtype, optimizer=optimizer), seed=4)
    assert not torch.equal(found["exp_avg"], other["exp_avg"])
    # A rounding is off by at most 2^-7 of the number, or in 8 bits by a hundredth of the largest of its block.
    for key in found:
        assert (found[key] - exact[key]).norm() < {"bf16": 1e-2, "fp8": 6e-2}[dtype] * exact[key].norm(), key
    held = sum(state[key].nbytes for key in ("exp_avg", "exp_avg_sq"))
    assert held == math.prod(SHAPE) * {"bf16": 4, "fp8": 2 * (1 + 4 / 64)}[dtype]


@pytest.mark.parametrize("dtype", REDUCED)
def test_the_first_step_is_fp32s_for_what_is_rounded_is_used_later(dtype):
    exact, _ = trained(config_for("fp32"), steps=1)
    found, _ = trained(config_for(dtype), steps=1)
    torch.testing.assert_close(found["update"], exact["update"], rtol=0, atol=5e-7)


@pytest.mark.parametrize("dtype", REDUCED)
def test_what_moves_by_less_than_is_told_apart_moves_as_far_in_the_mean(dtype):
    """200 steps without a gradient, each of which takes a thousandth: rounding to the nearest would take nothing."""
    config = config_for(dtype)
    weight = torch.nn.Parameter(torch.zeros(64, 512))
    optimizer = build_optimizer([(NAME, weight)], config)
    draw = torch.Generator().manual_seed(0)
    second = optimizer.state[weight]["exp_avg_sq"]
    second.copy_(0.2 + 0.8 * torch.rand(weight.shape, generator=draw))
    before = second.float()
    scale = build_loss_scale("fp32", config, "cpu")
    for _ in range(200):
        weight.grad = torch.zeros_like(weight)
        optimizer_step(optimizer, scale, clip_grad=0.0)
    left = second.float().mean() / before.mean()
    assert left.item() == pytest.approx(0.999**200, rel=2e-3)


@pytest.mark.parametrize(("offset", "size"), [((1, 10, 256), (2, 14, 64)), ((0, 0, 64), (4, 24, 448))])
def test_a_shard_of_stacked_matrices_has_the_random_bits_of_the_whole(offset, size):
    shape, step = (4, 24, 512), torch.ones(())

    def bits(offset, size):
        item = TrainedParameter(
            NAME, torch.nn.Parameter(torch.empty(size)), Placement(shape=shape, offset=offset)
        )
        return _random_bits(_shard_position(item, shape), step, torch.empty(math.prod(size) // 64, 64)).view(
            size
        )

    here = tuple(slice(at, at + length) for at, length in zip(offset, size))
    assert torch.equal(bits(offset, size), bits((0, 0, 0), shape)[here])


def test_both_moments_of_an_element_are_rounded_by_random_bits_of_their_own():
    """Rounded by the same bits, both moments of an element would be rounded up together."""
    _, [exact] = trained(config_for("fp32"), steps=1)
    _, [state] = trained(config_for("bf16"), steps=1)
    up = [state[key].float().abs() > exact[key].abs() for key in ("exp_avg", "exp_avg_sq")]
    together = torch.corrcoef(torch.stack(up).flatten(1).float())[0, 1]
    assert abs(together.item()) < 0.05  # five standard deviations; by the same bits it is 0.35


def test_what_is_rounded_to_the_nearest_comes_back_as_it_was_and_no_second_moment_becomes_zero():
    draw = torch.Generator().manual_seed(0)
    for dtype in REDUCED:
        for signed in (True, False):
            values = torch.randn(64, 512, generator=draw) ** (9 if signed else 8)
            values[3], values[5, 7] = 0.0, 1e-30
            moment = Moment.zeros(values, dtype, 64, signed)
            assert not moment.float().any()
            moment.copy_(values)
            kept, codes = moment.float(), moment.codes.clone()
            moment.copy_(kept)
            assert torch.equal(moment.codes, codes) and torch.equal(moment.float(), kept)
            assert not kept[3].any() and (signed or kept[5, 7] > 0)
            near = {"bf16": 2**-8, "fp8": 0.0071 + (0.0071 if signed else 0)}[dtype]
            largest = values.abs().unflatten(-1, (-1, 64)).amax(-1).repeat_interleave(64, -1)
            assert ((kept - values).abs() <= near * largest).all()
            assert torch.equal(moment[:5].float(), kept[:5]) and len(moment) == 64


def test_a_step_that_is_skipped_changes_nothing():
    for dtype in REDUCED:
        config = config_for(dtype)
        weight = torch.nn.Parameter(torch.ones(16, 512))
        optimizer = build_optimizer([(NAME, weight), ("norm", torch.nn.Parameter(torch.ones(8)))], config)
        for gradient in (0.5, math.nan, math.inf):
            before = [x.clone() for x in (weight.detach(), *stored(optimizer.state[weight]))]
            weight.grad = torch.full_like(weight, 0.5)
            weight.grad[2, 3] = gradient
            result = optimizer_step(optimizer, build_loss_scale("bf16", config, "cpu"), clip_grad=1.0)
            after = [weight.detach(), *stored(optimizer.state[weight])]
            assert bool(result.skipped) == (gradient != 0.5)
            assert all(torch.equal(a, b) for a, b in zip(before, after)) == (gradient != 0.5)


def stored(state) -> list[torch.Tensor]:
    return [state["step"], *state["exp_avg"].tensors, *state["exp_avg_sq"].tensors]


def test_muon_has_them_for_what_adamw_steps_and_sgd_and_offloading_refuse_them():
    named = [
        ("layers.0.weight", torch.nn.Parameter(torch.ones(64, 64))),
        ("embedding", torch.nn.Parameter(torch.ones(64, 64))),
    ]
    muon = build_optimizer(
        named, config_for("fp8", optimizer="muon"), placements={NAME: Placement(matrices=(64,))}
    )
    assert isinstance(muon.state[named[1][1]]["exp_avg"], Moment)
    assert muon.state[named[0][1]]["momentum_buffer"].dtype == torch.float32
    with pytest.raises(ConfigError, match=r"optimizer_cpu_offload requires moments in fp32"):
        build_optimizer(named, config_for("bf16", optimizer_cpu_offload=True))
    with pytest.raises(ConfigError, match=r"exp_avg_dtype"):
        config_for("bf16", optimizer="sgd").check_requirements("optim")


def test_a_part_of_a_block_is_refused_with_its_sizes():
    half = torch.nn.Parameter(torch.ones(24, 32))
    place = {NAME: Placement(shape=SHAPE, offset=(0, 0))}
    with pytest.raises(ConfigError, match=r"each row of layers.0.weight \(512 elements\) into blocks of 64"):
        build_optimizer([(NAME, half)], config_for("fp8"), placements=place)
    build_optimizer([(NAME, half)], config_for("bf16"), placements=place)


def test_the_planner_counts_what_llamas_matrices_take():
    shapes = [(128256, 4096), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    for dtype in REDUCED:
        each, ends = state_bytes(config_for(dtype))
        for shape in shapes:
            weight = torch.empty(shape, device="meta")
            moments = [Moment.zeros(weight, dtype, block_size_for(shape), signed) for signed in (True, False)]
            assert sum(moment.nbytes for moment in moments) == each * weight.numel() and each == ends
    assert state_bytes(OptimConfig()) == (8, 8) and state_bytes(OptimConfig(optimizer="muon")) == (4, 8)
