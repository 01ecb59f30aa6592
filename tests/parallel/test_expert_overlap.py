"""What is computed while rows travel: in which order, and that the order changes nothing."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from parity.parity_cases import run_config

from megalith.comm import collectives as comm
from megalith.config import RunConfig
from megalith.models.moe import MoE
from megalith.models.pass_context import Context
from megalith.ops.grouped_gemm import GroupedGemm
from megalith.parity.job import Outcome, run_job, start

LATE = {"moe_shared_expert_overlap": False}


def events(config: RunConfig) -> list[str]:
    """What happens, in order, in the forward and backward pass of a micro-batch through one layer with experts. A
    gradient of a bias counts as one of a weight: an expert has two of each."""
    trainer, seen, travelling = start(config), [], []
    exchange, wait, shared = comm._all_to_all_single, comm.wait, MoE._shared

    def begin(x: torch.Tensor, *args) -> torch.Tensor:
        pending = exchange(x, *args)
        seen.append("begin")
        travelling.append(pending.data_ptr())
        return pending

    def end(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() in travelling:
            travelling.remove(x.data_ptr())
            seen.append("end")
        return wait(x)

    def counted(gradient: Callable) -> Callable:
        return lambda *args: seen.append("weight") or gradient(*args)

    def compute_shared(self: MoE, x: torch.Tensor, context: Context) -> torch.Tensor:
        seen.append("shared")
        self.shared_experts.linear_fc1.weight.register_hook(lambda grad: seen.append("shared backward"))
        return shared(self, x, context)

    with (
        mock.patch.object(comm, "_all_to_all_single", begin),
        mock.patch.object(comm, "wait", end),
        mock.patch.object(GroupedGemm, "wgrad", counted(GroupedGemm.wgrad)),
        mock.patch.object(MoE, "_shared", compute_shared),
        trainer.data.train_loader(0, 0, trainer.device) as batches,
    ):
        trainer.model.backward([next(batches)], loss_scale=trainer.loss_scale.scale)
    return seen


def deepseek(parallel: dict[str, Any] | None = None, **model) -> RunConfig:
    changes = {"model": {"num_layers": 2, "moe_layer_freq": [0, 1]} | model, "train": {"train_iters": 3}}
    return run_config("deepseek documents", "ep2", "", parallel=parallel or {}, **changes)


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        (
            {},
            "begin end begin shared end | begin shared backward end begin weight weight weight weight end",
        ),
        (
            LATE,
            "begin end begin end shared | shared backward begin end begin weight weight weight weight end",
        ),
    ],
    ids=["beside", "behind"],
)
def test_work_goes_on_while_rows_travel_forward_and_backward(pool, settings, order):
    for seen in pool.run(events, deepseek(**settings), size=2):
        assert " ".join(seen) == order.replace(" |", "")


def test_the_shared_expert_beside_the_exchange_changes_no_bit(pool):
    beside, behind = (pool.run(run_job, deepseek(**settings), size=2)[0] for settings in ({}, LATE))
    assert_equal(beside, behind)


def begun_and_waited_for(config: RunConfig) -> tuple[int, int]:
    """How many exchanges of rows begin in a micro-batch's passes, and how many of those are waited for."""
    trainer, begun, waited = start(config), [], 0
    exchange, wait = comm._all_to_all_single, comm.wait

    def begin(x: torch.Tensor, *args) -> torch.Tensor:
        begun.append(exchange(x, *args))  # kept, so that no other tensor has its address
        return begun[-1]

    def end(x: torch.Tensor) -> torch.Tensor:
        nonlocal waited
        waited += any(x.data_ptr() == pending.data_ptr() for pending in begun if len(pending))
        return wait(x)

    with (
        mock.patch.object(comm, "_all_to_all_single", begin),
        mock.patch.object(comm, "wait", end),
        trainer.data.train_loader(0, 0, trainer.device) as batches,
    ):
        trainer.model.backward([next(batches)], loss_scale=trainer.loss_scale.scale)
    return sum(len(pending) > 0 for pending in begun), waited


@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 9},
        {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    ],
    ids=["full", "mlp"],
)
def test_a_layer_computed_again_waits_for_all_that_it_begins_to_exchange(pool, recompute):
    for begun, waited in pool.run(begun_and_waited_for, deepseek(parallel=recompute), size=2):
        assert begun > 4  # those of one forward and backward pass, and of one forward pass more
        assert waited == begun


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    assert ours.losses == theirs.losses and ours.norms == theirs.norms
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in ours.gradients.items():
        assert torch.equal(gradient, theirs.gradients[name]), name
    assert any("shared_experts" in name and gradient.any() for name, gradient in ours.gradients.items())
