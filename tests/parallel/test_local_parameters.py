"""Plain parameters in the place of DTensors: what the model computes with, and what a checkpoint knows of them."""

import torch
from parity.parity_cases import run_config
from torch.distributed.tensor import DTensor

from megalith.models.transformer import Transformer
from megalith.parallel.apply import apply
from megalith.parallel.mesh import build_mesh
from megalith.parallel.shards import LocalParameters, dtensor_of


def built(layout: str, processes: int) -> tuple[Transformer, LocalParameters]:
    config = run_config("gpt2", layout, "")
    mesh = build_mesh(config.parallel, processes, "cpu")
    model = Transformer(config.model, device=torch.device("meta"))
    [chunk] = apply(model, config, mesh, torch.device("cpu"))
    return chunk, LocalParameters([chunk])


def unlike(layout: str) -> list[str]:
    """Parameters that are not plain ones on the storage of a DTensor, or that the optimizer has not got."""
    chunk, parameters = built(layout, 2)
    stepped = dict(parameters.named)
    return [
        name
        for name, parameter in chunk.named_parameters()
        if isinstance(parameter, DTensor)
        or not isinstance(dtensor_of(parameter), DTensor)
        or parameter.data_ptr() != dtensor_of(parameter).to_local().data_ptr()
        or parameter is not stepped[name]
        or parameters.shards[name].shape != tuple(dtensor_of(parameter).shape)
    ]


def test_tensor_parallel_layers_have_plain_shards_and_boxes_of_the_whole(pool):
    assert pool.run(unlike, "tp2-sp", size=2) == [[]] * 2


def kinds(layout: str) -> set[bool]:
    return {isinstance(parameter, DTensor) for parameter in built(layout, 2)[0].parameters()}


def test_what_fsdp_shards_stays_as_it_is(pool):
    assert pool.run(kinds, "dp2-zero2", size=2) == [{True}] * 2
