"""Steps that the CPU takes for a share of the parameters give what the whole optimizer gives, on a CPU as device."""

import math

import pytest
import torch

from megalith.checkpoint import RunRecord, load_model, load_optimizer, open_checkpoint, save_checkpoint
from megalith.checkpoint.state import optimizer_shards
from megalith.config import OptimConfig
from megalith.optim import build_loss_scale, build_optimizer, offload, optimizer_step, set_learning_rate
from megalith.optim.offload import OffloadedOptimizer, select_for_offload

OPTIMIZERS = {
    "adamw": OptimConfig(optimizer="adamw", lr=0.1, weight_decay=0.1),
    "adam": OptimConfig(optimizer="adam", lr=0.1, weight_decay=0.1),
    "momentum": OptimConfig(optimizer="sgd", lr=0.1, weight_decay=0.1),
    "plain sgd": OptimConfig(optimizer="sgd", lr=0.1, sgd_momentum=0.0),
}
SHARES = {"everything": 1.0, "a half": 0.5, "a little": 0.02}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """So that a slice has several parameters and a parameter several slices, and slots are used again."""
    monkeypatch.setattr(offload, "SLICE", 256)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        shapes = {
            "embedding": (31, 40),
            "fc1": (17, 5),
            "fc2": (60, 33),
            "bias": (17,),
            "norm": (8,),
            "empty": (0, 4),
        }
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, generator=generator)))


