"""The mesh: each rank's coordinates along the pipeline, data, context and tensor axes.

Tensor is the fastest axis, then context, data and pipeline, so that the axis that communicates most has adjacent ranks,
usually on one node. With 16 processes and sizes tensor 2, context 2, pipeline 2 and thus data 2:

    rank = ((pp · 2 + dp) · 2 + cp) · 2 + tp

Gradients are reduced over the combined data and context axis, which is also the axis of replicas and of FSDP2's shards.

Experts have another mesh over the ranks of a pipeline stage: the dp · cp · tp ranks are edp replicas of all experts,
each replica distributed over ep ranks, each expert sharded over etp. With 8 ranks per stage, ep 2 and etp 2:

    rank in the stage = (edp · 2 + ep) · 2 + etp

The gradients of experts are reduced over edp, because each token goes to one replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch.distributed import DeviceMesh, init_device_mesh

from megalith.comm.collectives import Axis
from megalith.compat.device_mesh import flatten_mesh, unflatten_mesh
from megalith.config import ParallelConfig
from megalith.config.rules import expert_rules
from megalith.config.rules import parallel_rules as rules
from megalith.config.rules.dynamic_context_rules import context_degrees
from megalith.errors import ConfigError


@dataclass(frozen=True)
class Coordinates:
    """A rank's index along each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """The parallel axes, as seen from this rank."""

    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    dp_cp: Axis
    """Data and context flattened: the ranks over which gradients and token counts are summed."""
    tied: Axis
    """The first and last pipeline stage, which share a tied embedding; size 1 on the stages between."""
    world: Axis
    ep: Axis
    """The ranks that one replica of the experts is distributed over; they exchange tokens."""
    etp: Axis
    """The ranks that each expert is sharded over (expert tensor parallelism)."""
    edp: Axis
    """The ranks that hold replicas, or FSDP shards, of the same experts: expert gradients are summed over them."""
    ep_etp: Axis
    """ep and etp flattened: the ranks of one replica of the experts."""
    cp_tp: Axis
    """Context and tensor flattened: the ranks that share a micro-batch's tokens under sequence parallelism."""
    experts: DeviceMesh | None
    """Mesh of the experts' DTensors: the axes of ("ep", "etp") that are larger than 1. None if neither is."""
    expert_fsdp: DeviceMesh | None
    """Mesh for fully_shard of the experts, over edp. None without replicas, or under no_shard."""
    fsdp: DeviceMesh | None
    """Mesh for fully_shard: dp_cp, or (replicate, shard) under hybrid sharding. None without process groups, or under
    no_shard."""
    context_groups: Mapping[int, Axis] = field(default_factory=dict)
    """Groups of dynamic context parallelism, by size: for each size the aligned group of adjacent data × context ranks
    that contains this rank. Empty without dynamic context parallelism.
    """

    @classmethod
    def alone(cls) -> Mesh:
        """Return a mesh for this process only. Every axis has size 1. Not collective."""
        return cls(*[Axis()] * 12, experts=None, expert_fsdp=None, fsdp=None)

    def describe(self, rank: int) -> Coordinates:
        """Return the coordinates of a rank of the world."""
        rest, tp = divmod(rank, self.tp.size)
        rest, cp = divmod(rest, self.cp.size)
        pp, dp = divmod(rest, self.dp.size)
        return Coordinates(pp, dp, cp, tp)


