"""The order in which a process begins its collectives, those of all groups together.

Where it is the same on every rank, NCCL's kernels cannot wait for each other in a circle: of all that is not through,
what was begun first waits for nothing but kernels that end by themselves.
"""

from itertools import islice
from unittest import mock

import pytest
import torch
from parity.parity_cases import run_config
from torch.utils._python_dispatch import TorchDispatchMode

from megalith.config import RunConfig
from megalith.models.router import Router
from megalith.parity.job import start

EXPERTS, TOPK = 8, 4
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform"}


class Recorded(TorchDispatchMode):
    """What collectives are begun and waited for: their operators, and what their groups are for."""

    def __init__(self):
        super().__init__()
        self.seen: list[tuple[str, ...]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace in ("c10d", "_c10d_functional"):
            self.seen.append((str(operator), *(_purpose(arg) for arg in args if isinstance(arg, str))))
        return operator(*args, **(kwargs or {}))


def _purpose(text: str) -> str:
    """Of a group's name, which every rank numbers for itself."""
    if text in ("sum", "max", "min"):
        return text
    return torch._C._distributed_c10d._resolve_process_group(text).group_desc


def first_experts(self: Router, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    return torch.arange(TOPK, device=scores.device).expand(len(scores), TOPK).contiguous()


def collectives(config: RunConfig) -> list[tuple[str, ...]]:
    """Those of two micro-batches, whose tokens all go to the first experts, so that other ranks have none."""
    trainer = start(config)
    with (
        mock.patch.object(Router, "_choose", first_experts),
        trainer.data.train_loader(0, 0, trainer.device) as batches,
        Recorded() as recorded,
    ):
        trainer.model.backward(list(islice(batches, 2)), loss_scale=trainer.loss_scale.scale)
    return recorded.seen


CASES = {"ep4": {}, "ep2-dp4-zero1": {}, "ep2-dp4-zero3": RECOMPUTED}


@pytest.fixture(scope="module")
def recorded(pool) -> dict[str, list]:
    model = {"num_layers": 2, "moe_layer_freq": [0, 1]}
    configs = {
        layout: run_config("deepseek documents", layout, "", model=model, parallel=parallel)
        for layout, parallel in CASES.items()
    }
    for config in configs.values():
        assert config.model.num_experts == EXPERTS and config.model.moe_router_topk == TOPK
    return pool.run_cases(collectives, {layout: (config,) for layout, config in configs.items()})


@pytest.mark.parametrize("layout", CASES)
def test_every_rank_begins_the_same_collectives_in_the_same_order(recorded, layout: str):
    ranks = recorded[layout]
    exchanges = [event for event in ranks[0] if "all_to_all_single" in event[0]]
    assert len(exchanges) >= 2 * 4  # micro-batches; what goes there and back, forward and backward
    for rank in ranks[1:]:
        assert rank == ranks[0]


def test_gloo_names_no_collective_of_a_step_with_more_than_15_characters(recorded):
    """Its threads break the heap over a longer name, which is that of the all-gather that allocates its result."""
    operators = {event[0] for ranks in recorded.values() for event in ranks[0]}
    assert "_c10d_functional.all_gather_into_tensor_out.default" in operators
    assert not any(name.startswith("_c10d_functional.all_gather_into_tensor.") for name in operators)
