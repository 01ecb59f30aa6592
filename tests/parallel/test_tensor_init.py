"""A parameter starts from the same values in every layout, each rank making its slice of the global tensor."""

from unittest import mock

import pytest
import torch
from tensor_job import GPT2, LLAMA
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megalith.config import ModelConfig, ParallelConfig
from megalith.models import init
from megalith.models.transformer import Transformer
from megalith.parallel.mesh import build_mesh
from megalith.parallel.tensor.apply_tensor import apply_tensor

SMALL_BLOCKS = 100  # elements, so that the slices cross blocks


def initial(model: ModelConfig, world: int, parallel: ParallelConfig, shard_size: int | None) -> dict:
    """The whole parameters by name, gathered from all ranks."""
    mesh = build_mesh(parallel, world, "cpu", shard_size)
    transformer = Transformer(model, device="meta")
    apply_tensor(transformer, mesh.tp, parallel.sequence_parallel)
    if mesh.fsdp is not None:
        for layer in transformer.layers.values():
            fully_shard(layer, mesh=mesh.fsdp)
        fully_shard(transformer, mesh=mesh.fsdp)
    transformer.to_empty(device="cpu")
    with mock.patch.object(init, "BLOCK", SMALL_BLOCKS):
        init.initialize(transformer, model, seed=4)
    parameters = {}
    for name, parameter in transformer.named_parameters():
        parameters[name] = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    return parameters


UNEVEN = GPT2.model_copy(update={"make_vocab_size_divisible_by": 1})
SHARED = LLAMA.model_copy(update={"num_query_groups": 1})


MODELS = {"gpt2": GPT2, "uneven": UNEVEN, "llama": LLAMA, "one group": SHARED}
CASES = [(name, 4, 1, None) for name in MODELS]  # tp, cp, shard_size
CASES += [("llama", 2, 1, 1), ("uneven", 2, 2, None), ("uneven", 1, 1, 2)]


@pytest.fixture(scope="module")
def everywhere(pool):
    """What each of four ranks starts from, by model and layout."""
    cases = {}
    for name, tp, cp, shard_size in CASES:
        sizes = {"tensor_model_parallel_size": tp, "context_parallel_size": cp}
        parallel = ParallelConfig(**sizes, data_parallel_sharding_strategy="optim")
        cases[name, tp, cp, shard_size] = (MODELS[name], 4, parallel, shard_size)
    return pool.run_cases(initial, cases)


@pytest.mark.parametrize("name, tp, cp, shard_size", CASES)
def test_every_layout_starts_from_the_same_weights(everywhere, name, tp, cp, shard_size):
    alone = initial(MODELS[name], 1, ParallelConfig(), None)
    for parameters in everywhere[name, tp, cp, shard_size]:
        assert parameters.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.equal(parameters[name], value), name


def test_rows_are_those_of_the_whole_tensor():
    shape = torch.Size([7, 30, 5])
    with mock.patch.object(init, "BLOCK", SMALL_BLOCKS):
        whole = init.normal_rows("a", shape, 0.5, 1, 0, 7)
        for first in range(7):
            for rows in range(8 - first):
                part = init.normal_rows("a", shape, 0.5, 1, first, rows)
                assert torch.equal(part, whole[first : first + rows])
    assert abs(init.normal_rows("a", torch.Size([400, 400]), 0.5, 1, 0, 400).std() - 0.5) < 0.01
