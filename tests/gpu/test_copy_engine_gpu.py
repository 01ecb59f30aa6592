"""Collectives by copy engines give what NCCL's give, whatever is under way beside them."""

from dataclasses import replace

import pytest
import torch

from megalith.comm import collectives as comm
from megalith.config import ParallelConfig
from megalith.parallel.mesh import build_mesh

ROWS = (2**10, 2**12, 2**9, 2**13)  # the second and the last need more memory than those before


def axes() -> tuple[comm.Axis, comm.Axis]:
    settings = dict(tensor_model_parallel_size=2, symmetric_memory_groups=["tp"])
    direct = build_mesh(ParallelConfig(**settings), 2, "cuda").tp
    assert direct.direct
    return direct, replace(direct, direct=False)


BEGIN = {
    "all_gather": comm.begin_all_gather,
    "reduce_scatter": comm.begin_reduce_scatter,
    "all_reduce": comm.begin_all_reduce,
}


def difference(name: str) -> float:
    """The largest between both ways, over collectives of several sizes with six of each under way."""
    direct, nccl = axes()
    begin, worst = BEGIN[name], 0.0
    for rows in ROWS:
        generator = torch.Generator("cuda").manual_seed(rows + direct.rank)
        given = [torch.randn(rows, 1280, device="cuda", generator=generator).bfloat16() for _ in range(6)]
        expected = [comm.wait(begin(x, nccl)).clone() for x in given]
        torch.cuda._sleep(10_000_000 * direct.rank)  # one rank comes late
        begun = [begin(x, direct) for x in given]
        for x in given:  # what is given may be overwritten at once, but for the own part of a sum
            peers = x if name == "all_gather" else x.chunk(direct.size)[1 - direct.rank]
            peers.fill_(float("nan"))
        found = [comm.wait(x) for x in begun]
        worst = max(worst, *((a.float() - b.float()).abs().max().item() for a, b in zip(found, expected)))
    return worst


@pytest.mark.parametrize("name", BEGIN)
def test_direct_collectives_equal_nccls(gpus, name):
    assert gpus.run(difference, name) == [0.0, 0.0]


def gradients(compiled: bool) -> list[float]:
    """The largest differences of value and gradient of a gather, product and scatter, to NCCL's."""
    results = []
    for axis in axes():
        generator = torch.Generator("cuda").manual_seed(axis.rank)
        x = torch.randn(2048, 512, device="cuda", generator=generator).bfloat16().requires_grad_()
        w = torch.randn(512, 512, device="cuda", generator=generator).bfloat16().requires_grad_()

        def forward(x, w, axis=axis):
            return comm.reduce_scatter(torch.tanh(comm.all_gather(x, axis) @ w), axis)

        function = torch.compile(forward, fullgraph=True) if compiled else forward
        y = function(x, w)
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, w.grad])
    return [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(*results)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_equal_nccls(gpus, compiled):
    for differences in gpus.run(gradients, compiled):
        assert max(differences) < 1e-2
