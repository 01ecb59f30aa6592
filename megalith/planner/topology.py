"""Links between the devices of a run, and warnings about layouts that do not suit them.

Tensor parallelism has exposed communication several times per layer, so its ranks should be on one machine with NVLink.
The driver reports links through NVML (the optional package nvidia-ml-py) or nvidia-smi. If neither is available, there
are no warnings about links.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from megalith.comm.collectives import gather_json
from megalith.parallel.mesh import Mesh
from megalith.planner.layout import Layout, alternative

NVLINK, PCIE = "NVLink", "PCIe"


@dataclass(frozen=True)
class RankLocation:
    """The machine and the GPU on which a rank runs."""

    host: str
    gpu: str | None = None
    """The GPU's UUID; None for a CPU."""
    links: dict[int, str] = field(default_factory=dict)
    """Link to each of the other tensor-parallel ranks on the same machine, by rank. Unknown links are missing."""


def gather_rank_locations(mesh: Mesh, device: torch.device) -> list[RankLocation]:
    """Return the locations of all ranks, on every rank. A collective call."""
    if mesh.world.size == 1:
        return [RankLocation(socket.gethostname())]
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
    gathered = gather_json([socket.gethostname(), gpu], mesh.world)
    locations = [RankLocation(*each) for each in gathered]
    local = locations[mesh.world.rank]
    first = mesh.world.rank - mesh.tp.rank  # tensor-parallel ranks are consecutive
    peers = [rank for rank in range(first, first + mesh.tp.size) if rank != mesh.world.rank]
    on_host = {
        rank: locations[rank].gpu
        for rank in peers
        if locations[rank].host == local.host and locations[rank].gpu
    }
    links = read_links(local.gpu, on_host) if local.gpu and on_host else {}
    all_links = gather_json(list(links.items()), mesh.world)
    return [replace(location, links=dict(pairs)) for location, pairs in zip(locations, all_links)]


def read_links(gpu: str, peers: dict[int, str]) -> dict[int, str]:
    """Return the link from `gpu` to each of `peers` (rank → UUID), by rank. Empty if the driver does not report
    links.
    """
    try:
        return _links_by_nvml(gpu, peers)
    except Exception:  # no package, or no answer from the driver (container, MIG)
        pass
    try:
        return _links_by_nvidia_smi(gpu, peers)
    except (OSError, subprocess.SubprocessError, LookupError):
        return {}


def _links_by_nvml(gpu: str, peers: dict[int, str]) -> dict[int, str]:
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(gpu)
        status = {
            rank: pynvml.nvmlDeviceGetP2PStatus(
                handle, pynvml.nvmlDeviceGetHandleByUUID(peer), pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            )
            for rank, peer in peers.items()
        }
    finally:
        pynvml.nvmlShutdown()
    return {
        rank: NVLINK if state == pynvml.NVML_P2P_STATUS_OK else PCIE
        for rank, state in status.items()
        if state != pynvml.NVML_P2P_STATUS_UNKNOWN
    }


def _links_by_nvidia_smi(gpu: str, peers: dict[int, str]) -> dict[int, str]:
    def query(*arguments: str) -> str:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    indices = dict(
        reversed(line.split(", "))
        for line in query("--query-gpu=index,uuid", "--format=csv,noheader").splitlines()
    )
    matrix = parse_topology(query("topo", "-m"))
    return {rank: matrix[indices[gpu], indices[peer]] for rank, peer in peers.items()}


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """Parse the output of `nvidia-smi topo -m` into (GPU number, GPU number) → link.

    NV with a number is NVLink. PIX, PXB, PHB, NODE and SYS are connections over PCIe.
    """
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    heading = next(number for number, line in enumerate(lines) if line and line[0] == "GPU0")
    gpus = [name for name in lines[heading] if name.startswith("GPU") and name[3:].isdigit()]
    links = {}
    for line in lines[heading + 1 :]:
        if line and line[0] in gpus:
            for other, cell in zip(gpus, line[1:]):
                links[line[0][3:], other[3:]] = NVLINK if cell.startswith("NV") else PCIE
    return links


def topology_notes(layout: Layout, locations: Sequence[RankLocation]) -> list[str]:
    """Return warnings about slow links between tensor-parallel ranks, and a hint if TP is used without SP."""
    size = layout.size.tp
    if size == 1:
        return []
    notes = [*_across_machines(size, locations), *_over_pcie(size, locations)]
    with_sp = alternative(layout, {"parallel.sequence_parallel": True})
    if not layout.config.parallel.sequence_parallel and with_sp is not None:
        notes.append(_sequence_parallel_hint(layout, with_sp))
    return notes


def _across_machines(size: int, locations: Sequence[RankLocation]) -> Iterable[str]:
    for first in range(0, len(locations), size):
        hosts = list(dict.fromkeys(location.host for location in locations[first : first + size]))
        if len(hosts) > 1:
            each = min(sum(location.host == host for location in locations) for host in hosts)
            yield (
                f"warning: tensor-parallel ranks {first} to {first + size - 1} are on {len(hosts)} machines "
                f"({', '.join(hosts)}), and every layer waits for what they exchange; lower "
                f"parallel.tensor_model_parallel_size to {each} or less, and use pipeline_model_parallel_size or "
                "data parallelism between machines"
            )
            return


def _over_pcie(size: int, locations: Sequence[RankLocation]) -> Iterable[str]:
    for rank, location in enumerate(locations):
        for other, link in sorted(location.links.items()):
            if link == PCIE:
                yield (
                    f"warning: tensor-parallel ranks {rank} and {other} on {location.host} have "
                    "no NVLink between them, so they communicate over PCIe and every layer "
                    f"waits; lower parallel.tensor_model_parallel_size from {size}, or use "
                    "pipeline or sharded data parallelism, which communicate less"
                )
                return


def _sequence_parallel_hint(layout: Layout, with_sp: Layout) -> str:
    kept, requirements = (
        max(stage.memory.activations for stage in each.stages) for each in (layout, with_sp)
    )
    return (
        "hint: every tensor-parallel rank keeps the whole residual stream. With "
        f"parallel.sequence_parallel true, activations take about {requirements / kept:.0%} of "
        "that memory, for little more communication"
    )
