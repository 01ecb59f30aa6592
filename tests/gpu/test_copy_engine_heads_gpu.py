"""Heads exchanged for tokens by copy engines are, to the bit, what NCCL's all-to-all and copies give."""

from dataclasses import replace

import pytest
import torch

from megalith.comm import collectives as comm
from megalith.config import ParallelConfig
from megalith.launch.pool import Pool
from megalith.ops.split_qkv import split_heads
from megalith.parallel.context.ulysses import heads_from_tokens, tokens_from_heads
from megalith.parallel.mesh import build_mesh

SIZES = [pytest.param(2, marks=pytest.mark.two_gpus), pytest.param(4, marks=pytest.mark.four_gpus)]
# groups, heads in a group, head_dim, batch, tokens of a rank: each case needs more memory than those before
CASES = {
    "grouped": (8, 4, 64, 2, 260),
    "repeated": (1, 16, 64, 3, 512),
    "as GPT-2": (16, 1, 80, 5, 512),
    "one long sequence": (8, 2, 128, 1, 4096),
}
TYPES = (torch.bfloat16, torch.float32)


def on_gpus(function, size: int, *args) -> list:
    pool = Pool(size, timeout=300.0, device_type="cuda")
    try:
        return pool.run(function, size, *args)
    finally:
        pool.close()


def axes(size: int) -> tuple[comm.Axis, comm.Axis]:
    settings = ParallelConfig(context_parallel_size=size, symmetric_memory_groups=["cp"])
    direct = build_mesh(settings, size, "cuda").cp
    assert direct.direct
    return direct, replace(direct, direct=False)


def results(case: tuple, dtype: torch.dtype, axis: comm.Axis, compiled: bool) -> list[torch.Tensor]:
    """Of both exchanges one after the other, and the gradient of what they start from."""
    groups, heads_in_group, head_dim, batch, seq = case
    width = groups * (heads_in_group + 2) * head_dim
    generator = torch.Generator("cuda").manual_seed(axis.rank)

    def random(*shape: int) -> torch.Tensor:
        whole = torch.randint(-8, 9, shape, device="cuda", generator=generator)  # so that sums are exact
        return whole.to(dtype)

    def there_and_back(qkv):
        query, key, value = heads_from_tokens(*split_heads(qkv, heads_in_group, head_dim), axis)
        attended = -query.transpose(1, 2).contiguous().transpose(1, 2)  # [batch, heads, seq, ·] in memory
        return tokens_from_heads(attended, axis), -key, -value

    qkv = random(batch, seq, width).requires_grad_()
    function = torch.compile(there_and_back, fullgraph=True) if compiled else there_and_back
    torch.cuda._sleep(5_000_000 * axis.rank)  # one rank comes late
    outputs = function(qkv)
    (grad,) = torch.autograd.grad(outputs, qkv, [random(*x.shape) for x in outputs])
    return [*(x.detach() for x in outputs), grad]


def unlike(size: int, compiled: bool) -> list[tuple]:
    """Cases, types and results that differ at all from NCCL's all-to-all."""
    found = []
    direct, nccl = axes(size)
    for name, case in CASES.items():
        for dtype in TYPES:
            torch._dynamo.reset()
            both = (results(case, dtype, axis, compiled) for axis in (direct, nccl))
            pairs = zip(*both, strict=True)
            found += [(name, dtype, i) for i, pair in enumerate(pairs) if not torch.equal(*pair)]
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_exchanges_of_heads_and_their_gradients_equal_nccls(size, compiled):
    assert on_gpus(unlike, size, compiled) == [[]] * size


def unlike_under_way(size: int) -> int:
    """Of ten exchanges begun before the first is waited for, with what they are given overwritten at once."""
    direct, nccl = axes(size)
    generator = torch.Generator("cuda").manual_seed(direct.rank)
    shape = (2, 512, 16, 3, 80)
    given = [torch.randn(*shape, device="cuda", generator=generator).bfloat16() for _ in range(10)]
    expected = [torch.cat(heads_from_tokens(*x.unbind(3), nccl), 2) for x in given]
    torch.cuda._sleep(10_000_000 * direct.rank)
    begin = torch.ops.megalith_copy_engine.heads_from_tokens
    begun = [begin(list(x.unbind(3)), direct.size, direct.name) for x in given]
    for x in given:
        x.fill_(float("nan"))
    return sum(not torch.equal(comm.wait(x), y) for x, y in zip(begun, expected, strict=True))


@pytest.mark.parametrize("size", SIZES)
def test_many_exchanges_are_under_way_and_their_inputs_overwritten(size):
    assert on_gpus(unlike_under_way, size) == [0] * size
