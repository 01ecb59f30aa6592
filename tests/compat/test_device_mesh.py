"""Contract of the private methods of DeviceMesh."""

import pytest
import torch.distributed as dist
from torch.distributed import init_device_mesh

from megalith.compat.device_mesh import flatten_mesh, unflatten_mesh
from megalith.compat.process_groups import fake_store


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", store=fake_store(), rank=5, world_size=8)
    yield
    dist.destroy_process_group()


def test_flatten_mesh_joins_dimensions_in_order(fake_ranks):
    root = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "cp"))
    flat = flatten_mesh(root["dp", "cp"], "dp_cp")
    assert flat.mesh_dim_names == ("dp_cp",) and flat.mesh.tolist() == [4, 5, 6, 7]
    assert flat.get_local_rank() == 1 and dist.get_process_group_ranks(flat.get_group()) == [4, 5, 6, 7]


def test_unflatten_mesh_splits_the_dimension_in_order(fake_ranks):
    mesh = unflatten_mesh(
        init_device_mesh("cpu", (8,), mesh_dim_names=("dp",)), (2, 4), ("replicate", "shard")
    )
    assert mesh.mesh_dim_names == ("replicate", "shard") and mesh.mesh.tolist() == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    assert dist.get_process_group_ranks(mesh["shard"].get_group()) == [4, 5, 6, 7]
    assert dist.get_process_group_ranks(mesh["replicate"].get_group()) == [1, 5]