def give_gradients(model: Net, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    size = 10.0 if step % 2 else 0.01  # clipped in every second step
    for parameter in model.parameters():
        parameter.grad = scale * size * torch.randn(parameter.shape, generator=generator)


def offloaded(
    model: Net, config: OptimConfig, fraction: float = 1.0, overlap: bool = True
) -> OffloadedOptimizer:
    inner = build_optimizer(model.named_parameters(), config)
    names = select_for_offload(model.named_parameters(), fraction)
    return OffloadedOptimizer(inner, [p for n, p in model.named_parameters() if n in names], overlap)


def assert_same(model: Net, other: Net, optimizer, reference) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(mine, theirs), name
        assert optimizer.state[mine].keys() == reference.state[theirs].keys()
        for key, value in reference.state[theirs].items():
            assert torch.equal(optimizer.state[mine][key], value), (name, key)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("fraction", SHARES.values(), ids=SHARES)
@pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_and_state_are_bitwise_those_of_the_whole_optimizer(config, fraction, overlap):
    model, other = Net(), Net()
    optimizer, reference = (
        offloaded(model, config, fraction, overlap),
        build_optimizer(other.named_parameters(), config),
    )
    scales = [build_loss_scale("fp16", config, "cpu") for _ in range(2)]
    for step in range(5):
        results = []
        for net, one, scale in zip((model, other), (optimizer, reference), scales):
            set_learning_rate(one, 0.1 / (step + 1), 0.05 * step)
            give_gradients(net, step, scale.scale.item())
            if step == 2:
                net.fc2.grad[3, 2] = math.inf
            results.append(optimizer_step(one, scale, config.clip_grad))
        assert [r.skipped.item() for r in results] == [float(step == 2)] * 2
        assert results[0].grad_norm.equal(results[1].grad_norm)
        assert_same(model, other, optimizer, reference)


def test_a_first_step_that_is_skipped_changes_nothing():
    for config in OPTIMIZERS.values():
        model, untouched = Net(), Net()
        optimizer = offloaded(model, config)
        give_gradients(model, 0)
        model.embedding.grad[0, 0] = math.nan
        result = optimizer_step(optimizer, build_loss_scale("bf16", config, "cpu"), config.clip_grad)
        assert result.skipped.item() == 1.0
        assert_same(model, untouched, optimizer, build_optimizer(untouched.named_parameters(), config))


@pytest.mark.parametrize("config", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parameters_without_a_gradient_are_left_alone(config):
    model, other = Net(), Net()
    optimizer, reference = offloaded(model, config), build_optimizer(other.named_parameters(), config)
    for net, one in ((model, optimizer), (other, reference)):
        for step in range(3):
            give_gradients(net, step)
            net.fc1.grad = None
            if step == 1:
                net.embedding.grad = None
            optimizer_step(one, build_loss_scale("fp32", config, "cpu"), config.clip_grad)
    assert_same(model, other, optimizer, reference)
    assert torch.equal(model.fc1, Net().fc1)


def test_weights_changed_from_outside_are_the_ones_that_are_stepped():
    config = OptimConfig(lr=0.1)
    model, other = Net(), Net()
    optimizer, reference = offloaded(model, config), build_optimizer(other.named_parameters(), config)
    for step in range(2):
        for net, one in ((model, optimizer), (other, reference)):
            with torch.no_grad():
                net.fc2.mul_(2.0)
            give_gradients(net, step)
            optimizer_step(one, build_loss_scale("fp32", config, "cpu"), config.clip_grad)
    assert_same(model, other, optimizer, reference)


def test_gradients_and_groups_are_the_callers():
    config = OptimConfig(lr=0.1)
    model = Net()
    optimizer = offloaded(model, config)
    give_gradients(model, 0)
    given = {name: parameter.grad for name, parameter in model.named_parameters()}
    optimizer_step(optimizer, build_loss_scale("fp32", config, "cpu"), config.clip_grad)
    assert all(parameter.grad is given[name] for name, parameter in model.named_parameters())
    assert sorted(name for group in optimizer.param_groups for name in group["param_names"]) == sorted(given)


def test_a_run_saved_with_offloading_goes_on_bitwise_with_another_share_or_none(tmp_path):
    config = OptimConfig(lr=0.1)
    scale = build_loss_scale("fp32", config, "cpu")

    def steps(net, one, numbers):
        for step in numbers:
            give_gradients(net, step)
            optimizer_step(one, scale, config.clip_grad)

    model = Net()
    optimizer = offloaded(model, config, 0.5)
    steps(model, optimizer, range(3))
    names = set(optimizer_shards(optimizer, model))
    assert names == set(optimizer_shards(build_optimizer(Net().named_parameters(), config), None))
    record = RunRecord(step=3, consumed_samples=3, config={}, loss_scale={}, tokenizer=None)
    save_checkpoint(tmp_path, record, model, optimizer)
    steps(model, optimizer, range(3, 6))
    for fraction in (0.0, 0.5, 1.0):
        resumed = Net()
        one = build_optimizer(resumed.named_parameters(), config)
        if fraction:
            one = offloaded(resumed, config, fraction)
        checkpoint = open_checkpoint(tmp_path, ("model", "optimizer"))
        load_model(checkpoint, resumed)
        load_optimizer(checkpoint, one, None, resumed)
        steps(resumed, one, range(3, 6))
        assert_same(resumed, model, one, optimizer)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_the_share_is_met_from_below_with_the_largest_parameters(fraction):
    sizes = {"embedding": 460, **{f"layer {i}": 40 for i in range(10)}, **{f"bias {i}": 1 for i in range(20)}}
    named = [(name, torch.empty(size, device="meta")) for name, size in sizes.items()]
    total = sum(sizes.values())
    names = select_for_offload(named, fraction)
    share = sum(sizes[name] for name in names) / total
    assert fraction - 40 / total < share <= fraction
    assert names == select_for_offload(named, fraction)
    if fraction == 0.5:
        assert "embedding" not in names  # of 880 elements it has more than half


def test_nothing_is_offloaded_from_a_cpu():
    config = OptimConfig(lr=0.1, optimizer_cpu_offload=True)
    assert isinstance(build_optimizer(Net().named_parameters(), config), torch.optim.AdamW)


def test_every_element_is_stepped_once_whatever_the_sizes():
    for sizes in ([1], [255, 1, 300], [256], [257], [200, 10, 700, 3], [64, 191, 2]):
        parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        seen = [torch.zeros(size) for size in sizes]
        for part in offload._slices({"params": parameters}, set(parameters)):
            places = torch.zeros(256)
            for piece in part.pieces:
                assert piece.elements.start % offload.ALIGNMENT == 0
                index = next(i for i, p in enumerate(parameters) if p is piece.parameter)
                seen[index][piece.elements] += 1
                places[piece.offset] += 1
                assert piece.elements.stop - piece.elements.start == piece.offset.stop - piece.offset.start
            assert places.max() == 1
        assert all((count == 1).all() for count in seen)
