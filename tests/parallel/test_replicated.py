"""Replicas: plain parameters whose gradients are summed by bucket, beside the backward pass of the last micro-batch."""

import gc
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from data_job import GPT2, Job, Trained
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from megalith.comm.collectives import Axis
from megalith.config import ParallelConfig
from megalith.parallel.data.data_parallel import prepare_backward, wait_for_gradients
from megalith.parallel.data.replicas import GradientBucket, Replicated
from megalith.parallel.mesh import build_mesh
from megalith.parallel.replication import Replication, record_replication

ORDER = ["layers.1", "layers.0", "embedding"]


def sums_of_a_step(job: Job) -> tuple[list[tuple[str, bool]], list[int]]:
    """For each sum in the order they were begun what it is of, and whether backward had still to give the embedding
    its gradient; and after each micro-batch how many had begun."""
    run, begun, counts = Trained(job), [], []
    assert not any(isinstance(parameter, DTensor) for parameter in run.model.parameters())
    embedding, inner = run.model.embedding.word_embeddings.weight, GradientBucket.start_all_reduce

    def begin(bucket: GradientBucket) -> None:
        waited = bucket.work is None
        inner(bucket)
        if waited and bucket.work is not None:
            name = next(start for start in ORDER if any(each.startswith(start) for each in bucket.names))
            begun.append((name, embedding.grad is None))

    with mock.patch.object(GradientBucket, "start_all_reduce", begin):
        batches = run.micro_batches()
        for number, batch in enumerate(batches):
            prepare_backward([run.model], job.parallel, is_last=number == len(batches) - 1)
            run.model(**batch).backward()
            counts.append(len(begun))
        wait_for_gradients([run.model], job.parallel)
    assert len(begun) == len(ORDER)
    return begun, counts


def test_layers_are_summed_from_the_last_on_while_backward_goes_on(pool):
    for begun, counts in pool.run(sums_of_a_step, Job(GPT2, samples=2), size=2):
        assert begun == [("layers.1", True), ("layers.0", True), ("embedding", False)]
        assert counts == [3]


def test_nothing_is_summed_before_the_last_micro_batch(pool):
    for begun, counts in pool.run(sums_of_a_step, Job(GPT2, samples=6), size=2):
        assert [name for name, _ in begun] == ORDER
        assert counts == [0, 0, 3]


def buckets(job: Job) -> list[list[tuple[str, int]]]:
    model = Trained(job).model
    sizes = {name: 4 * parameter.numel() for name, parameter in model.named_parameters()}
    assert len(sizes) == sum(len(bucket.names) for bucket in model.replication.reducer._buckets)
    return [[(name, sizes[name]) for name in bucket.names] for bucket in model.replication.reducer._buckets]


def test_buckets_hold_the_bytes_asked_for_from_the_last_layer_on(pool):
    job = Job(GPT2).with_parallel(dp_comm_overlap_bucket_size=20_000)
    for rank in pool.run(buckets, job, size=2):
        *layers, _ = rank  # embedding and final norm are the last
        assert {name[:9] for name, _ in layers[0]} == {"layers.1."} and layers[-1][-1][0].startswith(
            "layers.0."
        )
        for bucket in layers[:-1]:
            held = sum(size for _, size in bucket)
            assert held >= 20_000 > held - bucket[-1][1]
        assert 1 < len(layers) < len([name for bucket in layers for name in bucket])


class Pair(nn.Module):
    """Two linears; the second one's bias is used in some passes alone, and the first one's weight is frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)
        self.first.weight.requires_grad_(False)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.5)

    def forward(self, x: torch.Tensor, with_bias: bool) -> torch.Tensor:
        bias = self.second.bias if with_bias else None
        return linear(self.first(x), self.second.weight, bias).sum()


def gradients_of_a_pair(passes: list[bool]) -> tuple[list[bool], dict[str, torch.Tensor | None]]:
    """Which buckets were under way after the passes, each with or without the bias, and the sums."""
    mesh = build_mesh(ParallelConfig(), dist.get_world_size(), "cpu")
    pair = Pair()
    buckets = [GradientBucket(mesh.dp_cp, [f"{name}.weight", f"{name}.bias"]) for name in ("first", "second")]
    replicated = Replicated(pair, buckets)
    for number, with_bias in enumerate(passes):
        replicated.prepare_backward(is_last=number == len(passes) - 1)
        pair(torch.full((4, 3), 1.0 + dist.get_rank()), with_bias).backward()
    under_way = [bucket.work is not None for bucket in buckets]
    replicated.wait()
    assert not any(bucket.work for bucket in buckets)
    return under_way, {name: parameter.grad for name, parameter in pair.named_parameters()}


def test_a_parameter_without_a_gradient_in_the_last_pass_is_summed_after_it(pool):
    """Ranks 0 and 1 give x = 1 and 2, so first(x) is 1.5 · x + 0.5: 2 and 3.5."""
    weight = torch.full((2, 3), 4 * (2.0 + 3.5))
    for under_way, sums in pool.run(gradients_of_a_pair, [True, False], size=2):
        assert under_way == [True, False]
        torch.testing.assert_close(sums["second.weight"], 2 * weight)
        torch.testing.assert_close(sums["second.bias"], torch.full((2,), 2 * 4.0))
        torch.testing.assert_close(sums["first.bias"], torch.full((3,), 2 * 2 * 4.0))
        assert sums["first.weight"] is None
    for under_way, sums in pool.run(gradients_of_a_pair, [False], size=2):
        assert under_way == [True, False] and sums["second.bias"] is None
        torch.testing.assert_close(sums["second.weight"], weight)


def copies_and_owners(parallel: ParallelConfig) -> tuple[int, int, int]:
    """Parameters here, those of them that are copied, and those that this rank owns."""
    run = Trained(Job(GPT2, parallel=parallel))
    shards = run.local.shards.values()
    return len(shards), len(run.local.copies), sum(shard.owned for shard in shards)


def test_the_first_of_the_ranks_that_hold_copies_owns_them(pool):
    (count, copied, owned), *others = pool.run(copies_and_owners, ParallelConfig(), size=2)
    assert copied == owned == count and others == [(count, count, 0)]
    cut = pool.run(copies_and_owners, ParallelConfig(tensor_model_parallel_size=2))
    assert [copied for _, copied, _ in cut] == [count] * 4
    assert cut[0][2] == count > cut[1][2] > 0 and cut[2][2] == cut[3][2] == 0


def test_a_model_that_nobody_needs_is_freed_with_its_hooks():
    """Else each model of a process that makes several, a sweep's or a notebook's, would stay to its end."""
    chunk = nn.Linear(2, 2)
    replicated = Replicated(chunk, [GradientBucket(Axis(2), ["weight", "bias"])])
    record_replication(chunk, Replication(replicated.axes, replicated))
    replicated.prepare_backward(is_last=False)
    del replicated
    chunk(torch.ones(1, 2)).sum().backward()
    freed = weakref.ref(chunk)
    del chunk
    gc.collect()
    assert freed() is None
