"""Heads exchanged for tokens by copy engines: where everything goes, played through on one device; and what is sent."""

import sys
from unittest import mock

import pytest
import torch

from megalith.errors import TrainingError
from megalith.ops import fused
from megalith.ops.qkv import split_qkv
from megalith.parallel import direct_heads
from megalith.parallel.zigzag import spans

# heads of each tensor, head_dim, batch, tokens of a rank
CASES = {
    "multi-head": ([8, 8, 8], 80, 2, 6),
    "grouped": ([8, 4, 4], 16, 3, 140),
    "one tensor": ([8], 80, 2, 70),
    "one sequence": ([8, 4, 4], 64, 1, 6),
    "odd sizes": ([4, 4, 4], 3, 2, 2),
}
DIRECTIONS = pytest.mark.parametrize("to_heads", [True, False], ids=["to heads", "to tokens"])
gpu = pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def places(rank: int, size: int, seq: int) -> list[int]:
    return [place for span in spans(rank, size, seq) for place in span]


def share_by_formula(xs, slot, out, rank, to_heads) -> None:
    """What fused.share_heads writes."""
    size, seq = len(slot) + 1, slot.shape[2]
    for other in range(size):
        if to_heads:
            parts = [x.chunk(size, 2)[other] for x in xs]
        else:
            parts = [x[:, places(other, size, seq)] for x in xs]
        if other != rank:
            slot[other - (other > rank)] = torch.cat(parts, 2)
        elif to_heads:
            out[:, places(rank, size, seq)] = torch.cat(parts, 2)
        else:
            for part, all_heads in zip(parts, out.split([size * x.shape[2] for x in xs], 2)):
                all_heads.chunk(size, 2)[rank].copy_(part)


def pull(source: torch.Tensor, target: torch.Tensor, pull: direct_heads.Pull) -> None:
    """What the copy engine does, on bytes."""
    source, target = (x.view(-1).view(torch.uint8) for x in (source, target))
    shape = (pull.height, pull.width)
    rows = torch.as_strided(source, shape, (pull.source_pitch, 1), pull.source)
    torch.as_strided(target, shape, (pull.target_pitch, 1), pull.target).copy_(rows)


def exchanged(given: list[list[torch.Tensor]], to_heads: bool, share) -> list[torch.Tensor]:
    """Every rank's result, from every rank's tensors."""
    size, function = len(given), direct_heads._heads if to_heads else direct_heads._tokens
    outs, slots = [function(xs, size, "").fill_(float("nan")) for xs in given], []
    batch, seq, _, head_dim = (given[0][0] if to_heads else outs[0]).shape
    for rank, (xs, out) in enumerate(zip(given, outs)):
        slots.append(torch.full_like(out, float("nan")).view(size, batch, seq, -1, head_dim)[1:].clone())
        share(xs, slots[-1], out, rank, to_heads)
    bytes_of = [x.shape[2] // (size if to_heads else 1) * head_dim * x.element_size() for x in given[0]]
    pulls = direct_heads.heads_pulls if to_heads else direct_heads.tokens_pulls
    for rank, out in enumerate(outs):
        for peer in range(size):
            if peer != rank:
                for each in pulls(rank, peer, size, batch, seq, tuple(bytes_of)):
                    pull(slots[peer], out, each)
    return outs


def problem(case: tuple, size: int, to_heads: bool, device: str) -> tuple[list, list]:
    """What every rank gives, as views with gaps, and what it is to have."""
    heads, head_dim, batch, seq = case
    whole = torch.randn(batch, size * seq, sum(heads), head_dim, device=device).bfloat16()
    tensors = whole.split(heads, 2)
    by_tokens = [[x[:, places(rank, size, seq)] for x in tensors] for rank in range(size)]
    by_heads = [[x.chunk(size, 2)[rank] for x in tensors] for rank in range(size)]
    before, after = (by_tokens, by_heads) if to_heads else (by_heads, by_tokens)
    return [with_gaps(xs) for xs in before], [torch.cat(xs, 2) for xs in after]


def with_gaps(xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values as views of one tensor, every other head of it."""
    joined = torch.stack([torch.cat(xs, 2)] * 2, 3).flatten(2, 3)
    return [x[:, :, ::2] for x in joined.split([2 * x.shape[2] for x in xs], 2)]


@DIRECTIONS
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_every_head_of_every_token_comes_to_its_place(case, size, to_heads, device):
    torch.manual_seed(0)
    given, expected = problem(case, size, to_heads, device)
    share = share_by_formula if device == "cpu" else fused.share_heads
    for found, right in zip(exchanged(given, to_heads, share), expected, strict=True):
        assert torch.equal(found, right)


@pytest.mark.parametrize("name", ["heads_from_tokens", "tokens_from_heads"])
def test_compiled_code_hands_over_views_as_they_are(monkeypatch, quick_compile, name):
    taken = []

    def begin(xs, out, size, group, to_heads):
        taken.append([(x.stride(), x.data_ptr() - xs[0].data_ptr()) for x in xs])
        return out.zero_()

    def function(x, w):
        xs = split_qkv((x @ w).view(2, 8, -1), 1, 16)
        return torch.ops._c10d_functional.wait_tensor(
            getattr(torch.ops.megalith_direct, name)(list(xs), 2, "")
        )

    monkeypatch.setattr(direct_heads, "_begin", begin)
    x, w = torch.randn(16, 8), torch.randn(8, 4 * 3 * 16)
    for way in (function, torch.compile(function, fullgraph=True)):
        way(x, w)
    eager, compiled = taken
    assert compiled == eager == [((8 * 192, 192, 48, 1), 64 * number) for number in range(3)]


def test_without_cuda_bindings_the_package_and_the_way_out_are_named():
    direct_heads._copier.cache_clear()
    with mock.patch.dict(sys.modules, {"cuda": None}), pytest.raises(TrainingError) as raised:
        direct_heads._copier()
    assert "parallel.symmetric_memory_groups" in str(raised.value)
    assert "install it, or leave cp out" in str(raised.value)


def test_a_copy_that_fails_is_told():
    runtime = mock.Mock()
    runtime.cudaError_t.cudaSuccess = 0
    runtime.cudaMemcpy2DAsync.return_value = (mock.Mock(),)
    runtime.cudaMemcpy2DAsync.return_value[0].name = "cudaErrorInvalidPitchValue"
    direct_heads._copier.cache_clear()
    modules = {"cuda": mock.Mock(), "cuda.bindings": mock.Mock(runtime=runtime)}
    with mock.patch.dict(sys.modules, modules), pytest.raises(TrainingError, match="PitchValue"):
        direct_heads._copier()(direct_heads.Pull(0, 8, 0, 8, 8, 3), 0, 0, 0)
    direct_heads._copier.cache_clear()
