"""Gradients summed by copy engines are those that NCCL and FSDP2's own reduce-scatter give, whoever comes late."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity.parity_cases import run_config

from megalith.comm.copy_engine import Slot
from megalith.config import RunConfig
from megalith.launch.pool import Pool
from megalith.parallel.data import replicas as replicated
from megalith.parallel.overlap import copy_engine_gradients as direct_data
from megalith.parallel.overlap.copy_engine_gradients import CopyEngineAllReduce, CopyEngineReduceScatter
from megalith.parity.differences import compare, gradient_errors, relative_error
from megalith.parity.job import Outcome, run_job
from megalith.parity.layouts import LAYOUTS


def on(size: int, *values) -> pytest.param:
    few = pytest.mark.skipif(torch.cuda.device_count() < size, reason=f"needs {size} GPUs")
    return pytest.param(size, *values, marks=few)


def on_gpus(function, size: int, *args) -> list:
    pool = Pool(size, timeout=300.0, device_type="cuda")
    try:
        return pool.run(function, *args)
    finally:
        pool.close()


def unlike_sums(lengths: list[int], at_once: int, late: int) -> list[int]:
    """The reductions, queued one after the other over the same memory as FSDP2 queues them, whose result is not to
    the bit the sum in the ranks' order."""
    group, stream = dist.group.WORLD, torch.cuda.Stream()
    size, rank, found = group.size(), group.rank(), []
    reduce_scatter = CopyEngineReduceScatter(group)
    generator = torch.Generator("cuda").manual_seed(rank)
    given = [torch.randn(size * length, device="cuda", generator=generator) for length in lengths]
    with mock.patch.object(direct_data, "FETCHED_AT_ONCE", at_once):
        for x in given:
            torch.cuda._sleep(5_000_000 * (rank == late))
            memory = reduce_scatter.allocate(x.shape, dtype=x.dtype, device=x.device)
            memory.copy_(x)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                total = reduce_scatter.allocate((len(x) // size,), dtype=x.dtype, device=x.device)
                reduce_scatter(output_tensor=total, input_tensor=memory, group=group, op=dist.ReduceOp.SUM)
            found.append(total)
    torch.cuda.current_stream().wait_stream(stream)
    unlike = []
    for number, (x, total) in enumerate(zip(given, found)):
        everyones = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(everyones, x)
        if not torch.equal(total, sum(whole.chunk(size)[rank] for whole in everyones)):
            unlike.append(number)
    return unlike


@pytest.mark.parametrize("size", [on(2), on(4)])
@pytest.mark.parametrize("at_once", [2**28, 2**20], ids=["in one piece", "in pieces"])
def test_queued_reductions_are_sums_in_the_order_of_ranks(size, at_once):
    lengths = [1_000, 3_000_001, 2**20, 7, 5_000_000, *[2_500_000] * 8]
    for late in (0, size - 1):
        assert on_gpus(unlike_sums, size, lengths, at_once, late) == [[]] * size


def unlike_copies(lengths: list[int], late: int) -> list[float]:
    """The largest difference to NCCL's sum of each of these tensors, three at a time summed in place, one sum behind
    the other, while products run beside."""
    group, found = dist.group.WORLD, []
    generator = torch.Generator("cuda").manual_seed(group.rank())
    beside = torch.randn(4096, 4096, device="cuda").bfloat16()
    given = [torch.randn(3, length, device="cuda", generator=generator).unbind() for length in lengths]
    expected = [[x.clone() for x in tensors] for tensors in given]
    begun = []
    for tensors in given:
        torch.cuda._sleep(5_000_000 * (group.rank() == late))
        begun.append(CopyEngineAllReduce(tensors, group))
        beside @ beside
    for tensors, sums, right in zip(given, begun, expected, strict=True):
        sums.wait()
        for x, y in zip(tensors, right, strict=True):
            dist.all_reduce(y)
            found.append((x - y).abs().max().item())
    return found


@pytest.mark.parametrize("size", [on(2), on(4)])
def test_queued_sums_of_copies_are_those_of_nccl(size):
    lengths = [1_000, 3_000_001, 2**20, 7, 5_000_000, *[2_500_000] * 8]
    for late in (0, size - 1):
        for differences in on_gpus(unlike_copies, size, lengths, late):
            assert max(differences) <= (0.0 if size == 2 else 1e-5)


def both_ways(config: RunConfig) -> tuple[Outcome, Outcome, int]:
    """What came of the run by copy engines and by NCCL, and how often ranks met."""
    tree = config.model_dump()
    tree["parallel"]["symmetric_memory_groups"] = ["dp"]
    with (
        mock.patch.object(Slot, "synchronize", autospec=True, side_effect=Slot.synchronize) as meet,
        mock.patch.object(replicated, "LEAST_BY_COPY_ENGINE", 0),
    ):
        found = run_job(RunConfig.from_tree(tree))
    return found, run_job(config), meet.call_count


@pytest.mark.parametrize(
    ("size", "run", "layout"),
    [
        on(2, "gpt2", "dp2"),
        on(2, "gpt2", "dp2-zero1"),
        on(2, "gpt2", "dp2-zero2"),
        on(2, "gpt2", "dp2-zero3"),
        on(2, "llama", "dp2"),
        on(2, "llama", "dp2-zero3"),
        on(4, "gpt2", "dp4-zero2"),
        on(4, "gpt2", "dp4-zero2-hybrid"),
        on(4, "gpt2", "cp2-a2a-dp2-zero1"),
        on(4, "gpt2", "pp2-interleaved-dp2-zero2"),
        on(4, "moe", "ep2-dp4"),
        on(4, "moe", "ep2-dp4-zero1"),
    ],
)
def test_small_runs_equal_those_by_nccl(size, run, layout):
    assert LAYOUTS[layout].processes == size
    runtime = {"device": "cuda", "compile": False}
    ranks = on_gpus(both_ways, size, run_config(run, layout, "", train={"train_iters": 3}, runtime=runtime))
    assert all(meetings > 0 for _, _, meetings in ranks)
    result = compare([found for found, _, _ in ranks], ranks[0][1])
    assert result.within(), result


LARGE = {"hidden_size": 1024, "num_attention_heads": 16, "max_position_embeddings": 512}
GROUPED = LARGE | {"num_query_groups": 4, "kv_channels": 64, "ffn_hidden_size": 2048}


@pytest.mark.parametrize(("size", "run", "model"), [on(2, "gpt2", LARGE), on(2, "llama", GROUPED)])
def test_compiled_layers_in_bf16_have_the_gradients_and_losses_of_nccl(size, run, model):
    config = run_config(
        run,
        "dp2-zero1",
        "",
        model=model,
        data={"seq_length": 512},
        train={"train_iters": 3, "precision": "bf16"},
        runtime={"device": "cuda", "compile": True},
    )
    found, expected, meetings = on_gpus(both_ways, size, config)[0]
    assert meetings == 4 * 4  # for each of 4 layers, in 3 steps and the pass for gradients alone
    assert relative_error(found.losses, expected.losses) < 1e-3
    assert max(gradient_errors(found.gradients, expected.gradients).values()) < 1e-4
