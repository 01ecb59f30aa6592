"""How the devices of a run are linked, and what a layout should know of it.

Tensor parallelism communicates several times a layer, exposed, so its ranks belong on one machine with
NVLink between them. Whether two GPUs have it the driver says, through NVML (the optional package nvidia-ml-py), else
through nvidia-smi; where neither is there, nothing is said.
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
    """Where a rank runs."""

    host: str
    gpu: str | None = None
    """The GPU's UUID; None for a CPU."""
    links: dict[int, str] = field(default_factory=dict)
    """What links it to other tensor-parallel ranks of its machine, by rank, as far as the driver says."""


def gather_rank_locations(mesh: Mesh, device: torch.device) -> list[RankLocation]:
    """The place of every rank, on every rank. A collective call."""
    if mesh.world.size == 1:
        return [RankLocation(socket.gethostname())]
    gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
    places = [RankLocation(*told) for told in gather_json([socket.gethostname(), gpu], mesh.world)]
    own = places[mesh.world.rank]
    first = mesh.world.rank - mesh.tp.rank  # tensor-parallel ranks stand next to each other
    peers = [rank for rank in range(first, first + mesh.tp.size) if rank != mesh.world.rank]
    near = {rank: places[rank].gpu for rank in peers if places[rank].host == own.host and places[rank].gpu}
    links = read_links(own.gpu, near) if own.gpu and near else {}
    every = gather_json(list(links.items()), mesh.world)
    return [replace(place, links=dict(told)) for place, told in zip(places, every)]


def read_links(gpu: str, peers: dict[int, str]) -> dict[int, str]:
    """What links `gpu` to each of `peers` (rank → UUID); empty where the driver does not say."""
    try:
        return _links_by_nvml(gpu, peers)
    except Exception:  # no package, or a driver, container or MIG slice that does not answer
        pass
    try:
        return _links_by_nvidia_smi(gpu, peers)
    except (OSError, subprocess.SubprocessError, LookupError):
        return {}


def _links_by_nvml(gpu: str, peers: dict[int, str]) -> dict[int, str]:
    import pynvml

    pynvml.nvmlInit()
    try:
        own = pynvml.nvmlDeviceGetHandleByUUID(gpu)
        status = {
            rank: pynvml.nvmlDeviceGetP2PStatus(
                own, pynvml.nvmlDeviceGetHandleByUUID(peer), pynvml.NVML_P2P_CAPS_INDEX_NVLINK
            )
            for rank, peer in peers.items()
        }
    finally:
        pynvml.nvmlShutdown()
    return {
        rank: NVLINK if found == pynvml.NVML_P2P_STATUS_OK else PCIE
        for rank, found in status.items()
        if found != pynvml.NVML_P2P_STATUS_UNKNOWN
    }


def _links_by_nvidia_smi(gpu: str, peers: dict[int, str]) -> dict[int, str]:
    def ask(*arguments: str) -> str:
        command = ["nvidia-smi", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout

    numbers = dict(
        reversed(line.split(", "))
        for line in ask("--query-gpu=index,uuid", "--format=csv,noheader").splitlines()
    )
    matrix = parse_topology(ask("topo", "-m"))
    return {rank: matrix[numbers[gpu], numbers[peer]] for rank, peer in peers.items()}


def parse_topology(text: str) -> dict[tuple[str, str], str]:
    """(GPU number, GPU number) → link, from what `nvidia-smi topo -m` prints.

    NV and a number is NVLink; PIX, PXB, PHB, NODE and SYS are ways over PCIe.
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


def topology_notes(layout: Layout, places: Sequence[RankLocation]) -> list[str]:
    """Warnings about tensor-parallel ranks that are far from each other, and a hint where TP runs without SP."""
    size = layout.size.tp
    if size == 1:
        return []
    notes = [*_across_machines(size, places), *_over_pcie(size, places)]
    with_sp = alternative(layout, {"parallel.sequence_parallel": True})
    if not layout.config.parallel.sequence_parallel and with_sp is not None:
        notes.append(_sequence_parallel_hint(layout, with_sp))
    return notes


def _across_machines(size: int, places: Sequence[RankLocation]) -> Iterable[str]:
    for first in range(0, len(places), size):
        hosts = list(dict.fromkeys(place.host for place in places[first : first + size]))
        if len(hosts) > 1:
            each = min(sum(place.host == host for place in places) for host in hosts)
            yield (
                f"warning: tensor-parallel ranks {first} to {first + size - 1} are on {len(hosts)} machines "
                f"({', '.join(hosts)}), and every layer waits for what they exchange; lower "
                f"parallel.tensor_model_parallel_size to {each} or less, and use pipeline_model_parallel_size or "
                "data parallelism between machines"
            )
            return


def _over_pcie(size: int, places: Sequence[RankLocation]) -> Iterable[str]:
    for rank, place in enumerate(places):
        for other, link in sorted(place.links.items()):
            if link == PCIE:
                yield (
                    f"warning: tensor-parallel ranks {rank} and {other} on {place.host} have no NVLink between them: "
                    f"they communicate over PCIe, and every layer waits; lower parallel.tensor_model_parallel_size "
                    f"from {size}, or use pipeline_model_parallel_size or a data_parallel_sharding_strategy, which "
                    "move less"
                )
                return


def _sequence_parallel_hint(layout: Layout, with_sp: Layout) -> str:
    kept, requirements = (
        max(stage.memory.activations for stage in each.stages) for each in (layout, with_sp)
    )
    return (
        "hint: every tensor-parallel rank keeps the whole residual stream; set parallel.sequence_parallel to true, "
        f"which moves little more: activations then take about {requirements / kept:.0%} of what they take now"
    )
