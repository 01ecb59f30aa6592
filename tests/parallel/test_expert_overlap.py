"""What is computed while rows travel: in which order, and that the order changes nothing."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from parity.parity_cases import run_config

from megalith import comm
from megalith.config import RunConfig
from megalith.models.moe import MoE
from megalith.ops import grouped_gemm
from megalith.parity.job import Outcome, run_job, start

LATE = {"moe_shared_expert_overlap": False}


def events(config: RunConfig) -> list[str]:
    """What happens, in order, in the forward and backward pass of a micro-batch through one layer with experts."""
    trainer, seen, travelling = start(config), [], []
    exchange, wait, shared = comm._exchange, comm.wait, MoE._shared

    def begin(x: torch.Tensor, *args) -> torch.Tensor:
        pending = exchange(x, *args)
        if x.is_floating_point():  # not the numbers of rows
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

    def compute_shared(self: MoE, x: torch.Tensor) -> torch.Tensor:
        seen.append("shared")
        self.shared_experts.linear_fc1.weight.register_hook(lambda grad: seen.append("shared backward"))
        return shared(self, x)

    with (
        mock.patch.object(comm, "_exchange", begin),
        mock.patch.object(comm, "wait", end),
        mock.patch.object(grouped_gemm, "_looped_gradient", counted(grouped_gemm._looped_gradient)),
        mock.patch.object(grouped_gemm, "_even_gradient", counted(grouped_gemm._even_gradient)),
        mock.patch.object(MoE, "_shared", compute_shared),
        trainer.data.train_loader(0, 0, trainer.device) as batches,
    ):
        trainer.model.backward([next(batches)], trainer.loss_scale.scale)
    return seen


def deepseek(**model) -> RunConfig:
    small = {"num_layers": 2, "moe_layer_freq": [0, 1]}
    return run_config("deepseek documents", "ep2", "", model=small | model, train={"train_iters": 3})


@pytest.mark.parametrize(
    ("settings", "order"),
    [
        (
            {},
            "begin begin end end begin shared end | "
            "begin shared backward end begin begin weight weight end end",
        ),
        (
            LATE,
            "begin begin end end begin end shared | "
            "shared backward begin end begin begin weight weight end end",
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


def assert_equal(ours: Outcome, theirs: Outcome) -> None:
    assert ours.losses == theirs.losses and ours.norms == theirs.norms
    assert ours.gradients.keys() == theirs.gradients.keys()
    for name, gradient in ours.gradients.items():
        assert torch.equal(gradient, theirs.gradients[name]), name
    assert any("shared_experts" in name and gradient.any() for name, gradient in ours.gradients.items())