def build_mesh(
    parallel: ParallelConfig,
    world_size: int,
    device_type: str,
    shard_size: int | None = None,
    has_experts: bool = False,
) -> Mesh:
    """Build the mesh over `world_size` processes and its process groups. Collective over all processes.

    Args:
        parallel: sizes of the axes.
        world_size: number of processes. One process needs no process group: without one, every axis has size 1 and
            `fsdp` is None.
        device_type: "cuda" or "cpu".
        shard_size: number of data × context ranks that a parameter is sharded over; the shards are replicated over the
            rest. None uses the configuration (`rules.shard_size`).
        has_experts: build the axes of the experts too.

    Raises:
        ConfigError: the sizes do not divide the number of processes.
    """
    dp = rules.data_parallel_size(parallel, world_size)
    if world_size == 1 and not dist.is_initialized():
        return Mesh.alone()
    pp, cp, tp = (
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
        parallel.tensor_model_parallel_size,
    )
    if shard_size is None:
        shard_size = rules.shard_size(parallel, world_size)
    if dp * cp % shard_size:
        raise ConfigError(
            f"data ({dp}) × context ({cp}) = {dp * cp} ranks are not divisible into shards of {shard_size}; choose "
            f"a divisor of {dp * cp}"
        )
    root = init_device_mesh(
        device_type,
        (pp, dp, cp, tp),
        mesh_dim_names=("pp", "dp", "cp", "tp"),
        backend_override=_groups_of_their_own(device_type, "cp"),
    )
    dp_cp = flatten_mesh(root["dp", "cp"], "dp_cp")
    fsdp = dp_cp
    if parallel.data_parallel_sharding_strategy == "no_shard":
        fsdp = None
    elif shard_size < dp * cp:
        fsdp = unflatten_mesh(dp_cp, (dp * cp // shard_size, shard_size), ("replicate", "shard"))
    direct = parallel.copy_engine_axes if device_type == "cuda" else set()
    if direct:
        import megalith.parallel.overlap.copy_engine_heads  # noqa: F401 (registers operators)
    axes = {name: replace(axis_of(root[name]), direct=name in direct) for name in ("pp", "dp", "cp", "tp")}
    names = ("ep", "etp", "edp", "ep_etp", "cp_tp")
    experts = {name: Axis() for name in names} | {"experts": None, "expert_fsdp": None}
    if has_experts:
        experts = _expert_axes(parallel, world_size, device_type)
        experts["cp_tp"] = axis_of(flatten_mesh(root["cp", "tp"], "cp_tp"))
    return Mesh(
        **axes,
        dp_cp=axis_of(dp_cp),
        tied=_tied(axes["pp"]),
        world=Axis(world_size, dist.get_rank(), dist.group.WORLD, dist.group.WORLD.group_name),
        **experts,
        fsdp=fsdp,
        context_groups=_context_groups(axis_of(dp_cp), device_type)
        if parallel.dynamic_context_parallel
        else {},
    )


def _context_groups(dp_cp: Axis, device_type: str) -> dict[int, Axis]:
    """Return this rank's group of each size for dynamic context parallelism. Each has its own process group."""
    backend = _groups_of_their_own(device_type, "context")["context"]
    groups = {1: Axis()}
    for size in context_degrees(dp_cp.size, smallest=2):
        first = dp_cp.rank // size * size
        ranks = dist.get_process_group_ranks(dp_cp.group)[first : first + size]
        group = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
        groups[size] = Axis(size, dp_cp.rank - first, group, group.group_name)
    return groups


def _expert_axes(parallel: ParallelConfig, world_size: int, device_type: str) -> dict[str, Any]:
    """Return the fields of Mesh that describe the axes of experts."""
    pp, ep = parallel.pipeline_model_parallel_size, parallel.expert_model_parallel_size
    etp, edp = (
        parallel.expert_tensor_parallel_size,
        expert_rules.expert_data_parallel_size(parallel, world_size),
    )
    root = init_device_mesh(
        device_type,
        (pp, edp, ep, etp),
        mesh_dim_names=("pp", "edp", "ep", "etp"),
        backend_override=_groups_of_their_own(device_type, "ep"),
    )
    sharded = tuple(name for name, size in (("ep", ep), ("etp", etp)) if size > 1)
    fsdp, shards = root["edp"], expert_rules.expert_shard_size(parallel, world_size)
    if edp == 1 or parallel.data_parallel_sharding_strategy == "no_shard":
        fsdp = None
    elif shards < edp:
        fsdp = unflatten_mesh(fsdp, (edp // shards, shards), ("expert_replicate", "expert_shard"))
    return dict(
        ep=axis_of(root["ep"]),
        etp=axis_of(root["etp"]),
        edp=axis_of(root["edp"]),
        ep_etp=axis_of(flatten_mesh(root["ep", "etp"], "ep_etp")),
        experts=root[sharded] if sharded else None,
        expert_fsdp=fsdp,
    )


def _groups_of_their_own(device_type: str, *names: str) -> dict[str, str]:
    """Return the `backend_override` of `init_device_mesh` with which each of these dimensions gets its own process
    group.

    Without it, dimensions that contain all ranks share the default group. NCCL runs a group's collectives one after the
    other, so the token exchanges that the next layer needs would wait for the reduce-scatter of another layer's
    gradients.
    """
    # The default group's backends; a dry run has other ones than its devices suggest.
    backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
    return dict.fromkeys(names, backends[device_type])


def axis_of(mesh: DeviceMesh) -> Axis:
    """Return the axis of a mesh with one dimension."""
    if mesh.size() == 1:
        return Axis()
    group = mesh.get_group()
    return Axis(mesh.size(), mesh.get_local_rank(), group, group.group_name, mesh)


def _tied(pp: Axis) -> Axis:
    if pp.size <= 2:
        return pp
    ranks = dist.get_process_group_ranks(pp.group)
    stage_size = ranks[1] - ranks[0]
    groups = [  # new_group is collective over the world, also for groups of other ranks
        dist.new_group([first, first + stage_size * (pp.size - 1)]) for first in range(stage_size)
    ]
    if 0 < pp.rank < pp.size - 1:
        return Axis()
    group = groups[ranks[0]]
    return Axis(2, min(pp.rank, 1), group, group.group_name)
