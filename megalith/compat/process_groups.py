"""State of torch.distributed: the default store, process groups and their timeouts, and the flight recorder."""

from __future__ import annotations

import gc
import json
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as c10d
from torch.distributed import (
    ProcessGroup,
    Store,
    destroy_process_group,
    distributed_c10d,
    is_initialized,
)


def default_store() -> Store:
    """Return the store of the default process group."""
    return distributed_c10d._get_default_store()


def process_groups() -> list[ProcessGroup]:
    """Return all process groups of this rank."""
    return list(distributed_c10d._world.pg_map)


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of a process group's future collectives. torch 2.14 made the function public."""
    public = getattr(distributed_c10d, "set_timeout", None)
    (public or distributed_c10d._set_pg_timeout)(timeout, group)


def set_nccl_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout in the options of a ProcessGroupNCCL that is yet to be created."""
    options._timeout = timeout


def flight_recorder() -> list[dict]:
    """Return torch's records of this rank's last collectives, gloo's and NCCL's merged, oldest first.

    A record has profiling_name, process_group, collective_seq_id, p2p_seq_id, is_p2p, retired and time_created_ns.
    """
    entries = []
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            entries += json.loads(dump(includeCollectives=True, onlyActive=False)).get("entries", [])
    return sorted(entries, key=lambda entry: entry["time_created_ns"])


def destroy_groups() -> None:
    """Destroy all process groups, including those whose initialization failed.

    torch numbers the groups, and the numbers are part of the keys by which ranks connect. After a failed
    initialization, torch does not reset the numbers.
    """
    if is_initialized():
        destroy_process_group()
    distributed_c10d._world.group_count = 0


def release_groups() -> None:
    """Destroy all process groups and replace them by None in attributes and dictionaries, so that gloo's threads end.

    For use at interpreter exit: a thread that releases a tensor later, during interpreter shutdown, aborts the process.
    `destroy_process_group` alone does not end the threads of a group that a model, a mesh or a script refers to.
    """
    if is_initialized():
        destroy_process_group()
    gc.collect()
    for table in _tables_of_groups():
        for name in [name for name, value in table.items() if _is_group(value)]:
            table[name] = None


def _tables_of_groups() -> list[dict]:
    """Return the dictionaries that have a process group among their values, including the dictionaries of objects'
    attributes."""
    tables = []
    for holder in gc.get_objects():
        for part in gc.get_referents(holder):
            if _is_group(part):
                tables.append(holder if isinstance(holder, dict) else getattr(holder, "__dict__", {}))
            # The collector does not track each dictionary: one of text and groups is only found by what refers to it.
            elif type(part) is dict and not gc.is_tracked(part) and any(map(_is_group, part.values())):
                tables.append(part)
    return tables


def _is_group(value: Any) -> bool:
    return issubclass(
        type(value), ProcessGroup
    )  # isinstance would call `__class__` of lazily imported modules


def abort_nccl_groups() -> None:
    """Abort the collectives of all NCCL groups, so that kernels and hosts no longer wait for them."""
    for group in reversed(_nccl_groups()):
        group.abort()


def has_nccl_group() -> bool:
    """Return True if one of this rank's process groups uses NCCL."""
    return bool(_nccl_groups())


def _nccl_groups() -> list[ProcessGroup]:
    return [group for group in process_groups() if "nccl" in distributed_c10d.get_backend_config(group)]


def fake_store() -> Store:
    """Register the backend "fake", which simulates the other ranks, and return a store for it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
