"""The links between devices, and what is said of a layout that uses bad ones."""

import sys
from types import SimpleNamespace

from layout_job import large

from megalith.planner.topology import RankLocation, parse_topology, read_links, topology_notes

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\tSYS\t0-15\t0\t\tN/A
GPU1\tNV18\t X \tSYS\tPXB\t0-15\t0\t\tN/A
GPU2\tPIX\tSYS\t X \tSYS\t0-15\t1\t\tN/A
NIC0\tSYS\tPXB\tSYS\t X

Legend:

  X    = Self
"""


def test_matrix_of_nvidia_smi_is_read():
    links = parse_topology(TOPOLOGY)
    assert links["0", "1"] == links["1", "0"] == "NVLink"
    assert links["0", "2"] == links["1", "2"] == "PCIe"
    assert all(number in "012" for pair in links for number in pair)


def test_links_are_asked_of_nvml_by_uuid(monkeypatch):
    nvml = SimpleNamespace(
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        NVML_P2P_STATUS_UNKNOWN=6,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetP2PStatus=lambda own, peer, index: {"GPU-b": 0, "GPU-c": 5, "GPU-d": 6}[peer],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    links = read_links("GPU-a", {1: "GPU-b", 2: "GPU-c", 3: "GPU-d"})
    assert links == {1: "NVLink", 2: "PCIe"}  # of the fourth the driver knows nothing


def test_nothing_is_said_where_no_driver_answers(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_links("GPU-a", {1: "GPU-b"}) == {}


def test_tensor_parallel_ranks_on_several_machines_are_warned_of():
    layout = large(4, tensor_model_parallel_size=4, sequence_parallel=True)
    (note,) = topology_notes(
        layout, [RankLocation("a"), RankLocation("a"), RankLocation("b"), RankLocation("b")]
    )
    assert note.startswith("warning: tensor-parallel ranks 0 to 3 are on 2 machines (a, b)")
    assert "lower parallel.tensor_model_parallel_size to 2" in note


def test_tensor_parallel_ranks_without_nvlink_are_warned_of():
    layout = large(2, tensor_model_parallel_size=2, sequence_parallel=True)
    places = [RankLocation("a", "GPU-x", {1: "PCIe"}), RankLocation("a", "GPU-y", {0: "PCIe"})]
    (note,) = topology_notes(layout, places)
    assert "ranks 0 and 1 on a have no NVLink between them" in note
    linked = [RankLocation("a", "GPU-x", {1: "NVLink"}), RankLocation("a", "GPU-y", {0: "NVLink"})]
    assert topology_notes(layout, linked) == []


def test_pipeline_between_machines_is_nothing_to_warn_of():
    assert (
        topology_notes(large(2, pipeline_model_parallel_size=2), [RankLocation("a"), RankLocation("b")]) == []
    )


def test_tensor_parallelism_without_sequence_parallelism_gets_a_hint_with_its_gain():
    (note,) = topology_notes(large(2, tensor_model_parallel_size=2), [RankLocation("a"), RankLocation("a")])
    assert note.startswith("hint:") and "With parallel.sequence_parallel true" in note
    assert "90% of that memory" in note
