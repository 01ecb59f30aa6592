"""Contract of torch.distributed's private state."""

import gc
import weakref
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megalith.compat import process_groups


def test_the_default_store_is_shared_with_the_process_group(single_process_group):
    process_groups.default_store().set("key", "value")
    assert process_groups.default_store().get("key") == b"value"


def test_process_groups_are_all_of_this_rank_and_take_a_timeout(single_process_group):
    group = dist.new_group([0])
    assert set(process_groups.process_groups()) == {dist.group.WORLD, group}
    process_groups.set_timeout(group, timedelta(seconds=77))
    assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)


def test_the_timeout_of_nccl_options_is_set():
    # The attribute is one of the options of every backend.
    kind = dist.ProcessGroupNCCL.Options if dist.is_nccl_available() else dist.ProcessGroupGloo._Options
    options = kind()
    process_groups.set_nccl_timeout(options, timedelta(seconds=5))
    assert options._timeout == timedelta(seconds=5)


def test_the_flight_recorder_has_records_of_collectives(monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "16")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(2))
        records = process_groups.flight_recorder()
    finally:
        dist.destroy_process_group()
    keys = {"profiling_name", "process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "retired"}
    assert all(keys | {"time_created_ns"} <= record.keys() for record in records)


def test_a_fake_store_makes_a_job_of_one_process():
    dist.init_process_group("fake", store=process_groups.fake_store(), rank=1, world_size=4)
    try:
        dist.all_reduce(torch.ones(2))
        assert dist.get_world_size() == 4
    finally:
        dist.destroy_process_group()


def test_groups_after_a_failed_initialization_have_the_names_of_the_first_ones():
    names = []
    for _ in range(2):
        dist.distributed_c10d._world.group_count += 1  # as after an initialization that has failed
        process_groups.destroy_groups()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        names.append((dist.group.WORLD.group_name, dist.new_group([0]).group_name))
        process_groups.abort_nccl_groups()  # there are none
        process_groups.destroy_groups()
    assert names[0] == names[1] and not dist.is_initialized()


@pytest.mark.parametrize("destroyed", [False, True])
def test_released_groups_end_though_objects_and_meshes_refer_to_them(destroyed):
    gc.collect()
    gc.freeze()  # what other tests have left would be searched for seconds
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    holder = SimpleNamespace(group=dist.new_group([0]), rank=3)
    tables = ({"group": holder.group}, {"group": holder.group, "other": [1]})
    gc.collect()  # which no longer tracks dictionaries of text and groups then, the mesh's among them
    groups = [weakref.ref(group) for group in process_groups.process_groups()]
    if destroyed:
        dist.destroy_process_group()
    process_groups.release_groups()
    assert mesh and len(groups) == 2 and not [group for group in groups if group()]
    assert (holder, *tables) == (
        SimpleNamespace(group=None, rank=3),
        {"group": None},
        {"group": None, "other": [1]},
    )
    assert not dist.is_initialized()
    process_groups.release_groups()  # there are none


def test_groups_of_gloo_are_not_of_nccl(single_process_group):
    assert not process_groups.has_nccl_group()
