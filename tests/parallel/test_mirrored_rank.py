"""The process group whose other ranks do as this one does: what its collectives give."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.mirrored_rank import all_gather_of_any_group, init_mirror
from megalith.comm import collectives
from megalith.comm.collectives import (
    all_gather,
    all_reduce_no_grad,
    begin_all_to_all,
    end_all_to_all,
    gather_json,
    reduce_scatter,
)
from megalith.config import ParallelConfig
from megalith.parallel.mesh import build_mesh


@pytest.fixture
def axis(monkeypatch):
    monkeypatch.setattr(collectives, "begin_group_all_gather", all_gather_of_any_group)
    init_mirror(2)
    yield build_mesh(ParallelConfig(tensor_model_parallel_size=2), 2, "cpu").tp
    dist.destroy_process_group()


def test_collectives_give_what_ranks_that_are_alike_would(axis):
    x = torch.arange(4.0).requires_grad_()
    assert all_reduce_no_grad(x.detach(), axis).tolist() == [0, 2, 4, 6]
    assert all_reduce_no_grad(x.detach(), axis, "max").tolist() == [0, 1, 2, 3]
    assert all_gather(x, axis).tolist() == [0, 1, 2, 3] * 2
    assert reduce_scatter(x, axis).tolist() == [0, 2]
    assert gather_json({"a": 1}, axis) == [{"a": 1}] * 2
    y = end_all_to_all(begin_all_to_all(x, axis, [3, 1], [3, 3]))
    assert y.tolist() == [0, 1, 2] * 2  # from each what goes from here to the first
    y.sum().backward()
    assert x.grad.tolist() == [1, 1, 1, 1]
